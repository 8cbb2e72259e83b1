"""Targets: what the teacher's heads read at each decision, a few floats an event, kept with the transcripts.

A target names its decision by characters of the text, so that any tokenizer can find it again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .._processes import spread
from ..branches import MEMORY, Branch
from ..decisions import DecisionEvent, Kind
from ..errors import InputError, as_written
from ..events import find_closers, find_events
from ..heads import HeadSet
from ..labels import LabelSpace, read_jsonl
from ..model import DecisionModel
from ..phases import LEAST_MASS
from ..provenance import digest
from ..reads import pooled_attention
from ..spans import Sinks
from ..transcripts import Encoded, Transcript, encode
from ..views import Brief, Viewed
from .groups import GROUPS, key_groups

MERGED, NOTHING = "merged by the student's tokenizer", "no such decision in the student's tokens"


@dataclass(frozen=True)
class Target:
    """What the teacher read at one decision.

    Attributes:
        kind, label, near_miss: of the decision.
        start, end: characters of the token that the teacher chose.
        mass: attention pooled over the teacher's heads of this kind, sinks left out, share of each of `groups.GROUPS`; sums to 1.
        keys: how many of the teacher's keys each group has.
    """

    kind: Kind
    label: str
    near_miss: str | None
    start: int
    end: int
    mass: tuple[float, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Targets(Viewed):
    """Transcripts with their targets.

    Attributes:
        transcripts: in order.
        of: transcript id -> its targets, in order of position.
        heads: kind -> the teacher's heads.
        dropped: decisions without a target, counted by reason.
    """

    transcripts: tuple[Transcript, ...]
    of: Mapping[str, tuple[Target, ...]]
    heads: Mapping[Kind, HeadSet]
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.of.values()))

    def __repr__(self) -> str:
        kinds = Counter(t.kind for targets in self.of.values() for t in targets)
        return f"Targets({len(self.transcripts)} transcripts; {', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items())) or 'none'}; dropped {dict(self.dropped) or 'none'})"

    def mean(self) -> dict[Kind, dict[str, float]]:
        """Kind -> mean share of each group."""
        rows = {kind: [t.mass for targets in self.of.values() for t in targets if t.kind == kind] for kind in self.heads}
        return {kind: dict(zip(GROUPS, np.mean(r, 0).round(4).tolist(), strict=True)) for kind, r in rows.items() if r}

    def save(self, path: str | Path) -> None:
        """JSONL: each transcript with its `targets`; the first line also says which heads they are of, and the hash of all lines."""
        records = [t.to_record() | {"targets": [asdict(x) for x in self.of[t.id]]} for t in self.transcripts]
        said = {"heads": {kind: list(map(str, heads)) for kind, heads in self.heads.items()}, "dropped": dict(self.dropped), "groups": GROUPS}
        records[0]["targets_of"] = said | {"digest": _digest(records, said)}
        with open(path, "w", encoding="utf-8", newline="\n") as out:
            out.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)

    @classmethod
    def load(cls, path: str | Path) -> Targets:
        """Read what `save` wrote; raises InputError where a line is none of it, or was changed."""
        transcripts, of, said, lines = [], {}, {}, []
        for number, record in read_jsonl(Path(path)):
            try:
                transcripts.append(Transcript.from_record(record))
                of[transcripts[-1].id] = tuple(Target(**{**t, "mass": tuple(map(float, t["mass"])), "keys": tuple(map(int, t["keys"]))}) for t in record["targets"])
                said = record.pop("targets_of", said)
                lines.append(record)
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:  # InputErrors among them
                raise InputError(f"{path}, line {number}: no transcript with targets ({error}); make the file again") from None
        with as_written(path, "make the file again"):
            if list(said.get("groups", ())) != list(GROUPS):
                raise InputError(f"{path}: these targets are of other groups, or of none; make the file again")
            if said.pop("digest") != _digest(lines, said):
                raise InputError(f"{path} was changed since it was made; make the file again")
            return cls(tuple(transcripts), of, {kind: HeadSet(names) for kind, names in said["heads"].items()}, dict(said["dropped"]))


def _digest(records: Sequence[Mapping], said: Mapping) -> str:
    return digest(*(json.dumps(record, sort_keys=True) for record in (*records, said)))


def teacher_targets(model: DecisionModel, transcripts: Sequence[Transcript], labels: LabelSpace, heads: Mapping[Kind, HeadSet], sinks: Sinks, *,
                    memory: int = MEMORY, progress: bool = False) -> Targets:
    """Pool the teacher's attention at every decision of some transcripts.

    Args:
        model: the teacher.
        transcripts: texts it wrote.
        heads: kind -> its calibrated heads; kinds without any have no targets.
        sinks: the teacher's.

    Raises:
        InputError: where no decision of these kinds is in the transcripts, or nothing could be pooled.
    """
    heads = {kind: found for kind, found in heads.items() if len(found)}
    if not heads:
        raise InputError("the teacher has no calibrated head of any kind, so there is nothing to distil")
    closers = find_closers(transcripts, labels, model.tokenizer)
    masks = {kind: np.array(found.to_mask(model.n_layers, model.n_heads)) for kind, found in heads.items()}

    def of_text(t: Transcript) -> tuple[list[Target], Counter]:
        encoded = encode(t, model.tokenizer)
        found = find_events(t, labels, model.tokenizer, encoded=encoded, closers=closers)
        events = [e for e in found if e.primary and e.kind in heads]
        dropped = Counter(d.reason for d in found.dropped)
        if not events:
            return [], dropped
        reading = model.read(t, events)
        n = len(reading.prefix)
        keys = np.zeros((len(reading.events), len(GROUPS), n), bool)
        for row, e in zip(keys, reading.events, strict=True):
            groups = key_groups(t, encoded, e, e.position, sinks)
            row[:, :len(groups)] = groups == np.arange(len(GROUPS))[:, None]
        mass = pooled_attention(model.hooked, reading.prefix, [Branch(e.position) for e in reading.events], keys.reshape(-1, n), memory).double().cpu().numpy()
        targets = []
        for i, e in enumerate(reading.events):
            pooled = mass[i][masks[e.kind]][:, i * len(GROUPS):(i + 1) * len(GROUPS)].mean(0)
            if pooled.sum() < LEAST_MASS:
                dropped["under .05 of the teacher's attention is outside sinks"] += 1
                continue
            start, end = map(int, encoded.offsets[e.position + 1])
            targets.append(Target(e.kind, e.label, e.near_miss, start, end, tuple((pooled / pooled.sum()).round(6).tolist()), tuple(keys[i].sum(1).tolist())))
        return targets, dropped

    bar = tqdm(transcripts, desc="pooling the teacher's attention", unit="text", disable=not progress)
    found = spread(of_text, bar)
    targets = Targets(tuple(transcripts), {t.id: tuple(x) for t, (x, _) in zip(transcripts, found, strict=True)}, heads,
                      dict(sorted(sum((d for _, d in found), Counter()).items())))
    if not len(targets):
        raise InputError(f"no decision of the kinds {', '.join(heads)} has a target ({targets.dropped or 'there are none'}); give transcripts that this teacher wrote")
    return targets


# -- in a student's tokens ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Placed(Brief):
    """A target in a student's tokens: where it is predicted, and the group of every key."""

    target: Target
    position: int
    groups: np.ndarray


def place(transcript: Transcript, targets: Sequence[Target], labels: LabelSpace, tokenizer, sinks: Sinks, *, encoded: Encoded | None = None,
          closers: Sequence[int] = ()) -> tuple[list[Placed], Counter[str]]:
    """Find the decisions of targets in a student's tokens.

    A decision is found where the student's tokens hold one of the same kind, label and near-miss whose token
    shares a character with the teacher's; each of the student's stands for one target at most.

    Args:
        tokenizer: the student's.
        sinks: the student's.
        encoded: its tokens of the text, if they are at hand.
        closers: token ids that follow complete labels, of the student.

    Returns:
        what was found, and counts of what was not, by reason.

    Raises:
        InputError: for token ids that are not the student's own.
    """
    encoded = encode(transcript, tokenizer) if encoded is None else encoded
    events = [e for e in find_events(transcript, labels, tokenizer, encoded=encoded, closers=closers) if e.primary]
    found, lost = [], Counter()
    taken: set[int] = set()
    for target in targets:
        event = next((e for e in events if id(e) not in taken and _same(e, target, encoded)), None)
        if event is None:
            over = encoded.tokens_in(target.start, target.end)
            first = transcript.text[int(encoded.offsets[over[0], 0]):target.start] if len(over) else ""
            lost[MERGED if first.strip() else NOTHING] += 1
            continue
        taken.add(id(event))
        found.append(Placed(target, event.position, key_groups(transcript, encoded, event, event.position, sinks)))
    return found, lost


def _same(event: DecisionEvent, target: Target, encoded: Encoded) -> bool:
    start, end = encoded.offsets[event.position + 1]
    return (event.kind, event.label, event.near_miss) == (target.kind, target.label, target.near_miss) and bool(start < target.end and end > target.start)


def shuffled(targets: Targets, seed: int) -> Targets:
    """Targets that point elsewhere: each event's shares permuted over the groups that its text has keys of.

    They are as sharp as they were, and the largest share never stays where it was. (Handing shares from one
    event of a kind to another would change little: heads of a kind read the same group nearly always.)
    """
    rng = np.random.default_rng(seed)

    def moved(target: Target) -> Target:
        mass, where = np.array(target.mass), np.flatnonzero(target.keys)
        top = int(np.flatnonzero(where == mass.argmax())[0])
        while len(where) > 1:
            order = rng.permutation(len(where))
            if order[top] != top:
                mass[where] = mass[where[order]]
                break
        return replace(target, mass=tuple(mass.tolist()))

    return replace(targets, of={name: tuple(map(moved, mine)) for name, mine in targets.of.items()})


def misdirected(targets: Targets, group: str = "instruction") -> Targets:
    """Targets that all point to one group, a wrong one; to the rest where the text has no key of it."""
    def wrong(target: Target) -> Target:
        at = GROUPS.index(group if target.keys[GROUPS.index(group)] else "rest")
        return replace(target, mass=tuple(float(g == at) for g in range(len(GROUPS))))

    return replace(targets, of={name: tuple(map(wrong, mine)) for name, mine in targets.of.items()})
