"""Whether the files of a finished run belong together: nothing was changed, swapped or lost since it was written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from .heads import HeadSet
from .provenance import hash_file
from .run_folder import open_run, read_json, read_table, whole


def check_run(folder: Path) -> list[str]:
    """What is wrong with a finished run; empty where manifest, tables, sets and summary belong together.

    Raises:
        InputError: if the folder is no finished run, or a file of it cannot be read.
    """
    state = open_run(folder)
    with whole(folder):
        return [*_changed(folder, state["manifest"]), *_sets(folder, state["summary"]), *_splits(state["manifest"], state["summary"])]


def _changed(folder: Path, manifest: dict[str, Any]) -> Iterator[str]:
    files = manifest.get("files")
    if not files:
        yield "run.json holds no hashes of the tables: an older version wrote it; run discover again into another folder"
        return
    for name, known in files.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif hash_file(path) != known:
            yield f"{name} was changed after the run"
    for path in sorted(folder.glob("*.csv")):
        if path.name not in files:
            yield f"{path.name} was not written by the run"


def _sets(folder: Path, summary: dict[str, Any]) -> Iterator[str]:
    sets, heads = read_json(folder / "sets.json"), read_table(folder / "heads.csv")
    for name, found in _frozen(sets):
        if HeadSet(found["heads"]).digest != found["digest"]:
            yield f"sets.json: the set {name} does not have its digest"
    for kind, said in summary["kinds"].items():
        table = heads[heads["kind"] == kind]
        rows = HeadSet(zip(*(table.loc[table["selected"], c] for c in ("layer", "head")), strict=True))
        own = HeadSet(sets.get(kind, {}).get("selected", {}).get("heads", ()))
        if rows != own or list(map(str, own)) != said["selection"]["selected"]:
            yield f"{kind}: heads.csv, sets.json and summary.json name different selected heads"
        if len(table) != said["heads"] or table.duplicated(["layer", "head"]).any():
            yield f"{kind}: heads.csv does not hold every head once"
    events = pd.read_parquet(folder / "events.parquet")
    for kind, said in summary["kinds"].items():
        if int((events["kind"] == kind).sum()) != said["selection"]["events"]:
            yield f"{kind}: events.parquet and summary.json count different events"


def _frozen(sets: dict[str, Any], before: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every frozen set, by name."""
    for name, value in sets.items():
        if isinstance(value, dict):
            if {"heads", "digest"} <= set(value):
                yield before + name, value
            yield from _frozen(value, f"{before}{name} ")


def _splits(manifest: dict[str, Any], summary: dict[str, Any]) -> Iterator[str]:
    splits = {name: set(ids) for name, ids in manifest["splits"].items()}
    for one in splits:
        for other in splits:
            if one < other and splits[one] & splits[other]:
                yield f"run.json: transcript {min(splits[one] & splits[other])} is in the {one} and in the {other} split"
        if len(splits[one]) != summary["transcripts"].get(one):
            yield f"run.json and summary.json count different transcripts in the {one} split"
