"""Where numbers come from: content hashes of models and data, the versions that made them, and the machine."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ._sources import hub_commit, is_hub_name
from .errors import InputError

PACKAGES = ("torch", "transformer-lens", "transformers", "tokenizers", "accelerate", "einops", "jaxtyping", "numpy", "pandas", "pyarrow", "scipy", "statsmodels",
            "datasets", "safetensors", "plotly", "typer", "tqdm")
OPTIONAL = ("gguf", "peft", "simple-icd-10-cm")


def digest(*parts: bytes | str) -> str:
    """A content hash of some parts, in order."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "big"))
        found.update(data)
    return found.hexdigest()[:16]


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(paths: Sequence[Path]) -> str:
    """A content hash of files, by name and bytes."""
    return digest(*(part for p in paths for part in (p.name, hash_file(p))))


def model_hash(model: str) -> str:
    """Of a folder's files or a GGUF file; for a hub name, the name and the commit that its files are of.

    Raises:
        InputError: for a hub name that neither the hub nor its cache knows.
    """
    path = Path(model)
    if path.is_dir():
        return hash_files(sorted(p for p in path.iterdir() if p.is_file()))
    if path.is_file():
        return hash_files([path])
    return f"{model.partition('@')[0]}@{hub_commit(model)}" if is_hub_name(model) else digest(model)


def versions() -> dict[str, str]:
    """Python, this package with a hash of its source (a checkout changes without a new version), and what it stands on."""
    found = {"python": platform.python_version(), "decisionheads": f"{_version('decisionheads') or 'unknown'}+{_source()}"}
    return found | {name: known for name in (*PACKAGES, *OPTIONAL) if (known := _version(name))}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def _source() -> str:
    here = Path(__file__).parent
    return digest(*(part for p in sorted(here.rglob("*.py")) for part in (p.relative_to(here).as_posix(), p.read_bytes())))[:8]


def same_versions(path: Path, before: Mapping[str, str], remedy: str) -> None:
    """Refuse to go on with what other versions began: the result would be of neither.

    Raises:
        InputError: names what differs, as it was and as it is.
    """
    now = versions()
    other = [f"{name} {before.get(name, 'not there')}, now {now.get(name, 'not there')}" for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if other:
        raise InputError(f"{path} was begun with other versions ({'; '.join(other)}); install those to go on with it, or {remedy}")


def machine(device: str = "cpu") -> str:
    """What the numbers were made on, in words."""
    import torch

    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {where}"
