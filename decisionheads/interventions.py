"""What to change at a decision position: frozen data, no hooks.

Interventions act on z, the output of a head before the output projection, or on what a head may
read. "Ablation" here always means replacing z; zeroing W_Q, say, would leave a head that averages
its values and is another thing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from .heads import HeadSet
from .views import Brief

Array = np.ndarray


class ZEdit(NamedTuple):
    """An intervention on z, resolved: `z + weight * (values - z)`, exactly `values` at weight 1; or,
    where it adds, `z + weight * values`."""

    weight: Float[Array, "layer head"]
    values: Float[Array, "layer head d_head"]
    adds: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class MeanAblate(Brief):
    """Replace z of `heads` by reference means `[layer, head, d_head]`."""

    heads: HeadSet
    means: Float[Array, "layer head d_head"]

    def edit(self) -> ZEdit:
        return ZEdit(self.heads.to_mask(*self.means.shape[:2]).astype(np.float32), self.means)


@dataclass(frozen=True, eq=False, repr=False)
class Keep(Brief):
    """Replace z of all heads but `heads` by reference means; `Keep(HeadSet(), means)` gives m0."""

    heads: HeadSet
    means: Float[Array, "layer head d_head"]

    def edit(self) -> ZEdit:
        return ZEdit(1 - self.heads.to_mask(*self.means.shape[:2]).astype(np.float32), self.means)


@dataclass(frozen=True, eq=False, repr=False)
class KnockIn(Brief):
    """Replace z of `heads` by a donor event's own z `[layer, head, d_head]`."""

    heads: HeadSet
    donor: Float[Array, "layer head d_head"]

    def edit(self) -> ZEdit:
        return ZEdit(self.heads.to_mask(*self.donor.shape[:2]).astype(np.float32), self.donor)


@dataclass(frozen=True, eq=False, repr=False)
class AddToZ(Brief):
    """Add `[layer, head, d_head]` to z of `heads`: steering, or noise of a chosen size."""

    heads: HeadSet
    values: Float[Array, "layer head d_head"]

    def edit(self) -> ZEdit:
        return ZEdit(self.heads.to_mask(*self.values.shape[:2]).astype(np.float32), self.values, adds=True)


@dataclass(frozen=True, eq=False, repr=False)
class Interpolate(Brief):
    """Move z of a whole layer towards the means: `means + alpha * (z - means)`, for integrated attribution."""

    layer: int
    alpha: float
    means: Float[Array, "layer head d_head"]

    def edit(self) -> ZEdit:
        weight = np.zeros(self.means.shape[:2], np.float32)
        weight[self.layer] = 1 - self.alpha
        return ZEdit(weight, self.means)


@dataclass(frozen=True)
class BlockReads:
    """Before softmax, remove the attention of `heads` to the key positions `start:end`; the rest renormalises.

    The row's own key is never removed, so that no row is empty.
    """

    heads: HeadSet
    start: int
    end: int

    def keys(self, length: int, own: int) -> Bool[Array, " key"]:
        """Which of `length` keys are removed, for a row at position `own`."""
        where = np.arange(length)
        return (where >= self.start) & (where < self.end) & (where != own)


@dataclass(frozen=True, eq=False, repr=False)
class ReplaceValues(Brief):
    """After softmax, `heads` get `values` from the key positions `start:end` instead of those keys' own.

    Nothing renormalises. Without `values` the span's weights are dropped. It acts on z as attention forms
    it, before any other intervention of the same row, and never on the row's own key.

    Attributes:
        values: `[layer, head, d_head]`, by query head; None for zeros.
    """

    heads: HeadSet
    start: int
    end: int
    values: Float[Array, "layer head d_head"] | None = None


Intervention = MeanAblate | Keep | KnockIn | AddToZ | Interpolate | BlockReads | ReplaceValues
READS = (BlockReads, ReplaceValues)
