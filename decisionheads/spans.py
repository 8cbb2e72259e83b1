"""Spans as keys: what an event may read, windows to hold it against, and the sinks that are left out.

Everything here is in token positions of one text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ._packs import MEMORY, in_packs
from ._processes import spread
from .branches import Branch, run_pack
from .decisions import DecisionEvent
from .errors import InputError
from .labels import LabelSpace
from .reads import Span
from .views import Brief

if TYPE_CHECKING:
    from ._cache import Prefix
    from .model import DecisionModel, Reading

Array = np.ndarray
WINDOWS = 8  # control windows of a span
SPANS = ("own block", "own mention", "own evidence", "near-miss")  # of events; a text may name others
SINK = 0.3  # mean mass on null tokens, above which a key is a sink


def check_span(name: str, readings: Iterable[Reading]) -> None:
    """Refuse the name of a span that no event could have.

    Raises:
        InputError: with what was asked for, and what there is.
    """
    known = {*SPANS, *(given for r in readings for e in r.events for given, _, _ in e.spans), *(s.name for r in readings for s in r.transcript.spans)}
    if name not in known:
        raise InputError(f"span={name!r}: no event and no transcript has a span of that name; there are {', '.join(sorted(known))}")


def token_spans(reading: Reading, event: DecisionEvent, name: str) -> tuple[Span, ...]:
    """The tokens of an event's spans of one name, as far as its position can see them."""
    found = []
    for given, start, end in event.spans:
        tokens = reading.encoded.tokens_in(start, end) if given == name else ()
        if len(tokens) and tokens[0] <= event.position:
            found.append((int(tokens[0]), min(int(tokens[-1]), event.position) + 1))
    return tuple(found)


def unrelated_mention(reading: Reading, event: DecisionEvent, labels: LabelSpace, near: Sequence[Span]) -> tuple[Span, ...]:
    """The mention of a label of another region, written before the event, that is nearest to a span."""
    t = reading.transcript
    own = labels.region(event.label)
    tokens = [reading.encoded.tokens_in(m.start, m.end) for m in labels.mentions(t.text, t.reasoning_start, event.start) if labels.region(m.label) != own]
    found = [(int(x[0]), int(x[-1]) + 1) for x in tokens if len(x) and x[-1] < event.position]
    return tuple(sorted(found, key=lambda s: abs(s[0] - near[0][0]))[:1]) if near else ()


def windows(target: Sequence[Span], avoid: Iterable[Span], bounds: Span, most: int = WINDOWS) -> list[Span]:
    """Windows as long as `target`, those at the nearest distance first, that touch neither it, nor `avoid`, nor each other."""
    size = sum(end - start for start, end in target)
    taken = np.zeros(bounds[1] - bounds[0] + 1, int)
    for start, end in (*target, *avoid):
        taken[max(0, start - bounds[0]):max(0, end - bounds[0])] = 1
    found: list[Span] = []
    for start in sorted(range(bounds[0], bounds[1] - size + 1), key=lambda s: (abs(s - target[0][0]), s)):
        here = slice(start - bounds[0], start - bounds[0] + size)
        if not taken[here].any():
            found.append((start, start + size))
            taken[here] = 1
            if len(found) == most:
                break
    return found


def control_windows(reading: Reading, event: DecisionEvent, target: Sequence[Span], most: int = WINDOWS) -> list[Span]:
    """Windows of the part of the text (prompt, reasoning, answer) that holds `target`, away from all that the event is about."""
    t, begin = reading.transcript, [0]
    for cut in (t.reasoning_start, t.answer_start):
        begin.append(int(np.searchsorted(reading.encoded.offsets[:, 1], cut, "right")))
    bounds = [*begin, event.position]
    part = max(i for i in range(3) if target[0][0] >= bounds[i])
    mine = [s for name in SPANS for s in token_spans(reading, event, name)]
    return windows(target, mine, (bounds[part], min(bounds[part + 1], event.position)), most)


def as_keys(spans: Iterable[Span], length: int) -> Bool[Array, " position"]:
    """Spans as a mask over the positions of a text."""
    keys = np.zeros(length, bool)
    for start, end in spans:
        keys[start:end] = True
    return keys


# -- sinks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Sinks(Brief):
    """Keys that take attention and hold nothing of the text; fixed on the reference split.

    Attributes:
        ids: token ids that are sinks wherever they stand. The first position is one always.
    """

    ids: frozenset[int]

    def keys(self, ids: Int[Array, " position"]) -> Bool[Array, " position"]:
        found = np.isin(ids, sorted(self.ids))
        found[:1] = True
        return found


@torch.no_grad()
def find_sinks(model: DecisionModel, texts: Iterable[tuple[Prefix, Sequence[int]]], template: Collection[int], *, most: float = SINK, memory: int = MEMORY) -> Sinks:
    """Template tokens, and tokens that take more than 30% of all heads' attention on null tokens.

    Args:
        texts: reference texts, each with positions of null tokens.
        template: token ids of the template, special tokens included.
    """

    def of_text(text: tuple[Prefix, Sequence[int]]) -> tuple[dict[int, float], int]:
        prefix, positions = text
        ids, taken, rows = prefix.ids.cpu().numpy(), {}, 0
        branches = [Branch(p, (), (), ()) for p in positions]

        def masses(pack: list[int]) -> np.ndarray:
            length = max(branches[i].position for i in pack)
            own = len(pack) if model.hooked.packed else 1  # keys of the rows themselves stand last
            mass = np.zeros(length)

            def add(layer: int, pattern: Tensor) -> None:
                seen = pattern[..., :-own].mean(0).sum(0)
                mass[len(mass) - len(seen):] += seen.double().cpu().numpy()

            run_pack(model.hooked, prefix, [branches[i] for i in pack], on_pattern=add)
            return mass

        for pack, mass in in_packs(model.hooked, branches, memory, masses):
            rows += len(pack) * len(model.hooked.layers)
            for i in np.flatnonzero(mass):
                taken[int(ids[i])] = taken.get(int(ids[i]), 0.0) + mass[i]
        return taken, rows

    found = spread(of_text, texts)
    rows, taken = sum(n for _, n in found), Counter()
    for mine, _ in found:
        taken.update(mine)
    return Sinks(frozenset({*template, *(i for i, m in taken.items() if m > most * rows)}))
