"""Texts in which gold codes are teacher-forced, with the spans that humans marked for them.

Every arm reads the same codes and the same part of a note: where the prompt of one arm is too long for its
model, the note is cut at its end at the same character in all of them. A code any of whose evidence was cut is
*truncated*: it is counted, and never measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..corpora.notes import EVIDENCE, Note
from ..decisions import DecisionEvent, Kind
from ..errors import InputError
from ..events import find_events
from ..generation import Generating
from ..labels import LabelSpace
from ..prompts import Prompter
from ..transcripts import Encoded, Transcript, encode

Asked = Literal["first", "region", "label", "departure"]
TRUNCATED, NO_CODE, OUTSIDE, NOT_WRITTEN = "truncated", "evidence of no code", "evidence outside the note", "not in the answer"
NOT_LABEL, NO_GOLD, TOO_LONG = "not in the label file", "no gold code is in the label file", "longer than the model's context"
SLACK = 8  # tokens: an answer may be cut otherwise where it follows its prompt


@dataclass(frozen=True)
class EvidenceText:
    """A text whose answer gives gold codes.

    Attributes:
        transcript: its spans are `note`, `evidence` (of a code), and any others.
        truncated: codes some of whose evidence lies beyond the length limit.
    """

    transcript: Transcript
    truncated: frozenset[str] = frozenset()

    @property
    def document(self) -> str:
        """What is independent of other texts: the patient, or where none is given the text itself."""
        return self.transcript.group or self.transcript.id


@dataclass(frozen=True)
class Unit:
    """A code of a text, with its evidence and the decision for it.

    Attributes:
        code: as it is written in the answer.
        event: the decision that is looked at.
        spans: characters of its evidence.
    """

    code: str
    event: DecisionEvent
    spans: tuple[tuple[int, int], ...]


def gold_answer(codes: Sequence[str], asked: Generating) -> str:
    """An answer that gives these codes, in the form in which answers are generated: cue, codes, a line break."""
    return f"{asked.cue} {f'{asked.between} '.join(codes)}\n"


def texts_of_notes(notes: Sequence[Note], labels: LabelSpace, tokenizers: Sequence, contexts: Sequence[int | None], asked: Generating) -> tuple[list[list[EvidenceText]], Counter[str]]:
    """A text for each arm and each note that has a gold code of the label space, and counts of notes that have none.

    Args:
        tokenizers, contexts: of each arm; a context of None has no limit.
        asked: how prompts and answers are written.

    Raises:
        InputError: where candidate list, instruction and answer do not fit a context, or the answer would be cut.
    """
    prompters = [Prompter(labels, tokenizer, asked.layout) for tokenizer in tokenizers]
    found, counts = [[] for _ in prompters], Counter()
    for note in notes:
        codes = [code for code in note.labels if code in labels]
        if not codes:
            counts[NO_GOLD] += 1
            continue
        answer = gold_answer(codes, asked)
        rooms = [len(tokenizer(answer, add_special_tokens=False)["input_ids"]) + SLACK for tokenizer in tokenizers]
        kept = note
        while True:
            prompts = [p.prompt(kept, room, context) for p, room, context in zip(prompters, rooms, contexts, strict=True)]
            cut = max(p.cut for p in prompts)
            if not cut:
                break
            kept = cut_note(kept, len(kept.note) - cut)
        lost = frozenset(s.of for s in note.spans if s.name == EVIDENCE and s.end > len(kept.note))
        for side, prompt, tokenizer, context in zip(found, prompts, tokenizers, contexts, strict=True):
            text = Transcript(note.id, prompt.text, "", answer, None, note.labels, note.subject_id, prompt.spans)
            if context is not None and len(encode(text, tokenizer)) > context:
                raise InputError(f"note {note.id!r}: its answer would be cut at the {context} tokens that the model can read; shorten the note")
            side.append(EvidenceText(text, lost))
    return found, counts


def cut_note(note: Note, keep: int) -> Note:
    """The first `keep` characters of a note; a part of a span is not what it names, so that is left out, but sections end at the cut."""
    spans = tuple(s._replace(end=min(s.end, keep)) for s in note.spans if s.end <= keep or s.name == "section" and s.start < keep)
    return replace(note, note=note.note[:keep], spans=spans)


def texts_of_transcripts(transcripts: Sequence[Transcript], tokenizers: Sequence, contexts: Sequence[int | None]) -> list[list[EvidenceText]]:
    """A text for each arm and transcript; what is written in it is read as it stands, in each arm's own tokens.

    A text that is too long for one of the models is truncated in all of them.

    Raises:
        InputError: for a transcript without a span named `note`.
    """
    for t in transcripts:
        if not any(s.name == "note" for s in t.spans):
            raise InputError(f"transcript {t.id!r} has no span named 'note', so nothing can be renormalised over it; add one to its spans")
    texts = [replace(t, token_ids=None) for t in transcripts]  # they are those of one model
    marked = lambda t: frozenset(s.of for s in t.spans if s.name == EVIDENCE)  # noqa: E731
    long = {t.id for t in texts for tokenizer, context in zip(tokenizers, contexts, strict=True) if context is not None and len(encode(t, tokenizer)) > context}
    return [[EvidenceText(t, marked(t) if t.id in long else frozenset()) for t in texts] for _ in tokenizers]


def units_of(text: EvidenceText, labels: LabelSpace, tokenizer, encoded: Encoded, closers: Sequence[int], kind: Asked = "first") -> tuple[list[Unit], Counter[str]]:
    """The codes that have evidence and a decision, and why others have none; every code counts once, under its first reason.

    Args:
        kind: `first`: the code's primary region event, else its departure, else its first label event; or a kind of event.
    """
    t = text.transcript
    notes = [(s.start, s.end) for s in t.spans if s.name == "note"]
    marked: dict[str, list[tuple[int, int]]] = {}
    for s in t.spans:
        if s.name == EVIDENCE:
            marked.setdefault(s.of, []).append((s.start, s.end))
    for code in text.truncated:
        marked.setdefault(code, [])
    found = find_events(t, labels, tokenizer, encoded=encoded, closers=closers)
    written = {m.label for m in labels.mentions(t.text, t.answer_start)}
    units, reasons = [], Counter()
    for code, spans in marked.items():
        event = decision(found.events, code, kind)
        inside = [s for s in spans if any(a <= s[0] and s[1] <= b for a, b in notes)]
        if code in text.truncated:
            reasons[TRUNCATED] += 1
        elif not code:
            reasons[NO_CODE] += 1
        elif code not in labels or (t.candidates is not None and code not in t.candidates):
            reasons[NOT_LABEL] += 1
        elif code not in written:
            reasons[NOT_WRITTEN] += 1
        elif len(inside) < len(spans):
            reasons[OUTSIDE] += 1
        elif event is None:
            why = next((d.reason for d in found.dropped if d.label == code), None)
            reasons[f"no {'' if kind == 'first' else kind + ' '}decision" + (f" ({why})" if why else "")] += 1
        else:
            units.append(Unit(code, event, tuple(sorted(set(inside)))))
    return units, reasons


def decision(events: Sequence[DecisionEvent], code: str, kind: Asked) -> DecisionEvent | None:
    """The decision for a code that is looked at; None if it has none of that kind."""
    kinds: tuple[Kind, ...] = ("region", "departure", "label") if kind == "first" else (kind,)
    own = [e for e in events if e.label == code and e.primary]
    return next((e for k in kinds for e in own if e.kind == k), None)
