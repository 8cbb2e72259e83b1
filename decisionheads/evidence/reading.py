"""Evidence alignment: whether the heads that decide a code read what humans marked for it.

The same gold codes are teacher-forced in every arm (a model with its decision heads), equal numbers of heads are
pooled, and their attention at each code's decision is held against the code's evidence (see `alignment`), against
that of random heads of the same layers, and against the first arm's. Attention is not cause: what blocking the
evidence takes from the margin stands beside it, with a window of equal length in the same note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from .._cache import Prefix
from .._packs import MEMORY, each_pack
from .._rows import Engine
from ..ablation import check_events, event_margin
from ..branches import Branch, branch_logits, run_pack
from ..corpora.notes import EVIDENCE
from ..decisions import Kind
from ..heads import HeadSet
from ..interventions import BlockReads
from ..knock_in import random_heads
from ..model import Reading
from ..reads import Span
from ..spans import Sinks, as_keys, windows
from ..transcripts import Encoded
from ..views import Brief, Viewed
from .alignment import MEASURES, holm, measures, paired
from .texts import TRUNCATED, EvidenceText, Unit

if TYPE_CHECKING:
    import pandas as pd

    from ..model import DecisionModel
    from ..prefixes import Prefixes

Array = np.ndarray
RANDOM = 20  # sets of random heads that a baseline is the mean of
RANDOM_HEADS = "random heads"


@dataclass(frozen=True)
class Arm:
    """A model with the heads that decide in it.

    Attributes:
        name: of the arm.
        heads: of each kind of decision, equally many in every arm.
        sinks: token ids fixed on the reference split of the run that found the heads.
    """

    name: str
    heads: Mapping[Kind, HeadSet]
    sinks: Sinks

    def others(self, kind: Kind, n_layers: int, n_heads: int, sets: int = RANDOM, seed: int = 0) -> list[HeadSet]:
        """Sets of random heads of the same layers, none of its own; the same for every text."""
        rng = np.random.default_rng([seed, ("region", "label", "departure").index(kind)])
        return [random_heads(self.heads[kind], n_layers, n_heads, rng) for _ in range(sets)]


@torch.no_grad()
def pooled_rows(hooked: Engine, prefix: Prefix, positions: Sequence[int], sets: Sequence[HeadSet], memory: int = MEMORY) -> Float[Array, "position set key"]:
    """Attention from some positions to every key before them, averaged over each set of heads.

    A row's own key is left out; whole patterns are never kept. A set without heads gives zeros.
    """
    weights = torch.stack([torch.as_tensor(s.to_mask(hooked.n_layers, hooked.n_heads) / max(1, len(s))) for s in sets]).to(hooked.device, hooked.dtype)
    out = torch.zeros(len(positions), len(sets), len(prefix), device=hooked.device)
    branches = [Branch(p, ids=()) for p in positions]

    def of_pack(pack: list[int]) -> None:
        length = max(branches[i].position for i in pack)
        mass = torch.zeros(len(pack), len(sets), length, device=hooked.device)

        def pool(layer: int, pattern: Tensor) -> None:
            seen = pattern[..., :length] if hooked.packed else pattern[..., :-1]  # keys of the rows themselves stand last
            begin = length - seen.shape[-1]  # a sliding cache holds the last keys only
            mass[..., begin:] += torch.einsum("gh,hrk->rgk", weights[:, layer], seen.to(weights.dtype)).float()

        run_pack(hooked, prefix, [branches[i] for i in pack], on_pattern=pool)
        out[pack, :, :length] = mass

    each_pack(hooked, branches, memory, of_pack)
    return out.double().cpu().numpy()


@dataclass(frozen=True, eq=False, repr=False)
class Aligned(Brief):
    """What was measured in one text.

    Attributes:
        own: `[unit, measure]` of the decision heads.
        random: `[unit, set, measure]` of random heads.
        on_note: `[unit]` mass on the note, sinks left out, of the decision heads' pooled row.
        margin: `[unit]` in logits.
        lost, lost_control: `[unit]` margin lost by blocking the evidence, and a window of equal length; NaN where there is none.
    """

    own: Float[Array, "unit measure"]
    random: Float[Array, "unit set measure"]
    on_note: Float[Array, " unit"]
    margin: Float[Array, " unit"]
    lost: Float[Array, " unit"]
    lost_control: Float[Array, " unit"]


def align(model: DecisionModel, text: EvidenceText, encoded: Encoded, units: Sequence[Unit], arm: Arm, prefixes: Prefixes, *, sets: int = RANDOM, seed: int = 0,
          memory: int = MEMORY) -> Aligned:
    """Measure every unit of a text.

    Args:
        units: their kinds have heads in the arm.
        sets: of random heads.
        seed: of random heads.

    Raises:
        ExactnessError: if the clean rows differ from the plain model's logits.
    """
    events = tuple(u.event for u in units)
    positions = tuple(dict.fromkeys(sorted(e.position for e in events)))
    ids = torch.tensor(encoded.ids[:positions[-1] + 1], dtype=torch.long, device=model.hooked.device)
    reading = Reading(text.transcript, encoded, events, prefixes.read(ids, positions))
    check_events(model, reading, events, memory)
    n = len(reading.prefix)
    keys_of = lambda spans: as_keys(token_runs(encoded, spans), n)  # noqa: E731
    whole = keys_of([(s.start, s.end) for s in text.transcript.spans if s.name == "note"])
    note = whole & ~arm.sinks.keys(encoded.ids[:n])
    marked: dict[str, list[tuple[int, int]]] = {}
    for s in text.transcript.spans:
        if s.name == EVIDENCE and s.of not in text.truncated:
            marked.setdefault(s.of, []).append((s.start, s.end))
    keys = {code: keys_of(spans) for code, spans in marked.items()}
    own = np.full((len(units), len(MEASURES)), np.nan)
    random, on_note = np.full((len(units), sets, len(MEASURES)), np.nan), np.full(len(units), np.nan)
    for kind in sorted({e.kind for e in events}):
        mine = [i for i, e in enumerate(events) if e.kind == kind]
        groups = [arm.heads[kind], *arm.others(kind, model.n_layers, model.n_heads, sets, seed)]
        rows = pooled_rows(model.hooked, reading.prefix, [events[i].position for i in mine], groups, memory)
        for i, row in zip(mine, rows, strict=True):
            on_note[i] = row[0][note].sum()
            if (keys[units[i].code] & note).any():  # evidence of nothing but sinks cannot be read
                found = np.stack([measures(r, note, keys[units[i].code], [k for code, k in keys.items() if code != units[i].code]) for r in row])
                own[i], random[i] = found[0], found[1:]
    return Aligned(own, random, on_note, *blocked(model, reading, units, arm, whole, np.logical_or.reduce(list(keys.values())), memory))


def blocked(model: DecisionModel, reading: Reading, units: Sequence[Unit], arm: Arm, note: Array, marked: Array, memory: int = MEMORY) -> tuple[Array, Array, Array]:
    """Margin at each unit's decision; what blocking reads of its evidence takes from it; and a window of the note as long, nearest, without evidence."""
    margins = [event_margin(reading, u.event) for u in units]
    avoid, bounds = runs_of(marked), (int(np.flatnonzero(note)[0]), int(np.flatnonzero(note)[-1]) + 1)
    targets = [token_runs(reading.encoded, u.spans) for u in units]
    branches, names = [], []
    for i, (unit, target) in enumerate(zip(units, targets, strict=True)):
        for name, spans in (("clean", []), ("own", target), ("control", windows(target, avoid, bounds, 1))):
            if spans or name == "clean":
                change = tuple(BlockReads(arm.heads[unit.event.kind], *s) for s in spans)
                branches.append(Branch(unit.event.position, (), change, (margins[i].chosen, *margins[i].against)))
                names.append((i, name))
    found = {names[j]: float(margins[names[j][0]].among(branches[j].ids)(rows[0])) for j, rows in branch_logits(model.hooked, reading.prefix, branches, memory)}
    clean = np.array([found[i, "clean"] for i in range(len(units))])
    lost = lambda name: np.array([found[i, "clean"] - found.get((i, name), np.nan) for i in range(len(units))])  # noqa: E731
    return clean, lost("own"), lost("control")


def token_runs(encoded: Encoded, spans: Sequence[tuple[int, int]]) -> list[Span]:
    """Runs of token positions that overlap any of these characters, each token once."""
    keys = np.zeros(len(encoded), bool)
    for start, end in spans:
        keys[encoded.tokens_in(start, end)] = True
    return runs_of(keys)


def runs_of(keys: Array) -> list[Span]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], keys.astype(int), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


# -- conclusions ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Measured(Brief):
    """One corpus in one arm: `rows[(document, text, code)]` has what `Aligned` has of that unit, and counts of codes that were left out."""

    corpus: str
    in_domain: bool
    arm: str
    rows: Mapping[tuple[str, str, str], tuple]
    left_out: Counter[str]


@dataclass(frozen=True, eq=False)
class Evidence(Viewed):
    """The result: tables, see docs/evidence.md.

    Attributes:
        evidence: a row for each corpus, arm and measure, against random heads.
        comparisons: a row for each corpus, further arm and measure, against the first arm.
        blocking: a row for each corpus and arm: the margin that blocking the evidence takes, against a window of equal length.
        left_out: a row for each corpus, arm and reason.
    """

    evidence: pd.DataFrame
    comparisons: pd.DataFrame
    blocking: pd.DataFrame
    left_out: pd.DataFrame

    def to_frame(self) -> pd.DataFrame:
        return self.evidence

    def __repr__(self) -> str:
        e = self.evidence
        return f"Evidence({e.corpus.nunique()} corpora, {e.arm.nunique()} arms, {int(e.codes.max()) if len(e) else 0} codes at most)"


def random_mean(random: Float[Array, "unit set"]) -> Float[Array, " unit"]:
    """Mean over random sets, where at least half of them are defined."""
    there = np.isfinite(random)
    count = there.sum(1)
    return np.where(2 * count >= random.shape[1], np.where(there, random, 0.0).sum(1) / np.maximum(count, 1), np.nan) if len(random) else np.zeros(0)


def conclude(measured: Sequence[Measured], *, draws: int = 9_999, seed: int = 0) -> Evidence:
    """Compare each arm with its random heads and with the first arm, on the units that all arms have.

    Holm's correction is over measures, corpora and both kinds of comparison together; over corpora and arms for blocking.

    Args:
        measured: corpora and arms, the first arm of each corpus first.
    """
    import pandas as pd

    tables: dict[str, list[dict]] = {"evidence": [], "comparisons": [], "blocking": [], "left_out": []}
    for corpus in dict.fromkeys(m.corpus for m in measured):
        sides = [m for m in measured if m.corpus == corpus]
        common = sorted(set.intersection(*(set(m.rows) for m in sides)))
        _, documents = np.unique([unit[0] for unit in common], return_inverse=True) if common else ([], np.zeros(0, int))
        column = lambda side, n, common=common: np.array([side.rows[unit][n] for unit in common], float)  # noqa: E731
        width = len(MEASURES)
        values = {m.arm: column(m, 0).reshape(len(common), width) for m in sides}
        for side in sides:
            apart = Counter(side.left_out)
            apart["no decision in another arm"] += len(side.rows) - len(common)
            about = {"corpus": corpus, "read": "in domain" if side.in_domain else "zero-shot", "arm": side.arm}
            tables["left_out"] += [{**about, "reason": reason, "codes": n} for reason, n in sorted(apart.items()) if n]
            random = column(side, 1).reshape(len(common), -1, width)
            for j, measure in enumerate(MEASURES):
                row = {**about, "measure": measure}
                found = paired(values[side.arm][:, j], random_mean(random[:, :, j]), documents, draws=draws, seed=seed)
                tables["evidence"].append(_row(row, RANDOM_HEADS, found, "random_mean") | {"truncated": side.left_out[TRUNCATED]})
                if side is not sides[0]:
                    tables["comparisons"].append(_row(row, sides[0].arm, paired(values[side.arm][:, j], values[sides[0].arm][:, j], documents, draws=draws, seed=seed), "other_mean"))
            lost = paired(column(side, 4), column(side, 5), documents, draws=draws, seed=seed)
            margin = column(side, 3)
            tables["blocking"].append(_row(about, "window of equal length", lost, "control_mean") | {"margin": float(margin.mean()) if len(margin) else np.nan})
    corrected = holm([r["p"] for name in ("evidence", "comparisons") for r in tables[name]])
    for row, p in zip([*tables["evidence"], *tables["comparisons"]], corrected, strict=True):
        row["holm_p"] = p
    for row, p in zip(tables["blocking"], holm([r["p"] for r in tables["blocking"]]), strict=True):
        row["holm_p"] = p
    return Evidence(*(pd.DataFrame(tables[name]) for name in ("evidence", "comparisons", "blocking", "left_out")))


def _row(about: dict, against: str, found, other: str) -> dict:
    return {**about, "against": against, "mean": found.mean, "low": found.low, "high": found.high, other: found.other, "difference": found.difference, "difference_low": found.difference_low,
            "difference_high": found.difference_high, "p": found.p, "holm_p": np.nan, "documents": found.documents, "codes": found.units, "undefined": found.undefined}
