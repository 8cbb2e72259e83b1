"""The bench: one decision on the table, heads switched off, spans kept from being read; no pixels.

Every question is one branch over the prefill of its transcript, so an answer costs one packed row, not a forward
of the text. Interventions act at the event's position and nowhere else.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from torch import Tensor

from ..ablation import ReferenceMeans, check_events, event_margin
from ..branches import Branch, branch_logits
from ..errors import InputError
from ..events import DecisionEvent
from ..heads import Head, HeadSet
from ..interventions import BlockReads, Intervention, Keep, MeanAblate
from ..margin import Margin
from ..model import DecisionModel, Reading
from ..reads import Span, attention_row
from ..spans import token_spans

TOP = 6  # likeliest next tokens that are listed, before and now
ALL, OFF = "all heads", "heads that are off"
NONE = HeadSet()
Block = str | tuple[int, int]
Heads = HeadSet | Head | tuple[int, int] | str


@dataclass(frozen=True)
class Alternative:
    """A next token, before any intervention and now.

    Attributes:
        token: its id.
        text: what it decodes to.
        logit, probability: now; of the whole vocabulary.
        logit_before, probability_before: in the clean run.
        role: `chosen`, `against` (what the margin is measured against), `live` (another label's token), or nothing.
    """

    token: int
    text: str
    logit: float
    probability: float
    logit_before: float
    probability_before: float
    role: str = ""


@dataclass(frozen=True)
class Outcome:
    """What an intervention does to one decision; margins in logits, positive for what was chosen.

    Attributes:
        margin: now.
        m: the clean margin.
        m0: the margin with every head ablated.
        alternatives: the likeliest next tokens before and now, the chosen one and its rival among them, best first.
    """

    margin: float
    m: float
    m0: float
    alternatives: tuple[Alternative, ...]

    @property
    def effect(self) -> float:
        """`m - margin`: what the intervention takes from the decision; positive where it was supported."""
        return self.m - self.margin

    def __repr__(self) -> str:
        best = self.alternatives[0]
        return f"Outcome(margin {self.m:+.2f} -> {self.margin:+.2f} logits, m0 {self.m0:+.2f}; most likely now {best.text!r} at {best.probability:.0%})"


@dataclass(frozen=True, eq=False)
class Decision:
    """One event with all that is fixed about it: clean logits, margin, reference means, floor.

    Attributes:
        reading: the transcript, read.
        event: the event; interventions act at its position.
        margin: what the choice is measured against, fixed in the clean run.
        zbar: reference means, `[layer, head, d_head]`.
        clean: clean logits, `[vocabulary]`.
        m0: the margin with every head ablated, logits.
    """

    reading: Reading
    event: DecisionEvent
    margin: Margin
    zbar: Float[np.ndarray, "layer head d_head"]
    clean: Float[Tensor, " vocabulary"]
    m0: float

    @property
    def m(self) -> float:
        """The clean margin, logits."""
        return float(self.margin(self.clean))

    @property
    def spans(self) -> dict[str, tuple[Span, ...]]:
        """Name -> tokens, of every named span that the decision can read."""
        found = {name: token_spans(self.reading, self.event, name) for name in dict.fromkeys(name for name, _, _ in self.event.spans)}
        return {name: tokens for name, tokens in found.items() if tokens}

    def tokens(self, block: Block) -> tuple[Span, ...]:
        """The tokens of a span, by its name or its characters, as far as the decision can read them and without its own position.

        Raises:
            InputError: for a name that this decision has no span of, and characters that it cannot read.
        """
        if isinstance(block, str):
            if block not in self.spans:
                raise InputError(f"{block!r} is no span that this decision can read; choose one of {', '.join(map(repr, self.spans)) or 'none'}, or give (start, end) in characters of the text")
            return self.spans[block]
        try:
            start, end = (int(i) for i in block)
        except (TypeError, ValueError):
            raise InputError(f"{block!r} is no span; give a name, or (start, end) in characters of the text") from None
        length, place = len(self.reading.transcript.text), self.event.position
        if not 0 <= start < end <= length:
            raise InputError(f"characters {start}:{end} do not lie in a text of {length}; give 0 <= start < end <= {length}")
        found = [int(i) for i in self.reading.encoded.tokens_in(start, end) if i < place]
        if not found:
            raise InputError(f"characters {start}:{end} stand where the decision cannot read them; it is written after character {int(self.reading.encoded.offsets[place, 0])}, so choose some before it")
        return ((found[0], found[-1] + 1),)


class Bench:
    """Asks a model about single decisions, one packed row a question.

    Args:
        model: the model.
        texts: id -> reading, or a function that reads the text when it is first asked about.
        means: reference means of a disjoint split.
        families: named sets of heads.

    Raises:
        InputError: for means or heads that are not this model's, and for a transcript of the reference split.
    """

    def __init__(self, model: DecisionModel, texts: Mapping[str, Reading | Callable[[], Reading]], means: ReferenceMeans, families: Mapping[str, HeadSet] | None = None):
        self.model, self.means = model, means
        if not texts:
            raise InputError("there is no transcript to explore; give at least one that is not in the reference split")
        for shape in {x.shape for x in means.means.values()}:
            if shape != (model.n_layers, model.n_heads, model.hooked.d_head):
                raise InputError(f"the means are of a model of {shape[0]} layers by {shape[1]} heads of width {shape[2]}, and {self.name} has {model.n_layers} by {model.n_heads} "
                                 f"of width {model.hooked.d_head}; make them with this model")
        for name in texts:
            if name in means.transcripts:
                raise InputError(f"transcript {name!r} is in the reference split, whose means its heads would be replaced by; leave it out")
        self.families: dict[str, HeadSet] = {}
        for name, heads in (families or {}).items():
            if strange := HeadSet(heads) - model.hooked.heads:
                raise InputError(f"the family {name!r} is of another model: {self._no_head(next(iter(strange)))}")
            self.families[name] = HeadSet(heads)
        self._texts, self._events, self._last = dict(texts), {}, None

    @property
    def name(self) -> str:
        """The model's name, without the folder it lies in."""
        return Path(self.model.name).name

    @property
    def transcripts(self) -> tuple[str, ...]:
        """The ids of the texts."""
        return tuple(self._texts)

    def _no_head(self, head: Head) -> str:
        return f"{head}: {self.name} has layers 0 to {self.model.n_layers - 1} and heads 0 to {self.model.n_heads - 1}; name one of those, as in L0H{self.model.n_heads - 1}"

    def heads(self, what: Heads | Iterable[Heads]) -> HeadSet:
        """Heads by name: "L1H7", "L1H7, L3H1", a family, "all heads", a `Head`, a `HeadSet`, or several of these.

        Raises:
            InputError: for a head that the model does not have, and for what is neither head nor family.
        """
        if isinstance(what, HeadSet):
            found = what
        elif isinstance(what, str):
            found = HeadSet(h for part in what.split(",") for h in self._named(part.strip()))
        elif isinstance(what, tuple) and len(what) == 2 and all(isinstance(i, int | np.integer) for i in what):
            found = HeadSet([what])
        else:
            found = HeadSet(h for part in what for h in self.heads(part))
        for head in found - self.model.hooked.heads:
            raise InputError(self._no_head(head))
        return found

    def _named(self, part: str) -> HeadSet:
        """A family, all heads, or heads with spaces between."""
        if part in self.families or part == ALL:
            return self.families.get(part, self.model.hooked.heads)
        try:
            return HeadSet(part.split() or [part])
        except InputError:
            known = f", or a family: {', '.join(self.families)}" if self.families else ""
            raise InputError(f"{part!r} is not a head: write L1H7 for layer 1, head 7, and several with commas between{known}") from None

    def reading(self, transcript: str) -> Reading:
        """A text, read the first time it is asked for; its keys and values are kept within the model's budget.

        Raises:
            InputError: for an unknown id, and a text that has no event of a kind with means.
            ExactnessError: if packed rows are not exact on it.
        """
        if transcript not in self._texts:
            near = difflib.get_close_matches(str(transcript), self._texts, 3) or list(self._texts)[:3]
            raise InputError(f"there is no transcript {transcript!r} here; {len(self._texts)} are, such as {', '.join(map(repr, near))}")
        if transcript not in self._events:
            found = self._texts[transcript]
            reading = found if isinstance(found, Reading) else found()
            events = tuple(e for e in reading.events if e.kind in self.means.means)
            if not events:
                raise InputError(f"transcript {transcript!r} has no decision event of a kind that has reference means ({', '.join(self.means.means)}); pick another")
            self.means.of(events[0], reading.transcript.group)
            check_events(self.model, reading, events)
            self._texts[transcript], self._events[transcript] = reading, events
        return self._texts[transcript]

    def events(self, transcript: str) -> tuple[DecisionEvent, ...]:
        """The events of a text whose kind has reference means, in order of position."""
        self.reading(transcript)
        return self._events[transcript]

    def margins(self, transcript: str) -> list[float]:
        """The clean margin of every event of a text, logits, from its prefill."""
        reading = self.reading(transcript)
        return [float(event_margin(reading, e)(reading.clean(e))) for e in self._events[transcript]]

    def decision(self, transcript: str, event: int) -> Decision:
        """One event, counted from 0; the last one that was asked for is kept.

        Raises:
            InputError: for an unknown id and for a number without an event.
        """
        if self._last is None or self._last[0] != (transcript, event):
            reading, events = self.reading(transcript), self.events(transcript)
            if isinstance(event, bool) or not isinstance(event, int | np.integer) or not 0 <= event < len(events):
                raise InputError(f"there is no event {event!r} in transcript {transcript!r}, which has {len(events)}; give a whole number from 0 to {len(events) - 1}")
            chosen = events[event]
            margin, zbar = event_margin(reading, chosen), self.means.of(chosen, reading.transcript.group)
            floor = float(margin(self._logits(reading, chosen, (Keep(HeadSet(), zbar),))))
            self._last = (transcript, event), Decision(reading, chosen, margin, zbar, self._logits(reading, chosen, ()), floor)
        return self._last[1]

    def _logits(self, reading: Reading, event: DecisionEvent, changes: tuple[Intervention, ...]) -> Float[Tensor, " vocabulary"]:
        """The logits at an event under one intervention: one branch, one call."""
        ((_, rows),) = branch_logits(self.model.hooked, reading.prefix, [Branch(event.position, (), changes)])
        return rows[0]

    @staticmethod
    def _changes(decision: Decision, off: HeadSet, block: Block | None, blocked: HeadSet) -> tuple[Intervention, ...]:
        """Heads off and a span blocked, as interventions of one branch; nothing at all where there is nothing to do."""
        spans = decision.tokens(block) if block is not None and len(blocked) else ()
        return (*((MeanAblate(off, decision.zbar),) if len(off) else ()), *(BlockReads(blocked, *span) for span in spans))

    def outcome(self, transcript: str, event: int, off: HeadSet = NONE, block: Block | None = None, blocked: HeadSet = NONE) -> Outcome:
        """Margins and next tokens of one decision, with heads off and a span blocked.

        Args:
            transcript: its id.
            event: number of the event, from 0.
            off: heads whose z is replaced by its reference mean, at the event's position.
            block: a span that `blocked` may not read there: its name, or `(start, end)` in characters of the whole text.
            blocked: the heads that may not read it; what is left of their attention sums to 1 again.

        Raises:
            InputError: see `Decision.tokens`, `decision` and `reading`.
        """
        decision = self.decision(transcript, event)
        changes = self._changes(decision, off, block, blocked)
        now = self._logits(decision.reading, decision.event, changes) if changes else decision.clean
        return Outcome(float(decision.margin(now)), decision.m, decision.m0, self._alternatives(decision, now))

    def _alternatives(self, decision: Decision, now: Float[Tensor, " vocabulary"]) -> tuple[Alternative, ...]:
        event, fixed = decision.event, decision.margin
        logits = [x.double().cpu().numpy() for x in (now, decision.clean)]
        shares = [x.double().softmax(-1).cpu().numpy() for x in (now, decision.clean)]
        listed = {fixed.chosen, *fixed.against, *(int(i) for x in logits for i in np.argsort(-x, kind="stable")[:TOP])}
        role = lambda i: "chosen" if i == fixed.chosen else "against" if i in fixed.against else "live" if i in event.alternatives else ""  # noqa: E731
        return tuple(Alternative(i, self.text_of(i), float(logits[0][i]), float(shares[0][i]), float(logits[1][i]), float(shares[1][i]), role(i))
                     for i in sorted(listed, key=lambda i: (-logits[0][i], i)))

    def text_of(self, token: int) -> str:
        """What a token decodes to; its name in the vocabulary where it is no whole character."""
        text = self.model.tokenizer.decode([token])
        return text if text and "\ufffd" not in text else str(self.model.tokenizer.convert_ids_to_tokens(token))

    def reads(self, transcript: str, event: int, heads: HeadSet, off: HeadSet = NONE, block: Block | None = None, blocked: HeadSet = NONE) -> Float[np.ndarray, " position"]:
        """Attention of the position that writes a decision to every position up to its own, the mean over some heads.

        Args:
            transcript: as in `outcome`.
            event: as in `outcome`.
            heads: whose; zeros for no head.
            off: as in `outcome`; what later heads read may depend on it.
            block: as in `outcome`.
            blocked: as in `outcome`.
        """
        decision = self.decision(transcript, event)
        branch = Branch(decision.event.position, (), self._changes(decision, off, block, blocked))
        return attention_row(self.model.hooked, decision.reading.prefix, branch, heads)
