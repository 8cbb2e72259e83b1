"""Task at matched precision: worked by hand, thresholds that never look at test, recall that is capped."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from decisionheads.distillation.matched import CAP, Written, at_matched_precision, threshold_for
from decisionheads.distillation.verdicts import compare_arms
from decisionheads.errors import InputError


def written(codes, gold, group=None):
    """From `(document, confidence, right)` rows."""
    return Written([c[0] for c in codes], np.array([c[1] for c in codes], float), np.array([c[2] for c in codes], bool), gold, group or {})


GOLD = {"v1": 2, "v2": 2}
CAREFUL = written([("v1", 3, True), ("v1", 1, True), ("v2", 2, True), ("v2", 0.5, False)], GOLD)  # 3 of 4 right
EAGER = written([("v1", 5, True), ("v1", 4, False), ("v1", 2, True), ("v2", 3, True), ("v2", 1, False), ("v2", 0, False)], GOLD)  # 3 of 6; from 2 on 3 of 4
TEST_GOLD = {"t1": 2, "t2": 3, "t3": 1}
CAREFUL_TEST = written([("t1", 0.1, True), ("t2", 4, True), ("t2", 1, False)], TEST_GOLD)
EAGER_TEST = written([("t1", 2, True), ("t1", 1.9, True), ("t2", 9, False), ("t2", 2.5, True), ("t3", 0, True)], TEST_GOLD)


@pytest.fixture
def found():
    return at_matched_precision({"cot": EAGER, "mistill": CAREFUL}, {"mistill": CAREFUL_TEST, "cot": EAGER_TEST})


def test_by_hand(found):
    assert found.precision == 0.75 and found.chosen == "that of mistill without a threshold"
    mistill, cot = found["mistill"], found["cot"]
    assert mistill.threshold == -np.inf and (mistill.kept, mistill.written) == (3, 3) and mistill.recall == mistill.recall_cap == 2 / 6
    assert mistill.precision == 2 / 3  # what is 3 of 4 on validation is what it is on test
    assert cot.threshold == 2.0 and (cot.validation_precision, cot.validation_kept) == (0.75, 4)
    assert cot.recall == 2 / 6 and cot.recall_cap == 4 / 6 and cot.precision == 2 / 3 and cot.kept == 3 and cot.gold == 6


def test_the_lowest_threshold_that_suffices_and_ties_all_or_none():
    assert threshold_for(EAGER, 0.75) == 2.0  # 5 and 3 on their own are surer, and fewer
    assert threshold_for(EAGER, 0.5) == -np.inf
    assert threshold_for(EAGER, 1.0) == 5.0
    tied = written([("v1", 2, True), ("v1", 1, True), ("v2", 1, False), ("v2", 0, False)], GOLD)
    assert threshold_for(tied, 0.6) == 1.0 and tied.precision(1.0) == 2 / 3  # the tie at 1 is kept whole
    assert threshold_for(tied, 0.7) == 2.0  # or dropped whole: its right half alone would do
    assert threshold_for(written([("v1", 2, False), ("v1", 1, True)], GOLD), 0.9) is None


def test_order_of_rows_and_of_arms_changes_nothing(found):
    turned = Written(EAGER_TEST.document[::-1], EAGER_TEST.confidence[::-1], EAGER_TEST.right[::-1], dict(reversed(TEST_GOLD.items())))
    again = at_matched_precision({"mistill": CAREFUL, "cot": EAGER}, {"cot": turned, "mistill": CAREFUL_TEST})
    assert again["cot"] == found["cot"] and again["mistill"] == found["mistill"]
    rng = np.random.default_rng(0)
    gold = {f"t{i:02d}": int(n) for i, n in enumerate(rng.integers(1, 9, 40))}
    codes = [(name, 1.0, bool(rng.random() < 0.5)) for name in gold]
    one, other = (at_matched_precision({"a": CAREFUL}, {"a": written(codes, g)}, precision=0.5)["a"] for g in (gold, dict(reversed(gold.items()))))
    assert one == other  # its intervals, too


def test_thresholds_never_look_at_test(found):
    rng = np.random.default_rng(0)
    for _ in range(20):
        other = Written(EAGER_TEST.document, rng.normal(size=5), np.zeros(5, bool), TEST_GOLD)
        again = at_matched_precision({"cot": EAGER, "mistill": CAREFUL}, {"cot": other, "mistill": CAREFUL_TEST})
        assert again.precision == found.precision and again["cot"].threshold == found["cot"].threshold and again["mistill"] == found["mistill"]


def test_recall_falls_with_precision_and_never_exceeds_the_cap():
    rng = np.random.default_rng(1)
    names = [f"d{i}" for i in range(60)]
    def draw(prefix):
        docs = [prefix + n for n in names for _ in range(4)]
        right = rng.random(240) < 0.6
        return Written(docs, rng.normal(size=240) + right, right, dict.fromkeys(dict.fromkeys(docs), 5))
    validation, test = draw("v"), draw("t")
    arms = [at_matched_precision({"a": validation}, {"a": test}, precision=p)["a"] for p in (0.3, 0.6, 0.7, 0.8, 0.9)]
    recalls = [a.recall for a in arms]
    assert recalls == sorted(recalls, reverse=True) and recalls[-1] < recalls[0] == arms[0].recall_cap and all(a.recall <= a.recall_cap for a in arms)
    assert all(a.validation_precision >= p for a, p in zip(arms, (0.3, 0.6, 0.7, 0.8, 0.9), strict=True))
    assert all(a.recall_interval[0] < a.recall < a.recall_interval[1] and a.precision_interval[0] < a.precision < a.precision_interval[1] for a in arms)


def test_out_of_reach_is_none_with_the_reason():
    wrong = written([("v1", 9, False), ("v1", 1, True), ("v2", 0, False)], GOLD)
    none = written([], GOLD)
    found = at_matched_precision({"a": CAREFUL, "b": wrong, "c": none}, {"a": CAREFUL_TEST, "b": EAGER_TEST, "c": EAGER_TEST})
    for arm, reason in (("b", "no threshold reaches a precision of 0.750 on validation (0.333 without one)"), ("c", "it wrote no code on validation")):
        a = found[arm]
        assert a.reason == reason and a.threshold is a.recall is a.precision is a.recall_interval is None and a.recall_cap == 4 / 6 and reason in str(a)
    frame = found.to_frame().set_index("arm")
    assert frame.loc[["b", "c"], ["threshold", "recall", "precision", "recall_low"]].isna().all(axis=None) and frame.loc["a", "threshold"] == -np.inf
    assert set(found.texts["arm"]) == {"a"} and CAP in str(found)


def test_nothing_kept_on_test_has_no_precision_and_no_recall():
    low = written([("t1", -5, True)], TEST_GOLD)
    a = at_matched_precision({"a": EAGER}, {"a": low}, precision=0.75)["a"]
    assert a.precision is None and a.precision_interval is None and a.recall == 0.0 and a.recall_cap == 1 / 6 and "precision undefined" in str(a)


def test_the_interval_draws_documents_or_patients():
    """20 documents, 10 recalled whole and 10 not: as one pair of patients there are three outcomes, as documents many."""
    gold = {f"t{i:02d}": 1 for i in range(20)}
    codes = [(n, 1.0, True) for n in list(gold)[:10]]
    free = at_matched_precision({"a": CAREFUL}, {"a": written(codes, gold)}, precision=0.5)["a"]
    assert free.recall_interval == tuple(binom.ppf([0.025, 0.975], 20, 0.5) / 20)
    pair = at_matched_precision({"a": CAREFUL}, {"a": written(codes, gold, {n: str(i // 10) for i, n in enumerate(gold)})}, precision=0.5)["a"]
    assert pair.recall_interval == (0.0, 1.0)
    one = at_matched_precision({"a": CAREFUL}, {"a": written(codes, gold, dict.fromkeys(gold, "p"))}, precision=0.5)["a"]
    assert one.recall_interval is None and one.recall == 0.5


def test_recall_by_document_goes_on_to_a_comparison_over_seeds(found):
    texts = found.texts
    assert texts.groupby("arm")["numerator"].sum().to_dict() == {"cot": 2, "mistill": 2} and list(texts[texts.arm == "cot"]["denominator"]) == [2, 3, 1]
    import pandas as pd

    runs = [at_matched_precision({"cot": EAGER, "mistill": CAREFUL}, {"cot": CAREFUL_TEST, "mistill": EAGER_TEST}, precision=0.5) for _ in range(6)]
    table = pd.concat([r.to_frame().assign(student="s", seed=i) for i, r in enumerate(runs)])
    v = compare_arms(table, "recall", texts=pd.concat([r.texts.assign(student="s", seed=i) for i, r in enumerate(runs)])).of("s", "mistill")
    assert v.pooled.difference == v.mean == 2 / 6  # 4 of 6 against 2 of 6


@pytest.mark.parametrize("change, message", [
    (dict(validation={"b": CAREFUL}), "arms differ"),
    (dict(validation={"a": CAREFUL, "b": written([("v1", 1, True)], {"v1": 2})}, test={"a": CAREFUL_TEST, "b": EAGER_TEST}), "b: the validation documents"),
    (dict(test={"a": written([("v1", 1, True)], {"v1": 2})}), "v1 is in validation and in test"),
    (dict(validation={"a": written([], GOLD, {"v1": "p"})}, test={"a": written([], TEST_GOLD, {"t1": "p"})}), "p is in validation and in test"),
    (dict(validation={"a": written([("v1", 1, False)], GOLD)}), "no arm wrote a right code on validation"),
    (dict(validation={"a": written([], GOLD)}), "no arm wrote a right code on validation"),
])
def test_refusals(change, message):
    with pytest.raises(InputError, match=message):
        at_matched_precision(**(dict(validation={"a": CAREFUL}, test={"a": CAREFUL_TEST}) | change))


@pytest.mark.parametrize("precision", [0.0, 1.01, float("nan")])
def test_a_precision_is_a_share(precision):
    with pytest.raises(ValueError, match="in \\(0, 1\\]"):
        at_matched_precision({"a": CAREFUL}, {"a": CAREFUL_TEST}, precision=precision)


@pytest.mark.parametrize("codes, gold, message", [
    ([("x", 1, True)], {"v1": 1}, "'x' has codes and no count"),
    ([("v1", np.nan, True)], {"v1": 1}, "not finite"),
    ([("v1", 1, True), ("v1", 2, True)], {"v1": 1}, "more right codes than gold"),
    ([], {"v1": 0}, "no gold code"),
])
def test_what_cannot_be(codes, gold, message):
    with pytest.raises(ValueError, match=message):
        written(codes, gold)


def test_lengths_agree():
    with pytest.raises(ValueError, match="for one code each"):
        Written(["v1", "v1"], np.array([1.0]), np.array([True]), GOLD)
