"""Two ways through the same weights: the bridge, and a plain Hugging Face copy.

The bridge shows patterns at its hook points, and takes a multiple of the time. The copy has no hook points and attends in
sdpa: rows go through it where the self-test finds that it gives what the bridge gives, nobody asks for patterns, and nobody
touched the bridge: hooks on it must fire, and other weights in it must count.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from jaxtyping import Float
from torch import Tensor
from torch.nn import Module

from ._cache import cache_argument
from ._rows import PatternHook, ZHook, eval_mode

Use = Callable[[Tensor], Tensor | None]


class Way:
    """A model as packed rows run through it: what is called, and the modules that are hooked.

    Attributes:
        model: in eval mode for each forward, and put back.
        blocks: its layers, all of them.
        attentions: layer -> its attention, where it has one.
        norm: the final norm.
    """

    model: Module
    blocks: Sequence[Module]
    attentions: dict[int, Module]
    norm: Module
    n_heads: int

    def forward(self, tokens: Tensor, positions: Tensor, cache, mask: Tensor, keep: Tensor | None) -> Float[Tensor, "row vocabulary"]:
        """Logits of rows `[1, row]` over a cache, or of those to keep alone; to be called within `hooks`."""
        raise NotImplementedError

    def on_z(self, layer: int, use: Use):
        """Give z of a layer to `use` and go on with what comes back; returns the hook's handle."""
        raise NotImplementedError

    def on_pattern(self, layer: int, use: Use):
        """Give the pattern of a layer to `use`; returns the hook's handle."""
        raise NotImplementedError

    @contextmanager
    def hooks(self, mask: Callable[[int], Tensor] | None = None, z_hook: ZHook | None = None, on_pattern: PatternHook | None = None) -> Iterator[None]:
        """Our hooks, for one forward: removed whatever happens; those of others are untouched.

        z and patterns are seen flat: `[row, head, d_head]` and `[head, row, key]`, a batch's rows one
        after the other.
        """
        fired: dict[str, int] = {}
        with ExitStack() as stack:
            stack.enter_context(eval_mode(self.model))

            def watch(name: str, point: Callable, layer: int, use: Use) -> None:
                def counted(out: Tensor) -> Tensor | None:
                    fired[name] += 1
                    return use(out)

                fired[name] = 0
                stack.callback(point(layer, counted).remove)

            for layer, attention in self.attentions.items():
                if mask is not None:
                    masked = lambda module, args, kwargs, layer=layer: (args, dict(kwargs, attention_mask=mask(layer)))  # noqa: E731
                    stack.callback(attention.register_forward_pre_hook(masked, with_kwargs=True).remove)
                if z_hook is not None:
                    watch(f"blocks.{layer}.attn.hook_z", self.on_z, layer, lambda out, layer=layer: self._edited(layer, out, z_hook))
                if on_pattern is not None:
                    watch(f"blocks.{layer}.attn.hook_pattern", self.on_pattern, layer, lambda out, layer=layer: on_pattern(layer, out.transpose(0, 1).flatten(1, 2)))
            yield
            for name, count in fired.items():
                if count != 1:  # OPT and GPT-J booted in sdpa never come by their patterns, without a word
                    raise RuntimeError(f"hook {name} fired {count} times in one forward, not once; boot the model in eager attention")

    def _edited(self, layer: int, out: Tensor, z_hook: ZHook) -> Tensor:
        """Flat or split, the layout is head-major everywhere: view, edit, shape back."""
        return z_hook(layer, out.reshape(out.shape[0] * out.shape[1], self.n_heads, -1)).reshape(out.shape)


class Bridged(Way):
    """Through the bridge: z and patterns at its hook points.

    Args:
        bridge: a `TransformerBridge`.
        z_points: layer -> where its z is.
        n_heads: of a layer.
    """

    def __init__(self, bridge, z_points: dict[int, Module], n_heads: int):
        self.bridge, self.z_points, self.n_heads = bridge, z_points, n_heads
        self.model, self.blocks, self.norm = bridge.original_model, bridge.blocks, bridge.ln_final
        self.attentions = {layer: bridge.blocks[layer].attn for layer in z_points}
        modules = list({id(m): m for part in (bridge, self.model) for m in part.modules()}.values())
        self._hooks = [hooks for m in modules for hooks in (m._forward_pre_hooks, m._forward_hooks, m._backward_pre_hooks, m._backward_hooks)]
        self._parts = [(parts, name, part) for m in self.model.modules() for parts in (m._modules, m._parameters) for name, part in parts.items()]

    @property
    def touched(self) -> bool:
        """Whether somebody has hooks on the bridge or its model, or put other modules or weights into the model.

        The bridge's own hooks, wired at its first forward, do not count. Weights changed in place are the copy's as well.
        """
        theirs = (hook for hooks in filter(None, self._hooks) for hook in hooks.values())
        return any(not (getattr(hook, "__module__", None) or "").startswith("transformer_lens.model_bridge") for hook in theirs) or any(
            parts.get(name) is not part for parts, name, part in self._parts)

    def forward(self, tokens, positions, cache, mask, keep):
        given = {} if keep is None else {"logits_to_keep": keep}
        return self.bridge(tokens, past_key_values=cache, position_ids=positions, attention_mask=mask, **given)[0]

    def on_z(self, layer, use):
        return self.z_points[layer].register_forward_hook(lambda module, args, out: use(out))

    def on_pattern(self, layer, use):
        return self.attentions[layer].hook_pattern.register_forward_hook(lambda module, args, out: use(out))

    @contextmanager
    def hooks(self, mask=None, z_hook=None, on_pattern=None):
        with warnings.catch_warnings(), ExitStack() as stack:
            # the bridge still hands its cache over under the old names
            warnings.filterwarnings("ignore", message=".*(past_key_values|cache_params)", category=FutureWarning)
            for handle in repair_cache_argument(self.bridge, list(self.attentions)):
                stack.callback(handle.remove)
            stack.enter_context(super().hooks(mask, z_hook, on_pattern))
            yield


class Copied(Way):
    """Through the plain copy: z at the input of its output projections; it shows no patterns.

    Args:
        plain: a weight-sharing copy of the Hugging Face model.
        blocks: its layers.
        attentions: layer -> its attention.
        projections: layer -> its output projection.
        norm: its final norm.
        n_heads: of a layer.
    """

    def __init__(self, plain: Module, blocks: list[Module], attentions: dict[int, Module], projections: dict[int, Module], norm: Module, n_heads: int):
        self.model, self.blocks, self.attentions, self.projections, self.norm, self.n_heads = plain, blocks, attentions, projections, norm, n_heads
        self.argument = cache_argument(plain)

    def forward(self, tokens, positions, cache, mask, keep):
        given = {} if keep is None else {"logits_to_keep": keep}
        return self.model(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=True, **{self.argument: cache}, **given).logits[0]

    def on_z(self, layer, use):
        return self.projections[layer].register_forward_pre_hook(lambda module, args: (use(args[0]), *args[1:]))


def repair_cache_argument(bridge, layers: list[int]) -> list:
    """transformers 5.24 hands its layers their cache as `cache`; bridges up to 4.3 read
    `past_key_values` (linear attention: `cache_params`) and, finding none, would attend to the lone
    token without a word."""

    def fill(module, args, kwargs, name):
        if kwargs.get(name) is None and kwargs.get("cache") is not None:
            kwargs = dict(kwargs, **{name: kwargs["cache"]})
        return args, kwargs

    parts = [(bridge.blocks[layer].attn, "past_key_values") for layer in layers]
    parts += [(block.linear_attn, "cache_params") for block in bridge.blocks if hasattr(block, "linear_attn")]
    return [part.register_forward_pre_hook(lambda m, a, k, name=name: fill(m, a, k, name), with_kwargs=True) for part, name in parts]
