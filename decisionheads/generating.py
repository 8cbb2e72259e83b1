"""`decisionheads generate`: files in, files out, everything checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ._processes import agreed, first, working_together
from .corpora.notes import Note, load_notes
from .errors import InputError
from .generation import Generating, Parts, finish, finished, generate, make_prompts
from .labels import LabelSpace
from .model import DecisionModel
from .run_folder import hash_files, model_hash
from .workflow import check_device, load_space, own_device


def generate_files(model: str, notes: Path, labels: Path, out: Path, asked: Generating, *, limit: int = 0, together: int = 8, dtype: str = "float32", regions: str | None = None,
                   device: str | None = None, progress: bool = True) -> dict[str, Any] | None:
    """Generate into a file, go on with one that was begun, or take what a finished one says.

    Args:
        limit: only the first so many notes; 0 for all.
        together: texts written side by side.
        regions: what regions are, as in `workflow.load_space`; candidates are listed by them.

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
    return "\n".join(lines)
