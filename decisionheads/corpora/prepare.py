"""From a corpus as it was released to notes and labels as files, with a record of what was left out.

    NOTES.jsonl        the notes; the only file with text
    NOTES.jsonl.json   corpus, version, options, and how much was read, kept and left out
    LABELS.csv         label, description, region
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import InputError
from . import codiesp, mdace, mimic_iv
from .icd10cm import edition
from .icd10cm import titles as official_titles
from .labels_of import save_labels, spare
from .notes import Note, save_notes

CORPORA = ("mimic-iv", "mdace", "codiesp")
SPLITS = ("train", "dev", "test")


def prepare(corpus: str, path: str | Path, out: str | Path, labels_out: str | Path | None = None, at_least: int = 1, limit: int | None = None,
            notes_from: str | Path | None = None, split: str | None = None, progress: bool = False) -> dict[str, Any]:
    """Read a corpus and write its notes; files are replaced together, and only if all went well.

    Args:
        corpus: mimic-iv, mdace or codiesp.
        path: its folder.
        out: the notes, a .jsonl file; the record goes beside it.
        labels_out: the labels that occur, a CSV file.
        at_least: fewest notes of a label that is listed there; notes keep their rarer labels.
        limit: stop after this many notes; what comes after is neither read nor counted.
        notes_from: MDACE's texts, NOTEEVENTS.csv or .csv.gz of MIMIC-III.
        split: train, dev or test, for corpora that have splits.
        progress: draw bars on a terminal's stderr.

    Returns:
        the record; `edition` is that of the ICD-10-CM table, where descriptions were taken from it.

    Raises:
        InputError: in one sentence; nothing is written then.
    """
    out, labels_out = Path(out), None if labels_out is None else Path(labels_out)
    _check(corpus, out, labels_out, at_least, notes_from, split)
    counts: Counter[str] = Counter()
    source = None
    if corpus == "mimic-iv":
        titles = mimic_iv.titles(path) if labels_out is not None else {}
        notes = mimic_iv.notes(path, counts, progress)
    elif corpus == "mdace":
        notes = mdace.notes(path, counts, notes_from, split, progress)
    else:
        notes = codiesp.notes(path, counts, split)
    targets = [out.with_name(out.name + ".json"), out, *([labels_out] if labels_out is not None else [])]
    record_file, notes_file, *labels_files = staged = [target.with_name(f".{target.name}.{os.getpid()}.new") for target in targets]
    try:
        seen: Counter[str] = Counter()
        with closing(notes):
            kept = save_notes(_counted(notes, counts, seen, limit), notes_file)
        if not kept:
            raise InputError(f"{path}: no note is left of {counts['read: notes'] or counts['read: articles']}{_most(counts)}")
        for file in labels_files:
            rare = sum(n < at_least for n in seen.values())
            counts[f"labels that are in fewer than {at_least} notes (left out of the label file only)"] += rare
            if corpus != "mimic-iv":
                titles, source = _official(seen)
            save_labels(seen, file, titles, at_least)
        options = {"split": split, "limit": limit, "at_least": at_least, "notes_from": _name(notes_from), "labels_out": _name(labels_out)}
        found = {"read": _those(counts, "read: "), "kept": _those(counts, "kept: ") | {"distinct labels": len(seen)}, "left_out": _left(counts)}
        record = {"corpus": corpus, "version": __version__, "edition": source, "options": options, "stopped_at_limit": kept == limit, "counts": found}
        record_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        for target, file in zip(targets, staged, strict=True):
            os.replace(file, target)
    finally:
        for file in staged:
            file.unlink(missing_ok=True)
    return record


def show(record: dict[str, Any]) -> str:
    """A record as plain lines, a number each."""
    read, kept, left = (record["counts"][name] for name in ("read", "kept", "left_out"))
    lines = [record["corpus"], f"{kept['notes']:>10} notes", f"{kept['labels']:>10} labels, {kept['distinct labels']} of them distinct",
             f"{kept['evidence spans']:>10} evidence spans", "read:", *(f"{n:>10} {what}" for what, n in read.items()),
             "left out:", *(f"{n:>10} {what}" for what, n in (left or {"of anything": 0}).items())]
    if record["stopped_at_limit"]:
        lines.append(f"stopped after {kept['notes']} notes; what comes after was neither read nor counted")
    return "\n".join(lines)


def _check(corpus: str, out: Path, labels_out: Path | None, at_least: int, notes_from: str | Path | None, split: str | None) -> None:
    """Refuse what can be refused before hours of reading."""
    if corpus not in CORPORA:
        raise InputError(f"unknown corpus {corpus!r}: choose {', '.join(CORPORA)}")
    if split is not None and (split not in SPLITS or corpus == "mimic-iv"):
        raise InputError("mimic-iv has no splits; leave --split out" if corpus == "mimic-iv" else f"unknown split {split!r}: choose {', '.join(SPLITS)}")
    if notes_from is not None and corpus != "mdace":
        raise InputError(f"--notes-from is about mdace; {corpus} brings its own texts")
    if at_least > 1 and labels_out is None:
        raise InputError("--at-least is about the label file; name one with --labels-out")
    if out.suffix != ".jsonl":  # no file of a corpus ends so: a slip of the pen cannot cost one
        raise InputError(f"{out}: notes are written as JSONL; give --out a name that ends in .jsonl")
    if labels_out is not None and labels_out.suffix != ".csv":
        raise InputError(f"{labels_out}: labels are written as CSV; give --labels-out a name that ends in .csv")
    for target in (out, labels_out) if labels_out is not None else (out,):
        if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
            raise InputError(f"{target} cannot be written; name a file in a folder that is there and can be written to")
    if labels_out is not None:
        spare(labels_out)
    record = out.with_name(out.name + ".json")
    if (out.exists() or record.exists()) and not _ours(record):
        raise InputError(f"{out if out.exists() else record} exists and was not prepared from a corpus; name another file")


def _official(labels: Iterable[str]) -> tuple[dict[str, str], str | None]:
    """Descriptions from the ICD-10-CM table and its edition; none where the table is not installed."""
    try:
        return official_titles(labels), edition()
    except InputError:
        return {}, None


def _ours(record: Path) -> bool:
    """Whether a file is the record of an earlier preparation."""
    try:
        found = json.loads(record.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "corpus" in found


def _counted(notes: Iterator[Note], counts: Counter[str], seen: Counter[str], limit: int | None) -> Iterator[Note]:
    for note in notes:
        counts["kept: notes"] += 1
        counts["kept: labels"] += len(note.labels)
        counts["kept: evidence spans"] += len(note.spans)
        seen.update(note.labels)
        yield note
        if counts["kept: notes"] == limit:
            break


def _those(counts: Counter[str], start: str) -> dict[str, int]:
    return {name.removeprefix(start): n for name, n in counts.items() if name.startswith(start)}


def _left(counts: Counter[str]) -> dict[str, int]:
    """What was left out, the largest number first."""
    found = {name: n for name, n in counts.items() if n and not name.startswith(("read: ", "kept: "))}
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _most(counts: Counter[str]) -> str:
    reasons = {name: n for name, n in _left(counts).items() if name.startswith(("notes ", "further notes", "articles "))}
    return "".join(f"; {n} are {name}" for name, n in list(reasons.items())[:1]) + "; is this the whole release?"


def _name(path: str | Path | None) -> str | None:
    return None if path is None else Path(path).name
