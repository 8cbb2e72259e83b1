"""Sets of heads: selected together, judged on other texts, against random sets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from decisionheads import HeadSet, InputError, mean_ablate, reference_means
from decisionheads.calibration import ratio_interval
from decisionheads.head_sets import Selection, SetMargins, cases_of, pooled_recovery, select, set_margins, with_reference
from decisionheads.necessity import Judged, judge, phase_matrix, random_sets, robustness, share_limits

from . import oracle


@pytest.fixture(scope="module")
def cases(readings, means):
    return cases_of(readings[6:], "region", means)


def test_margins_of_sets_equal_the_oracle(model, plain, readings, cases):
    heads = HeadSet([(0, 0), (1, 4), (2, 2)])
    found = set_margins(model, cases[:3], [heads])
    reading = next(r for r in readings if r.transcript.id == cases[0].transcript)
    for n, c in enumerate(cases[:3]):
        reading = next(r for r in readings if r.transcript.id == c.transcript)
        ids = reading.encoded.ids[: c.position + 1]
        others = (HeadSet.all(model.n_layers, model.n_heads) - heads).to_list()
        only, without = (float(c.margin(oracle.all_ablated(plain, ids, c.position, c.zbar, keep))) for keep in (heads.to_list(), others))
        assert abs(found.only[0, n] - only) <= 1e-4 and abs(found.without[0, n] - without) <= 1e-4
        assert abs(found.m[n] - float(c.margin(oracle.logits(plain, ids)[c.position]))) <= 1e-4
        assert abs(only - without) > 0.1


def test_the_empty_set_and_the_full_set_are_exact(model, cases):
    everything = model.hooked.heads
    found = set_margins(model, cases, [HeadSet(), everything])
    assert np.array_equal(found.without[0], found.m) and np.array_equal(found.only[0], found.m0)
    assert np.abs(found.without[1] - found.m0).max() <= 1e-4 and np.abs(found.only[1] - found.m).max() <= 1e-4
    assert found.kept_without[0].mean() > 0.9 > found.kept_only[0].mean()


def test_order_and_packs_change_nothing(model, cases):
    sets = [HeadSet([(0, 0)]), HeadSet([(1, 4), (3, 6)]), HeadSet()]
    a = set_margins(model, cases, sets)
    b = set_margins(model, cases[::-1], sets[::-1], memory=10**6)
    for name in ("without", "only"):
        assert np.abs(getattr(a, name) - getattr(b, name)[::-1, ::-1]).max() <= 1e-4


def arithmetic(monkeypatch, value):
    """Margins by a rule on sets, in place of a model: `value(kept heads) -> share of m - m0`."""
    def made(model, cases, sets, *, without=True, only=True, memory=0):
        m, m0 = np.full(len(cases), 10.0), np.zeros(len(cases))
        share = lambda heads: np.array([10.0 * value(heads)] * len(cases))  # noqa: E731
        alone = np.stack([share(s) for s in sets])
        rest = np.stack([share(model.hooked.heads - s) for s in sets])
        return SetMargins(m, m0, rest if without else np.tile(m, (len(sets), 1)), alone if only else np.tile(m0, (len(sets), 1)), rest > 0, alone > 0)

    for module in ("head_sets", "necessity"):
        monkeypatch.setattr(f"decisionheads.{module}.set_margins", made)


A, B, C, D = HeadSet([(0, 0)]), HeadSet([(1, 1)]), HeadSet([(2, 2)]), HeadSet([(3, 3)])


def test_a_conjunction_is_kept_whole(model, cases, monkeypatch):
    """Neither head does anything without the other: going forward would never take the first."""
    arithmetic(monkeypatch, lambda s: float(s >= (A | B)))
    chosen = select(model, cases, A | B | C | D)
    assert chosen.heads == A | B and chosen.reached and chosen.recovery == 1.0 and [str(h) for h, _ in chosen.removed] == ["L2H2", "L3H3"]


def test_heads_that_back_each_other_up_leave_one(model, cases, monkeypatch):
    arithmetic(monkeypatch, lambda s: float(bool(len(s & (A | B)))))
    assert len(select(model, cases, A | B | C).heads) == 1


def test_a_backup_outside_the_candidates_is_added(model, cases, monkeypatch):
    arithmetic(monkeypatch, lambda s: 0.5 * (s >= A) + 0.4 * (s >= D) + 0.1 * (s >= C))
    chosen = select(model, cases, A)
    assert chosen.heads == A | D and [str(h) for h in chosen.added] == ["L3H3"]
    assert chosen.to_frame().to_dict("list") | {"recovery_without": []} == {"layer": [0, 3], "head": [0, 3], "kept": [True, True], "helper": [False, True], "recovery_without": []}
    assert "HeadSet(2: L0H0, L3H3), recovery 0.90, 1 helpers tried" in repr(chosen)


def test_an_opposing_head_does_not_stop_the_elimination(model, cases, monkeypatch):
    arithmetic(monkeypatch, lambda s: 0.9 * (s >= A) - 0.5 * (s >= C))
    chosen = select(model, cases, A | C)
    assert chosen.heads == A and chosen.recovery > 0.85


def test_a_target_out_of_reach_is_said_so(model, cases, monkeypatch):
    arithmetic(monkeypatch, lambda s: 0.3 * (s >= A))
    chosen = select(model, cases, A | B)
    assert not chosen.reached and chosen.recovery < 0.8


def test_random_sets_have_the_same_shape_and_none_of_the_set(model):
    heads = HeadSet([(0, 0), (0, 1), (2, 3)])
    drawn, how = random_sets(heads, model.hooked.heads, some=60)
    assert how.startswith("layers matched") and len(set(drawn)) == len(drawn) == 15 * 7
    assert all(s.per_layer() == heads.per_layer() and not len(s & heads) for s in drawn)
    many, how = random_sets(HeadSet([(0, 0), (1, 0), (2, 0), (3, 0)]), model.hooked.heads, some=200)
    assert len(set(many)) == 200 and how == f"layers matched, 200 of {7**4}"
    full, how = random_sets(HeadSet((0, h) for h in range(8)) | B, model.hooked.heads, some=30)  # its layer has no others
    assert how.startswith("same size, any layer") and all(len(s) == 9 and not len(s & HeadSet((0, h) for h in range(8))) for s in full)
    none, how = random_sets(model.hooked.heads - A, model.hooked.heads)
    assert none == [] and how.startswith("undefined")
    assert random_sets(heads, model.hooked.heads, seed=3) == random_sets(heads, model.hooked.heads, seed=3)


def test_a_planted_set_is_necessary_and_sufficient_and_others_are_not(model, cases, monkeypatch):
    arithmetic(monkeypatch, lambda s: float(s >= (A | B)))
    planted, other = judge(model, cases, A | B), judge(model, cases, C | D)
    n = len(planted.transcripts)
    assert planted.share("necessary")[:3] == planted.share("sufficient")[:3] == (n, n, 1.0) and planted.pooled == (1.0, 1.0)
    assert other.share("necessary")[0] == other.share("sufficient")[0] == 0 and other.pooled == (0.0, 0.0)
    assert len(planted.to_frame()) == n and "R 1.00" in repr(planted)


def test_a_margin_that_attention_does_not_carry_is_undefined_and_counted(model, cases, monkeypatch):
    real = set_margins

    def flat(*args, **options):
        found = real(*args, **options)
        mine = np.array([c.transcript == cases[0].transcript for c in cases])
        return SetMargins(found.m, np.where(mine, found.m, found.m0), found.without, found.only, found.kept_without, found.kept_only)

    monkeypatch.setattr("decisionheads.necessity.set_margins", flat)
    found = judge(model, cases, A, some=20)
    assert found.undefined == 1 and np.isnan(found.necessity[found.transcripts.index(cases[0].transcript)])
    assert found.share("necessary")[1] == len(found.transcripts) - 1


def test_on_the_trained_model_the_selected_set_carries_the_choice(model, readings, means, cases):
    """Selected on three texts, judged on three others."""
    half = [c for c in cases if c.transcript in {r.transcript.id for r in readings[6:9]}]
    rest = [c for c in cases if c not in half]
    chosen = select(model, half, model.hooked.heads)
    assert chosen.reached and 1 <= len(chosen.heads) <= 16
    found = judge(model, rest, chosen.heads, some=40)
    assert isinstance(found, Judged) and found.pooled[1] > 0.5 and found.pooled[0] > 0.5
    random = set_margins(model, rest, random_sets(chosen.heads, model.hooked.heads, some=20)[0][:20])
    assert np.median(pooled_recovery(random)) < 0.5
    assert -0.3 < found.kappa < 0.7 and "layers matched" in found.drawn


def test_limits_are_exact_for_patients_and_wider_for_groups():
    yes = np.array([True] * 24)
    assert abs(share_limits(yes, np.arange(24))[0] - 0.858) < 0.001  # 24 of 24 has a lower limit of .86
    mixed = np.array([True, True, True, False] * 10)
    low, high = share_limits(mixed, np.repeat(np.arange(10), 4))
    assert low == high == 0.75  # every group alike
    low, high = share_limits(np.repeat([True, False], 20), np.repeat(np.arange(4), 10))
    assert high - low > 0.5
    assert share_limits(np.ones(240, bool), np.repeat(np.arange(24), 10)) == share_limits(yes, np.arange(24))  # 240 of 240, but of 24 patients


def test_a_reference_transcript_may_not_be_judged(readings, means):
    with pytest.raises(InputError, match="is in the reference split and is scored too"):
        cases_of(readings[:1], "region", means)


def test_no_decision_is_said_so(model):
    for call in (lambda: select(model, [], A), lambda: judge(model, [], A)):
        with pytest.raises(InputError, match="no decision of this kind"):
            call()


def test_an_empty_set_has_no_random_sets(model, cases):
    found = judge(model, cases, HeadSet())
    assert found.pooled == (0.0, 0.0) and found.drawn == "undefined: the set is empty" and found.share("necessary")[1] == 0




# -- splits ---------------------------------------------------------------------------------------------


def test_what_selected_a_set_may_not_judge_it(model, cases):
    """By transcript, and by patient."""
    chosen = Selection(A, 1.0, (), (), True, frozenset({cases[0].transcript}))
    with pytest.raises(InputError, match="helped to select this set"):
        judge(model, cases, chosen)
    other = [c for c in cases if c.transcript != cases[0].transcript]
    assert len(judge(model, other, chosen, some=20).transcripts) == 5
    patient = [replace(c, group="p7") for c in other]
    with pytest.raises(InputError, match=r"\(group p7\) helped to select"):
        judge(model, patient, replace(chosen, seen=frozenset({"p7"})))


def test_a_selection_remembers_what_it_was_selected_on(model, cases):
    half = [c for c in cases if c.transcript in ("t6", "t7")]
    assert select(model, half, A | B).seen == {"t6", "t7"}


def test_a_patient_of_the_reference_split_may_not_be_scored(model, readings):
    patient = lambda r: replace(r, transcript=replace(r.transcript, group="p1"))  # noqa: E731
    with pytest.warns(UserWarning, match="are advised"):
        means = reference_means(model, [patient(readings[0]), *readings[1:6]], minimum=3)
    for score in (lambda: cases_of([patient(readings[6])], "region", means), lambda: mean_ablate(model, patient(readings[6]), means)):
        with pytest.raises(InputError, match="is of group p1, which is in the reference split too"):
            score()
    assert cases_of([readings[6]], "region", means)


# -- many at once, other references, other kinds ---------------------------------------------------------


def test_heads_that_go_together_are_scored_together(model, cases, monkeypatch):
    """Of 32 candidates four are needed; two of the others are worth something only jointly, and stay."""
    needed, pair = HeadSet([(0, 0), (1, 1), (2, 2), (3, 3)]), HeadSet([(0, 5), (3, 5)])
    arithmetic(monkeypatch, lambda s: 0.7 * (s >= needed) + 0.2 * bool(len(s & pair)))
    chosen = select(model, cases, model.hooked.heads)
    assert needed <= chosen.heads and len(chosen.heads & pair) == 1 and len(chosen.heads) == 5 and chosen.recovery >= 0.9 - 1e-9


def test_nothing_is_selected_without_a_candidate(model, cases):
    chosen = select(model, cases, HeadSet())
    assert chosen.heads == HeadSet() and not chosen.reached and chosen.added == ()


def test_other_references_and_all_positions_equal_the_oracle(model, plain, readings, cases):
    heads, c = HeadSet([(0, 0), (0, 1), (0, 2), (1, 4), (3, 6)]), cases[0]
    ids = next(r for r in readings if r.transcript.id == c.transcript).encoded.ids[: c.position + 1]
    zero, rest = np.zeros_like(c.zbar), (model.hooked.heads - heads).to_list()
    table = robustness(model, [c], heads, {"zero": [zero]}, some=20).set_index("reference")
    own = judge(model, [c], heads, some=20)
    assert abs(table.loc["mean", "necessity"] - own.pooled[0]) <= 1e-4 and abs(table.loc["mean", "recovery"] - own.pooled[1]) <= 1e-4
    m, at_zero = float(c.margin(oracle.logits(plain, ids)[c.position])), [float(c.margin(oracle.all_ablated(plain, ids, c.position, zero, keep))) for keep in ((), rest)]
    assert abs(table.loc["zero", "m0"] - at_zero[0]) <= 1e-4
    assert abs(table.loc["zero", "necessity"] - (m - at_zero[1]) / (m - at_zero[0])) <= 1e-3
    everywhere = [float(c.margin(oracle.all_ablated(plain, ids, slice(c.answer, c.position + 1), c.zbar, keep)[-1])) for keep in ((), rest)]
    assert abs(table.loc["from the answer on", "m0"] - everywhere[0]) <= 1e-4
    assert abs(table.loc["from the answer on", "necessity"] - (m - everywhere[1]) / (m - everywhere[0])) <= 1e-3
    assert len({round(n, 3) for n in table.necessity}) == 3  # three ways, three answers


def test_every_case_takes_its_own_reference(cases):
    values = [np.full_like(cases[0].zbar, i) for i in range(3)]
    assert [float(c.zbar[0, 0, 0]) for c in with_reference(cases[:4], lambda i: values[i % 3])] == [0, 1, 2, 0]


def test_the_phase_matrix_is_what_each_set_takes_from_each_kind(model, cases, monkeypatch):
    kinds = {"one": cases[:4], "other": cases[4:]}
    arithmetic(monkeypatch, lambda s: 0.6 * (s >= A) + 0.4 * (s >= B))
    table = phase_matrix(model, kinds, {"a": A, "b": B, "none": HeadSet()}).set_index(["ablated", "measured"])
    assert [round(table.loc[("a", k), "necessity"], 6) for k in kinds] == [0.6, 0.6] and round(table.loc[("b", "one"), "necessity"], 6) == 0.4
    assert table.loc[("none", "one"), "necessity"] == 0.0 and np.isnan(table.loc[("none", "one"), "random"]) and table.loc[("a", "one"), "random"] <= 0.4 * 0.1


def test_intervals_draw_whole_groups():
    lost, carried = np.array([1.0, 1.0, 0.0, 0.0]), np.ones(4)
    low, high = ratio_interval(lost, carried, ["a", "a", "b", "b"])
    assert (low, high) == (0.0, 1.0)
    low, high = ratio_interval(np.tile(lost, 25), np.ones(100), [f"{i}" for i in range(100)])
    assert 0.35 < low < 0.5 < high < 0.65
    assert np.isnan(ratio_interval(lost, np.zeros(4), ["a"] * 4)[0]) and np.isnan(ratio_interval(np.zeros(0), np.zeros(0), [])[0])


def test_a_judgement_prints_its_intervals_and_controls(model, cases, monkeypatch):
    arithmetic(monkeypatch, lambda s: 0.9 * (s >= A))
    s = judge(model, cases, A, some=20).summary()
    assert s["necessity"] == {"pooled": 1.0, "low": 1.0, "high": 1.0, "random": 0.1, "random_95": 0.1} and s["necessary"]["share"] == 1.0
    assert s["random_sets"] == "same size, any layer, all 31" and s["undefined"] == 0 and s["kappa"]["value"] is not None
