"""Simulated effects without (or with planted) decision heads, for tests and for benchmarks/null_simulation.py."""

from __future__ import annotations

import numpy as np

from decisionheads.calibration import Sets

WORLDS = ("normal", "heavy", "skewed right", "skewed left", "dominating", "unequal")


def world(rng: np.random.Generator, name: str, transcripts: int, heads: int, planted: dict[int, float] | None = None) -> Sets:
    """Matched sets in which event and nulls are exchangeable, but for the planted heads' shift.

    Heads are correlated through a common part of every token, as effects of one text are.
    """
    members, group = [], []
    scale = np.where(np.arange(transcripts) < 3, 12.0, 1.0) if name == "dominating" else rng.uniform(0.7, 1.4, transcripts)
    for t in range(transcripts):
        for _ in range(rng.integers(1, 9) if name == "unequal" else 2):
            size = (int(rng.integers(3, 7)), heads)
            if name == "heavy":
                noise = rng.standard_t(2.5, size)
            elif name == "skewed right":
                noise = rng.lognormal(0, 1, size)
            elif name == "skewed left":
                noise = -rng.lognormal(0, 1, size)
            else:
                noise = rng.normal(size=size)
            noise = noise + 0.5 * rng.normal(size=(size[0], 1))
            for head, shift in (planted or {}).items():
                noise[0, head] += shift
            members.append(scale[t] * noise)
            group.append(t)
    return Sets(tuple(members), np.array(group))
