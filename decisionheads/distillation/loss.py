"""The loss: how far a student's pooled attention at decisions is from the teacher's.

    KL(P_T || P_S) = sum over groups of P_T log(P_T / P_S)

in nats, zero exactly where the two agree. Both are floored at 1e-4 and renormalised, so that a group that
neither reads costs nothing and one that the student does not read yet costs a finite amount.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

FLOOR = 1e-4


def floored(mass: Float[Tensor, "*event group"]) -> Float[Tensor, "*event group"]:
    """Masses as shares that sum to 1, none under the floor; a row of zeros becomes uniform."""
    share = mass.float() / mass.float().sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    share = share.clamp_min(FLOOR)
    return share / share.sum(-1, keepdim=True)


def mistill_loss(teacher_mass: Float[Tensor, "event group"], student_mass: Float[Tensor, "event group"],
                 weights: Float[Tensor, " event"] | None = None) -> Float[Tensor, ""]:
    """Weighted sum over events of `KL(P_T || P_S)`; the mean where no weights are given.

    Args:
        teacher_mass: attention pooled over heads, from an event's position to each group; no gradient flows into it.
        student_mass: the same of the student.
        weights: of each event. Those with weight 0 count nothing, whatever stands in their rows (padding).
            `w_kind / events of the transcript / transcripts` gives the mean over transcripts of the mean over events.

    Returns:
        nats; 0 for no event.

    Raises:
        ValueError: where the shapes differ, or a weight is negative.
    """
    if teacher_mass.shape != student_mass.shape or weights is not None and weights.shape != teacher_mass.shape[:1]:
        raise ValueError(f"masses of the teacher {tuple(teacher_mass.shape)}, of the student {tuple(student_mass.shape)}"
                         f"{'' if weights is None else f' and weights {tuple(weights.shape)}'} do not fit each other")
    if weights is None:
        weights = torch.full(teacher_mass.shape[:1], 1 / max(1, len(teacher_mass)), device=student_mass.device)
    if (weights < 0).any():
        raise ValueError("weights of events must not be negative")
    counted = weights > 0
    p, q = floored(teacher_mass.detach()[counted]), floored(student_mass[counted])
    return ((p * (p.log() - q.log())).sum(-1) * weights[counted]).sum()
