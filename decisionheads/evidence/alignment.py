"""Evidence alignment: how the attention of pooled heads over a note lies on the evidence of a code. Arrays only.

Attention is that of one position, averaged over heads, sinks left out, and renormalised over the note:

    share[i]    = attention[i] / sum of attention over the note           undefined where that sum is under .01
    mass        = sum of share over E                                      E: the tokens of the code's evidence
    lift        = mass / (|E| / |note|)                                    1: as if all tokens of the note were alike
    specificity = log lift(E) - mean over other codes of log lift(E' without E)
    auroc       = P(a token of E has more than a token of E' without E), ties half
    iou         = |top & E| / |top | E|                                    top: the |E| tokens that have most

Differences are paired within a document (or patient) and tested by flipping the signs of whole documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from ..calibration import bootstrap_interval

Array = np.ndarray
MEASURES = ("mass", "lift", "specificity", "auroc", "iou")
LEAST_ON_NOTE = 0.01  # of a pooled row, below which what it does within the note is undefined
FLOOR = 1e-6  # of the note, so that the logarithm of a lift exists
EXACT = 14  # documents up to which every pattern of signs is tried
DRAWS = 9_999


def shares(attention: Float[Array, " position"], note: Bool[Array, " position"]) -> Float[Array, " position"] | None:
    """Attention renormalised over the keys of the note, 0 elsewhere; None where under .01 of it is there.

    Args:
        attention: of one position, averaged over heads; its sum is 1 or less.
        note: keys of the note, sinks left out.
    """
    inside = np.where(note, attention, 0.0).astype(np.float64)
    total = inside.sum()
    return inside / total if total >= LEAST_ON_NOTE else None


def lift(share: Float[Array, " position"], evidence: Bool[Array, " position"], note: Bool[Array, " position"]) -> float:
    """Mass on the evidence over what it would be if all tokens of the note had the same."""
    return float(share[evidence].sum() / (evidence.sum() / note.sum()))


def auroc(own: Float[Array, " token"], others: Float[Array, " other"]) -> float:
    """Probability that one of the own tokens has more than one of the others, ties half; NaN if there are none of either."""
    from scipy.stats import rankdata

    if not len(own) or not len(others):
        return float("nan")
    ranks = rankdata(np.concatenate([own, others]))[:len(own)]
    return float((ranks.sum() - len(own) * (len(own) + 1) / 2) / (len(own) * len(others)))


def measures(attention: Float[Array, " position"], note: Bool[Array, " position"], own: Bool[Array, " position"],
             others: Sequence[Bool[Array, " position"]]) -> Float[Array, " measure"]:
    """The five measures of one code at one position, in the order of `MEASURES`; NaN where undefined.

    Args:
        attention: of the position, averaged over heads.
        note: keys of the note, sinks left out.
        own: the code's evidence; only its tokens within `note` count, and there must be some.
        others: the evidence of each other code of the document; what it shares with `own` is left out. Without any,
            specificity and auroc are undefined.
    """
    own = own & note
    if not own.any():
        raise ValueError("no token of the evidence lies within the note")
    share = shares(attention, note)
    if share is None:
        return np.full(len(MEASURES), np.nan)
    apart = [x for other in others if (x := other & note & ~own).any()]
    log_lift = lambda evidence: np.log(max(share[evidence].sum(), FLOOR) / (evidence.sum() / note.sum()))  # noqa: E731
    specific = log_lift(own) - np.mean([log_lift(x) for x in apart]) if apart else np.nan
    distinct = np.logical_or.reduce(apart) if apart else np.zeros_like(own)
    inside = np.flatnonzero(note)
    top = np.zeros_like(own)
    top[inside[np.argsort(-share[inside], kind="stable")[:own.sum()]]] = True
    return np.array([share[own].sum(), lift(share, own, note), specific, auroc(share[own], share[distinct]), (top & own).sum() / (top | own).sum()])


# -- documents --------------------------------------------------------------------------------------------


def by_document(values: Float[Array, "unit measure"], documents: Int[Array, " unit"]) -> Float[Array, "document measure"]:
    """Mean over the defined units of each document, documents in ascending order; NaN where none is defined."""
    _, index = np.unique(documents, return_inverse=True)
    there = np.isfinite(values)
    sums, counts = np.zeros((index.max(initial=-1) + 1, values.shape[1])), np.zeros((index.max(initial=-1) + 1, values.shape[1]))
    np.add.at(sums, index, np.where(there, values, 0.0))
    np.add.at(counts, index, there)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def sign_flip(differences: Float[Array, " document"], *, draws: int = DRAWS, seed: int = 0) -> float:
    """Two-sided p-value of a mean difference when the sign of each document may be flipped.

    Up to 14 documents all patterns of signs are tried (the observed one is among them), else `draws` seeded ones:
    `p = (1 + #{|sum*| >= |sum|}) / (1 + B)`. Never 0, ties count; NaN without documents.
    """
    d = np.asarray(differences, np.float64)
    if not len(d):
        return float("nan")
    observed = abs(d.sum())
    reach = lambda signs: int((np.abs(signs @ d) >= observed - 1e-9 * (1 + observed)).sum())  # noqa: E731
    if len(d) <= EXACT:
        signs = 1.0 - 2 * (np.arange(2 ** len(d))[:, None] >> np.arange(len(d)) & 1)
        return reach(signs) / len(signs)
    rng, count = np.random.default_rng(seed), 0
    for start in range(0, draws, 1024):
        count += reach(rng.choice([-1.0, 1.0], (min(1024, draws - start), len(d))))
    return (1 + count) / (1 + draws)


@dataclass(frozen=True)
class Paired:
    """One measure on two sides of the same units.

    Attributes:
        mean, other, difference: means over documents; `difference = mean - other`.
        low, high: 95% limits of the mean, documents drawn anew.
        difference_low, difference_high: of the difference.
        p: two-sided, sign-flip; NaN without documents.
        documents, units: that are defined on both sides.
        undefined: units that are not.
    """

    mean: float
    low: float
    high: float
    other: float
    difference: float
    difference_low: float
    difference_high: float
    p: float
    documents: int
    units: int
    undefined: int


def paired(values: Float[Array, " unit"], others: Float[Array, " unit"], documents: Int[Array, " unit"], *, draws: int = DRAWS, seed: int = 0) -> Paired:
    """Compare one measure between two sides, on the units that are defined on both, paired within documents."""
    there = np.isfinite(values) & np.isfinite(others)
    undefined = int(len(there) - there.sum())
    if not there.any():
        return Paired(*[float("nan")] * 8, 0, 0, undefined)
    sides = by_document(np.stack([values, others, values - others], 1)[there], documents[there])
    low, high = bootstrap_interval(sides, np.arange(len(sides)), seed=seed)
    mean = sides.mean(0)
    return Paired(float(mean[0]), float(low[0]), float(high[0]), float(mean[1]), float(mean[2]), float(low[2]), float(high[2]),
                  sign_flip(sides[:, 2], draws=draws, seed=seed), len(sides), int(there.sum()), undefined)


def holm(p_values: Sequence[float] | Float[Array, " test"]) -> Float[Array, " test"]:
    """Holm's correction over the tests that were done; NaN stays NaN and counts for nothing."""
    from ..calibration import adjusted

    p = np.asarray(p_values, np.float64)
    found = np.full(len(p), np.nan)
    done = np.isfinite(p)
    if done.any():
        found[done] = adjusted(p[done], "holm")
    return found
