"""Decision events as values: what was decided where, against what. `events` finds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .errors import InputError
from .views import MOST, Viewed

Kind = Literal["region", "label", "departure"]
KINDS: tuple[Kind, ...] = ("region", "label", "departure")


@dataclass(frozen=True)
class DecisionEvent(Viewed):
    """One token-level decision. The logits at `position` predict the chosen token.

    Attributes:
        transcript: id of the transcript.
        kind: region, label or departure.
        position: token position `t`; interventions and attention rows are at `t`.
        chosen: token id at `t + 1`.
        alternatives: all live next token ids, the chosen one included, ascending.
        competitors: the token ids it competes with (the near-miss's token for a departure).
        mixed: region events only: live ids that lead to the chosen region and to others.
        label, region: what was written.
        near_miss: departures only: the label departed from.
        start, end: characters of the label's mention in the whole text.
        primary: region events: a single region is alive afterwards. True for the other kinds.
        copied: the label itself was named in the reasoning.
        short_prefix: departures only: label and near-miss share no more than a space and a letter.
        spans: `(name, start, end)` in characters of the whole text that the event may read.
    """

    transcript: str
    kind: Kind
    position: int
    chosen: int
    alternatives: tuple[int, ...]
    competitors: tuple[int, ...]
    label: str
    region: str
    start: int
    end: int
    near_miss: str | None = None
    mixed: tuple[int, ...] = ()
    primary: bool = True
    copied: bool = False
    short_prefix: bool = False
    spans: tuple[tuple[str, int, int], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.transcript}@{self.position}:{self.kind}"

    def __repr__(self) -> str:
        near = f", departing from {self.near_miss!r}" if self.near_miss else ""
        return f"DecisionEvent({self.name}: chose {self.label!r} of region {self.region!r}{near}; {len(self.alternatives)} alternatives{'' if self.primary else ', not primary'})"

    def _rows(self):
        return [{"may read": name, "from character": start, "to": end} for name, start, end in self.spans[:MOST]], len(self.spans)


class Dropped(NamedTuple):
    """A decision that could not be an event, and why."""

    transcript: str
    label: str
    start: int
    reason: str
    kind: str = ""


@dataclass(frozen=True)
class Events(Viewed):
    """The events of one or more transcripts, with what was dropped and near-misses that were accepted."""

    events: tuple[DecisionEvent, ...]
    dropped: tuple[Dropped, ...] = ()
    accepted_near_misses: int = 0

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self):
        return iter(self.events)

    def of_kind(self, kind: Kind) -> tuple[DecisionEvent, ...]:
        """Events of a kind; of region events only the primary ones.

        Raises:
            InputError: for an unknown kind.
        """
        check_kind(kind)
        return tuple(e for e in self.events if e.kind == kind and e.primary)

    def dropped_by_reason(self) -> dict[str, int]:
        return dict(sorted(Counter(d.reason for d in self.dropped).items()))

    def __repr__(self) -> str:
        kinds = Counter(e.kind for e in self.events)
        shown = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS)
        return f"Events({shown}; dropped {self.dropped_by_reason() or 'none'})"

    def _rows(self):
        return [{"kind": e.kind, "transcript": e.transcript, "position": e.position, "label": e.label, "departs from": e.near_miss or ""} for e in self.events[:MOST]], len(self)

    @classmethod
    def join(cls, parts: Iterable[Events]) -> Events:
        parts = list(parts)
        return cls(tuple(e for p in parts for e in p.events), tuple(d for p in parts for d in p.dropped),
                   sum(p.accepted_near_misses for p in parts))


def check_kind(kind: object) -> None:
    """Refuse what is no kind of event.

    Raises:
        InputError: with what was asked for, and what there is.
    """
    if kind not in KINDS:
        raise InputError(f"kind={kind!r} is no kind of event; choose {', '.join(KINDS[:-1])} or {KINDS[-1]}")
