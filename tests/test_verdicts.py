"""Claims about students: worked by hand, invariants, error rates on simulated students, and what may not be claimed."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom, t

from decisionheads.distillation.verdicts import CLAIM_SEEDS, Verdicts, compare_arms, mean_interval
from decisionheads.errors import InputError

NAN = float("nan")


def table(student="s", **arms):
    """`arm=[value for each seed]`; None: no such row."""
    return pd.DataFrame([(student, arm, seed, value) for arm, values in arms.items() for seed, value in enumerate(values) if value is not None],
                        columns=["student", "arm", "seed", "recovery"]).astype({"recovery": float})


def one(frame, arm="mistill", **options):
    return compare_arms(frame, "recovery", **options).of("s", arm)


APART = [0.1, 0.2, 0.3, 0.2, 0.1, 0.3]
BASE = [0.5, 0.1, 0.4, 0.6, 0.2, 0.3]
SIX = table(cot=BASE, mistill=[b + d for b, d in zip(BASE, APART, strict=True)])
TEXTS = pd.DataFrame([("s", arm, seed, f"t{i}", top, bottom) for arm, shift in (("cot", 0.0), ("mistill", 0.1)) for seed in range(6)
                      for i, (top, bottom) in enumerate([(1.0 + shift * 2 + seed / 10, 2.0), (3.0 + shift * 4, 4.0), (0.0 + shift, 1.0)])],
                     columns=["student", "arm", "seed", "text", "numerator", "denominator"])


# -- by hand ------------------------------------------------------------------------------------------


def test_by_hand():
    v = one(SIX, bound=0.5)
    assert v.seeds == (0, 1, 2, 3, 4, 5) and v.higher == 6 and v.lower == 0 and v.differences == pytest.approx(APART)
    # mean .2, sum of squared deviations .04, so s = sqrt(.04 / 5) and the standard error sqrt(.04 / 30)
    error = math.sqrt(0.04 / 30)
    assert v.mean == pytest.approx(0.2)
    assert v.interval == pytest.approx((0.2 - 2.570582 * error, 0.2 + 2.570582 * error), abs=1e-6)
    assert v.narrow == pytest.approx((0.2 - 2.015048 * error, 0.2 + 2.015048 * error), abs=1e-6)
    assert v.p == pytest.approx(2 * t.sf(0.2 / error, 5)) and v.p_holm == v.p
    assert v.equivalence_p == pytest.approx(t.sf(0.3 / error, 5))
    assert v.difference == "higher" and v.equivalence == "equivalent"  # real, and within a wide bound


def test_holm_by_hand_over_arms_and_students():
    noisy = [[0.3, -0.2, 0.4, 0.1, -0.1, 0.2], [0.2, 0.1, 0.3, 0.0, -0.1, 0.2]]
    frame = pd.concat([table("s", cot=[0.0] * 6, mistill=APART, shuffled=noisy[0]), table("u", cot=[0.0] * 6, mistill=noisy[1])])
    found = compare_arms(frame, "recovery")
    p = sorted((v.p, v.p_holm) for v in found)
    raw = [x for x, _ in p]
    assert [x for _, x in p] == pytest.approx(list(np.maximum.accumulate([3 * raw[0], 2 * raw[1], raw[2]]))) and len(found) == 3
    assert compare_arms(frame, "recovery", arms=["shuffled"]).of("s", "shuffled").p_holm == found.of("s", "shuffled").p  # only what was planned


def test_signs_count_zeros_as_neither():
    v = one(table(cot=[1.0] * 7, mistill=[2.0, 0.5, 1.0, 1.5, 1.2, 1.1, 0.9]))
    assert (v.higher, v.lower, len(v.seeds)) == (4, 2, 7)


def test_pooled_ratio_by_hand():
    v = one(SIX, texts=TEXTS)
    # each denominator gets .1 more: sum of tops over sum of bottoms, 7 a seed
    assert v.pooled.difference == pytest.approx(0.1) and (v.pooled.seeds, v.pooled.texts, v.pooled.unpaired, v.pooled.undefined) == (6, 3, 0, 0)
    assert v.pooled.interval == pytest.approx((0.1, 0.1))  # paired: the same texts in both arms, so nothing is left of their differences


def test_pooled_weighs_by_denominators():
    texts = TEXTS.copy()
    texts.loc[(texts["arm"] == "mistill") & (texts["text"] == "t1"), "numerator"] += 0.7
    assert one(SIX, texts=texts).pooled.difference == pytest.approx(0.1 + 0.7 / 7)

    halved = TEXTS.copy()  # each arm has its own denominators
    halved.loc[halved["arm"] == "mistill", "denominator"] /= 2
    ratio = halved[halved["arm"] == "cot"]["numerator"].sum() / 42
    assert one(SIX, texts=halved).pooled.difference == pytest.approx(2 * (ratio + 0.1) - ratio)


# -- invariants ---------------------------------------------------------------------------------------


def random_students(seed, seeds=8, texts=12):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame([("s", arm, k, rng.normal()) for arm in ("cot", "mistill", "shuffled") for k in range(seeds)], columns=["student", "arm", "seed", "recovery"])
    rows = pd.DataFrame([("s", arm, k, f"t{i:02d}", f"g{i // 3}", rng.normal(1, 1), rng.uniform(0.5, 2)) for arm in ("cot", "mistill", "shuffled") for k in range(seeds)
                         for i in range(texts)], columns=["student", "arm", "seed", "text", "group", "numerator", "denominator"])
    return frame, rows


def test_order_of_rows_changes_nothing():
    frame, texts = random_students(0)
    again = compare_arms(frame.sample(frac=1, random_state=1), "recovery", bound=0.3, texts=texts.sample(frac=1, random_state=2))
    pd.testing.assert_frame_equal(again.to_frame(), compare_arms(frame, "recovery", bound=0.3, texts=texts).to_frame())


def test_swapping_arms_negates():
    frame, texts = random_students(1)
    a = compare_arms(frame, "recovery", bound=0.3, texts=texts, arms=["mistill"]).of("s", "mistill")
    b = compare_arms(frame, "recovery", baseline="mistill", bound=0.3, texts=texts, arms=["cot"]).of("s", "cot")
    turned = lambda pair: (-pair[1], -pair[0])  # noqa: E731
    assert b.differences == tuple(-x for x in a.differences) and b.mean == -a.mean and (b.higher, b.lower) == (a.lower, a.higher)
    assert b.interval == pytest.approx(turned(a.interval)) and b.narrow == pytest.approx(turned(a.narrow)) and b.pooled.interval == pytest.approx(turned(a.pooled.interval))
    assert b.p == pytest.approx(a.p) and b.equivalence_p == pytest.approx(a.equivalence_p) and b.pooled.difference == pytest.approx(-a.pooled.difference)


def test_the_baseline_against_itself_is_exactly_nothing():
    frame, texts = random_students(2)
    v = one(frame, "cot", arms=["cot"], bound=0.1, texts=texts)
    assert v.mean == 0.0 and set(v.differences) == {0.0} and v.pooled.difference == 0.0 and v.higher == v.lower == 0
    assert v.interval is v.p is v.pooled.interval is None and v.equivalence == v.difference == "no claim" and "same in all 8 seeds" in v.sentence()


def test_texts_of_a_group_are_drawn_together():
    frame, texts = random_students(3)
    grouped, free = (one(frame, texts=rows).pooled for rows in (texts, texts.drop(columns="group")))
    assert (grouped.texts, free.texts) == (4, 12) and grouped.difference == pytest.approx(free.difference) and grouped.interval != free.interval
    alone = one(frame, texts=texts.assign(group=None)).pooled
    assert alone == free  # a text without a group is its own
    merged = texts.assign(text=texts["group"]).groupby(["student", "arm", "seed", "text"], as_index=False)[["numerator", "denominator"]].sum()
    assert one(frame, texts=merged).pooled.interval == pytest.approx(grouped.interval)


def test_the_same_seed_gives_the_same_and_another_another():
    frame, texts = random_students(4)
    found = [one(frame, texts=texts, seed=s).pooled.interval for s in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_nothing_is_written_into_the_tables():
    frame, texts = random_students(5)
    before = frame.copy(), texts.copy()
    compare_arms(frame, "recovery", bound=0.1, texts=texts)
    pd.testing.assert_frame_equal(frame, before[0])
    pd.testing.assert_frame_equal(texts, before[1])


# -- what may not be claimed ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_fewer_than_six_seeds_claim_nothing(n):
    frame, texts = SIX[SIX["seed"] < n], TEXTS[TEXTS["seed"] < n]
    v = one(frame, bound=10.0, texts=texts)
    assert v.difference == v.equivalence == "no claim"
    assert v.interval is v.narrow is v.p is v.p_holm is v.equivalence_p is v.pooled.interval is None
    said = v.sentence()
    assert "values per seed, no claim" in said and all(f"{x:+.3f}" in said for x in APART[:n]) and f"higher in {n} of {n}" in said and "95%" not in said and "equivalen" not in said
    row = compare_arms(frame, "recovery", bound=10.0).to_frame().iloc[0]
    assert row[["low", "high", "narrow_low", "narrow_high", "pooled_low", "p", "p_holm", "equivalence_p"]].isna().all() and row["mean"] == pytest.approx(np.mean(APART[:n]))


def test_six_seeds_claim():
    assert CLAIM_SEEDS == 6 and one(SIX).difference == "higher" and one(SIX).equivalence is None
    lower = one(table(cot=[x + 0.1 * i for i, x in enumerate(APART)], mistill=[0.1 * i for i in range(6)]))
    assert lower.difference == "lower" and lower.mean < 0


def test_not_significant_is_not_equivalent():
    v = one(table(cot=[0.0] * 6, mistill=[0.4, -0.5, 0.3, -0.2, 0.5, -0.4]), bound=0.1)
    assert v.p > 0.5 and v.difference == "not shown" and v.equivalence == "inconclusive" and v.equivalence_p > 0.05
    assert "no difference shown" in v.sentence() and "no evidence that there is none" in v.sentence() and "inconclusive" in v.sentence()


def test_the_bound_is_held_against_the_90_percent_interval():
    v = one(SIX, bound=1.0)
    between = (v.narrow[1] + v.interval[1]) / 2
    assert one(SIX, bound=between).equivalence == "equivalent" and one(SIX, bound=between).equivalence_p < 0.05
    under = one(SIX, bound=v.narrow[1] - 1e-6)
    assert under.equivalence == "inconclusive" and under.equivalence_p == pytest.approx(0.05, abs=1e-4)
    negative = table(cot=list(SIX["recovery"][6:]), mistill=BASE)  # the same on the other side
    assert one(negative, bound=between).equivalence == "equivalent" and one(negative, bound=v.narrow[1] - 1e-6).equivalence == "inconclusive"


def test_holm_decides_and_not_the_single_interval():
    close = [0.9, 0.1, 0.2, 1.3, 0.05, 0.4]  # p .052 for one, .10 for two
    frame = table(cot=[0.0] * 6, mistill=[x + 0.05 for x in close], shuffled=[0.5, -0.4, 0.3, -0.2, 0.1, -0.1])
    v = one(frame)
    assert v.interval[0] > 0 and v.p < 0.05 < v.p_holm and v.difference == "not shown"
    assert one(frame, arms=["mistill"]).difference == "higher"


def test_undefined_recoveries_leave_the_pairing_and_are_counted():
    frame = table(cot=[*BASE, NAN, 0.5], mistill=[*[b + d for b, d in zip(BASE, APART, strict=True)], 0.9, None])
    v = one(frame)
    assert v.seeds == (0, 1, 2, 3, 4, 5) and v.mean == pytest.approx(0.2) and (v.undefined, v.undefined_arm, v.undefined_baseline, v.unpaired) == (1, 0, 1, 1)
    assert "1 seed left out, undefined (0 in mistill, 1 in cot)" in v.sentence() and "1 seed left out, not in both arms" in v.sentence()
    assert v.difference == "higher"
    both = one(table(cot=[NAN, 0.1, 0.2], mistill=[NAN, NAN, 0.4]))
    assert (both.undefined, both.undefined_arm, both.undefined_baseline) == (2, 2, 1) and both.differences == (pytest.approx(0.2),)
    none = one(table(cot=[NAN], mistill=[1.0]))
    assert math.isnan(none.mean) and none.seeds == () and none.difference == "no claim" and "0 paired seeds" in none.sentence() and "nan" not in none.sentence()
    infinite = one(table(cot=[*BASE, 0.1], mistill=[*APART, float("inf")]))
    assert infinite.undefined == 1


def test_more_than_a_fifth_undefined_claims_nothing():
    apart, base = [*APART, 0.2, 0.25], [*BASE, 0.3, 0.1]
    frame = lambda gone: table(cot=base + [0.1] * gone, mistill=[b + d for b, d in zip(base, apart, strict=True)] + [NAN] * gone)  # noqa: E731
    assert one(frame(2)).difference == "higher"  # 2 of 10
    v = one(frame(3), bound=9.0, texts=TEXTS)
    assert v.difference == v.equivalence == "no claim" and v.pooled.interval is None and "undefined in 3 of 11 seeds, more than a fifth" in v.sentence() and len(v.differences) == 8


def test_an_undefined_seed_leaves_the_pooled_ratio_too():
    frame = SIX.copy()
    frame.loc[(frame["seed"] == 5) & (frame["arm"] == "cot"), "recovery"] = NAN
    texts = TEXTS.copy()
    texts.loc[texts["seed"] == 5, "numerator"] = 1e6 * np.arange(6)
    v = one(frame, texts=texts)
    assert v.pooled.seeds == 5 and v.pooled.difference == pytest.approx(0.1)


def test_texts_of_one_arm_only_and_undefined_texts_leave_both_arms():
    texts = TEXTS.copy()
    texts.loc[(texts["arm"] == "cot") & (texts["seed"] == 0) & (texts["text"] == "t0"), "numerator"] = NAN
    texts = texts[~((texts["arm"] == "mistill") & (texts["seed"] == 1) & (texts["text"] == "t1"))]
    v = one(SIX, texts=texts)
    assert (v.pooled.undefined, v.pooled.unpaired) == (1, 1) and v.pooled.difference == pytest.approx(0.1)


def test_a_denominator_that_is_not_positive_has_no_ratio():
    v = one(SIX, texts=TEXTS.assign(denominator=0.0))
    assert math.isnan(v.pooled.difference) and v.pooled.interval is None and "pooled" not in v.sentence()
    mostly = TEXTS.copy()
    mostly.loc[mostly["text"] != "t0", "denominator"] = 0.0  # a draw without t0 has none: (2/3)^3 of them
    assert one(SIX, texts=mostly).pooled.interval is None


def test_reference_rows_are_not_compared():
    frame = pd.concat([SIX, pd.DataFrame({"student": "s", "arm": ["teacher", "untrained"], "seed": [NAN, NAN], "recovery": [0.9, 0.0]})])
    assert [v.arm for v in compare_arms(frame, "recovery")] == ["mistill"]
    v = one(frame, texts=TEXTS)
    assert v.seeds == (0, 1, 2, 3, 4, 5) and set(map(type, v.seeds)) == {int} and v.pooled.seeds == 6  # the NaN of the references made the column one of floats


def test_a_student_without_an_arm_is_left_out_of_that_comparison():
    found = compare_arms(pd.concat([SIX, table("u", cot=BASE, shuffled=APART)]), "recovery")
    assert [(v.student, v.arm) for v in found] == [("s", "mistill"), ("u", "shuffled")]
    with pytest.raises(KeyError):
        found.of("u", "mistill")


def test_sentences_and_frame():
    found = compare_arms(pd.concat([SIX, table("u", cot=BASE[:3], mistill=APART[:3])]), "recovery", bound=0.05, texts=TEXTS)
    assert isinstance(found, Verdicts) and len(found.sentences()) == len(found) == 2 == len(found.to_frame()) and str(found) == "\n".join(found.sentences())
    assert found.sentences()[0] == ("s, recovery: mistill \u2212 cot +0.200, 95% [+0.106, +0.294] over 6 paired seeds, higher in 6 of 6; higher (p 0.0028 after Holm); "
                                    "equivalence within \u00b10.05 (90% [+0.126, +0.274]) inconclusive; pooled over 3 texts +0.100, 95% [+0.100, +0.100] over texts and seeds.")
    assert found.sentences()[1] == "u, recovery: mistill \u2212 cot \u22120.400, +0.100, \u22120.100, higher in 1 of 3; 3 paired seeds, fewer than 6: values per seed, no claim."
    frame = found.to_frame()
    assert list(frame["difference"]) == ["higher", "no claim"] and list(frame["paired"]) == [6, 3] and list(frame["equivalence"]) == ["inconclusive", "no claim"]


def test_a_difference_of_these_texts_only_is_said_so():
    texts = TEXTS.copy()
    texts["numerator"] += (texts["arm"] == "mistill") * texts["text"].map({"t0": 2.0, "t1": -2.5, "t2": 1.0})
    v = one(SIX, texts=texts)
    assert v.difference == "higher" and v.pooled.interval[0] < 0 < v.pooled.interval[1] and v.sentence().endswith("so not shown beyond these texts.")
    assert "beyond" not in one(SIX, texts=TEXTS).sentence()


def test_the_interval_of_one_arm():
    assert mean_interval(np.array(APART)) == pytest.approx(one(SIX).interval) and mean_interval(np.array(APART[:5])) is None and mean_interval(np.ones(8)) is None


@pytest.mark.parametrize("frame, options, message", [
    (SIX.drop(columns="seed"), {}, "no column seed"),
    (SIX, {"texts": TEXTS.drop(columns=["text", "numerator"])}, "table of texts has no column text, numerator"),
    (SIX, {"baseline": "kd"}, "no arm 'kd' in the table; it has cot, mistill"),
    (SIX, {"arms": ["all-heads"]}, "no arm 'all-heads'"),
    (pd.concat([SIX, SIX.head(1)]), {}, "two rows of the table are of the same"),
    (SIX.assign(seed=np.where(SIX["seed"] == 0, NAN, SIX["seed"])), {}, "has no seed"),
    (SIX, {"texts": pd.concat([TEXTS, TEXTS.head(1)])}, "two rows of the table of texts"),
    (SIX, {"texts": TEXTS.assign(group=np.arange(len(TEXTS)))}, "is of two groups"),
    (pd.concat([SIX, table("u", mistill=APART)]), {}, "u has no arm 'cot'"),
])
def test_refusals(frame, options, message):
    with pytest.raises(InputError, match=message):
        compare_arms(frame, "recovery", **options)


@pytest.mark.parametrize("bound", [0.0, -1.0, NAN, float("inf")])
def test_a_bound_is_positive(bound):
    with pytest.raises(ValueError, match="bound of equivalence"):
        compare_arms(SIX, "recovery", bound=bound)


# -- simulated students ---------------------------------------------------------------------------------

RUNS = 300


@pytest.fixture
def uncollected(monkeypatch):
    """statsmodels collects garbage at every correction, which is most of the time of thousands of them."""
    monkeypatch.setattr("gc.collect", lambda: 0)


def band(rate, runs=RUNS):
    """Where 99.9% of counts lie for runs with that rate."""
    return binom.interval(0.999, runs, rate)


def simulated(shift, seeds=6, noise=0.1, arms=("mistill",), seed=0):
    """RUNS students; what a seed does to all arms is large, what is left is normal."""
    rng = np.random.default_rng(seed)
    common = rng.normal(0.5, 1.0, (RUNS, seeds))
    parts = [pd.DataFrame({"student": np.repeat([f"r{i:03d}" for i in range(RUNS)], seeds), "arm": arm, "seed": np.tile(np.arange(seeds), RUNS),
                           "recovery": (common + rng.normal(0.0 if arm == "cot" else shift, noise / math.sqrt(2), (RUNS, seeds))).ravel()}) for arm in ("cot", *arms)]
    return pd.concat(parts)


@pytest.mark.parametrize("seeds", [6, 10])
def test_t_intervals_cover_at_their_level_and_p_rejects_at_its_own(seeds):
    found = list(compare_arms(simulated(0.07, seeds), "recovery"))
    low, high = band(0.05)
    assert low <= sum(not v.interval[0] <= 0.07 <= v.interval[1] for v in found) <= high
    low, high = band(0.1)
    assert low <= sum(not v.narrow[0] <= 0.07 <= v.narrow[1] for v in found) <= high
    low, high = band(0.05)
    assert low <= sum(v.p <= 0.05 for v in compare_arms(simulated(0.0, seeds, seed=1), "recovery")) <= high


@pytest.mark.parametrize("side", [1, -1])
def test_students_at_the_bound_are_called_equivalent_at_the_level_of_the_test(side):
    found = list(compare_arms(simulated(side * 0.4), "recovery", bound=0.4))
    low, high = band(0.05)
    assert low <= sum(v.equivalence == "equivalent" for v in found) <= high
    assert all((v.equivalence == "equivalent") == (v.equivalence_p < 0.05) for v in found)


def test_noisy_equal_students_are_inconclusive_and_quiet_ones_equivalent():
    noisy, quiet = (list(compare_arms(simulated(0.0, noise=noise), "recovery", bound=0.1)) for noise in (0.5, 0.03))
    assert sum(v.equivalence == "equivalent" for v in noisy) <= band(0.05)[1] < 0.99 * RUNS < sum(v.equivalence == "equivalent" for v in quiet)


def test_holm_keeps_the_family_and_a_planted_difference_is_found(uncollected):
    frame = simulated(0.0, arms=("mistill", "shuffled", "random-pool"))
    groups = dict(list(frame.groupby("student")))
    wrong = sum(any(v.difference != "not shown" for v in compare_arms(part, "recovery")) for part in groups.values())
    assert wrong <= band(0.05)[1]
    planted = frame.copy()
    planted.loc[planted["arm"] == "mistill", "recovery"] += 0.4
    some = [compare_arms(part, "recovery") for student, part in planted.groupby("student") if student < "r100"]
    assert sum(v.of(v.verdicts[0].student, "mistill").difference == "higher" for v in some) >= 95


def texts_of(rng, seeds, texts, by_text, by_seed, by_both, truth=0.3):
    """Differences with a part of the text, of the seed and of both; denominators 1."""
    apart = truth + by_text * rng.normal(size=texts) + by_seed * rng.normal(size=(seeds, 1)) + by_both * rng.normal(size=(seeds, texts))
    base = rng.normal(size=texts) + rng.normal(size=(seeds, 1))  # common to both arms: pairing takes it out
    index = np.indices((seeds, texts)).reshape(2, -1)
    rows = [pd.DataFrame({"student": "s", "arm": arm, "seed": index[0], "text": index[1], "numerator": value.ravel(), "denominator": 1.0}) for arm, value in (("cot", base), ("mistill", base + apart))]
    texts = pd.concat(rows)
    return texts.groupby(["student", "arm", "seed"], as_index=False)["numerator"].mean().rename(columns={"numerator": "recovery"}), texts


@pytest.mark.parametrize("by_text, by_seed", [(1.0, 0.1), (0.1, 0.3)], ids=["texts differ", "seeds differ"])
def test_the_two_level_bootstrap_covers_over_texts_and_seeds(uncollected, by_text, by_seed):
    """With enough of both it covers whichever differs more; taken for independent in each seed, texts would not."""
    rng, runs = np.random.default_rng(0), 250
    hit = 0
    for _ in range(runs):
        frame, texts = texts_of(rng, 20, 40, by_text, by_seed, 0.2)
        low, high = one(frame, texts=texts, draws=400).pooled.interval
        hit += low <= 0.3 <= high
    assert band(0.92, runs)[0] <= hit <= band(0.96, runs)[1]
