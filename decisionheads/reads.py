"""What heads read: attention mass on spans, pooled as it is computed.

    mass[event, layer, head, span] = sum of attention from the event's position to the span's keys

Before softmax nothing is changed here; a row sums to 1 over all keys, or to less in an architecture with
sinks of its own (GPT-OSS). Whole patterns are never kept: a layer's are pooled and let go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ._cache import Prefix
from ._packs import MEMORY, each_pack
from ._rows import Engine
from .ablation import check_events
from .branches import Branch, run_pack
from .heads import HeadSet

if TYPE_CHECKING:
    from .model import DecisionModel, Reading

Span = tuple[int, int]


@torch.no_grad()
def pooled_attention(hooked: Engine, prefix: Prefix, branches: Sequence[Branch], spans: Sequence[Span] | Bool[np.ndarray, "span position"],
                     memory: int = MEMORY) -> Float[Tensor, "branch layer head span"]:
    """Attention mass from each branch's first row to spans of token positions.

    Args:
        branches: rows of interest; interventions act as they do everywhere.
        spans: `(start, end)` positions of the text, or any keys as a mask; a row's own key counts where a span holds it.

    Returns:
        mass on the model's device; zeros where a layer has no heads.
    """
    keys = np.array([[s <= i < e for i in range(len(prefix))] for s, e in spans]).reshape(len(spans), -1) if not isinstance(spans, np.ndarray) else spans
    member = torch.as_tensor(np.pad(keys, ((0, 0), (0, 1))).T, dtype=hooked.dtype, device=hooked.device)  # a row behind the text is in no span
    out = torch.zeros(len(branches), hooked.n_layers, hooked.n_heads, len(keys), device=hooked.device)
    branches = [Branch(b.position, b.tokens, b.interventions, ()) for b in branches]

    def read(pack: list[int]) -> None:
        first = np.cumsum([0, *(branches[i].width for i in pack)])[:-1]
        length = max(branches[i].position for i in pack)
        position = torch.tensor([branches[i].position for i in pack], device=hooked.device)

        def pool(layer: int, pattern: Tensor) -> None:
            if hooked.packed:
                rows, own = pattern[:, first], pattern[:, first, length + first]
                mass = rows[..., :length] @ member[:length]
            else:  # a batch: one row each, its own key last; a sliding cache holds the last keys only
                seen, own = pattern[..., :-1], pattern[..., -1]
                mass = seen @ member[length - seen.shape[-1]:length]
            out[pack, layer] = (mass + own[..., None] * member[position]).transpose(0, 1).float()

        run_pack(hooked, prefix, [branches[i] for i in pack], on_pattern=pool)

    each_pack(hooked, branches, memory, read)
    return out


@torch.no_grad()
def attention_row(hooked: Engine, prefix: Prefix, branch: Branch, heads: HeadSet) -> Float[np.ndarray, " position"]:
    """Attention from a branch's first row to every position up to its own, the mean over some heads; zeros for no head.

    One row alone, so that texts of any length can be asked; the branch's interventions act as they do everywhere.
    """
    mass = torch.zeros(branch.position + 1, dtype=torch.float64)

    def add(layer: int, pattern: Tensor) -> None:
        mine = [h.head for h in heads if h.layer == layer]
        if mine:  # the row's own key stands last; a sliding cache holds the last keys only
            row = pattern[mine, 0].sum(0)[:len(mass)].double().cpu()
            mass[len(mass) - len(row):] += row

    run_pack(hooked, prefix, [Branch(branch.position, (), branch.interventions, ())], on_pattern=add)
    return (mass / max(1, len(heads))).float().numpy()


def read_attention(model: DecisionModel, reading: Reading, spans: Sequence[Span], memory: int = MEMORY) -> Float[np.ndarray, "event layer head span"]:
    """Attention mass of every head at every event of a transcript, on spans of token positions.

    Source: plain softmax attention; nothing is renormalised and no sink is dropped.

    Raises:
        ExactnessError: if the clean rows differ from the plain model's logits.
    """
    check_events(model, reading, reading.events, memory)
    mass = pooled_attention(model.hooked, reading.prefix, [Branch(e.position) for e in reading.events], spans, memory)
    return mass.cpu().numpy()
