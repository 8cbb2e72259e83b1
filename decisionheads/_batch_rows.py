"""One branch a batch row: the slow way, for models whose cache cannot be shared by packed rows.

ALiBi, local attention without a mask, and layers with a state of their own need the model's default
cache and its own masks. Every branch gets a copy of the cache and runs token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from ._cache import Prefix, cache_argument, repeated
from ._rows import BlockedReads, PatternHook, Rows, ZHook

if TYPE_CHECKING:
    from ._hooked import Hooked


def batch_rows(hooked: Hooked, prefix: Prefix, rows: Rows, z_hook: ZHook | None, blocked: BlockedReads | None,
               on_pattern: PatternHook | None) -> Float[Tensor, "row vocabulary"]:
    """Float32 logits of branches of equal length at one position; the same contract as `Hooked.run`.

    Raises:
        ValueError: if the branches differ in position or length.
    """
    length = int(rows.seen[0])
    count = int(rows.branch[-1]) + 1
    width = len(rows) // count
    if bool((rows.seen != length).any()) or width * count != len(rows):
        raise ValueError("branches of one batch must stand at one position and have equal lengths")
    cache = repeated(_default_cache(hooked, prefix, length), count) if length else None
    model, out = hooked.bridge.original_model, []
    argument = cache_argument(model)
    for step in range(width):
        here = torch.arange(step, len(rows), width, device=hooked.device)

        def edit(layer: int, z: Tensor, here: Tensor = here) -> Tensor:
            if width == 1:
                return z_hook(layer, z)
            every = z.new_zeros(len(rows), *z.shape[1:]).index_copy(0, here, z)
            return z_hook(layer, every)[here]

        def read(layer: int, pattern: Tensor, step: int = step) -> None:
            if step == 0:
                on_pattern(layer, pattern)

        with (hooked.bridged.hooks(None, edit if z_hook is not None else None, read if on_pattern is not None else None), _cutting(hooked, blocked, rows, here, length),
              hooked.unembedding.hidden(hooked.bridged.norm) as hidden):
            given = {} if cache is None else {argument: cache}
            result = model(input_ids=rows.tokens[here][:, None], use_cache=True, **given)  # positions follow from the cache
            cache = getattr(result, argument, None) or result.past_key_values
            out.append(hooked.unembedding.logits(result.logits[:, -1], hidden))
    return torch.stack(out, 1).flatten(0, 1)


@torch.no_grad()
def _default_cache(hooked: Hooked, prefix: Prefix, length: int):
    """The model's own cache after the first `length` tokens; a model keeps the last one asked for."""
    begin = prefix.ids[:length]
    if hooked.last is None or not torch.equal(hooked.last[0], begin):
        with hooked.bridged.hooks():
            out = hooked.model(input_ids=begin[None], use_cache=True)
        hooked.last = begin, getattr(out, cache_argument(hooked.model), None) or out.past_key_values
    return hooked.last[1]


@contextmanager
def _cutting(hooked: Hooked, blocked: BlockedReads | None, rows: Rows, here: Tensor, length: int) -> Iterator[None]:
    """Remove reads through the mask that the model itself made, of whatever form."""
    handles = []

    def cut(module, args, kwargs, layer):
        removed = blocked(layer)
        if removed is None:
            return args, kwargs
        removed = removed[:, here, :length].transpose(0, 1)[:, :, None]  # [batch, head, 1, prefix key]
        own = removed.new_zeros(*removed.shape[:3], 1)
        later = int(rows.positions[here[0]]) - length
        removed = torch.cat([removed, own.expand(-1, -1, -1, later + 1)], -1)
        mask = kwargs.get("attention_mask")
        if mask is None or mask.ndim != 4:
            mask = torch.zeros(1, 1, 1, removed.shape[-1], dtype=hooked.dtype, device=removed.device)
        removed = removed[..., -mask.shape[-1]:]  # a sliding layer's mask holds the last keys only
        if mask.dtype == torch.bool:
            seen = bool(mask.reshape(-1)[-1])  # the own key is always seen: this tells what True means
            mask = mask & ~removed if seen else mask | removed
        else:
            mask = mask.masked_fill(removed, torch.finfo(mask.dtype).min)
        return args, dict(kwargs, attention_mask=mask)

    try:
        for layer in hooked.layers if blocked is not None else ():
            handles.append(hooked.bridge.blocks[layer].attn.register_forward_pre_hook(lambda m, a, k, layer=layer: cut(m, a, k, layer), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
