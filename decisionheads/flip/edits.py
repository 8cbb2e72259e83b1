"""Edits of evidence, and the same edits elsewhere: pure functions of a text and its spans.

    delete   the characters go
    mask     every character but blanks becomes a filler; length and line breaks stay
    negate   a negation is put before them, or in place of an affirming word that stands right before them
    swap     another text takes their place: the evidence of a near-miss

A control edit is the same route with the same wording at a window of *equal length* that begins with another code's
evidence, touches none of the own, and lies as near to the own as there is one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..corpora.notes import EVIDENCE
from ..errors import InputError
from ..transcripts import Span

Route = Literal["delete", "mask", "negate", "swap"]
ROUTES: tuple[Route, ...] = ("delete", "mask", "negate", "swap")
CONTAINERS = ("note", "section")  # spans that go on to be what they name when something in them is edited
COVER = 0.5  # least share of a control window that is evidence
Place = tuple[int, int]


class Change(NamedTuple):
    """Characters `start:end` become `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Wording:
    """What edits are made of; part of a registration.

    Attributes:
        filler: one character that masks.
        negation: what is put before evidence, its space included.
        affirmed: a word, its space included, that the negation replaces where it stands right before the evidence.
    """

    filler: str = "-"
    negation: str = "denies "
    affirmed: str = ""

    def __post_init__(self):
        if len(self.filler) != 1 or self.filler.isspace():
            raise InputError(f"the filler {self.filler!r} is not one character that can be seen; choose one, such as -")
        if not self.negation.strip():
            raise InputError("the negation is empty; give words that negate what comes after them, such as 'denies '")


class Edited(NamedTuple):
    """An edited text: `spans` have moved with it, `lost` names those that were edited themselves, as they stood."""

    text: str
    spans: tuple[Span, ...]
    lost: tuple[Span, ...]


def edit(text: str, changes: Sequence[Change], spans: Sequence[Span] = ()) -> Edited:
    """Make changes that do not overlap; everything outside of them stays character for character.

    A span that no change touches moves along and is checked against its text; a `note` or `section` grows or shrinks with
    what it holds; any other span that is touched is lost.

    Raises:
        ValueError: for changes that overlap or lie outside of the text.
    """
    changes = sorted(changes)
    if any(b.start < a.end for a, b in zip(changes, changes[1:], strict=False)) or any(not 0 <= c.start <= c.end <= len(text) for c in changes):
        raise ValueError("changes overlap or lie outside of the text")
    out, at = "", 0
    for change in changes:
        out, at = out + text[at:change.start] + change.text, change.end
    out += text[at:]
    moved, lost = [], []
    for span in spans:
        before = sum(len(c.text) - (c.end - c.start) for c in changes if c.end <= span.start)
        inner = [c for c in changes if c.start < span.end and c.end > span.start]
        if inner and not (span.name in CONTAINERS and all(span.start <= c.start and c.end <= span.end for c in inner)):
            lost.append(span)
            continue
        end = span.end + before + sum(len(c.text) - (c.end - c.start) for c in inner)
        found = span._replace(start=span.start + before, end=end)
        if not inner and out[found.start:found.end] != text[span.start:span.end]:
            raise ValueError(f"a span {span.name!r} was not found again at {found.start}:{found.end}")
        if found.end > found.start:
            moved.append(found)
        else:
            lost.append(span)  # a section that was all deleted
    return Edited(out, tuple(moved), tuple(lost))


def change(route: Route, text: str, place: Place, wording: Wording, instead: str = "") -> Change:
    """The edit of one place by a route; `instead` is the text that a swap puts there."""
    start, end = place
    if route == "delete":
        return Change(start, end, "")
    if route == "mask":
        return Change(start, end, re.sub(r"\S", lambda _: wording.filler, text[start:end]))
    if route == "swap":
        return Change(start, end, instead)
    if route != "negate":
        raise ValueError(f"unknown route {route!r}: expected one of {', '.join(ROUTES)}")
    return Change(start - len(wording.affirmed) if _affirmed(text, start, wording) else start, start, wording.negation)


def _affirmed(text: str, start: int, wording: Wording) -> bool:
    return bool(wording.affirmed) and text[:start].endswith(wording.affirmed)


def merged(places: Sequence[Place]) -> list[Place]:
    """Places in order, those that overlap or touch as one."""
    found: list[Place] = []
    for start, end in sorted(places):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def controls(text: str, own: Sequence[Place], others: Mapping[str, Sequence[Place]], bounds: Place, wording: Wording = Wording()) -> list[Place] | None:
    """A window for each own place, as long, that begins with another code's evidence; None where one has none.

    Windows lie within `bounds`, touch neither own places nor each other, and at least half of each is evidence of others;
    where that is shorter, a window goes on into the text after it. Windows that cut no word come first, then the nearest:
    both are then about as far from the decision. An affirming word stands before both or before neither.
    """
    own = merged(own)
    marked = merged([place for places in others.values() for place in places])
    starts = sorted({start for places in others.values() for start, _ in places})
    taken, found = [*own], []
    for a, b in own:
        size = b - a
        fits = []
        for s in starts:
            e = s + size
            clear = bounds[0] <= s and e <= bounds[1] and all(e <= x or y <= s for x, y in taken)
            covered = sum(max(0, min(e, y) - max(s, x)) for x, y in marked)
            if clear and covered >= COVER * size and _affirmed(text, s, wording) == _affirmed(text, a, wording):
                fits.append((text[e - 1].isalnum() and text[e:e + 1].isalnum(), abs(s - a), s))
        if not fits:
            return None
        s = min(fits)[2]
        found.append((s, s + size))
        taken.append(found[-1])
    return found


def evidence_of(spans: Sequence[Span]) -> dict[str, list[Place]]:
    """Code -> the places of its evidence, in order."""
    found: dict[str, list[Place]] = {}
    for s in spans:
        if s.name == EVIDENCE and s.of:
            found.setdefault(s.of, []).append((s.start, s.end))
    return {code: merged(places) for code, places in found.items()}
