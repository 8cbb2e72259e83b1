"""Knock-in: every control against the literal oracle, who may be a donor of what, and the claim's p-value."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from decisionheads import HeadSet, KnockIn
from decisionheads.decisions import KINDS
from decisionheads.knock_in import CONTROLS, DRAWN, NEGATIVE, KnockedIn, beats, changes, draw_donors, identity_change, interval, knock_in, random_heads

from . import oracle

HEADS = HeadSet([(1, 4), (2, 2), (3, 3)])


def regrouped(readings, group):
    """The same readings with `group(number)` as their transcripts' group."""
    return [replace(r, transcript=replace(r.transcript, group=group(i))) for i, r in enumerate(readings)]


def only(readings, kind):
    return [replace(r, events=tuple(e for e in r.events if e.kind == kind)) for r in readings]


# -- what is measured -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_control_equals_the_literal_oracle(model, plain, readings, kind, monkeypatch):
    """z of donors from plain forwards of their own, put in by plain hooks; only random heads and noise are told what was drawn."""
    drawn = {}

    def kept(b, *args):
        drawn[b.event.name] = changes(b, *args)
        return drawn[b.event.name]

    monkeypatch.setattr("decisionheads.knock_in.changes", kept)
    found = knock_in(model, readings, HEADS, kind, seed=3)
    events = {e.name: (r.encoded.ids[: e.position + 1], e) for r in readings for e in r.events}
    all_heads = HeadSet.all(model.n_layers, model.n_heads)
    z = {name: oracle.z_of(plain, *at).numpy() for name, at in ((n, (ids, e.position)) for n, (ids, e) in events.items())}
    largest = dict.fromkeys(CONTROLS, 0.0)
    for n, (true, name) in enumerate(found.pairs):
        ids, b = events[name]
        a = events[true][1].chosen
        moved, others = drawn[name]["noise"].donor, drawn[name]["random heads"].heads
        np.testing.assert_allclose(np.linalg.norm(moved - z[name], axis=-1), np.linalg.norm(z[true] - z[name], axis=-1), rtol=1e-3, atol=1e-4)
        assert others.per_layer() == HEADS.per_layer() and not len(others & HEADS) and drawn[name]["noise"].heads == HEADS
        given = {"identity": (z[name], HEADS), "random heads": (z[true], others), "noise": (moved, HEADS),
                 **{c: (z[found.donors[c][n]], HEADS) for c in DRAWN if found.donors[c][n] is not None}}
        clean = oracle.logits(plain, ids)[b.position]
        for row, control in enumerate(CONTROLS):
            assert (control in given) == np.isfinite(found.shift[row, n]) == np.isfinite(found.flipped[row, n])
            if control not in given:
                continue
            values, heads = given[control]
            after = oracle.all_ablated(plain, ids, b.position, values, keep=(all_heads - heads).to_list())
            want = float(after[a] - after[b.chosen] - clean[a] + clean[b.chosen])
            assert found.shift[row, n] == pytest.approx(want, abs=2e-4), control
            assert found.flipped[row, n] == (max(b.alternatives, key=lambda i, x=after: float(x[i])) == a), control
            largest[control] = max(largest[control], abs(want))
    absent = {"region": {"same token, other region"}, "label": set(), "departure": {"own label", "another donor of the label"}}[kind]
    for control, most in largest.items():
        assert most < 1e-4 if control in absent | {"identity"} else most > 0.1, control  # the references themselves
    assert len(found.pairs) + found.without_donor == sum(e.kind == kind for r in readings for e in r.events)


def test_contexts_may_have_any_lengths(model, readings):  # F1
    two = [readings[0], max(readings, key=lambda r: abs(len(r.encoded) - len(readings[0].encoded)))]
    positions = [{e.position for e in r.events if e.kind == "region"} for r in two]
    assert len(two[0].encoded) != len(two[1].encoded) and positions[0] != positions[1]
    everything = HeadSet.all(model.n_layers, model.n_heads)
    found = knock_in(model, readings, everything, "region")
    assert found.of("true").mean() > 10 and found.flipped[0].mean() > 0.9 and len(knock_in(model, two, everything, "region").pairs) > 0
    assert np.nanmean(found.of("own label")) < 2 < np.nanmean(found.of("another donor of the label"))


def test_an_empty_set_changes_nothing_at_all(model, readings):
    for kind in KINDS:
        found = knock_in(model, readings, HeadSet(), kind)
        has = np.isfinite(found.shift)
        assert len(found.pairs) > 10 and (found.shift[has] == 0.0).all() and not found.flipped[has].any()
        assert np.array_equal(has, np.isfinite(knock_in(model, readings, HEADS, kind).shift))
        assert found.claim_p == 1.0


def test_identity_is_exactly_nothing_and_another_z_is_not(model, readings, monkeypatch):  # F4
    r, everything = readings[6], HeadSet.all(model.n_layers, model.n_heads)
    assert all(identity_change(model, r, e, heads) == 0.0 for e in r.events for heads in (everything, HEADS))
    assert all((knock_in(model, readings, HEADS, kind).of("identity") == 0.0).all() for kind in KINDS)
    monkeypatch.setattr("decisionheads.knock_in.KnockIn", lambda heads, donor: KnockIn(heads, donor + np.float32(1e-4)))
    assert all(identity_change(model, r, e, HEADS) > 0.0 for e in r.events)


def test_swapping_the_two_choices_negates_every_shift(model, readings):
    """Donor and recipient keep their z; only the names of what they chose are exchanged."""
    a, b, reading = next((a, b, (ra, rb)) for ra in readings for rb in readings if ra is not rb for a in ra.events for b in rb.events
                         if a.kind == b.kind == "region" and a.chosen in b.alternatives and b.chosen in a.alternatives and a.chosen != b.chosen)
    alone = lambda x, y: [replace(r, events=(e,)) for r, e in zip(reading, (x, y), strict=True)]  # noqa: E731
    found = knock_in(model, alone(a, b), HEADS, "region")
    swapped = knock_in(model, alone(replace(a, chosen=b.chosen), replace(b, chosen=a.chosen)), HEADS, "region")
    assert found.pairs == swapped.pairs and len(found.pairs) == 2
    np.testing.assert_allclose(found.shift, -swapped.shift, atol=1e-4)
    assert np.abs(found.of("true")).min() > 0.1 and np.abs(found.of("noise")).min() > 0.01


def test_the_whole_set_leaves_no_other_heads(model, readings):
    found = knock_in(model, readings[:6], HeadSet.all(model.n_layers, model.n_heads), "region")
    assert np.isnan(found.of("random heads")).all() and found.summary()["random_shift"] is None and np.isfinite(found.of("noise")).all()


def test_random_heads_match_layers_and_avoid_the_set():
    rng = np.random.default_rng(0)
    heads = HeadSet([(0, 1), (0, 2), (3, 3)])
    for _ in range(20):
        others = random_heads(heads, 4, 8, rng)
        assert others.per_layer() == heads.per_layer() and not len(others & heads)
    assert random_heads(HeadSet([(0, 0), (0, 1)]), 1, 3, rng).to_list() == [(0, 2)]


# -- who may be a donor -----------------------------------------------------------------------------------


def scrambled(readings):
    """Events whose chosen token, label and place in the round no longer go together, as they need not in other label spaces."""
    rng = np.random.default_rng(0)

    def other(e):
        return [e, replace(e, chosen=int(rng.choice(e.alternatives))), replace(e, primary=False), replace(e, label="Vora-mi")][rng.integers(4)]

    return [replace(r, events=tuple(map(other, r.events))) for r in readings]


def eligible(control, b, a, x, group):
    """The definition of a control, written out: may event `x` be the donor for recipient `b` with true donor `a`?"""
    if group[x.transcript] == group[b.transcript] or not x.primary:
        return False
    if control == "other kind":
        return x.kind != b.kind
    return x.kind == b.kind and {
        "true": x.chosen in b.alternatives and x.chosen != b.chosen,
        "own label": x.label == b.label and x.chosen == b.chosen,
        "same token, other region": x.chosen == a.chosen and x.region != a.region,
        "another donor of the label": x.label == a.label and x.chosen == a.chosen and group[x.transcript] != group[a.transcript]}[control]


@pytest.mark.parametrize("mixed", [False, True], ids=["right", "scrambled"])
@pytest.mark.parametrize("group", [lambda i: None, lambda i: f"patient {i % 4}"], ids=["alone", "grouped"])
def test_donors_obey_their_definitions_and_are_missing_only_where_there_are_none(readings, group, mixed):
    readings = regrouped(scrambled(readings) if mixed else readings, group)
    of = {r.transcript.id: r.transcript.group or r.transcript.id for r in readings}
    events = {e.name: e for r in readings for e in r.events}
    drawn = dict.fromkeys(DRAWN, 0)
    for kind in KINDS:
        for seed in range(5):
            recipients, without = draw_donors(readings, kind, seed)
            assert len(recipients) + without == sum(e.kind == kind and e.primary for e in events.values()) and recipients
            for r, b, donors in recipients:
                assert b in r.events and b.primary
                for control in DRAWN:
                    pool = {n for n, x in events.items() if eligible(control, b, donors["true"], x, of)}
                    assert (donors[control].name in pool) if control in donors else not pool, (kind, control)
                    drawn[control] += control in donors
            assert mixed or kind != "region" or not any("same token, other region" in b.donors for b in recipients)  # the token names the region
    assert min(drawn.values()) > 5
    once, again, other = (draw_donors(readings, "region", seed)[0] for seed in (0, 0, 1))
    assert once == again and once != other


def test_every_donor_is_drawn_sooner_or_later(readings):
    seen = {draw_donors(readings, "label", seed)[0][0].donors["true"].name for seed in range(200)}
    b = draw_donors(readings, "label", 0)[0][0].event
    of = {r.transcript.id: r.transcript.id for r in readings}
    assert seen == {e.name for r in readings for e in r.events if eligible("true", b, e, e, of)} and len(seen) > 3


def test_no_transcript_of_the_same_group_is_a_donor(model, readings):
    found = knock_in(model, regrouped(readings, lambda i: "one patient"), HEADS, "region")
    assert found.pairs == () and found.without_donor == sum(e.kind == "region" for r in readings for e in r.events)
    two = knock_in(model, regrouped(readings, lambda i: f"patient {i % 2}"), HEADS, "region")
    number = {r.transcript.id: i % 2 for i, r in enumerate(readings)}
    assert all(number[a.split("@")[0]] != number[b.split("@")[0]] for a, b in two.pairs) and len(two.pairs) > 10
    assert set(two.groups) == {"patient 0", "patient 1"} and len(set(two.transcripts)) > 6 and all(np.isnan(p) for p in two.p.values())
    assert np.isnan(two.of("another donor of the label")).all()  # there is no third patient


def test_the_set_does_not_change_who_the_donors_are(model, readings):
    a, b = (knock_in(model, readings, heads, "label", seed=2) for heads in (HEADS, HeadSet([(0, 0)])))
    assert a.pairs == b.pairs and a.donors == b.donors and not np.array_equal(a.shift, b.shift)
    again = knock_in(model, readings, HEADS, "label", seed=2)
    assert np.array_equal(a.shift, again.shift, equal_nan=True)


# -- without donors ---------------------------------------------------------------------------------------


def test_a_kind_without_donors_is_n_a(model, readings):
    found = knock_in(model, readings[:1], HEADS, "departure")
    assert found.shift.shape == (len(CONTROLS), 0) and found.without_donor == sum(e.kind == "departure" for e in readings[0].events) > 0
    assert np.isnan(found.claim_p) and "no recipient with a donor" in repr(found)
    said = found.summary()
    assert said["recipients"] == 0 and said["p"] is said["shift"] is said["flipped"] is said["random_shift"] is said["identity"] is None
    assert (found.to_frame().n == 0).all() and json.loads(json.dumps(said, allow_nan=False)) == said


def test_a_control_without_donors_is_n_a_and_the_others_are_not(model, readings):
    found = knock_in(model, only(readings, "region"), HEADS, "region")
    assert np.isnan(found.of("other kind")).all() and np.isnan(found.of("same token, other region")).all()
    frame, said = found.to_frame().set_index("control"), found.summary()
    assert list(frame.index) == list(CONTROLS) and frame.n["other kind"] == 0 and frame.n["noise"] == frame.n["true"] == len(found.pairs)
    assert said["controls"]["other kind"] == {"n": 0, "shift": None, "low": None, "high": None, "flipped": None, "p": None}
    assert said["controls"]["noise"]["p"] < 0.05 and said["p"] == max(said["controls"][c]["p"] for c in NEGATIVE if said["controls"][c]["p"])
    assert said["shift"] == pytest.approx(found.of("true").mean(), rel=1e-5) and said["identity"] == 0.0
    assert "'other kind'" in repr(found).split("not tested")[1] and "\n" not in repr(found)


# -- the claim ---------------------------------------------------------------------------------------------


def made(rows, groups):
    """A result with given shifts: control -> `[recipient]`."""
    n = len(groups)
    shift = np.array([rows.get(c, np.full(n, np.nan)) for c in CONTROLS], float)
    return KnockedIn(CONTROLS, shift, (shift > 0).astype(float), (("a", "b"),) * n, {}, tuple(groups), tuple(groups), 0)


def test_p_values_hold_their_level_where_true_and_control_are_exchangeable():
    """Recipients of a transcript share much of their shift, and shifts are skewed; one transcript has many."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(14), [9, *rng.integers(1, 5, 13)]).astype(str)
    below = []
    for _ in range(400):
        arm = lambda: rng.lognormal(0, 1, 14)[groups.astype(int)] + rng.normal(size=len(groups))  # noqa: E731
        below.append(beats(arm() - arm(), groups, draws=499) <= 0.05)
    assert 0.025 <= np.mean(below) <= 0.08


def test_the_claim_holds_only_if_each_negative_control_is_beaten():
    rng = np.random.default_rng(0)
    groups = [f"t{i // 2}" for i in range(40)]
    noise = lambda: rng.normal(size=40)  # noqa: E731
    rows = {"true": 5 + noise(), "identity": np.zeros(40), **{c: noise() for c in NEGATIVE}, "another donor of the label": 5 + noise()}
    good = made(rows, groups)
    assert good.claim_p <= 0.001 and good.p["another donor of the label"] > 0.01 and "true" not in good.p and "identity" not in good.p
    assert "beats all 5 negative controls" in repr(good)
    bad = made(rows | {"own label": 5 + noise()}, groups)
    assert bad.claim_p == bad.p["own label"] > 0.05 and "does not beat 'own label'" in repr(bad)
    assert made(rows | {"another donor of the label": 9 + noise()}, groups).claim_p == good.claim_p  # a positive control is none to beat
    assert made({"true": -rows["true"], "noise": noise()}, groups).claim_p > 0.99


def test_only_recipients_with_both_are_compared():
    groups = [f"t{i}" for i in range(12)]
    true, control = np.arange(12.0), np.arange(12.0) - 1
    control[:4] = np.nan
    found = made({"true": true, "noise": control}, groups)
    assert found.p["noise"] == 2.0**-8 and np.isnan(found.p["own label"]) and found.claim_p == found.p["noise"]
    row = found.to_frame().set_index("control").loc["noise"]
    assert row.n == 8 and row["shift"] == np.nanmean(control) and row.low < row["shift"] < row.high


def test_whole_transcripts_are_flipped_and_fewer_than_six_are_not_tested():
    one = np.arange(1.0, 8)
    names = np.arange(7).astype(str)
    assert beats(one, names) == 1 / 128 and beats(-one, names) == 1.0  # all flips: exact
    assert beats(np.repeat(one, 10), np.repeat(names, 10)) == 1 / 128  # many recipients of few transcripts are no more evidence
    assert np.isnan(beats(np.ones(50), np.repeat(names[:5], 10)))
    assert beats(np.ones(20), np.arange(20).astype(str)) <= 2e-4 and beats(np.zeros(20), np.arange(20).astype(str)) == 1.0
    assert all(np.isnan(interval(np.ones(50), np.repeat(names[:5], 10))))
    wide, narrow = interval(np.repeat(one, 10), np.repeat(names, 10)), interval(np.repeat(one, 10), np.arange(70).astype(str))
    assert wide[1] - wide[0] > 2 * (narrow[1] - narrow[0]) and wide[0] < 4 < wide[1]


def test_noise_goes_as_far_as_the_true_donor_in_every_head(readings):
    rng = np.random.default_rng(0)
    b = draw_donors(readings, "region", 0)[0][0]
    z = {e.name: rng.normal(size=(2, 3, 5)).astype(np.float32) for e in (b.event, *b.donors.values())}
    own, true = z[b.event.name], z[b.donors["true"].name]
    one, another = (changes(b, z, HeadSet([(0, 0)]), HeadSet([(0, 1)]), rng.normal(size=(2, 3, 5)))["noise"].donor - own for _ in range(2))
    for moved in (one, another):
        np.testing.assert_allclose(np.linalg.norm(moved, axis=-1), np.linalg.norm(true - own, axis=-1), rtol=1e-5)
    assert np.abs(one - another).max() > 0.1 and abs((one * (true - own)).sum()) < 0.9 * (one * one).sum()
    assert "random heads" not in changes(b, z, HeadSet([(0, 0)]), HeadSet(), own) and "random heads" in changes(b, z, HeadSet(), HeadSet(), own)
