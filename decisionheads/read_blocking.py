"""Read-blocking: a family's effect, and what is left of it when the family cannot read a span.

    removed = sum(m - m_blocked) / sum(m - m_setablated)

over held-out events: 1 if the set is worth nothing without what it reads there, 0 if it reads something else.
Three arms: attention from the decision to the span is removed *before softmax* and the rest renormalises; its
weights are dropped *after softmax*; the span's *values* become their mean over reference events. Undefined
unless the interval of the denominator excludes 0: a set that is not needed has no effect to remove.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from ._processes import spread
from .ablation import ReferenceMeans, event_margin
from .branches import MEMORY, Branch, branch_logits
from .calibration import ratio_interval
from .decisions import DecisionEvent, Kind, check_kind
from .heads import HeadSet
from .interventions import BlockReads, Intervention, MeanAblate, ReplaceValues
from .knock_in import random_heads
from .labels import LabelSpace
from .reads import Span
from .spans import Sinks, as_keys, check_span, control_windows, token_spans, unrelated_mention
from .views import Viewed

if TYPE_CHECKING:
    import pandas as pd

    from .model import DecisionModel, Reading

Array = np.ndarray
ARMS = ("before softmax", "after softmax", "values to their mean")
CONTROLS = ("equal span", "all but the span", "other heads", "unrelated mention", "other family's span")


@dataclass(frozen=True, eq=False)
class Blocked(Viewed):
    """What blocking a span does to the effect of a set of heads.

    Attributes:
        heads, kind, span: of what.
        whole: `[event]` `m - m(set ablated)`, logits.
        lost: arm or control -> `[event]` `m - m(blocked)`, logits; NaN where an event has no such span.
        groups: `[event]`.
        without: events that have no such span.
    """

    heads: HeadSet
    kind: Kind
    span: str
    whole: Float[Array, " event"]
    lost: Mapping[str, Float[Array, " event"]]
    groups: tuple[str, ...]
    without: int

    @property
    def defined(self) -> bool:
        """Whether the set has an effect to remove: the interval of its mean excludes 0."""
        low = ratio_interval(self.whole, np.ones(len(self.whole)), self.groups)[0] if len(self.whole) else np.nan
        return bool(low > 0)

    def removed(self, name: str) -> tuple[int, float, float, float]:
        """`(events, removed, low, high)` of an arm or control; NaN where undefined or n/a."""
        lost = self.lost.get(name, np.zeros(0))
        there = np.isfinite(lost) if len(lost) else np.zeros(len(self.whole), bool)
        if not there.any() or not self.defined:
            return int(there.sum()), float("nan"), float("nan"), float("nan")
        low, high = ratio_interval(lost[there], self.whole[there], np.array(self.groups)[there])
        return int(there.sum()), float(lost[there].sum() / self.whole[there].sum()), float(low), float(high)

    def to_frame(self) -> pd.DataFrame:
        """One row for each arm and control."""
        import pandas as pd

        rows = []
        for name in (*ARMS, *CONTROLS):
            n, share, low, high = self.removed(name)
            lost = self.lost.get(name, np.zeros(0))
            rows.append({"kind": self.kind, "span": self.span, "heads": len(self.heads), "role": "arm" if name in ARMS else "control", "name": name, "events": n,
                         "removed": share, "low": low, "high": high, "logits": float(np.nanmean(lost)) if n else np.nan, "effect": float(self.whole.mean()) if len(self.whole) else np.nan})
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        _, share, low, high = self.removed(ARMS[0])
        said = f"removes {share:.0%} [{low:.0%}, {high:.0%}] of its effect" if np.isfinite(share) else "undefined: the set has no effect to remove"
        return f"Blocked({len(self.heads)} heads, {self.span} at {len(self.whole)} {self.kind} events: {said})"


def value_means(model: DecisionModel, readings: Sequence[Reading], kind: Kind, span: str) -> Float[Array, "layer head d_head"] | None:
    """Mean value of a span's keys over reference events, for each query head; None where values cannot be replaced.

    The mean of an event is taken first, so that long spans do not weigh more.
    """
    hooked = model.hooked

    def of_text(reading: Reading) -> list[Array]:
        spans = [found for e in reading.events if e.kind == kind and (found := token_spans(reading, e, span))]
        keys = [as_keys(s, len(reading.prefix)) for s in spans]
        return [np.stack([values[0][:, k].double().mean(1).cpu().numpy() for _, values in reading.prefix.layers]) for k in keys]

    found = [mean for means in spread(of_text, readings if hooked.weighted else ()) for mean in means]
    if not found:
        return None
    mean = np.mean(found, 0).astype(np.float32)
    return mean.repeat(hooked.n_heads // mean.shape[1], 1)


def block_reads(model: DecisionModel, readings: Sequence[Reading], heads: HeadSet, kind: Kind, span: str, means: ReferenceMeans, sinks: Sinks, *,
                other_span: str = "", labels: LabelSpace | None = None, reference: Sequence[Reading] = (), seed: int = 0, memory: int = MEMORY) -> Blocked:
    """Block what a set of heads reads of a span, at every event of a kind that has one.

    Args:
        readings: held-out transcripts.
        heads: the set; the empty set changes nothing.
        span: name of a span of the events ("own block", "near-miss", or any of the transcripts' own).
        means: of a disjoint reference split.
        sinks: keys that "all but the span" leaves alone.
        other_span: the other family's span, a control.
        labels: to find unrelated mentions; without it that control is n/a.
        reference: transcripts of the reference split, for the arm that needs mean values.
        seed: of the other heads, drawn anew for each event.

    Raises:
        InputError: if a transcript is one of the reference split; for an unknown kind or span, or heads that the model does not have.
    """
    check_kind(kind)
    heads.check(model.n_layers, model.n_heads, model.name)
    check_span(span, readings)
    instead = value_means(model, reference, kind, span)
    rng = np.random.default_rng(seed)
    events_of = [[e for e in r.events if e.kind == kind and e.primary] for r in readings]
    # drawn in order, before texts are spread: who works on one does not know what was drawn for the others
    draws = [[random_heads(heads, model.n_layers, model.n_heads, rng) if token_spans(r, e, span) else HeadSet() for e in events] for r, events in zip(readings, events_of, strict=True)]

    def of_text(item: tuple[Reading, list[DecisionEvent], list[HeadSet]]) -> tuple[list[dict[str, float]], int]:
        reading, events, others = item
        jobs: list[tuple[DecisionEvent, dict[str, tuple[Intervention, ...]]]] = []
        for event, other in zip(events, others, strict=True):
            target = token_spans(reading, event, span)
            if not target:
                continue
            ways = {"set": (MeanAblate(heads, means.of(event, reading.transcript.group)),)}
            ways |= _ways(reading, event, heads, target, sinks, other_span, labels, instead if model.hooked.weighted else None, other, model)
            jobs.append((event, ways))
        margins = [event_margin(reading, e) for e, _ in jobs]
        names = [(n, name) for n, (_, ways) in enumerate(jobs) for name in ("clean", *(w for w in ways if any(len(c.heads) for c in ways[w])))]
        branches = [Branch(jobs[n][0].position, (), jobs[n][1].get(name, ()), (margins[n].chosen, *margins[n].against)) for n, name in names]
        found = {names[i]: float(margins[names[i][0]].among(branches[i].ids)(rows[0])) for i, rows in branch_logits(model.hooked, reading.prefix, branches, memory)}
        # without a head, exactly 0
        return [{name: found[n, "clean"] - found.get((n, name), found[n, "clean"]) for name in ways} for n, (_, ways) in enumerate(jobs)], len(events) - len(jobs)

    found = spread(of_text, list(zip(readings, events_of, draws, strict=True)))
    changes = [change for text, _ in found for change in text]
    groups = tuple(r.transcript.group or r.transcript.id for r, (text, _) in zip(readings, found, strict=True) for _ in text)
    lost = {name: np.array([change.get(name, np.nan) for change in changes]) for name in (*ARMS, *CONTROLS)}
    return Blocked(heads, kind, span, np.array([change["set"] for change in changes]), lost, groups, sum(n for _, n in found))


def _ways(reading: Reading, event: DecisionEvent, heads: HeadSet, target: Sequence[Span], sinks: Sinks, other_span: str, labels: LabelSpace | None,
          instead: Array | None, others: HeadSet, model: DecisionModel) -> dict[str, tuple[Intervention, ...]]:
    """Arm or control -> interventions, those that this event has."""
    block = lambda spans, who=heads: tuple(BlockReads(who, *s) for s in spans)  # noqa: E731
    ways = {ARMS[0]: block(target)}
    if model.hooked.weighted:
        ways[ARMS[1]] = tuple(ReplaceValues(heads, *s) for s in target)
    if instead is not None:
        ways[ARMS[2]] = tuple(ReplaceValues(heads, *s, instead) for s in target)
    equal = control_windows(reading, event, target, most=1)
    rest = ~as_keys(target, event.position) & ~sinks.keys(reading.encoded.ids[:event.position])
    edges = np.flatnonzero(np.diff(np.concatenate([[0], rest.astype(int), [0]])))
    outside = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    spans = {"equal span": equal, "all but the span": outside, "other family's span": token_spans(reading, event, other_span) if other_span else (),
             "unrelated mention": unrelated_mention(reading, event, labels, target) if labels is not None else ()}
    ways |= {name: block(where) for name, where in spans.items() if where}
    ways["other heads"] = block(target, others)
    return ways


def dissociation(own: Blocked, other: str = "other family's span") -> tuple[int, float, float, float]:
    """`(events, difference, low, high)`: removed by the own span less removed by the other family's, where an event has both.

    Two families are doubly dissociated if this excludes 0 for each of them.
    """
    there = np.isfinite(own.lost[ARMS[0]]) & np.isfinite(own.lost[other])
    if not there.any() or not own.defined:
        return int(there.sum()), float("nan"), float("nan"), float("nan")
    difference = own.lost[ARMS[0]][there] - own.lost[other][there]
    low, high = ratio_interval(difference, own.whole[there], np.array(own.groups)[there])
    return int(there.sum()), float(difference.sum() / own.whole[there].sum()), float(low), float(high)
