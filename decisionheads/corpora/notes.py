"""Clinical notes with their codes and evidence: what every corpus is read into, as JSONL.

A note's text is verbatim, CR and LF included. Spans are characters of the note; in a file each carries
its text and is checked against the slice when it is read, so that text and offsets cannot drift apart.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..labels import read_jsonl, whole_text
from ..transcripts import Span

EVIDENCE = "evidence"  # the name of a span that a human marked for a code


@dataclass(frozen=True)
class Note:
    """One note, or one admission's, to be coded.

    Attributes:
        id: unique in its file.
        note: the text, verbatim.
        labels: gold codes, dotted, each once.
        subject_id: the patient; splits never cut one.
        hadm_id: the admission.
        split: train, dev or test, where the corpus says so.
        spans: `evidence` (of a code) and other named spans, characters of the note.
    """

    id: str
    note: str
    labels: tuple[str, ...] = ()
    subject_id: str | None = None
    hadm_id: str | None = None
    split: str | None = None
    spans: tuple[Span, ...] = ()

    def __repr__(self) -> str:  # clinical text stays out of logs and tracebacks
        return f"Note({self.id!r}: {len(self.note)} characters, {len(self.labels)} labels, {len(self.spans)} spans)"

    def to_record(self) -> dict[str, Any]:
        record = {"id": self.id, "subject_id": self.subject_id, "hadm_id": self.hadm_id, "split": self.split, "note": self.note,
                  "labels": list(self.labels), "spans": [{**s._asdict(), "text": self.note[s.start:s.end]} for s in self.spans]}
        return {k: v for k, v in record.items() if v is not None}


def save_notes(notes: Iterable[Note], path: str | Path) -> int:
    """Write notes as JSONL, one at a time; the file appears whole or not at all.

    Returns:
        how many there were.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: {path.parent} is not a folder; make it first")
    if path.is_dir():
        raise InputError(f"{path} is a folder; name a file")
    beside, n = path.with_name(f".{path.name}.{os.getpid()}"), 0
    try:
        with open(beside, "w", encoding="utf-8", newline="\n") as out:
            for note in notes:
                out.write(json.dumps(note.to_record(), ensure_ascii=False) + "\n")
                n += 1
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return n


def load_notes(path: str | Path, counts: Counter[str] | None = None) -> list[Note]:
    """Read notes from JSONL; every error names the file and the line, never the text.

    Args:
        path: `id` and `note` are needed, all else may be missing.
        counts: told of spans that are left out since their text is not what stands at their offsets.
    """
    path, counts = Path(path), Counter() if counts is None else counts
    if not path.is_file():
        raise InputError(f"{path}: no such notes file; give a JSONL file that is there")
    found, seen = [], {}
    for number, record in read_jsonl(path):
        try:
            found.append(_note(record, counts))
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from None
        if found[-1].id in seen:
            raise InputError(f"{path}, line {number}: id {found[-1].id!r} was already used in line {seen[found[-1].id]}; give each note its own")
        seen[found[-1].id] = number
    if not found:
        raise InputError(f"{path}: the file is empty; give at least one note")
    return found


def _note(record: Any, counts: Counter[str]) -> Note:
    if not isinstance(record, dict):
        raise InputError("not a JSON object; write one object a line")
    text = lambda name: str(record[name]) if isinstance(record.get(name), int) and not isinstance(record[name], bool) else record.get(name)  # noqa: E731
    values = {name: text(name) for name in ("id", "subject_id", "hadm_id", "split")}
    for name, value in values.items():
        if value is not None and (not isinstance(value, str) or not value or not value.isprintable()):
            raise InputError(f"{name} is not a name; write it as one line of text")
    if values["id"] is None:
        raise InputError("no id; every note needs 'id' and 'note'")
    note, labels = record.get("note"), record.get("labels", [])
    if isinstance(note, str) and not whole_text(note):
        raise InputError(f"note {values['id']!r} holds half of a character (a lone surrogate); write it as UTF-8")
    if not isinstance(note, str) or not note.strip():
        raise InputError(f"note {values['id']!r} has no text; every note needs 'id' and 'note'")
    if not isinstance(labels, list) or any(not whole_text(label) or not label.strip() for label in labels):
        raise InputError("labels are not a list of codes; write them as text in square brackets")
    return Note(note=note, labels=tuple(dict.fromkeys(labels)), spans=checked_spans(record.get("spans", []), note, counts), **values)


def checked_spans(records: Any, note: str, counts: Counter[str]) -> tuple[Span, ...]:
    """Spans whose offsets lie in the note and whose text, where they carry one, stands there; others are counted.

    Args:
        records: `{"name", "start", "end", "of", "text"}` each.
    """
    if not isinstance(records, list):
        raise InputError("spans are not a list; write them in square brackets")
    found = []
    for span in records:
        fits = isinstance(span, dict) and whole_text(span.get("name")) and whole_text(span.get("of") or "")
        if not fits or any(isinstance(span.get(k), bool) or not isinstance(span.get(k), int) for k in ("start", "end")):
            raise InputError("a span lacks 'name', 'start' or 'end'; give all three, as text and whole numbers")
        start, end = span["start"], span["end"]
        if not 0 <= start < end:
            counts["spans without characters"] += 1
        elif end > len(note):
            counts["spans past the end of the note"] += 1
        elif span.get("text") is not None and span["text"] != note[start:end]:
            counts["spans whose text is not what stands there"] += 1
        else:
            found.append(Span(span["name"], start, end, span.get("of") or ""))
    return tuple(found)
