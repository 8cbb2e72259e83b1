"""Necessity and sufficiency: is a set of heads needed for a kind of decision, and is it enough?

    necessity    N = sum(m - m(S ablated)) / sum(m - m0)
    sufficiency  R = sum(m(all but S ablated) - m0) / sum(m - m0)

per transcript and pooled, on texts that the set was not selected on, against random sets of the same
shape. `m0` is the margin with every head ablated. `R > 1` is legal: other heads may oppose.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float

from .branches import MEMORY
from .calibration import ratio_interval
from .errors import InputError
from .head_sets import Case, Selection, set_margins, with_reference
from .heads import HeadSet
from .views import Viewed

if TYPE_CHECKING:
    import pandas as pd

    from .model import DecisionModel

Array = np.ndarray
LEAST = 0.5  # logits of `sum(m - m0)`, below which a transcript's ratios are undefined
SOME, FEWEST = 1_000, 20  # random sets that are drawn; undefined under the fewest


def random_sets(heads: HeadSet, among: HeadSet, seed: int = 0, some: int = SOME) -> tuple[list[HeadSet], str]:
    """Random sets with as many heads in each layer as `heads`, none of its own; and how they were drawn.

    All of them where there are at most twice `some` (2,000), else `some` distinct ones; where there are
    fewer than 20, sets of the same size in any layer, disjoint from `heads`; fewer than 20 of those, too: none.
    """
    rng = np.random.default_rng(seed)
    others = [head for head in among if head not in heads]
    free = {layer: [h for h in others if h.layer == layer] for layer in heads.per_layer()}
    matched = [(free[layer], count) for layer, count in heads.per_layer().items()]
    for pools, how in ((matched, "layers matched"), ([(others, len(heads))], "same size, any layer")):
        number = math.prod(math.comb(len(pool), count) for pool, count in pools)
        if number <= FEWEST - 1:
            continue
        if number <= 2 * some:
            parts = itertools.product(*(itertools.combinations(pool, count) for pool, count in pools))
            return [HeadSet(h for part in chosen for h in part) for chosen in parts], f"{how}, all {number}"
        found: dict[HeadSet, None] = {}
        while len(found) < some:
            found[HeadSet(pool[i] for pool, count in pools for i in rng.choice(len(pool), count, replace=False))] = None
        return list(found), f"{how}, {some} of {number}"
    return [], "undefined: fewer than 20 sets can be drawn"


def few_random_sets(heads: HeadSet, among: HeadSet, seed: int, count: int) -> list[HeadSet]:
    """A few of them, where only their mean is wanted; none for the empty set."""
    drawn = random_sets(heads, among, seed, FEWEST)[0] if len(heads) else []
    return [drawn[i] for i in np.random.default_rng(seed).permutation(len(drawn))[:count]]


@dataclass(frozen=True, eq=False)
class Judged(Viewed):
    """Necessity and sufficiency of a set on held-out transcripts.

    Attributes:
        heads: the set.
        transcripts, groups: of the arrays `[transcript]` below.
        necessity, sufficiency: N and R; NaN where undefined.
        necessity_p, sufficiency_p: against the random sets; NaN where undefined.
        case_groups: of the arrays `[case]` below; cases of undefined transcripts have a `carried` of 0.
        carried, lost, alone: `m - m0`, `m - m(S ablated)` and `m(only S) - m0`, logits.
        kept, kept_alone, chance: whether the choice is kept without the set, and with it alone; 1 / alternatives.
        margins: `m`, `m0`, and with the set ablated, and alone: means over cases, in logits.
        random: `[2, set]` pooled N and R of the random sets.
        random_kept: share of choices kept without a random set; NaN where none are drawn.
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
    case_groups: tuple[str, ...]
    carried: Float[Array, " case"]
    lost: Float[Array, " case"]
    alone: Float[Array, " case"]
    kept: Bool[Array, " case"]
    kept_alone: Bool[Array, " case"]
    chance: Float[Array, " case"]
    margins: tuple[float, float, float, float]
    random: Float[Array, "2 set"]
    random_kept: float
    drawn: str
    undefined: int

    @property
    def pooled(self) -> tuple[float, float]:
        """N and R over all defined transcripts together."""
        whole = float(self.carried.sum())
        return (float(self.lost.sum()) / whole, float(self.alone.sum()) / whole) if whole else (float("nan"), float("nan"))

    def interval(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """95% limits of the pooled N and R, by a bootstrap over groups."""
        low, high = ratio_interval(np.stack([self.lost, self.alone]), self.carried, self.case_groups)
        return (float(low[0]), float(high[0])), (float(low[1]), float(high[1]))

    @property
    def random_95(self) -> tuple[float | None, float | None]:
        """95% quantiles of the pooled N and R of random sets; None where there are none."""
        return (plain(np.quantile(self.random[0], 0.95)), plain(np.quantile(self.random[1], 0.95))) if self.random.size else (None, None)

    @property
    def kappa(self) -> float:
        """Choices kept without the set, corrected for chance: 0 is guessing."""
        return float((self.kept.mean() - self.chance.mean()) / (1 - self.chance.mean()))

    def kappa_interval(self) -> tuple[float, float]:
        """95% limits of kappa, by a bootstrap over groups."""
        low, high = ratio_interval(self.kept - self.chance, 1 - self.chance, self.case_groups)
        return float(low), float(high)

    @property
    def usable(self) -> bool:
        """Whether at most a fifth of the transcripts are undefined."""
        return self.undefined <= 0.2 * len(self.transcripts)

    def share(self, what: str, alpha: float = 0.05) -> tuple[int, int, float, float, float]:
        """`(k, n, share, low, high)`: transcripts that are `necessary` or `sufficient`.

        A transcript counts with a ratio of at least .5 that beats the random sets at `alpha`. 95% limits:
        Clopper-Pearson where transcripts are independent, else a bootstrap over groups. NaN where more than
        a fifth of the transcripts are undefined.
        """
        ratio, p = (self.necessity, self.necessity_p) if what == "necessary" else (self.sufficiency, self.sufficiency_p)
        defined = np.isfinite(ratio) & np.isfinite(p)
        yes = (ratio >= 0.5) & (p <= alpha) & defined
        k, n = int(yes.sum()), int(defined.sum())
        if not n or not self.usable:
            return k, n, float("nan"), float("nan"), float("nan")
        return k, n, k / n, *share_limits(yes[defined], np.array(self.groups)[defined])

    def summary(self) -> dict:
        """Everything that is printed of it, as plain values; None where undefined."""
        share = lambda what: dict(zip(("k", "n", "share", "low", "high"), map(plain, self.share(what)), strict=True))  # noqa: E731
        (n_low, n_high), (r_low, r_high) = self.interval()
        low, high = self.kappa_interval()
        ratio = lambda row, a, b: {"pooled": plain(self.pooled[row]), "low": plain(a), "high": plain(b),  # noqa: E731
                                   "random": plain(np.quantile(self.random[row], 0.5)) if self.random.size else None, "random_95": self.random_95[row]}
        return {"set": list(map(str, self.heads)), "digest": self.heads.digest, "transcripts": len(self.transcripts), "events": len(self.carried),
                "undefined": self.undefined, "necessary": share("necessary"), "sufficient": share("sufficient"), "necessity": ratio(0, n_low, n_high),
                "recovery": ratio(1, r_low, r_high), "m": plain(self.margins[0]), "m0": plain(self.margins[1]), "m_without": plain(self.margins[2]),
                "m_alone": plain(self.margins[3]), "attention_share": plain((self.margins[0] - self.margins[1]) / self.margins[0]) if self.margins[0] else None, "kept": plain(self.kept.mean()), "kept_alone": plain(self.kept_alone.mean()), "kept_without_random": plain(self.random_kept), "chance": plain(self.chance.mean()),
                "kappa": {"value": plain(self.kappa), "low": plain(low), "high": plain(high)}, "random_sets": self.drawn}

    def to_frame(self) -> pd.DataFrame:
        """One row for each transcript."""
        import pandas as pd

        return pd.DataFrame({"transcript": self.transcripts, "necessity": self.necessity, "necessity_p": self.necessity_p,
                             "sufficiency": self.sufficiency, "sufficiency_p": self.sufficiency_p})

    def __repr__(self) -> str:
        return f"Judged({len(self.heads)} heads, {len(self.transcripts)} transcripts: N {self.pooled[0]:.2f}, R {self.pooled[1]:.2f}, kappa {self.kappa:.2f}; {self.drawn})"


def judge(model: DecisionModel, cases: Sequence[Case], chosen: HeadSet | Selection, *, seed: int = 0, some: int = SOME, memory: int = MEMORY) -> Judged:
    """Necessity and sufficiency of a set against random sets, per transcript and pooled.

    Raises:
        InputError: without a decision, and if a selection is judged on what it was selected on.
    """
    if not cases:
        raise InputError("there is no decision of this kind in the evaluation split; add transcripts")
    heads = chosen.heads if isinstance(chosen, Selection) else chosen
    heads.check(model.n_layers, model.n_heads, model.name)
    if isinstance(chosen, Selection):
        leak = next((c for c in cases if {c.transcript, c.group} & chosen.seen), None)
        if leak is not None:
            raise InputError(f"transcript {leak.transcript} (group {leak.group}) helped to select this set and may not judge it; keep the splits apart")
    drawn, how = random_sets(heads, model.hooked.heads, seed, some) if len(heads) else ([], "undefined: the set is empty")
    found = set_margins(model, cases, [heads, *drawn], memory=memory)
    names = tuple(dict.fromkeys(c.transcript for c in cases))
    group = {c.transcript: c.group for c in cases}
    member = np.array([[c.transcript == name for c in cases] for name in names], np.float64)
    carried, lost, alone = found.m - found.m0, found.m - found.without, found.only - found.m0
    total = member @ carried
    defined = total >= max(LEAST, 0.1 * float(np.median(total)))
    safe = np.where(defined, total, np.nan)
    necessity, sufficiency = lost @ member.T / safe, alone @ member.T / safe
    p = lambda x: np.where(defined, (1 + (x[1:] >= x[0]).sum(0)) / len(x), np.nan) if len(drawn) else np.full(len(names), np.nan)  # noqa: E731
    inside = (defined @ member).astype(bool)
    whole = float(carried[inside].sum())
    random = np.stack([x[1:, inside].sum(1) / whole if whole else np.full(len(drawn), np.nan) for x in (lost, alone)])
    return Judged(heads, names, tuple(group[n] for n in names), necessity[0], sufficiency[0], p(necessity), p(sufficiency), tuple(c.group for c in cases),
                  carried * inside, lost[0] * inside, alone[0] * inside, found.kept_without[0], found.kept_only[0], np.array([1 / len(c.alternatives) for c in cases]),
                  tuple(float(x.mean()) for x in (found.m, found.m0, found.without[0], found.only[0])), random,
                  float(found.kept_without[1:].mean()) if len(drawn) else float("nan"), how, int((~defined).sum()))


# -- other looks at the same sets -----------------------------------------------------------------------


def phase_matrix(model: DecisionModel, cases: Mapping[str, Sequence[Case]], sets: Mapping[str, HeadSet], *, seed: int = 0, some: int = FEWEST, memory: int = MEMORY) -> pd.DataFrame:
    """Ablate each set, measure each kind: pooled N with its interval, beside the mean N of random sets of its shape.

    Args:
        cases: kind -> held-out decisions.
        sets: name -> heads.
        some: random sets of each shape.
    """
    import pandas as pd

    rows = []
    for kind, here in cases.items():
        drawn = {name: few_random_sets(heads, model.hooked.heads, seed, some) for name, heads in sets.items()}
        found = set_margins(model, here, [s for name, heads in sets.items() for s in (heads, *drawn[name])], only=False, memory=memory)
        lost, carried, at = found.m - found.without, found.m - found.m0, 0
        for name, heads in sets.items():
            mine = slice(at, at := at + 1 + len(drawn[name]))
            low, high = ratio_interval(lost[mine][0], carried, [c.group for c in here])
            share = lost[mine].sum(1) / carried.sum()
            rows.append({"ablated": name, "measured": kind, "heads": len(heads), "necessity": share[0], "low": low, "high": high,
                         "random": share[1:].mean() if len(share) > 1 else np.nan, "kept": found.kept_without[mine][0].mean(),
                         "chance": np.mean([1 / len(c.alternatives) for c in here])})
    return pd.DataFrame(rows)


def robustness(model: DecisionModel, cases: Sequence[Case], heads: HeadSet, references: Mapping[str, Sequence[np.ndarray]], *, seed: int = 0, some: int = 5,
               memory: int = MEMORY) -> pd.DataFrame:
    """N and R of a set under other references than the mean, and with all positions from the answer on ablated.

    Args:
        references: name -> one `[layer, head, d_head]`, or one for each case, to ablate with.
        some: random sets beside each.
    """
    import pandas as pd

    drawn = few_random_sets(heads, model.hooked.heads, seed, some)
    ways = {"mean": list(cases), **{name: with_reference(cases, lambda i, values=values: values[i % len(values)]) for name, values in references.items()},
            "from the answer on": [replace(c, everywhere=True) for c in cases]}
    rows = []
    for name, here in ways.items():
        found = set_margins(model, here, [heads, *drawn], memory=memory)
        carried, lost, alone = found.m - found.m0, found.m - found.without, found.only - found.m0
        low, high = ratio_interval(np.stack([lost[0], alone[0]]), carried, [c.group for c in here])
        whole = carried.sum()
        rows.append({"reference": name, "necessity": lost[0].sum() / whole, "necessity_low": low[0], "necessity_high": high[0],
                     "random_necessity": lost[1:].sum(1).mean() / whole if drawn else np.nan, "recovery": alone[0].sum() / whole, "recovery_low": low[1],
                     "recovery_high": high[1], "random_recovery": alone[1:].sum(1).mean() / whole if drawn else np.nan, "m0": found.m0.mean(), "kept": found.kept_without[0].mean()})
    return pd.DataFrame(rows)


def plain(x) -> float | int | None:
    """A number for JSON: whole numbers as they are, others with six decimals, None where there is none."""
    if isinstance(x, int | np.integer):
        return int(x)
    return None if x is None or not np.isfinite(x) else round(float(x), 6)


def share_limits(yes: Bool[Array, " _"], groups: Array) -> tuple[float, float]:
    """95% limits of a share: Clopper-Pearson where every member has a group of its own, else a bootstrap over groups.

    Where all say the same, a bootstrap would know no doubt: the limits are exact ones for as many members as groups.
    """
    from scipy.stats import binomtest

    sizes = Counter(groups.tolist())
    if max(sizes.values()) == 1 or yes.all() or not yes.any():
        low, high = binomtest(round(yes.mean() * len(sizes)), len(sizes)).proportion_ci(method="exact")
        return float(low), float(high)
    rng, names = np.random.default_rng(0), list(sizes)
    hits, counts = np.array([yes[groups == n].sum() for n in names]), np.array([sizes[n] for n in names])
    drawn = rng.integers(0, len(names), (2_000, len(names)))
    shares = hits[drawn].sum(1) / counts[drawn].sum(1)
    return float(np.quantile(shares, 0.025)), float(np.quantile(shares, 0.975))
