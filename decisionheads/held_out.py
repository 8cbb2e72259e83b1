"""Held-out checks of the heads that were selected, on the evaluation split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .branches import Branch, branch_logits
from .events import Kind
from .heads import HeadSet
from .interventions import MeanAblate
from .knock_in import knock_in, random_heads
from .model import DecisionModel
from .survey import Options, Survey


def rounded(x) -> float | None:
    """A number for JSON: six decimals, None where there is none."""
    return None if x is None or not np.isfinite(x) else round(float(x), 6)


def evaluate(model: DecisionModel, surveys: Sequence[Survey], heads: HeadSet, kind: Kind, zbar: np.ndarray, asked: Options, memory: int) -> dict:
    """Held-out: is the choice lost without the selected heads, and kept without as many others?"""
    rng = np.random.default_rng(asked.seed)
    others = [random_heads(heads, model.n_layers, model.n_heads, rng) for _ in range(asked.random_sets)]
    kept, kept_others, chance = [], [], []
    for s in surveys:
        events = [e for e in s.reading.events if e.kind == kind]
        if not events or not len(heads):
            continue
        branches = [Branch(e.position, (), (MeanAblate(h, zbar),), e.alternatives) for e in events for h in (heads, *others)]
        for i, logits in branch_logits(model.hooked, s.reading.prefix, branches, memory):
            e = events[i // (1 + len(others))]
            best = e.alternatives[int(logits[0].argmax())] == e.chosen
            (kept if i % (1 + len(others)) == 0 else kept_others).append(best)
        chance += [1 / len(e.alternatives) for e in events]
    knocked = knock_in(model, [s.reading for s in surveys], heads, kind, seed=asked.seed, memory=memory)
    share = lambda x: rounded(np.mean(x)) if len(x) else None  # noqa: E731
    return {
        "held_out": {"events": len(kept), "choice_kept_without_selected": share(kept), "choice_kept_without_random": share(kept_others), "chance": share(chance)},
        "knock_in": {"recipients": len(knocked.shift), "without_donor": knocked.without_donor, "shift": share(knocked.shift),
                     "random_shift": share(knocked.random_shift), "flipped": share(knocked.flipped),
                     "identity": rounded(knocked.identity.max()) if len(knocked.identity) else None}}
