"""What a run has measured is kept as it goes, so that one that was killed goes on where it was.

While a run works `keeping(store)`, the expensive pieces of every stage ask `kept` for what they would measure: it is taken
from the store if the same was measured before, by a name that hangs on everything that went into it. Outside of a run
nothing is kept. The same run collects the sentences that its parts have to say (`note`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import numpy as np

from ._reading import fingerprint

Arrays = dict[str, np.ndarray]


@runtime_checkable
class Store(Protocol):
    """Where arrays are kept by name."""

    def load_kept(self, name: str) -> Arrays | None: ...

    def save_kept(self, name: str, arrays: Arrays) -> None: ...


class _Run:
    """The run that is going on, if one is."""

    def __init__(self):
        self.store: Store | None = None
        self.notes: list[str] | None = None


_run = _Run()


@contextmanager
def keeping(store: Store | None) -> Iterator[list[str]]:
    """For the length of a run: keep what is measured, and collect what is said.

    Yields:
        the notes, each sentence once, as they come.
    """
    before = _run.store, _run.notes
    _run.store, _run.notes = store, []
    try:
        yield _run.notes
    finally:
        _run.store, _run.notes = before


def kept(what: str, about: Iterable[object], measure: Callable[[], Arrays]) -> Arrays:
    """What `measure` gives, measured now or before.

    Args:
        what: the stage.
        about: everything that the result hangs on beyond the run's own inputs; see `fingerprint`.
    """
    if _run.store is None:
        return measure()
    name = f"{what} {fingerprint(*about)}"
    found = _run.store.load_kept(name)
    if found is None:
        found = measure()
        _run.store.save_kept(name, found)
    return found


def note(sentence: str) -> None:
    """Say something that belongs beside a run's numbers: in its manifest and on stderr, once; outside of a run as a warning."""
    if _run.notes is None:
        warnings.warn(sentence, stacklevel=3)
    elif sentence not in _run.notes:
        _run.notes.append(sentence)
        from tqdm import tqdm

        tqdm.write(f"note: {sentence}", file=sys.stderr)
