"""Transcripts: a prompt and what a model wrote, verbatim, and where its tokens stand.

The whole text is prompt + reasoning + answer with nothing in between; template and think tags
belong to the fields. Spans and mentions are characters of the whole text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from .errors import InputError
from .labels import read_jsonl, whole_text
from .outputs import separate
from .views import MOST, Brief, Viewed


class Span(NamedTuple):
    """Characters `start:end` of the whole text; `of` is the region or label it is about."""

    name: str
    start: int
    end: int
    of: str = ""


@dataclass(frozen=True)
class Transcript(Viewed):
    """One prompt and what was written after it.

    Attributes:
        id: unique in its file.
        prompt, reasoning, answer: the text, verbatim.
        candidates: the labels listed in this prompt; None for the whole label space.
        labels: gold labels, if known.
        group: patient or subject, for splits.
        spans: named spans of the whole text.
        token_ids: the ids that were really written; they must decode to the whole text.
    """

    id: str
    prompt: str
    reasoning: str
    answer: str
    candidates: tuple[str, ...] | None = None
    labels: tuple[str, ...] = ()
    group: str | None = None
    spans: tuple[Span, ...] = ()
    token_ids: tuple[int, ...] | None = None

    @property
    def text(self) -> str:
        return self.prompt + self.reasoning + self.answer

    @property
    def reasoning_start(self) -> int:
        return len(self.prompt)

    @property
    def answer_start(self) -> int:
        return len(self.prompt) + len(self.reasoning)

    def __repr__(self) -> str:
        return (f"Transcript({self.id!r}: {len(self.prompt)} + {len(self.reasoning)} + {len(self.answer)} characters"
                + (f", {len(self.candidates)} candidates" if self.candidates is not None else "") + ")")

    def _rows(self):
        return [{"span": s.name, "from character": s.start, "to": s.end, "of": s.of} for s in self.spans[:MOST]], len(self.spans)

    # -- records ---------------------------------------------------------------------------

    @classmethod
    def from_record(cls, record: Any, tokenizer=None, *, unanswered: bool = False) -> Transcript:
        """Make a transcript from one JSON object.

        Takes `prompt` or `messages` (rendered with the tokenizer's chat template), and `reasoning` and
        `answer` or the names of OpenAI-style servers, `reasoning_content` and `content`. Where there is no
        reasoning of its own, an answer that holds the tags of one is taken apart (see `outputs.separate`).

        Args:
            unanswered: take empty answers, too; they hold no decision, but count when a task is scored.

        Raises:
            InputError: in one sentence, for whatever is missing or does not fit.
        """
        if not isinstance(record, dict):
            raise InputError("not a JSON object; write one object a line")
        prompt = record.get("prompt")
        if prompt is None and record.get("messages") is not None:
            if tokenizer is None or getattr(tokenizer, "chat_template", None) is None:
                raise InputError("'messages' need a tokenizer with a chat template; give 'prompt' instead")
            try:
                prompt = tokenizer.apply_chat_template(record["messages"], tokenize=False, add_generation_prompt=True)
            except Exception as error:  # templates raise whatever they like
                raise InputError(f"the chat template does not take these messages ({type(error).__name__}); give 'prompt' instead") from None
        first = lambda *names: next((record[n] for n in names if record.get(n) is not None), None)  # noqa: E731
        answer, reasoning = first("answer", "content"), first("reasoning", "reasoning_content")
        if reasoning is None:
            reasoning, answer = separate(answer) if isinstance(answer, str) else ("", answer)
            if reasoning and not answer and not unanswered:
                raise InputError("there is a reasoning and no answer after it; give the model more room to write, or leave this one out")
        name_of = record.get("id")
        if isinstance(name_of, int) and not isinstance(name_of, bool):
            name_of = str(name_of)
        for name, value in (("id", name_of), ("prompt", prompt), ("answer", answer)):
            if value is None or value == "" and not (unanswered and name == "answer"):
                raise InputError(f"no {name}; every transcript needs 'id', 'prompt' (or 'messages') and 'answer'")
        for name, value in (("id", name_of), ("prompt", prompt), ("reasoning", reasoning), ("answer", answer), ("group", record.get("group") or "")):
            _text(name, str(value) if name == "group" and isinstance(value, int) else value)
        if not name_of.isprintable():
            raise InputError(f"id {name_of!r} holds a line break or control character; use plain text")
        lists = {name: _list(name, record.get(name)) for name in ("candidates", "labels", "spans", "token_ids")}
        for name in ("candidates", "labels"):
            for value in lists[name] or ():
                _text(f"an entry of {name}", value)
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31 for i in lists["token_ids"] or ()):
            raise InputError("token_ids are not all token ids; give whole numbers from 0 on")
        whole = prompt + reasoning + answer
        spans = []
        for span in lists["spans"] or ():
            fits = isinstance(span, dict) and whole_text(span.get("name")) and whole_text(span.get("of") or "")
            if not fits or any(isinstance(span.get(k), bool) or not isinstance(span.get(k), int) for k in ("start", "end")):
                raise InputError("a span lacks 'name', 'start' or 'end'; give all three, as text and whole numbers")
            spans.append(Span(span["name"], span["start"], span["end"], span.get("of") or ""))
            start, end = spans[-1].start, spans[-1].end
            if not 0 <= start < end <= len(whole):
                raise InputError(f"span {span['name']!r} is {start}:{end} in a text of {len(whole)} characters; mend its offsets")
            if span.get("text") is not None and span["text"] != whole[start:end]:
                raise InputError(f"span {span['name']!r} does not match the text at {start}:{end}; count characters of the whole text, CR and LF included")
        candidates, ids = lists["candidates"], lists["token_ids"]
        return cls(name_of, prompt, reasoning, answer, None if candidates is None else tuple(candidates), tuple(lists["labels"] or ()),
                   None if record.get("group") is None else str(record["group"]), tuple(spans), None if ids is None else tuple(ids))

    def to_record(self) -> dict[str, Any]:
        record = {k: v for k, v in asdict(self).items() if v is not None and (v != () or k == "candidates")}
        if self.spans:
            record["spans"] = [span._asdict() for span in self.spans]
        return record


def _text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InputError(f"{name} is not text; write it as one string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{name} holds half of a character (a lone surrogate); write it as UTF-8") from None


def _list(name: str, value: object) -> list | tuple | None:
    if value is not None and not isinstance(value, list | tuple):
        raise InputError(f"{name} is not a list; write it in square brackets")
    return value


def load_transcripts(path: str | Path, tokenizer=None, *, unanswered: bool = False) -> list[Transcript]:
    """Read transcripts from a JSONL file; every error names the file and the line. With `unanswered`, answers may be empty."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such transcript file; give a JSONL file that is there")
    found: list[Transcript] = []
    seen: dict[str, int] = {}
    for number, record in read_jsonl(path):
        try:
            found.append(Transcript.from_record(record, tokenizer, unanswered=unanswered))
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from None
        if found[-1].id in seen:
            raise InputError(f"{path}, line {number}: id {found[-1].id!r} was already used in line {seen[found[-1].id]}; give each transcript its own")
        seen[found[-1].id] = number
    if not found:
        raise InputError(f"{path}: the file is empty; give at least one transcript")
    return found


def from_dataset(rows: Iterable[dict[str, Any]], tokenizer=None) -> list[Transcript]:
    """Transcripts from a `datasets.Dataset`, or any iterable of such records."""
    return [Transcript.from_record({k: v for k, v in row.items() if v is not None}, tokenizer) for row in rows]


def to_dataset(transcripts: Iterable[Transcript]):
    """The transcripts as a `datasets.Dataset`."""
    from datasets import Dataset

    return Dataset.from_list([t.to_record() for t in transcripts])


def save_transcripts(transcripts: Iterable[Transcript], path: str | Path) -> None:
    """Write JSONL, one transcript a line."""
    with open(path, "w", encoding="utf-8", newline="\n") as out:
        for transcript in transcripts:
            out.write(json.dumps(transcript.to_record(), ensure_ascii=False) + "\n")


# -- tokens -------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Encoded(Brief):
    """Tokens of a whole text.

    Attributes:
        ids: `[position]` token ids.
        offsets: `[position, 2]` the characters of each token; `(0, 0)` for special tokens that stand
            for no character.
        begins: `[position]` the first character of each token after the spaces that lead it.
    """

    ids: Int[np.ndarray, " position"]
    offsets: Int[np.ndarray, "position 2"]
    begins: Int[np.ndarray, " position"] | None = None

    def tokens_in(self, start: int, end: int) -> np.ndarray:
        """Positions of the tokens that share a character with `start:end`, ascending; a space that leads a word is not yet the word."""
        begins = self.offsets[:, 0] if self.begins is None else self.begins
        return np.flatnonzero(np.maximum(begins, start) < np.minimum(self.offsets[:, 1], end))

    def __len__(self) -> int:
        return len(self.ids)


def encode(transcript: Transcript, tokenizer) -> Encoded:
    """Tokenize the whole text of a transcript, or check the ids it brings.

    Special tokens are added unless the text already begins with the BOS token, so that chat text
    has exactly one.

    Raises:
        InputError: if given ids do not decode to the text, or offsets cannot be had.
    """
    text = transcript.text
    if transcript.token_ids is None:
        starts = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        encoded = tokenizer(text, add_special_tokens=not starts, return_offsets_mapping=True)
        ids, offsets = np.array(encoded["input_ids"]), np.array(encoded["offset_mapping"]).reshape(-1, 2)
    else:
        ids = np.array(transcript.token_ids)
        offsets = None
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for lead in range(2 if len(ids) and ids[0] == tokenizer.bos_token_id else 1):  # with or without a BOS in front
            if encoded["input_ids"] == ids[lead:].tolist():
                offsets = np.array([(0, 0)] * lead + list(encoded["offset_mapping"])).reshape(-1, 2)
                break
    if offsets is None or _broken(ids, offsets, text, set(tokenizer.all_special_ids)):
        offsets = _rebuild_offsets(ids, text, tokenizer, transcript.id)
    begins = [end - len(word) if (word := text[start:end].lstrip()) else start for start, end in offsets.tolist()]
    return Encoded(ids, offsets, np.array(begins, int))


def _broken(ids: np.ndarray, offsets: np.ndarray, text: str, special: set[int]) -> bool:
    """Whether a tokenizer returned empty or disordered spans for tokens that stand for text."""
    if offsets[-1, 1] == 0 and len(text):
        return True  # something without characters stands at the end
    empty = offsets[:, 0] >= offsets[:, 1]
    lead = 0
    while lead < len(ids) and int(ids[lead]) in special and empty[lead]:
        lead += 1  # special tokens in front stand for nothing
    return bool(empty[lead:].any() or (np.diff(offsets[lead:, 0]) < 0).any())


def _rebuild_offsets(ids: np.ndarray, text: str, tokenizer, name: str) -> np.ndarray:
    """Offsets from decoding growing prefixes; raises where the ids do not decode to the text."""
    ids = ids.tolist()
    special = set(tokenizer.all_special_ids)
    lead = 0
    while lead < len(ids) and ids[lead] in special and not text.startswith(tokenizer.decode(ids[lead:lead + 1])):
        lead += 1
    offsets, at = [(0, 0)] * lead, 0
    if tokenizer.decode(ids[lead:]) != text:
        raise InputError(f"transcript {name}: its token_ids do not decode to its text; were they made by another tokenizer?")
    pending = lead  # first token of a character that is not complete yet
    for i in range(lead, len(ids)):
        context = max(lead, pending - 1)  # one token before: some decoders strip a leading space
        piece = tokenizer.decode(ids[context:i + 1])[len(tokenizer.decode(ids[context:pending])):]
        if not piece or piece.endswith("\ufffd") or not text.startswith(piece, at):
            continue
        offsets += [(at, at + len(piece))] * (i + 1 - pending)
        at, pending = at + len(piece), i + 1
    if at != len(text) or len(offsets) != len(ids):
        raise InputError(f"transcript {name}: character offsets of its tokens cannot be had from this tokenizer; use a fast tokenizer")
    return np.array(offsets).reshape(-1, 2)


def prompt_ids(transcripts: Iterable[Transcript], tokenizer) -> list[Int[np.ndarray, " _"]]:
    """Token ids of the prompts, leaving out transcripts whose text and ids do not agree."""
    found = []
    for t in transcripts:
        try:
            encoded = encode(t, tokenizer)
        except InputError:
            continue
        written = encoded.tokens_in(len(t.prompt), len(t.text))
        if len(written):
            found.append(encoded.ids[: written[0]])
    return found
