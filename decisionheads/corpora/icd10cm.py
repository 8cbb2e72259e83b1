"""The ICD-10-CM table: which codes there are, which of them are billable, and label spaces made from them.

Codes are text, never numbers. A code is mended where no judgement is needed (case, spaces, the dot) and
flagged otherwise: never cut, never padded, never dropped in silence. The table comes with simple-icd-10-cm
(`pip install "decisionheads[icd]"`); it takes more than a second to load, so it is loaded when it is first needed.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..labels import LabelSpace
from .codes import dotted

if TYPE_CHECKING:
    import pandas as pd

LEVELS = ("category", "block", "chapter")
UNKNOWN = "unknown"  # the region of a code that has none: it is in no table and not shaped like a code
ROMAN = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII", "XIII", "XIV", "XV", "XVI", "XVII", "XVIII", "XIX", "XX", "XXI", "XXII")
_WRITTEN = re.compile(r"([A-Za-z][0-9A-Za-z]{2})(?:\.?([0-9A-Za-z]{1,4}))?\.?")  # any way of writing a code; the table decides
_SHAPED = re.compile(r"[A-Z]([0-9][0-9A-Z]|A[0-9])(\.?[0-9A-Z]{1,4})?")


@dataclass(frozen=True)
class _Table:
    """One release, in the order of the book.

    Attributes:
        descriptions: of every code, billable or not.
        billable: the codes that nothing stands below, in order.
        blocks, chapters: category -> name.
        spans: number of a chapter -> its codes as its title has them ("9" -> "I00-I99").
        edition: the release and the package that it came with.
    """

    descriptions: dict[str, str]
    billable: dict[str, None]
    blocks: dict[str, str]
    chapters: dict[str, str]
    spans: dict[str, str]
    edition: str


@lru_cache(maxsize=1)
def _table() -> _Table:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it reads its own files by a call that is deprecated
            import simple_icd_10_cm as cm
    except ImportError:
        raise InputError('the ICD-10-CM table is not installed; run: pip install "decisionheads[icd]"') from None
    names = cm.get_all_codes()
    # a block that holds one category has its name (C50) and is listed as well; blocks of blocks (C00-C75) are listed
    # as if nothing stood below them. Names mean the category here: blocks are asked for as parents of categories.
    codes = [name for name in dict.fromkeys(names) if cm.is_category_or_subcategory(name)]
    above = {code: cm.get_ancestors(code) for code in codes if cm.is_category(code)}
    chapters = [name for name in names if cm.is_chapter(name)]
    billable = dict.fromkeys(code for code in codes if cm.is_leaf(code))
    return _Table({code: cm.get_description(code) for code in codes}, billable,
                  {category: names[0] for category, names in above.items()}, {category: f"chapter {names[-1]}" for category, names in above.items()},
                  {name: cm.get_description(name).rpartition("(")[2].rstrip(") ") for name in chapters}, _edition(codes, billable))


def _edition(codes: Iterable[str], billable: Iterable[str]) -> str:
    """The release, by the name of the package's own list of codes, if that is the one that is loaded."""
    from importlib.metadata import version
    from importlib.resources import files

    package, undotted = f"simple-icd-10-cm {version('simple-icd-10-cm')}", lambda names: {name.replace(".", "") for name in names}
    for file in files("simple_icd_10_cm.data").iterdir():
        named = re.fullmatch(r"code-list-(\w+)-(\d{4})\.txt", file.name)
        if named:  # the list also names chapters and blocks, which have no fourth character or a hyphen
            listed = {line.split(" ")[0] for line in file.read_text(encoding="utf-8").splitlines()}
            if undotted(billable) <= listed and {name for name in listed if len(name) > 3 and "-" not in name} <= undotted(codes):
                return f"ICD-10-CM {named[1]} {named[2]} ({package})"
    return f"ICD-10-CM, a release that is not the package's own ({package})"  # loaded by its change_version()


def edition() -> str:
    """The release of the table and where it came from: "ICD-10-CM April 2026 (simple-icd-10-cm 1.5.0)"."""
    return _table().edition


def titles(labels: Iterable[str]) -> dict[str, str]:
    """Descriptions of those labels that are codes of the table, billable or not."""
    known = _table().descriptions
    return {label: known[label] for label in labels if label in known}


def normalise(text: str) -> str | None:
    """A code of the table as the table writes it, billable or not; None where there is no such code.

    `i509`, ` I50.9` and `I50.9.` are `I50.9`. Nothing is cut or padded to make a code: `I50.90` is None.
    """
    written = _WRITTEN.fullmatch(text.strip())
    code = dotted("".join(part or "" for part in written.groups()).upper()) if written else ""
    return code if code in _table().descriptions else None


def _flag(label: str) -> str:
    return "" if label in _table().billable else "not billable" if label in _table().descriptions else "unknown"


def check(codes: Iterable[Any], region: str = "category") -> pd.DataFrame:
    """What the table says of each code; a row for each, in order, none dropped.

    Returns:
        `code` as given, `label` (normalised, or the code without spaces around it), `flag` ("", "not billable", "unknown",
        or "listed twice" for a label that an earlier row has) and `region` ("unknown" where it cannot be told).

    Raises:
        InputError: for a code that is a number, since a leading zero would be lost already.
    """
    import pandas as pd

    rows, seen, named = [], set(), _region_or_unknown(region)
    for code in codes:
        label = label_of(code)
        rows.append((code, label, "listed twice" if label in seen else _flag(label), named(label)))
        seen.add(label)
    return pd.DataFrame(rows, columns=["code", "label", "flag", "region"], dtype=object)


def label_of(code: Any) -> str:
    """The code as the table writes it, or without spaces around it where the table lacks it."""
    if not isinstance(code, str):
        raise InputError(f"code {code!r} is not text; read codes as text, since a number has lost its leading zeros")
    return normalise(code) or code.strip()


def region_by(level: str) -> Callable[[str], str]:
    """Label -> region, at one level of the book: category ("I50"), block ("I30-I5A", innermost) or chapter ("chapter 9").

    A code that the table lacks goes where its first three characters go. Categories need no table.

    Raises:
        InputError: for another level; from what is returned, for a label whose region cannot be told.
    """
    if level not in LEVELS:
        raise InputError(f"unknown region level {level!r}: choose category, block or chapter")

    def region(label: str) -> str:
        if not _SHAPED.fullmatch(label):
            raise InputError(f"label {label!r} is not an ICD-10 code, so its {level} is not known; add a region column or name another with --region-by")
        category = label[:3]
        if level == "category":
            return category
        found = (_table().blocks if level == "block" else _table().chapters).get(category)
        if found is None:
            raise InputError(f"label {label!r} is not in {edition()}, nor is {category}, so its {level} is not known; mend or remove it")
        return found

    return region


def _region_or_unknown(level: str) -> Callable[[str], str]:
    known = region_by(level)

    def region(label: str) -> str:
        try:
            return known(label)
        except InputError:
            return UNKNOWN

    return region


@dataclass(frozen=True)
class LabelTable:
    """A label space made from the table.

    Attributes:
        space: labels, regions, descriptions.
        flags: label -> "not billable" or "unknown"; the others are billable codes of the edition.
        edition: the release of the table.
        region: what regions are: category, block or chapter.
        left_out: why codes that were given are not in the space, with how many.
    """

    space: LabelSpace
    flags: dict[str, str]
    edition: str
    region: str
    left_out: dict[str, int]

    def about(self) -> dict[str, Any]:
        """What stands beside the saved labels."""
        return {"edition": self.edition, "labels": len(self.space), "regions": len(set(self.space.regions.values())), "region": self.region,
                "flags": dict(Counter(self.flags.values())), "left_out": self.left_out}

    def __str__(self) -> str:
        about = self.about()
        counts = lambda found: ", ".join(f"{n:,} {why}" for why, n in found.items())  # noqa: E731
        some = lambda n, thing: f"{n:,} {thing}{'s' * (n != 1)}"  # noqa: E731
        lines = [f"{some(about['labels'], 'label')} in {some(about['regions'], 'region')} (by {self.region}), from {self.edition}"]
        lines += [f"flagged: {counts(about['flags'])}"] if self.flags else []
        return "\n".join(lines + ([f"left out: {counts(self.left_out)}"] if self.left_out else []))

    def save(self, path: str | Path) -> None:
        """Write `label,description,region` as CSV (and `flag`, if any label has one), and `about()` as JSON beside it."""
        path = writable(path)
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(["label", "description", "region"] + ["flag"] * bool(self.flags))
        for label in self.space.labels:
            writer.writerow([label, self.space.descriptions.get(label, ""), self.space.region(label)] + [self.flags.get(label, "")] * bool(self.flags))
        about = about_file(path)
        beside = [file.with_name(f".{file.name}.{os.getpid()}") for file in (path, about)]
        try:
            beside[0].write_text(table.getvalue(), encoding="utf-8", newline="\n")
            beside[1].write_text(json.dumps(self.about(), indent=1) + "\n", encoding="utf-8", newline="\n")
            about.unlink(missing_ok=True)  # never one table's JSON beside another's CSV, even when killed here
            os.replace(beside[0], path)
            os.replace(beside[1], about)
        except OSError as error:
            raise InputError(f"{path} cannot be written ({error.strerror}); name another file") from None
        finally:
            for file in beside:
                file.unlink(missing_ok=True)


def writable(path: str | Path) -> Path:
    """A path that labels can be saved to; raises InputError for others."""
    path = Path(path)
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: {path.parent} is not a folder; make it first")
    if path.is_dir() or about_file(path).is_dir():
        raise InputError(f"{path} or {about_file(path)} is a folder; name another file")
    if path.suffix == ".jsonl":
        raise InputError(f"{path} would be read as JSONL, and labels are written as CSV; name a file that ends in .csv")
    return path


def about_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def edition_beside(labels: Path) -> str | None:
    """The edition that `LabelTable.save` noted beside a file of labels, if it did."""
    try:
        about = json.loads(about_file(labels).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    found = about.get("edition") if isinstance(about, dict) else None
    return found if isinstance(found, str) else None


def icd10cm_labels(chapters: Iterable[str | int] | None = None, codes: Iterable[Any] | None = None, seen: Mapping[Any, int] | None = None,
                   at_least: int = 1, region: str = "category") -> LabelTable:
    """The label space of all billable codes, or of fewer: whatever is given narrows it.

    Args:
        chapters: only these: a number ("9"), a Roman numeral ("IX") or the codes of its title ("I00-I99").
        codes: only these, in this order; those that are not billable or not in the table stay, flagged.
        seen: how often each code was seen in a corpus; only those seen `at_least` times, flagged in the same way, and
            sorted unless `codes` gives an order.
        region: category, block or chapter; "unknown" for a flagged code that has none.

    Raises:
        InputError: for a chapter, level or code that cannot be, or if nothing is left.
    """
    named, wanted = _region_or_unknown(region), None if chapters is None else {_chapter(c) for c in _listed(chapters)}
    if at_least < 1 or at_least > 1 and seen is None:
        raise InputError(f"at least {at_least} times cannot be asked for: give a whole number from 1 on, and a corpus in which codes were seen")
    left_out: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for code, n in (seen or {}).items():
        counts[_one_line(label_of(code))] += n
    labels = list(_table().billable) if seen is None else sorted(counts)
    if codes is not None:
        given = [_one_line(label_of(code)) for code in _listed(codes)]
        labels = list(dict.fromkeys(given))
        left_out["listed twice"] = len(given) - len(labels)
    if seen is not None:
        often = [label for label in labels if counts[label] >= at_least]
        left_out[f"seen less than {at_least} times" if at_least > 1 else "not seen"] = len(labels) - len(often)
        labels = often
    if wanted is not None:
        chapter = _region_or_unknown("chapter")
        inside = [label for label in labels if chapter(label) in wanted]
        left_out["of another chapter"] = (codes is not None or seen is not None) * (len(labels) - len(inside))
        labels = inside
    left = {why: n for why, n in left_out.items() if n}
    if not labels:
        raise InputError(f"no code is left ({', '.join(f'{n} {why}' for why, n in left.items()) or 'none was given'}); give more codes or ask for less")
    descriptions = _table().descriptions
    space = LabelSpace(labels, {label: named(label) for label in labels}, {label: descriptions[label] for label in labels if label in descriptions})
    return LabelTable(space, {label: flag for label in labels if (flag := _flag(label))}, edition(), region, left)


def _listed(values: Iterable[Any]) -> list[Any]:
    """One text is a list with commas: taken as an iterable it would be its characters."""
    return values.split(",") if isinstance(values, str) else list(values)


def _one_line(label: str) -> str:
    if not label or not label.isprintable():
        raise InputError(f"code {label!r} is not one line of text; give one code at a time")
    return label


def _chapter(name: str | int) -> str:
    text = str(name).upper().replace("CHAPTER", "").strip()
    for number, span in _table().spans.items():
        if text in (number, ROMAN[int(number) - 1], span):
            return f"chapter {number}"
    raise InputError(f"chapter {str(name)!r} is not in {edition()}: write a number from 1 to {len(_table().spans)}, a Roman numeral or its codes, such as I00-I99")
