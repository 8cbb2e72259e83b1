"""MIMIC-IV: discharge summaries of MIMIC-IV-Note with the ICD-10-CM codes that MIMIC-IV bills for their admissions.

    note/discharge.csv.gz         note_id, subject_id, hadm_id, note_type, note_seq, charttime, storetime, text
    hosp/diagnoses_icd.csv.gz     subject_id, hadm_id, seq_num, icd_code, icd_version
    hosp/d_icd_diagnoses.csv.gz   icd_code, icd_version, long_title

The first holds gigabytes and is never held: notes come one at a time. Codes are text, padded with spaces and
without dots; the same text means one thing in ICD-9 and another in ICD-10.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ..errors import InputError
from .codes import dotted, is_code
from .notes import Note
from .tables import check_columns, find, rows

VERSION = "10"
NOTE_COLUMNS = ("note_id", "subject_id", "hadm_id", "note_type", "text")
CODE_COLUMNS = ("hadm_id", "icd_code", "icd_version")
TITLE_COLUMNS = ("icd_code", "icd_version", "long_title")
_TAKEN = ("",)  # stands for the codes of an admission whose note is out already


def notes(path: str | Path, counts: Counter[str], progress: bool = False) -> Iterator[Note]:
    """One note for each admission: its first discharge summary, with its codes in the order of the table.

    Args:
        path: a folder that holds both modules, anywhere below.
        counts: told of everything read and everything left out, by reason.
        progress: draw bars on a terminal's stderr.

    Raises:
        InputError: before the first note, for a folder without the tables or tables without the columns; later,
            for a table that is damaged further on.
    """
    discharge, diagnoses = _table(path, "note", "discharge"), _table(path, "hosp", "diagnoses_icd")
    check_columns(discharge, NOTE_COLUMNS)
    check_columns(diagnoses, CODE_COLUMNS)
    return _notes(discharge, diagnoses, counts, progress)


def titles(path: str | Path) -> dict[str, str]:
    """Dotted ICD-10-CM code -> its long title, from d_icd_diagnoses."""
    known = rows(_table(path, "hosp", "d_icd_diagnoses"), TITLE_COLUMNS)
    return {dotted(code): title.strip() for code, version, title in known if version.strip() == VERSION}


def _table(path: str | Path, module: str, stem: str) -> Path:
    found = find(Path(path), stem)
    if found is None:
        raise InputError(f"{path}: no {stem}.csv.gz or {stem}.csv at or below it; give a folder that holds {module}/{stem}.csv.gz, "
                         "as MIMIC-IV (hosp) and MIMIC-IV-Note (note) unpack it")
    return found


def _notes(discharge: Path, diagnoses: Path, counts: Counter[str], progress: bool) -> Iterator[Note]:
    codes, ids = _codes(diagnoses, counts, progress), set()
    for note_id, subject, hadm, kind, text in rows(discharge, NOTE_COLUMNS, progress):
        counts["read: notes"] += 1
        note_id, subject, hadm, kind = note_id.strip(), subject.strip(), hadm.strip(), kind.strip().upper()
        reason = _left_out(note_id, hadm, kind, text, codes.get(hadm), ids)
        if reason:
            counts[reason] += 1
            continue
        ids.add(note_id)
        labels, codes[hadm] = codes[hadm], _TAKEN
        yield Note(note_id, text, labels, subject or None, hadm)
    left = [labels for labels in codes.values() if labels and labels is not _TAKEN]
    counts["admissions with ICD-10 codes, but no note that is kept"] += len(left)
    counts["diagnosis rows of admissions without a note that is kept"] += sum(map(len, left))


def _left_out(note_id: str, hadm: str, kind: str, text: str, labels: tuple[str, ...] | None, ids: set[str]) -> str:
    """Why a note is left out; nothing if it is kept."""
    if kind == "AD":  # a text of its own, without the summary it amends
        return "notes that are addenda"
    if kind != "DS":
        return "notes of another type than discharge summary"
    if not hadm:
        return "notes without an admission"
    if not text.strip():
        return "notes without text"
    if not note_id.isprintable() or not note_id:
        return "notes without an id"
    if labels is None:
        return "notes of admissions without diagnoses"
    if not labels:
        return "notes of admissions that have no ICD-10 code"
    if labels is _TAKEN:
        return "further notes of an admission"
    return "notes whose id came before" if note_id in ids else ""


def _codes(diagnoses: Path, counts: Counter[str], progress: bool) -> dict[str, tuple[str, ...]]:
    """Admission -> its ICD-10-CM codes, dotted, each once; none for an admission that has only others."""
    found: dict[str, tuple[str, ...]] = {}
    for hadm, code, version in rows(diagnoses, CODE_COLUMNS, progress):
        counts["read: diagnosis rows"] += 1
        hadm, version = hadm.strip(), version.strip()
        if not hadm:
            counts["diagnosis rows without an admission"] += 1
            continue
        before = found.setdefault(hadm, ())
        if version != VERSION:
            counts["diagnosis rows of ICD-9" if version == "9" else "diagnosis rows of another version"] += 1
            continue
        code = sys.intern(dotted(code))  # a few ten thousand codes stand in millions of rows
        if not is_code(code):
            counts["diagnosis rows without a code"] += 1
        elif code in before:
            counts["diagnosis rows that repeat a code of their admission"] += 1
        else:
            found[hadm] = (*before, code)
    return found
