"""The labels that occur in a corpus, as the CSV that `LabelSpace.load` reads."""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..errors import InputError
from .codes import region

HEADER = ("label", "description", "region")


def official_titles(labels: Iterable[str]) -> dict[str, str]:
    """Descriptions of ICD-10-CM codes from simple-icd-10-cm; none where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it loads its table in a way that newer Pythons warn of
            import simple_icd_10_cm as table
    except ImportError:
        return {}
    return {label: table.get_description(label) for label in labels if table.is_valid_item(label)}


def save_labels(seen: Counter[str], path: str | Path, titles: Mapping[str, str], at_least: int = 1) -> int:
    """Write `label,description,region`; the file appears whole or not at all.

    Args:
        seen: label -> in how many notes it is.
        titles: label -> description; others are left empty.
        at_least: fewest notes of a label that is listed.

    Returns:
        how many labels were listed.
    """
    listed = sorted(label for label, n in seen.items() if n >= at_least)
    if not listed:
        raise InputError(f"no label is in {at_least} notes; ask for fewer with --at-least")
    table = io.StringIO(newline="")
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows((label, titles.get(label, ""), region(label)) for label in listed)
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(table.getvalue().encode())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return len(listed)
