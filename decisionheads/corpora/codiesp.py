"""CodiEsp: Spanish case reports with CIE-10 codes and the words that each was given for.

    train/text_files/*.txt     a case each, UTF-8
    train/trainD.tsv           case, diagnosis code                         (no header)
    train/trainP.tsv           case, procedure code                         (no header; counted, not read)
    train/trainX.tsv           case, DIAGNOSTICO or PROCEDIMIENTO, code, words, "start end;start end"

and the same for dev and test. Diagnosis codes (CIE-10-ES, the Spanish ICD-10-CM) are in lower case there and in
upper case here. Words that stand apart have several pieces, in any order, joined by a space.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from ..errors import InputError
from ..labels import read_text
from ..transcripts import Span
from .codes import dotted, is_code
from .notes import EVIDENCE, Note

SPLITS = ("train", "dev", "test")
DIAGNOSIS, PROCEDURE = "DIAGNOSTICO", "PROCEDIMIENTO"
_PLACES = re.compile(r"\d{1,9} \d{1,9}(; ?\d{1,9} \d{1,9})*")


def notes(path: str | Path, counts: Counter[str], split: str | None = None) -> Iterator[Note]:
    """One note for each case that has a diagnosis code.

    Args:
        path: the folder of train, dev and test, or the one above.
        counts: told of everything read and everything left out, by reason.
        split: train, dev or test; None for all that are there.

    Raises:
        InputError: before the first note, for a folder or tables of another form; later, for a text that is
            not UTF-8.
    """
    root = _root(Path(path))
    there = [name for name in SPLITS if (root / name / "text_files").is_dir()]
    if split is not None and split not in there:
        raise InputError(f"{root}: no split {split!r}; there is {', '.join(there)}")
    tables = []
    for name in there:
        if split in (None, name):
            tables.append((name, list(_table(root / name / f"{name}D.tsv", 2)), list(_table(root / name / f"{name}X.tsv", 5))))
            procedures = root / name / f"{name}P.tsv"
            counts["procedure rows"] += len(list(_table(procedures, 2))) if procedures.is_file() else 0
        else:
            counts["articles of other splits"] += len(list((root / name / "text_files").glob("*.txt")))
    counts["articles of the background set, which has no codes"] += len(list((root / "background" / "text_files").glob("*.txt")))
    return _notes(root, tables, counts)


def _root(path: Path) -> Path:
    if not path.is_dir():
        raise InputError(f"{path} is not a folder; give the folder that the release was unpacked in")
    for folder in (path, *sorted(f for f in path.iterdir() if f.is_dir())):
        if any((folder / name / "text_files").is_dir() for name in SPLITS):
            return folder
    raise InputError(f"{path}: no CodiEsp here; expected train/text_files/*.txt, train/trainD.tsv and train/trainX.tsv below it")


def _table(file: Path, width: int) -> Iterator[list[str]]:
    """The rows of a table without a header; its cells are not quoted, whatever they hold."""
    if not file.is_file():
        raise InputError(f"{file}: no such table; take the release with gold-standard annotations, version 1.4")
    for number, line in enumerate(read_text(file).split("\n"), 1):
        cells = line.split("\t")  # a CR stays at the end of the last one; all are stripped where they are used
        if line.strip():
            if len(cells) != width:
                raise InputError(f"{file}, line {number}: {len(cells)} cells instead of {width}; take the tables of version 1.4 as they were released")
            yield cells


def _notes(root: Path, tables: list[tuple[str, list[list[str]], list[list[str]]]], counts: Counter[str]) -> Iterator[Note]:
    seen: set[str] = set()
    for name, code_rows, evidence_rows in tables:
        codes, evidence = defaultdict(list), defaultdict(list)
        counts["read: code rows"] += len(code_rows)
        counts["read: evidence rows"] += len(evidence_rows)
        for article, code in code_rows:
            codes[article.strip()].append(dotted(code))
        for article, *row in evidence_rows:
            evidence[article.strip()].append(row)
        for file in sorted((root / name / "text_files").glob("*.txt")):
            counts["read: articles"] += 1
            text, rows, marks = read_text(file), codes.pop(file.stem, []), evidence.pop(file.stem, [])
            labels = tuple(dict.fromkeys(code for code in rows if is_code(code)))
            reason = ""
            if file.stem in seen:
                reason = "articles that another split has as well"
            elif not labels:
                reason = "articles without a diagnosis code"
            elif not text.strip():
                reason = "articles without text"
            if reason:
                counts[reason] += 1
                counts["code rows of articles that are left out"] += len(rows)
                counts["evidence rows of articles that are left out"] += len(marks)
                continue
            seen.add(file.stem)
            blank = sum(not is_code(code) for code in rows)
            counts["code rows without a code"] += blank
            counts["code rows that repeat a code of their article"] += len(rows) - blank - len(labels)
            yield Note(file.stem, text, labels, split=name, spans=_evidence(marks, labels, text, counts))
        counts["articles without a text file"] += len({*codes, *evidence})
        counts["code rows of articles without a text file"] += sum(map(len, codes.values()))
        counts["evidence rows of articles without a text file"] += sum(map(len, evidence.values()))


def _evidence(marks: list[list[str]], labels: tuple[str, ...], text: str, counts: Counter[str]) -> tuple[Span, ...]:
    """The pieces of every row that stand in the text as the row says; rows that do not are counted."""
    found: list[Span] = []
    for kind, code, words, places in marks:
        pieces = [tuple(map(int, piece.split())) for piece in places.strip().split(";")] if _PLACES.fullmatch(places.strip()) else []
        reason = ""
        if kind.strip() != DIAGNOSIS:
            reason = "evidence rows of procedures" if kind.strip() == PROCEDURE else "evidence rows of another kind"
        elif dotted(code) not in labels:
            reason = "evidence rows of codes that their article does not have"
        elif not pieces:
            reason = "evidence rows without offsets"
        elif any(start >= end for start, end in pieces):
            reason = "evidence rows without characters"
        elif any(end > len(text) for _, end in pieces):
            reason = "evidence rows past the end of the article"
        elif _plain(" ".join(text[start:end] for start, end in pieces)) != _plain(words):
            reason = "evidence rows whose words are not what stands there"
        if reason:
            counts[reason] += 1
        else:
            counts["kept: evidence rows"] += 1
            found += [Span(EVIDENCE, start, end, dotted(code)) for start, end in pieces]
    once = tuple(dict.fromkeys(found))
    counts["pieces of evidence that repeat another"] += len(found) - len(once)
    return once


def _plain(words: str) -> str:
    """Words with single spaces and composed accents: the tables break no lines, and either way of writing an accent is the same letter."""
    return unicodedata.normalize("NFC", " ".join(words.split()))
