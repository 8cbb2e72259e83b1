from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisionheads import Head, HeadScores, HeadSet, InputError
from decisionheads.heads import kv_group

heads = st.tuples(st.integers(0, 30), st.integers(0, 15))


def test_a_head_prints_and_parses_as_transformer_lens_does():
    assert str(Head(12, 7)) == "L12H7" and Head.parse("L12H7") == (12, 7)
    with pytest.raises(InputError, match="not a head"):
        Head.parse("12.7")


def test_the_group_of_a_query_head():  # A3
    assert [kv_group(h, 9, 3) for h in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    with pytest.raises(ValueError, match="7 query heads do not divide into 3"):
        kv_group(0, 7, 3)
    with pytest.raises(ValueError, match="head 9 is not one of 9"):
        kv_group(9, 9, 3)


@given(st.lists(heads), st.lists(heads))
def test_sets_behave_as_sets(a, b):
    x, y = HeadSet(a), HeadSet(b)
    for ours, theirs in ((x | y, {*a} | {*b}), (x & y, {*a} & {*b}), (x - y, {*a} - {*b}), (x ^ y, {*a} ^ {*b})):
        assert ours.to_list() == sorted(theirs)
    assert (x <= y) == ({*a} <= {*b}) and (x == y) == ({*a} == {*b})
    assert HeadSet(reversed(a)) == x and hash(HeadSet(reversed(a))) == hash(x) and HeadSet(map(str, x)) == x
    assert HeadSet.from_mask(x.to_mask(31, 16)) == x and sum(x.per_layer().values()) == len(x)
    assert (x.digest == y.digest) == (x == y)


def test_a_set_never_changes_and_knows_its_model():
    s = HeadSet(["L1H2"])
    with pytest.raises(AttributeError):
        s._heads = ()
    with pytest.raises(ValueError, match="L1H2 is not in a model of 1 layers by 4 heads"):
        s.to_mask(1, 4)


def test_a_saved_set_comes_back_and_a_changed_one_does_not(tmp_path):
    file = tmp_path / "set.json"
    HeadSet([(1, 2), (0, 3)]).save(file)
    assert HeadSet.load(file).to_list() == [(0, 3), (1, 2)]
    file.write_text(file.read_text().replace("L1H2", "L1H1"))
    with pytest.raises(InputError, match="changed after it was frozen"):
        HeadSet.load(file)


def test_every_other_set_is_a_changed_one(tmp_path):
    file, frozen = tmp_path / "set.json", HeadSet([(1, 2), (0, 3)])
    frozen.save(file)
    kept = file.read_text()
    for layer in range(8):
        for head in range(16):
            file.write_text(kept.replace("L1H2", f"L{layer}H{head}"))
            if (layer, head) != (1, 2):
                with pytest.raises(InputError, match="changed after it was frozen"):
                    HeadSet.load(file)


def scores(values) -> HeadScores:
    return HeadScores(np.asarray(values, np.float32), "effect")


def test_ties_come_in_layer_head_order_and_are_reported():  # G4
    nine = scores(np.ones((2, 3, 3)))
    assert nine.top(3).heads == ((0, 0), (0, 1), (0, 2)) == nine.top(5).heads[:3]
    assert len(nine.top(3).tied) == 6 and nine.top(9).tied == ()


def test_swapped_layer_and_head_are_told_apart():  # F2
    values = np.zeros((1, 3, 3))
    values[0, 2, 1] = 5
    assert scores(values).top(1).heads == ((2, 1),)


def test_scores_frame_and_round_trip(tmp_path):
    s = HeadScores(np.arange(12, dtype=np.float32).reshape(2, 3, 2), "effect", events=("a", "b"), meta={"rule": "runner_up"})
    frame = s.to_frame()
    assert len(frame) == 12 and frame.query("event == 'b' and layer == 2 and head == 1").effect.item() == 11
    s.save(tmp_path / "s.safetensors")
    back = HeadScores.load(tmp_path / "s.safetensors")
    assert np.array_equal(back.values, s.values) and (back.name, back.events, back.meta) == (s.name, s.events, s.meta)
    assert "L2H1" in repr(s) and "L2H1" in s._repr_html_() and "<script" not in HeadScores(s.values, "<script>")._repr_html_()


def test_scores_saved_again_are_the_same_bytes(tmp_path):
    """safetensors writes the keys of a header in an order that changes from one write to the next."""
    s, path, found = scores(np.ones((1, 2, 2))), tmp_path / "s.safetensors", set()
    for _ in range(20):
        s.save(path)
        found.add(path.read_bytes())
    assert len(found) == 1


def test_no_events_no_mean():
    with pytest.raises(ValueError, match="no events"):
        scores(np.zeros((0, 2, 2))).mean()
    with pytest.raises((ValueError, TypeError)):
        scores(np.zeros((2, 2)))
