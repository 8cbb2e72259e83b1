"""What may be said of students: an arm against a baseline arm, seed by seed. From tables only, no model.

A student trained with one seed is one observation; its texts are not. So the seed is the unit of every claim, an
arm is held against the baseline *of the same seed*, and under six paired seeds values are listed and nothing is
claimed. A difference that is not shown is no equivalence: that is tested by itself, against a bound set beforehand.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from ..calibration import adjusted
from ..errors import InputError
from ..views import Viewed

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray
CLAIM_SEEDS = 6  # fewer paired seeds claim nothing: with five, not even the same sign in all reaches .05 two-sided
UNDEFINED = 0.2  # largest share of undefined pairs under which the defined ones speak for all
ALPHA, DRAWS = 0.05, 2_000
REFERENCES = ("teacher", "untrained")  # rows that are no arms: nothing was trained with a seed
MINUS = "\u2212"
Interval = tuple[float, float]


# -- one comparison -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pooled:
    """Difference of pooled ratios `sum(numerator) / sum(denominator)`, arm minus baseline, with a two-level bootstrap.

    Attributes:
        difference: over the paired seeds and texts; NaN without a positive denominator in both.
        interval: 95% percentile interval over seeds and texts; None under `CLAIM_SEEDS` seeds, or fewer than two
            texts, or where a twentieth of the draws or more have no positive denominator.
        seeds, texts: how many are drawn from (patients, where they are known).
        unpaired: (seed, text) pairs that are in one arm only, left out.
        undefined: those with a value that is not finite in either arm, left out.
    """

    difference: float
    interval: Interval | None
    seeds: int
    texts: int
    unpaired: int
    undefined: int


@dataclass(frozen=True)
class Verdict:
    """One arm of one student against the baseline arm; differences are arm minus baseline, in the measure's unit.

    Attributes:
        student, arm, baseline, measure: what is compared.
        seeds: paired seeds, both values defined.
        differences: of each of them.
        undefined, undefined_arm, undefined_baseline: pairs that left since a value is undefined; in which arm.
        unpaired: seeds that only one arm has.
        higher, lower: paired seeds with a positive and with a negative difference.
        mean: of the differences; NaN without any.
        interval: 95% t-interval of the mean, over seeds on these very texts; None where nothing is claimed, as are the next four.
        p, p_holm: two-sided paired t-test, and corrected over all comparisons of the measure.
        narrow: 90% t-interval, for the bound.
        equivalence_p: of two one-sided tests against `bound`; None also without a bound.
        bound: preset; differences smaller than this do not matter. None: equivalence is not asked.
        pooled: over texts and seeds, so for other texts as well; None where no texts were given.
        no_claim: why nothing is claimed; empty otherwise.
    """

    student: str
    arm: str
    baseline: str
    measure: str
    seeds: tuple[Hashable, ...]
    differences: tuple[float, ...]
    undefined: int
    undefined_arm: int
    undefined_baseline: int
    unpaired: int
    higher: int
    lower: int
    mean: float
    interval: Interval | None
    p: float | None
    p_holm: float | None
    narrow: Interval | None
    equivalence_p: float | None
    bound: float | None
    pooled: Pooled | None
    no_claim: str

    @property
    def difference(self) -> str:
        """`higher`, `lower`, `not shown`, or `no claim`: the test corrected over the comparisons of the measure, at .05."""
        if self.no_claim or self.p_holm is None:
            return "no claim"
        return "not shown" if self.p_holm > ALPHA else "higher" if self.mean > 0 else "lower"

    @property
    def equivalence(self) -> str | None:
        """`equivalent` where the 90% interval lies within the bound, else `inconclusive`; `no claim`; None without a bound.

        A difference may be shown and yet be within the bound: real, and too small to matter.
        """
        if self.bound is None:
            return None
        if self.no_claim or self.narrow is None:
            return "no claim"
        return "equivalent" if -self.bound < self.narrow[0] and self.narrow[1] < self.bound else "inconclusive"

    def sentence(self) -> str:
        """The result in words, with what may not be said."""
        what = f"{self.student}, {self.measure}: {self.arm} {MINUS} {self.baseline}"
        sign = f"higher in {self.higher} of {len(self.seeds)}" if self.seeds else ""
        left = []
        if self.undefined:
            left.append(f"{_number(self.undefined, 'seed')} left out, undefined ({self.undefined_arm} in {self.arm}, {self.undefined_baseline} in {self.baseline})")
        if self.unpaired:
            left.append(f"{_number(self.unpaired, 'seed')} left out, not in both arms")
        if self.no_claim:
            listed = f" {', '.join(map(_signed, self.differences))}, {sign}" if self.seeds else ""
            return "; ".join([f"{what}{listed}; {self.no_claim}: values per seed, no claim", *left]) + "."
        parts = [f"{what} {_signed(self.mean)}, 95% {_limits(self.interval)} over {len(self.seeds)} paired seeds, {sign}"]
        parts.append({"not shown": f"no difference shown (p {self.p_holm:.2g} after Holm), which is no evidence that there is none"}.get(
            self.difference, f"{self.difference} (p {self.p_holm:.2g} after Holm)"))
        if self.equivalence:
            within = f"within \u00b1{self.bound:g} (90% {_limits(self.narrow)})"
            parts.append(f"equivalent {within}" if self.equivalence == "equivalent" else f"equivalence {within} inconclusive")
        if self.pooled is not None and self.pooled.interval is not None:
            beyond = "" if self.difference not in ("higher", "lower") or self.pooled.interval[0] > 0 or self.pooled.interval[1] < 0 else ", so not shown beyond these texts"
            parts.append(f"pooled over {self.pooled.texts} texts {_signed(self.pooled.difference)}, 95% {_limits(self.pooled.interval)} over texts and seeds{beyond}")
        return "; ".join(parts + left) + "."


@dataclass(frozen=True)
class Verdicts(Viewed):
    """All comparisons of one measure, which are one family for Holm's correction."""

    measure: str
    baseline: str
    verdicts: tuple[Verdict, ...]

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __len__(self) -> int:
        return len(self.verdicts)

    def __repr__(self) -> str:
        return f"Verdicts({self.measure} against {self.baseline}: {len(self)} comparisons of {len({v.student for v in self})} students)"

    def of(self, student: str, arm: str) -> Verdict:
        """The comparison of one arm of one student; KeyError where there is none."""
        for v in self.verdicts:
            if (v.student, v.arm) == (student, arm):
                return v
        raise KeyError((student, arm))

    def to_frame(self) -> pd.DataFrame:
        """One row for each comparison; NaN where nothing is claimed."""
        import pandas as pd

        nan, rows = float("nan"), []
        for v in self.verdicts:
            row = {k: x for k, x in asdict(v).items() if k not in ("seeds", "differences", "interval", "narrow", "pooled")} | {
                "paired": len(v.seeds), "seeds": " ".join(map(str, v.seeds)), "differences": " ".join(f"{d:.6g}" for d in v.differences), "difference": v.difference, "equivalence": v.equivalence}
            for name, pair in (("", v.interval), ("narrow_", v.narrow), ("pooled_", v.pooled.interval if v.pooled else None)):
                row[f"{name}low"], row[f"{name}high"] = pair or (nan, nan)
            row["pooled"] = v.pooled.difference if v.pooled else nan
            rows.append({k: nan if x is None else x for k, x in row.items()})
        return pd.DataFrame(rows)

    def sentences(self) -> list[str]:
        return [v.sentence() for v in self.verdicts]

    def __str__(self) -> str:
        return "\n".join(self.sentences())


# -- from tables --------------------------------------------------------------------------------------


def compare_arms(table: pd.DataFrame, measure: str, *, baseline: str = "cot", arms: Sequence[str] | None = None, bound: float | None = None,
                 texts: pd.DataFrame | None = None, draws: int = DRAWS, seed: int = 0) -> Verdicts:
    """Compare every arm of every student with the baseline arm of the same seed, in one measure.

    Args:
        table: one row for each (student, arm, seed), with a column `measure`; NaN is undefined.
        baseline: arm that the others are held against.
        arms: those to compare; by default all but the baseline and the reference rows (teacher, untrained student).
            All comparisons of the call are one family, so compare what was planned.
        bound: preset half-width of equivalence, in the measure's unit.
        texts: of a measure that is a ratio of sums, one row for each (student, arm, seed, text) with numerator and
            denominator; `group` where several texts are of one patient.
        draws: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        InputError: for a missing column, arm or baseline, two rows of one (student, arm, seed) or of one text, or
            a row without a seed.
        ValueError: for a bound that is not positive and finite.
    """
    need_columns(table, ["student", "arm", "seed", measure], "the table of students")
    if bound is not None and not (np.isfinite(bound) and bound > 0):
        raise ValueError(f"a bound of equivalence is a positive number, not {bound}")
    if texts is not None:
        need_columns(texts, ["student", "arm", "seed", "text", "numerator", "denominator"], "the table of texts")
    arms = [a for a in dict.fromkeys(sorted(table["arm"])) if a not in (baseline, *REFERENCES)] if arms is None else list(dict.fromkeys(arms))
    if strange := [a for a in (baseline, *arms) if a not in set(table["arm"])]:
        raise InputError(f"there is no arm {strange[0]!r} in the table; it has {', '.join(sorted(set(table['arm'])))}")
    rows = table[table["arm"].isin([baseline, *arms])]
    if rows["seed"].isna().any():
        raise InputError("a row of an arm has no seed; arms are compared seed by seed")
    if rows.duplicated(["student", "arm", "seed"]).any():
        raise InputError("two rows of the table are of the same student, arm and seed")
    found = []
    for student in sorted(set(rows["student"])):
        mine = rows[rows["student"] == student]
        if baseline not in set(mine["arm"]):
            raise InputError(f"{student} has no arm {baseline!r} to be held against")
        values = mine.pivot(index="seed", columns="arm", values=measure).sort_index()
        has = mine.assign(there=True).pivot(index="seed", columns="arm", values="there").reindex_like(values).notna()
        for arm in arms:
            if arm not in values:
                continue
            both = has[arm] & has[baseline]
            found.append(_verdict(student, arm, baseline, measure, list(values.index[both]), values.loc[both, arm].to_numpy(float), values.loc[both, baseline].to_numpy(float),
                                  int((has[arm] ^ has[baseline]).sum()), bound))
            if texts is not None:
                found[-1] = replace(found[-1], pooled=_pooled(texts[texts["student"] == student], found[-1], draws, seed))
    return Verdicts(measure, baseline, _holm(found))


def mean_interval(values: Float[Array, " seed"], level: float = 0.95) -> Interval | None:
    """t-interval of the mean over seeds; None under six, or where they do not differ at all."""
    from statsmodels.stats.weightstats import DescrStatsW

    if len(values) < CLAIM_SEEDS or not _vary(values):
        return None
    low, high = DescrStatsW(values).tconfint_mean(1 - level)
    return float(low), float(high)


def need_columns(table: pd.DataFrame, names: Sequence[str], what: str) -> None:
    """Raise InputError unless a table has all of these columns."""
    if missing := [name for name in names if name not in table]:
        raise InputError(f"{what} has no column {', '.join(missing)}")


def whole(seed: Hashable) -> Hashable:
    """A seed as it was given: a column that also has a NaN, as of the teacher, makes 3 into 3.0."""
    return int(seed) if isinstance(seed, float) and seed.is_integer() else seed


def _verdict(student: str, arm: str, baseline: str, measure: str, seeds: list, ours: Float[Array, " seed"], theirs: Float[Array, " seed"], unpaired: int,
             bound: float | None) -> Verdict:
    from statsmodels.stats.weightstats import DescrStatsW

    defined = np.isfinite(ours) & np.isfinite(theirs)
    apart = ours[defined] - theirs[defined]
    undefined, n = int((~defined).sum()), len(apart)
    why = ""
    if n < CLAIM_SEEDS:
        why = f"{_number(n, 'paired seed')}, fewer than {CLAIM_SEEDS}"
    elif undefined > UNDEFINED * len(defined):
        why = f"undefined in {undefined} of {len(defined)} seeds, more than a fifth"
    elif not _vary(apart):  # copies of one run look like this, too
        why = f"the difference is the same in all {n} seeds"
    found = None if why else DescrStatsW(apart)
    return Verdict(
        student, arm, baseline, measure, tuple(whole(s) for s, d in zip(seeds, defined, strict=True) if d), tuple(map(float, apart)), undefined, int((~np.isfinite(ours)).sum()),
        int((~np.isfinite(theirs)).sum()), unpaired, int((apart > 0).sum()), int((apart < 0).sum()), float(apart.mean()) if n else float("nan"),
        None if found is None else mean_interval(apart), None if found is None else float(found.ttest_mean(0)[1]), None,
        None if found is None else mean_interval(apart, 0.9), None if found is None or bound is None else float(found.ttost_mean(-bound, bound)[0]), bound, None, why)


def _vary(values: Float[Array, " seed"]) -> bool:
    """Whether they differ by more than rounding does: without any spread there is nothing to judge a mean by."""
    return bool(np.ptp(values) > 1e-12 * (1 + np.abs(values).max()))


def _holm(found: list[Verdict]) -> tuple[Verdict, ...]:
    """The same with p-values corrected over all that claim anything."""
    tested = [v for v in found if v.p is not None]
    corrected = iter(adjusted(np.array([v.p for v in tested]), "holm"))
    return tuple(v if v.p is None else replace(v, p_holm=float(next(corrected))) for v in found)


def _pooled(texts: pd.DataFrame, verdict: Verdict, draws: int, seed: int) -> Pooled:
    """Two-level bootstrap: seeds are drawn, and texts; every drawn seed and both arms are given the same texts.

    All seeds were judged on the same texts, so a text that is hard is hard in every seed: texts drawn anew for each
    seed would take that for independent noise, and the interval would be too narrow.
    """
    texts = texts[texts["arm"].isin([verdict.arm, verdict.baseline]) & texts["seed"].isin(verdict.seeds)]
    if texts.duplicated(["arm", "seed", "text"]).any():
        raise InputError("two rows of the table of texts are of the same student, arm, seed and text")
    owner = texts["group"].where(texts["group"].notna(), texts["text"]) if "group" in texts else texts["text"]
    owner = texts.assign(owner=owner)[["text", "owner"]].drop_duplicates().set_index("text")["owner"]
    if not owner.index.is_unique:
        raise InputError(f"text {owner.index[owner.index.duplicated()][0]} is of two groups")
    ours, theirs = (texts[texts["arm"] == name].set_index(["seed", "text"])[["numerator", "denominator"]].astype(float) for name in (verdict.arm, verdict.baseline))
    shared = ours.index.intersection(theirs.index).sort_values()
    rows = np.stack([ours.loc[shared].to_numpy(), theirs.loc[shared].to_numpy()])  # [arm, pair, numerator or denominator]
    fine = np.isfinite(rows).all((0, 2))
    seeds, of_seed = np.unique(shared.get_level_values("seed")[fine], return_inverse=True)
    groups, of_group = np.unique(owner.loc[shared.get_level_values("text")[fine]], return_inverse=True)
    sums = np.zeros((2, 2, len(seeds), len(groups)))  # [arm, numerator or denominator, seed, group]
    np.add.at(np.moveaxis(sums, (2, 3), (0, 1)), (of_seed, of_group), rows[:, fine].transpose(1, 0, 2))
    top, bottom = sums.sum((2, 3)).T
    whole = float(top[0] / bottom[0] - top[1] / bottom[1]) if (bottom > 0).all() else float("nan")
    claims = not verdict.no_claim and len(seeds) >= CLAIM_SEEDS and len(groups) > 1
    return Pooled(whole, _two_level(sums, draws, seed) if claims else None, len(seeds), len(groups), len(ours) + len(theirs) - 2 * len(shared), int((~fine).sum()))


def _two_level(sums: Float[Array, "2 2 seed text"], draws: int, seed: int) -> Interval | None:
    rng = np.random.default_rng(seed)
    n, m = sums.shape[2:]
    apart = []
    for start in range(0, draws, 256):
        some = min(256, draws - start)
        seeds, texts = rng.multinomial(n, np.full(n, 1 / n), some), rng.multinomial(m, np.full(m, 1 / m), some)
        (a, b), (c, d) = np.einsum("xyst,ds,dt->xyd", sums, seeds, texts, optimize=True)
        fine = (b > 0) & (d > 0)
        apart.append(a[fine] / b[fine] - c[fine] / d[fine])
    found = np.concatenate(apart)
    if len(found) <= 0.95 * draws:
        return None
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def _number(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _signed(x: float) -> str:
    return f"{x:+.3f}".replace("-", MINUS)


def _limits(pair: Interval | None) -> str:
    return "" if pair is None else f"[{_signed(pair[0])}, {_signed(pair[1])}]"
