"""The evidence flip: does a code go when its evidence goes, and stay when another code's does?

A case is a code of a text, its evidence, a route, and a control edit of equal length. Cases are fixed from texts alone, before
any model writes. Then each arm's model writes after the unedited prompt; codes that *every* arm gives are kept, and each arm
writes again after both edits. *Flip*: the code is not in what was written (primary); at its decision, in the arm's own unedited
text read after the edited prompt, another live token is the best (secondary).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..corpora.notes import Note
from ..errors import InputError
from ..events import find_closers, find_events
from ..evidence.alignment import holm
from ..evidence.texts import decision
from ..generation import Generating, make_prompts
from ..labels import LabelSpace
from ..prompts import Prompt
from ..task_score import parse_answer
from ..transcripts import Span, Transcript, encode
from ..views import Viewed
from ..writing import Answering
from .edits import Change, Place, Route, Wording, change, controls, edit, evidence_of
from .statistics import blinded_variance, detectable_effect, difference, verdict

if TYPE_CHECKING:
    import pandas as pd

    from ..model import DecisionModel

NEAR_MISS = "near-miss evidence"  # a span that a transcript brings for a code: the text that a swap puts in the place of its evidence
SIDES = ("own", "control")


@dataclass(frozen=True)
class Source:
    """A text that can be edited: a note, or the prompt of a transcript.

    Attributes:
        id, document: of the text, and of what is independent of others.
        text, spans, bounds: what is edited, its spans, and the note within it.
        labels: gold codes.
        transcript: where it is one; else a note.
    """

    id: str
    document: str
    text: str
    spans: tuple[Span, ...]
    bounds: Place
    labels: tuple[str, ...]
    transcript: Transcript | None = None

    def __repr__(self) -> str:  # clinical text stays out of logs and tracebacks
        return f"Source({self.id!r}: {len(self.text)} characters)"


@dataclass(frozen=True)
class Case:
    """A code of a text whose evidence is edited by a route, and the control; `places` are `(own, control)`, changes likewise."""

    source: Source
    code: str
    route: Route
    places: tuple[list[Place], list[Place]]
    changes: tuple[list[Change], list[Change]]

    def name(self, side: int) -> str:
        return f"{self.source.id}/{self.code}/{self.route}/{SIDES[side]}"

    def __repr__(self) -> str:
        return f"Case({self.source.id!r}, {self.code}, {self.route})"


def sources_of(notes: Sequence[Note], transcripts: Sequence[Transcript]) -> list[Source]:
    """Texts that can be edited.

    Raises:
        InputError: for a transcript whose prompt does not hold one span named `note`.
    """
    found = [Source(n.id, n.subject_id or n.id, n.note, n.spans, (0, len(n.note)), n.labels) for n in notes]
    for t in transcripts:
        where = [(s.start, s.end) for s in t.spans if s.name == "note" and s.end <= t.reasoning_start]
        if len(where) != 1:
            raise InputError(f"transcript {t.id!r} has {len(where)} spans named 'note' in its prompt; mark the note, once, for it is what is edited")
        found.append(Source(t.id, t.group or t.id, t.prompt, tuple(s for s in t.spans if s.end <= t.reasoning_start), where[0], t.labels, t))
    return found


def cases_of(sources: Sequence[Source], labels: LabelSpace, routes: Sequence[Route], *, n: int = 0, seed: int = 0, shortest: int = 3,
             wording: Wording = Wording()) -> tuple[list[Case], Counter[str]]:
    """The cases of the first `n` texts that have one, in an order drawn by the seed, and why other cases are none. No model.

    Args:
        n: 0 for all texts.
        shortest: fewest characters of a code's evidence.
    """
    place = lambda s: hashlib.sha256(f"{seed}:{s.id}".encode()).hexdigest()  # noqa: E731
    order = sorted(sources, key=place)
    known: dict[str, list[tuple[str, str]]] = {}  # code -> evidence texts, of any document
    for source in order:
        for code, places in evidence_of(source.spans).items():
            known.setdefault(code, []).extend((source.document, source.text[a:b]) for a, b in places)
    cases, counts, used = [], Counter(), 0
    for source in order:
        if n and used == n:
            break
        mine = []
        for code, own in evidence_of(source.spans).items():
            why = _unfit(source, code, own, labels, shortest)
            others = {c: p for c, p in evidence_of(source.spans).items() if c != code}
            windows = None if why else controls(source.text, own, others, source.bounds, wording)
            if why or windows is None:
                counts[why or "no control window of equal length"] += len(routes)
                continue
            for route in routes:
                instead = _near_miss_text(source, code, labels, known) if route == "swap" else ""
                if instead is None:
                    counts["no near-miss whose evidence is known"] += 1
                    continue
                sides = tuple([change(route, source.text, p, wording, instead) for p in places] for places in (own, windows))
                mine.append(Case(source, code, route, (own, windows), sides))
        used += bool(mine)
        cases += mine
    return cases, counts


def _unfit(source: Source, code: str, own: Sequence[Place], labels: LabelSpace, shortest: int) -> str:
    if code not in labels:
        return "not in the label file"
    if source.labels and code not in source.labels:
        return "not a gold code of its text"
    if not all(source.bounds[0] <= a and b <= source.bounds[1] for a, b in own):
        return "evidence outside the note"
    return f"evidence of fewer than {shortest} characters" if sum(b - a for a, b in own) < shortest else ""


def _near_miss_text(source: Source, code: str, labels: LabelSpace, known: Mapping[str, Sequence[tuple[str, str]]]) -> str | None:
    """The evidence of a near-miss: what the text names for the code, else another document's, of a label of the same region that is not gold here."""
    for s in source.spans:
        if s.name == NEAR_MISS and s.of == code:
            return source.text[s.start:s.end]
    texts = [text for other in sorted(known) if other in labels and other != code and other not in source.labels and labels.region(other) == labels.region(code)
             for document, text in known[other] if document != source.document]
    if not texts:
        return None
    return texts[int(hashlib.sha256(f"{source.id}:{code}".encode()).hexdigest(), 16) % len(texts)]


# -- prompts ------------------------------------------------------------------------------------------------


def prompts_of(sources: Sequence[Source], cases: Sequence[Case], labels: LabelSpace, tokenizer, asked: Generating, context: int | None) -> dict[str, Prompt]:
    """Prompts by name, of unedited texts (their id) and of both sides of cases (`Case.name`); one that does not fit is left out."""
    plain = {s.id: (s, ()) for s in sources}
    wanted = plain | {c.name(side): (c.source, tuple(c.changes[side])) for c in cases for side in (0, 1)}
    notes, found = [], {}
    room = asked.longest if not asked.within_labels else Answering(asked.answers(labels, tokenizer, frozenset([tokenizer.eos_token_id])), asked.longest).longest
    for name, (source, changes) in wanted.items():
        text, spans, _ = edit(source.text, changes, source.spans)
        if source.transcript is None:
            notes.append(Note(name, text, source.labels, spans=tuple(s for s in spans if s.name != "note")))
            continue
        length = len(encode(Transcript(name, text, "", ""), tokenizer))
        if context is None or length + room <= context:
            found[name] = Prompt(text, spans, 0, (), length)
    if notes:
        found |= {name: p for name, p in make_prompts(notes, labels, tokenizer, asked, context).items() if not p.cut}
    return found


# -- outcomes -----------------------------------------------------------------------------------------------


def given(transcripts: Mapping[str, Transcript], labels: LabelSpace) -> dict[str, frozenset[str]]:
    """The codes that each text gives."""
    return {name: frozenset(parse_answer(t.answer, labels)[0]) for name, t in transcripts.items()}


def live_flips(model: DecisionModel, cases: Sequence[Case], prompts: Mapping[str, Prompt], unedited: Mapping[str, Transcript], labels: LabelSpace,
               known: Callable[[str], float | None] = lambda name: None, keep: Callable[[str, float], None] = lambda name, flip: None) -> dict[str, float]:
    """For both sides of each case, whether the best live token at the code's decision is another one: 1 or 0, NaN where there is no decision.

    The arm's own unedited reasoning and answer are read after the edited prompt.
    """
    closers = find_closers(unedited.values(), labels, model.tokenizer)
    found: dict[str, float] = {}
    for case in cases:
        base = unedited[case.source.id]
        for side in (0, 1):
            name = case.name(side)
            if (flip := known(name)) is None:
                text = replace(base, prompt=prompts[name].text, spans=prompts[name].spans, token_ids=None, candidates=case.source.transcript.candidates if case.source.transcript else None)
                event = decision(find_events(text, labels, model.tokenizer, closers=closers).events, case.code, "first")
                if event is None:
                    flip = float("nan")
                else:
                    logits = model.read(text, [event]).clean(event)[list(event.alternatives)]
                    flip = float(event.alternatives[int(logits.argmax())] != event.chosen)
                keep(name, flip)
            found[name] = flip
    return found


@dataclass(frozen=True, eq=False)
class Flip(Viewed):
    """The result.

    Attributes:
        table: a row for each corpus, route, outcome, arm and what it is held against.
        cases: a row for each case and arm; ids, codes and offsets, no text.
    """

    table: pd.DataFrame
    cases: pd.DataFrame

    def to_frame(self) -> pd.DataFrame:
        return self.table

    def __repr__(self) -> str:
        return f"Flip({len(self.cases)} cases in {self.cases.arm.nunique() if len(self.cases) else 0} arms)"


def conclude_flips(cases: pd.DataFrame, arms: Sequence[str], routes: Sequence[str], corpora: Mapping[str, str], *, smallest: float, alpha: float = 0.05, power: float = 0.8,
                   draws: int = 9_999, seed: int = 0) -> Flip:
    """D of each arm, and against the first arm's, per corpus, route and outcome.

    Holm's correction is over routes and corpora, within an outcome, an arm and what it is held against.

    Args:
        cases: columns corpus, document, text, code, route, arm, and of each outcome `absent` and `live` its two sides, such as `absent_own`.
        corpora: name -> "in domain" or "zero-shot".
    """
    import pandas as pd

    rows, tests = [], len(routes) * len(corpora)
    for outcome in ("absent", "live"):
        for arm in arms:
            for against in ("control edit", *(arms[:1] if arm != arms[0] else ())):
                family = []
                for corpus, read in corpora.items():
                    for route in routes:
                        here = cases[(cases["corpus"] == corpus) & (cases["route"] == route)] if len(cases) else cases
                        side = {a: here[here["arm"] == a].set_index(["document", "text", "code"]).sort_index() if len(here) else here for a in (arm, arms[0])}
                        mine = side[arm]
                        documents = np.unique(mine.index.get_level_values(0), return_inverse=True)[1] if len(mine) else np.zeros(0, int)
                        values = lambda a, s, side=side, outcome=outcome: side[a][f"{outcome}_{s}"].to_numpy(float) if len(side[a]) else np.zeros(0)  # noqa: E731
                        own, control = values(arm, "own"), values(arm, "control")
                        if against != "control edit":
                            own, control = own - control, values(arms[0], "own") - values(arms[0], "control")
                        family.append(({"corpus": corpus, "read": read, "route": route, "outcome": outcome, "arm": arm, "against": against},
                                       difference(own, control, documents, most=1.0 if against == "control edit" else 2.0, draws=draws, seed=seed),
                                       blinded_variance(own - control, documents)))
                for (about, found, variance), p in zip(family, holm([f.p for _, f, _ in family]), strict=True):
                    detectable = detectable_effect(variance, found.documents, alpha=alpha, power=power, tests=tests)
                    rows.append({**about, "rate": found.mean, "other": found.other, "D": found.difference, "low": found.difference_low, "high": found.difference_high, "p": found.p, "holm_p": p,
                                 "documents": found.documents, "cases": found.units, "undefined": found.undefined, "detectable": detectable, "verdict": verdict(found, p, detectable, smallest, alpha)})
    return Flip(pd.DataFrame(rows), cases)
