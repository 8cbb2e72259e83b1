"""MDACE: notes of MIMIC-III in which coders marked the evidence for each ICD-10-CM code.

    data/Inpatient/ICD-10/1.0/*.json     a chart each: hadm_id, notes (note_id, annotations (begin, end, code, code_system, type))
    data/Profee/...                      the same for professional fees, partly of the same notes under other rules
    splits/Inpatient/MDace-ev-*.csv      train, val and test: admissions, one a line, no header
    NOTEEVENTS.csv.gz                    of MIMIC-III: ROW_ID is the note_id; TEXT is what begin and end count in

Charts into which the texts were injected (`text`, and `covered_text` of each annotation) are taken as well.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..labels import read_text
from ..transcripts import Span
from .codes import dotted, is_code
from .notes import EVIDENCE, Note, checked_spans
from .tables import check_columns, find, rows

PARTS = ("Inpatient", "Profee")
SPLITS = {"train": "train", "val": "dev", "test": "test"}  # the lists' names -> a note's
COLUMNS = ("row_id", "subject_id", "hadm_id", "text")
SYSTEM = "ICD-10-CM"
_OTHERS = ("ICD-10-PCS", "CPT", "ICD-9-CM", "ICD-9-PCS", "HCPCS")


@dataclass(frozen=True)
class _Entry:
    """A note of a chart; texts stay out of any trace."""

    hadm: str
    row: str
    text: str | None = field(repr=False)
    annotations: list[dict[str, Any]] = field(repr=False)


def notes(path: str | Path, counts: Counter[str], notes_from: str | Path | None = None, split: str | None = None, progress: bool = False) -> Iterator[Note]:
    """One note for each note of each chart, `<admission>-<note>`, with the codes that were marked in it.

    A code whose marks all turn out not to fit the text remains a label: the coder gave it to this note.

    Args:
        path: the folder of the repository, its `data`, `with_text/gold`, or one part's folder. Of two parts
            below it, Inpatient is read.
        counts: told of everything read and everything left out, by reason.
        notes_from: NOTEEVENTS.csv or .csv.gz; by default looked for below `path`.
        split: train, dev or test; None for all.
        progress: draw a bar on a terminal's stderr.

    Raises:
        InputError: before the first note, for a folder that is not MDACE, charts of another form, or texts
            that cannot be had; later, for a table that is damaged further on.
    """
    path = Path(path)
    part = _part(path)
    lists = _split_lists(part)
    if split is not None and split not in lists.values():
        raise InputError(f"{path}: no admissions of split {split!r}; choose {', '.join(SPLITS.values())}, with splits/{part.name}/MDace-ev-*.csv beside data")
    charts = _charts(part, counts)
    if part != path:
        others = [name for name in PARTS if name != part.name]
        counts["charts of the other part"] += sum(len(list((part.parent / name).glob("*/*/*.json"))) for name in others)
    entries = [entry for chart in charts for entry in _chart(chart)]
    events = Path(notes_from) if notes_from is not None else find(path, "NOTEEVENTS")
    if events is not None:
        check_columns(events, COLUMNS)
    elif any(entry.text is None for entry in entries):
        raise InputError(f"{path}: the charts hold no text and there is no NOTEEVENTS.csv.gz below; give MIMIC-III's with --notes-from")
    return _notes(entries, events, lists, split, counts, progress)


def _part(path: Path) -> Path:
    if not path.is_dir():
        raise InputError(f"{path} is not a folder; give the folder of the MDACE repository")
    found = [path, *(folder / name for name in PARTS for folder in (path, path / "data"))]
    for folder in found:
        if (folder / "ICD-10").is_dir():
            return folder
    raise InputError(f"{path}: no MDACE here; expected data/Inpatient/ICD-10/1.0/*.json below it")


def _charts(part: Path, counts: Counter[str]) -> list[Path]:
    """The files of the newest version; all others are counted."""
    newest = lambda folder: tuple(map(int, re.findall(r"\d+", folder.name)))  # noqa: E731
    versions = sorted((f for f in (part / "ICD-10").iterdir() if any(f.glob("*.json"))), key=newest)
    if not versions:
        raise InputError(f"{part / 'ICD-10'}: no charts; expected them at 1.0/<admission>-ICD-10.json below it")
    charts = sorted(versions[-1].glob("*.json"))
    counts["read: charts"] += len(charts)
    counts["charts of older versions"] += sum(len(list(folder.glob("*.json"))) for folder in versions[:-1])
    counts["charts coded in ICD-9"] += len(list((part / "ICD-9").glob("*/*.json")))
    return charts


def _chart(file: Path) -> list[_Entry]:
    """The notes of one chart, its form checked."""
    try:
        chart = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file}: not JSON; take the file as it was released") from None
    hadm = _number(chart.get("hadm_id")) if isinstance(chart, dict) else None
    listed = chart.get("notes") if isinstance(chart, dict) else None
    if hadm is None or not isinstance(listed, list):
        raise InputError(f"{file}: no hadm_id or no list of notes; expected a chart of MDACE")
    found = []
    for place, note in enumerate(listed, 1):
        row = _number(note.get("note_id")) if isinstance(note, dict) else None
        marks, text = (note.get("annotations"), note.get("text")) if isinstance(note, dict) else (None, None)
        if row is None or not isinstance(marks, list) or not all(isinstance(mark, dict) for mark in marks) or not isinstance(text, str | None):
            raise InputError(f"{file}, note {place}: no note_id or no list of annotations; expected a chart of MDACE")
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise InputError(f"{file}, note {place}: its text holds half of a character (a lone surrogate); inject the texts again") from None
        found.append(_Entry(hadm, row, text, marks))
    return found


def _number(value: Any) -> str | None:
    """An id, which JSON may hold as a number or as text."""
    text = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    return text if text.isdecimal() else None


def _split_lists(part: Path) -> dict[str, str]:
    """Admission -> split, from the lists beside the data; empty if there are none."""
    found: dict[str, str] = {}
    folder = next((f / "splits" / part.name for f in part.resolve().parents[:3] if (f / "splits" / part.name).is_dir()), None)
    for name, split in SPLITS.items() if folder is not None else ():
        file = folder / f"MDace-ev-{name}.csv"
        for number, line in enumerate(read_text(file).split("\n"), 1):
            hadm = line.strip()
            if hadm and not hadm.isdecimal():
                raise InputError(f"{file}, line {number}: not the number of an admission; expected one a line and no header")
            if found.setdefault(hadm, split) != split and hadm:
                raise InputError(f"{file}, line {number}: admission {hadm} is in the {found[hadm]} list as well; take the lists as they were released")
    found.pop("", None)
    return found


def _notes(entries: list[_Entry], events: Path | None, lists: Mapping[str, str], split: str | None, counts: Counter[str], progress: bool) -> Iterator[Note]:
    wanted = {entry.row for entry in entries if split is None or lists.get(entry.hadm) == split}
    texts = _texts(events, wanted, progress) if events is not None else {}
    seen: set[str] = set()
    for entry in entries:
        counts["read: notes"] += 1
        counts["read: annotations"] += len(entry.annotations)
        subject, hadm, text = texts.get(entry.row, (None, None, None))
        text, name = text if entry.text is None else entry.text, f"{entry.hadm}-{entry.row}"
        reason = ""
        if split is not None and lists.get(entry.hadm) != split:
            reason = "notes of no split or another one"
        elif name in seen:
            reason = "notes that a chart lists again"
        elif text is None:
            reason = "notes that are not in NOTEEVENTS"
        elif hadm is not None and hadm != entry.hadm:  # row ids of another release name other notes
            reason = "notes whose row of NOTEEVENTS is of another admission"
        elif not text.strip():
            reason = "notes without text"
        elif not any(_kept(mark) for mark in entry.annotations):
            reason = "notes without an ICD-10-CM code"
        if reason:
            counts[reason] += 1
            counts["annotations of notes that are left out"] += len(entry.annotations)
            continue
        seen.add(name)
        labels, spans = _marked(entry.annotations, text, counts)
        yield Note(name, text, labels, subject or None, entry.hadm, lists.get(entry.hadm), spans)


def _texts(events: Path, wanted: set[str], progress: bool) -> dict[str, tuple[str, str, str]]:
    """Note -> patient, admission and text of the wanted rows; the other two million are passed by."""
    found: dict[str, tuple[str, str, str]] = {}
    for row, subject, hadm, text in rows(events, COLUMNS, progress):
        if row.strip() in wanted:
            found[row.strip()] = subject.strip(), hadm.strip(), text
            if len(found) == len(wanted):
                break
    return found


def _kept(mark: dict[str, Any]) -> bool:
    return _why_not(mark) == ""


def _why_not(mark: dict[str, Any]) -> str:
    """Why an annotation gives no label; nothing if it does."""
    system, code = mark.get("code_system"), mark.get("code")
    if system != SYSTEM:
        return f"annotations of {system if system in _OTHERS else 'another code system'}"
    if mark.get("type", "Human") != "Human":
        return "annotations that were mapped, not made by a human"
    return "" if isinstance(code, str) and is_code(dotted(code)) else "annotations without a code"


def _marked(marks: list[dict[str, Any]], text: str, counts: Counter[str]) -> tuple[tuple[str, ...], tuple[Span, ...]]:
    """Labels of a note and the evidence that stands in its text; what does not is counted."""
    labels, records = [], []
    for mark in marks:
        reason, place = _why_not(mark), {"start": mark.get("begin"), "end": mark.get("end")}
        if not reason:
            labels.append(dotted(mark["code"]))
            if all(isinstance(at, int) and not isinstance(at, bool) for at in place.values()):
                records.append({"name": EVIDENCE, **place, "of": labels[-1], "text": mark.get("covered_text", mark.get("text"))})
            else:
                reason = "annotations without offsets"
        if reason:
            counts[reason] += 1
    spans = checked_spans(records, text, counts)
    once = tuple(dict.fromkeys(spans))
    counts["annotations that repeat another"] += len(spans) - len(once)
    return tuple(dict.fromkeys(labels)), once
