"""One progress bar for a run of many stages: what is happening, and how long is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tqdm import tqdm

WIDTH = 32  # characters of a stage's name, so that the bar stands still


class Progress:
    """Call it around the items of each stage; stages advance one bar by their expected share of the time.

    Args:
        shares: stage -> its share of the whole, in any unit. A stage that is not named counts nothing.
        show: whether to draw anything.

    Attributes:
        seconds: stage -> how long it took.
    """

    def __init__(self, shares: Mapping[str, float | int], show: bool):
        self.shares = dict(shares)
        self.seconds: dict[str, float] = {}
        calm = 0.1 if sys.stderr.isatty() else 2.0  # seconds: a file keeps every line, and so does a notebook that is saved
        self.bar = tqdm(total=sum(shares.values()), disable=not show, mininterval=calm, bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed} so far, about {remaining} left")

    def __call__(self, items: Iterable[Any], stage: str) -> Iterator[Any]:
        items = list(items)
        share = float(self.shares.pop(stage, 0))  # a stage that comes twice counts once
        self.bar.set_description_str(f"{stage:{WIDTH}}", refresh=sys.stderr.isatty())
        began = time.monotonic()
        for item in items:
            yield item
            self._advance(share / len(items))
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - began
        if not items:
            self._advance(share)

    def _advance(self, part: float) -> None:
        self.bar.update(min(part, self.bar.total - self.bar.n))  # sums of parts are not exact

    def close(self) -> None:
        self.bar.close()
