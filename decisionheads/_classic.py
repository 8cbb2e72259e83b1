"""`HookedTransformer` objects of transformer-lens 3.9, one branch a batch row on a frozen cache.

The same contract as `_hooked.Hooked`. The weights inside are processed (norms folded, W_U centred), so
its logits differ from Hugging Face's by a constant per position and its own rounding; every check is
against its own full forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ._cache import Prefix
from ._rows import BlockedReads, Choose, PatternHook, Rows, ZHook, eval_mode
from ._unembed import LIMIT, Unembedding
from .errors import InputError
from .heads import HeadSet


class Classic:
    """A `HookedTransformer` seen through its z, its scores and its cache.

    Args:
        model: the object; it is never changed beyond hooks that are removed after every call.
        new_cache: `(cfg, device, batch) -> cache`, an empty key-value cache of its kind.
    """

    def __init__(self, model, new_cache: Callable):
        self.bridge = self.model = model
        self.new_cache = new_cache
        cfg = model.cfg
        self.n_layers, self.n_heads, self.d_head = cfg.n_layers, cfg.n_heads, cfg.d_head
        self.layers = list(range(cfg.n_layers))
        self.heads = HeadSet.all(cfg.n_layers, cfg.n_heads)
        self.vocabulary, self.name = cfg.d_vocab, cfg.model_name
        self.device, self.dtype = model.W_E.device, model.W_E.dtype
        self.limit = LIMIT[self.dtype]
        if self.limit > LIMIT[torch.float32]:
            raise ValueError(f"{self.name}: a HookedTransformer in {str(self.dtype)[6:]} is not supported; load it in float32, or use DecisionModel.from_pretrained")
        cap = {"final_logit_softcapping": cfg.output_logits_soft_cap if cfg.output_logits_soft_cap > 0 else None}
        self.unembedding = Unembedding((model.ln_final, model.ln_final), {}, model.W_U.T, model.b_U, self.limit, cap)
        self.reach, self.context = cfg.window_size or 0, cfg.n_ctx
        self.paths = [(False, True, "one branch a batch row of a HookedTransformer")]
        self.packed = self.skipping = self.narrow = self.weighted = False
        self.prefills, self.copied, self.copies = True, None, False

    # -- plain forwards ----------------------------------------------------------------------

    @torch.no_grad()
    def full_logits(self, ids: Int[Tensor, " position"], start: int = 0,
                    edit: tuple[int, int, Tensor] | None = None) -> Float[Tensor, "position vocabulary"]:
        """Logits of one forward without a cache; z of `(layer, head)` at the last position set to a value."""

        def put(module, args, out):
            out = out.clone()
            out[0, -1, edit[1]] = edit[2]
            return out

        if start:  # positions follow from what stands before: another token, whose reads are cut
            ids = torch.cat([ids.new_zeros(start), ids])
        cut = {layer: lambda scores: scores[..., start:, :start].fill_(torch.finfo(self.dtype).min) for layer in self.layers} if start else {}
        with self._hooks({edit[0]: put} if edit else {}, cut):
            return self._forward(ids[None])[0, start:]

    @torch.no_grad()
    def attention_output(self, ids: Int[Tensor, " position"], layer: int) -> tuple[Tensor, Tensor]:
        """z `[head, d_head]` and the attention output `[d_model]` of a layer at the last position."""
        seen: dict[str, Tensor] = {}
        attention = self.model.blocks[layer].attn
        handles = [attention.hook_z.register_forward_hook(lambda m, a, out: seen.update(z=out[0, -1])),
                   attention.register_forward_hook(lambda m, a, out: seen.update(out=out[0, -1]))]
        try:
            self._forward(ids[None])
        finally:
            for handle in handles:
                handle.remove()
        return seen["z"], seen["out"]

    @torch.no_grad()
    def generate(self, ids: Int[Tensor, " position"], longest: int, choose: Choose | None = None) -> Int[Tensor, " new"]:
        """The tokens that the model writes after a prompt: greedily up to its end token (kept), or as `choose` says."""
        end, written = self.model.tokenizer.eos_token_id, ids.to(self.device)
        for _ in range(longest):
            logits = self._forward(written[None])[0, -1]
            token = int(logits.argmax()) if choose is None else choose(logits)
            if token is None:
                break
            written = torch.cat([written, torch.tensor([token], device=self.device)])
            if choose is None and token == end:
                break
        return written[len(ids):]

    # -- output projection -------------------------------------------------------------------

    @torch.no_grad()
    def head_outputs(self, layer: int, z: Float[Tensor, "*row head d_head"]) -> Float[Tensor, "*row head d_model"]:
        """What each head adds to the residual stream; b_O left out."""
        return torch.einsum("...hd,hdm->...hm", z, self.model.W_O[layer])

    def output_bias(self, layer: int) -> Float[Tensor, " d_model"]:
        """b_O of a layer."""
        return self.model.b_O[layer].detach()

    # -- reading and rows ----------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, ids: Int[Tensor, " position"], positions: tuple[int, ...] = (), chunk: int = 512, shared: Prefix | None = None) -> Prefix:
        """Keys and values `[1, position, kv_head, d_head]` and logits at `positions`; `chunk` and
        `shared` change nothing here.

        Raises:
            InputError: for a text longer than the model's context.
        """
        if len(ids) > self.context:
            raise InputError(f"a text of {len(ids)} tokens is longer than the {self.context} that the model can read; shorten the prompt")
        ids = ids.to(self.device)
        cache = self._cache(1)
        logits = self._forward(ids[None], cache)[0]
        layers = tuple((entry.past_keys, entry.past_values) for entry in cache.entries)
        return Prefix(ids, layers, logits[list(positions)].float().clone(), tuple(positions))

    def run(self, prefix: Prefix, rows: Rows, z_hook: ZHook | None = None, blocked: BlockedReads | None = None,
            ids: tuple[int, ...] | None = None, on_pattern: PatternHook | None = None) -> tuple[Tensor, Tensor | None]:
        """See `_hooked.Hooked.run`; the rows are branches of equal length at one position."""
        length, count = int(rows.seen[0]), int(rows.branch[-1]) + 1
        width = len(rows) // count
        if bool((rows.seen != length).any()) or width * count != len(rows):
            raise ValueError("branches of one batch must stand at one position and have equal lengths")
        edits, cuts = {}, {}
        if z_hook is not None:
            edits = {layer: lambda m, a, out, layer=layer: z_hook(layer, out.flatten(0, 1)).view(out.shape) for layer in self.layers}
        if blocked is not None:
            for layer in self.layers:
                removed = blocked(layer)
                if removed is not None:  # [head, row, key] -> [batch, head, query, key]
                    removed = removed[..., :length].unflatten(1, (count, width)).transpose(0, 1)
                    cuts[layer] = lambda scores, removed=removed: scores[..., :length].masked_fill_(removed, torch.finfo(self.dtype).min)
        first = None if on_pattern is None else lambda layer, pattern: on_pattern(layer, pattern.unflatten(1, (count, width))[:, :, 0, :length + 1])
        with self._hooks(edits, cuts, first):
            logits = self._forward(rows.tokens.view(count, width), self._cache(count, prefix, length))
        logits = logits.flatten(0, 1)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits if rows.full is None else logits[list(rows.full)], None if ids is None else logits[:, list(ids)]

    def _cache(self, count: int, prefix: Prefix | None = None, length: int = 0):
        """An empty cache, or a frozen one over the first positions of a text."""
        cache = self.new_cache(self.model.cfg, self.device, count)
        if prefix is not None:
            for entry, (keys, values) in zip(cache.entries, prefix.layers, strict=True):
                entry.past_keys, entry.past_values = (x[:, :length].expand(count, -1, -1, -1) for x in (keys, values))
            cache.previous_attention_mask = torch.ones(count, length, dtype=torch.int, device=self.device)
            cache.freeze()
        return cache

    def _forward(self, tokens: Int[Tensor, "batch position"], cache=None) -> Float[Tensor, "batch position vocabulary"]:
        with eval_mode(self.model):  # the mask is given, for it would be guessed from ids that look like padding
            return self.model(tokens, past_kv_cache=cache, attention_mask=torch.ones_like(tokens), prepend_bos=False)

    @contextmanager
    def _hooks(self, edits: dict[int, Callable], cuts: dict[int, Callable[[Tensor], Tensor]], on_pattern: PatternHook | None = None) -> Iterator[None]:
        """Plain torch hooks on hook points, removed whatever happens; hooks of others are untouched."""

        def cut(module, args, out, change):
            out = out.clone()
            change(out)
            return out

        with ExitStack() as stack:
            keep = lambda handle: stack.callback(handle.remove)  # noqa: E731
            for layer, edit in edits.items():
                keep(self.model.blocks[layer].attn.hook_z.register_forward_hook(edit))
            for layer, change in cuts.items():
                keep(self.model.blocks[layer].attn.hook_attn_scores.register_forward_hook(lambda m, a, out, change=change: cut(m, a, out, change)))
            for layer in self.layers if on_pattern is not None else ():
                keep(self.model.blocks[layer].attn.hook_pattern.register_forward_hook(
                    lambda m, a, out, layer=layer: on_pattern(layer, out.transpose(0, 1).flatten(1, 2))))
            yield
