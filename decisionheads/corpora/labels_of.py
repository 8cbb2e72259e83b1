"""The labels that occur in a corpus, as the CSV that `LabelSpace.load` reads."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ..errors import InputError
from .codes import region

HEADER = ("label", "description", "region")


def spare(path: Path) -> None:
    """Refuse to write labels over a file that holds something else."""
    if path.is_file():
        with open(path, "rb") as file:
            if file.readline(100).strip().split(b",")[0] != HEADER[0].encode():
                raise InputError(f"{path} exists and is not a label file; name another")


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
