"""Late entry: a row that edits layer l needs only the layers from l on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ._rows import Rows


@contextmanager
def entering(blocks, rows: Rows) -> Iterator[None]:
    """Let each row enter at its own layer: before it, a copy of its parent's hidden state is the
    row's own, since nothing was changed yet."""
    counts = [rows.active(layer) for layer in range(len(blocks))]
    if counts[0] == len(rows):
        yield
        return

    def enter(module, args, kwargs, layer):
        hidden, rest = (args[0], args[1:]) if args else (kwargs["hidden_states"], ())
        before, now = counts[layer - 1] if layer else 0, counts[layer]
        hidden = hidden[:, :now] if layer == 0 else torch.cat([hidden, hidden[:, list(rows.parent[before:now])]], 1)
        kwargs = {k: _first_rows(v, len(rows), now) for k, v in kwargs.items() if k != "hidden_states"}
        return (hidden, *(_first_rows(a, len(rows), now) for a in rest)), kwargs

    handles = [block.register_forward_pre_hook(lambda m, a, k, layer=layer: enter(m, a, k, layer), with_kwargs=True)
               for layer, block in enumerate(blocks)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_rows(value: Any, total: int, count: int) -> Any:
    """What a block is given for all rows (positions, rotary tables), cut to the first `count`."""
    if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == total:
        return value[:, :count]
    return tuple(_first_rows(v, total, count) for v in value) if isinstance(value, tuple) else value
