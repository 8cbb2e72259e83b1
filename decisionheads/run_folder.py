"""A run folder: what a discovery keeps on disk, written part by part, each part whole or not at all.

    run.json               versions, hashes of model and data, options, seed, splits, timings, warnings
    events.parquet         the scored events
    effects.safetensors    exact effects `[event, layer, head]`
    heads.csv              every head of every kind, ranked, no blanks
    opposing.csv           the same for heads that oppose the decision
    sets.json              the frozen set of each kind, their union and the families, each with a content hash
    summary.json           per kind: counts, held-out figures, controls
    texts.csv              necessity and sufficiency of each set for each held-out transcript
    phase_matrix.csv, references.csv, stability.csv, knock_in.csv, reads.csv, read_blocking.csv
    report.html            the report
    parts/                 the transcripts that are done
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ._reading import fingerprint, strict_json
from .errors import InputError, as_written
from .heads import HeadScores
from .necessity import plain
from .provenance import digest, hash_file, machine, same_versions, versions

if TYPE_CHECKING:
    import pandas as pd

    from .discovery import Discovery

TABLES = (".csv", ".json", ".jsonl", ".parquet", ".safetensors")  # what a manifest vouches for


def write(path: Path, content: bytes | str) -> None:
    """Write a file whole: beside it first, then into its place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(beside, path)
    except OSError as error:  # a full disk does not say which file
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


class RunFolder:
    """A folder for one run. Made with other inputs it is refused; with the same ones it is continued.

    Args:
        path: the folder; made if it does not exist.
        inputs: what the run is made from: hashes and options, JSON.

    Raises:
        InputError: if the folder holds a run made from other inputs, or something that is no run.
    """

    def __init__(self, path: Path, inputs: dict[str, Any]):
        self.check(path, inputs)
        self.path, self.inputs = path, inputs
        self.parts, self.kept = path / "parts", path / "parts" / "going"

    def make(self) -> None:
        """Make the folder; done with the first thing that is worth keeping."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / "run.json").is_file():
            write(self.path / "run.json", json.dumps({"inputs": self.inputs, "finished": False, "versions": versions()}, indent=1) + "\n")
        self.parts.mkdir(exist_ok=True)

    @staticmethod
    def check(path: Path, inputs: dict[str, Any]) -> None:
        """Refuse a folder that these inputs may not be written to; makes nothing."""
        manifest = path / "run.json"
        try:
            above = path if path.exists() else next(p for p in path.absolute().parents if p.exists())
        except OSError as error:
            raise InputError(f"{path} cannot be a folder ({error.strerror}); name another") from None
        if not above.is_dir() and not path.exists():
            raise InputError(f"{path} cannot be made: {above} is not a folder; name another")
        if not os.access(above, os.W_OK):
            raise InputError(f"{path} cannot be written; name another folder")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            known = read_json(manifest) if manifest.is_file() else None
            if known is None:
                raise InputError(f"{path} exists and is not a run folder; name a new folder")
            before, now = known.get("inputs"), json.loads(json.dumps(inputs))
            if not isinstance(before, dict):
                raise InputError(f"{manifest} names no inputs; is this a run folder?")
            if before != now:
                other = sorted(k for k in {*before, *now} if before.get(k) != now.get(k))
                raise InputError(f"{path} was made from other inputs ({', '.join(other)} differ); name a new folder")
            if known.get("finished") is not True:
                with as_written(manifest, "name a new folder"):
                    same_versions(path, dict(known["versions"]), "name a new folder")

    @property
    def finished(self) -> bool:
        return (self.path / "run.json").is_file() and read_json(self.path / "run.json").get("finished") is True

    def _part(self, name: str, folder: Path | None = None) -> Path:
        return (folder or self.parts) / f"{digest(name)}.safetensors"

    def load_part(self, name: str, folder: Path | None = None) -> dict[str, np.ndarray] | None:
        """The arrays of a transcript that is done, or None."""
        from safetensors import safe_open

        path = self._part(name, folder)
        try:
            with as_written(path, ""), safe_open(str(path), framework="numpy") as file:
                arrays = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 (not a dict)
                return arrays if file.metadata()["digest"] == fingerprint(arrays) else None
        except (OSError, InputError):  # not there yet, torn, or changed: it is made again
            return None

    def save_part(self, name: str, arrays: dict[str, np.ndarray], folder: Path | None = None) -> None:
        from safetensors.numpy import save

        self.make()
        arrays = {k: np.ascontiguousarray(v) for k, v in arrays.items()}
        write(self._part(name, folder), save(arrays, {"digest": fingerprint(arrays)}))

    def load_kept(self, name: str) -> dict[str, np.ndarray] | None:
        """What a stage has measured before this run was killed, or None; see `_keeping`."""
        return self.load_part(f"kept/{name}", self.kept)

    def save_kept(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        self.kept.mkdir(parents=True, exist_ok=True)
        self.save_part(f"kept/{name}", arrays, self.kept)

    def finish(self, found: Discovery, timings: dict[str, Any], report: Callable[[Path], str] | None = None, device: str = "cpu") -> None:
        """Write the tables, then the report, then mark the run finished."""
        import io

        self.make()
        table = io.BytesIO()
        found.events.to_parquet(table, index=False)
        write(self.path / "events.parquet", table.getvalue())
        names = tuple(f"{r.transcript}@{r.position}:{r.kind}" for r in found.events.itertuples())
        beside = self.path / ".effects.safetensors"
        HeadScores(found.effects, "mean-ablation effect", events=names, meta={"model": found.model}).save(beside)
        os.replace(beside, self.path / "effects.safetensors")
        write(self.path / "heads.csv", found.to_frame().to_csv(index=False, float_format="%.6g"))
        import pandas as pd

        write(self.path / "opposing.csv", pd.concat([r.opposing for r in found.kinds.values()]).to_csv(index=False, float_format="%.6g"))
        for name, frame in (found.standing.tables() if found.standing is not None else {}).items():
            write(self.path / f"{name}.csv", frame.to_csv(index=False, float_format="%.6g"))
        write(self.path / "sets.json", json.dumps(sets_of(found), indent=1) + "\n")
        write(self.path / "summary.json", json.dumps(summary_of(found), indent=1) + "\n")
        nulls = {kind: np.sort(r.calibration.null_max).astype(np.float32) for kind, r in found.kinds.items()}
        from safetensors.numpy import save

        write(self.path / "null_max.safetensors", save({k: v for k, v in nulls.items() if len(v)} or {"none": np.zeros(1, np.float32)}))
        manifest = {"inputs": self.inputs, "finished": True, "model": found.model, "layers": found.shape[0], "heads": found.shape[1],
                    "options": asdict(found.options), "versions": versions(), "machine": machine(device),
                    "splits": found.splits, "timings": timings, "warnings": list(found.warnings), "notes": list(found.notes)}
        manifest["files"] = {path.name: hash_file(path) for path in sorted(self.path.iterdir()) if path.suffix in TABLES and path.name != "run.json"}
        if report is not None:
            write(self.path / "run.json", json.dumps({**manifest, "finished": False}, indent=1) + "\n")
            write(self.path / "report.html", report(self.path))
        write(self.path / "run.json", json.dumps(manifest, indent=1) + "\n")
        self.clear()

    def clear(self) -> None:
        """Remove what was only for going on, and what was half-written when a run was killed."""
        shutil.rmtree(self.kept, ignore_errors=True)
        for left in (*self.path.glob(".*.[0-9]*"), *self.parts.glob(".*.[0-9]*")):
            left.unlink(missing_ok=True)


def sets_of(found: Discovery) -> dict:
    """Every set of heads of a discovery, each with a content hash: by kind, together, and by family."""
    standing = found.standing
    frozen = lambda heads: {"heads": list(map(str, heads)), "digest": heads.digest}  # noqa: E731
    if standing is None:
        return {kind: {"selected": frozen(r.selected)} for kind, r in found.kinds.items()}
    sets = {kind: {**frozen(standing.selections[kind].heads), "selected": frozen(r.selected)} for kind, r in found.kinds.items()}
    return {**sets, "global": frozen(standing.together), "families": {name: frozen(heads) for name, heads in standing.families.named.items()}}


def summary_of(found: Discovery) -> dict:
    """`summary.json`: per kind and for the global set; nothing in it depends on the machine."""
    standing, heads = found.standing, found.shape[0] * found.shape[1]
    said = {"kinds": {kind: {**r.summary, "heads": heads} for kind, r in found.kinds.items()}, "transcripts": {name: len(ids) for name, ids in found.splits.items()},
            "set_aside": found.set_aside, "warnings": list(found.warnings)}
    if standing is None:
        return said
    phase = [{k: v if isinstance(v, str) else plain(v) for k, v in row.items()} for row in standing.phase.to_dict("records")]
    families = {**standing.families.summary(), "dissociation": standing.dissociations(), "sinks": sorted(standing.sinks.ids)}
    return said | {"global": {**standing.summary("global"), "set_size": len(standing.together), "heads": heads}, "phase_matrix": phase, "families": families,
                   "elicitation": standing.elicitation_summary()}


def read_json(path: Path) -> dict:
    try:
        found = strict_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise InputError(f"{path} cannot be read as JSON; is this a run folder?") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} is not a JSON object; is this a run folder?")
    return found


def open_run(path: Path) -> dict[str, Any]:
    """The manifest and summary of a finished run.

    Raises:
        InputError: if the folder is no run, or not a finished one.
    """
    if not (path / "run.json").is_file():
        raise InputError(f"{path} is not a run folder (it has no run.json); give the folder that discover or demo wrote")
    manifest = read_json(path / "run.json")
    if not manifest.get("finished"):
        raise InputError(f"{path} is not finished; run the same discover command again to continue it")
    missing = [name for name in ("summary.json", "heads.csv", "null_max.safetensors") if not (path / name).is_file()]
    if missing or not {"model", "layers", "heads"} <= set(manifest):
        raise InputError(f"{path} is not whole ({', '.join(missing) or 'run.json'}); make the run again in a new folder")
    return {"manifest": manifest, "summary": read_json(path / "summary.json")}


def whole(folder: Path):
    """While the files of a finished run are taken apart: what does not fit is one sentence; see `as_written`."""
    return as_written(folder, "restore its files, or make the run again in a new folder")


def read_table(path: Path) -> pd.DataFrame:
    """A table of a run folder; empty where nothing was there to write.

    Raises:
        InputError: if it is missing or no table.
    """
    import pandas as pd

    try:
        return pd.read_csv(path)
    except pd.errors.EmptyDataError:
        return pd.DataFrame()
    except (OSError, ValueError):
        raise InputError(f"{path} cannot be read; make the run again in a new folder") from None


def table_records(path: Path) -> list[dict]:
    """The rows of a table for JSON: None where a cell is empty."""
    return json.loads(read_table(path).to_json(orient="records"))
