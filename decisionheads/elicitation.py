"""Elicitation: from where on can the region of a code be had by asking, before it is written?

For every code that the reasoning mentions (see `cues`), the text is cut `k` tokens before the code,
`k = 1..most`, a cue that restates nothing is appended, and the margin of the code's region over all live
ones is read. *Elicitable*: right at some `k`. *Lead*: the largest `k` with right answers at every `1..k`.

Margins are logits, positive where the region's own token beats every live competitor; of a region that takes
several tokens, the margin of its weakest step. What a lead is held against: the same cuts with another note,
as many cuts before the mention, guessing, and whether the region's name already stood in the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from ._cache import Prefix
from ._keeping import kept
from ._processes import spread
from .branches import MEMORY, Branch, branch_logits
from .calibration import bootstrap_interval
from .cues import CuedCode, Target, cued_codes, formatted
from .errors import ExactnessError, InputError
from .labels import LabelSpace
from .model import DecisionModel, Reading
from .necessity import plain, share_limits
from .prefixes import Prefixes
from .transcripts import Encoded, Transcript, encode
from .views import Brief, Viewed

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray


@dataclass(frozen=True, eq=False, repr=False)
class CuedText(Brief):
    """A transcript that was read, with its codes and the margins at their cuts, `[cut]` for each code."""

    transcript: Transcript
    encoded: Encoded
    prefix: Prefix
    codes: tuple[CuedCode, ...]
    margins: tuple[Float[Array, " _"], ...]


class CodesRead(NamedTuple):
    """What `read_codes` gives: texts; codes and cuts that were left out, by reason; texts that were, by id; how many were asked."""

    texts: list[CuedText]
    dropped: Counter
    cuts_dropped: Counter
    set_aside: dict[str, str]
    asked: int


def cue_margins(model: DecisionModel, prefix: Prefix, jobs: Sequence[tuple[int, Target]], memory: int = MEMORY) -> Float[Array, " job"]:
    """The weakest step's margin of each `(tokens kept, target)` of one text, in logits."""
    found = np.zeros(len(jobs), np.float32)
    for i, logits in branch_logits(model.hooked, prefix, [Branch(p, t.tokens, (), t.ids) for p, t in jobs], memory):
        found[i] = jobs[i][1].weakest(logits)[0]
    return found


def read_codes(model: DecisionModel, items: Iterable[Transcript | Reading], labels: LabelSpace, *, cue: str, most: int, where: str,
               memory: int = MEMORY) -> CodesRead:
    """Read transcripts, in order of their ids, and ask at every cut of every code."""
    if where not in ("code", "answer"):
        raise InputError(f"unknown place {where!r} to count back from: expected code or answer")
    if most < 1:
        raise InputError("at least one cut is needed; give most=1 or more")
    found: list[CuedText] = []
    dropped, cuts_dropped, set_aside = Counter(), Counter(), {}
    items = sorted(items, key=lambda item: getattr(item, "transcript", item).id)
    ids = [getattr(item, "transcript", item).id for item in items]
    if len(set(ids)) < len(ids):
        raise InputError(f"id {Counter(ids).most_common(1)[0][0]!r} is used more than once; give each transcript its own")
    formatted(cue, 1)

    def ask(item: Transcript | Reading) -> tuple[CuedText | str | None, tuple[Counter, Counter]]:
        transcript, source = getattr(item, "transcript", item), _source(model, item)
        try:
            encoded = encode(transcript, model.tokenizer)
        except InputError as error:
            return str(error), (Counter(), Counter())
        codes, *left_out = cued_codes(transcript, labels, model.tokenizer, cue=cue, most=most, where=where, encoded=encoded, context=model.hooked.context)
        jobs = [(c.position, c.target) for code in codes for c in code.cuts]
        if not jobs:
            return None, (left_out[0], left_out[1])
        length = max(p for p, _ in jobs)
        prefix = item.prefix if isinstance(item, Reading) and len(item.prefix) >= length else _read(source, encoded, length)
        try:
            _check_row(model, prefix, *jobs[-1])
        except ExactnessError as error:
            return f"transcript {transcript.id}: {error}", (left_out[0], left_out[1])
        margins = cue_margins(model, prefix, jobs, memory)
        return CuedText(transcript, encoded, prefix, tuple(codes), tuple(np.split(margins, np.cumsum([len(c.cuts) for c in codes])[:-1]))), (left_out[0], left_out[1])

    def adopt(result):
        text, left_out = result
        return (replace(text, prefix=_source(model, items[0]).adopt(text.prefix)) if isinstance(text, CuedText) else text), left_out

    for name, (text, left_out) in zip(ids, spread(ask, items, unpack=adopt), strict=True):
        dropped.update(left_out[0]), cuts_dropped.update(left_out[1])
        if isinstance(text, CuedText):
            found.append(text)
        elif text is not None:
            set_aside[name] = text
    return CodesRead(found, dropped, cuts_dropped, set_aside, len(items))


def _source(model: DecisionModel, item: Transcript | Reading) -> Prefixes:
    """Where texts are read: where this one was, for what all of a run begin with is read there already."""
    return (item.prefix.source if isinstance(item, Reading) else None) or model.prefixes


def _read(source: Prefixes, encoded: Encoded, length: int) -> Prefix:
    return source.read(torch.tensor(encoded.ids[:length], dtype=torch.long, device=source.hooked.device), ())


def _check_row(model: DecisionModel, prefix: Prefix, position: int, target: Target) -> None:
    """Compare the last row of one cue with the plain model's logits; raises ExactnessError where they differ."""
    ids = torch.cat([prefix.ids[:position], torch.tensor(target.tokens, device=prefix.ids.device)])
    reference = model.hooked.prefill(ids, (len(ids) - 1,), shared=prefix).logits[0]
    row = next(logits for _, logits in branch_logits(model.hooked, prefix, [Branch(position, target.tokens)]))[-1]
    error = float((row - reference).abs().max() / reference.std())
    if not error <= model.hooked.limit:
        raise ExactnessError(f"the rows of a cue differ from the plain model by {error:.1e} of the logits' deviation (limit {model.hooked.limit:.0e})")


def leads(margins: Float[Array, "mention k"]) -> Int[Array, " mention"]:
    """The largest `k` with right answers at every `1..k`, 0 where `k = 1` is wrong already; a cut that was not measured (NaN) breaks no lead."""
    held = ~np.logical_or.accumulate(margins <= 0, axis=1) & np.isfinite(margins)
    return np.where(held.any(1), margins.shape[1] - held[:, ::-1].argmax(1), 0)


# -- the family ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Elicitation(Viewed):
    """What `elicit` found. Margins are logits, NaN where a mention has no such cut.

    Attributes:
        codes: the mentions, by transcript id, then in order of the answer; the arrays below follow them.
        margins: `k` tokens before the code in column `k - 1`, in the text as it is.
        note: the same with the note replaced; NaN where there is no note.
        before: at as many cuts before the mention, nearest first.
        named: whether the name of the region stood in what was kept.
        most, where: what was asked for.
        dropped, cuts_dropped: codes and cuts left out, by reason.
        set_aside: transcripts that could not be read, with the reason.
    """

    codes: tuple[CuedCode, ...]
    margins: Float[Array, "mention k"]
    note: Float[Array, "mention k"]
    before: Float[Array, "mention k"]
    named: Bool[Array, "mention k"]
    most: int
    where: str
    dropped: dict[str, int]
    cuts_dropped: dict[str, int]
    set_aside: dict[str, str]

    @property
    def elicitable(self) -> Bool[Array, " mention"]:
        """Right at some `k`."""
        return (self.margins > 0).any(1)

    @property
    def lead(self) -> Int[Array, " mention"]:
        """Tokens before the code, 0 where `k = 1` is wrong; see `leads`."""
        return leads(self.margins)

    @property
    def furthest(self) -> Int[Array, " mention"]:
        """The largest `k` that was measured: no lead can be longer."""
        return np.array([c.cuts[-1].k for c in self.codes], int)

    def summary(self) -> dict:
        """Shares with 95% limits over transcripts or groups, those of the lead of its mean; JSON-ready, None where there is nothing to count."""
        groups = np.unique([c.group for c in self.codes], return_inverse=True)[1]
        lead, furthest = self.lead, self.furthest
        low, high = bootstrap_interval(lead[:, None].astype(float), groups) if len(lead) else ([np.nan], [np.nan])
        capped = (lead == furthest) & (furthest < [c.distance for c in self.codes])
        nan = np.full_like(self.margins, np.nan)
        part = lambda margins: _counted(margins, groups)  # noqa: E731
        return {
            "mentions": len(self.codes), "transcripts": len({c.transcript for c in self.codes}), "most": self.most, "where": self.where,
            "elicitable": _share(self.elicitable, groups), "right": part(self.margins)["right"],
            "lead": {"median": plain(np.median(lead)) if len(lead) else None, "mean": plain(lead.mean()) if len(lead) else None, "low": plain(low[0]),
                     "high": plain(high[0]), "to_the_mention": int((lead == [c.distance for c in self.codes]).sum()), "capped": int(capped.sum())},
            "right_by_k": [{"tokens_before": k + 1, **_share(x[ok] > 0, groups[ok]), "note_replaced": plain(np.mean(n[np.isfinite(n)] > 0)) if np.isfinite(n).any() else None}
                           for k, (x, n) in enumerate(zip(self.margins.T, self.note.T, strict=True)) if (ok := np.isfinite(x)).any()],
            "baselines": {"note_replaced": part(self.note), "before_mention": part(self.before), "chance": plain(np.mean([c.chance for c in self.codes])) if len(self.codes) else None},
            "strata": {"named": part(np.where(self.named, self.margins, nan)), "not_named": part(np.where(self.named, nan, self.margins))},
            "dropped": {"codes": dict(sorted(self.dropped.items())), "cuts": dict(sorted(self.cuts_dropped.items())), "transcripts": dict(sorted(self.set_aside.items()))}}

    def to_frame(self) -> pd.DataFrame:
        """One row for each mention; shares are over its cuts."""
        import pandas as pd

        share = lambda x: [float((row[ok] > 0).mean()) if (ok := np.isfinite(row)).any() else np.nan for row in x]  # noqa: E731
        frame = pd.DataFrame({name: [getattr(c, name) for c in self.codes] for name in ("transcript", "group", "label", "region", "number", "start", "end", "distance", "chance")})
        return frame.assign(cuts=[len(c.cuts) for c in self.codes], elicitable=self.elicitable, lead=self.lead, furthest=self.furthest, right=share(self.margins),
                            note_right=share(self.note), before_right=share(self.before), before_any=(self.before > 0).any(1), named=self.named.any(1))

    def __repr__(self) -> str:
        if not self.codes:
            return f"Elicitation(no mention; dropped {self.dropped or 'none'})"
        s = self.summary()
        return (f"Elicitation({s['mentions']} mentions: {s['elicitable']['share']:.0%} elicitable, lead {s['lead']['median']:g} tokens before the {self.where} (median); "
                f"before the mention {s['baselines']['before_mention']['right'] or 0:.0%} right, chance {s['baselines']['chance']:.0%})")


def _share(yes: Bool[Array, " mention"], groups: Array) -> dict:
    k, n = int(yes.sum()), len(yes)
    low, high = share_limits(yes, groups) if n else (None, None)
    return {"k": k, "n": n, "share": plain(k / n) if n else None, "low": plain(low), "high": plain(high)}


def _counted(margins: Float[Array, "mention k"], groups: Array) -> dict:
    """Right among all cuts, and mentions right at some cut, where there are any."""
    there = np.isfinite(margins)
    some = there.any(1)
    return {"cuts": int(there.sum()), "right": plain((margins[there] > 0).mean()) if there.any() else None, "elicitable": _share((margins > 0).any(1)[some], groups[some])}


def elicit(model: DecisionModel, transcripts: Iterable[Transcript | Reading], labels: LabelSpace, *, cue: str, most: int = 40, where: str = "code",
           memory: int = MEMORY) -> Elicitation:
    """Ask for the region of every code that the reasoning mentions, at every cut between mention and code.

    Args:
        transcripts: what the model wrote; their order changes nothing.
        labels: the label space; a transcript's own candidates narrow it.
        cue: what is appended at a cut, with an optional `{number}` (of the code in its answer, from 1).
        most: cuts of one code at most.
        where: `code` (default): `k` counts tokens before the code, as a lead is defined, so that the first cuts lie in
            the answer, mid-line. `answer`: `k` counts tokens before the answer begins; for a model that answers the cue
            in the reasoning, and is thrown off it where its own line has just begun.
        memory: bytes that one pack of rows may take.

    Raises:
        InputError: for a cue that cannot be formatted, or restates a mention, and for ids used twice.
    """
    texts, dropped, cuts_dropped, set_aside, _ = read_codes(model, transcripts, labels, cue=cue, most=most, where=where, memory=memory)
    notes = _other_notes([t.transcript for t in texts])
    codes = [code for text in texts for code in text.codes]
    width = max((c.cuts[-1].k for c in codes), default=1)
    margins, note, before = (np.full((len(codes), width), np.nan, np.float32) for _ in range(3))
    named = np.zeros((len(codes), width), bool)
    row = 0

    def others(text: CuedText) -> tuple[Array, Array]:
        note = notes.get(text.transcript.id)
        measure = lambda: {"before": cue_margins(model, text.prefix, [(c.position, c.target) for code in text.codes for c in code.before], memory),  # noqa: E731
                           "note": _note_replaced(model, text, note, memory)}
        found = kept("before and note", [text.transcript.id, cue, where, most, note], measure)
        return found["before"], found["note"]

    for text, (early, swapped) in zip(texts, spread(others, texts), strict=True):
        for code, values in zip(text.codes, text.margins, strict=True):
            at = [c.k - 1 for c in code.cuts]
            margins[row, at], named[row, at] = values, [c.named for c in code.cuts]
            note[row, at], swapped = swapped[:len(at)], swapped[len(at):]
            before[row, :len(code.before)], early = early[:len(code.before)], early[len(code.before):]
            row += 1
    return Elicitation(tuple(codes), margins, note, before, named, most, where, dict(dropped), dict(cuts_dropped), set_aside)


def _other_notes(transcripts: Sequence[Transcript]) -> dict[str, str]:
    """For each transcript that has a note, the note of the next one, by id, of another group."""
    noted = [(t, t.text[s.start:s.end]) for t in transcripts for s in t.spans if s.name == "note" and s.end <= t.reasoning_start]
    found = {}
    for i, (t, _) in enumerate(noted):
        others = (noted[(i + j) % len(noted)] for j in range(1, len(noted)))
        found[t.id] = next((note for other, note in others if (other.group or other.id) != (t.group or t.id)), None)
    return {name: note for name, note in found.items() if note is not None}


def _note_replaced(model: DecisionModel, text: CuedText, note: str | None, memory: int) -> Float[Array, " cut"]:
    """Margins at every cut of every code with another note in the prompt; NaN where there is none, or the tokens after it change."""
    jobs = [(c.position, c.target) for code in text.codes for c in code.cuts]
    nothing = np.full(len(jobs), np.nan, np.float32)
    if note is None:
        return nothing
    t = text.transcript
    span = next(s for s in t.spans if s.name == "note" and s.end <= t.reasoning_start)
    other = encode(replace(t, prompt=t.prompt[:span.start] + note + t.prompt[span.end:], spans=(), token_ids=None), model.tokenizer)
    rest = len(text.encoded) - int(text.encoded.tokens_in(span.end, len(t.text))[0])
    longer = len(other) - len(text.encoded)
    room = model.hooked.context or 2**62
    if other.ids[-rest:].tolist() != text.encoded.ids[-rest:].tolist() or max(p + longer + len(target.tokens) for p, target in jobs) > room:
        return nothing
    return cue_margins(model, _read(text.prefix.source or model.prefixes, other, max(p for p, _ in jobs) + longer), [(p + longer, target) for p, target in jobs], memory)
