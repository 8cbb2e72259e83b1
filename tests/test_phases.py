"""Spans, sinks, what heads read, and the families that follow."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from decisionheads import HeadSet
from decisionheads.calibration import Calibration
from decisionheads.heads import overlaps
from decisionheads.phases import BLOCK, NEAR, Reads, families, measure_reads, read_shares
from decisionheads.spans import Sinks, as_keys, control_windows, find_sinks, token_spans, unrelated_mention, windows

from . import oracle


@pytest.fixture(scope="module")
def departures(readings):
    return [(r, e) for r in readings for e in r.events if e.kind == "departure"]


# -- spans ----------------------------------------------------------------------------------------------


def test_spans_are_the_tokens_of_their_characters_and_end_before_the_row(departures, space):
    for reading, event in departures:
        words = lambda spans, r=reading: "".join(r.transcript.text[r.encoded.offsets[a, 0]:r.encoded.offsets[b - 1, 1]] for a, b in spans)  # noqa: E731
        assert words(token_spans(reading, event, NEAR)).strip() == event.near_miss
        assert event.label in words(token_spans(reading, event, BLOCK)) and words(token_spans(reading, event, BLOCK)).count(event.region) == 3
        early = replace(event, position=token_spans(reading, event, NEAR)[0][0])
        assert token_spans(reading, early, NEAR) == ((early.position, early.position + 1),)  # the rest lies in the future
        assert token_spans(reading, replace(event, position=2), NEAR) == () == token_spans(reading, event, "no such span")


def test_windows_are_as_long_near_and_apart():
    rng = np.random.default_rng(0)
    for _ in range(50):
        start, size = int(rng.integers(0, 80)), int(rng.integers(1, 9))
        target, avoid = [(start, start + size)], [(int(a), int(a) + 3) for a in rng.integers(0, 90, 3)]
        found = windows(target, avoid, (0, 90))
        taken = as_keys([*target, *avoid], 100).astype(int)
        for a, b in found:
            taken[a:b] += 1
            assert b - a == size and a >= 0 and b <= 90
        assert len(found) >= 3 and all(taken[a:b].max() == 1 for a, b in found)
        assert [abs(a - start) for a, _ in found] == sorted(abs(a - start) for a, _ in found)
    assert windows([(0, 5)], [], (0, 9)) == []


def test_controls_stay_in_their_part_and_away_from_what_the_event_is_about(departures):
    for reading, event in departures:
        t = reading.transcript
        for name, low, high in ((BLOCK, 0, t.reasoning_start), (NEAR, t.reasoning_start, t.answer_start)):
            found = control_windows(reading, event, token_spans(reading, event, name))
            own = as_keys([s for n in (BLOCK, NEAR, "own mention") for s in token_spans(reading, event, n)], len(reading.encoded))
            assert len(found) >= 3 and not any(own[a:b].any() for a, b in found)
            assert all(low <= reading.encoded.offsets[a, 0] and reading.encoded.offsets[b - 1, 1] <= high for a, b in found)


def test_an_unrelated_mention_is_of_another_region_and_written_before(departures, space):
    found = [(r, e, unrelated_mention(r, e, space, token_spans(r, e, NEAR))) for r, e in departures]
    assert sum(bool(spans) for _, _, spans in found) >= 6
    for reading, event, spans in found:
        for a, b in spans:
            label = reading.transcript.text[reading.encoded.offsets[a, 0]:reading.encoded.offsets[b - 1, 1]].strip()
            assert space.region(label) != event.region and b <= event.position


def test_sinks_are_bos_template_and_what_takes_a_third_of_all_attention(model, plain, readings):
    reading, rows = readings[0], [100, 120]
    ids = reading.encoded.ids
    mass = oracle.attention_of(plain, ids[:121])[:, :, rows].mean((0, 1)).numpy()  # [row, key]
    mass[[0, 1], rows] = 0  # a row's own key is never a sink
    by_id = {i: mass[:, ids[:121] == i].sum() / 2 for i in set(ids[:121].tolist())}
    levels = sorted(by_id.values())
    most = (levels[-3] + levels[-4]) / 2
    found = find_sinks(model, [(reading.prefix, rows)], [7], most=float(most))
    assert found.ids == {7} | {i for i, m in by_id.items() if m > most} and sum(m > most for m in by_id.values()) == 3 and levels[-3] > 0.01
    keys = Sinks(frozenset({int(ids[5])})).keys(ids)
    assert keys[0] and keys[5] and keys.sum() == 1 + (ids[1:] == ids[5]).sum()


# -- readings -------------------------------------------------------------------------------------------


def test_shares_equal_the_oracle_and_leave_sinks_out(model, plain, departures):
    reading, event = departures[0]
    target, sinks = token_spans(reading, event, BLOCK), Sinks(frozenset({int(reading.encoded.ids[token_spans(reading, event, BLOCK)[0][0] + 2])}))
    control = control_windows(reading, event, target)
    mass, other = read_shares(model, reading, [event.position, event.position - 4], target, control, sinks)
    ids = reading.encoded.ids[: event.position + 1]
    weights = oracle.attention_of(plain, ids).flatten(0, 1)[:, [event.position, event.position - 4]].numpy()
    sink = sinks.keys(ids)
    outside = weights[..., ~sink].sum(-1)
    inside = lambda spans: weights[..., as_keys(spans, len(ids)) & ~sink].sum(-1)  # noqa: E731
    wanted = np.where(outside >= 0.05, inside(target) / outside, np.nan)
    np.testing.assert_allclose(mass, wanted.T, atol=1e-5)
    np.testing.assert_allclose(other, np.where(outside >= 0.05, inside(control) / outside / len(control), np.nan).T, atol=1e-5)
    assert np.nanmax(mass[0]) > 0.5 and sink.sum() > 1


def with_nulls(readings, kind="departure"):
    """Events with a few null positions behind the near-miss: the words of the answer before them."""
    found = []
    for r in readings:
        for e in (e for e in r.events if e.kind == kind):
            found.append((r, e, [e.position - 2, e.position - 3]))
    return found


def test_heads_that_read_the_near_miss_are_found_and_nothing_reads_a_shuffled_event(model, readings):
    sinks = Sinks(frozenset())
    events = with_nulls(readings)
    found = measure_reads(model, events, sinks, asked=(("departure", NEAR),), draws=999)["departure", NEAR]
    readers = np.flatnonzero(found.readers())
    assert 1 <= len(readers) <= 8 and found.reading[readers].max() > 0.7 and found.events == len(events) and found.without == 0
    assert (found.low <= found.reading + 1e-9).all() and (found.reading <= found.high + 1e-9).all()
    swapped = [(r, replace(e, position=e.position - 2), [e.position - 3, e.position - 4]) for r, e, _ in events]
    assert measure_reads(model, swapped, sinks, asked=(("departure", NEAR),), draws=999)["departure", NEAR].readers().sum() <= 1


def test_a_null_that_cannot_see_the_span_is_left_out_and_so_is_its_event(model, readings):
    early = [(r, e, [token_spans(r, e, NEAR)[0][0] - 1, 3]) for r, e, _ in with_nulls(readings)]
    assert measure_reads(model, early, Sinks(frozenset()), asked=(("departure", NEAR),), draws=99) == {}
    events = with_nulls(readings)
    found = measure_reads(model, [*events[:4], *early[4:]], Sinks(frozenset()), asked=(("departure", NEAR),), draws=99)
    assert found["departure", NEAR].events == 4 and found["departure", NEAR].without == len(early) - 4


# -- families -------------------------------------------------------------------------------------------


def said(kind, span, reading, heads=6):
    """Reads of six heads by hand; those with a reading are calibrated."""
    value = np.array([reading.get(h, 0.0) for h in range(heads)])
    q = np.where(value > 0, 0.001, 1.0)
    return Reads(kind, span, value, np.zeros(heads), value, value, np.zeros(heads), np.zeros(heads), Calibration(value, q, q, q, q, 10, np.zeros(9)), 10, 0)


def test_families_follow_what_calibrated_heads_read():
    reads = {(k, s): said(k, s, r) for k, s, r in [("region", BLOCK, {0: 0.9, 4: 0.9}), ("label", BLOCK, {1: 0.6}),
                                                   ("departure", BLOCK, {2: 0.5, 3: 0.2, 1: 0.9}), ("departure", NEAR, {3: 0.8, 2: 0.3, 5: 0.05})]}
    calibrated = {"region": HeadSet([(0, 0)]), "label": HeadSet([(0, 1)]), "departure": HeadSet([(0, 2), (1, 0), (1, 2)])}
    found = families(reads, calibrated, (2, 3))
    assert found.region == HeadSet([(0, 0), (0, 1), (0, 2)])  # head 4 reads too, but is not calibrated; head 2 reads the list more
    assert found.near_miss == HeadSet([(1, 0)]) and found.both == HeadSet([(0, 2), (1, 0)]) and found.neither == HeadSet([(1, 2)])  # .05 is not a reading
    assert found.depth(found.near_miss) == 1.0 and found.depth(found.region) == 0.0 and np.isnan(found.depth(HeadSet()))
    table = found.to_frame()
    assert len(table) == 24 and set(table[table.family == "near-miss"]["head"]) == {0} and "near-miss: L1H0" in repr(found)
    assert found.summary()["region"]["heads"] == ["L0H0", "L0H1", "L0H2"] and len(found.overlaps()) == 3


def test_without_spans_every_calibrated_head_reads_neither():
    found = families({}, {"label": HeadSet([(1, 1)])}, (2, 3))
    assert found.neither == HeadSet([(1, 1)]) and found.region == found.near_miss == HeadSet() and len(found.to_frame()) == 0


def test_overlap_is_hypergeometric():
    sets = {"a": HeadSet((0, h) for h in range(4)), "b": HeadSet((0, h) for h in range(2, 6)), "c": HeadSet()}
    table = overlaps(sets, 20)
    assert [(x["shared"], x["expected"]) for x in table] == [(2, 0.8), (0, 0.0), (0, 0.0)]
    draws = [len(HeadSet(d) & sets["b"]) >= 2 for d in combinations(HeadSet.all(1, 20), 4)]
    assert table[0]["p"] == round(float(np.mean(draws)), 6) and table[1]["p"] == 1.0  # of all sets there are
    with pytest.raises(ValueError, match="are not drawn from 3"):
        overlaps(sets, 3)
