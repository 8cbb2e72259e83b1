"""The figure of a distillation holds the numbers it claims, shows what is undefined, and says the finding."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from decisionheads.distillation.figures import LOOKS, students_figure
from decisionheads.distillation.verdicts import MINUS, compare_arms, mean_interval
from decisionheads.errors import InputError

ARMS = ("cot", "mistill", "shuffled", "random-pool")
NAN = float("nan")


def invented(students, shift=0.4, arms=ARMS, seed=0):
    """`{student: seeds}` -> the two tables; `mistill` recovers more by `shift`."""
    rng = np.random.default_rng(seed)
    rows, curves = [], []
    for student, n in students.items():
        for arm in arms:
            for s in range(n):
                r = 0.4 + shift * (arm == "mistill") + 0.03 * rng.normal()
                rows.append((student, arm, s, 4, r, r - 0.1, r + 0.12, 4 + rng.normal() / 9, 1 + rng.normal() / 9, 0.7 + rng.normal() / 50, 0.8 + rng.normal() / 99))
                curves += [(student, arm, s, size, r * size / 8) for size in range(9)]
        for arm, r in (("teacher", 0.93), ("untrained", 0.05)):
            rows.append((student, arm, NAN, 4, r, r, r, 6.0, 1.0, 0.95, 0.9))
            curves += [(student, arm, NAN, size, r) for size in range(9)]
    return (pd.DataFrame(rows, columns=["student", "arm", "seed", "k", "recovery", "recovery_low", "recovery_high", "m", "m0", "departures_right", "micro_f1"]),
            pd.DataFrame(curves, columns=["student", "arm", "seed", "size", "recovery"]))


@pytest.fixture
def both():
    table, curves = invented({"b": 8, "a": 3})
    table.loc[(table["student"] == "a") & (table["arm"] == "shuffled") & (table["seed"] == 1), ["recovery", "recovery_low", "recovery_high"]] = NAN
    curves.loc[(curves["student"] == "a") & (curves["arm"] == "shuffled") & (curves["seed"] == 1), "recovery"] = NAN
    return table, curves


def axes(figure, row, col):
    cell = figure.get_subplot(row, col)
    return cell.xaxis.plotly_name.replace("axis", ""), cell.yaxis.plotly_name.replace("axis", "")


def traces(figure, row, col, name):
    """Traces of a panel by name."""
    x, y = axes(figure, row, col)
    return [t for t in figure.data if t.name == name and (t.xaxis or "x", t.yaxis or "y") == (x, y)]


def titles(figure):
    return {(a.text[3], a.text.split("</b>")[0][6:-1]): a.text.split("</b> ")[1].replace("<br>", " ") for a in figure.layout.annotations if a.text.startswith("<b>")}


def test_every_seed_is_a_point_with_its_interval_and_means_are_bars(both):
    table, curves = both
    figure = students_figure(table, curves)
    for col, student in ((1, "b"), (2, "a")):  # in the order of the table
        for row, measure in ((1, "recovery"), (2, "m"), (2, "m0"), (4, "micro_f1"), (4, "departures_right")):
            for arm in ARMS:
                rows = table[(table["student"] == student) & (table["arm"] == arm)]
                values = rows[measure].dropna()
                [points], [bar] = traces(figure, row, col, f"{arm} {measure}"), traces(figure, row, col, f"{arm} {measure} mean")
                np.testing.assert_array_equal(points.y, values)
                assert bar.y == (values.mean(), values.mean()) and bar.x[0] < min(points.x) <= max(points.x) < bar.x[1]
                assert points.marker.symbol == LOOKS[arm][2] + ("-open" if measure in ("m0", "departures_right") else "")
        [points] = traces(figure, 1, col, "mistill recovery")
        np.testing.assert_allclose(points.error_y.array, 0.12)
        np.testing.assert_allclose(points.error_y.arrayminus, 0.1)
        for name, level in (("teacher", 0.93), ("untrained", 0.05)):
            assert set(traces(figure, 1, col, name)[0].y) == {level}


def test_seeds_stand_at_the_same_place_in_every_arm(both):
    figure = students_figure(*both)
    at = {arm: dict(zip(t.customdata, np.array(t.x) - i, strict=True)) for i, arm in enumerate(ARMS) for t in traces(figure, 1, 2, f"{arm} recovery")}
    assert set(at["shuffled"]) == {0, 2} and all(at["cot"][s] == pytest.approx(at["shuffled"][s]) for s in (0, 2)) and len(set(at["cot"].values())) == 3


def test_only_enough_seeds_have_a_box(both):
    figure = students_figure(*both)
    box = traces(figure, 1, 1, "mistill interval")[0]
    rows = both[0].query("student == 'b' and arm == 'mistill'")["recovery"].to_numpy()
    assert (box.y[0], box.y[2]) == pytest.approx(mean_interval(rows)) and not any(traces(figure, 1, 2, f"{arm} interval") for arm in ARMS)


def test_undefined_is_a_mark_below_the_scale_and_never_zero(both):
    figure = students_figure(*both)
    for row in (1, 3):
        [mark] = traces(figure, row, 2, "undefined")
        axis = figure.get_subplot(row, 2).yaxis
        assert len(mark.y) == 1 and axis.range[0] < mark.y[0] < min(v for v, t in zip(axis.tickvals, axis.ticktext, strict=True) if t != "undefined")
        assert axis.ticktext[-1] == "undefined" and axis.tickvals[-1] == mark.y[0] and mark.marker.symbol == "x-thin"
        assert not traces(figure, row, 1, "undefined") and "undefined" not in figure.get_subplot(row, 1).yaxis.ticktext
    [mark] = traces(figure, 1, 2, "undefined")
    assert mark.text == ("shuffled, seed 1: recovery undefined",) and round(mark.x[0]) == ARMS.index("shuffled")
    assert len(traces(figure, 1, 2, "shuffled recovery")[0].y) == 2
    assert not traces(figure, 2, 2, "undefined")  # its margins are defined


def test_an_arm_that_is_undefined_throughout_has_marks_and_no_mean(both):
    table, curves = both
    table.loc[table["arm"] == "random-pool", ["recovery", "recovery_low", "recovery_high"]] = NAN
    curves.loc[curves["arm"] == "random-pool", "recovery"] = NAN
    figure = students_figure(table, curves)
    assert not traces(figure, 1, 1, "random-pool recovery") and not traces(figure, 1, 1, "random-pool recovery mean") and len(traces(figure, 1, 1, "undefined")[0].y) == 8


def test_the_curve_means_over_seeds_and_marks_k(both):
    table, curves = both
    figure = students_figure(table, curves)
    [mean] = traces(figure, 3, 1, "MISTILL")
    part = curves.query("student == 'b' and arm == 'mistill'")
    np.testing.assert_allclose(mean.y, part.groupby("size")["recovery"].mean())
    assert set(traces(figure, 3, 1, "fixed k")[0].x) == {4} and len([t for s in range(8) for t in traces(figure, 3, 1, f"mistill seed {s}")]) == 8
    np.testing.assert_allclose(traces(figure, 3, 2, "shuffled")[0].y, curves.query("student == 'a' and arm == 'shuffled' and seed != 1").groupby("size")["recovery"].mean())
    curves.loc[(curves["student"] == "b") & (curves["arm"] == "mistill") & (curves["seed"] == 2) & (curves["size"] == 3), "recovery"] = NAN
    figure = students_figure(table, curves)
    assert np.flatnonzero(np.isnan(traces(figure, 3, 1, "MISTILL")[0].y)).tolist() == [3]  # a gap, and no mean of the others
    [mark] = traces(figure, 3, 1, "undefined")
    assert mark.text == ("MISTILL, 3 heads: undefined in 1 of 8 seeds",)


def test_titles_say_the_finding(both):
    table, curves = both
    figure = students_figure(table, curves, bounds={"micro_f1": 0.2})
    assert figure.layout.title.text.replace("<br>", " ") == f"MISTILL {MINUS} CoT in held-out recovery: higher in b; no claim (3 paired seeds) in a"
    said = titles(figure)
    v = compare_arms(table, "recovery").of("b", "mistill")
    low, high = v.interval
    assert said["A", "b"] == f"k = 4, MISTILL {MINUS} CoT +{v.mean:.2f} [+{low:.2f}, +{high:.2f}], higher (Holm p {v.p_holm:.2g}), higher in 8 of 8 seeds"
    few = compare_arms(table, "recovery").of("a", "mistill")
    assert said["A", "a"] == f"k = 4, MISTILL {MINUS} CoT {', '.join(f'+{d:.2f}' for d in few.differences)}, higher in 3 of 3; no claim under 6 paired seeds"
    assert "equivalent within \u00b10.2" in said["D", "b"] and "no claim" in said["D", "a"] and "equivalent" not in said["D", "a"]
    assert said["B", "b"].startswith("at departures attention carries 2.9 of 4.0 logits in MISTILL") and said["B", "b"].endswith("(means of 8 seeds, not tested)") and said["B", "a"].endswith("(means of 3 seeds, no claim)")
    assert said["C", "b"] == "R of 0.8: not reached in MISTILL (at most 0.79), not reached in CoT (at most 0.39) (means of 8 seeds, not tested)"
    curves["recovery"] *= 1.5
    assert titles(students_figure(table, curves))["C", "b"].startswith("R of 0.8: 6 heads in MISTILL, not reached in CoT (at most 0.59)")
    curves["recovery"] *= 10
    assert titles(students_figure(table, curves))["C", "a"] == "R of 0.8: 1 head in MISTILL, 2 heads in CoT (means of 3 seeds, no claim)"


@pytest.mark.parametrize("shift, headline, panel", [(0.4, "higher in b", "higher (Holm"), (-0.3, "lower in b", "lower (Holm"), (0.0, "no difference shown in b", "no difference shown (Holm")])
def test_titles_differ_by_outcome(shift, headline, panel):
    figure = students_figure(*invented({"b": 8}, shift))
    assert figure.layout.title.text.endswith(headline) and panel in titles(figure)["A", "b"]


def test_undefined_seeds_are_named_in_the_title():
    table, curves = invented({"b": 8})
    table.loc[(table["arm"] == "cot") & (table["seed"] == 0), "recovery"] = NAN
    assert titles(students_figure(table, curves))["A", "b"].endswith("; 1 of 8 seeds undefined")
    table.loc[(table["arm"] == "cot") & (table["seed"] < 2), "recovery"] = NAN
    assert titles(students_figure(table, curves))["A", "b"].endswith("; no claim: undefined in 2 of 8 seeds, more than a fifth")


@pytest.mark.parametrize("students, width, shape", [({"a": 3}, 1100, (2, 2)), ({"a": 3, "b": 6}, 1100, (4, 2)), ({"a": 3, "b": 6, "c": 6}, 1400, (4, 3)), ({"a": 3, "b": 6}, 400, (8, 1))])
def test_panels_fit_their_page(students, width, shape):
    figure = students_figure(*invented(students), width=width)
    assert max(len(figure._grid_ref), 0) == shape[0] and len(figure._grid_ref[0]) == shape[1]
    longest = max(len(line) for a in figure.layout.annotations for line in a.text.replace("<b>", "").replace("</b>", "").split("<br>"))
    assert longest * 5 <= width and len(titles(figure)) == 4 * len(students)
    assert {t.name for t in figure.data if t.showlegend} == {"teacher", "untrained", *(LOOKS[a][0] for a in ARMS)} and sum(bool(t.showlegend) for t in figure.data) == 6


def test_everything_lies_within_its_axes(both):
    for width in (1100, 400):
        figure = students_figure(*both, width=width)
        for t in figure.data:
            axis = figure.layout[(t.yaxis or "y").replace("y", "yaxis")]
            y = np.array(t.y, float)
            y = y[np.isfinite(y)]  # gaps of a curve
            assert (axis.range[0] <= y).all() and (y <= axis.range[1]).all(), t.name
    spans = [np.ptp(figure.get_subplot(row, 1).yaxis.range) for row in (1, 2, 3, 4)]
    assert 5 > spans[1] > 4 > 1.5 > spans[0] > 0.8 > 0.5 > spans[3]  # no scale is that of another panel, nor wide for the teacher's sake


def test_axes_carry_units_and_arms(both):
    figure = students_figure(*both)
    assert [figure.get_subplot(row, 1).yaxis.title.text for row in (1, 2, 3, 4)] == [
        f"recovery R, share of m {MINUS} m0", "logits: m filled, m0 hollow", f"recovery R, share of m {MINUS} m0", "F1 filled, departures right hollow"]
    assert figure.get_subplot(3, 1).xaxis.title.text == "heads in the set" and figure.get_subplot(1, 1).xaxis.ticktext == ("CoT", "MISTILL", "shuffled", "random<br>pool")
    for row in (1, 2, 3, 4):
        assert figure.get_subplot(row, 1).yaxis.range[1] == figure.get_subplot(row, 2).yaxis.range[1]  # students share a scale


def test_an_arm_without_a_look_and_a_name_with_marks_are_drawn():
    table, curves = invented({"<b": 3}, arms=("cot", "mistill", "kd"))
    figure = students_figure(table, curves)
    assert traces(figure, 1, 1, "kd recovery") and any("&lt;b" in a.text for a in figure.layout.annotations)


def test_nothing_defined_and_nothing_to_compare_are_said():
    table, curves = invented({"b": 6})
    said = titles(students_figure(table.assign(recovery=NAN), curves.assign(recovery=NAN)))
    assert said["A", "b"] == f"k = 4, MISTILL {MINUS} CoT undefined; 6 of 6 seeds undefined; no claim under 6 paired seeds" and said["C", "b"] == "the curve is undefined"
    bare = students_figure(table[table["arm"] != "mistill"].drop(columns=["recovery_low", "recovery_high"]), curves[curves["arm"] != "mistill"])
    said = titles(bare)
    assert said["A", "b"] == "k = 4, no MISTILL to compare" and said["C", "b"].endswith("(means of 6 seeds, not tested)") and "not compared" in bare.layout.title.text
    assert traces(bare, 1, 1, "cot recovery")[0].error_y.array is None and titles(students_figure(table, curves.iloc[:0]))["C", "b"] == "the curve is undefined"


def test_tables_are_left_as_they_were(both):
    before = [t.copy() for t in both]
    students_figure(*both)
    for a, b in zip(before, both, strict=True):
        pd.testing.assert_frame_equal(a, b)


def test_refusals(both):
    table, curves = both
    with pytest.raises(InputError, match="no column m0"):
        students_figure(table.drop(columns="m0"), curves)
    with pytest.raises(InputError, match="table of curves has no column size"):
        students_figure(table, curves.drop(columns="size"))
    with pytest.raises(InputError, match="a has 2 set sizes k"):
        students_figure(table.assign(k=np.where((table["student"] == "a") & (table["arm"] == "cot"), 5, 4)), curves)
