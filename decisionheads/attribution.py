"""Attribution: a first look at every head from one backward pass, and a check on exact effects.

    attribution = grad_z m . (z - zbar)                  one step, or integrated per layer
    direct      = frozen-norm unembedding of W_O (z - zbar)   direct logit attribution

Same sign and unit as the exact effect (logits; positive: the head supports the decision). Never the
verdict: gradients miss saturation, and the direct path leaves out everything later layers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ._packs import MEMORY, each_pack
from .ablation import check_clean, event_margin
from .branches import Branch, run_pack
from .errors import InputError
from .heads import HeadScores
from .interventions import Interpolate
from .margin import Margin, Rule
from .views import Brief, Viewed

if TYPE_CHECKING:
    from .ablation import ReferenceMeans
    from .model import DecisionModel, Reading


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(Brief, Viewed):
    """Scores in logits, `[event, layer, head]`.

    Attributes:
        gradient: gradient times difference from the mean, one step or integrated.
        direct: direct logit attribution of the same difference.
    """

    gradient: HeadScores
    direct: HeadScores

    @classmethod
    def join(cls, parts: Iterable[Attribution]) -> Attribution:
        """The events of several transcripts, one after the other."""
        parts = list(parts)
        return cls(HeadScores.join(p.gradient for p in parts), HeadScores.join(p.direct for p in parts))


def attribute(model: DecisionModel, reading: Reading | Sequence[Reading], means: ReferenceMeans, *, steps: int = 0, rule: Rule = "runner_up", memory: int = MEMORY) -> Attribution:
    """Attribute the margin of every event of a transcript to the heads at its position.

    Args:
        reading: the transcript, read with its events; or several, whose events come one after the other.
        means: reference means of a disjoint split.
        steps: 0 for one step at the clean point; n for the mean gradient at n midpoints between
            means and clean values, a layer at a time.
        rule: what a choice is measured against.
        memory: bytes that one pack of rows may take.
    """
    if isinstance(reading, Sequence):
        return Attribution.join(attribute(model, r, means, steps=steps, rule=rule, memory=memory) for r in reading)
    if steps < 0:
        raise ValueError("steps counts midpoints; it cannot be negative")
    hooked, events = model.hooked, reading.events
    if len(hooked.layers) < hooked.n_layers:
        raise InputError(f"{model.name} has layers with a state of their own, through which there are no gradients of rows; use mean_ablate")
    if not events:
        return Attribution(*(HeadScores(np.zeros((0, hooked.n_layers, hooked.n_heads), np.float32), name, events=()) for name in ("attribution", "direct logit attribution")))
    measured = [event_margin(reading, event, rule) for event in events]
    zbar = torch.stack([torch.as_tensor(means.of(e)) for e in events]).to(hooked.device, hooked.dtype)
    with torch.enable_grad():  # notebooks turn it off for good
        gradient, z, direct = _at_clean(model, reading, measured, zbar, memory)
        if steps:
            gradient = _integrated(model, reading, measured, means, steps, memory)
    scores = (gradient * (z - zbar)).sum(-1).float().cpu().numpy()
    names, meta = tuple(e.name for e in events), {"model": model.name, "rule": rule, "steps": steps}
    return Attribution(HeadScores(scores, "attribution", events=names, meta=meta),
                       HeadScores(direct.float().cpu().numpy(), "direct logit attribution", events=names, meta=meta))


def _at_clean(model: DecisionModel, reading: Reading, measured: list[Margin], zbar: Tensor, memory: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients and z `[event, layer, head, d_head]`, direct attribution `[event, layer, head]`."""
    hooked = model.hooked
    branches = [Branch(e.position) for e in reading.events]
    gradient, z = torch.zeros_like(zbar), torch.zeros_like(zbar)
    direct = torch.zeros(zbar.shape[:3], device=hooked.device)

    def of_pack(pack: list[int]) -> None:
        leaves, values = [], []
        with hooked.unembedding.frozen() as path:
            logits = run_pack(hooked, reading.prefix, [branches[i] for i in pack], _leaf(leaves, values))
        for row, i in enumerate(pack):
            check_clean(reading, reading.events[i], logits[row][0].detach(), hooked.limit)
        total = sum(measured[i](logits[row][0]) for row, i in enumerate(pack))
        *grads, unembedding = torch.autograd.grad(total, [*leaves, path.leaves[0]])
        unembedding = unembedding.flatten(0, -2)
        for layer, grad, value in zip(hooked.layers, grads, values, strict=True):
            gradient[pack, layer], z[pack, layer] = grad, value
            written = hooked.head_outputs(layer, (z - zbar)[pack, layer])
            direct[pack, layer] = torch.einsum("rhd,rd->rh", written, path.readout(unembedding, layer)).float()

    each_pack(hooked, branches, memory // 4, of_pack)
    return gradient, z, direct


def _integrated(model: DecisionModel, reading: Reading, measured: list[Margin], means: ReferenceMeans, steps: int, memory: int) -> Tensor:
    """Mean gradient over midpoints of the path from the means to the clean z, layer by layer."""
    hooked = model.hooked
    plan = [(e, layer, (k + 0.5) / steps) for e in range(len(reading.events)) for layer in hooked.layers for k in range(steps)]
    branches = [Branch(reading.events[e].position, (), (Interpolate(layer, alpha, means.of(reading.events[e])),), (measured[e].chosen, *measured[e].against))
                for e, layer, alpha in plan]
    gradient = torch.zeros(len(reading.events), hooked.n_layers, hooked.n_heads, hooked.d_head, dtype=hooked.dtype, device=hooked.device)

    def of_pack(pack: list[int]) -> None:
        leaves: list[Tensor] = []
        logits = run_pack(hooked, reading.prefix, [branches[i] for i in pack], _leaf(leaves, []))
        grads = torch.autograd.grad(sum(measured[plan[i][0]].among(branches[i].ids)(logits[row][0]) for row, i in enumerate(pack)), leaves)
        for row, i in enumerate(pack):
            event, layer, _ = plan[i]
            gradient[event, layer] += grads[hooked.layers.index(layer)][row] / steps

    each_pack(hooked, branches, memory // 4, of_pack)
    return gradient


def _leaf(leaves: list[Tensor], values: list[Tensor]) -> Callable[[int, Tensor], Tensor]:
    """Adds a zero leaf to z of every layer: a hook's own tensor would keep no gradient."""

    def add(layer: int, z: Tensor) -> Tensor:
        values.append(z.detach())
        leaves.append(torch.zeros_like(z, requires_grad=True))
        return z + leaves[-1]

    return add
