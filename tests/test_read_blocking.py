"""Read-blocking: arms and controls against the literal oracle, exact zeros, and what it shows on the trained models."""

from __future__ import annotations

import numpy as np
import pytest

from decisionheads import HeadSet, InputError
from decisionheads.phases import BLOCK, NEAR, measure_reads
from decisionheads.read_blocking import ARMS, CONTROLS, Blocked, block_reads, dissociation, value_means
from decisionheads.spans import Sinks, as_keys, control_windows, token_spans, unrelated_mention

from . import oracle
from .test_phases import with_nulls

SINKS = Sinks(frozenset())


@pytest.fixture(scope="module")
def readers(model, readings):
    """The heads that read the near-miss mention, strongest first three."""
    found = measure_reads(model, with_nulls(readings), SINKS, asked=(("departure", NEAR),), draws=999)["departure", NEAR]
    order = [i for i in np.argsort(-found.reading) if found.readers()[i]][:3]
    return HeadSet(divmod(int(i), model.n_heads) for i in order)


@pytest.fixture(scope="module")
def blocked(model, readings, means, space, readers):
    return block_reads(model, readings[6:], readers, "departure", NEAR, means, SINKS, other_span=BLOCK, labels=space, reference=readings[:6])


def test_every_arm_and_control_equals_the_oracle(model, plain, readings, means, space, readers, blocked):
    events = [(r, e) for r in readings[6:] for e in r.events if e.kind == "departure"]
    mean = value_means(model, readings[:6], "departure", NEAR)
    heads = readers.to_list()
    for n in (0, 3):
        reading, event = events[n]
        ids, t = reading.encoded.ids[: event.position + 1], event.position
        margin = lambda logits, e=event: float(logits[e.chosen] - logits[e.competitors[0]])  # noqa: E731
        clean = margin(oracle.logits(plain, ids)[t])
        target, sink = token_spans(reading, event, NEAR), SINKS.keys(ids)
        keys = lambda spans, k=len(ids): np.flatnonzero(as_keys(spans, k))  # noqa: E731
        rest = np.flatnonzero(~as_keys(target, t) & ~sink[:t])
        wanted = {ARMS[0]: (keys(target), None, True), ARMS[1]: (keys(target), None, False), ARMS[2]: (keys(target), mean, False),
                  "equal span": (keys(control_windows(reading, event, target, 1)), None, True), "all but the span": (rest, None, True),
                  "unrelated mention": (keys(unrelated_mention(reading, event, space, target)), None, True), "other family's span": (keys(token_spans(reading, event, BLOCK)), None, True)}
        for name, (cut, instead, renormalise) in wanted.items():
            got = blocked.lost[name][n]
            if not len(cut):
                assert np.isnan(got), name
                continue
            want = clean - margin(oracle.values_replaced(plain, ids, t, heads, cut, instead, renormalise))
            assert abs(got - want) <= 2e-4 * max(1, abs(want)), name
        ablated = oracle.all_ablated(plain, ids, t, means.means["departure"], (model.hooked.heads - readers).to_list())
        assert abs(blocked.whole[n] - (clean - margin(ablated))) <= 2e-4 and blocked.whole[n] > 1 and blocked.lost[ARMS[0]][n] > 1


def test_mean_values_of_a_span_equal_the_oracle(plain, model, readings):
    wanted = []
    for r in readings[:6]:
        values = oracle.values_of(plain, r.encoded.ids)
        wanted += [values[:, :, as_keys(token_spans(r, e, NEAR), len(r.encoded))].mean(2) for e in r.events if e.kind == "departure"]
    np.testing.assert_allclose(value_means(model, readings[:6], "departure", NEAR), np.mean([w.numpy() for w in wanted], 0), atol=1e-5)
    assert value_means(model, readings[:6], "departure", "nothing") is None


def test_blocking_the_near_miss_removes_the_effect_and_blocking_the_list_does_not(blocked):
    for arm in ARMS:
        n, removed, low, high = blocked.removed(arm)
        assert n == len(blocked.whole) and removed > 0.6 and low > 0.4
    for control in ("equal span", "unrelated mention", "other family's span", "other heads"):
        assert abs(blocked.removed(control)[1]) < 0.25, control
    n, difference, low, _ = dissociation(blocked)
    assert n == len(blocked.whole) and difference > 0.5 and low > 0.3
    table = blocked.to_frame()
    assert list(table.name) == [*ARMS, *CONTROLS] and "departure events: removes" in repr(blocked)


def test_a_span_that_gets_no_attention_and_the_empty_set_change_nothing_at_all(model, readings, means, space):
    some = readings[6:8]
    nothing = block_reads(model, some, HeadSet(), "departure", NEAR, means, SINKS, other_span=BLOCK, labels=space, reference=readings[:6])
    assert (nothing.whole == 0).all() and all((x[np.isfinite(x)] == 0).all() for x in nothing.lost.values())
    assert not nothing.defined and np.isnan(nothing.removed(ARMS[0])[1]) and "no effect to remove" in repr(nothing)
    # heads of the first layer that look one, two or three tokens back give the near-miss exactly no weight worth naming
    look_back = block_reads(model, some, HeadSet([(0, 0)]), "departure", NEAR, means, SINKS)
    assert np.abs(look_back.lost[ARMS[0]]).max() <= 1e-3 < np.abs(look_back.whole).max()


def test_an_event_without_the_span_is_counted(model, readings, means):
    found = block_reads(model, readings[6:], HeadSet([(1, 0)]), "label", NEAR, means, SINKS)
    assert len(found.whole) == 0 and found.without == sum(e.kind == "label" for r in readings[6:] for e in r.events) > 0
    assert found.removed(ARMS[0])[0] == 0 and len(found.to_frame()) == len(ARMS) + len(CONTROLS)


def test_a_reference_transcript_is_refused(model, readings, means):
    with pytest.raises(InputError, match="reference split and is scored too"):
        block_reads(model, readings[:1], HeadSet([(1, 0)]), "region", BLOCK, means, SINKS)


def test_a_model_whose_values_cannot_be_replaced_gives_one_arm_alone(model, readings, means, readers, monkeypatch):
    monkeypatch.setattr(model.hooked, "weighted", False)
    found = block_reads(model, readings[6:8], readers, "departure", NEAR, means, SINKS, reference=readings[:6])
    assert np.isfinite(found.removed(ARMS[0])[1]) and found.removed(ARMS[1])[0] == found.removed(ARMS[2])[0] == 0


def test_removed_is_a_ratio_of_sums_over_events_that_have_the_span():
    lost = {ARMS[0]: np.array([2.0, np.nan, 4.0]), "other family's span": np.array([0.0, 1.0, 1.0])}
    made = Blocked(HeadSet([(0, 0)]), "departure", NEAR, np.array([4.0, 9.0, 8.0]), lost, ("a", "b", "c"), 0)
    assert made.removed(ARMS[0])[:2] == (2, 0.5) and made.removed("equal span")[0] == 0 and dissociation(made)[1] == 5 / 12
    assert not Blocked(HeadSet([(0, 0)]), "departure", NEAR, np.array([4.0, -9.0, 8.0]), lost, ("a", "b", "c"), 0).defined
