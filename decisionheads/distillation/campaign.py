"""A whole distillation: every student in every arm with every seed, resumable, and the tables that come of it.

    run.json        what it was made from
    targets.jsonl   the teacher's transcripts with what its heads read; held_out_targets.jsonl
    STUDENT/pool.json, untrained.json          the heads that are supervised; the student before training
    STUDENT/ARM-SEED/model, training.json, result.json, reads.json    the student; how it was trained and judged; what its pool reads now
    mistill.csv     a row for each student, arm and seed
    curves.csv, texts.csv, emitted.csv, gold.csv   recovery by set size; per held-out text; every code that was written

Runs are independent of each other: start the same command again, in another terminal or on another machine with
the same disk, and it takes the runs that nobody holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .._processes import agreed, first
from ..branches import MEMORY
from ..errors import InputError
from ..heads import HeadSet
from ..labels import LabelSpace
from ..model import DecisionModel
from ..provenance import hash_files, model_hash, same_versions, versions
from ..run_folder import RunFolder, open_run, read_json, whole, write
from ..spans import Sinks
from ..transcripts import Transcript
from .arms import ARMS, MORE_ARMS, Training, train_student
from .evaluation import Judging, evaluate
from .manipulation import held_out_distance
from .pool import Pool, choose_pool
from .targets import Targets, teacher_targets


@dataclass(frozen=True)
class Plan:
    """What is trained and judged; all of it is part of the result.

    Attributes:
        arms, seeds: every arm is trained with each of the seeds 0, 1, ...
        heads: `selected`: the teacher's calibrated heads; `set`: its frozen set, for each kind.
        pool_texts: training texts on which the students' pools are chosen; 0 for all.
    """

    training: Training
    judging: Judging
    arms: tuple[str, ...] = ARMS
    seeds: int = 3
    heads: str = "selected"
    pool_texts: int = 400

    def __post_init__(self):
        odd = [name for name in self.arms if name not in (*ARMS, *MORE_ARMS)]
        if odd or not self.arms or len(set(self.arms)) < len(self.arms):
            raise InputError(f"arms are {', '.join(self.arms) or 'none'}; name each once, from {', '.join((*ARMS, *MORE_ARMS))}")
        if self.heads not in ("selected", "set"):
            raise InputError(f"unknown heads {self.heads!r} of the teacher: choose selected or set")
        if self.seeds < 1:
            raise InputError("no seed is asked for; give at least 1")


def teacher_heads(run: Path, which: str) -> tuple[dict[str, HeadSet], Sinks, dict[str, Any]]:
    """Heads by kind and sinks of a finished discovery, and its manifest.

    Raises:
        InputError: where the run stopped at single heads, or its sets were changed since.
    """
    state = open_run(run)
    sets, families = read_json(run / "sets.json"), state["summary"].get("families")
    if families is None:
        raise InputError(f"{run} stopped at single heads and has no frozen sets; run discover without --single-heads")
    found = {}
    with whole(run):
        for kind in state["summary"]["kinds"]:
            frozen = sets[kind]["selected"] if which == "selected" else sets[kind]
            found[kind] = HeadSet(frozen["heads"])
            if found[kind].digest != frozen["digest"]:
                raise InputError(f"{run / 'sets.json'}: the {kind} set is not the one that was frozen; run discover again")
        return found, Sinks(frozenset(map(int, families["sinks"]))), state["manifest"]


def check_apart(training: Sequence[Transcript], held_out: Sequence[Transcript]) -> None:
    """Refuse held-out texts that students are trained on, by id, group or text."""
    names = {t.id for t in training} | {t.group for t in training if t.group}
    for t in held_out:
        if t.id in names or t.group in names:
            raise InputError(f"held-out transcript {t.id!r} (group {t.group}) is among the training transcripts; keep them apart")
    texts = {t.prompt for t in training}
    same = next((t.id for t in held_out if t.prompt in texts), None)
    if same is not None:
        raise InputError(f"held-out transcript {same!r} has the prompt of a training transcript; keep them apart")


class Campaign:
    """A folder of runs.

    Args:
        out: the folder; made with other inputs it is refused, with the same ones it is gone on with.
        teacher, run: the teacher, and the folder of its discovery.
        training, held_out: transcripts the teacher wrote; texts it is judged on.
        students: name -> folder or hub name.
        files: what is hashed into the inputs.
        device: of models; by default an accelerator, where there is one.
    """

    def __init__(self, out: Path, teacher: str, run: Path, training: Sequence[Transcript], held_out: Sequence[Transcript], students: Mapping[str, str], labels: LabelSpace,
                 plan: Plan, files: Sequence[Path], *, device: str | None = None, memory: int = MEMORY, progress: bool = False):
        check_apart(training, held_out)
        self.heads, self.sinks, self.manifest = teacher_heads(run, plan.heads)
        if plan.judging.kind not in self.heads or not len(self.heads[plan.judging.kind]):
            raise InputError(f"{run} has no {plan.judging.kind} heads, so there is nothing of that kind to pass on; choose another kind")
        self.inputs = json.loads(json.dumps({"teacher": model_hash(teacher), "run": hash_files([run / "sets.json"]), "files": hash_files(files), "students": {name: model_hash(s) for name, s in students.items()},
                                             "plan": {name: value for name, value in asdict(plan).items() if name not in ("arms", "seeds")}}))  # more of these may be asked for later
        RunFolder.check(out, self.inputs)
        self.out, self.teacher, self.training, self.held_out, self.students, self.labels, self.plan = out, teacher, training, held_out, dict(students), labels, plan
        self.device, self.memory, self.progress = device, memory, progress

    def targets(self, held_out: bool = False) -> Targets:
        """What the teacher read on the training texts, or on the held-out ones; made once."""
        path, texts = self.out / ("held_out_targets.jsonl" if held_out else "targets.jsonl"), self.held_out if held_out else self.training
        if agreed(not path.is_file()):
            found = teacher_targets(DecisionModel.from_pretrained(self.teacher, device=self.device), texts, self.labels, self.heads, self.sinks, memory=self.memory, progress=self.progress)
            if first():
                beside = path.with_name(f".{path.name}")
                found.save(beside)
                beside.replace(path)
            agreed(None)
        return Targets.load(path)

    def pool(self, name: str) -> Pool:
        """The heads of a student that are supervised, chosen once."""
        path, plan = self.out / name / "pool.json", self.plan
        if agreed(not path.is_file()):
            texts = self.training[:plan.pool_texts] if plan.pool_texts else self.training
            found = choose_pool(DecisionModel.from_pretrained(self.students[name], device=self.device), texts, self.labels, self.heads, self.manifest["layers"], seed=plan.judging.seed, memory=self.memory,
                                progress=self.progress, caliper=plan.judging.caliper, minimum=plan.judging.minimum, draws=plan.judging.draws)
            if first():
                path.parent.mkdir(parents=True, exist_ok=True)
                found.save(path)
            agreed(None)
        return Pool.load(path)

    def judged(self, path: Path, model: str) -> dict[str, Any]:
        """What was measured of a student, kept in `path`."""
        if agreed(not path.is_file()):
            found = evaluate(DecisionModel.from_pretrained(model, device=self.device), self.held_out, self.labels, self.plan.judging, memory=self.memory, progress=self.progress)
            if first():
                path.parent.mkdir(parents=True, exist_ok=True)
                write(path, json.dumps(found) + "\n")
            agreed(None)
            return found
        return read_json(path)

    def moved(self, path: Path, name: str, model: str) -> None:
        """How far the pool's reads are from the teacher's on held-out texts, kept in `path`."""
        if agreed(not path.is_file()):
            found = held_out_distance(model, self.pool(name), self.targets(held_out=True), self.labels)
            if first():
                write(path, json.dumps(found, indent=1) + "\n")
            agreed(None)

    def runs(self) -> list[tuple[str, str, int]]:
        """Every student, arm and seed; seeds outermost, so that what is there first is one of each."""
        return [(student, arm, seed) for seed in range(self.plan.seeds) for student in self.students for arm in self.plan.arms]

    def train(self, say: Callable[[str], None] = lambda line: None) -> bool:
        """Make every run that is not done and that nobody else holds; whether all are done now.

        Raises:
            InputError: where other versions made the runs that are there.
        """
        if first():
            self.out.mkdir(parents=True, exist_ok=True)
            if not (self.out / "run.json").is_file():
                write(self.out / "run.json", json.dumps({"inputs": self.inputs, "finished": False, "versions": versions()}, indent=1) + "\n")
            if not self.done:
                same_versions(self.out, read_json(self.out / "run.json").get("versions", {}), "name a new folder")
        with held(self.out / ".targets.lock", wait=True):
            targets = self.targets()
            self.targets(held_out=True)
        for name in self.students:
            with held(self.out / f".{name}.lock", wait=True):
                self.pool(name)
                self.judged(self.out / name / "untrained.json", self.students[name])
                self.moved(self.out / name / "untrained-reads.json", name, self.students[name])
        with held(self.out / ".teacher.lock", wait=True):
            self.judged(self.out / "teacher.json", self.teacher)
        for student, arm, seed in self.runs():
            folder = self.out / student / f"{arm}-{seed}"
            if agreed((folder / "reads.json").is_file()):
                continue
            with held(self.out / student / f".{arm}-{seed}.lock") as mine:
                if not agreed(mine) or agreed((folder / "reads.json").is_file()):
                    continue
                say(f"{student}, {arm}, seed {seed}")
                folder.mkdir(parents=True, exist_ok=True)
                train_student(self.students[student], folder, arm, targets, self.pool(student), self.labels, self.plan.training, seed, device=self.device, progress=self.progress)
                self.judged(folder / "result.json", str(folder / "model"))
                self.moved(folder / "reads.json", student, str(folder / "model"))
        return self.done

    @property
    def done(self) -> bool:
        """Whether every run is there."""
        return all((self.out / student / f"{arm}-{seed}" / "reads.json").is_file() for student, arm, seed in self.runs())

    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables of all runs that are done; reference rows are called `teacher` and `untrained`, with seed -1."""
        return tables_of(self.out, list(self.students), self.runs())


def tables_of(out: Path, students: Sequence[str], runs: Sequence[tuple[str, str, int]]) -> dict[str, pd.DataFrame]:
    """`mistill`, `curves`, `texts`, `emitted` and `gold` of a campaign's folder."""
    rows, curves, texts, emitted, gold = [], [], [], [], []
    reference = [(s, "teacher", -1, out / "teacher.json", None) for s in students] + [(s, "untrained", -1, out / s / "untrained.json", None) for s in students]
    for student, arm, seed, path, training in [*reference, *((s, a, n, out / s / f"{a}-{n}" / "result.json", out / s / f"{a}-{n}" / "training.json") for s, a, n in runs)]:
        if not path.is_file():
            continue
        found, trained = read_json(path), read_json(training) if training is not None else {}
        where, pool = {"student": student, "arm": arm, "seed": seed}, Pool.load(out / student / "pool.json")
        task, log = found.get("task") or {}, trained.get("log") or [{}]
        mine, near = HeadSet(found["set"]), path.with_name("untrained-reads.json" if arm == "untrained" else "reads.json")
        reads = read_json(near) if arm != "teacher" and near.is_file() else {}
        rows.append({**where, "k": len(mine), **{c: found[c] for c in ("recovery", "recovery_low", "recovery_high", "random_recovery", "m", "m0", "m_alone", "kept_alone", "chance", "undefined_texts", "decisions")},
                     "departures_right": found["right"], "set": " ".join(found["set"]), "overlap": len(mine & pool.heads.get("departure", HeadSet())) if arm != "teacher" else np.nan, "calibrated": len(found["heads"].get("departure", ())),
                     "micro_f1": task.get("micro_f1"), "macro_f1": task.get("macro_f1"), "precision": task.get("precision"), "recall": task.get("recall"), "steps": trained.get("steps", 0),
                     "loss": log[-1].get("loss"), "distance": log[-1].get("distance"), "held_out_distance": reads.get("departure", {}).get("distance"),
                     "near_miss_share": reads.get("departure", {}).get("shares", {}).get("near-miss"), "events": trained.get("events"), "dropped": sum((trained.get("lost") or {}).values())})
        curves += [{**where, **point} for point in found["curve"]]
        texts += [{**where, **text} for text in found["texts"]]
        emitted += [{**where, **code, "part": task["part"][code["text"]]} for code in found["emitted"]]
        gold += [{**where, "text": text, "group": text_group, "gold": n, "part": task["part"][text]} for text, (n, text_group) in (task.get("gold_per_text") or {}).items()]
    return {"mistill": pd.DataFrame(rows), "curves": pd.DataFrame(curves), "texts": pd.DataFrame(texts), "emitted": pd.DataFrame(emitted), "gold": pd.DataFrame(gold)}


@contextmanager
def held(path: Path, wait: bool = False) -> Iterator[bool]:
    """Hold a run against other processes for as long as this one works on it; let go whenever it ends, however it ends.

    Args:
        wait: until whoever holds it lets go; else False is handed out where somebody does.
    """
    try:
        import fcntl
    except ImportError:  # not on this system: runs are then not shared out
        yield True
        return
    if not first():
        yield True
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            yield False
            return
        yield True
