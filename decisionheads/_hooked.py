"""What the engine needs of a hooked model: one packed forward over a read-only prefix.

`Hooked` wraps a `TransformerBridge` and knows four things about it: where each layer's z is (the
input of the output projection), where its attention mask comes in, how far each layer sees, and
how a key-value cache reaches its attention. Nothing here decides *what* to change (see
`interventions`) or *which* rows to run (see `branches`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ._unembed import LIMIT, Unembedding, same_weight
from .errors import InputError

ZHook = Callable[[int, Tensor], Tensor]
BlockedReads = Callable[[int], Tensor | None]


@dataclass(frozen=True)
class Prefix:
    """Keys and values of a text, computed once and never changed.

    Attributes:
        ids: token ids `[position]` whose keys and values are held.
        layers: for each layer `(keys, values)`, each `[1, kv_head, position, d_head]`.
        logits: float32 `[wanted, vocabulary]` at the `positions` asked for, from the plain model
            where there is one: an independent reference for the clean rows.
        positions: the positions of `logits`.
    """

    ids: Int[Tensor, " position"]
    layers: tuple[tuple[Tensor, Tensor], ...]
    logits: Float[Tensor, "wanted vocabulary"]
    positions: tuple[int, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.ids)


def read_only_cache(prefix: Prefix, length: int):
    """A transformers cache over the first `length` positions that forgets whatever is added."""
    from transformers.cache_utils import Cache, DynamicLayer

    class ReadOnlyLayer(DynamicLayer):
        """Returns prefix and new keys side by side without keeping the new ones."""

        def update(self, key_states, value_states, *args, **kwargs):
            return (torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2))

    layers = []
    for keys, values in prefix.layers:
        layer = ReadOnlyLayer()
        layer.keys, layer.values = keys[:, :, :length], values[:, :, :length]
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        layers.append(layer)
    return Cache(layers=layers)


def layer_windows(config, n_layers: int) -> tuple[int | None, ...]:
    """How many positions back each layer sees, itself included; None where it sees everything."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return (None,) * n_layers
    return (window,) * n_layers


def _repair_cache_argument(bridge, layers: list[int]) -> list:
    """transformers 5.24 hands attention its cache as `cache`; bridges up to 4.3 read
    `past_key_values` and, finding none, would attend to the lone token without a word."""

    def fill(module, args, kwargs):
        if kwargs.get("past_key_values") is None and kwargs.get("cache") is not None:
            kwargs = dict(kwargs, past_key_values=kwargs["cache"])
        return args, kwargs

    return [bridge.blocks[layer].attn.register_forward_pre_hook(fill, with_kwargs=True) for layer in layers]


class Hooked:
    """A `TransformerBridge` seen through its z, its masks and its cache.

    Args:
        bridge: the bridge; it is never changed beyond hooks that are removed after every call.
        plain: optional weight-sharing copy of the Hugging Face model, used for prefills.
    """

    def __init__(self, bridge, plain=None):
        self.bridge, self.plain = bridge, plain
        names = [f"blocks.{i}.attn.hook_z" for i in range(bridge.cfg.n_layers)]
        self.layers = [i for i, name in enumerate(names) if name in bridge.hook_dict]
        self.n_layers, self.n_heads = bridge.cfg.n_layers, bridge.cfg.n_heads
        if len(self.layers) != self.n_layers:
            missing = sorted(set(range(self.n_layers)) - set(self.layers))
            raise ValueError(
                f"layers {missing} of {bridge.cfg.model_name} have no attention heads (no hook_z): "
                "models with layers that are not attention are not supported")
        self.z_points = [bridge.hook_dict[name] for name in names]
        self.config = bridge.original_model.config
        self.windows = layer_windows(self.config, self.n_layers)
        self.d_head = bridge.cfg.d_head
        self.vocabulary = self.config.get_text_config().vocab_size
        parameter = next(bridge.original_model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.limit = LIMIT[self.dtype]
        self.unembedding = Unembedding(bridge, self.limit)

    # -- output projection -------------------------------------------------------------------

    def output_projection(self, layer: int) -> torch.nn.Module:
        """The Hugging Face module that maps z to the residual stream: in the plain copy, found by
        its shared weight, where there is one; else the bridge's own."""
        component = self.bridge.blocks[layer].attn.o
        return component.original_component if self.plain is None else same_weight(self.plain, component)

    @torch.no_grad()
    def head_outputs(self, layer: int, z: Float[Tensor, "*row head d_head"]) -> Float[Tensor, "*row head d_model"]:
        """What each head adds to the residual stream; b_O, which belongs to no head, left out."""
        spread = torch.diag_embed(z.transpose(-1, -2)).movedim(-3, -1)  # [*row, head, head, d_head], zero off the diagonal
        projection = self.output_projection(layer)
        return projection(spread.flatten(-2)) - self.output_bias(layer)

    @torch.no_grad()
    def output_bias(self, layer: int) -> Float[Tensor, " d_model"]:
        """b_O of a layer; zeros where there is none."""
        zero = torch.zeros(self.n_heads * self.d_head, dtype=self.dtype, device=self.device)
        return self.output_projection(layer)(zero)

    # -- prefill ---------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, ids: Int[Tensor, " position"], positions: tuple[int, ...] = (), chunk: int = 512) -> Prefix:
        """Keys and values of `ids`, and float32 logits at `positions`.

        Runs the plain sdpa copy in chunks where there is one, else the bridge.

        Raises:
            InputError: for a text longer than the model's context.
        """
        from transformers import DynamicCache

        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        if limit and len(ids) > limit:
            raise InputError(f"a text of {len(ids)} tokens is longer than the {limit} that the model can read; shorten the prompt")
        cache, found = DynamicCache(), []  # no config: sliding layers, too, must keep every key
        ids = ids.to(self.device)
        wanted = sorted(set(positions))
        for start in range(0, len(ids), chunk):
            part = ids[None, start:start + chunk]
            here = [p - start for p in wanted if start <= p < start + chunk]
            keep = torch.tensor(here or [part.shape[1] - 1], device=self.device)
            if self.plain is not None:
                argument = _cache_argument(self.plain)
                with self.unembedding.hidden(same_weight(self.plain, self.bridge.ln_final)) as hidden:
                    out = self.plain(input_ids=part, use_cache=True, logits_to_keep=keep, **{argument: cache}).logits[0]
                out = self.unembedding.logits(out, hidden, keep)
            else:
                mask = self._causal_mask(start, part.shape[1])
                out = self._run(part, torch.arange(start, start + part.shape[1], device=self.device)[None],
                                cache, mask, None, None)[keep]
            if here:
                found.append(out)
        layers = tuple((layer.keys, layer.values) for layer in cache.layers)
        if any(keys is None or keys.shape[-2] != len(ids) for keys, _ in layers) or len(layers) != self.n_layers:
            raise RuntimeError("the cache does not hold every position of the text in every layer")
        order = {p: i for i, p in enumerate(wanted)}
        logits = torch.cat(found) if found else torch.empty(0, self.vocabulary, device=self.device)
        return Prefix(ids, layers, logits[[order[p] for p in positions]] if positions else logits, tuple(positions))

    # -- packed rows -----------------------------------------------------------------------

    def rows(self, prefix: Prefix, tokens: Int[Tensor, " row"], positions: Int[Tensor, " row"],
             branch: Int[Tensor, " row"], seen: Int[Tensor, " row"], z_hook: ZHook | None = None,
             blocked: BlockedReads | None = None) -> Float[Tensor, "row vocabulary"]:
        """Float32 logits of packed rows, all in one forward.

        A row sees the first `seen` positions of the prefix, and the rows of its own `branch` that
        stand before it; each at its true position.

        Args:
            prefix: the prefilled text.
            tokens, positions: token id and position of each row.
            branch: number of the branch that each row belongs to.
            seen: how many positions of the prefix each row's branch continues.
            z_hook: `(layer, z [row, head, d_head]) -> z`, called once a layer.
            blocked: `layer -> [head or 1, row, key]` of booleans, True where a read is removed.
        """
        length = int(seen.max()) if len(seen) else 0
        keys = torch.cat([torch.arange(length, device=self.device), positions])
        own = torch.cat([torch.full((length,), -1, device=self.device), branch])
        allowed = torch.where(own < 0, keys[None] < seen[:, None], own[None] == branch[:, None])
        allowed &= keys[None] <= positions[:, None]
        distance = positions[:, None] - keys[None]
        masks = {w: allowed if w is None else allowed & (distance < w) for w in set(self.windows)}

        def mask(layer: int) -> Tensor:
            visible = masks[self.windows[layer]][None]
            cut = blocked(layer) if blocked is not None else None
            return self._additive(visible if cut is None else visible & ~cut)

        return self._run(tokens[None], positions[None], read_only_cache(prefix, length), mask, z_hook,
                         lambda: self._additive(allowed[None]))

    def _causal_mask(self, start: int, count: int) -> Callable[[int], Tensor]:
        keys = torch.arange(start + count, device=self.device)
        distance = torch.arange(start, start + count, device=self.device)[:, None] - keys[None]
        return lambda layer: self._additive(
            ((distance >= 0) & (distance < (self.windows[layer] or start + count)))[None])

    def _additive(self, visible: Bool[Tensor, "head row key"]) -> Float[Tensor, "1 head row key"]:
        low = torch.finfo(self.dtype).min
        return torch.zeros(visible.shape, dtype=self.dtype, device=self.device).masked_fill_(~visible, low)[None]

    def _run(self, tokens, positions, cache, mask, z_hook, outer_mask) -> Float[Tensor, "row vocabulary"]:
        fired = [0] * self.n_layers
        with warnings.catch_warnings(), self._hooks(mask, z_hook, fired), self.unembedding.hidden(self.bridge.ln_final) as hidden:
            # the bridge still hands its cache over under the old name
            warnings.filterwarnings("ignore", message=".*`past_key_values` is deprecated", category=FutureWarning)
            logits = self.bridge(tokens, past_key_values=cache, position_ids=positions,
                                 attention_mask=outer_mask() if outer_mask else mask(0))
        if z_hook is not None and any(count != 1 for count in fired):
            wrong = next(i for i, count in enumerate(fired) if count != 1)
            raise RuntimeError(f"hook blocks.{wrong}.attn.hook_z fired {fired[wrong]} times in one forward, not once")
        return self.unembedding.logits(logits[0], hidden)

    @contextmanager
    def _hooks(self, mask, z_hook, fired: list[int]) -> Iterator[None]:
        """Our hooks, for one forward: removed whatever happens; those of others are untouched."""
        handles = []
        was_training = self.bridge.original_model.training
        try:
            self.bridge.original_model.eval()
            handles += _repair_cache_argument(self.bridge, self.layers)
            for layer in self.layers:
                handles.append(self.bridge.blocks[layer].attn.register_forward_pre_hook(
                    lambda module, args, kwargs, layer=layer: (args, dict(kwargs, attention_mask=mask(layer))),
                    with_kwargs=True))
                if z_hook is not None:
                    handles.append(self.z_points[layer].register_forward_hook(self._z_edit(layer, z_hook, fired)))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.bridge.original_model.train(was_training)

    def _z_edit(self, layer: int, z_hook: ZHook, fired: list[int]):
        def edit(module, args, out):
            fired[layer] += 1
            # flat or split, the layout is head-major everywhere: view, edit, shape back
            z = out.reshape(out.shape[1], self.n_heads, -1)
            return z_hook(layer, z).reshape(out.shape)

        return edit


def _cache_argument(model) -> str:
    """The name under which this transformers version takes its cache."""
    import inspect

    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
