"""`Explorer`: pick a decision, switch heads off, keep spans from being read, and see what is left of the choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from ..ablation import ReferenceMeans
from ..errors import InputError
from ..events import DecisionEvent
from ..heads import HeadSet
from ..labels import LabelSpace
from ..model import DecisionModel, Reading
from ..transcripts import Transcript
from .bench import ALL, NONE, OFF, Bench, Block, Decision, Heads, Outcome


@dataclass(frozen=True)
class State:
    """Where an explorer stands; it never changes, another takes its place.

    Attributes:
        transcript, event: what was picked; events count from 0.
        off: heads that are replaced by their reference means.
        block: a span that is not read, by name or characters; None.
        blocked: the heads that may not read it.
        colour: whose reads are shown: a family, `heads that are off`, `all heads`, or heads by name.
    """

    transcript: str
    event: int = 0
    off: HeadSet = NONE
    block: Block | None = None
    blocked: HeadSet = NONE
    colour: str = ALL


class Explorer:
    """One decision at a time: its text coloured by what heads read, and its margin as heads are switched off.

    In a notebook it shows itself, with controls where widgets can be had and as plain HTML where not; without one,
    `outcome` and `reads` say the same in numbers. Every method that changes something returns the explorer.

    Args:
        model: the model.
        texts: readings, or transcripts to be read when they are picked; none of the reference split.
        means: reference means, see `reference_means`.
        families: named sets of heads: `{"region": HeadSet(...), "near-miss": HeadSet(...)}`.
        labels: the label space, to find events; needed for transcripts, not for readings.
        closers: see `find_closers`; for transcripts.

    Raises:
        InputError: for no text, two of one id, transcripts without `labels`, a text of the reference split, and
            means or families of another model.
    """

    def __init__(self, model: DecisionModel, texts: Sequence[Reading | Transcript], means: ReferenceMeans, families: Mapping[str, HeadSet] | None = None, *,
                 labels: LabelSpace | None = None, closers: Sequence[int] = ()):
        found: dict[str, Reading | Callable[[], Reading]] = {}
        for text in texts:
            transcript = text.transcript if isinstance(text, Reading) else text
            if not isinstance(transcript, Transcript):
                raise InputError(f"a {type(text).__name__} is neither a Reading nor a Transcript; give what model.read or load_transcripts returns")
            if transcript.id in found:
                raise InputError(f"id {transcript.id!r} is used more than once; give each transcript its own")
            if labels is None and transcript is text:
                raise InputError(f"transcript {transcript.id!r} is not read yet and its events are not known; pass labels=, or give readings")
            found[transcript.id] = text if isinstance(text, Reading) else partial(_read, model, transcript, labels, closers)
        self._begin(Bench(model, found, means, families))

    def _begin(self, bench: Bench) -> None:
        self.bench = bench
        self._changed: list[Callable[[], None]] = []
        self._found: tuple[State, Outcome, Float[np.ndarray, " position"]] | None = None
        self._live: Any = None
        self.state = State(_first(bench), colour=next(iter(bench.families), ALL))

    @classmethod
    def of_run(cls, folder: str | Path, model: DecisionModel, transcripts: Sequence[Transcript], labels: LabelSpace) -> Explorer:
        """Explore the transcripts of a finished run that are not in its reference split.

        From the folder come the splits, the options, and as families the region and near-miss family, the selected
        set of each kind and the global set. Recomputed are the closers, the events, and the means of the reference
        split, which a run does not keep: every reference transcript is read again. Effects are those of the run.

        Args:
            folder: what `discover` or `demo` wrote.
            model: the model of the run.
            transcripts: those of the run.
            labels: those of the run.

        Raises:
            InputError: for a folder that is no finished run, another model than that of the run, and transcripts that
                do not hold the run's reference split.
        """
        from .runs import bench_of_run

        explorer = cls.__new__(cls)
        explorer._begin(bench_of_run(Path(folder), model, transcripts, labels))
        return explorer

    # -- what stands on the table --------------------------------------------------------------

    @property
    def transcripts(self) -> tuple[str, ...]:
        """Ids of the texts that can be picked."""
        return self.bench.transcripts

    @property
    def families(self) -> dict[str, HeadSet]:
        """Named sets of heads."""
        return self.bench.families

    @property
    def events(self) -> tuple[DecisionEvent, ...]:
        """The events of the transcript that is picked; their numbers are what `pick` takes."""
        return self.bench.events(self.state.transcript)

    @property
    def decision(self) -> Decision:
        """The event that is picked, with its reading, margin and means."""
        return self.bench.decision(self.state.transcript, self.state.event)

    @property
    def spans(self) -> tuple[str, ...]:
        """Names of the spans that `block` takes at this event."""
        return tuple(self.decision.spans)

    @property
    def shown(self) -> HeadSet:
        """The heads whose reads are shown."""
        return self.state.off if self.state.colour == OFF else self.bench.heads(self.state.colour)

    @property
    def outcome(self) -> Outcome:
        """The margin and the likeliest next tokens as things stand."""
        return self._now()[1]

    @property
    def reads(self) -> Float[np.ndarray, " position"]:
        """Attention of the position that writes the decision to each position up to its own, the mean over `shown`, as things stand."""
        return self._now()[2]

    def _now(self) -> tuple[State, Outcome, Float[np.ndarray, " position"]]:
        s = self.state
        if self._found is None or self._found[0] != s:
            asked = (s.off, s.block, s.blocked)
            self._found = s, self.bench.outcome(s.transcript, s.event, *asked), self.bench.reads(s.transcript, s.event, self.shown, *asked)
        return self._found

    # -- changing it -------------------------------------------------------------------------

    def _set(self, **changes: Any) -> Explorer:
        before, self.state = self.state, replace(self.state, **changes)
        if self.state != before:
            for tell in self._changed:
                tell()
        return self

    def pick(self, transcript: str | None = None, event: int = 0) -> Explorer:
        """Take another decision; heads stay off, and a blocked span stays blocked if the decision has one of its name.

        Args:
            transcript: an id; None for the one at hand.
            event: its number, from 0.
        """
        name = self.state.transcript if transcript is None else transcript
        decision = self.bench.decision(name, event)
        keep = self.state.block in decision.spans if isinstance(self.state.block, str) else self.state.block is not None and _fits(decision, self.state, name)
        return self._set(transcript=name, event=int(event), **({} if keep else {"block": None, "blocked": NONE}))

    def off(self, *heads: Heads | Iterable[Heads]) -> Explorer:
        """Switch heads off: at the event's position their z becomes its reference mean.

        Args:
            heads: "L1H7", "L1H7, L3H1", a family, a `Head`, a `HeadSet`; none of them changes nothing.
        """
        return self._set(off=self.state.off | self.bench.heads(heads))

    def on(self, *heads: Heads | Iterable[Heads]) -> Explorer:
        """Switch heads on again; all of them where none is named."""
        return self._set(off=self.state.off - self.bench.heads(heads) if heads else NONE)

    def block(self, span: Block, heads: Heads | Iterable[Heads] = ALL) -> Explorer:
        """Keep heads from reading a span at the event's position; it takes the place of what was blocked before.

        Args:
            span: a name of `spans` (all places of that name), or `(start, end)` in characters of the whole text.
            heads: which heads; by default all.
        """
        who = self.bench.heads(heads)
        self.decision.tokens(span)
        return self._set(block=span if isinstance(span, str) else (int(span[0]), int(span[1])), blocked=who)

    def unblock(self) -> Explorer:
        """Let every head read everything again."""
        return self._set(block=None, blocked=NONE)

    def colour_by(self, what: str | HeadSet) -> Explorer:
        """Choose whose reads are shown: a family, "heads that are off", "all heads", or heads by name."""
        name = what if isinstance(what, str) else ", ".join(map(str, what))
        if name != OFF:
            self.bench.heads(name)
        return self._set(colour=name)

    def reset(self) -> Explorer:
        """All heads on and nothing blocked."""
        return self._set(off=NONE, block=None, blocked=NONE)

    # -- showing it --------------------------------------------------------------------------

    def __repr__(self) -> str:
        s, e, o = self.state, self.decision.event, self.outcome
        said = ([f"{len(s.off)} heads off" if len(s.off) > 3 else f"{', '.join(map(str, s.off))} off"] if len(s.off) else []) + ([f"{s.block} blocked for {len(s.blocked)} heads"] if s.block is not None else [])
        return f"Explorer({s.transcript!r}, event {s.event} of {len(self.events)}: {e.kind} {e.label}; {'; '.join(said) or 'nothing changed'}: margin {o.m:+.2f} -> {o.margin:+.2f} logits)"

    def _repr_html_(self) -> str:
        """The state as plain HTML, without controls."""
        from .page import page

        return page(self)

    def widget(self):
        """The live view, an `anywidget`; several displays of it show the same state.

        Raises:
            InputError: where ipywidgets or anywidget are not installed.
        """
        if self._live is None:
            from .live import make

            self._live = make(self)
            self._changed.append(self._live.draw)
        return self._live

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, Any]:
        """HTML and text, and the widget where there is one, for frontends that choose."""
        from .live import installed

        bundle = {"text/plain": repr(self), "text/html": self._repr_html_()}
        if installed():
            bundle |= self.widget().view_data()
        return bundle

    def _ipython_display_(self) -> None:
        """Show HTML first, which is what saved notebooks and static pages keep, then the live view, which hides it."""
        from .live import show

        show(self)


def _first(bench: Bench) -> str:
    """The first text that has a decision."""
    refused = None
    for name in bench.transcripts:
        try:
            bench.decision(name, 0)
            return name
        except InputError as error:
            refused = refused or error
    raise refused


def _read(model: DecisionModel, transcript: Transcript, labels: LabelSpace, closers: Sequence[int]) -> Reading:
    return model.read(transcript, model.find_events(transcript, labels, closers=closers))


def _fits(decision: Decision, state: State, transcript: str) -> bool:
    """Whether characters that were blocked can be blocked at another event: in the same text, and before it."""
    try:
        return transcript == state.transcript and bool(decision.tokens(state.block))
    except InputError:
        return False
