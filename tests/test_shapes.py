"""The shape checks themselves: what they see, and what they leave alone."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from .shapes import check_shapes

MODULE = '''
from __future__ import annotations
from dataclasses import dataclass
import numpy as np
from jaxtyping import Float

def square(x: Float[np.ndarray, "a a"], /, *, name: str = "") -> float:
    return float(x.sum())

def outputs(n: int) -> Float[np.ndarray, "2"]:
    def inner(x: Float[np.ndarray, "a a"]):
        return x
    return inner(np.zeros(n))

def plain(n: int):
    def inner(x: Float[np.ndarray, "a a"]):
        return x.shape
    return inner(np.zeros(n))

@dataclass(frozen=True)
class Table:
    values: Float[np.ndarray, "layer head"]

    def column(self, by: Float[np.ndarray, "layer"]) -> int:
        return len(by)
'''


def test_arrays_in_signatures_are_checked_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "shaped.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    try:
        check_shapes("shaped")
        shaped = importlib.import_module("shaped")
    finally:
        sys.meta_path[:] = finders
    assert shaped.square(np.ones((2, 2))) == 4 and len(shaped.outputs(2)) == 2 and shaped.Table(np.zeros((2, 3))).column(np.zeros(2)) == 2
    for wrong in (lambda: shaped.square(np.ones((2, 3))), lambda: shaped.outputs(3), lambda: shaped.Table(np.zeros(2)), lambda: shaped.Table(np.zeros((2, 3))).column(np.zeros((2, 1)))):
        with pytest.raises(TypeCheckError):
            wrong()
    assert shaped.plain(3) == (3,) and not hasattr(shaped.plain, "__wrapped__")  # neither plain functions nor those within


def test_the_package_is_checked():
    from decisionheads.calibration import adjusted

    with pytest.raises(TypeCheckError):
        adjusted(np.ones((2, 2)), "bh")
