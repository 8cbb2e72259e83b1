"""The label space: which labels there are, where they are mentioned, and which are still alive.

Built for hundreds of thousands of labels: mentions are found by hashing, and the trie of token
sequences is a sorted matrix in which every query is a few binary searches.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ._reading import strict_json
from .errors import InputError
from .label_trie import LabelTrie
from .views import MOST, Viewed

ICD10 = re.compile(r"[A-Z]([0-9][0-9A-Z]|A[0-9])(\.[0-9A-Z]{1,4})?")  # A[0-9]: ICD-10-CM has a category QA0 since 2026
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_HALF = re.compile("[\ud800-\udfff]")


def icd10_category(label: str) -> str:
    """`I50.23` -> `I50`, the three-character category."""
    return label[:3]


class Mention(NamedTuple):
    """A label written out in a text: `text[start:end] == label`."""

    label: str
    start: int
    end: int


class LabelSpace(Viewed):
    """Labels with their regions and descriptions.

    Args:
        labels: the labels, distinct, in any order.
        regions: label -> region; by default the ICD-10 category, if every label is such a code.
        descriptions: label -> description, optional.

    Raises:
        InputError: for no labels, empty or repeated ones, or labels without a region.
    """

    def __init__(self, labels: Iterable[str], regions: dict[str, str] | Callable[[str], str] | None = None,
                 descriptions: dict[str, str] | None = None):
        self.labels: tuple[str, ...] = tuple(labels)
        if not self.labels:
            raise InputError("the label space is empty; give at least one label")
        known = frozenset(self.labels)
        if len(known) != len(self.labels):
            seen: set[str] = set()
            twice = next(label for label in self.labels if label in seen or seen.add(label))
            raise InputError(f"label {twice!r} is listed more than once; list each label once")
        if any(not label.strip() for label in self.labels):
            raise InputError("an empty label is listed; remove it")
        if regions is None:
            odd = next((label for label in self.labels if not ICD10.fullmatch(label)), None)
            if odd is not None:
                raise InputError(f"label {odd!r} is not an ICD-10 code, so its region is not known; add a region column or name another with --region-by (region_column)")
            regions = icd10_category
        assign = regions if callable(regions) else regions.get
        self.regions: dict[str, str] = {label: assign(label) for label in self.labels}
        missing = next((label for label, region in self.regions.items() if not region), None)
        if missing is not None:
            raise InputError(f"label {missing!r} has no region; give every label a region")
        self.descriptions = dict(descriptions or {})
        lengths = defaultdict(set)
        for label in self.labels:
            lengths[label[:3]].add(len(label))
        self._lengths = {start: sorted(sizes, reverse=True) for start, sizes in lengths.items()}
        self._known, self._starts = known, None
        self.index = {label: i for i, label in enumerate(self.labels)}
        self._tries: dict[tuple, tuple[LabelTrie, object]] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def __contains__(self, label: object) -> bool:
        return label in self._known

    def __repr__(self) -> str:
        return f"LabelSpace({len(self)} labels in {len(set(self.regions.values()))} regions)"

    def _rows(self):
        regions = Counter(self.regions.values())
        return [{"region": region, "labels": n} for region, n in regions.most_common(MOST)], len(regions)

    def region(self, label: str) -> str:
        return self.regions[label]

    # -- files -----------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path, region_by: Callable[[str], str] | None = None, region_column: str | None = None) -> LabelSpace:
        """Read a CSV or JSONL file with `label` and optional `description` and `region`.

        Args:
            region_by: label -> region, instead of any column.
            region_column: the column that regions are taken from; by default `region` where there is one, else the
                ICD-10 categories.

        Raises:
            InputError: for a file that cannot be read, a column that is not there, and whatever the class refuses.
        """
        path = Path(path)
        columns, rows = read_rows(path)
        if not rows or not all(row.get("label") for row in rows):
            raise InputError(f"{path}: every row needs a label; give the file a 'label' column (and optionally 'description', 'region')")
        if region_column is not None and region_column not in columns:
            raise InputError(f"{path}: there is no column {region_column!r} to take regions from; its columns are {', '.join(columns)}")
        column = region_column or "region"
        odd = next((row["label"] for row in rows if row["label"] != row["label"].strip() or _CONTROL.search(row["label"])), None)
        if odd is not None:
            raise InputError(f"{path}: label {odd!r} has spaces around it, or a line break or control character in it; write labels as they stand in the text")
        for number, row in enumerate(rows, 1):
            if not isinstance(row.get(column) or "", str):  # of a JSONL file: its other columns are anyone's
                raise InputError(f"{path}, row {number}: {column} is not text; write it as text")
        labels = [row["label"] for row in rows]
        regions = {row["label"]: row[column].strip() for row in rows if (row.get(column) or "").strip()}
        described = {row["label"]: row["description"] for row in rows if row.get("description")}
        try:
            return cls(labels, region_by or (regions if region_column is not None else regions or None), described)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def subset(self, candidates: Sequence[str]) -> LabelSpace:
        """The space of a transcript's own candidates.

        Raises:
            InputError: for a candidate that is not in this space.
        """
        for label in candidates:
            if label not in self._known:
                raise InputError(f"candidate {label!r} is not in the label file; add it there or drop it")
        return LabelSpace(dict.fromkeys(candidates), self.regions, self.descriptions)

    # -- mentions --------------------------------------------------------------------------

    def mentions(self, text: str, start: int = 0, end: int | None = None) -> list[Mention]:
        """All label mentions in `text[start:end]`, left to right, the longest label at each place.

        A mention begins and ends at a word boundary, and does not end where `.` or `-` goes on to
        another letter or digit: `I50` is not mentioned in `I50.99`.
        """
        found, end, at = [], len(text) if end is None else end, start
        while at < end:
            label = self._label_at(text, at, end)
            if label is None:
                at += 1
            else:
                found.append(Mention(label, at, at + len(label)))
                at += len(label)
        return found

    def _label_at(self, text: str, at: int, end: int) -> str | None:
        if at and text[at - 1].isalnum() and text[at].isalnum():
            return None
        sizes = {size for width in (1, 2, 3) for size in self._lengths.get(text[at:at + width], ())}
        for size in sorted(sizes, reverse=True):
            stop = at + size
            if stop <= end and text[at:stop] in self._known and _ends_at(text, stop):
                return text[at:stop]
        return None

    def begins_like(self, word: str) -> bool:
        """Whether some label begins as `word` does (its first three characters, or all of a shorter word)."""
        if self._starts is None:
            self._starts = {start[:n] for start in self._lengths for n in (1, 2, 3)}
        return word[:3] in self._starts or word[:2] in self._lengths or word[:1] in self._lengths

    # -- tokens ----------------------------------------------------------------------------

    def trie(self, tokenizer, before: str, lead: str) -> LabelTrie:
        """The token sequences of all labels when they follow `before + lead`.

        Args:
            before: the character before the first token of the label ("" at the start of a text).
            lead: what that first token holds before the label itself, usually " " or "".
        """
        # what a word ends with does not change how the next one begins: one letter and one digit stand for all
        before = "x" if before.isalpha() else "1" if before.isdigit() else before
        key = (id(tokenizer), before, lead)
        if key not in self._tries:
            self._tries[key] = (LabelTrie.build(self, tokenizer, before, lead), tokenizer)  # kept alive, so that its id stays its own
        return self._tries[key][0]


def read_text(path: Path) -> str:
    """A text file as UTF-8, a BOM left out, line ends kept; raises InputError where it is not text."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a file that can be") from None


def read_jsonl(path: Path) -> Iterator[tuple[int, object]]:
    """`(line number, value)` of every line that is not blank, one at a time; raises InputError with the line."""
    at = 0
    try:
        with open(path, "rb") as lines:  # a corpus of notes may be larger than memory
            for number, line in enumerate(lines, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                at += len(line)
                if text.strip():
                    yield number, strict_json(text)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {at + error.start}; save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a file that can be") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}, line {number}: not JSON; write one object a line, each key once, and null for what is not a number") from None


def read_rows(path: Path) -> tuple[list[str], list[dict]]:
    """The columns and rows of a CSV file with a header, or of a JSONL file with one object a line (by the suffix).

    Raises:
        InputError: for a missing file, one that is no such table, or a label, description or region that is not text.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such label file; give a CSV or JSONL file that is there")
    if path.suffix == ".jsonl":
        rows = []
        for number, record in read_jsonl(path):
            if not isinstance(record, dict) or any(not whole_text(record.get(k, "")) for k in ("label", "description", "region")):
                raise InputError(f"{path}, line {number}: this is no label; write label, description and region as text in one object a line")
            rows.append(record)
        return list(dict.fromkeys(name for row in rows for name in row)), rows
    csv.field_size_limit(2**31 - 1)  # as for notes: the limit is the process's, and what is refused should not depend on what was read before
    try:
        reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        rows = list(reader)
        if long := next((number for number, row in enumerate(rows, 1) if None in row), None):
            raise InputError(f"{path}, row {long}: more cells than the header has columns; quote cells that hold commas")
        if len(set(reader.fieldnames)) < len(reader.fieldnames):
            raise InputError(f"{path}: a column is named twice ({', '.join(reader.fieldnames)}); name each once")
        return list(reader.fieldnames), rows
    except csv.Error as error:
        raise InputError(f"{path}: not CSV ({error}); quote labels that hold commas or quotes") from None


def whole_text(value: object) -> bool:
    """Whether a value is text that can be written as UTF-8: half of a surrogate pair cannot."""
    return isinstance(value, str) and not _HALF.search(value)


def _ends_at(text: str, stop: int) -> bool:
    """Whether a label that ends at `stop` is followed by a boundary."""
    if stop >= len(text):
        return True
    if text[stop].isalnum():
        return not text[stop - 1].isalnum()
    goes_on = text[stop] in ".-" and stop + 1 < len(text) and text[stop + 1].isalnum()
    return not goes_on
