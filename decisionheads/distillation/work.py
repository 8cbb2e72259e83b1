"""`decisionheads distill` and `evaluate`, as functions: from files to a campaign's folder, its tables and its figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .._processes import agreed, first, working_together
from ..errors import InputError
from ..model import DecisionModel
from ..provenance import hash_files, model_hash, versions
from ..run_folder import read_json, write
from ..transcripts import Transcript, encode, load_transcripts
from ..words import fitted
from ..workflow import check_device, check_usable, load_space, own_device
from .campaign import Campaign, Plan, tables_of
from .evaluation import Judging, evaluate, prompt_of
from .figures import students_figure
from .matched import Written, at_matched_precision
from .verdicts import compare_arms

BOUNDS = {"departures_right": 0.05, "micro_f1": 0.02}  # differences under these do not matter


def distill_files(teacher: str, run: Path, transcripts: Path, held_out: Path, labels: Path, students: Sequence[str], out: Path, plan: Plan, *, regions: str | None = None,
                  device: str | None = None, memory: int, progress: bool = True, say: Callable[[str], None] = lambda line: None) -> tuple[str, bool] | None:
    """Train every student in every arm with every seed, or go on with it; write tables and figure once all are done.

    Args:
        teacher, run: the model that wrote the transcripts, and the folder of its discovery.
        transcripts, held_out: texts that students are trained on, and others that they are judged on.
        students: folders or hub names; called by their last part.
        say: is told of every run that begins.

    Returns:
        what came of it, and whether all is done; None in all but the first of several processes.

    Raises:
        InputError: before anything is loaded, for whatever is wrong with files, names and settings.
    """
    names = [Path(s).name for s in students]
    if not students or len(set(names)) < len(names):
        raise InputError(f"students are {', '.join(names) or 'none'}; give one or more whose folders have different names")
    space, _ = load_space(labels, regions)
    texts, held = (_texts(path, space) for path in (transcripts, held_out))
    for student in students:
        check_student(student)
    for model in (teacher, *students):
        check_room(model, held, plan.judging)
    check_device(device)
    with working_together(device) as number:
        campaign = Campaign(out, teacher, run, texts, held, dict(zip(names, students, strict=True)), space, plan, [transcripts, held_out, labels], device=device or own_device(number), memory=memory,
                            progress=progress and first())
        done = campaign.train(say if first() else lambda line: None)
        if not first():
            return None
        said = conclude(out, names, campaign.runs())
        if done:
            write(out / "run.json", json.dumps(read_json(out / "run.json") | {"finished": True}, indent=1) + "\n")
        return said, done


def check_student(student: str) -> None:
    """Refuse, before anything is made, a student that cannot be trained."""
    path = Path(student)
    if path.suffix == ".gguf":
        raise InputError(f"{student}: a GGUF file holds rounded weights and is not trained; give the folder of the model that it was made from")
    DecisionModel.load_tokenizer(student)
    if path.is_dir() and not any(found.suffix == ".safetensors" for found in path.iterdir()):
        raise InputError(f"{student}: there are no weights in this folder; put model.safetensors beside config.json")


def check_room(model: str, texts: Sequence[Transcript], judging: Judging) -> None:
    """Refuse, before anything is made, to let a model write more than it can read."""
    context, tokenizer = DecisionModel.load_context(model), DecisionModel.load_tokenizer(model)
    longest = max(len(encode(Transcript("prompt", prompt_of(t, judging), "", ""), tokenizer)) for t in texts)
    if context is not None and longest + judging.longest > context:
        raise InputError(f"{model} can read {context} tokens, and the longest held-out prompt has {longest}, which leaves no room for --longest {judging.longest}; "
                         f"{f'give at most {context - longest}' if longest < context else 'give shorter texts'}")


def _texts(path: Path, space) -> list[Transcript]:
    found = load_transcripts(path)
    check_usable(found, space, path)
    return found


def evaluate_files(model: str, held_out: Path, labels: Path, out: Path, judging: Judging, *, regions: str | None = None, dtype: str = "float32", device: str | None = None, memory: int,
                   progress: bool = True) -> dict[str, Any] | None:
    """`decisionheads evaluate`: one student, judged as every student of a campaign is; its file holds ids and numbers, no text.

    Raises:
        InputError: before the model is loaded, and for a file that was made otherwise.
    """
    space, _ = load_space(labels, regions)
    held = _texts(held_out, space)
    inputs = json.loads(json.dumps({"model": model_hash(model), "files": hash_files([held_out, labels]), "judging": asdict(judging), "dtype": dtype}))
    if out.is_dir() or not out.parent.is_dir():
        raise InputError(f"{out} cannot be written: " + ("it is a folder; name a file" if out.is_dir() else f"{out.parent} is not a folder; make it first"))
    known = read_json(out) if out.is_file() else None
    if known is not None and known.get("inputs") != inputs:
        raise InputError(f"{out} exists and was made otherwise; name another file")
    check_room(model, held, judging)
    check_device(device)
    with working_together(device) as number:
        if agreed(known is None):
            found = evaluate(DecisionModel.from_pretrained(model, dtype=dtype, device=device or own_device(number)), held, space, judging, memory=memory, progress=progress and first())
            known = {"inputs": inputs, "versions": versions(), **found}
            if first():
                write(out, json.dumps(known) + "\n")
        return known if first() else None


def judged(found: Mapping[str, Any]) -> str:
    """What `evaluate` found, for people."""
    number = lambda x, form=".2f": "undefined" if x is None else format(x, form)  # noqa: E731
    lines = [f"{found['decisions']} held-out decisions: margin {found['m']:.2f} logits ({found['m0']:.2f} with every head ablated), right in {found['right']:.0%} (chance {found['chance']:.0%})",
             f"best {len(found['set'])} heads: {' '.join(found['set'])}; alone they recover {number(found['recovery'])} [{number(found['recovery_low'])}, {number(found['recovery_high'])}], "
             f"random sets {number(found['random_recovery'])}; right in {found['kept_alone']:.0%} with them alone"]
    if found["task"] is not None:
        lines.append(f"task: micro F1 {found['task']['micro_f1']:.3f}, macro F1 {found['task']['macro_f1']:.3f}, recall {found['task']['recall']:.3f}")
    return "\n".join(fitted([*lines, *(f"note: {note}" for note in found["warnings"])]))


def conclude(out: Path, students: Sequence[str], runs: Sequence[tuple[str, str, int]], bounds: Mapping[str, float] = BOUNDS) -> str:
    """Write the tables and the figure of what is done, and say what may be said of it.

    Args:
        bounds: measure -> the largest difference that does not matter, set before anything is trained.
    """
    tables = tables_of(out, students, runs)
    table, texts = tables["mistill"], tables["texts"]
    arms = [arm for arm in dict.fromkeys(a for _, a, _ in runs) if arm in set(table.arm)]
    lines = [f"{sum(table.seed >= 0)} of {len(runs)} runs are done; k = {', '.join(map(str, sorted(set(table.k))))} heads, {table.decisions.max()} held-out decisions a student"]
    shown = lambda x, form: "undefined" if pd.isna(x) else format(x, form)  # noqa: E731
    for student in students:
        mine = table[table.student == student]
        lines += ["", f"{student}:   seed  recovery   m (m0, m of the set alone)   right     F1   overlap with the pool"]
        for r in mine.itertuples():
            lines.append(f"  {r.arm:12} {r.seed if r.seed >= 0 else '-':>4}  {shown(r.recovery, '8.2f'):>9}   {r.m:+6.2f} ({r.m0:+.2f}, {r.m_alone:+.2f}){'':9}{r.departures_right:5.0%}  {shown(r.micro_f1, '5.2f'):>5}   {shown(r.overlap, '.0f')}")
    lines += ["", "recovery: what the best k heads alone keep of the margin that attention carries. Undefined where it carries under .5 logits."]
    if "cot" in arms and len(arms) > 1:
        given = texts.rename(columns={"alone": "numerator", "carried": "denominator"}).groupby(["student", "arm", "seed", "text", "group"], as_index=False)[["numerator", "denominator"]].sum()
        for measure in ("recovery", "departures_right", "micro_f1"):
            if table[measure].notna().any():
                found = compare_arms(table, measure, arms=[a for a in arms if a != "cot"], bound=bounds.get(measure), texts=given if measure == "recovery" else None)
                lines += ["", f"{measure}:", *(f"  {sentence}" for sentence in found.sentences())]
                tables[f"verdicts_{measure}"] = found.to_frame()
    lines += _matched(tables, students, arms)
    for name, frame in tables.items():
        write(out / f"{name}.csv", frame.to_csv(index=False, float_format="%.6g"))
    figure = students_figure(table, tables["curves"], arm="mistill" if "mistill" in arms else arms[-1], baseline="cot" if "cot" in arms else arms[0])
    write(out / "mistill.html", figure.to_html(include_plotlyjs=True, config={"displayModeBar": False, "responsive": True}))
    return "\n".join(lines)


def _matched(tables: dict[str, pd.DataFrame], students: Sequence[str], arms: Sequence[str]) -> list[str]:
    """Recall at matched precision of every arm, over all its seeds; thresholds come from the texts that do not judge."""
    emitted, gold = tables["emitted"], tables["gold"]
    lines, frames = [], []
    for student in students:
        parts: dict[str, dict[str, Written]] = {"validation": {}, "test": {}}
        for arm in arms:
            for part, found in parts.items():
                of = lambda frame, where=(student, arm, part): frame[(frame.student == where[0]) & (frame.arm == where[1]) & (frame.part == where[2])]  # noqa: E731
                codes, counts = of(emitted) if len(emitted) else emitted, of(gold)
                codes = codes[codes.confidence.notna()] if len(codes) else codes
                if counts.gold.sum():
                    name = lambda f: [f"{s}/{t}" for s, t in zip(f.seed, f.text, strict=True)]  # noqa: E731
                    found[arm] = Written(name(codes) if len(codes) else [], codes.confidence.to_numpy(float) if len(codes) else np.zeros(0), codes.right.to_numpy(bool) if len(codes) else np.zeros(0, bool),
                                         dict(zip(name(counts), counts.gold.tolist(), strict=True)), dict(zip(name(counts), counts.group.tolist(), strict=True)))
        if parts["test"] and set(parts["test"]) == set(parts["validation"]):
            matched = at_matched_precision(parts["validation"], parts["test"])
            frames.append(matched.to_frame().assign(student=student))
            lines += ["", f"{student}, task at matched precision:", *(f"  {line}" for line in str(matched).splitlines())]
    if frames:
        tables["matched"] = pd.concat(frames, ignore_index=True)
    return lines
