"""Reading files that somebody may have changed: strict JSON, and a content hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np


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


def fingerprint(*parts: Any) -> str:
    """A content hash of plain values, arrays, and mappings and tuples of these, in order: a changed bit is seen.

    Raises:
        TypeError: for anything else, whose text might leave out what tells it apart.
    """
    found = hashlib.sha256()
    for part in parts:
        _feed(found, part)
    return found.hexdigest()[:16]


def _feed(found: Any, part: Any) -> None:
    if isinstance(part, Mapping):
        part = tuple((name, part[name]) for name in sorted(part))
    if isinstance(part, np.generic):
        part = part.item()
    if isinstance(part, tuple):
        found.update(f"tuple {len(part)} ".encode())
        for inner in part:
            _feed(found, inner)
        return
    if isinstance(part, np.ndarray):
        kind, data = f"{part.dtype} {part.shape}", part.tobytes()
    elif part is None or isinstance(part, (str, int, float, bool)):
        kind, data = type(part).__name__, str(part).encode()
    else:
        raise TypeError(f"a {type(part).__name__} has no content hash")
    found.update(f"{kind} {len(data)} ".encode())
    found.update(data)
