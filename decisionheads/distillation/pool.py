"""The student's head pool: which heads are supervised, chosen once, before training, and kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .._progress import Progress
from ..branches import MEMORY
from ..decisions import KINDS, Kind
from ..discovery import Discovery, discover
from ..errors import InputError, as_written
from ..events import find_closers
from ..heads import Head, HeadSet
from ..labels import LabelSpace
from ..model import DecisionModel
from ..necessity import few_random_sets
from ..null_tokens import template_ids
from ..provenance import digest
from ..run_folder import read_json, write
from ..spans import Sinks, find_sinks
from ..survey import Options, split, survey
from ..transcripts import Transcript, encode

FEW = 20  # reference texts on which sinks are found


@dataclass(frozen=True)
class Pool:
    """Heads of a student that are supervised.

    Attributes:
        heads: kind -> heads.
        how: kind -> how they were chosen: `calibrated`, or what stands in for heads that were not found.
        sinks: the student's sink keys.
        shape: layers and heads of the student.
    """

    heads: Mapping[Kind, HeadSet]
    how: Mapping[Kind, str]
    sinks: Sinks
    shape: tuple[int, int]

    def save(self, path: str | Path) -> None:
        said = {"heads": {kind: list(map(str, heads)) for kind, heads in self.heads.items()}, "how": dict(self.how), "sinks": sorted(self.sinks.ids), "shape": list(self.shape)}
        write(Path(path), json.dumps(said | {"digest": _digest(said)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Pool:
        """Read what `save` wrote.

        Raises:
            InputError: where it is something else, or its heads were changed.
        """
        said = read_json(Path(path))
        with as_written(path, "it is no head pool; remove it, and it is chosen again"):
            heads = {kind: HeadSet(names) for kind, names in said["heads"].items()}
            if said["digest"] != _digest({k: v for k, v in said.items() if k != "digest"}):
                raise InputError(f"{path} was changed since it was chosen; remove it, and it is chosen again")
            return cls(heads, said["how"], Sinks(frozenset(said["sinks"])), tuple(said["shape"]))

    def random(self, seed: int) -> Pool:
        """As many heads in each layer, none of its own kind's; see `necessity.random_sets` where a layer has too few."""
        everything = HeadSet.all(*self.shape)
        drawn = {kind: few_random_sets(heads, everything, seed, 1) for kind, heads in self.heads.items()}
        short = [kind for kind, found in drawn.items() if not found]
        if short:
            raise InputError(f"fewer than 20 random sets can be drawn beside the {len(self.heads[short[0]])} {short[0]} heads of {self.shape[0]} x {self.shape[1]}: "
                             "the pool is nearly the whole model; leave the random-pool arm out")
        return Pool({kind: found[0] for kind, found in drawn.items()}, {kind: "random, layers matched" for kind in drawn}, self.sinks, self.shape)

    def all(self) -> Pool:
        """Every head, for every kind."""
        return Pool({kind: HeadSet.all(*self.shape) for kind in self.heads}, {kind: "all heads" for kind in self.heads}, self.sinks, self.shape)


def _digest(said: dict) -> str:
    return digest(json.dumps(said, sort_keys=True))


def choose_pool(student: DecisionModel, transcripts: Sequence[Transcript], labels: LabelSpace, teacher: Mapping[Kind, HeadSet], teacher_layers: int, *,
                seed: int = 0, memory: int = MEMORY, progress: bool = False, **options) -> Pool:
    """The student's calibrated heads of every kind that the teacher has some of, on the texts it will be trained on.

    Where the untrained student has no heads of departures, its heads of labels stand in; where it has none of these
    either, or none of another kind, as many heads as the teacher has: the highest ranked of the layers whose relative
    depth is that of the teacher's.

    Args:
        teacher: kind -> the teacher's heads.
        teacher_layers: its layers.
        options: of `discover`.
    """
    found = discover(student, transcripts, labels, seed=seed, memory=memory, progress=progress, greedy=False, together=False, **options)
    own = {kind: r.selected for kind, r in found.kinds.items()}
    heads, how = {}, {}
    for kind in (k for k in KINDS if k in teacher and len(teacher[k])):
        heads[kind], how[kind] = own.get(kind, HeadSet()), "calibrated"
        if not len(heads[kind]) and kind == "departure":
            heads[kind], how[kind] = own.get("label", HeadSet()), "none calibrated: the heads of labels"
        if not len(heads[kind]):
            heads[kind], how[kind] = _band(teacher[kind], teacher_layers, found, kind), "none calibrated: the highest ranked at the teacher's relative depth"
    return Pool(heads, how, sinks_of(student, transcripts, labels, seed=seed, memory=memory, progress=progress), found.shape)


def _band(heads: HeadSet, layers: int, found: Discovery, kind: Kind) -> HeadSet:
    depths = [h.layer / max(1, layers - 1) for h in heads]
    low, high = (round(d * (found.shape[0] - 1)) for d in (min(depths), max(depths)))
    ranked = [Head(r.layer, r.head) for r in found.kinds[kind].table.itertuples()] if kind in found.kinds else list(HeadSet.all(*found.shape))
    return HeadSet([h for h in ranked if low <= h.layer <= high][:len(heads)])


def sinks_of(model: DecisionModel, transcripts: Sequence[Transcript], labels: LabelSpace, *, seed: int = 0, memory: int = MEMORY, progress: bool = False) -> Sinks:
    """The sink keys of a model on some texts: template, and what takes attention at null tokens of reference texts."""
    reference = split(transcripts, seed)["reference"]
    template = template_ids(((t, encode(t, model.tokenizer)) for t in reference), model.tokenizer.all_special_ids)
    closers, asked, bar = find_closers(reference, labels, model.tokenizer), Options(greedy=False, seed=seed), Progress({"finding sinks": 1}, progress)

    def nulls():
        left = FEW
        for t in bar(reference, "finding sinks"):
            try:
                found = survey(model, t, labels, closers, template, asked) if left else None
            except InputError:  # a text without a decision, or one that cannot be read
                continue
            if found is not None and len(found.nulls.positions):
                left -= 1
                yield found.reading.prefix, found.nulls.positions[:: max(1, len(found.nulls.positions) // 8)].tolist()

    sinks = find_sinks(model, nulls(), template, memory=memory)
    bar.close()
    return sinks
