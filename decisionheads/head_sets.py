"""Head sets: which few heads carry a kind of decision together, and whether they are needed and enough.

    necessity    N = sum(m - m(S ablated)) / sum(m - m0)
    sufficiency  R = sum(m(all but S ablated) - m0) / sum(m - m0)

per transcript and pooled; `m0` is the margin with every head ablated. A set is selected on one split and
judged on another, against random sets of the same shape. `R > 1` is legal: other heads may oppose.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float

from ._cache import Prefix
from .ablation import ReferenceMeans, event_margin
from .branches import MEMORY, Branch, branch_logits
from .errors import InputError
from .events import Kind
from .heads import Head, HeadSet
from .interventions import Keep, MeanAblate
from .margin import Margin

if TYPE_CHECKING:
    import pandas as pd

    from .model import DecisionModel, Reading

Array = np.ndarray
LEAST = 0.5  # logits of `sum(m - m0)`, below which a transcript's ratios are undefined
ALL, SOME, FEWEST = 2_000, 1_000, 20  # random sets: all if that few, else a sample; none under the fewest


@dataclass(frozen=True, eq=False)
class Case:
    """One decision, ready to be measured with any set of heads ablated."""

    prefix: Prefix
    position: int
    zbar: Float[Array, "layer head d_head"]
    margin: Margin
    alternatives: tuple[int, ...]
    transcript: str
    group: str


def cases_of(readings: Iterable[Reading], kind: Kind, means: ReferenceMeans) -> list[Case]:
    """The primary events of a kind; raises InputError if a transcript is one of the reference split."""
    return [Case(r.prefix, e.position, means.of(e), event_margin(r, e), e.alternatives, e.transcript, r.transcript.group or e.transcript)
            for r in readings for e in r.events if e.kind == kind and e.primary]


@dataclass(frozen=True, eq=False)
class SetMargins:
    """Margins with sets of heads ablated, and with all others ablated.

    Attributes:
        m, m0: clean, and with every head ablated, in logits.
        without, only: with each set ablated, and with all heads but the set ablated.
        kept_without, kept_only: whether the chosen token is still the best of all alternatives.
    """

    m: Float[Array, " case"]
    m0: Float[Array, " case"]
    without: Float[Array, "set case"]
    only: Float[Array, "set case"]
    kept_without: Bool[Array, "set case"]
    kept_only: Bool[Array, "set case"]


def set_margins(model: DecisionModel, cases: Sequence[Case], sets: Sequence[HeadSet], *, without: bool = True, only: bool = True, memory: int = MEMORY) -> SetMargins:
    """Measure every set at every case; the empty set is exactly `m` and `m0`.

    Args:
        without, only: which of the two is wanted; the other stays clean and `m0`.
    """
    m, m0 = np.zeros(len(cases), np.float32), np.zeros(len(cases), np.float32)
    margins = np.zeros((2, len(sets), len(cases)), np.float32)
    kept = np.zeros((2, len(sets), len(cases)), bool)
    for prefix in dict.fromkeys(id(c.prefix) for c in cases):
        mine = [i for i, c in enumerate(cases) if id(c.prefix) == prefix]
        branches: list[Branch] = []
        roles: list[tuple[int, int, int]] = []  # case, which of the two, set; -1 for the clean text and m0
        for i in mine:
            c = cases[i]
            ids = tuple(sorted({c.margin.chosen, *c.margin.against, *c.alternatives}))
            jobs = [(-1, 0, ()), (-1, 1, (Keep(HeadSet(), c.zbar),))]
            jobs += [(s, 0, (MeanAblate(heads, c.zbar),)) for s, heads in enumerate(sets) if without and len(heads)]
            jobs += [(s, 1, (Keep(heads, c.zbar),)) for s, heads in enumerate(sets) if only and len(heads)]
            branches += [Branch(c.position, (), change, ids) for _, _, change in jobs]
            roles += [(i, which, s) for s, which, _ in jobs]
        for n, logits in branch_logits(model.hooked, cases[mine[0]].prefix, branches, memory):
            i, which, s = roles[n]
            c, ids = cases[i], branches[n].ids
            value = float(c.margin.among(ids)(logits[0]))
            best = c.alternatives[int(logits[0][[ids.index(a) for a in c.alternatives]].argmax())] == c.margin.chosen
            if s >= 0:
                margins[which, s, i], kept[which, s, i] = value, best
                continue
            (m if which == 0 else m0)[i] = value
            for e, heads in enumerate(sets):
                if not len(heads) or not (without, only)[which]:
                    margins[which, e, i], kept[which, e, i] = value, best
    return SetMargins(m, m0, margins[0], margins[1], kept[0], kept[1])


def pooled_recovery(found: SetMargins) -> Float[Array, " set"]:
    """R over all cases together."""
    return (found.only - found.m0).sum(1, dtype=np.float64) / (found.m - found.m0).sum(dtype=np.float64)


# -- selection ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Selection:
    """A set, frozen.

    Attributes:
        heads: what was kept.
        recovery: joint recovery of the set, on the split it was selected on.
        added: backups that the candidates needed to reach the target.
        removed: `(head, recovery after it)`, in order.
        reached: whether the target was reached at all.
    """

    heads: HeadSet
    recovery: float
    added: tuple[Head, ...]
    removed: tuple[tuple[Head, float], ...]
    reached: bool

    @property
    def digest(self) -> str:
        """Content hash of the set."""
        return self.heads.digest


def select(model: DecisionModel, cases: Sequence[Case], candidates: HeadSet, *, target: float = 0.8, memory: int = MEMORY) -> Selection:
    """Eliminate candidates backward, by joint recovery, as long as the rest reaches the target (or, where
    the target is out of reach, does no worse).

    All members are scored again at each step: a ranking is not monotone where heads back each other up,
    and going forward gets stuck where two are needed together. Candidates that fall short of the target
    together are joined first by the heads that matter most once they are ablated.
    """
    if not cases:
        raise InputError("there is no decision of this kind in the selection split; add transcripts")
    score = lambda sets: pooled_recovery(set_margins(model, cases, sets, without=False, memory=memory))  # noqa: E731
    heads, added, removed = candidates, [], []
    recovery = float(score([heads])[0])
    if recovery < target:
        for head in _backups(model, cases, candidates, memory):
            heads = heads | HeadSet([head])
            added.append(head)
            recovery = float(score([heads])[0])
            if recovery >= target:
                break
    while len(heads):
        members = list(heads)
        scores = score([heads - HeadSet([head]) for head in members])
        best = int(scores.argmax())  # ties: the first in (layer, head) order
        if scores[best] < min(target, recovery):
            break
        heads, recovery = heads - HeadSet([members[best]]), float(scores[best])
        removed.append((members[best], recovery))
    return Selection(heads, recovery, tuple(added), tuple(removed), recovery >= target)


def _backups(model: DecisionModel, cases: Sequence[Case], candidates: HeadSet, memory: int) -> list[Head]:
    """Heads outside the candidates by what they are worth once those are ablated; the useless left out."""
    others = [head for head in model.hooked.heads if head not in candidates]
    found = set_margins(model, cases, [candidates, *(candidates | HeadSet([h]) for h in others)], only=False, memory=memory)
    worth = (found.without[:1] - found.without[1:]).mean(1)
    return [others[i] for i in np.argsort(-worth, kind="stable") if worth[i] > 0]


# -- judgement ----------------------------------------------------------------------------------------


def random_sets(heads: HeadSet, among: HeadSet, seed: int = 0, some: int = SOME) -> tuple[list[HeadSet], str]:
    """Random sets with as many heads in each layer as `heads`, none of its own; and how they were drawn.

    All of them where there are at most 2,000, else distinct ones; where there are fewer than 20, sets
    of the same size in any layer, disjoint from `heads`; fewer than 20 of those, too: none.
    """
    rng = np.random.default_rng(seed)
    others = [head for head in among if head not in heads]
    free = {layer: [h for h in others if h.layer == layer] for layer in heads.per_layer()}
    matched = [(free[layer], count) for layer, count in heads.per_layer().items()]
    for pools, how in ((matched, "layers matched"), ([(others, len(heads))], "same size, any layer")):
        number = math.prod(math.comb(len(pool), count) for pool, count in pools)
        if number <= FEWEST - 1:
            continue
        if number <= ALL:
            parts = itertools.product(*(itertools.combinations(pool, count) for pool, count in pools))
            return [HeadSet(h for part in chosen for h in part) for chosen in parts], f"{how}, all {number}"
        found: dict[HeadSet, None] = {}
        while len(found) < some:
            found[HeadSet(pool[i] for pool, count in pools for i in rng.choice(len(pool), count, replace=False))] = None
        return list(found), f"{how}, {some} of {number}"
    return [], "undefined: fewer than 20 sets can be drawn"


@dataclass(frozen=True, eq=False)
class Judged:
    """Necessity and sufficiency of a set on held-out transcripts.

    Attributes:
        heads: the set.
        transcripts: their ids; the arrays below follow them.
        necessity, sufficiency: N and R; NaN where undefined.
        necessity_p, sufficiency_p: against the random sets; NaN where undefined.
        pooled: N and R over all defined transcripts together.
        margins: `m`, `m0`, and with the set ablated, and alone: means over cases, in logits.
        kept, chance: share of choices kept without the set, and the mean of 1 / alternatives.
        drawn: how the random sets were drawn.
        undefined: transcripts whose ratios are undefined.
    """

    heads: HeadSet
    transcripts: tuple[str, ...]
    groups: tuple[str, ...]
    necessity: Float[Array, " transcript"]
    sufficiency: Float[Array, " transcript"]
    necessity_p: Float[Array, " transcript"]
    sufficiency_p: Float[Array, " transcript"]
    pooled: tuple[float, float]
    margins: tuple[float, float, float, float]
    kept: float
    chance: float
    drawn: str
    undefined: int

    @property
    def kappa(self) -> float:
        """Choices kept without the set, corrected for chance: 0 is guessing."""
        return (self.kept - self.chance) / (1 - self.chance)

    @property
    def usable(self) -> bool:
        """Whether at most a fifth of the transcripts are undefined."""
        return self.undefined <= 0.2 * len(self.transcripts)

    def share(self, what: str, alpha: float = 0.05) -> tuple[int, int, float, float, float]:
        """`(k, n, share, low, high)`: transcripts that are `necessary` or `sufficient`.

        A transcript counts with a ratio of at least .5 that beats the random sets at `alpha`. 95% limits:
        Clopper-Pearson where transcripts are independent, else a bootstrap over groups.
        """
        ratio, p = (self.necessity, self.necessity_p) if what == "necessary" else (self.sufficiency, self.sufficiency_p)
        defined = np.isfinite(ratio) & np.isfinite(p)
        yes = (ratio >= 0.5) & (p <= alpha) & defined
        k, n = int(yes.sum()), int(defined.sum())
        if not n:
            return 0, 0, float("nan"), float("nan"), float("nan")
        return k, n, k / n, *_limits(yes[defined], np.array(self.groups)[defined])

    def to_frame(self) -> pd.DataFrame:
        """One row for each transcript."""
        import pandas as pd

        return pd.DataFrame({"transcript": self.transcripts, "necessity": self.necessity, "necessity_p": self.necessity_p,
                             "sufficiency": self.sufficiency, "sufficiency_p": self.sufficiency_p})

    def __repr__(self) -> str:
        return f"Judged({len(self.heads)} heads, {len(self.transcripts)} transcripts: N {self.pooled[0]:.2f}, R {self.pooled[1]:.2f}, kappa {self.kappa:.2f}; {self.drawn})"


def judge(model: DecisionModel, cases: Sequence[Case], heads: HeadSet, *, seed: int = 0, some: int = SOME, memory: int = MEMORY) -> Judged:
    """Necessity and sufficiency of a set against random sets, per transcript and pooled."""
    if not cases:
        raise InputError("there is no decision of this kind in the evaluation split; add transcripts")
    drawn, how = random_sets(heads, model.hooked.heads, seed, some) if len(heads) else ([], "undefined: the set is empty")
    found = set_margins(model, cases, [heads, *drawn], memory=memory)
    names = tuple(dict.fromkeys(c.transcript for c in cases))
    group = {c.transcript: c.group for c in cases}
    member = np.array([[c.transcript == name for c in cases] for name in names], np.float64)
    total = member @ (found.m - found.m0)
    defined = total >= max(LEAST, 0.1 * float(np.median(total)))
    safe = np.where(defined, total, np.nan)
    necessity = ((found.m - found.without) @ member.T) / safe
    sufficiency = ((found.only - found.m0) @ member.T) / safe
    p = lambda x: np.where(defined, (1 + (x[1:] >= x[0]).sum(0)) / len(x), np.nan) if len(drawn) else np.full(len(names), np.nan)  # noqa: E731
    inside = np.array([defined[names.index(c.transcript)] for c in cases])
    whole = float((found.m - found.m0)[inside].sum())
    pooled = tuple(float(x[inside].sum()) / whole if whole else float("nan") for x in (found.m - found.without[0], found.only[0] - found.m0))
    return Judged(heads, names, tuple(group[n] for n in names), necessity[0], sufficiency[0], p(necessity), p(sufficiency), pooled,
                  tuple(float(x.mean()) for x in (found.m, found.m0, found.without[0], found.only[0])), float(found.kept_without[0].mean()),
                  float(np.mean([1 / len(c.alternatives) for c in cases])), how, int((~defined).sum()))


def _limits(yes: Bool[Array, " transcript"], groups: Array) -> tuple[float, float]:
    """95% limits of a share."""
    from scipy.stats import binomtest

    sizes = Counter(groups.tolist())
    if max(sizes.values()) == 1:
        low, high = binomtest(int(yes.sum()), len(yes)).proportion_ci(method="exact")
        return float(low), float(high)
    rng, names = np.random.default_rng(0), list(sizes)
    hits, counts = np.array([yes[groups == n].sum() for n in names]), np.array([sizes[n] for n in names])
    drawn = rng.integers(0, len(names), (2_000, len(names)))
    shares = hits[drawn].sum(1) / counts[drawn].sum(1)
    return float(np.quantile(shares, 0.025)), float(np.quantile(shares, 0.975))
