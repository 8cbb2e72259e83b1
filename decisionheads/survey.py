"""Surveys: transcripts read once, their null tokens matched to their events, and the reference means of both."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ._keeping import kept
from ._processes import spread
from .ablation import MINIMUM, Probe, ReferenceMeans, check_events, measure
from .branches import clean_z
from .calibration import CALIPER, MatchedSets, match, slopes
from .decisions import KINDS, DecisionEvent, Dropped, Kind, check_kind
from .errors import InputError
from .events import find_events
from .labels import LabelSpace
from .margin import Margin
from .model import DecisionModel, Reading
from .necessity import SOME
from .null_tokens import Sureness, null_positions, sureness
from .prefixes import Prefixes
from .transcripts import Encoded, Transcript, encode
from .views import Brief

SHARES = (0.2, 0.6)  # reference up to the first, selection up to the second, evaluation after it
FEW = 100  # reference nulls that are enough where none match


@dataclass(frozen=True)
class Options:
    """What a discovery was asked for; all of it is part of the result.

    Attributes:
        kinds: kinds of events.
        alpha: level of the false discovery rate within a kind.
        delta: least effect of a selected head, as a share of the kind's median `m - m0`.
        seed: of splits, permutations, donors and random sets.
        draws: permutations.
        caliper: how near null tokens must be, in standard deviations.
        minimum: fewest reference events of a kind.
        greedy: answers are the model's own greedy output, so a choice that is not its best is dropped.
        target: joint recovery that a head set must reach on the selection split.
        random_sets: random sets of heads that a set is held against.
        held_out: most evaluation transcripts that sets are judged on; 0 for all of them.
        cue: what asks for a region before its code is written, with `{number}` for the code's ordinal; empty: no elicitation.
        cut_from: what cuts count back from, `code` or `answer`; see `elicitation.elicit`.
        exclude_emitted: labels that an answer has given already are no longer alive, as in answers written within the labels.
        together: go on from single heads to sets, knock-in, families and blocked reads.
        pseudo: a sanity run: random null tokens are called events, and nothing should be found.
    """

    kinds: tuple[Kind, ...] = KINDS
    alpha: float = 0.05
    delta: float = 0.05
    seed: int = 0
    draws: int = 9_999
    caliper: float = CALIPER
    minimum: int = MINIMUM
    greedy: bool = True
    target: float = 0.8
    random_sets: int = SOME
    held_out: int = 0
    cue: str = ""
    cut_from: str = "code"
    exclude_emitted: bool = False
    together: bool = True
    pseudo: bool = False

    def __post_init__(self) -> None:
        for kind in self.kinds:
            check_kind(kind)


def split(transcripts: Sequence[Transcript], seed: int) -> dict[str, list[Transcript]]:
    """Reference, selection and evaluation by a seeded hash of group or id; a group is never cut."""
    key = lambda name: hashlib.sha256(f"{seed}:{name}".encode()).hexdigest()  # noqa: E731
    names = sorted({t.group or t.id for t in transcripts}, key=key)
    place = {name: (i + 0.5) / len(names) for i, name in enumerate(names)}
    found: dict[str, list[Transcript]] = {"reference": [], "selection": [], "evaluation": []}
    for t in transcripts:
        at = place[t.group or t.id]
        found["reference" if at < SHARES[0] else "selection" if at < SHARES[1] else "evaluation"].append(t)
    return found


@dataclass(frozen=True, eq=False, repr=False)
class Survey(Brief):
    """A transcript read once: its events, its null tokens, and how sure the model was at both."""

    reading: Reading
    events: Sureness
    nulls: Sureness
    dropped: tuple[Dropped, ...]
    accepted_near_misses: int

    def adopted(self, prefixes: Prefixes) -> Survey:
        """The same, read by another process."""
        return replace(self, reading=replace(self.reading, prefix=prefixes.adopt(self.reading.prefix)))

    def only(self, kinds: Collection[Kind]) -> Survey:
        """The same survey with events of some kinds only."""
        keep = [i for i, e in enumerate(self.reading.events) if e.kind in kinds]
        part = lambda x: x[keep]  # noqa: E731
        s = self.events
        events = Sureness(part(s.positions), part(s.margin), part(s.rival), part(s.covariates), tuple(s.classes[i] for i in keep))
        return replace(self, reading=replace(self.reading, events=tuple(self.reading.events[i] for i in keep)), events=events)


def survey(model: DecisionModel, transcript: Transcript, labels: LabelSpace, closers: Sequence[int], template: frozenset[int], asked: Options,
           prefixes: Prefixes | None = None) -> Survey:
    """Read a transcript at its events and null tokens; drop, on greedy output, choices that lost."""
    encoded = encode(transcript, model.tokenizer)
    found = find_events(transcript, labels, model.tokenizer, encoded=encoded, closers=closers, exclude_emitted=asked.exclude_emitted)
    events = tuple(e for e in found if e.primary and e.kind in asked.kinds)
    space = labels if transcript.candidates is None else labels.subset(transcript.candidates)
    nulls = null_positions(transcript, encoded, space, template, model.tokenizer)
    positions = sorted({e.position for e in events} | set(nulls))
    if not events:
        reasons = ", ".join(f"{n} {reason}" for reason, n in found.dropped_by_reason().items()) or "no label of the label file is in its answer"
        raise InputError(f"transcript {transcript.id} has no decision event ({reasons})")
    ids = torch.tensor(encoded.ids[: positions[-1] + 1], dtype=torch.long, device=model.hooked.device)
    prefix = (prefixes or model.prefixes).read(ids, tuple(positions))
    index = {p: i for i, p in enumerate(positions)}
    dropped = list(found.dropped)
    if asked.greedy:
        wins = lambda e: int(prefix.logits[index[e.position], list(e.alternatives)].argmax()) == e.alternatives.index(e.chosen)  # noqa: E731
        dropped += [Dropped(e.transcript, e.label, e.start, "not the best among live tokens", e.kind) for e in events if not wins(e)]
        events = tuple(e for e in events if wins(e))
    at = lambda where: sureness(transcript, encoded, where, prefix.logits[[index[p] for p in where]])  # noqa: E731
    everywhere = at(nulls)
    sure = [p for p, m in zip(nulls, everywhere.margin, strict=True) if m > 0]
    if asked.pseudo:
        events, sure = _pseudo_events(events, sure, everywhere, encoded, asked.seed)
    own = tuple(dict.fromkeys(e.position for e in events))
    kept = replace(prefix, logits=prefix.logits[[index[p] for p in own]], positions=own)
    reading = Reading(transcript, encoded, events, kept)
    check_events(model, reading, events)
    return Survey(reading, at([e.position for e in events]), at(sure), tuple(dropped), found.accepted_near_misses)


def _pseudo_events(events: tuple[DecisionEvent, ...], sure: list[int], nulls: Sureness, encoded: Encoded,
                   seed: int) -> tuple[tuple[DecisionEvent, ...], list[int]]:
    """As many random null words called events as there are events; the rest stay nulls."""
    at = {int(p): i for i, p in enumerate(nulls.positions)}
    words = [p for p in sure if nulls.classes[at[p]] == "word"]
    rng = np.random.default_rng([seed, len(encoded), int(encoded.ids.sum())])
    taken = sorted(int(p) for p in rng.permutation(words)[: len(events)])
    found = []
    for event, p in zip(events, taken, strict=False):
        chosen, rival = int(encoded.ids[p + 1]), int(nulls.rival[at[p]])
        found.append(replace(event, position=p, chosen=chosen, alternatives=tuple(sorted((chosen, rival))), competitors=(rival,), near_miss=None, mixed=()))
    return tuple(found), [p for p in sure if p not in taken]


def match_kind(surveys: Sequence[Survey], kind: Kind, caliper: float) -> MatchedSets:
    """Match the events of a kind to null tokens of their own transcripts."""
    events, event_class, nulls, null_class = [], [], [], []
    for i, s in enumerate(surveys):
        for e, row, c, m in zip(s.reading.events, s.events.covariates, s.events.classes, s.events.margin, strict=True):
            if e.kind == kind:
                events.append(row)
                event_class.append((i, c) if m > 0 else (i, "lost"))  # nothing to match a negative margin with
        nulls.append(s.nulls.covariates)
        null_class += [(i, c) for c in s.nulls.classes]
    return match(np.array(events).reshape(-1, 3), np.concatenate(nulls), event_class, null_class, caliper=caliper)


def reference(model: DecisionModel, surveys: Sequence[Survey], asked: Options, memory: int, bar=lambda items, what: items):
    """Means of events by kind, means of matched nulls by kind, slopes of effects on margins by kind."""
    means, counts, null_means, slope = {}, {}, {}, {}
    ids = frozenset(s.reading.transcript.id for s in surveys)
    flat = [(i, j) for i, s in enumerate(surveys) for j in range(len(s.nulls.positions))]
    events = {kind: [(s, e) for s in surveys for e in s.reading.events if e.kind == kind] for kind in asked.kinds}
    for kind, rows in events.items():
        if 0 < len(rows) < asked.minimum:
            raise InputError(f"only {len(rows)} {kind} events in the reference split of {len(surveys)} usable transcripts and {asked.minimum} are needed; "
                             f"give about {len(surveys) * asked.minimum // len(rows) * 5} transcripts, or leave the kind out")
    for kind, rows in events.items():
        if not rows:
            continue
        means[kind], counts[kind] = _mean_z(model, surveys, [[e.position for e in s.reading.events if e.kind == kind] for s in surveys], memory), len(rows)
        used = [flat[j] for nulls in match_kind(surveys, kind, max(asked.caliper, CALIPER)).nulls for j in nulls]
        if len(used) < 2:
            used = flat[:: max(1, len(flat) // FEW)]  # nothing matches: nulls of every text, evenly
        if len(used) < 2:
            raise InputError("the reference split has no null tokens that the model prefers to all others: its texts hold nothing but labels, or another model wrote them; give transcripts with reasoning, of this model")
        null_means[kind] = _mean_z(model, surveys, [[int(s.nulls.positions[j]) for k, j in used if k == i] for i, s in enumerate(surveys)], memory)

        def null_effects(job: tuple[Survey, list[int]], zbar=null_means[kind]) -> np.ndarray:
            effects = lambda: {"effects": measure(model, job[0].reading.prefix, [null_probe(job[0], j, zbar) for j in job[1]], memory).effects[:, 0]}  # noqa: E731
            return kept("slopes", [job[0].reading.transcript.id, *job[1], zbar], effects)["effects"]

        own = [(surveys[i], [j for k, j in used if k == i]) for i in sorted({i for i, _ in used})]
        effects = spread(null_effects, bar(own, "slopes of nulls"))
        slope[kind] = slopes(np.concatenate(effects).reshape(len(used), -1).astype(float), np.concatenate([s.nulls.margin[js] for s, js in own]))
    groups = frozenset(s.reading.transcript.group for s in surveys) - {None}
    return ReferenceMeans(means, counts, ids, groups), null_means, slope


def _mean_z(model: DecisionModel, surveys: Sequence[Survey], positions: Sequence[list[int]], memory: int) -> np.ndarray:
    """Mean z over positions of several texts, in float64, as float32."""
    z = spread(lambda x: clean_z(model.hooked, x[0].reading.prefix, x[1], memory).double().cpu(), [x for x in zip(surveys, positions, strict=True) if x[1]])
    return torch.cat(z).mean(0).float().numpy()


def null_probe(s: Survey, j: int, zbar: np.ndarray) -> Probe:
    position = int(s.nulls.positions[j])
    return Probe(position, zbar, (Margin(int(s.reading.encoded.ids[position + 1]), (int(s.nulls.rival[j]),)),))
