"""The one error that users cause and can mend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InputError(ValueError):
    """Bad input: the message is one sentence that says what, where and how to mend it."""


class ExactnessError(RuntimeError):
    """A transcript on which the packed forward and the plain model disagree; it must be set aside."""


@contextmanager
def as_written(path: str | Path, remedy: str) -> Iterator[None]:
    """While a file or folder that the program wrote is taken apart: what does not fit is one sentence that names it.

    What the disk refuses stays an OSError.

    Raises:
        InputError: whose cause is the error.
    """
    try:
        yield
    except OSError:
        raise
    except InputError as error:
        raise InputError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    except Exception as error:  # a missing key, a text in place of a number, torn safetensors, a column that is gone
        said = " ".join(f"{type(error).__name__} {error}".split())[:100]
        raise InputError(f"{path} does not hold what was written there ({said}); {remedy}") from error
