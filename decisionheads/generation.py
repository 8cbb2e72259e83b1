"""From notes to transcripts: prompts are made, a model writes, and what it wrote is taken apart.

Prompts share their candidate list, which is read once. Each text that is done is kept beside the output
until all are, as token ids alone, so that a run that was killed goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ._processes import agreed, spread
from .corpora.notes import Note
from .errors import InputError, as_written
from .labels import LabelSpace
from .model import DecisionModel
from .outputs import separate
from .prefixes import Prefixes
from .prompts import Layout, Prompt, Prompter
from .provenance import digest, same_versions, versions
from .run_folder import read_json, write
from .task_score import task_score
from .transcripts import Transcript, encode, save_transcripts
from .views import Brief
from .writing import Answering, Answers, Greedy, Writer, appended, end_tokens
from .writing import write as write_texts

KNOWN = {"content", "transcripts", "unfinished", "unmarked", "prompt_tokens", "cut", "score"}
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
        between: what stands between two labels, within the labels.
    """

    layout: Layout = Layout("described", INSTRUCTION)
    longest: int = 1024
    within_labels: bool = False
    cue: str = "\nCodes:"
    most: int = 16
    until: str = ""
    between: str = ","

    def __post_init__(self):
        if not self.cue.strip():
            raise InputError("the cue is empty; give the words that open the answer")
        if not self.within_labels and self.longest < 1:
            raise InputError("nothing can be written within 0 tokens; raise --longest")
        if self.until and not self.within_labels:
            raise InputError("--until ends the reasoning of answers within the labels; give --within-labels as well, or leave it out")

    def answers(self, labels: LabelSpace, tokenizer, ends: frozenset[int]) -> Answers:
        """Which answers there are within the labels."""
        return Answers(labels, tokenizer, ends, self.cue, self.between, self.most, self.until)


@dataclass(frozen=True, repr=False)
class Generated(Brief):
    """What came of it.

    Attributes:
        transcripts: in the order of the notes.
        unfinished: ids of notes for which nothing that could be an answer was written, with the reason.
        prompts: the prompts by note id.
        shared: tokens that all prompts begin with.
        unmarked: texts in which neither a tag nor the cue parts reasoning and answer, so that all is answer.
    """

    transcripts: list[Transcript]
    unfinished: dict[str, str]
    prompts: dict[str, Prompt]
    shared: int
    unmarked: int = 0

    def summary(self, labels: LabelSpace) -> dict[str, Any]:
        """Counts and the task score, as plain values; no text."""
        lengths = [p.tokens for p in self.prompts.values()]
        return {"transcripts": len(self.transcripts), "unfinished": dict(sorted(self.unfinished.items())), "unmarked": self.unmarked,
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
        together: texts that are written side by side; changes the time and the memory, and the result only where rounding decides.
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
    unmarked = 0 if asked.within_labels else sum(not t.reasoning and asked.cue not in t.answer for t in transcripts)
    return Generated(transcripts, unfinished, prompts, shared, unmarked)


def _thought(writer: Writer) -> int | None:
    """How many tokens of reasoning there are, where the writer knows."""
    return len(writer.thoughts) if isinstance(writer, Answering) else None


def _transcript(note: Note, prompt: Prompt, ids: np.ndarray, written: list[int], thought: int | None, asked: Generating, tokenizer, ends: frozenset[int]) -> Transcript | str:
    """The transcript of a note, or why there is none."""
    broken = len(written) == asked.longest and written[-1] not in ends
    text = appended(tokenizer, ids, written)
    if thought is not None:
        reasoning = appended(tokenizer, ids, written[:thought])
        answer = text[len(reasoning):]
    else:
        reasoning, answer = separate(text, asked.cue)
        opened = prompt.text.rstrip().endswith(OPENING)
        if broken or not answer.strip() or (opened and not reasoning):  # the last code of a text that was broken off may be another one's beginning
            return f"no whole answer within {asked.longest} tokens"
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
            begun, remedy = read_json(self.folder / "inputs.json"), "remove it to begin again, or name another file"
            with as_written(self.folder / "inputs.json", remedy):
                check_inputs(self.folder, dict(begun["inputs"]), self.inputs, remedy)
                same_versions(self.folder, dict(begun["versions"]), remedy)
        elif self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise InputError(f"{self.folder} is there and does not say what it was made from; remove it")

    def _part(self, name: str) -> Path:
        return self.folder / f"{digest(name)}.json"

    def load(self, name: str) -> list | None:
        """Token ids, and how many of them are reasoning (or None); None where it is to be written (again)."""
        try:
            found = json.loads(self._part(name).read_bytes())
            written, thought = found["written"]
            if found["digest"] != digest(json.dumps(found["written"])):  # changed since: it is written again
                return None
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        whole = isinstance(written, list) and all(type(i) is int and i >= 0 for i in written) and (thought is None or type(thought) is int)
        return [written, thought] if whole else None

    def save(self, name: str, written: list) -> None:
        self.begin()
        write(self._part(name), json.dumps({"written": written, "digest": digest(json.dumps(written))}) + "\n")

    def remove(self) -> None:
        with suppress(FileNotFoundError):  # another process of this run may be removing it as well
            for path in sorted(self.folder.glob("*.json"), key=lambda p: p.name == "inputs.json"):  # what they were made from goes last
                path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep others off while this process writes; let go whenever it ends, however it ends.

        Raises:
            InputError: where another process is writing the same file.
        """
        try:
            import fcntl
        except ImportError:  # not on this system
            yield
            return
        self.begin()
        with open(self.folder / "inputs.json", "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"{self.folder.parent / self.folder.name[1:].removesuffix('.parts')} is being written by another process; wait for it") from None
            if read_json(self.folder / "inputs.json").get("inputs") != self.inputs:
                raise InputError(f"{self.folder} was taken by another process; wait for it, or name another file")
            try:
                yield
            finally:
                with suppress(FileNotFoundError):
                    if not any(p.name != "inputs.json" for p in self.folder.iterdir()):
                        self.remove()  # nothing was written

    def begin(self) -> None:
        if not (self.folder / "inputs.json").is_file():
            self.folder.mkdir(exist_ok=True)
            write(self.folder / "inputs.json", json.dumps({"inputs": self.inputs, "versions": versions()}) + "\n")


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
    whole = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        save_transcripts(made.transcripts, whole)
        state = {"inputs": inputs, "model": model, "versions": versions(), "content": content_hash(whole), **made.summary(labels)}
        write(beside(out), json.dumps(state, indent=1) + "\n")
        whole.replace(out)
    finally:
        whole.unlink(missing_ok=True)
    return state


def content_hash(path: Path) -> str:
    """Of a file's bytes alone."""
    return digest(path.read_bytes())


def finished(out: Path, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """What stands beside a finished file; None where there is none yet.

    Raises:
        InputError: if the file, or the one beside it, was made otherwise.
    """
    other = beside(out)
    if not out.exists() and not other.exists():
        return None
    state = read_json(other) if other.is_file() else {}
    if not isinstance(state.get("inputs"), dict):
        raise InputError(f"{out if out.exists() else other} exists and nothing says how it was made; name another file")
    check_inputs(out if out.exists() else other, state["inputs"], inputs, "name another file")
    if not out.exists():
        return None  # killed between the two
    if not set(state) >= KNOWN or state["content"] != content_hash(out):
        raise InputError(f"{out} is not what was generated: it or {other.name} was changed since; name another file")
    return state
