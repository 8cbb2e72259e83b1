"""Exact mean-ablation: what a head is worth to a decision, from a real forward pass.

    effect = m(clean) - m(do z[l,h] := zbar[l,h]) at the event's position

Positive: the head supports the decision. This sign rule holds for every verb of the package.
`zbar` is a mean over the events of the same kind in a disjoint reference split: a head that writes
the same thing at every such event is not counted for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float

from ._cache import Prefix
from .branches import MEMORY, Branch, branch_logits, clean_z
from .decisions import DecisionEvent, Kind, check_kind
from .errors import ExactnessError, InputError
from .heads import HeadScores, HeadSet
from .interventions import AddToZ, Keep, MeanAblate
from .margin import Margin, Rule, fix_margin
from .views import Brief, Viewed

if TYPE_CHECKING:
    import pandas as pd

    from .model import DecisionModel, Reading

Array = np.ndarray
MINIMUM = 30  # reference events of a kind, below which means are refused


@dataclass(frozen=True, eq=False)
class ReferenceMeans(Viewed):
    """Mean z of every head at the decision position, by kind of event.

    Attributes:
        means: kind -> `[layer, head, d_head]`.
        counts: kind -> how many events went into it.
        transcripts: ids of the reference transcripts, none of which may be scored.
        groups: their groups (patients), none of which may be scored either.
    """

    means: Mapping[Kind, Float[Array, "layer head d_head"]]
    counts: Mapping[Kind, int]
    transcripts: frozenset[str]
    groups: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"ReferenceMeans({', '.join(f'{n} {kind} events' for kind, n in self.counts.items())} of {len(self.transcripts)} transcripts)"

    def _rows(self):
        return [{"kind": kind, "events": n, "root mean square of z": float(np.sqrt((self.means[kind].astype(np.float64) ** 2).mean()))} for kind, n in self.counts.items()], len(self.counts)

    def of(self, event: DecisionEvent, group: str | None = None) -> Float[Array, "layer head d_head"]:
        """The means for an event.

        Raises:
            InputError: when its transcript or group is a reference (a leak), or its kind has no means.
        """
        if event.transcript in self.transcripts:
            raise InputError(f"transcript {event.transcript} is in the reference split and is scored too; keep the splits apart")
        if group in self.groups:
            raise InputError(f"transcript {event.transcript} is of group {group}, which is in the reference split too; keep a group in one split")
        if event.kind not in self.means:
            raise InputError(f"there are no reference means for {event.kind} events; add transcripts with such events to the reference split")
        return self.means[event.kind]


def reference_means(model: DecisionModel, readings: Iterable[Reading], *, minimum: int = MINIMUM, memory: int = MEMORY) -> ReferenceMeans:
    """Mean z by kind over the primary events of reference transcripts, in float64.

    Args:
        readings: the reference split, disjoint from what is scored.
        minimum: fewest events of a kind; fewer are refused. Lowering it below 30 warns.

    Raises:
        InputError: when a kind has fewer events than `minimum`.
        ExactnessError: if the clean rows differ from the plain model's logits.
    """
    sums: dict[Kind, Array] = {}
    counts: dict[Kind, int] = {}
    ids, groups = set(), set()
    for reading in readings:
        ids.add(reading.transcript.id), groups.add(reading.transcript.group)
        events = [e for e in reading.events if e.primary]
        check_events(model, reading, events, memory)
        z = clean_z(model.hooked, reading.prefix, [e.position for e in events], memory).double().cpu().numpy()
        for event, value in zip(events, z, strict=True):
            sums[event.kind] = sums.get(event.kind, 0) + value
            counts[event.kind] = counts.get(event.kind, 0) + 1
    if not counts:
        raise InputError("the reference split has no decision event; add transcripts to it")
    for kind, n in counts.items():
        if n < minimum:
            raise InputError(f"only {n} {kind} events in the reference split and {minimum} are needed; add reference transcripts")
    if min(counts.values()) < MINIMUM:
        warnings.warn(f"reference means from as few as {min(counts.values())} events; {MINIMUM} or more are advised", stacklevel=2)
    means = {kind: (total / counts[kind]).astype(np.float32) for kind, total in sums.items()}
    return ReferenceMeans(means, counts, frozenset(ids), frozenset(groups - {None}))


@dataclass(frozen=True, eq=False)
class Ablation(Viewed):
    """Exact effects at the events of one or more transcripts.

    Attributes:
        scores: effect in logits, `[event, layer, head]`.
        margins: `m`, the clean margin, `[event]`.
        floors: `m0`, the margin with every head ablated, `[event]`.
        measured: what each margin is between: chosen id and competitor.
        events: the events.
    """

    scores: HeadScores
    margins: Float[Array, " event"]
    floors: Float[Array, " event"]
    measured: tuple[Margin, ...]
    events: tuple[DecisionEvent, ...]

    @property
    def attention_share(self) -> Float[Array, " event"]:
        """`(m - m0) / m`: how much of the margin attention at the position carries at all."""
        return (self.margins - self.floors) / self.margins

    def of_kind(self, kind: Kind) -> Ablation:
        """The primary events of one kind.

        Raises:
            InputError: for an unknown kind.
        """
        check_kind(kind)
        keep = [i for i, e in enumerate(self.events) if e.kind == kind and e.primary]
        names = tuple(self.scores.events[i] for i in keep)
        scores = HeadScores(self.scores.values[keep], self.scores.name, self.scores.unit, self.scores.sign, names, self.scores.meta)
        return Ablation(scores, self.margins[keep], self.floors[keep], tuple(self.measured[i] for i in keep), tuple(self.events[i] for i in keep))

    @classmethod
    def join(cls, parts: Iterable[Ablation]) -> Ablation:
        """The events of several transcripts, one after the other."""
        parts = list(parts)
        if not parts:
            raise ValueError("nothing to join")
        return cls(HeadScores.join(p.scores for p in parts), np.concatenate([p.margins for p in parts]), np.concatenate([p.floors for p in parts]),
                   tuple(m for p in parts for m in p.measured), tuple(e for p in parts for e in p.events))

    def to_frame(self) -> pd.DataFrame:
        """One row for each event: what was chosen against what, `m`, `m0`."""
        import pandas as pd

        return pd.DataFrame({
            "transcript": [e.transcript for e in self.events], "kind": [e.kind for e in self.events],
            "position": [e.position for e in self.events], "label": [e.label for e in self.events],
            "near_miss": [e.near_miss or "" for e in self.events], "chosen": [m.chosen for m in self.measured],
            "against": [" ".join(map(str, m.against)) for m in self.measured], "m": self.margins, "m0": self.floors})

    def __repr__(self) -> str:
        if not len(self.margins):
            return "Ablation(no events)"
        return f"Ablation({len(self.margins)} events, median m {np.median(self.margins):.2f} and m0 {np.median(self.floors):.2f} logits; {self.scores!r})"


def event_margin(reading: Reading, event: DecisionEvent, rule: Rule = "runner_up") -> Margin:
    """Fix an event's margin in the clean run; a departure is always against its near-miss, unless
    the rule is `vocabulary`."""
    return fix_margin(reading.clean(event), event.chosen, event.competitors,
                      "runner_up" if event.kind == "departure" and rule != "vocabulary" else rule)


def mean_ablate(model: DecisionModel, reading: Reading | Sequence[Reading], means: ReferenceMeans, *, rule: Rule = "runner_up", memory: int = MEMORY) -> Ablation:
    """Ablate every head at every event of a transcript: `events x (layers x heads + 2)` packed rows.

    Args:
        reading: the transcript, read with its events; or several, whose events come one after the other.
        means: reference means of a disjoint split.
        rule: what a choice is measured against; see `margin.fix_margin`.
        memory: bytes that one pack of rows may take.

    Raises:
        ExactnessError: if the clean rows differ from the plain model's logits.
        InputError: if the transcript is one of the reference split.
    """
    if isinstance(reading, Sequence):
        return Ablation.join(mean_ablate(model, r, means, rule=rule, memory=memory) for r in reading)
    probes = [Probe(event.position, means.of(event, reading.transcript.group), (event_margin(reading, event, rule),)) for event in reading.events]
    measured = measure(model, reading.prefix, probes, memory)
    for event, row in zip(reading.events, measured.clean, strict=True):
        check_clean(reading, event, row, model.hooked.limit)
    scores = HeadScores(measured.effects[:, 0], "mean-ablation effect",
                        events=tuple(e.name for e in reading.events), meta={"model": model.name, "rule": rule})
    return Ablation(scores, measured.margins[:, 0], measured.floors[:, 0], tuple(p.margins[0] for p in probes), reading.events)


@dataclass(frozen=True, eq=False, repr=False)
class Probe(Brief):
    """A token whose margins are measured with every head ablated in turn.

    Attributes:
        position: where the logits are.
        zbar: the means to ablate with, `[layer, head, d_head]`.
        margins: one or more margins, all read off the same rows.
    """

    position: int
    zbar: Float[Array, "layer head d_head"]
    margins: tuple[Margin, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Measured(Brief):
    """Exact effects at probes.

    Attributes:
        margins, floors: clean, and with every head ablated, `[probe, margin]`.
        effects: `[probe, margin, layer, head]`, clean minus ablated; 0 where a layer has no heads.
        clean: the clean logits of each probe.
    """

    margins: Float[Array, "probe margin"]
    floors: Float[Array, "probe margin"]
    effects: Float[Array, "probe margin layer head"]
    clean: list[Float[torch.Tensor, " vocabulary"]]


def measure(model: DecisionModel, prefix: Prefix, probes: Sequence[Probe], memory: int = MEMORY) -> Measured:
    """Ablate every head at every probe of a text: `probes x (layers x heads + 2)` packed rows."""
    hooked = model.hooked
    singles = list(hooked.heads)
    branches: list[Branch] = []
    for probe in probes:
        wanted = tuple(sorted({i for m in probe.margins for i in (m.chosen, *m.against)}))
        branches += [Branch(probe.position), Branch(probe.position, (), (Keep(HeadSet(), probe.zbar),), wanted)]
        branches += [Branch(probe.position, (), (MeanAblate(HeadSet([head]), probe.zbar),), wanted) for head in singles]
    each, kinds = len(singles) + 2, max((len(p.margins) for p in probes), default=1)
    found = np.zeros((len(probes), each, kinds), np.float32)
    clean: list[torch.Tensor] = [torch.empty(0)] * len(probes)
    few = [torch.empty(each - 1, len(branches[n * each + 1].ids)) for n in range(len(probes))]
    for i, logits in branch_logits(hooked, prefix, branches, memory):
        number, role = divmod(i, each)
        if role == 0:
            clean[number] = logits[0].clone()
        else:
            few[number][role - 1] = logits[0]
    for number, probe in enumerate(probes):
        for column, margin in enumerate(probe.margins):
            found[number, 0, column] = float(margin(clean[number]))
            found[number, 1:, column] = margin.among(branches[number * each + 1].ids)(few[number]).numpy()
    effects = np.zeros((len(probes), kinds, hooked.n_layers, hooked.n_heads), np.float32)
    layer, head = (list(x) for x in zip(*singles, strict=True))
    effects[:, :, layer, head] = (found[:, :1] - found[:, 2:]).transpose(0, 2, 1)
    return Measured(found[:, 0], found[:, 1], effects, clean)


def noise_floor(model: DecisionModel, reading: Reading, *, draws: int = 16, seed: int = 0, memory: int = MEMORY) -> Float[Array, " event"]:
    """How far rounding alone moves the effects at each event, in logits: zero in float32 and float64.

    z of every head is moved by one rounding of its own number format, at random, which draws the
    rounding of everything after it anew; the floor is the deviation of the margin over `draws` such
    rows, times sqrt 2, for an effect is the difference of two margins.
    """
    hooked = model.hooked
    if hooked.dtype not in (torch.float16, torch.bfloat16):
        return np.zeros(len(reading.events), np.float32)
    step, rng = torch.finfo(hooked.dtype).eps / 2, np.random.default_rng(seed)
    z = clean_z(hooked, reading.prefix, [e.position for e in reading.events], memory).float().cpu().numpy()
    margins = [event_margin(reading, e) for e in reading.events]
    branches = [Branch(e.position, (), (AddToZ(hooked.heads, z[n] * step * rng.choice([-1, 1], z[n].shape).astype(np.float32)),), (m.chosen, *m.against))
                for n, (e, m) in enumerate(zip(reading.events, margins, strict=True)) for _ in range(draws)]
    found = np.zeros(len(branches))
    for i, logits in branch_logits(hooked, reading.prefix, branches, memory):
        found[i] = float(margins[i // draws].among(branches[i].ids)(logits[0]))
    return (found.reshape(-1, draws).std(1, ddof=1) * np.sqrt(2)).astype(np.float32)


def check_events(model: DecisionModel, reading: Reading, events: Sequence[DecisionEvent], memory: int = MEMORY) -> None:
    """Compare the clean rows of events with the plain model's logits; raises ExactnessError where they differ."""
    for i, rows in branch_logits(model.hooked, reading.prefix, [Branch(e.position) for e in events], memory):
        check_clean(reading, events[i], rows[0], model.hooked.limit)


def check_clean(reading: Reading, event: DecisionEvent, row: torch.Tensor, limit: float) -> None:
    """Compare a clean packed row with the plain model's logits; raises ExactnessError where they differ."""
    reference = reading.clean(event)
    error = float((row - reference).abs().max() / reference.std())
    if not error <= limit:
        raise ExactnessError(f"transcript {reading.transcript.id}, position {event.position}: packed rows differ from the plain model by "
                             f"{error:.1e} of the logits' deviation (limit {limit:.0e}); its effects would not be exact")
