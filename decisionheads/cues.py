"""Cues: where a text can be cut to ask for the region of a code, and what is asked there. Tokens only, no model.

    reasoning: ... [mention] ... answer: ... [code]
                             ^ keep what stands before, append the cue, then the region's own tokens

A *mention* is where the reasoning speaks of what a code is for: a span `mention` of its label, else the first
place where the label's description or the label itself stands. Cuts lie between its end and the code. A cut is
left out, and counted, where the cue would change the tokens before it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from .errors import InputError
from .events import find_events, first_mentions
from .labels import LabelSpace, Mention
from .margin import Margin, fix_margin
from .transcripts import Encoded, Transcript, encode
from .views import Brief

WINDOW, NEAR = 24, 8  # tokens before a cut that are tokenized again with the cue, and those that must come out the same


class Step(NamedTuple):
    """One token at which regions part: the row of its logits, and columns of `Target.ids`."""

    row: int
    chosen: int
    against: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Target(Brief):
    """What is fed after a cut, and where the region is read.

    Attributes:
        tokens: the cue, then the region's own tokens but the last.
        ids: token ids whose logits are wanted.
        steps: one for each token of the region that has live competitors.
    """

    tokens: tuple[int, ...]
    ids: tuple[int, ...]
    steps: tuple[Step, ...]

    def weakest(self, logits: Float[torch.Tensor, "row id"]) -> tuple[float, int, Margin]:
        """The smallest margin of all steps against the strongest competitor, its row, and the margin itself, in columns of `ids`."""
        fixed = [(s.row, fix_margin(logits[s.row], s.chosen, s.against)) for s in self.steps]
        return min(((float(m(logits[row])), row, m) for row, m in fixed), key=lambda x: x[0])


class Cut(NamedTuple):
    """A place to ask at: `k` tokens before the code, `position` tokens kept; `named`: the region's name stands in what is kept."""

    k: int
    position: int
    target: Target
    named: bool


@dataclass(frozen=True, eq=False, repr=False)
class CuedCode(Brief):
    """A code of an answer with its mention.

    Attributes:
        transcript, group: whose.
        label, region: what was written.
        number: which code of the answer it is, from 1.
        start, end: the mention, in characters of the whole text.
        tokens: its positions, first and last.
        distance: cuts there are between mention and code, however many were asked for.
        cuts: those that were asked for, ascending in `k`.
        before: as many before the mention, back to the end of the prompt; their `k` counts from the mention.
        chance: 1 / live regions.
    """

    transcript: str
    group: str
    label: str
    region: str
    number: int
    start: int
    end: int
    tokens: tuple[int, int]
    distance: int
    cuts: tuple[Cut, ...]
    before: tuple[Cut, ...]
    chance: float


def cued_codes(transcript: Transcript, labels: LabelSpace, tokenizer, *, cue: str, most: int = 40, where: str = "code",
               encoded: Encoded | None = None, context: int | None = None) -> tuple[list[CuedCode], Counter, Counter]:
    """The codes of an answer that the reasoning mentions, with their cuts.

    Args:
        cue: a format with an optional `{number}`, the number of the code; a space follows unless it ends in one.
        most: cuts of one code at most.
        where: what `k` counts back from: see `elicit`.
        context: the longest text the model can read.

    Returns:
        the codes; codes left out, by reason; cuts left out, by reason.

    Raises:
        InputError: for a cue that cannot be formatted, or restates a mention or names a region.
    """
    encoded = encoded or encode(transcript, tokenizer)
    live = labels if transcript.candidates is None else labels.subset(transcript.candidates)
    text, begin, answer_at = transcript.text, transcript.reasoning_start, transcript.answer_start
    written = labels.mentions(text, begin)
    found: list[CuedCode] = []
    dropped, cuts_dropped = Counter(), Counter()
    first_written = max(1, int(encoded.tokens_in(begin, len(text))[0]))
    chance = 1 / len({live.regions[label] for label in live.labels})
    for number, code in enumerate(first_mentions(m for m in written if m.start >= answer_at), 1):
        asked, region = formatted(cue, number), labels.region(code.label)
        mention = _mention_of(transcript, code.label, labels, written)
        if code.label not in live or mention is None:
            dropped["not mentioned in the reasoning" if code.label in live else "not among the candidates"] += 1
            continue
        _check_cue(asked, text[mention.start:mention.end], region, labels)
        own = encoded.tokens_in(mention.start, mention.end)
        origin = int(encoded.tokens_in(*((code.start, code.end) if where == "code" else (answer_at, len(text))))[0])
        distance = origin - int(own[-1]) - 1
        named_at = min((m.start for m in written if labels.region(m.label) == region), default=len(text))
        ask = _Ask(encoded, text, asked, code.label, named_at, live, tokenizer, context)
        cuts = ask.cuts({k: origin - k for k in range(1, min(most, distance) + 1)})
        cuts_dropped.update(ask.reasons)
        if not cuts:
            dropped[max(ask.reasons, key=ask.reasons.get) if ask.reasons else "nothing stands between mention and code"] += 1
            continue
        before = ask.cuts({k: p for k in range(len(cuts)) if (p := int(own[0]) - k) >= first_written})
        found.append(CuedCode(transcript.id, transcript.group or transcript.id, code.label, region, number, mention.start, mention.end, (int(own[0]), int(own[-1])),
                              distance, tuple(cuts), tuple(before), chance))
    return found, dropped, cuts_dropped


def formatted(cue: str, number: int) -> str:
    """A cue as it is appended; raises InputError where it cannot be."""
    try:
        asked = cue.format(number=number)
    except (KeyError, IndexError, ValueError, AttributeError):
        raise InputError(f"the cue {cue!r} cannot be filled in: it may hold {{number}} and no other field") from None
    if not asked.strip():
        raise InputError("the cue is empty; give some words that ask for the region")
    return asked if asked[-1].isspace() else asked + " "


def _check_cue(asked: str, mention: str, region: str, labels: LabelSpace) -> None:
    said = next((m.label for m in labels.mentions(asked) if labels.region(m.label) == region), None)
    said = mention if mention.casefold() in asked.casefold() else said
    if said is not None:
        raise InputError(f"the cue {asked!r} restates {said!r}, so it would answer itself; ask by number alone")


def _mention_of(transcript: Transcript, label: str, labels: LabelSpace, written: Iterable[Mention]) -> Mention | None:
    """Where the reasoning first speaks of what a label is for."""
    begin, end = transcript.reasoning_start, transcript.answer_start
    spans = [s for s in transcript.spans if s.name == "mention" and s.of == label and begin <= s.start and s.end <= end]
    places = [(s.start, s.end) for s in spans] or [(m.start, m.end) for m in written if m.label == label and m.end <= end]
    described = labels.descriptions.get(label)
    if described and not spans and (found := re.search(rf"(?<!\w){re.escape(described)}(?!\w)", transcript.text[begin:end], re.IGNORECASE)):
        places.append((begin + found.start(), begin + found.end()))
    return Mention(label, *min(places)) if places else None


class _Ask:
    """Makes cuts for one code, and counts those that cannot be asked at by reason."""

    def __init__(self, encoded: Encoded, text: str, asked: str, label: str, named_at: int, live: LabelSpace, tokenizer, context: int | None):
        self.encoded, self.text, self.asked, self.label, self.named_at, self.live = encoded, text, asked, label, named_at, live
        self.tokenizer, self.context = tokenizer, context or 2**62
        self.targets: dict[tuple[int, ...], Target | str] = {}
        self.reasons: Counter = Counter()

    def cuts(self, positions: dict[int, int]) -> list[Cut]:
        """A cut for each `k -> position`, left out where the tokens that are kept would not stay as they are."""
        offsets, ids = self.encoded.offsets, self.encoded.ids
        left = {k: max(0, p - WINDOW) for k, p in positions.items()}
        kept = {k: self.text[offsets[left[k], 0]:offsets[p - 1, 1]] for k, p in positions.items()}
        texts = [kept[k] + self.asked + self.label + "\n" for k in positions]
        joined = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True) if texts else {"input_ids": [], "offset_mapping": []}
        found = []
        for (k, p), own, spans in zip(positions.items(), joined["input_ids"], joined["offset_mapping"], strict=True):
            n = next(i for i, (_, stop) in enumerate(spans) if stop > len(kept[k]))
            before = [int(i) for i, (a, b) in zip(ids[left[k]:p], offsets[left[k]:p], strict=True) if b > a][-NEAR:]
            tail = tuple(own[n:])
            if spans[n][0] < len(kept[k]) or own[max(0, n - len(before)):n] != before:
                self.reasons["the cue changes the tokens before it"] += 1
                continue
            if tail not in self.targets:
                self.targets[tail] = self._target(kept[k], Encoded(np.array(own), np.array(spans)), n)
            target = self.targets[tail]
            if isinstance(target, Target) and p + len(target.tokens) > self.context:
                target = "longer than the model can read"
            if isinstance(target, str):
                self.reasons[target] += 1
            else:
                found.append(Cut(k, p, target, bool(offsets[p - 1, 1] > self.named_at)))
        return found

    def _target(self, kept: str, encoded: Encoded, n: int) -> Target | str:
        """The region's tokens with their live competitors after the cue, which begins at token `n`; or why there are none."""
        pseudo = Transcript("cue", kept + self.asked, "", self.label + "\n")
        events = find_events(pseudo, self.live, self.tokenizer, encoded=encoded, closers=(int(encoded.ids[-1]),))
        steps = [e for e in events if e.kind == "region"]
        if not steps:
            return ", ".join(events.dropped_by_reason()) or "no other region is alive"
        ids = tuple(sorted({i for e in steps for i in (e.chosen, *e.competitors)}))
        column = {token: i for i, token in enumerate(ids)}
        return Target(tuple(map(int, encoded.ids[n:steps[-1].position + 1])), ids,
                      tuple(Step(e.position - n, column[e.chosen], tuple(column[c] for c in e.competitors)) for e in steps))
