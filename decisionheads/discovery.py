"""Discovery: from what a model wrote to a calibrated table of the heads that decide.

Three disjoint splits by transcript (by `group` where it is given): *reference* gives means, closers,
template and slopes; *selection* gives effects and calibration; *evaluation* judges what was selected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches

import numpy as np
import pandas as pd

from ._keeping import keeping
from ._packs import out_of_memory
from ._processes import spread
from ._progress import Progress
from .ablation import ReferenceMeans, event_margin
from .branches import MEMORY
from .calibration import Calibration, MatchedSets, Sets, bootstrap_interval, calibrate
from .cues import formatted
from .decisions import Kind
from .errors import ExactnessError, InputError
from .events import find_closers
from .heads import Head, HeadSet
from .labels import LabelSpace
from .model import DecisionModel
from .necessity import SOME, plain
from .null_tokens import template_ids
from .prefixes import Prefixes
from .scoring import head_table, jobs_of, matched_sets, mean_null_effect, no_calibration, reference_effects, reference_values, score
from .standing import Standing, stand
from .survey import Options, Survey, match_kind, split, survey
from .survey import reference as reference_of
from .transcripts import Transcript, encode, prompt_ids
from .views import MOST, Viewed
from .words import some_heads

EXPLORATORY = 24  # transcripts, below which a result is headed so
HALF_DRAWS = 1_999  # permutations for the halves of the selection split
STAGES = {"reading reference": 2, "slopes of nulls": 6, "reading selection": 4, "ablating every head": 24, "reading evaluation": 4, "trying other references": 8,
          "selecting sets": 4, "selecting on halves": 5, "judging sets on held-out texts": 30, "knocking in": 3, "sets under other references": 5, "measuring reads": 3, "blocking reads": 3,
          "asking before the code": 14}  # about their shares of the time, in percent


@dataclass(frozen=True, eq=False)
class KindResult(Viewed):
    """What was found for one kind of event.

    Attributes:
        table: every head, ranked by calibrated statistic; the columns of `heads.csv`.
        opposing: the same columns for heads that oppose the decision, tested by themselves.
        selected: heads with `q <= alpha` and an effect of at least `delta` of the median `m - m0`.
        calibration: statistics and null distribution.
        matched: the matched sets.
        summary: held-out figures, as in `summary.json`; `selection` holds those of the selection split.
    """

    table: pd.DataFrame
    opposing: pd.DataFrame
    selected: HeadSet
    calibration: Calibration
    matched: MatchedSets
    summary: dict

    def __repr__(self) -> str:
        return f"KindResult({self.table['kind'].iloc[0]}: {len(self.selected)} of {len(self.table)} heads selected: {some_heads(_ranked(self.table))}; {self.calibration!r})"

    def _rows(self):
        return _shown(self.table.head(MOST)), len(self.table)


@dataclass(frozen=True, eq=False)
class Discovery(Viewed):
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
        standing: what the selected heads do together, held out and with controls; None if it was not asked for.
        notes: how it went, such as where memory ran out; nothing that changes a number.
        timings: stage -> seconds; of a run that went on, those since.
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
    standing: Standing | None
    notes: tuple[str, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)

    def to_frame(self) -> pd.DataFrame:
        """Every head of every kind."""
        return pd.concat([r.table for r in self.kinds.values()], ignore_index=True)

    def __repr__(self) -> str:
        found = "; ".join(f"{kind}: {', '.join(_ranked(r.table)[:4]) or 'none'}{' ...' if len(r.selected) > 4 else ''}" for kind, r in self.kinds.items())
        return f"Discovery({self.model.rstrip('/').rpartition('/')[2]}, {self.shape[0]} x {self.shape[1]} heads; selected {found})"

    def _rows(self):
        table = self.to_frame()
        selected = table[table["selected"]]
        return _shown(selected.head(2 * MOST)), len(selected)


def _ranked(table: pd.DataFrame) -> list[str]:
    """The selected heads, the strongest first."""
    return [str(Head(r.layer, r.head)) for r in table[table["selected"]].itertuples()]


def _shown(table: pd.DataFrame) -> list[dict]:
    """Rows of heads as a notebook shows them."""
    return [{"kind": r.kind, "head": str(Head(r.layer, r.head)), "effect, logits": f"{r.effect:+.2f}", "95%": f"[{r.ci_low:+.2f}, {r.ci_high:+.2f}]", "at null tokens": f"{r.null_effect:+.2f}",
             "q": f"{r.q_value:.4f}", "max-T p": f"{r.p_maxt:.4f}", "selected": bool(r.selected)} for r in table.itertuples()]


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
    unknown = next((name for name in options if name not in {f.name for f in fields(Options)}), None)
    if unknown is not None:
        near = get_close_matches(unknown, [f.name for f in fields(Options)], 1)
        raise TypeError(f"discover() has no option {unknown!r}" + (f"; did you mean {near[0]!r}?" if near else "; see survey.Options for what there is"))
    with keeping(store) as notes:
        found = _discover(model, transcripts, labels, memory, progress, store, Options(**options))
    return replace(found, notes=tuple(notes))


def _discover(model: DecisionModel, transcripts: Sequence[Transcript], labels: LabelSpace, memory: int, progress: bool, store, asked: Options) -> Discovery:
    if asked.cue:
        formatted(asked.cue, 1)  # refused now rather than after an hour
    parts = split(transcripts, asked.seed)
    if any(len(part) < 2 for part in parts.values()):
        groups = len({t.group or t.id for t in transcripts})
        raise InputError(f"{len(transcripts)} transcripts of {groups} groups are too few: splits never cut a group and each needs 2 transcripts, so give at least 10 groups")
    if len(model.hooked.heads) < model.n_layers * model.n_heads:
        raise InputError(f"{model.name} has layers without attention, and discover compares the heads of all layers; use the verbs one at a time")
    ids = Counter(t.id for t in transcripts)
    if max(ids.values()) > 1:
        raise InputError(f"id {max(ids, key=ids.get)!r} is used more than once; give each transcript its own")
    bar = Progress(STAGES, progress)
    closers = find_closers(parts["reference"], labels, model.tokenizer)
    template = template_ids(((t, encode(t, model.tokenizer)) for t in parts["reference"]), model.tokenizer.all_special_ids)
    prefixes = Prefixes(model.hooked, 4 * memory).share(prompt_ids(transcripts, model.tokenizer))
    set_aside: dict[str, str] = {}

    def surveys(name: str) -> list[Survey]:
        def read(t: Transcript) -> Survey | str:
            try:
                return survey(model, t, labels, closers, template, asked, prefixes)
            except (ExactnessError, InputError) as error:
                return str(error)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                return f"transcript {t.id}: out of memory while it was read; take a machine with more, or a shorter text"

        found = spread(read, bar(parts[name], f"reading {name}"), unpack=lambda s: s if isinstance(s, str) else s.adopted(prefixes))
        set_aside.update({t.id: s for t, s in zip(parts[name], found, strict=True) if isinstance(s, str)})
        return [s for s in found if not isinstance(s, str)]

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
    jobs = [jobs_of(i, selection, matched, means, null_means, asked) for i in range(len(selection))]
    scored = spread(lambda x: score(model, *x, means, asked, memory, store), bar(list(zip(selection, jobs, strict=True)), "ablating every head"))
    references = reference_values(model, reference, list(means.means), asked.seed, memory)
    compared = reference_effects(model, selection, scored, references, memory, store, bar)
    kinds, halves, notes, tables = _conclude(model, selection, scored, jobs, matched, means, slope, asked, closers, compared)
    evaluation = surveys("evaluation") if asked.together else []
    standing = None if not asked.together else stand(model, (reference, selection, evaluation), {kind: r.selected for kind, r in kinds.items()}, matched, means, labels, template, asked,
                     references, halves, memory, bar)
    bar.close()
    for kind, result in kinds.items():
        held_out, how = (standing.summary(kind), standing.selected_how(kind)) if standing is not None else ({}, {})
        seen = {**result.summary, **how}
        result.summary.clear()
        result.summary.update(held_out, selection=seen)
    return Discovery(kinds, (model.n_layers, model.n_heads), model.name, asked, *tables, set_aside, tuple(notes), {name: [t.id for t in part] for name, part in parts.items()}, standing,
                     timings={stage: round(seconds, 1) for stage, seconds in bar.seconds.items()})


# -- conclusions ----------------------------------------------------------------------------------------


def _conclude(model, surveys, scored, jobs, matched, means, slope, asked, closers, compared):
    """Calibrate, and say it: results by kind, halves for stability, warnings, and the table of scored events."""
    shape = (model.n_layers, model.n_heads)
    rows = {kind: [(i, n) for i, s in enumerate(surveys) for n, e in enumerate(s.reading.events) if e.kind == kind] for kind in matched}
    sets = {kind: matched_sets(rows[kind], kind, scored, jobs, slope[kind]) for kind in matched}
    usable = {kind: x for kind, x in sets.items() if len(x.members) and len(np.unique(x.transcript)) > 1}
    support, oppose = (calibrate(usable, draws=asked.draws, seed=asked.seed, sign=sign) if usable else {} for sign in (1, -1))
    notes = list(_warnings(asked, shape, usable, matched, means, len(surveys)))
    kinds: dict[Kind, KindResult] = {}
    effects_of, carried = {}, {}
    for kind in matched:
        if not rows[kind]:
            notes.append(f"{kind}: no event in the selection split")
            continue
        pick = lambda array, rows=rows[kind]: np.stack([array(scored[i], n) for i, n in rows])  # noqa: E731
        effects = pick(lambda s, n: s.measured.effects[n]).reshape(len(rows[kind]), 3, -1).astype(np.float64)
        m, m0 = (pick(lambda s, n, side=side: getattr(s.measured, side)[n, 0]) for side in ("margins", "floors"))
        groups = np.array([i for i, _ in rows[kind]])
        effects_of[kind], carried[kind] = (groups, effects[:, 0]), m - m0
        columns = {
            "effect": effects[:, 0].mean(0), "null_effect": mean_null_effect(rows[kind], kind, scored, jobs),
            "attribution": pick(lambda s, n: s.attribution[n]).reshape(len(groups), -1).mean(0),
            "dla": pick(lambda s, n: s.direct[n]).reshape(len(groups), -1).mean(0), "resample": compared[kind]["resample"]}
        columns["ci_low"], columns["ci_high"] = bootstrap_interval(effects[:, 0], groups, seed=asked.seed)
        least = asked.delta * max(0.0, float(np.median(m - m0)))
        nothing = no_calibration(shape[0] * shape[1])
        table = head_table(kind, shape, columns, support.get(kind, nothing), asked.alpha, least)
        opposing = head_table(kind, shape, columns, oppose.get(kind, nothing), asked.alpha, least, sign=-1)
        selected = HeadSet(zip(*(table.loc[table.selected, c] for c in ("layer", "head")), strict=True))
        dropped = Counter(d.reason for s in surveys for d in s.dropped if d.kind in ("", kind))
        chosen = selected.to_mask(*shape).ravel()
        summary = {
            "transcripts": len(set(groups.tolist())), "events": len(groups), "dropped": dict(sorted(dropped.items())),
            "accepted_near_misses": sum(s.accepted_near_misses for s in surveys), "closers": [int(i) for i in closers],
            "calibrated_events": len(matched[kind].kept), "left_out": matched[kind].left_out,
            "balance": dict(zip(("margin", "log_entropy", "position"), map(plain, matched[kind].balance), strict=True)),
            "noise_floor": plain(np.sqrt(pick(lambda s, n: s.noise[n] ** 2).mean())), "unbalanced": matched[kind].unbalanced, "m": plain(m.mean()), "m0": plain(m0.mean()),
            "attention_share": plain((m - m0).sum() / m.sum()), "selected": list(map(str, selected)),
            "competitor_specificity": plain(effects[:, 2].mean(0)[chosen].sum() / effects[:, 0].mean(0)[chosen].sum()) if len(selected) else None,
            "reference_agreement": _agreement(compared[kind]), "opposing": [str(Head(r.layer, r.head)) for r in opposing[opposing.selected].itertuples()]}
        kinds[kind] = KindResult(table, opposing, selected, support.get(kind, nothing), matched[kind], summary)
    return kinds, _halves(surveys, usable, effects_of, carried, shape, asked), notes, _scored_events(surveys, scored, shape)


def _agreement(compared: dict[str, np.ndarray]) -> dict[str, float | None]:
    """Spearman correlation of the effects of all heads under each other reference with those under the mean."""
    from scipy.stats import spearmanr

    return {name: plain(spearmanr(compared["mean"], values).statistic) if np.ptp(values) > 0 and np.ptp(compared["mean"]) > 0 else None
            for name, values in compared.items() if name != "mean"}


def _halves(surveys, usable: dict[Kind, Sets], effects_of, carried, shape, asked: Options) -> list[tuple[frozenset[str], dict[Kind, HeadSet]]]:
    """Calibrate on either half of the selection split, halved by group: ids, and the heads that would be selected."""
    groups = sorted({s.reading.transcript.group or s.reading.transcript.id for s in surveys})
    first = {groups[i] for i in np.random.default_rng(asked.seed).permutation(len(groups))[: len(groups) // 2]}
    found = []
    for side in (True, False):
        mine = [i for i, s in enumerate(surveys) if ((s.reading.transcript.group or s.reading.transcript.id) in first) == side]
        parts = {}
        for kind, x in usable.items():
            keep = [n for n, t in enumerate(x.transcript) if t in set(mine)]
            if len({int(x.transcript[n]) for n in keep}) > 1:
                parts[kind] = Sets(tuple(x.members[n] for n in keep), x.transcript[keep])
        heads = {}
        for kind, calibration in (calibrate(parts, draws=min(asked.draws, HALF_DRAWS), seed=asked.seed) if parts else {}).items():
            here = np.isin(effects_of[kind][0], mine)
            effect, least = effects_of[kind][1][here].mean(0), asked.delta * max(0.0, float(np.median(carried[kind][here])))
            heads[kind] = HeadSet.from_mask(((calibration.q_value <= asked.alpha) & (effect >= least) & (effect > 0)).reshape(shape))
        found.append((frozenset(surveys[i].reading.transcript.id for i in mine), heads))
    return found


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
    if asked.random_sets < SOME:
        yield f"sets are held against {asked.random_sets} random ones where there are more (default {SOME})"
    if asked.held_out:
        yield f"sets are judged on the first {asked.held_out} evaluation transcripts"
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
