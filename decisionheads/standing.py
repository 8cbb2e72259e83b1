"""Causal standing: what the calibrated heads of a run can be said to do, each claim beside its control.

Head sets are selected on the selection split and judged on the evaluation split; what heads read is
calibrated on the selection split; knock-in and read-blocking are measured on the evaluation split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .ablation import MINIMUM, ReferenceMeans
from .calibration import MatchedSets, p_value
from .decisions import Kind
from .elicitation import Elicitation, elicit, read_codes
from .elicitation_heads import MOST_CUTS, ElicitationHeads, elicitation_heads
from .errors import InputError
from .head_sets import Case, Selection, cases_of, select
from .heads import HeadSet, overlaps
from .knock_in import KnockedIn, knock_in
from .labels import LabelSpace
from .necessity import Judged, judge, phase_matrix, plain, robustness
from .phases import BLOCK, NEAR, Families, families, matched_events, measure_reads
from .read_blocking import Blocked, block_reads, dissociation
from .spans import Sinks, find_sinks
from .survey import Options, Survey
from .views import Viewed

if TYPE_CHECKING:
    import pandas as pd

    from .model import DecisionModel

Array = np.ndarray
SELECTING = 40  # transcripts with a decision of a kind, evenly over the split, that its set is selected on
COMPARED = 20  # held-out transcripts on which other references are tried
ASKED = {"reference": 20, "selection": 24, "evaluation": 12}  # transcripts whose lead cuts are ablated
OTHER = {BLOCK: NEAR, NEAR: BLOCK}
FAMILY_SPAN = {"region": BLOCK, "near-miss": NEAR}
FAMILY_KINDS: dict[str, tuple[Kind, ...]] = {"region": ("region", "label"), "near-miss": ("departure",)}


@dataclass(frozen=True, eq=False)
class Standing(Viewed):
    """Everything that is said of the calibrated heads beyond their single effects.

    Attributes:
        selections: kind -> the set that carries it together, frozen.
        together: their union, the global set.
        judged: kind -> its set on held-out texts; "global" -> the union on the decisions of all kinds.
        phase: each set ablated, each kind measured.
        references: kind, reference -> N and R of the set.
        stability: kind -> sets of the two halves of the selection split, their Jaccard index and chance's.
        knocked: kind -> knock-in with its controls.
        families: heads by what they read.
        blocked: `(family, result)`: what a family loses when it cannot read, at the kinds of event it serves.
        sinks: keys that were left out of what is read.
        dropped: kind -> reason -> decisions of the evaluation split that could not be events.
        elicited: what a cue brings out before a code is written, on held-out texts; None where it was not asked for.
        eliciting: the heads that make it so, by where they were ablated, or one sentence that says why not.
    """

    selections: Mapping[Kind, Selection]
    together: HeadSet
    judged: Mapping[str, Judged]
    phase: pd.DataFrame
    references: pd.DataFrame
    stability: pd.DataFrame
    knocked: Mapping[Kind, KnockedIn]
    families: Families
    blocked: Sequence[tuple[str, Blocked]]
    sinks: Sinks
    dropped: Mapping[Kind, Mapping[str, int]]
    elicited: Elicitation | None = None
    eliciting: Mapping[str, ElicitationHeads | str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Standing({'; '.join(f'{kind} {len(s.heads)} heads' for kind, s in self.selections.items())}; together {len(self.together)}; {self.families!r})"

    def _rows(self):
        rows = []
        for name, judged in self.judged.items():
            s = judged.summary()
            rows.append({"set": name, "heads": len(judged.heads), "texts": s["transcripts"], "necessary": f"{s['necessary']['k']} of {s['necessary']['n']}", "N": s["necessity"]["pooled"],
                         "sufficient": f"{s['sufficient']['k']} of {s['sufficient']['n']}", "R": s["recovery"]["pooled"]})
        return rows, len(rows)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Name -> table, as they are written to a run folder."""
        import pandas as pd

        join = lambda parts: pd.concat(parts, ignore_index=True) if (parts := list(parts)) else pd.DataFrame()  # noqa: E731
        return {"texts": join(j.to_frame().assign(set=name) for name, j in self.judged.items()), "phase_matrix": self.phase, "references": self.references,
                "stability": self.stability, "knock_in": join(k.to_frame().assign(kind=kind) for kind, k in self.knocked.items()),
                "reads": self.families.to_frame(), "read_blocking": join(b.to_frame().assign(family=name) for name, b in self.blocked),
                **({"elicitation": self.elicited.to_frame()} if self.elicited is not None else {}),
                **({"elicitation_heads": pd.concat(found, ignore_index=True)} if (found := [e.table.assign(at=at) for at, e in self.eliciting.items() if not isinstance(e, str)]) else {})}

    def summary(self, kind: str) -> dict:
        """What summary.json says of a kind, or of "global": figures of the evaluation split."""
        found = {"transcripts": 0, "events": 0, **(self.judged[kind].summary() if kind in self.judged else {})}
        if kind in self.selections:
            found |= {"set_size": len(self.selections[kind].heads), "dropped": dict(self.dropped.get(kind, {})), "knock_in": self.knocked[kind].summary() if kind in self.knocked else None}
            found["read_blocking"] = {f"{name} family, {b.span}": {"defined": b.defined, "events": len(b.whole), "heads": len(b.heads),
                                                                   **{way: dict(zip(("n", "removed", "low", "high"), map(plain, b.removed(way)), strict=True)) for way in b.lost}}
                                      for name, b in self.blocked if b.kind == kind}
        return found

    def selected_how(self, kind: str) -> dict:
        """How the set of a kind was selected: joint recovery on the selection split, helpers, stability."""
        s, halves = self.selections[kind], self.stability[self.stability["kind"] == kind]
        return {"recovery": plain(s.recovery), "reached": s.reached, "helpers": list(map(str, s.added)),
                "split_half": {name: plain(halves[name].iloc[0]) for name in ("jaccard", "chance", "p")} if len(halves) else None}

    def elicitation_summary(self) -> dict | None:
        """Leads with their baselines, and the heads with their overlaps; None where it was not asked for."""
        if self.elicited is None:
            return {"mentions": 0, "undefined": self.eliciting["asked"]} if self.eliciting else None
        heads = {}
        for at, e in self.eliciting.items():
            if isinstance(e, str):
                heads[at] = {"undefined": e}
                continue
            shared = overlaps({"elicitation": e.selected, **self.families.named}, self.families.shape[0] * self.families.shape[1])
            heads[at] = {"selected": list(map(str, e.selected)), **e.summary, "layers": {str(k): n for k, n in e.selected.per_layer().items()},
                         "overlaps": [o for o in shared if o["sets"][0] == "elicitation"]}
        return {**self.elicited.summary(), "heads": heads}

    def dissociations(self) -> list[dict]:
        """For each family and kind: removed by its own span less removed by the other family's."""
        rows = []
        for name, b in self.blocked:
            n, difference, low, high = dissociation(b)
            rows.append({"family": name, "kind": b.kind, "own_span": b.span, "events": n, "difference": plain(difference), "low": plain(low), "high": plain(high)})
        return rows


def stand(model: DecisionModel, splits: tuple[Sequence[Survey], Sequence[Survey], Sequence[Survey]], calibrated: Mapping[Kind, HeadSet], matched: Mapping[Kind, MatchedSets],
          means: ReferenceMeans, labels: LabelSpace, template: frozenset[int], asked: Options,
          references: Mapping[Kind, Mapping[str, Sequence[Array]]], halves: Sequence[tuple[frozenset[str], Mapping[Kind, HeadSet]]], memory: int, bar) -> Standing:
    """Select, judge, knock in, sort into families and block.

    Args:
        splits: surveys of the reference, selection and evaluation split.
        calibrated: kind -> heads that were selected one by one.
        matched: the null tokens of the selection split.
        references: see `scoring.reference_values`.
        halves: ids of half the selection split, and the heads of each kind calibrated on it alone; twice.
        bar: `(items, words) -> items`, for progress.
    """
    reference, selection, evaluation = ([s.reading for s in split] for split in splits)
    evaluation = evaluation[:asked.held_out] if asked.held_out else evaluation
    kinds = list(calibrated)
    own = {kind: of_some_texts(cases_of(selection, kind, means), SELECTING) for kind in kinds}
    held = {kind: cases for kind in kinds if (cases := cases_of(evaluation, kind, means))}
    selections = {kind: select(model, own[kind], calibrated[kind], target=asked.target, memory=memory) for kind in bar(kinds, "selecting sets")}
    stability = _stability(model, own, halves, asked, memory, bar)
    together = HeadSet(h for s in selections.values() for h in s.heads)
    sets = {**{kind: s.heads for kind, s in selections.items()}, "global": together}
    judged: dict[str, Judged] = {}
    for name in bar([*held, "global"] if held else [], "judging sets on held-out texts"):
        cases = [c for kind in held for c in held[kind]] if name == "global" else held[name]
        chosen = Selection(together, 1.0, (), (), True, frozenset().union(*(s.seen for s in selections.values()))) if name == "global" else selections[name]
        judged[name] = judge(model, cases, chosen, seed=asked.seed, some=asked.random_sets, memory=memory)
    phase = phase_matrix(model, held, sets, seed=asked.seed, memory=memory)
    some = [kind for kind in held if len(sets[kind])]
    knocked = {kind: knock_in(model, evaluation, sets[kind], kind, seed=asked.seed, memory=memory) for kind in bar(some, "knocking in")}
    robust = [robustness(model, of_some_texts(held[kind], COMPARED), sets[kind], references[kind], seed=asked.seed, memory=memory).assign(kind=kind) for kind in bar(some, "sets under other references")]
    sinks = find_sinks(model, [(s.reading.prefix, s.nulls.positions[:: max(1, len(s.nulls.positions) // 8)].tolist()) for s in splits[0] if len(s.nulls.positions)], template, memory=memory)
    reads = measure_reads(model, list(bar(matched_events(splits[1], matched), "measuring reads")), sinks, draws=asked.draws, seed=asked.seed, memory=memory)
    pool = {kind: calibrated[kind] | selections[kind].heads for kind in kinds}
    sorted_heads = families(reads, pool, (model.n_layers, model.n_heads), asked.alpha)
    blocked = []
    for name, kind in bar([(name, kind) for name, own in FAMILY_KINDS.items() for kind in own if kind in held], "blocking reads"):
        heads = sorted_heads.named[name]
        if len(heads):
            span = FAMILY_SPAN[name]
            blocked.append((name, block_reads(model, evaluation, heads, kind, span, means, sinks, other_span=OTHER[span], labels=labels, reference=reference, seed=asked.seed, memory=memory)))
    elicited, eliciting = _elicit(model, splits, labels, asked, memory, bar)
    import pandas as pd

    dropped = {kind: dict(sorted(Counter(d.reason for s in splits[2] for d in s.dropped if d.kind in ("", kind)).items())) for kind in kinds}
    return Standing(selections, together, judged, phase, pd.concat(robust, ignore_index=True) if robust else pd.DataFrame(), stability, knocked, sorted_heads, blocked, sinks, dropped, elicited, eliciting)


def _elicit(model: DecisionModel, splits: Sequence[Sequence[Survey]], labels: LabelSpace, asked: Options, memory: int, bar):
    """Cues before the code, on held-out texts, and the heads that make the region come out; nothing without a cue."""
    if not asked.cue:
        return None, {}
    texts = {name: [s.reading for s in part] for name, part in zip(ASKED, splits, strict=True)}
    steps = bar(["code", "cut", "cue"], "asking before the code")
    next(steps)
    try:
        elicited = elicit(model, texts["evaluation"][:asked.held_out or None], labels, cue=asked.cue, where=asked.cut_from, memory=memory)
    except InputError as error:  # a cue that gives the answer away: the rest of the run stands
        return None, {"asked": str(error)}
    try:  # once for both places of ablation
        read = {name: read_codes(model, part[:ASKED[name]], labels, cue=asked.cue, most=MOST_CUTS, where=asked.cut_from, memory=memory) for name, part in texts.items()}
    except InputError as error:
        return elicited, dict.fromkeys(steps, str(error))
    eliciting = {}
    for at in steps:
        try:
            eliciting[at] = elicitation_heads(model, read, labels, cue=asked.cue, where=asked.cut_from, at=at, alpha=asked.alpha, delta=asked.delta, seed=asked.seed, draws=asked.draws,
                                              minimum=min(asked.minimum, MINIMUM), memory=memory)
        except InputError as error:
            eliciting[at] = str(error)
    return elicited, eliciting


def _stability(model: DecisionModel, cases: Mapping[Kind, Sequence[Case]], halves: Sequence[tuple[frozenset[str], Mapping[Kind, HeadSet]]], asked: Options,
               memory: int, bar) -> pd.DataFrame:
    """Calibrate and select on either half of the selection split: how alike are the sets?"""
    import pandas as pd

    rng, total, rows = np.random.default_rng(asked.seed), len(model.hooked.heads), []
    for kind in bar(list(cases), "selecting on halves"):
        parts = [[c for c in cases[kind] if c.transcript in ids] for ids, _ in halves]
        if len(parts) < 2 or not all(parts):
            continue
        one, other = (select(model, part, found.get(kind, HeadSet()), target=asked.target, memory=memory).heads for part, (_, found) in zip(parts, halves, strict=True))
        drawn = np.array([jaccard(*({*rng.choice(total, len(s), replace=False)} for s in (one, other))) for _ in range(999)])
        alike = jaccard({*one}, {*other})
        rows.append({"kind": kind, "one": " ".join(map(str, one)), "other": " ".join(map(str, other)), "jaccard": alike, "chance": float(drawn.mean()), "p": p_value(alike, drawn)})
    return pd.DataFrame(rows, columns=["kind", "one", "other", "jaccard", "chance", "p"])


def of_some_texts(cases: Sequence[Case], most: int) -> list[Case]:
    """All decisions of at most so many transcripts, evenly: few long packs are faster than many short ones."""
    names = list(dict.fromkeys(c.transcript for c in cases))
    kept = {names[i] for i in np.linspace(0, len(names) - 1, min(most, len(names))).round().astype(int)} if names else set()
    return [c for c in cases if c.transcript in kept]


def jaccard(one: set, other: set) -> float:
    """Shared of all; 0 where both are empty, for nothing was found twice."""
    return len(one & other) / len(one | other) if one | other else 0.0
