"""Reading files that somebody may have changed: strict JSON, and a content hash of arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def strict_json(text: str | bytes) -> Any:
    """A JSON value; raises ValueError or RecursionError for anything else, and for NaN, Infinity and keys that stand twice."""
    return json.loads(text, object_pairs_hook=_once, parse_constant=_none)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _none(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def fingerprint(arrays: Mapping[str, Any], *texts: str) -> str:
    """A content hash of arrays by name, and of texts beside them: a changed bit is seen."""
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape}\n".encode() + array.tobytes())
    for text in texts:
        found.update(text.encode())
    return found.hexdigest()[:16]
