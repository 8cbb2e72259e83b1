"""Families of heads: what calibrated heads read when a decision is made.

    reading = mass on the span - mean mass on control windows of its length,  sinks left out, renormalised

for every head at every event, and at the event's matched null tokens on the same span: a head reads a span
*for the decision* if it does so more than at its nulls, calibrated as effects are. The region family reads
the chosen region's block, the near-miss family the near-miss mention; heads that read neither form the query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from ._processes import spread
from .branches import MEMORY, Branch
from .calibration import Calibration, MatchedSets, Sets, bootstrap_interval, calibrate
from .decisions import DecisionEvent, Kind
from .heads import HeadSet, overlaps
from .necessity import plain
from .reads import Span, pooled_attention
from .spans import Sinks, as_keys, control_windows, token_spans
from .views import Brief, Viewed

if TYPE_CHECKING:
    import pandas as pd

    from .model import DecisionModel, Reading

Array = np.ndarray
BLOCK, NEAR = "own block", "near-miss"
ASKED: tuple[tuple[Kind, str], ...] = (("region", BLOCK), ("label", BLOCK), ("departure", BLOCK), ("departure", NEAR))
LEAST_MASS = 0.05  # of a row outside sinks, below which what it reads is undefined
LEAST_READING = 0.1  # mean reading of a head that is said to read a span


@dataclass(frozen=True, eq=False, repr=False)
class Reads(Brief):
    """What every head reads at one kind of event, of one span.

    Attributes:
        kind, span: of what.
        mass, control: `[head]` mean share of attention outside sinks, on the span and on control windows.
        low, high: `[head]` 95% limits of the mean reading, over transcripts.
        null: `[head]` mean reading at the matched null tokens.
        undefined: `[head]` share of events with too little mass outside sinks; they count as no reading.
        calibration: readings against those at null tokens.
        events, without: events that were read, and those without the span, a window or a null token after it.
    """

    kind: Kind
    span: str
    mass: Float[Array, " head"]
    control: Float[Array, " head"]
    low: Float[Array, " head"]
    high: Float[Array, " head"]
    null: Float[Array, " head"]
    undefined: Float[Array, " head"]
    calibration: Calibration
    events: int
    without: int

    @property
    def reading(self) -> Float[Array, " head"]:
        return self.mass - self.control

    def readers(self, alpha: float = 0.05, least: float = LEAST_READING) -> np.ndarray:
        """Which heads read the span for the decision."""
        return (self.calibration.q_value <= alpha) & (self.reading >= least)


def read_shares(model: DecisionModel, reading: Reading, positions: Sequence[int], target: Sequence[Span], control: Sequence[Span], sinks: Sinks,
                memory: int = MEMORY) -> tuple[Float[Array, "position head"], Float[Array, "position head"]]:
    """Share of attention outside sinks from some positions to a span, and the mean share of its control windows.

    NaN where under .05 of a row is outside sinks.
    """
    n = len(reading.prefix)
    sink = sinks.keys(reading.encoded.ids[:n])
    keys = np.stack([as_keys(target, n) & ~sink, as_keys(control, n) & ~sink, ~sink])
    mass = pooled_attention(model.hooked, reading.prefix, [Branch(p) for p in positions], keys, memory).flatten(1, 2).double().cpu().numpy()
    outside = np.where(mass[..., 2] >= LEAST_MASS, mass[..., 2], np.nan)
    return mass[..., 0] / outside, mass[..., 1] / outside / max(1, len(control))


def measure_reads(model: DecisionModel, events: Sequence[tuple[Reading, DecisionEvent, Sequence[int]]], sinks: Sinks, *, asked: Sequence[tuple[Kind, str]] = ASKED,
                  draws: int = 9_999, seed: int = 0, memory: int = MEMORY) -> dict[tuple[Kind, str], Reads]:
    """What all heads read, calibrated over heads, kinds and spans together.

    Args:
        events: each with its reading and the positions of its matched null tokens.
        sinks: see `spans.find_sinks`.
        asked: kinds, and the span of each.
        draws: permutations.
        seed: of the permutations.
    """
    found, rows = {}, {}
    numbers = {name: i for i, name in enumerate(dict.fromkeys(r.transcript.id for r, _, _ in events))}
    for kind, span in asked:
        def shares(item: tuple[Reading, DecisionEvent, Sequence[int]], span: str = span) -> tuple[np.ndarray, np.ndarray] | None:
            reading, event, nulls = item
            target = token_spans(reading, event, span)
            control = control_windows(reading, event, target) if target else []
            later = [p for p in nulls if target and p >= max(end for _, end in target)]
            return read_shares(model, reading, [event.position, *later], target, control, sinks, memory) if control and later else None

        asked_of = [item for item in events if item[1].kind == kind]
        read = spread(shares, asked_of, by=lambda item: item[0].transcript.id)
        there = [(numbers[reading.transcript.id], *x) for (reading, _, _), x in zip(asked_of, read, strict=True) if x is not None]
        if len({number for number, _, _ in there}) > 1:
            rows[f"{kind}/{span}"] = Sets(tuple(np.nan_to_num(mass - other) for _, mass, other in there), np.array([number for number, _, _ in there], int))
            found[kind, span] = (np.array([mass[0] for _, mass, _ in there]), np.array([other[0] for _, _, other in there]), len(read) - len(there))
    calibrated = calibrate(rows, draws=draws, seed=seed) if rows else {}
    out = {}
    for (kind, span), (mass, control, without) in found.items():
        sets = rows[f"{kind}/{span}"]
        low, high = bootstrap_interval(np.stack([m[0] for m in sets.members]), sets.transcript, seed=seed)
        out[kind, span] = Reads(kind, span, np.nan_to_num(mass).mean(0), np.nan_to_num(control).mean(0), low, high, np.mean([m[1:].mean(0) for m in sets.members], 0),
                                np.isnan(mass).mean(0), calibrated[f"{kind}/{span}"], len(mass), without)
    return out


def matched_events(surveys: Sequence, matched: Mapping[Kind, MatchedSets]) -> list[tuple[Reading, DecisionEvent, list[int]]]:
    """The events of surveys, each with the positions of the null tokens that were matched to it."""
    where = [(s, int(p)) for s in surveys for p in s.nulls.positions]
    found = []
    for kind, sets in matched.items():
        events = [(s.reading, e) for s in surveys for e in s.reading.events if e.kind == kind]
        found += [(r, e, [where[j][1] for j in nulls]) for (r, e), nulls in zip(events, sets.nulls, strict=True)]
    return found


@dataclass(frozen=True, eq=False)
class Families(Viewed):
    """Calibrated heads by what they read.

    Attributes:
        region, near_miss: the families.
        neither: calibrated heads that read neither span for the decision.
        both: heads of departures that read both; they stand in the family whose span they read more.
        calibrated: kind -> calibrated heads, as they were.
        reads: (kind, span) -> what every head reads.
        shape: layers and heads of the model.
    """

    region: HeadSet
    near_miss: HeadSet
    neither: HeadSet
    both: HeadSet
    calibrated: Mapping[Kind, HeadSet]
    reads: Mapping[tuple[Kind, str], Reads]
    shape: tuple[int, int]

    @property
    def named(self) -> dict[str, HeadSet]:
        return {"region": self.region, "near-miss": self.near_miss, "neither": self.neither}

    def depth(self, heads: HeadSet) -> float:
        """Mean relative depth: 0 in the first layer, 1 in the last; NaN for no head."""
        return float(np.mean([h.layer for h in heads]) / max(1, self.shape[0] - 1)) if len(heads) else float("nan")

    def overlaps(self) -> list[dict]:
        """Every pair of calibrated sets: how many heads they share, and how likely so many are by chance."""
        return overlaps(self.calibrated, self.shape[0] * self.shape[1])

    def to_frame(self) -> pd.DataFrame:
        """One row for each head, kind and span: mass, control, reading with its interval, and the family of the head."""
        import pandas as pd

        layers, heads = (x.ravel() for x in np.indices(self.shape))
        family = np.array(["" for _ in layers], object)
        for name, members in self.named.items():
            family[members.to_mask(*self.shape).ravel()] = name
        parts = [pd.DataFrame({"kind": r.kind, "span": r.span, "layer": layers, "head": heads, "calibrated": self.calibrated.get(r.kind, HeadSet()).to_mask(*self.shape).ravel(),
                               "mass": r.mass, "control": r.control, "reading": r.reading, "low": r.low, "high": r.high, "null_reading": r.null, "undefined": r.undefined,
                               "q_value": r.calibration.q_value, "p_maxt": r.calibration.p_maxt, "reads": r.readers(), "family": family}) for r in self.reads.values()]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()

    def summary(self) -> dict:
        """Families, depth and overlaps, as plain values."""
        return {**{name: {"heads": list(map(str, heads)), "depth": plain(self.depth(heads)), "layers": {str(k): v for k, v in heads.per_layer().items()}}
                   for name, heads in self.named.items()},
                "both": list(map(str, self.both)), "overlaps": self.overlaps(),
                "events": {f"{kind}, {span}": {"read": r.events, "without": r.without} for (kind, span), r in self.reads.items()}}

    def __repr__(self) -> str:
        return "Families(" + "; ".join(f"{name}: {', '.join(map(str, list(heads)[:5])) or 'none'}{' ...' if len(heads) > 5 else ''}" for name, heads in self.named.items()) + ")"


def families(reads: Mapping[tuple[Kind, str], Reads], calibrated: Mapping[Kind, HeadSet], shape: tuple[int, int], alpha: float = 0.05) -> Families:
    """Sort calibrated heads by what they read.

    A head of departures that reads the list belongs to the region family, unless it reads the near-miss mention more.
    """
    readers = {key: HeadSet.from_mask(r.readers(alpha).reshape(shape)) for key, r in reads.items()}
    none = HeadSet()
    of = lambda kind, span: calibrated.get(kind, none) & readers.get((kind, span), none)  # noqa: E731
    both = of("departure", BLOCK) & of("departure", NEAR)
    more = HeadSet(h for h in both if reads["departure", NEAR].reading.reshape(shape)[h] > reads["departure", BLOCK].reading.reshape(shape)[h])
    near = of("departure", NEAR) - (both - more)
    region = of("region", BLOCK) | of("label", BLOCK) | (of("departure", BLOCK) - more)
    everything = HeadSet(h for heads in calibrated.values() for h in heads)
    return Families(region, near, everything - region - near, both, dict(calibrated), reads, shape)
