"""Tables of a corpus: found below a folder, and read row by row however large they are, gzip or not.

Text comes as it stands in the file: no newline is translated. No error holds a value of a row, which may be
clinical text.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from ..errors import InputError

DEPTH = 6  # folders below the given one that are looked into: a mirror of the site nests five
_EVERY = 256  # rows between two moves of the progress bar


def find(root: Path, stem: str) -> Path | None:
    """`stem.csv.gz` or `stem.csv` in the nearest folder at or below `root` that holds one; None if there is none.

    Raises:
        InputError: if `root` is no folder, or several folders equally near hold one.
    """
    if not root.is_dir():
        raise InputError(f"{root} is not a folder; give the folder that the release was unpacked in")
    for depth in range(DEPTH + 1):
        found: dict[Path, Path] = {}
        for ending in (".csv.gz", ".csv"):
            for file in sorted(root.glob("*/" * depth + stem + ending)):
                if file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts):
                    found.setdefault(file.parent, file)
        if len(found) > 1:
            names = ", ".join(str(folder.relative_to(root)) for folder in list(found)[:3])
            raise InputError(f"{root}: {stem}.csv is in {len(found)} folders ({names}); give a folder that holds only one of them")
        if found:
            return next(iter(found.values()))
    return None


def check_columns(path: Path, columns: Sequence[str]) -> None:
    """Raise InputError where a table cannot be read or lacks a column; only its beginning is read."""
    for _ in rows(path, columns):
        break


def rows(path: Path, columns: Sequence[str], progress: bool = False) -> Iterator[tuple[str, ...]]:
    """The cells of some columns (two or more) of a CSV file with a header, in the order asked, row by row.

    Args:
        columns: their names in lower case; a header may write them in any case.
        progress: draw a bar on a terminal's stderr.

    Raises:
        InputError: with file, and line or byte, for whatever cannot be read or is no such table.
    """
    csv.field_size_limit(2**31 - 1)  # a note is one cell
    hidden = None if progress else True  # None: shown on a terminal only
    with _opened(path) as (raw, text), tqdm(total=path.stat().st_size, desc=path.name, unit="B", unit_scale=True, disable=hidden) as bar:
        reader = csv.reader(text, strict=True)
        try:
            header = [name.strip().lower() for name in next(reader, [])]
            missing = [name for name in columns if name not in header]
            if missing:
                raise InputError(f"{path}: no column {', '.join(missing)}; expected a header with {', '.join(columns)}")
            pick = itemgetter(*map(header.index, columns))
            for number, row in enumerate(reader):
                if len(row) == len(header):
                    yield pick(row)
                elif row:
                    raise InputError(f"{path}, line {reader.line_num}: a row of {len(row)} cells under a header of {len(header)}; is the file as it was released?")
                if number % _EVERY == 0:
                    bar.update(raw.tell() - bar.n)
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num}: not CSV ({error}); is the file whole and as it was released?") from None


@contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedReader, TextIO]]:
    """A file as bytes and as UTF-8 text without a BOM, newlines as they are; what goes wrong is one sentence."""
    try:
        with open(path, "rb") as raw, io.TextIOWrapper(_unpacked(raw), "utf-8-sig", newline="") as text:
            yield raw, text
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 at byte {_bad_byte(path)} of its text; take the file as it was released") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(f"{path}: the gzip data is cut off or damaged; download the file again") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a file that can be") from None


def _unpacked(raw: io.BufferedReader) -> io.BufferedIOBase:
    """By the first bytes, not by the name: browsers unpack on the way and keep the name."""
    return gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw


def _bad_byte(path: Path) -> int:
    """Where the first byte stands that is not UTF-8, after unpacking; the decoder itself only knows its own chunk."""
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    with open(path, "rb") as raw:
        unpacked = _unpacked(raw)
        while chunk := unpacked.read(2**20):
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                return done - pending + error.start
            done += len(chunk)
    return done - len(decoder.getstate()[0])  # cut off within a character
