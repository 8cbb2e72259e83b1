"""The decision margin: by how many logits the model prefers what it chose.

`margin = logit[chosen] - logit[against]`, in float32, from the logits at the event's position.
What it is measured against is fixed once, in the clean run, and kept for every intervention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from .views import Viewed

Rule = Literal["runner_up", "logsumexp", "vocabulary"]


@dataclass(frozen=True)
class Margin(Viewed):
    """A fixed margin: chosen token id against one id, or against the logsumexp of several."""

    chosen: int
    against: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.against or self.chosen in self.against:
            raise ValueError(f"a margin needs other tokens than the chosen one ({self.chosen}); got {self.against}")

    def __call__(self, logits: Float[Tensor, "*row vocabulary"]) -> Float[Tensor, "*row"]:
        """Margins in logits, float32; positive where the chosen token is preferred."""
        logits = logits.float()
        others = logits[..., list(self.against)]
        return logits[..., self.chosen] - (others[..., 0] if len(self.against) == 1 else others.logsumexp(-1))

    def among(self, ids: tuple[int, ...]) -> Margin:
        """The same margin on logits of `ids` alone, in their order."""
        return Margin(ids.index(self.chosen), tuple(ids.index(i) for i in self.against))

    def swapped(self) -> Margin:
        """Chosen and competitor exchanged: the negated margin."""
        if len(self.against) != 1:
            raise ValueError("only a margin against a single token can be swapped")
        return Margin(self.against[0], (self.chosen,))


def fix_margin(clean: Float[Tensor, " vocabulary"], chosen: int, competitors: Sequence[int],
               rule: Rule = "runner_up") -> Margin:
    """Fix what a choice is measured against, from the clean logits at its position.

    Args:
        clean: logits of the clean run.
        chosen: the token that was written.
        competitors: the token ids it competed with; each counts once.
        rule: `runner_up`, the strongest competitor; `logsumexp` over all of them; `vocabulary`, the
            strongest token of the whole vocabulary other than the chosen one.
    """
    ids = tuple(sorted(set(competitors) - {chosen}))
    if rule == "vocabulary":
        ranked = clean.float().clone()
        ranked[chosen] = -torch.inf
        return Margin(chosen, (int(ranked.argmax()),))
    if not ids:
        raise ValueError(f"token {chosen} has no competitor")
    if rule == "logsumexp":
        return Margin(chosen, ids)
    if rule != "runner_up":
        raise ValueError(f"unknown rule {rule!r}: expected runner_up, logsumexp or vocabulary")
    return Margin(chosen, (ids[int(clean.float()[list(ids)].argmax())],))
