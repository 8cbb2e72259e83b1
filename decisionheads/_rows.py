"""Rows: the tokens of many branches side by side, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

ZHook = Callable[[int, Tensor], Tensor]
PatternHook = Callable[[int, Tensor], None]
BlockedReads = Callable[[int], Tensor | None]


@dataclass(frozen=True)
class Rows:
    """Rows of one packed forward.

    A row sees the first `seen` positions of the prefix, and the rows of its own `branch` that stand
    before it; each at its true position.

    Attributes:
        tokens, positions: token id and position of each row.
        branch: number of the branch that each row belongs to.
        seen: how many positions of the prefix each row's branch continues.
        entry: first layer at which a row differs from its `parent`, ascending; below it the parent
            stands for both. Empty: every row runs through every layer.
        parent: index of an unedited row with the same token and position.
        full: rows of which all logits are wanted; None for all rows.
    """

    tokens: Int[Tensor, " row"]
    positions: Int[Tensor, " row"]
    branch: Int[Tensor, " row"]
    seen: Int[Tensor, " row"]
    entry: tuple[int, ...] = ()
    parent: tuple[int, ...] = field(default=(), repr=False)
    full: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def active(self, layer: int) -> int:
        """How many rows, from the first on, run through a layer."""
        return sum(e <= layer for e in self.entry) if self.entry else len(self)

    @classmethod
    def single(cls, prefix_ids: Tensor, positions: Tensor) -> Rows:
        """One row of the text's own token at each position, each a branch of its own."""
        positions = positions.to(prefix_ids.device)
        return cls(prefix_ids[positions], positions, torch.arange(len(positions), device=prefix_ids.device), positions)
