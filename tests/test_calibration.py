"""The null calibration, on arrays alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decisionheads.calibration import (
    Sets,
    adjusted,
    bootstrap_interval,
    calibrate,
    match,
    p_value,
    slopes,
    statistic,
    transcript_scales,
)

from .null_worlds import WORLDS, world


def test_p_values_count_the_observed_one():  # G1
    assert p_value(1.0, np.zeros(99)) == 0.01
    assert p_value(1.0, np.zeros(999)) == 0.001
    assert p_value(1.0, [1.0, 1.0, 0.0, 0.0]) == 0.6


# -- matching ---------------------------------------------------------------------------------------


def test_matching_is_exact_on_class_near_and_never_reuses():
    rng = np.random.default_rng(0)
    events, nulls = rng.normal(size=(20, 3)), rng.normal(size=(400, 3))
    event_class, null_class = [i % 2 for i in range(20)], [i % 2 for i in range(400)]
    found = match(events, nulls, event_class, null_class, caliper=0.8)
    used = [j for f in found.nulls for j in f]
    assert len(used) == len(set(used)) > 30 and all(len(f) == 0 or 2 <= len(f) <= 5 for f in found.nulls)
    scale = np.concatenate([events, nulls]).std(0)
    for i in found.kept:
        for j in found.nulls[i]:
            assert event_class[i] == null_class[j] and (np.abs(events[i] - nulls[j]) <= 0.8 * scale + 1e-12).all()
    assert found.left_out == 20 - len(found.kept) and np.abs(found.balance).max() < 0.4


def test_an_event_with_one_null_leaves_and_is_counted():
    found = match(np.zeros((2, 1)), np.array([[0.0], [0.01], [0.02], [5.0]]), ["a", "b"], ["a", "b", "b", "a"])
    assert found.nulls == ((), (1, 2)) and found.left_out == 1


def test_unequal_sides_are_marked_unbalanced():
    rng = np.random.default_rng(0)
    nulls = rng.normal(size=(300, 1))
    close = match(nulls[:10] + 1e-4, nulls, ["x"] * 10, ["x"] * 300)
    assert not close.unbalanced
    shifted = match(np.full((10, 1), 1.0), np.concatenate([np.full((50, 1), 0.8), nulls]), ["x"] * 10, ["x"] * 350, caliper=0.3)
    assert shifted.unbalanced == bool(abs(shifted.balance[0]) > 0.1)
    empty = match(np.zeros((3, 2)), np.zeros((0, 2)), ["x"] * 3, [])
    assert empty.left_out == 3 and np.isnan(empty.balance).all()


def test_the_slope_on_the_margin_is_found_and_removed():
    rng = np.random.default_rng(0)
    margins = rng.normal(5, 2, 500)
    effects = np.outer(margins, [0.3, 0.0, -0.2]) + rng.normal(0, 0.1, (500, 3))
    np.testing.assert_allclose(slopes(effects, margins), [0.3, 0, -0.2], atol=0.01)
    assert (slopes(effects, np.ones(500)) == 0).all()


# -- statistic and permutation ---------------------------------------------------------------------


def literal(sets: Sets, chosen) -> np.ndarray:
    """The statistic written out: D per transcript, sum over norm."""
    names = np.unique(sets.transcript)
    scales = dict(zip(names, transcript_scales(sets), strict=True))
    differences = []
    for name in names:
        own = [m[c] - np.delete(m, c, 0).mean(0) for m, c, t in zip(sets.members, chosen, sets.transcript, strict=True) if t == name]
        differences.append(np.mean(own, 0) / scales[name])
    differences = np.array(differences)
    return differences.sum(0) / np.sqrt((differences**2).sum(0))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6))
def test_the_fast_statistic_equals_the_literal_one(seed):
    from decisionheads.calibration import _Contrasts

    rng = np.random.default_rng(seed)
    sets = world(rng, "skewed right", transcripts=6, heads=5)
    contrasts = _Contrasts(sets)
    order = np.argsort(np.unique(sets.transcript, return_inverse=True)[1], kind="stable")
    chosen = (rng.random((3, len(sets.members))) * [len(m) for m in sets.members]).astype(int)
    got = statistic(contrasts.differences(chosen[:, order]))
    for row, c in zip(got, chosen, strict=True):
        np.testing.assert_allclose(row, literal(sets, c), rtol=1e-9)


def test_the_scale_does_not_know_the_event():
    rng = np.random.default_rng(0)
    sets = world(rng, "normal", transcripts=5, heads=4)
    turned = Sets(tuple(np.roll(m, 1, 0) for m in sets.members), sets.transcript)
    np.testing.assert_allclose(transcript_scales(sets), transcript_scales(turned))


def test_planted_heads_are_found_and_no_others():
    rng = np.random.default_rng(0)
    sets = world(rng, "normal", transcripts=40, heads=50, planted={7: 1.5, 31: 1.2, 20: -1.5})
    result = calibrate({"region": sets}, draws=1999)["region"]
    assert np.flatnonzero(result.p_maxt <= 0.05).tolist() == [7, 31] and result.ranking()[0] in (7, 31)
    against = calibrate({"region": sets}, draws=1999, sign=-1)["region"]
    assert np.flatnonzero(against.p_maxt <= 0.05).tolist() == [20]
    assert result.p_value.min() == 1 / 2000  # never 0


def test_max_t_runs_over_kinds_too():
    rng = np.random.default_rng(0)
    kinds = {k: world(rng, "normal", transcripts=24, heads=10) for k in ("region", "label", "departure")}
    joint, alone = calibrate(kinds, draws=999), calibrate({"region": kinds["region"]}, draws=999)
    assert (joint["region"].null_max >= alone["region"].null_max - 1e-12).mean() > 0.5
    assert joint["region"].p_maxt.mean() > alone["region"].p_maxt.mean()
    many = {str(i): world(rng, "normal", transcripts=24, heads=1) for i in range(20)}  # one head each: alone there is nothing to correct for
    joint, alone = calibrate(many, draws=499), calibrate({"0": many["0"]}, draws=499)["0"]
    assert abs(np.median(alone.null_max)) < 0.4 and all(np.median(found.null_max) > 1.2 for found in joint.values())
    assert all((found.p_maxt >= found.p_value).all() for found in joint.values()) and (alone.p_maxt == alone.p_value).all()
    joint = calibrate(kinds, draws=999)
    assert (joint["region"].p_maxt >= joint["region"].p_value).all() and (joint["region"].q_by >= joint["region"].q_value).all()


def test_uncorrected_p_values_are_uniform_under_the_null():
    rng = np.random.default_rng(1)
    found = np.concatenate([calibrate({"k": world(rng, "skewed left", transcripts=24, heads=3)}, draws=199, seed=i)["k"].p_value for i in range(120)])
    for level in (0.1, 0.5, 0.9):
        assert abs((found <= level).mean() - level) < 0.09


@pytest.mark.parametrize("name", WORLDS)
def test_family_wise_error_is_held(name):  # G3, a small sample of benchmarks/null_simulation.py
    rng = np.random.default_rng(2)
    hits = [bool((calibrate({"k": world(rng, name, transcripts=24, heads=24)}, draws=199, seed=i)["k"].p_maxt <= 0.05).any()) for i in range(120)]
    assert 0.0 < np.mean(hits) <= 0.11


def test_270_null_heads():  # G3
    rng = np.random.default_rng(3)
    corrected, raw = [], []
    for i in range(60):
        result = calibrate({"k": world(rng, "normal", transcripts=24, heads=270)}, draws=199, seed=i)["k"]
        corrected.append(bool((result.p_maxt <= 0.05).any())), raw.append(bool((result.p_value <= 0.05).any()))
    assert np.mean(corrected) <= 0.12 and np.mean(raw) > 0.9


def test_order_of_sets_and_seed():
    rng = np.random.default_rng(0)
    sets = world(rng, "unequal", transcripts=12, heads=6)
    again = calibrate({"k": sets}, draws=199, seed=5)["k"]
    assert np.array_equal(calibrate({"k": sets}, draws=199, seed=5)["k"].p_value, again.p_value)
    assert not np.array_equal(calibrate({"k": sets}, draws=199, seed=6)["k"].p_value, again.p_value)
    turn = np.random.default_rng(1).permutation(len(sets.members))
    turned = Sets(tuple(sets.members[i] for i in turn), sets.transcript[turn])
    np.testing.assert_allclose(calibrate({"k": turned}, draws=199, seed=5)["k"].statistic, again.statistic)


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=20))
def test_q_values_equal_brute_force_and_keep_the_order_of_p_values(p):
    """Benjamini-Hochberg: the least `p n / rank` of this and every larger p; without the "every larger" .04 and .041 change places."""
    n, ranked = len(p), sorted(p)
    want = [min(1.0, *(ranked[i] * n / (i + 1) for i in range(n) if ranked[i] >= value)) for value in p]
    np.testing.assert_allclose(adjusted(np.array(p), "fdr_bh"), want)
    assert adjusted(np.array([0.04, 0.041]), "fdr_bh").tolist() == [0.041, 0.041]


def test_a_head_that_never_differs_is_not_significant():
    sets = Sets(tuple(np.concatenate([np.random.default_rng(i).normal(size=(3, 1)), np.zeros((3, 1))], 1) for i in range(30)), np.arange(30))
    result = calibrate({"k": sets}, draws=199)["k"]
    assert result.statistic[1] == 0 and result.p_value[1] == 1.0


def test_bad_arguments():
    sets = world(np.random.default_rng(0), "normal", transcripts=3, heads=2)
    with pytest.raises(ValueError, match="unknown arm"):
        calibrate({"k": sets}, arm="both")
    with pytest.raises(ValueError, match="at least one null"):
        Sets((np.zeros((1, 2)),), np.array([0]))


def test_intervals_draw_whole_transcripts():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 10)
    values = rng.normal(0, 1, 20)[groups][:, None] + rng.normal(0, 0.01, (200, 1))  # ten copies of twenty numbers
    low, high = bootstrap_interval(values, groups)
    assert 0.6 < float(high[0] - low[0]) < 1.2  # as of 20 numbers, not of 200
    assert adjusted(np.array([0.01, 0.02]), "fdr_bh").tolist() == [0.02, 0.02]
