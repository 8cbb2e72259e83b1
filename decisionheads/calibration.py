"""Null calibration: which heads matter *for the decision*, and not for any next token. Arrays only.

Every event is matched to null tokens of its own transcript; under the null hypothesis an event and its
nulls are exchangeable, so the p-value permutes which member of each set is called the event, jointly
for all heads. Conventions: heads are flattened `[head]` in (layer, head) order; effects are logits,
positive where the head supports what was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from .views import Brief, Viewed

Array = np.ndarray
MOST, LEAST, CALIPER = 5, 2, 0.25


# -- matched sets ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatchedSets(Viewed):
    """Events with their nulls; an event without enough nulls has none and leaves calibration.

    Attributes:
        nulls: for each event the indices of its nulls, best first; empty where fewer than `LEAST`.
        balance: `[covariate]` standardised mean difference, events minus their nulls' means.
    """

    nulls: tuple[tuple[int, ...], ...]
    balance: Float[Array, " covariate"]

    def __repr__(self) -> str:
        return f"MatchedSets({len(self.kept)} of {len(self.nulls)} events have nulls, {sum(map(len, self.nulls))} in all; balance within {np.abs(self.balance).max(initial=0):.2f} sd)"

    @property
    def kept(self) -> list[int]:
        return [i for i, nulls in enumerate(self.nulls) if nulls]

    @property
    def left_out(self) -> int:
        return sum(not nulls for nulls in self.nulls)

    @property
    def unbalanced(self) -> bool:
        return bool((np.abs(self.balance) > 0.1).any())


def match(events: Float[Array, "event covariate"], nulls: Float[Array, "null covariate"],
          event_class: Sequence, null_class: Sequence, *, caliper: float = CALIPER, most: int = MOST, least: int = LEAST) -> MatchedSets:
    """Match nulls to events: exact on class, nearest on covariates, none used twice.

    Args:
        events: covariates (margin, log entropy, position).
        nulls: the same covariates.
        event_class: what must be equal (transcript and token class, say).
        null_class: the same of the nulls.
        caliper: largest difference in any covariate, in standard deviations over events and nulls.
        most: nulls for an event.
        least: nulls for an event; with fewer it leaves calibration.

    Rounds: in each, every event that still lacks nulls gets at most one more, so that the total
    distance is smallest; nulls of events that end below `least` are not handed on.
    """
    from scipy.optimize import linear_sum_assignment

    found: list[list[int]] = [[] for _ in range(len(events))]
    if len(events) and len(nulls):
        deviation = np.concatenate([events, nulls]).std(0)
        scale = np.where(deviation > 0, deviation, 1.0)
        for name in sorted(set(event_class) & set(null_class), key=repr):
            rows = [i for i, c in enumerate(event_class) if c == name]
            free = [j for j, c in enumerate(null_class) if c == name]
            apart = np.abs(events[rows][:, None] - nulls[free][None]) / scale
            distance = np.where((apart <= caliper).all(-1), (apart**2).sum(-1), np.inf)
            for _ in range(most):
                allowed = np.where(np.isfinite(distance), distance, 1e9)
                for r, c in zip(*linear_sum_assignment(allowed), strict=True):
                    if np.isfinite(distance[r, c]):
                        found[rows[r]].append(free[c])
                        distance[:, c] = np.inf
    kept = tuple(tuple(f) if len(f) >= least else () for f in found)
    pairs = [(events[i], nulls[list(f)].mean(0)) for i, f in enumerate(kept) if f]
    balance = np.full(events.shape[1], np.nan)
    if pairs:
        own, matched = (np.array(side) for side in zip(*pairs, strict=True))
        spread = np.concatenate([events, nulls]).std(0)
        balance = (own - matched).mean(0) / np.where(spread > 0, spread, 1.0)
    return MatchedSets(kept, balance)


def slopes(effects: Float[Array, "null head"], margins: Float[Array, " null"]) -> Float[Array, " head"]:
    """Per-head slope of the effect on the margin over reference nulls; zeros where the margin does not vary.

    A chosen token is a maximum, so every head that feeds logits looks helpful in proportion to it.
    """
    centred = margins - margins.mean()
    spread = (centred**2).sum()
    return centred @ (effects - effects.mean(0)) / spread if spread > 0 else np.zeros(effects.shape[1])


# -- the statistic ----------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Sets(Brief):
    """Matched sets of one kind as arrays.

    Attributes:
        members: for each set its effects `[member, head]`, the event first, slope removed.
        transcript: `[set]` number of the transcript of each set.
    """

    members: tuple[Float[Array, "_ head"], ...]
    transcript: Int[Array, " set"]

    def __post_init__(self) -> None:
        if len(self.members) != len(self.transcript):
            raise ValueError(f"{len(self.members)} sets and {len(self.transcript)} transcript numbers")
        if any(len(m) < 2 for m in self.members):
            raise ValueError("every set needs an event and at least one null")


def transcript_scales(sets: Sets) -> Float[Array, " transcript"]:
    """Label-blind scale of each transcript: median absolute deviation from the set means, over all heads.

    It does not know which member is the event, so permuting that changes nothing.
    """
    names = np.unique(sets.transcript)
    scales = np.array([np.median(np.concatenate([np.abs(m - m.mean(0)).ravel() for m, t in zip(sets.members, sets.transcript, strict=True) if t == name]))
                       for name in names])
    return np.where(scales > 0, scales, 1.0)


class _Contrasts:
    """For each set and member, the contrast if that member were the event, scaled by transcript."""

    def __init__(self, sets: Sets):
        names, self.group = np.unique(sets.transcript, return_inverse=True)
        scales = transcript_scales(sets)
        order = np.argsort(self.group, kind="stable")
        self.group = self.group[order]
        self.sizes = np.array([len(sets.members[i]) for i in order])
        self.offset = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        rows = []
        per_transcript = np.bincount(self.group)
        for i, group in zip(order, self.group, strict=True):
            m = sets.members[i]
            contrast = (m * len(m) - m.sum(0)) / (len(m) - 1)  # member minus the mean of the others
            rows.append(contrast / scales[group] / per_transcript[group])
        self.rows = np.concatenate(rows)
        self.starts = np.searchsorted(self.group, np.arange(len(names)))

    def differences(self, chosen: Int[Array, "*draw set"]) -> Float[Array, "*draw transcript head"]:
        """D: mean contrast of each transcript with the chosen members as events."""
        return np.add.reduceat(self.rows[self.offset + chosen], self.starts, axis=-2)


def statistic(differences: Float[Array, "*draw transcript head"]) -> Float[Array, "*draw head"]:
    """`r = sum D / ||D||` over transcripts; 0 where a head never differs."""
    norm = np.sqrt((differences**2).sum(-2))
    return np.divide(differences.sum(-2), norm, out=np.zeros_like(norm), where=norm > 0)


@dataclass(frozen=True)
class Calibration(Viewed):
    """Calibrated heads of one kind.

    Attributes:
        statistic: `[head]`, r.
        p_value: `[head]`, uncorrected; never 0.
        p_maxt: `[head]`, corrected over all heads and kinds.
        q_value, q_by: `[head]`, Benjamini-Hochberg and Benjamini-Yekutieli within the kind.
        transcripts: how many transcripts contribute.
        null_max: `[draw]` the largest statistic of all heads and kinds in each permutation.
    """

    statistic: Float[Array, " head"]
    p_value: Float[Array, " head"]
    p_maxt: Float[Array, " head"]
    q_value: Float[Array, " head"]
    q_by: Float[Array, " head"]
    transcripts: int
    null_max: Float[Array, " draw"]

    def __repr__(self) -> str:
        return (f"Calibration({len(self.statistic)} heads over {self.transcripts} transcripts, {len(self.null_max)} permutations: {int((self.q_value <= 0.05).sum())} with q <= .05, "
                f"{int((self.p_maxt <= 0.05).sum())} with max-T p <= .05)")

    def ranking(self) -> Int[Array, " head"]:
        """Heads by statistic, largest first; ties in (layer, head) order."""
        return np.argsort(-self.statistic, kind="stable")


def calibrate(kinds: dict[str, Sets], *, draws: int = 9_999, seed: int = 0, sign: int = 1, arm: str = "sets") -> dict[str, Calibration]:
    """Test every head of every kind against permutations, jointly.

    Args:
        kinds: the matched sets of each kind of event; all with the same heads.
        draws: permutations; at least 20 times the heads for q-values that can reach .05.
        seed: of the permutations.
        sign: 1 for heads that support the decision, -1 for those that oppose it.
        arm: `sets` permutes which member of a set is the event; `signs` flips whole transcripts, a
            second look only (skewed effects inflate its error).
    """
    if arm not in ("sets", "signs"):
        raise ValueError(f"unknown arm {arm!r}: expected sets or signs")
    rng = np.random.default_rng(seed)
    contrasts = {kind: _Contrasts(sets) for kind, sets in kinds.items()}
    real = {kind: c.differences(np.zeros(len(c.sizes), int)) for kind, c in contrasts.items()}
    observed = {kind: sign * statistic(d) for kind, d in real.items()}
    above = {kind: np.zeros(len(r), int) for kind, r in observed.items()}
    above_max = {kind: np.zeros(len(r), int) for kind, r in observed.items()}
    null_max = np.full(draws, -np.inf)
    width = max((c.rows.shape[1] * len(c.sizes) for c in contrasts.values()), default=1)
    chunk = max(1, min(256, 4_000_000 // max(width, 1)))
    for start in range(0, draws, chunk):
        n = min(chunk, draws - start)
        drawn = {}
        for kind, c in contrasts.items():
            if arm == "sets":
                d = c.differences((rng.random((n, len(c.sizes))) * c.sizes).astype(int))
            else:
                d = real[kind] * rng.choice([-1.0, 1.0], (n, len(real[kind]), 1))
            drawn[kind] = sign * statistic(d)
        largest = np.max([r.max(-1) for r in drawn.values()], axis=0)
        null_max[start:start + n] = largest
        for kind, r in drawn.items():
            above[kind] += reaches(r, observed[kind]).sum(0)
            above_max[kind] += reaches(largest[:, None], observed[kind]).sum(0)
    return {kind: Calibration(
        sign * observed[kind], (1 + above[kind]) / (1 + draws), (1 + above_max[kind]) / (1 + draws),
        adjusted((1 + above[kind]) / (1 + draws), "fdr_bh"), adjusted((1 + above[kind]) / (1 + draws), "fdr_by"),
        len(real[kind]), null_max) for kind in kinds}


def reaches(null: Float[Array, "draw #head"], observed: Float[Array, " head"]) -> Bool[Array, "draw head"]:
    """Whether a null value reaches the observed one; ties count, up to rounding."""
    return null >= observed - 1e-9 * (1 + np.abs(observed))


def p_value(observed: float, null: Sequence[float] | Float[Array, " draw"]) -> float:
    """`(1 + #{null >= observed}) / (1 + B)`: never 0, ties count."""
    return (1 + int(reaches(np.asarray(null, float)[:, None], np.array([float(observed)])).sum())) / (1 + len(null))


def adjusted(p_values: Float[Array, " head"], method: str) -> Float[Array, " head"]:
    """Multiplicity-adjusted p-values by statsmodels (`fdr_bh`, `fdr_by`, `holm`)."""
    from statsmodels.stats.multitest import multipletests

    return multipletests(p_values, method=method)[1] if len(p_values) else p_values


def bootstrap_interval(values: Float[Array, "event head"], groups: Int[Array, " event"], *, draws: int = 2_000, seed: int = 0,
                       level: float = 0.95) -> tuple[Float[Array, " head"], Float[Array, " head"]]:
    """Percentile interval of the mean over events, drawing whole transcripts."""
    _, index = np.unique(groups, return_inverse=True)
    n = index.max(initial=-1) + 1
    sums = np.zeros((n, values.shape[1]))
    np.add.at(sums, index, values)
    counts = np.bincount(index, minlength=n)
    rng = np.random.default_rng(seed)
    means = []
    for start in range(0, draws, 256):
        weight = rng.multinomial(n, np.full(n, 1 / n), min(256, draws - start)).astype(float)
        means.append(weight @ sums / (weight @ counts)[:, None])
    low, high = np.percentile(np.concatenate(means), [50 * (1 - level), 50 * (1 + level)], axis=0)
    return low, high


def ratio_interval(top: Float[Array, "*quantity event"], bottom: Float[Array, " event"], groups: Sequence | Array, *, draws: int = 2_000, seed: int = 0,
                   level: float = 0.95) -> tuple[Float[Array, "*quantity"], Float[Array, "*quantity"]]:
    """Percentile interval of `sum(top) / sum(bottom)`, drawing whole groups; draws without a positive bottom are left out."""
    _, index = np.unique(np.asarray(groups), return_inverse=True)
    n = index.max(initial=-1) + 1
    member = np.eye(n)[index] if n else np.zeros((0, 0))
    weight = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), draws).astype(float) if n else np.zeros((draws, 0))
    above, below = np.asarray(top, np.float64) @ member @ weight.T, np.asarray(bottom, np.float64) @ member @ weight.T
    ratio = np.where(below > 0, above / np.where(below > 0, below, 1), np.nan)
    if not np.isfinite(ratio).any(-1).all():
        return np.full(above.shape[:-1], np.nan), np.full(above.shape[:-1], np.nan)
    return tuple(np.asarray(np.nanpercentile(ratio, q, axis=-1)) for q in (50 * (1 - level), 50 * (1 + level)))
