"""What the command line does, as functions: from files to a run folder, and from a run folder to text."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from . import tiny
from ._processes import agreed, first, working_together
from .comparison import Comparison
from .corpora.icd10cm import LEVELS, edition, edition_beside, region_by
from .corpora.notes import Note, load_notes
from .cues import formatted
from .decisions import Kind, check_kind
from .discovery import Discovery, discover
from .errors import InputError
from .generation import Generating, Parts, finish, finished, generate, make_prompts
from .labels import LabelSpace, read_rows
from .model import DecisionModel
from .null_tokens import first_generated
from .provenance import hash_files, model_hash
from .report import build_report
from .run_folder import RunFolder, open_run, read_table, whole, write
from .survey import Options
from .task_score import TaskScore, task_score
from .transcripts import Transcript, encode, load_transcripts, save_transcripts
from .words import closing_lines, fitted, kind_lines

DEMO_TEXTS = 400


def discover_files(model: str, transcripts: Path, labels: Path, out: Path, options: Options, *, dtype: str = "float32", device: str | None = None,
                   memory: int, with_text: bool = False, random_weights: bool = False, progress: bool = True, regions: str | None = None) -> dict | None:
    """`decisionheads discover`: everything is checked before the model is loaded, and before `out` is made.

    Args:
        regions: what regions are, as in `load_space`.

    Returns:
        the manifest and summary of the run; None in all but the first of several processes.
    """
    space, said = load_space(labels, regions)
    texts = load_transcripts(transcripts, _tokenizer_for(model, transcripts))
    check_usable(texts, space, transcripts)
    if options.cue:
        formatted(options.cue, 1)
    inputs = {"model": model_hash(model), "transcripts": hash_files([transcripts]), "labels": hash_files([labels]),
              "options": asdict(options), "dtype": dtype, "with_text": with_text, "random_weights": random_weights, **said}
    RunFolder.check(out, inputs)
    check_device(device)
    with working_together(device) as number:
        loaded = DecisionModel.from_pretrained(model, dtype=dtype, device=device or own_device(number), random_weights=random_weights)
        return run(loaded, texts, space, out, inputs, options, memory, with_text, progress)


def run(model: DecisionModel, texts: Sequence[Transcript], space: LabelSpace, out: Path, inputs: dict, options: Options, memory: int,
        with_text: bool, progress: bool) -> dict | None:
    """Discover into a run folder, or take what a finished one says.

    Of several processes the first one writes, and the others return None: they may not even see its disk.
    """
    store = RunFolder(out, inputs)
    if not agreed(store.finished):  # all have looked at the folder before anything is made
        started = time.time()
        found = discover(model, texts, space, memory=memory, progress=progress and first(), store=store, **asdict(options))
        if first():
            if with_text:
                write(out / "example.json", json.dumps(example(found, model, texts)) + "\n")
            store.finish(found, {"seconds": round(time.time() - started, 1), "stages": found.timings}, build_report, str(model.hooked.device))
    return open_run(out) if first() else None


def generate_files(model: str, notes: Path, labels: Path, out: Path, asked: Generating, *, limit: int = 0, together: int = 8, dtype: str = "float32", regions: str | None = None,
                   device: str | None = None, progress: bool = True) -> dict[str, Any] | None:
    """Generate into a file, go on with one that was begun, or take what a finished one says.

    Args:
        limit: only the first so many notes; 0 for all.
        together: texts written side by side.
        regions: what regions are, as in `load_space`; candidates are listed by them.

    Returns:
        what stands beside the transcripts; None in all but the first of several processes.

    Raises:
        InputError: before the model is loaded, for whatever is wrong with files, prompts and lengths.
    """
    space, said = load_space(labels, regions)
    texts = load_notes(notes)
    texts = texts[:limit] if limit else texts
    check_gold(texts, space, notes)
    if not out.parent.is_dir() or out.is_dir():
        raise InputError(f"{out} cannot be written: " + ("it is a folder; name a file" if out.is_dir() else f"{out.parent} is not a folder; make it first"))
    tokenizer, context = DecisionModel.load_tokenizer(model), DecisionModel.load_context(model)
    inputs = {"model": model_hash(model), "notes": hash_files([notes]), "labels": hash_files([labels]), "limit": limit, "options": asdict(asked), "dtype": dtype, **said}
    parts = Parts(out, inputs)
    done = finished(out, parts.inputs)
    prompts = make_prompts(texts, space, tokenizer, asked, context)
    check_device(device)
    with working_together(device) as number, parts.held() if first() and done is None else nullcontext():
        if agreed(done is None):
            loaded = DecisionModel.from_pretrained(model, dtype=dtype, device=device or own_device(number), tokenizer=tokenizer)
            made = generate(loaded, texts, space, asked, together=together, parts=parts, prompts=prompts, progress=progress and first())
            if not made.transcripts:
                raise InputError(f"no text came to an answer ({next(iter(made.unfinished.values()))}); write more, or answer within the labels")
            if first():
                done = finish(out, made, space, parts.inputs, loaded.name)
            agreed(None)  # nobody removes anything before all is written
            parts.remove()
        return done if first() else None


def check_gold(notes: Sequence[Note], space: LabelSpace, path: Path) -> None:
    """Refuse notes none of whose codes is a candidate: labels and notes are then written differently."""
    gold = {label for note in notes for label in note.labels}
    if gold and not any(label in space for label in gold):
        raise InputError(f"{path}: none of the notes' codes (such as {min(gold)!r}) is in the label file; are both written the same way, with their dots?")


def summed_up(state: dict[str, Any], out: Path) -> str:
    """A summary for people."""
    lengths, score = state["prompt_tokens"], state["score"]
    total = state["transcripts"] + len(state["unfinished"])
    lines = [f"{state['transcripts']} of {total} notes were written to {out}",
             f"prompts have {lengths['least']} to {lengths['most']} tokens, of which all share {lengths['shared']}"]
    if state["unfinished"]:
        lines.append(f"{len(state['unfinished'])} have {next(iter(state['unfinished'].values()))}")
    if state["unmarked"]:
        lines.append(f"{state['unmarked']} texts hold neither a tag nor the cue that begins an answer: all of them is taken for the answer")
    if state["cut"]:
        lost = sum(sum(c["lost_evidence"].values()) for c in state["cut"].values())
        lines.append(f"{len(state['cut'])} notes were cut at their end to fit, by {sum(c['characters'] for c in state['cut'].values())} characters; {lost} evidence spans were lost")
    if score is not None:
        shown = lambda x: "undefined" if x is None else f"{x:.2f}"  # noqa: E731
        lines.append(f"precision {shown(score['precision'])}, recall {shown(score['recall'])}, micro F1 {shown(score['micro_f1'])}, macro F1 {shown(score['macro_f1'])} "
                     f"of {score['predicted']} codes against {score['gold']} of the notes that were written" + "".join(f"; {n} {what}" for what, n in score["failures"].items()))
    return "\n".join(fitted(lines))


def run_demo(name: str, out: Path, seed: int, memory: int, texts: int = DEMO_TEXTS, progress: bool = True) -> dict:
    """An embedded model writes `texts` answers of its own, and they are taken apart."""
    if name not in ("llama", "gpt2"):
        raise InputError(f"there is no embedded model {name!r} for the demo: choose llama or gpt2")
    # nulls of these short texts are few: a wider caliper, and said so in the result
    options = Options(seed=seed, caliper=0.5, minimum=30 if texts >= DEMO_TEXTS else max(3, texts // 8), random_sets=100 if texts >= DEMO_TEXTS else 20, held_out=60, cue=tiny.CUE)
    folder = tiny.path(name)
    inputs = {"model": model_hash(str(folder)), "demo_texts": texts, "options": asdict(options), "with_text": True}
    RunFolder.check(out, inputs)
    import torch

    torch.set_num_threads(1)  # matrices this small are slower on two
    model = DecisionModel.from_pretrained(folder)
    store = RunFolder(out, inputs)
    store.make()
    if not (out / "transcripts.jsonl").is_file():
        save_transcripts(tiny.generate(model, texts, seed, progress=progress), out / ".transcripts")
        (out / ".transcripts").replace(out / "transcripts.jsonl")
    space = tiny.labels()
    if not store.finished:
        write(out / "labels.csv", pd.DataFrame({"label": space.labels, "region": [space.region(label) for label in space.labels]}).to_csv(index=False))
    return run(model, load_transcripts(out / "transcripts.jsonl"), space, out, inputs, options, memory, True, progress)


def load_space(labels: Path, regions: str | None = None) -> tuple[LabelSpace, dict[str, str]]:
    """Labels and their regions, and what a run should remember about where both came from.

    Args:
        regions: a column of the file, or else category, block or chapter; by default the region column, else categories.
    """
    noted = edition_beside(labels)
    said = {"edition": noted} if noted is not None else {}
    if regions is None:
        return LabelSpace.load(labels), said
    said["region_by"] = regions
    columns, _ = read_rows(labels)
    if regions in columns:  # the user's own, even if it is called block
        return LabelSpace.load(labels, region_column=regions), said
    if regions not in LEVELS:
        raise InputError(f"{labels}: no column {regions!r} for --region-by; choose category, block, chapter or one of its columns ({', '.join(columns)})")
    space = LabelSpace.load(labels, region_by(regions))
    if regions != "category":  # looked up in the table, so that another edition may give others
        said["region_table"] = edition()
    return space, said


def check_usable(texts: Sequence[Transcript], space: LabelSpace, path: Path) -> None:
    """Refuse, before anything is loaded, transcripts of which nothing can come."""
    for t in texts:
        for label in t.candidates or ():
            if label not in space:
                raise InputError(f"{path}: transcript {t.id!r} lists the candidate {label!r}, which is not in the label file; add it there or drop it")
    named = sum(bool(space.mentions(t.text, t.answer_start)) for t in texts)
    if not named:
        raise InputError(f"{path}: no label of the label file occurs in any answer; are labels and answers written the same way?")
    if named < 10:
        raise InputError(f"{path}: only {named} of {len(texts)} answers name a label and at least 10 are needed (60 are advised); add transcripts")


def example(found: Discovery, model: DecisionModel, texts: Iterable[Transcript]) -> dict:
    """Tokens around the best departure (or any event), for the report; holds text."""
    order = {"departure": 0, "label": 1, "region": 2}
    row = min(found.events.itertuples(), key=lambda r: (order[r.kind], -r.m))
    transcript = next(t for t in texts if t.id == row.transcript)
    encoded = encode(transcript, model.tokenizer)
    chosen = row.position + 1
    begin = max(first_generated(transcript, encoded), chosen - 160)
    words = [transcript.text[a:b] for a, b in encoded.offsets[begin:chosen + 12]]
    marked = [int(i) - begin for i in encoded.tokens_in(row.near_start, row.near_end) if i >= begin] if row.near_miss else []
    return {"tokens": words, "chosen": chosen - begin, "near_miss": marked, "wrote": model.tokenizer.decode([row.chosen]),
            "against": model.tokenizer.decode([row.against]), "m": row.m, "m0": row.m0, "kind": row.kind}


def score_files(transcripts: Path, labels: Path, model: str | None = None) -> TaskScore:
    """`decisionheads score`: answers against gold labels; the model's tokenizer is needed only where transcripts bring `messages`."""
    space = LabelSpace.load(labels)
    texts = load_transcripts(transcripts, None if model is None else _tokenizer_for(model, transcripts), unanswered=True)
    try:
        return task_score(texts, space)
    except InputError as error:
        raise InputError(f"{transcripts}: {error}") from None


def show(folder: Path, most: int = 5) -> str:
    """The findings of a finished run, as text."""
    with whole(folder):
        return _shown(folder, open_run(folder), most)


def _shown(folder: Path, state: dict[str, Any], most: int) -> str:
    manifest, summary = state["manifest"], state["summary"]
    heads = read_table(folder / "heads.csv")
    sizes = summary["transcripts"]
    lines = [f"{Path(str(manifest['model'])).name}: {manifest['layers']} layers x {manifest['heads']} heads; {sum(sizes.values())} transcripts "
             f"({sizes['reference']} reference, {sizes['selection']} selection, {sizes['evaluation']} evaluation)"]
    for kind, found in summary["kinds"].items():
        seen = found["selection"]
        lines += ["", f"{kind}: {seen['events']} events, margin {seen['m']:.2f} logits ({seen['m0']:.2f} with every head ablated); {len(seen['selected'])} of {found['heads']} heads selected",
                  "  head     effect  [95% interval]    % of m       q  max-T p"]
        table = heads[heads["kind"] == kind]
        for r in table[(table["rank"] <= most) | table["selected"]].head(2 * most).itertuples():
            interval = f"[{r.ci_low:+.2f}, {r.ci_high:+.2f}]"
            lost = "~" if abs(r.effect) < seen["noise_floor"] else " "
            lines.append(f"{lost}{'*' if r.selected else ' '}{f'L{r.layer}H{r.head}':7}{r.effect:+8.2f}  {interval:16}{100 * r.effect / seen['m']:+7.0f}%{r.q_value:9.4f}{r.p_maxt:9.4f}")
        lines += kind_lines(found) if "global" in summary else []
    lines += closing_lines(summary) if "global" in summary else []
    lines += ["", "* selected: q <= alpha against matched null tokens, and not negligible. Effects are exact, in logits; positive supports the decision."]
    floors = {kind: found["selection"]["noise_floor"] for kind, found in summary["kinds"].items() if found["selection"]["noise_floor"]}
    if floors:
        lines.append(f"~ below the noise of 16-bit arithmetic: {', '.join(f'{kind} {floor:.3f}' for kind, floor in floors.items())} logits for a single effect.")
    lines += [f"note: {note}" for note in summary["warnings"]]
    if summary["set_aside"]:
        lines.append(f"note: {len(summary['set_aside'])} transcripts were set aside; summary.json says why")
    return "\n".join(fitted(lines))


def rebuild_report(folder: Path) -> Path:
    """Write the report of a finished run again, and say where it is."""
    open_run(folder)
    with whole(folder):
        made = build_report(folder)
    write(folder / "report.html", made)
    return folder / "report.html"


def write_figure(found: Comparison, path: Path) -> None:
    """Write the figure of a comparison as a self-contained HTML file."""
    from .standing_plots import two_models

    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: {path.parent} is not a folder; make it first")
    if path.is_dir():
        raise InputError(f"{path} is a folder; name a file for the figure")
    write(path, two_models(found).to_html(include_plotlyjs=True, config={"displayModeBar": False, "responsive": True}))


def _tokenizer_for(model: str, transcripts: Path):
    """The tokenizer, only if some transcript needs its chat template."""
    if not transcripts.is_file() or '"messages"' not in transcripts.read_text(encoding="utf-8", errors="replace"):
        return None
    return DecisionModel.load_tokenizer(model)


def own_device(number: int) -> str | None:
    """The accelerator of the n-th process of a machine; None where there is none."""
    import torch

    return f"cuda:{number % torch.cuda.device_count()}" if torch.cuda.is_available() else None


def check_device(device: str | None) -> None:
    """Refuse a device that is not there, before anything is loaded onto it."""
    import torch

    try:
        torch.empty(1, device=device or "cpu").item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device {device!r} cannot be used ({str(error).splitlines()[0][:100]}); try cpu") from None


def kinds_of(text: str) -> tuple[Kind, ...]:
    """"region,label" -> kinds; raises InputError for others."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for kind in found:
        check_kind(kind)
    if not found:
        raise InputError("--kinds is empty: choose from region, label, departure")
    return found  # type: ignore[return-value]

