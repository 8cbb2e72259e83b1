"""Scoring: every head ablated in turn at the events of a transcript and at the null tokens matched to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ._processes import spread
from .ablation import Measured, Probe, ReferenceMeans, event_margin, measure, noise_floor
from .attribution import attribute
from .branches import clean_z
from .calibration import Calibration, MatchedSets, Sets
from .decisions import Kind
from .margin import Margin
from .null_tokens import first_generated
from .survey import Options, Survey, null_probe
from .views import Brief

if TYPE_CHECKING:
    from .model import DecisionModel

Array = np.ndarray
GENERATED = 200  # tokens of a text that stand for all it generated
COMPARED = 100  # events of a kind on which references are compared


@dataclass(frozen=True, eq=False, repr=False)
class Jobs(Brief):
    """What is measured in one transcript: its events, then the nulls matched to them."""

    probes: tuple[Probe, ...]
    nulls: dict[tuple[Kind, int], list[int]]  # (kind, event in the transcript) -> probes


@dataclass(frozen=True, eq=False, repr=False)
class Scored(Brief):
    measured: Measured
    attribution: Array
    direct: Array
    noise: Array


def jobs_of(i: int, surveys: Sequence[Survey], matched: dict[Kind, MatchedSets], means: ReferenceMeans, null_means, asked: Options) -> Jobs:
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


def score(model: DecisionModel, s: Survey, jobs: Jobs, means: ReferenceMeans, asked: Options, memory: int, store) -> Scored:
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


def matched_sets(rows: Sequence[tuple[int, int]], kind: Kind, scored: Sequence[Scored], jobs: Sequence[Jobs], slope: Array) -> Sets:
    """Matched sets of a kind under the vocabulary margin, the slope on the margin removed.

    Args:
        rows: `(transcript, event in it)` of the kind.
    """
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


def mean_null_effect(rows: Sequence[tuple[int, int]], kind: Kind, scored: Sequence[Scored], jobs: Sequence[Jobs]) -> Array:
    """Mean effect `[head]` at the nulls of a kind, on their own margins."""
    found = [scored[i].measured.effects[j, 0].ravel() for i, n in rows for j in jobs[i].nulls.get((kind, n), ())]
    return np.mean(found, 0, dtype=np.float64) if found else np.zeros(scored[0].measured.effects[0, 0].size)


# -- tables ------------------------------------------------------------------------------------------


def no_calibration(heads: int) -> Calibration:
    """Of a kind that has nothing to calibrate: no head stands out."""
    one = np.ones(heads)
    return Calibration(np.zeros(heads), one, one, one, one, 0, np.zeros(0))


def head_table(kind: str, shape, columns: dict[str, Array], found: Calibration, alpha: float, least: float, sign: int = 1) -> pd.DataFrame:
    """Every head, ranked: the columns of `heads.csv`.

    Args:
        columns: `effect, ci_low, ci_high, null_effect`, and those of `attribution, dla, resample` that there are.
        least: effect of a selected head, logits.
        sign: -1 for heads that oppose.
    """
    layers, heads = (x.ravel() for x in np.indices(shape))
    order = np.argsort(-sign * found.statistic, kind="stable")
    frame = pd.DataFrame({
        "kind": kind, "layer": layers, "head": heads, "rank": 0, "effect": columns["effect"], "ci_low": columns["ci_low"],
        "ci_high": columns["ci_high"], "null_effect": columns["null_effect"], "statistic": found.statistic, "p_value": found.p_value,
        "p_maxt": found.p_maxt, "q_value": found.q_value, **{name: columns[name] for name in ("attribution", "dla", "resample") if name in columns},
        "selected": (found.q_value <= alpha) & (sign * columns["effect"] >= least) & (sign * columns["effect"] > 0)}).iloc[order].reset_index(drop=True)
    frame["rank"] = np.arange(1, len(frame) + 1)
    return frame


# -- other references than the mean -----------------------------------------------------------------------


def reference_values(model: DecisionModel, surveys: Sequence[Survey], kinds: Sequence[Kind], seed: int, memory: int) -> dict[Kind, dict[str, list[Array]]]:
    """What to ablate with instead of a kind's mean: z of single reference events in random order (`resample`), the
    mean over all that was generated (at most 200 tokens of a text, evenly), and zero.

    Returns:
        kind -> name -> arrays `[layer, head, d_head]`: one for all decisions, or donors to be taken in turn.
    """
    shape = (model.n_layers, model.n_heads, model.hooked.d_head)
    events: dict[Kind, list[Array]] = {kind: [] for kind in kinds}
    total, count = np.zeros(shape), 0

    def values(s: Survey) -> tuple[list[Array | tuple], Array, int]:
        r = s.reading
        z_at = lambda at: clean_z(model.hooked, r.prefix, at, memory).float().cpu().numpy() if len(at) else ()  # noqa: E731
        written = np.arange(first_generated(r.transcript, r.encoded), len(r.prefix))
        z = z_at(written[:: -(-len(written) // GENERATED)].tolist()) if len(written) else np.zeros((0, *shape))
        return [z_at([e.position for e in r.events if e.kind == kind]) for kind in kinds], z.sum(0, dtype=np.float64), len(z)

    for of_events, all_z, n in spread(values, surveys):
        for kind, z in zip(kinds, of_events, strict=True):
            events[kind] += list(z)
        total, count = total + all_z, count + n
    rng, everywhere = np.random.default_rng(seed), (total / max(count, 1)).astype(np.float32)
    return {kind: {"resample": [z[i] for i in rng.permutation(len(z))], "generated": [everywhere], "zero": [np.zeros(shape, np.float32)]} for kind, z in events.items()}


def reference_effects(model: DecisionModel, surveys: Sequence[Survey], scored: Sequence[Scored], references: Mapping[Kind, Mapping[str, Sequence[Array]]], memory: int,
                      store, bar) -> dict[Kind, dict[str, Array]]:
    """Mean effects `[head]` under each reference, `mean` among them, over the first 100 events of a kind."""
    seen = dict.fromkeys(references, 0)
    found: dict[Kind, dict[str, list[Array]]] = {kind: {name: [] for name in ("mean", *names)} for kind, names in references.items()}
    jobs: list[tuple[Survey, list[Probe]]] = []
    roles: list[list[tuple[Kind, str]]] = []
    for s, x in zip(surveys, scored, strict=True):
        jobs.append((s, [])), roles.append([])
        for n, e in enumerate(s.reading.events):
            if seen[e.kind] < COMPARED:
                for name, values in references[e.kind].items():
                    jobs[-1][1].append(Probe(e.position, values[seen[e.kind] % len(values)], (event_margin(s.reading, e),)))
                    roles[-1].append((e.kind, name))
                found[e.kind]["mean"].append(x.measured.effects[n, 0].ravel())
                seen[e.kind] += 1

    def effects_of(job: tuple[Survey, list[Probe]]) -> Array:
        s, probes = job
        part = f"{s.reading.transcript.id} references"
        kept = store.load_part(part) if store is not None and probes else None
        if kept is None:
            kept = {"effects": measure(model, s.reading.prefix, probes, memory).effects[:, 0] if probes else np.zeros((0, model.n_layers, model.n_heads), np.float32)}
            if store is not None and probes:
                store.save_part(part, kept)
        return kept["effects"]

    for of_text, rows in zip(roles, spread(effects_of, bar(jobs, "trying other references")), strict=True):
        for (kind, name), effects in zip(of_text, rows, strict=True):
            found[kind][name].append(effects.ravel())
    return {kind: {name: np.mean(rows, 0, dtype=np.float64) for name, rows in names.items() if rows} for kind, names in found.items()}
