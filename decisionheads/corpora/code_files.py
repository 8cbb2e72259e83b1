"""Codes read from files: lists, label files, and notes; and a label file made from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ..errors import InputError
from ..labels import read_jsonl, read_rows, read_text
from .icd10cm import LabelTable, about_file, icd10cm_labels, label_of, region_by, writable
from .labels_of import spare


def codes_in_file(path: Path) -> list[str]:
    """Codes from text, one a line, or from a `.csv` or `.jsonl` file with a column `label` or `code`."""
    if not path.is_file():
        raise InputError(f"{path}: no such file of codes; give one that is there")
    if path.suffix not in (".csv", ".jsonl"):
        found = [line for line in read_text(path).splitlines() if line.strip()]
    else:
        columns, rows = read_rows(path)
        column = next((name for name in ("label", "code") if name in columns), None)
        if column is None:
            raise InputError(f"{path}: no column 'label' or 'code'; its columns are {', '.join(columns) or 'not named'}")
        found = [row.get(column) for row in rows]
        for number, code in enumerate(found, 1):
            if not isinstance(code, str) or not code.strip():
                raise InputError(f"{path}, row {number}: no {column}, or not as text; give every row one")
    if not found:
        raise InputError(f"{path}: there is no code in it; write one a line")
    odd = next((code for code in found if not code.strip().isprintable()), None)
    if odd is not None:
        raise InputError(f"{path}: code {odd!r} is not one line of text; give one code at a time")
    return found


def codes_in_notes(path: Path) -> Counter[str]:
    """In how many notes of a notes file each code is; notes are read one at a time and not kept."""
    if not path.is_file():
        raise InputError(f"{path}: no such notes file; give a JSONL file that is there")
    found: Counter[str] = Counter()
    for number, record in read_jsonl(path):
        labels = record.get("labels", []) if isinstance(record, dict) else None
        if not isinstance(labels, list) or any(not isinstance(label, str) or not label.strip().isprintable() or not label.strip() for label in labels):
            raise InputError(f"{path}, line {number}: labels are not a list of codes; write them as text in square brackets")
        found.update({label_of(label) for label in labels})
    if not found:
        raise InputError(f"{path}: no note has a code; give notes with labels")
    return found


def write_labels(out: Path, chapters: Iterable[str] | None = None, codes: Path | None = None, notes: Path | None = None, at_least: int | None = None,
                 region: str = "category") -> LabelTable:
    """`decisionheads labels icd10cm`: from files to a saved table; everything is checked before anything is written.

    Args:
        chapters: each may hold several, with commas.
        codes, notes: as in `codes_in_file` and `codes_in_notes`; codes of the file that are seen in the notes if both are given.
        at_least: how many notes a code must be seen in; 1 by default.
    """
    writable(out)
    for target in (out, about_file(out)):
        if any(source is not None and source.exists() and target.exists() and source.samefile(target) for source in (codes, notes)):
            raise InputError(f"{target} is what codes are read from; name another file to write")
    spare(out)
    if at_least is not None and notes is None:
        raise InputError("--at-least counts notes; give --notes as well")
    region_by(region)
    parts = None if chapters is None else [part for chapter in chapters for part in chapter.split(",")]
    table = icd10cm_labels(parts, None if codes is None else codes_in_file(codes), None if notes is None else codes_in_notes(notes),
                           1 if at_least is None else at_least, region)
    table.save(out)
    return table
