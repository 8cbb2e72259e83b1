"""From notes to transcripts: prompts are made, a model writes, and what it wrote is taken apart.

Prompts share their candidate list, which is read once. Each text that is done is kept beside the output
until all are, as token ids alone, so that a run that was killed goes on where it stopped.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ._processes import agreed, spread
from .corpora.notes import Note
from .errors import InputError
from .labels import LabelSpace
from .model import DecisionModel
from .outputs import separate
from .prefixes import Prefixes
from .prompts import Layout, Prompt, Prompter
from .run_folder import digest, read_json, versions, write
from .task_score import task_score
from .transcripts import Transcript, encode, save_transcripts
from .writing import Answering, Answers, Greedy, Writer, end_tokens
from .writing import write as write_texts

OPENING = ("<think>", "[THINK]")  # a prompt that ends so has opened the reasoning itself
INSTRUCTION = ("Which of the candidate labels does the note support? Think step by step: name the findings and the labels that come close. "
               "Then give the labels that apply, and no others, on one line that begins with \"Codes:\", with commas between them.")


@dataclass(frozen=True)
class Generating:
    """How transcripts are generated.

    Attributes:
        layout: of the prompts.
        longest: most tokens that are written after a prompt; within the labels, of reasoning.
        within_labels: reasoning is written freely, then `cue`, then labels only; see `writing.Answering`.
        cue: what opens the answer within the labels; in free writing, what marks where the answer begins if there are no tags of a reasoner.
        most: most labels of an answer within the labels.
        until: text at which reasoning ends, within the labels.
    """

    layout: Layout = Layout("described", INSTRUCTION)
    longest: int = 1024
    within_labels: bool = False
    cue: str = "\nCodes:"
    most: int = 16
    until: str = ""

    def answers(self, labels: LabelSpace, tokenizer, ends: frozenset[int]) -> Answers:
        """Which answers there are within the labels."""
        return Answers(labels, tokenizer, ends, self.cue, most=self.most, until=self.until)


@dataclass(frozen=True)
class Generated:
    """What came of it.

    Attributes:
        transcripts: in the order of the notes.
        unfinished: ids of notes for which nothing that could be an answer was written, with the reason.
        prompts: the prompts by note id.
        shared: tokens that all prompts begin with.
    """

    transcripts: list[Transcript]
    unfinished: dict[str, str]
    prompts: dict[str, Prompt]
    shared: int

    def summary(self, labels: LabelSpace) -> dict[str, Any]:
        """Counts and the task score, as plain values; no text."""
        lengths = [p.tokens for p in self.prompts.values()]
        return {"transcripts": len(self.transcripts), "unfinished": dict(sorted(self.unfinished.items())),
                "prompt_tokens": {"least": min(lengths), "median": int(np.median(lengths)), "most": max(lengths), "shared": self.shared},
                "cut": {name: {"characters": p.cut, "lost_evidence": dict(sorted(Counter(p.lost).items()))} for name, p in self.prompts.items() if p.cut},
                "score": task_score(self.transcripts, labels).to_dict() if any(label in labels for t in self.transcripts for label in t.labels) else None}


def make_prompts(notes: Sequence[Note], labels: LabelSpace, tokenizer, asked: Generating, context: int | None) -> dict[str, Prompt]:
    """The prompt of each note by id, cut to leave room for what is written; needs no model.

    Raises:
        InputError: where candidate list and instruction alone do not fit; both lengths are named.
    """
    prompter = Prompter(labels, tokenizer, asked.layout)
    room = asked.longest
    if asked.within_labels:
        room = Answering(asked.answers(labels, tokenizer, frozenset([tokenizer.eos_token_id])), asked.longest).longest
    return {note.id: prompter.prompt(note, room, context) for note in notes}


def generate(model: DecisionModel, notes: Sequence[Note], labels: LabelSpace, asked: Generating = Generating(), *, together: int = 8, parts: Parts | None = None,
             prompts: dict[str, Prompt] | None = None, progress: bool = False) -> Generated:
    """What a model writes for each note, greedily.

    Args:
        labels: the candidates, all of them in every prompt.
        together: texts that are written side by side; changes the time and the memory, not the result.
        parts: keeps what is done.
        prompts: those of `make_prompts`, if they are at hand.

    Raises:
        InputError: for prompts that do not fit the model.
    """
    tokenizer, ends = model.tokenizer, end_tokens(model)
    prompts = prompts if prompts is not None else make_prompts(notes, labels, tokenizer, asked, model.hooked.context)
    ids = {name: encode(Transcript(name, p.text, "", ""), tokenizer).ids for name, p in prompts.items()}
    shared = Prefixes.common(list(ids.values()))
    known = agreed({note.id: found for note in notes if parts is not None and (found := parts.load(note.id)) is not None})  # before any process writes more
    left = [note.id for note in notes if note.id not in known]
    answers = asked.answers(labels, tokenizer, ends) if asked.within_labels else None
    writer = lambda: Greedy(asked.longest, ends) if answers is None else Answering(answers, asked.longest)  # noqa: E731
    bar = tqdm(total=len(notes), initial=len(known), desc="writing", unit="text", disable=not progress)
    prefixes = Prefixes(model.hooked).share([ids[name] for name in ids]) if left else None

    def group(names: list[str]) -> dict[str, list]:
        found = {}
        for n, written, by in write_texts(model.hooked, [ids[name] for name in names], lambda n: writer(), together=together, shared=prefixes.shared):
            found[names[n]] = [written, _thought(by)]
            if parts is not None:
                parts.save(names[n], found[names[n]])
            bar.update()
        return found

    for found in spread(group, [left[i:i + together] for i in range(0, len(left), together)]):
        known.update(found)
    bar.close()
    transcripts, unfinished = [], {}
    for note in notes:
        made = _transcript(note, prompts[note.id], ids[note.id], *known[note.id], asked, tokenizer, ends)
        if isinstance(made, str):
            unfinished[note.id] = made
        else:
            transcripts.append(made)
    return Generated(transcripts, unfinished, prompts, shared)


def _thought(writer: Writer) -> int | None:
    """How many tokens of reasoning there are, where the writer knows."""
    return writer.thought if isinstance(writer, Answering) else None


def _transcript(note: Note, prompt: Prompt, ids: np.ndarray, written: list[int], thought: int | None, asked: Generating, tokenizer, ends: frozenset[int]) -> Transcript | str:
    """The transcript of a note, or why there is none."""
    broken = len(written) == asked.longest and written[-1] not in ends
    while written and tokenizer.decode(written).endswith("\ufffd"):
        written = written[:-1]  # half a character, where it was broken off
    text = tokenizer.decode(written)
    if thought is not None:
        reasoning = tokenizer.decode(written[:thought])
        answer = text[len(reasoning):]
    else:
        reasoning, answer = separate(text, asked.cue)
        opened = prompt.text.rstrip().endswith(OPENING)
        if not answer.strip() or (not reasoning and (broken or opened)):
            return f"no answer within {asked.longest} tokens"
    made = Transcript(note.id, prompt.text, reasoning, answer, None, note.labels, note.subject_id, prompt.spans)
    whole = [*map(int, ids), *written]
    return made if encode(made, tokenizer).ids.tolist() == whole else replace(made, token_ids=tuple(whole))


class Parts:
    """What was written for each text, beside the file that it will be part of; made with other inputs it is refused.

    Args:
        out: the file.
        inputs: what it is made from, JSON.
    """

    def __init__(self, out: Path, inputs: dict[str, Any]):
        self.folder, self.inputs = out.with_name(f".{out.name}.parts"), json.loads(json.dumps(inputs))
        if (self.folder / "inputs.json").is_file():
            check_inputs(self.folder, read_json(self.folder / "inputs.json"), self.inputs, "remove it to begin again, or name another file")

    def _part(self, name: str) -> Path:
        return self.folder / f"{digest(name)}.json"

    def load(self, name: str) -> list | None:
        path = self._part(name)
        return read_json(path)["written"] if path.is_file() else None

    def save(self, name: str, written: list) -> None:
        if not self.folder.is_dir() or not (self.folder / "inputs.json").is_file():
            self.folder.mkdir(exist_ok=True)
            write(self.folder / "inputs.json", json.dumps(self.inputs) + "\n")
        write(self._part(name), json.dumps({"written": written}) + "\n")

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def check_inputs(path: Path, before: dict[str, Any], now: dict[str, Any], remedy: str) -> None:
    """Refuse what was made from other inputs, naming those that differ."""
    other = sorted(k for k in {*before, *now} if before.get(k) != now.get(k))
    if other:
        raise InputError(f"{path} was made from other inputs ({', '.join(other)} differ); {remedy}")


def beside(out: Path) -> Path:
    """The file that says how another one was made."""
    return out.with_name(out.name + ".json")


def finish(out: Path, made: Generated, labels: LabelSpace, inputs: dict[str, Any], model: str) -> dict[str, Any]:
    """Write the transcripts, whole or not at all, and beside them how they were made; returns that."""
    state = {"inputs": inputs, "model": model, "versions": versions(), **made.summary(labels)}
    save_transcripts(made.transcripts, out.with_name(f".{out.name}.whole"))
    write(beside(out), json.dumps(state, indent=1) + "\n")
    out.with_name(f".{out.name}.whole").replace(out)
    return state
