"""Heads that make a region elicitable: what they do where the region can first be had by asking.

The *lead cut* of a mention is the largest `k` of its lead, the earliest point from which its region can be had.
There z of one head is replaced by its mean, the tokens after it are run again, and

    effect = margin(clean) - margin(ablated)

of the region after the cue, at the step and against the competitor that were the closest in the clean run.
`at="cut"` (default) ablates at the last token that is kept: what a head lays down there for whoever asks. Nulls are
other cuts of the same mention, where the region can be had as well, at tokens of no label and not of the mention.
`at="cue"` ablates where the region is read out, the last token of the cue. There every cut after the mention asks and
is answered alike, so nulls are cuts before the mention, and the margin of whatever the cue is answered with there:
usually a smaller one, which the summary then calls *unbalanced*, and p-values rest on how effects grow with margins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from ._cache import Prefix
from ._keeping import kept
from ._processes import spread
from .ablation import MINIMUM
from .branches import MEMORY, Branch, branch_logits, clean_z
from .calibration import LEAST, MOST, Calibration, Sets, bootstrap_interval, calibrate, slopes
from .cues import Target
from .elicitation import CodesRead, CuedText, leads, read_codes
from .errors import InputError
from .heads import HeadSet
from .interventions import Intervention, Keep, MeanAblate
from .knock_in import random_heads
from .labels import LabelSpace
from .margin import Margin, fix_margin
from .model import DecisionModel
from .necessity import plain
from .scoring import head_table
from .survey import split
from .transcripts import Transcript
from .views import Brief, Viewed

Array = np.ndarray
MOST_CUTS = 200  # of one code


@dataclass(frozen=True, eq=False, repr=False)
class Member(Brief):
    """A cut at which heads are ablated; `row` and `margin` (in columns of `target.ids`) were fixed in the clean run."""

    position: int
    target: Target
    row: int
    margin: Margin
    value: float


@dataclass(frozen=True, eq=False, repr=False)
class LeadCut(Brief):
    """The lead cut of one mention and its nulls, nearest in margin first; none where fewer than two are to be had."""

    text: CuedText
    event: Member
    nulls: tuple[Member, ...]
    chance: float


@dataclass(frozen=True, eq=False)
class ElicitationHeads(Viewed):
    """The heads of the elicitation family.

    Attributes:
        table: every head, ranked by calibrated statistic; the columns of `heads.csv` but for attributions.
        selected: heads with `q <= alpha` and an effect of at least `delta` of the median `m - m0`.
        layers: one row for each layer: how many are selected, and its part of all supporting effects.
        calibration: statistics and null distribution.
        summary: counts, margins and held-out figures; JSON-ready. What was left out is counted over all splits.
    """

    table: pd.DataFrame
    selected: HeadSet
    layers: pd.DataFrame
    calibration: Calibration
    summary: dict

    def to_frame(self) -> pd.DataFrame:
        """Every head, ranked; `plots.effect_map` and `plots.ranked_heads` draw it."""
        return self.table

    def __repr__(self) -> str:
        s = self.summary
        return f"ElicitationHeads(at the {s['at']}: {self.selected!r}; {s['events']} mentions, m {s['m']:.2f} and m0 {s['m0']:.2f} logits)"


def elicitation_heads(model: DecisionModel, transcripts: Sequence[Transcript] | Mapping[str, Sequence[Transcript] | CodesRead], labels: LabelSpace, *, cue: str, most: int = MOST_CUTS, where: str = "code",
                      at: str = "cut", alpha: float = 0.05, delta: float = 0.05, seed: int = 0, draws: int = 9_999, minimum: int = MINIMUM,
                      random_sets: int = 20, memory: int = MEMORY) -> ElicitationHeads:
    """Ablate every head at the lead cut of every mention with a lead of 2 or more, and calibrate against nulls.

    Means of both sides and slopes come from the reference split, effects and calibration from the selection split,
    and what is called held out from the evaluation split.

    Args:
        transcripts: all of them, to be split (see `survey.split`), or the splits by name; a split may have been read
            with `elicitation.read_codes` already.
        cue: see `elicitation.elicit`.
        where: see `elicitation.elicit`.
        most: cuts of one code at most; a lead that is as long as this ends at no mention and is left out.
        at: where z is replaced.
        alpha: see `survey.Options`.
        delta: see `survey.Options`.
        draws: see `survey.Options`.
        minimum: fewest lead cuts of the reference split.
        random_sets: random sets of heads that the selected ones are held against.

    Raises:
        InputError: for too few lead cuts in any split, and whatever `elicit` raises.
    """
    if at not in ("cut", "cue"):
        raise InputError(f"unknown place {at!r} to ablate at: expected cut or cue")
    left_out: Counter = Counter()
    set_aside: dict[str, str] = {}
    cuts: dict[str, list[LeadCut]] = {}
    for name, part in (transcripts if isinstance(transcripts, Mapping) else split(transcripts, seed)).items():
        read = part if isinstance(part, CodesRead) else read_codes(model, part, labels, cue=cue, most=most, where=where, memory=memory)
        cuts[name] = _cuts_of(model, read.texts, labels, at, left_out, memory)
        left_out.update(read.dropped), set_aside.update(read.set_aside)
        fewest = minimum if name == "reference" else 2
        if len(cuts[name]) < fewest:
            raise InputError(f"only {len(cuts[name])} lead cuts in the {name} split of {read.asked} transcripts and {fewest} are needed; add transcripts")
    reference, selection = cuts["reference"], cuts["selection"]
    sides = [c.event for c in reference], [m for c in reference for m in c.nulls]
    if len(sides[1]) < 2:
        raise InputError("the reference split has no null cuts: nothing but the mention and labels stands between mention and code; ask with where='code'")
    zbar, null_zbar = (_mean_z(model, [(c.text, m) for c in reference for m in (c.nulls if null else (c.event,))], at) for null in (False, True))
    measured = lambda cuts, members, z: spread(lambda c: _kept(model, c.text, members(c), z, at, memory), cuts, by=lambda c: c.text.transcript.id)  # noqa: E731
    nulls = measured([c for c in reference if c.nulls], lambda c: c.nulls, null_zbar)
    slope = slopes(np.concatenate([n[2] for n in nulls]), np.concatenate([n[0] for n in nulls]))

    names = sorted({c.text.transcript.id for c in selection})
    owner = np.array([names.index(c.text.transcript.id) for c in selection])
    events = measured(selection, lambda c: (c.event,), zbar)
    matched = measured(selection, lambda c: c.nulls, null_zbar)
    m, m0, effects = (np.concatenate([e[i] for e in events]) for i in range(3))
    kept = [i for i, n in enumerate(matched) if len(n[0])]
    members = [np.concatenate([effects[i:i + 1], matched[i][2]]) - np.concatenate([m[i:i + 1], matched[i][0]])[:, None] * slope for i in kept]
    if not kept:
        raise InputError("no lead cut of the selection split has two null cuts; add transcripts")
    found = calibrate({"elicitation": Sets(tuple(members), owner[kept])}, draws=draws, seed=seed)["elicitation"]
    low, high = bootstrap_interval(effects, owner, seed=seed)
    columns = {"effect": effects.mean(0), "ci_low": low, "ci_high": high, "null_effect": np.concatenate([n[2] for n in matched]).mean(0)}
    shape = model.n_layers, model.n_heads
    table = head_table("elicitation", shape, columns, found, alpha, delta * max(0.0, float(np.median(m - m0))))
    selected = HeadSet(zip(*(table.loc[table.selected, c] for c in ("layer", "head")), strict=True))
    apart = np.array([m[i] - matched[i][0].mean() for i in kept])
    deviation = float(np.concatenate([m, *(matched[i][0] for i in kept)]).std())
    balance = float(apart.mean()) / deviation if deviation else 0.0
    groups = Counter(c.text.transcript.group or c.text.transcript.id for c in selection)
    return ElicitationHeads(table, selected, _layers(table, shape[0]), found, {
        "at": at, "where": where, "transcripts": len(names), "groups": len(groups), "events": len(selection), "reference_events": len(reference),
        "calibrated_events": len(kept), "left_out": dict(sorted(left_out.items())), "set_aside": set_aside, "m": plain(m.mean()), "m0": plain(m0.mean()),
        "balance": {"margin": plain(balance)}, "unbalanced": abs(balance) > 0.1, "set_size": len(selected), "heads": len(table),
        "held_out": _held_out(model, cuts["evaluation"], selected, zbar, at, seed, random_sets, memory)})


# -- lead cuts and their nulls ------------------------------------------------------------------------


def _cuts_of(model: DecisionModel, texts: Sequence[CuedText], labels: LabelSpace, at: str, left_out: Counter, memory: int) -> list[LeadCut]:
    """The lead cuts of texts; codes without one are counted."""
    by_id = {text.transcript.id: text for text in texts}
    here = lambda x: ([replace(c, text=by_id[c.text.transcript.id]) for c in x[0]], x[1])  # noqa: E731
    found = spread(lambda text: _lead_cuts(model, text, labels, at, memory), texts, unpack=here)
    for _, without in found:
        left_out.update(without)
    return [c for cuts, _ in found for c in cuts]


def _lead_cuts(model: DecisionModel, text: CuedText, labels: LabelSpace, at: str, memory: int) -> tuple[list[LeadCut], Counter]:
    """The lead cuts of a text with their nulls; and codes without, counted by reason."""
    found, left_out = [], Counter()
    inside = np.zeros(len(text.encoded), bool)
    for mention in labels.mentions(text.transcript.text, text.transcript.reasoning_start):
        inside[text.encoded.tokens_in(mention.start, mention.end)] = True
    for code, values in zip(text.codes, text.margins, strict=True):
        row = np.full((1, code.cuts[-1].k), np.nan, np.float32)
        row[0, [c.k - 1 for c in code.cuts]] = values
        lead = int(leads(row)[0])
        if lead < 2 or lead == code.cuts[-1].k < code.distance:
            left_out["its lead is shorter than 2" if lead < 2 else "its lead is longer than was asked for"] += 1
            continue
        event = next(c for c in code.cuts if c.k == lead)
        first, last = code.tokens
        if at == "cut":
            others = [c for c, value in zip(code.cuts, values, strict=True) if c is not event and value > 0
                      and not inside[c.position - 1] and not first <= c.position - 1 <= last]
        else:
            others = list(code.before)
        jobs = [(event.position, event.target), *((c.position, c.target) for c in others)]
        logits = dict(branch_logits(model.hooked, text.prefix, [Branch(p, t.tokens, (), t.ids) for p, t in jobs], memory))
        members = [_member(jobs[i], logits[i], answered=at == "cue" and i > 0) for i in range(len(jobs))]
        nulls = sorted(members[1:], key=lambda x: abs(x.value - members[0].value))[:MOST]  # stable: of two as near, the one nearer to the code
        found.append(LeadCut(text, members[0], tuple(nulls) if len(nulls) >= LEAST else (), code.chance))
    return found, left_out


def _member(job: tuple[int, Target], logits: Float[torch.Tensor, "row id"], answered: bool) -> Member:
    """A cut with its margin: of the region itself, or, `answered`, of what wins at the first step against what comes second."""
    position, target = job
    if not answered:
        value, row, margin = target.weakest(logits)
        return Member(position, target, row, margin, value)
    step = target.steps[0]
    alive = (step.chosen, *step.against)
    best = max(alive, key=lambda i: float(logits[step.row, i]))
    margin = fix_margin(logits[step.row], best, alive)
    return Member(position, target, step.row, margin, float(margin(logits[step.row])))


# -- ablation -------------------------------------------------------------------------------------------


def _places(model: DecisionModel, text: CuedText, members: Sequence[Member], at: str) -> Iterator[tuple[Prefix, list[tuple[int, Branch, int]]]]:
    """Prefixes, each with `(member, branch from the ablated token on, what turns a row of the target into one of the branch)`."""
    if at == "cut":
        ids = text.prefix.ids
        yield text.prefix, [(i, Branch(m.position - 1, (int(ids[m.position - 1]), *m.target.tokens), (), m.target.ids), 1) for i, m in enumerate(members)]
        return
    for i, m in enumerate(members):  # each has a cue of its own in front, so they are run one after the other
        fed = torch.tensor(m.target.tokens[: m.row + 1], dtype=torch.long, device=text.prefix.ids.device)
        prefix = model.hooked.prefill(torch.cat([text.prefix.ids[: m.position], fed]), shared=text.prefix)
        yield prefix, [(i, Branch(m.position + m.row, m.target.tokens[m.row:], (), m.target.ids), -m.row)]


def _changed(branch: Branch, *changes: Intervention) -> Branch:
    return Branch(branch.position, branch.tokens, changes, branch.ids)


def _mean_z(model: DecisionModel, members: Sequence[tuple[CuedText, Member]], at: str) -> Float[Array, "layer head d_head"]:
    """Mean z at the ablated token, in float64, as float32."""
    of_member = lambda x: [clean_z(model.hooked, prefix, [b.position for _, b, _ in jobs]).double().cpu() for prefix, jobs in _places(model, x[0], (x[1],), at)]  # noqa: E731
    z = [values for found in spread(of_member, members, by=lambda x: x[0].transcript.id) for values in found]
    return torch.cat(z).mean(0).float().numpy()


def _kept(model: DecisionModel, text: CuedText, members: Sequence[Member], zbar: Array, at: str, memory: int) -> tuple[Array, Array, Array]:
    """`_measure`, or what the same run measured before."""
    about = [text.transcript.id, at, *(x for m in members for x in (m.position, m.row, m.margin.chosen, m.margin.against, m.target.tokens)), zbar]
    found = kept("lead cuts", about, lambda: dict(zip(("m", "m0", "effects"), _measure(model, text, members, zbar, at, memory), strict=True)))
    return found["m"], found["m0"], found["effects"]


def _measure(model: DecisionModel, text: CuedText, members: Sequence[Member], zbar: Float[Array, "layer head d_head"], at: str,
             memory: int) -> tuple[Float[Array, " member"], Float[Array, " member"], Float[Array, "member flat"]]:
    """Clean margins, margins with every head ablated, and the effect of each head in (layer, head) order; 0 where a layer has no heads."""
    singles = list(model.hooked.heads)
    found = np.zeros((len(members), 2 + len(singles)))
    for prefix, jobs in _places(model, text, members, at) if members else ():
        changes = [(), (Keep(HeadSet(), zbar),), *((MeanAblate(HeadSet([head]), zbar),) for head in singles)]
        branches = [_changed(branch, *change) for _, branch, _ in jobs for change in changes]
        for n, logits in branch_logits(model.hooked, prefix, branches, memory):
            i, _, shift = jobs[n // len(changes)]
            found[i, n % len(changes)] = float(members[i].margin(logits[members[i].row + shift]))
    effects = np.zeros((len(members), model.n_layers, model.n_heads))
    layer, head = (list(x) for x in zip(*singles, strict=True))
    effects[:, layer, head] = found[:, :1] - found[:, 2:]
    return found[:, 0], found[:, 1], effects.reshape(len(members), -1)


def _held_out(model: DecisionModel, cuts: Sequence[LeadCut], heads: HeadSet, zbar: Array, at: str, seed: int, sets: int, memory: int) -> dict:
    """How often the region is still right at lead cuts of other transcripts without the selected heads, and without as many others."""
    rng = np.random.default_rng(seed)
    drawn = [heads, *(random_heads(heads, model.n_layers, model.n_heads, rng) for _ in range(sets))] if len(heads) else []

    def still(c: LeadCut) -> list[bool]:
        found = [False] * len(drawn)
        for prefix, ((_, branch, shift),) in _places(model, c.text, (c.event,), at):
            for i, logits in branch_logits(model.hooked, prefix, [_changed(branch, MeanAblate(h, zbar)) for h in drawn], memory):
                found[i] = _still_right(c.event.target, logits, shift)
        return found

    right = list(zip(*spread(still, cuts, by=lambda c: c.text.transcript.id), strict=True)) or [[] for _ in drawn]
    share = lambda x: plain(np.mean(x)) if len(x) else None  # noqa: E731
    return {"events": len(cuts), "right_without_selected": share(right[0]) if drawn else None, "right_without_random": share(np.ravel(right[1:])) if drawn else None,
            "chance": share([c.chance for c in cuts])}


def _still_right(target: Target, logits: Float[torch.Tensor, "row id"], shift: int) -> bool:
    """Whether every step from the first row of a branch on still prefers the region; steps before it were not touched."""
    return all(float(fix_margin(logits[s.row + shift], s.chosen, s.against)(logits[s.row + shift])) > 0 for s in target.steps if s.row + shift >= 0)


def _layers(table: pd.DataFrame, n_layers: int) -> pd.DataFrame:
    """For each layer: selected heads, and its part of all supporting effects."""
    supporting = table.assign(effect=table["effect"].clip(lower=0)).groupby("layer")
    part = supporting["effect"].sum().reindex(range(n_layers), fill_value=0.0)
    return pd.DataFrame({"layer": part.index, "selected": supporting["selected"].sum().reindex(range(n_layers), fill_value=0).to_numpy(),
                         "effect_share": (part / part.sum()).to_numpy() if part.sum() else np.nan})
