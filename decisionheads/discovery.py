"""Discovery: from what a model wrote to a calibrated table of the heads that decide.

Three disjoint splits by transcript (by `group` where it is given): *reference* gives means, closers,
template and slopes; *selection* gives effects and calibration; *evaluation* judges what was selected.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from tqdm import tqdm

from .ablation import Measured, Probe, ReferenceMeans, event_margin, measure, noise_floor
from .attribution import attribute
from .branches import MEMORY
from .calibration import Calibration, MatchedSets, Sets, bootstrap_interval, calibrate
from .errors import ExactnessError, InputError
from .events import Kind, find_closers
from .heads import Head, HeadSet
from .held_out import evaluate, rounded
from .labels import LabelSpace
from .margin import Margin
from .model import DecisionModel
from .null_tokens import template_ids
from .prefixes import Prefixes
from .survey import Options, Survey, match_kind, null_probe, survey
from .survey import reference as reference_of
from .transcripts import Transcript, encode, prompt_ids

SHARES = (0.2, 0.6)  # reference up to the first, selection up to the second, evaluation after it
EXPLORATORY = 24  # transcripts, below which a result is headed so


@dataclass(frozen=True, eq=False)
class KindResult:
    """What was found for one kind of event.

    Attributes:
        table: every head, ranked by calibrated statistic; the columns of `heads.csv`.
        opposing: the same columns for heads that oppose the decision, tested by themselves.
        selected: heads with `q <= alpha` and an effect of at least `delta` of the median `m - m0`.
        calibration: statistics and null distribution.
        matched: the matched sets.
        summary: counts and held-out figures, as in `summary.json`.
    """

    table: pd.DataFrame
    opposing: pd.DataFrame
    selected: HeadSet
    calibration: Calibration
    matched: MatchedSets
    summary: dict


@dataclass(frozen=True, eq=False)
class Discovery:
    """The result of `discover`.

    Attributes:
        kinds: kind -> result.
        shape: layers and heads of the model.
        model: its name.
        options: what was asked for.
        events: one row for each scored event of the selection split.
        effects: `[event, layer, head]` exact effects of those events, logits.
        set_aside: transcripts that could not be used, with the reason.
        warnings: sentences that belong beside every number.
        splits: ids of the transcripts of each split.
    """

    kinds: dict[Kind, KindResult]
    shape: tuple[int, int]
    model: str
    options: Options
    events: pd.DataFrame
    effects: np.ndarray
    set_aside: dict[str, str]
    warnings: tuple[str, ...]
    splits: dict[str, list[str]]

    def to_frame(self) -> pd.DataFrame:
        """Every head of every kind."""
        return pd.concat([r.table for r in self.kinds.values()], ignore_index=True)

    def __repr__(self) -> str:
        found = "; ".join(f"{kind}: {', '.join(map(str, list(r.selected)[:4])) or 'none'}{' ...' if len(r.selected) > 4 else ''}" for kind, r in self.kinds.items())
        return f"Discovery({self.model}, {self.shape[0]} x {self.shape[1]} heads; selected {found})"


def split(transcripts: Sequence[Transcript], seed: int) -> dict[str, list[Transcript]]:
    """Reference, selection and evaluation by a seeded hash of group or id; a group is never cut."""
    key = lambda name: hashlib.sha256(f"{seed}:{name}".encode()).hexdigest()  # noqa: E731
    names = sorted({t.group or t.id for t in transcripts}, key=key)
    place = {name: (i + 0.5) / len(names) for i, name in enumerate(names)}
    found: dict[str, list[Transcript]] = {"reference": [], "selection": [], "evaluation": []}
    for t in transcripts:
        at = place[t.group or t.id]
        found["reference" if at < SHARES[0] else "selection" if at < SHARES[1] else "evaluation"].append(t)
    return found


def discover(model: DecisionModel, transcripts: Sequence[Transcript], labels: LabelSpace, *, memory: int = MEMORY,
             progress: bool = False, store=None, **options) -> Discovery:
    """Find, calibrate and check the heads that decide.

    Args:
        model: the model that wrote the transcripts.
        transcripts: what it wrote; 60 or more are advised for 200 heads and more.
        labels: the label space.
        memory: bytes for one pack of rows.
        progress: show progress bars on stderr.
        store: a `run_folder.RunFolder`, to keep and resume work.
        options: see `Options`.

    Raises:
        InputError: for too few usable transcripts, and whatever transcripts and labels raise.
    """
    asked = Options(**options)
    parts = split(transcripts, asked.seed)
    if any(len(part) < 2 for part in parts.values()):
        groups = len({t.group or t.id for t in transcripts})
        raise InputError(f"{len(transcripts)} transcripts of {groups} groups are too few: splits never cut a group and each needs 2 transcripts, so give at least 10 groups")
    if len(model.hooked.heads) < model.n_layers * model.n_heads:
        raise InputError(f"{model.name} has layers without attention, and discover compares the heads of all layers; use the verbs one at a time")
    ids = Counter(t.id for t in transcripts)
    if max(ids.values()) > 1:
        raise InputError(f"id {max(ids, key=ids.get)!r} is used more than once; give each transcript its own")
    bar = lambda items, what: tqdm(items, desc=what, unit="text", disable=not progress)  # noqa: E731
    closers = find_closers(parts["reference"], labels, model.tokenizer)
    template = template_ids(((t, encode(t, model.tokenizer)) for t in parts["reference"]), model.tokenizer.all_special_ids)
    prefixes = Prefixes(model.hooked, 4 * memory).share(prompt_ids(transcripts, model.tokenizer))
    set_aside: dict[str, str] = {}

    def surveys(name: str) -> list[Survey]:
        found = []
        for t in bar(parts[name], f"reading {name}"):
            try:
                found.append(survey(model, t, labels, closers, template, asked, prefixes))
            except (ExactnessError, InputError) as error:
                set_aside[t.id] = str(error)
        return found

    reference = surveys("reference")
    if not reference:
        raise InputError(f"no reference transcript is usable: {next(iter(set_aside.values()))}")
    means, null_means, slope = reference_of(model, reference, asked, memory, bar)
    if not means.means:
        raise InputError(f"the reference split has no event of the kinds {', '.join(asked.kinds)}; add transcripts or ask for other kinds")
    selection = [s.only(means.means) for s in surveys("selection")]
    if not any(s.reading.events for s in selection):
        raise InputError("the selection split has no usable event; add transcripts")
    matched = {kind: match_kind(selection, kind, asked.caliper) for kind in means.means}
    jobs = [_jobs(i, selection, matched, means, null_means, asked) for i in range(len(selection))]
    scored = []
    for i, s in enumerate(bar(selection, "ablating every head")):
        scored.append(_score(model, s, jobs[i], means, asked, memory, store))
    return _conclude(model, parts, selection, scored, jobs, matched, means, slope, surveys("evaluation"), asked, set_aside, memory, closers)


# -- scoring ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Jobs:
    """What is measured in one transcript: its events, then the nulls matched to them."""

    probes: tuple[Probe, ...]
    nulls: dict[tuple[Kind, int], list[int]]  # (kind, event in the transcript) -> probes


@dataclass(frozen=True, eq=False)
class Scored:
    measured: Measured
    attribution: np.ndarray
    direct: np.ndarray
    noise: np.ndarray


def _jobs(i: int, surveys: Sequence[Survey], matched: dict[Kind, MatchedSets], means: ReferenceMeans, null_means, asked: Options) -> Jobs:
    s = surveys[i]
    rng = np.random.default_rng([asked.seed, i])
    probes: list[Probe] = []
    for n, e in enumerate(s.reading.events):
        chosen = Margin(e.chosen, (int(s.events.rival[n]),))
        other = Margin(e.chosen, (int(rng.choice([a for a in e.alternatives if a != e.chosen] or list(e.competitors))),))
        probes.append(Probe(e.position, means.of(e, s.reading.transcript.group), (event_margin(s.reading, e), chosen, other)))
    offset = np.cumsum([0, *(len(x.nulls.positions) for x in surveys)])
    nulls: dict[tuple[Kind, int], list[int]] = {}
    for kind, sets in matched.items():
        before = sum(e.kind == kind for x in surveys[:i] for e in x.reading.events)
        for n, (where, _) in enumerate((j, e) for j, e in enumerate(s.reading.events) if e.kind == kind):
            for j in sets.nulls[before + n]:
                nulls.setdefault((kind, where), []).append(len(probes))
                probes.append(null_probe(s, int(j - offset[i]), null_means[kind]))
    return Jobs(tuple(probes), nulls)


def _score(model: DecisionModel, s: Survey, jobs: Jobs, means: ReferenceMeans, asked: Options, memory: int, store) -> Scored:
    """Measure a transcript, or take it from the store."""
    name = s.reading.transcript.id
    kept = store.load_part(name) if store is not None else None
    if kept is None:
        measured = measure(model, s.reading.prefix, jobs.probes, memory)
        a = attribute(model, s.reading, means, steps=3, memory=memory)
        kept = {"margins": measured.margins, "floors": measured.floors, "effects": measured.effects,
                "attribution": a.gradient.values, "direct": a.direct.values, "noise": noise_floor(model, s.reading, seed=asked.seed, memory=memory)}
        if store is not None:
            store.save_part(name, kept)
    return Scored(Measured(kept["margins"], kept["floors"], kept["effects"], []), kept["attribution"], kept["direct"], kept["noise"])


# -- conclusions ----------------------------------------------------------------------------------------


def _conclude(model, parts, surveys, scored, jobs, matched, means, slope, evaluation, asked, set_aside, memory, closers) -> Discovery:
    shape = (model.n_layers, model.n_heads)
    rows = {kind: [(i, n) for i, s in enumerate(surveys) for n, e in enumerate(s.reading.events) if e.kind == kind] for kind in matched}
    sets = {kind: _sets(rows[kind], kind, surveys, scored, jobs, slope[kind]) for kind in matched}
    usable = {kind: x for kind, x in sets.items() if len(x.members) and len(np.unique(x.transcript)) > 1}
    support, oppose = (calibrate(usable, draws=asked.draws, seed=asked.seed, sign=sign) if usable else {} for sign in (1, -1))
    notes = list(_warnings(asked, shape, usable, matched, means, len(surveys)))
    kinds: dict[Kind, KindResult] = {}
    for kind in matched:
        if not rows[kind]:
            notes.append(f"{kind}: no event in the selection split")
            continue
        pick = lambda array, rows=rows[kind]: np.stack([array(scored[i], n) for i, n in rows])  # noqa: E731
        effects = pick(lambda s, n: s.measured.effects[n]).reshape(len(rows[kind]), 3, -1).astype(np.float64)
        m, m0 = (pick(lambda s, n, side=side: getattr(s.measured, side)[n, 0]) for side in ("margins", "floors"))
        groups = np.array([i for i, _ in rows[kind]])
        columns = {
            "effect": effects[:, 0].mean(0), "null_effect": _null_effect(rows[kind], kind, scored, jobs),
            "attribution": pick(lambda s, n: s.attribution[n]).reshape(len(groups), -1).mean(0),
            "dla": pick(lambda s, n: s.direct[n]).reshape(len(groups), -1).mean(0)}
        columns["ci_low"], columns["ci_high"] = bootstrap_interval(effects[:, 0], groups, seed=asked.seed)
        least = asked.delta * max(0.0, float(np.median(m - m0)))
        nothing = _no_calibration(shape[0] * shape[1])
        table = _table(kind, shape, columns, support.get(kind, nothing), asked.alpha, least)
        opposing = _table(kind, shape, columns, oppose.get(kind, nothing), asked.alpha, least, sign=-1)
        selected = HeadSet(zip(*(table.loc[table.selected, c] for c in ("layer", "head")), strict=True))
        dropped = Counter(d.reason for s in surveys for d in s.dropped if d.kind in ("", kind))
        summary = {
            "transcripts": len(set(groups.tolist())), "events": len(groups), "dropped": dict(sorted(dropped.items())),
            "accepted_near_misses": sum(s.accepted_near_misses for s in surveys), "closers": [int(i) for i in closers],
            "calibrated_events": len(matched[kind].kept), "left_out": matched[kind].left_out,
            "balance": dict(zip(("margin", "log_entropy", "position"), map(rounded, matched[kind].balance), strict=True)),
            "noise_floor": rounded(np.sqrt(pick(lambda s, n: s.noise[n] ** 2).mean())), "unbalanced": matched[kind].unbalanced, "m": rounded(m.mean()), "m0": rounded(m0.mean()),
            "attention_share": rounded((m - m0).sum() / m.sum()), "set_size": len(selected), "heads": shape[0] * shape[1],
            "competitor_specificity": rounded(effects[:, 2].mean(0)[table_mask(selected, shape)].sum()
                                              / effects[:, 0].mean(0)[table_mask(selected, shape)].sum()) if len(selected) else None,
            "opposing": [str(Head(r.layer, r.head)) for r in opposing[opposing.selected].itertuples()],
            **evaluate(model, evaluation, selected, kind, means.means[kind], asked, memory)}
        kinds[kind] = KindResult(table, opposing, selected, support.get(kind, nothing), matched[kind], summary)
    frame, values = _scored_events(surveys, scored, shape)
    return Discovery(kinds, shape, model.name, asked, frame, values, set_aside, tuple(notes), {name: [t.id for t in part] for name, part in parts.items()})


def table_mask(heads: HeadSet, shape: tuple[int, int]) -> np.ndarray:
    return heads.to_mask(*shape).ravel()


def _sets(rows, kind: Kind, surveys, scored, jobs, slope: np.ndarray) -> Sets:
    """Matched sets under the vocabulary margin, the slope on the margin removed."""
    members, transcript = [], []
    for i, n in rows:
        nulls = jobs[i].nulls.get((kind, n))
        if nulls:
            x = scored[i].measured
            effects = np.stack([x.effects[n, 1], *(x.effects[j, 0] for j in nulls)]).reshape(1 + len(nulls), -1).astype(np.float64)
            margins = np.array([x.margins[n, 1], *(x.margins[j, 0] for j in nulls)], np.float64)
            members.append(effects - margins[:, None] * slope)
            transcript.append(i)
    return Sets(tuple(members), np.array(transcript, int))


def _null_effect(rows, kind: Kind, scored, jobs) -> np.ndarray:
    found = [scored[i].measured.effects[j, 0].ravel() for i, n in rows for j in jobs[i].nulls.get((kind, n), ())]
    return np.mean(found, 0, dtype=np.float64) if found else np.zeros(scored[0].measured.effects[0, 0].size)


def _no_calibration(heads: int) -> Calibration:
    one = np.ones(heads)
    return Calibration(np.zeros(heads), one, one, one, one, 0, np.zeros(0))


def _table(kind: Kind, shape, columns: dict[str, np.ndarray], found: Calibration, alpha: float, least: float, sign: int = 1) -> pd.DataFrame:
    layers, heads = (x.ravel() for x in np.indices(shape))
    order = np.argsort(-sign * found.statistic, kind="stable")
    frame = pd.DataFrame({
        "kind": kind, "layer": layers, "head": heads, "rank": 0, "effect": columns["effect"], "ci_low": columns["ci_low"],
        "ci_high": columns["ci_high"], "null_effect": columns["null_effect"], "statistic": found.statistic, "p_value": found.p_value,
        "p_maxt": found.p_maxt, "q_value": found.q_value, "attribution": columns["attribution"], "dla": columns["dla"],
        "selected": (found.q_value <= alpha) & (sign * columns["effect"] >= least) & (sign * columns["effect"] > 0)}).iloc[order].reset_index(drop=True)
    frame["rank"] = np.arange(1, len(frame) + 1)
    return frame


def _warnings(asked: Options, shape, usable, matched, means: ReferenceMeans, scored: int):
    heads = shape[0] * shape[1]
    for kind, x in usable.items():
        n = len(np.unique(x.transcript))
        if n < EXPLORATORY:
            yield f"{kind}: exploratory, only {n} transcripts are calibrated; {60 if heads >= 200 else EXPLORATORY} are advised"
        elif heads >= 200 and n < 60:
            yield f"{kind}: {n} transcripts are calibrated; 60 are advised for {heads} heads"
    few = [f"{kind} {n}" for kind, n in means.counts.items() if n < 4 * scored]
    if few:
        yield f"few reference events for {scored} scored transcripts ({', '.join(few)}); below four times as many, the error of the means moves all effects together"
    for kind in asked.kinds:
        if kind not in means.means:
            yield f"{kind}: no event in the reference split, so the kind is left out"
    if asked.draws < max(9_999, 20 * heads):
        yield f"{asked.draws} permutations resolve q-values coarsely; {max(9_999, 20 * heads)} are advised"
    if asked.caliper != 0.25:
        yield f"nulls are matched within {asked.caliper:g} standard deviations (default .25)"
    if asked.minimum != 30:
        yield f"reference means may rest on as few as {asked.minimum} events (default 30)"
    for kind, sets in matched.items():
        if kind not in usable:
            yield f"{kind}: no event has enough matching null tokens, so nothing is calibrated"
        elif sets.unbalanced:
            yield f"{kind}: unbalanced, events differ from their nulls by up to {np.abs(sets.balance).max():.2f} standard deviations"


def _scored_events(surveys, scored, shape) -> tuple[pd.DataFrame, np.ndarray]:
    rows, values = [], []
    for s, x in zip(surveys, scored, strict=True):
        for n, e in enumerate(s.reading.events):
            margin = event_margin(s.reading, e)
            near = next(((a, b) for name, a, b in e.spans if name == "near-miss"), (0, 0))
            rows.append({"transcript": e.transcript, "kind": e.kind, "position": e.position, "label": e.label, "region": e.region,
                         "near_miss": e.near_miss or "", "near_start": near[0], "near_end": near[1], "start": e.start, "end": e.end, "chosen": e.chosen, "against": margin.against[0],
                         "alternatives": len(e.alternatives), "copied": e.copied, "short_prefix": e.short_prefix,
                         "m": float(x.measured.margins[n, 0]), "m0": float(x.measured.floors[n, 0])})
            values.append(x.measured.effects[n, 0])
    return pd.DataFrame(rows), np.stack(values) if values else np.zeros((0, *shape), np.float32)
