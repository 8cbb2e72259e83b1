"""Figures hold the numbers they claim and say the finding."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from decisionheads import HeadScores, InputError, plots
from decisionheads.looks import TEXT, layout


@pytest.fixture
def table():
    rng = np.random.default_rng(0)
    layers, heads = (x.ravel() for x in np.indices((3, 4)))
    effect = rng.normal(0, 0.3, 12)
    effect[[5, 6]] = 4.0, -3.0
    frame = pd.DataFrame({"kind": "region", "layer": layers, "head": heads, "effect": effect, "ci_low": effect - 0.2, "ci_high": effect + 0.3,
                          "null_effect": rng.normal(0, 0.1, 12), "statistic": effect * 2, "p_value": 0.5, "p_maxt": 0.6, "q_value": 0.7,
                          "attribution": effect * 1.1, "dla": effect * 0.2, "selected": np.arange(12) == 5})
    return frame.sort_values("statistic", ascending=False).reset_index(drop=True)


def test_the_map_is_layer_by_head_and_centred_at_zero(table):
    figure = plots.effect_map(table)
    z = np.array(figure.data[0].z)
    assert z.shape == (3, 4) and z[1, 1] == 4.0 and z[1, 2] == -3.0
    assert figure.data[0].zmin == -figure.data[0].zmax == -4.0
    assert np.isnan(np.array(figure.data[1].z, float)).sum() == 11  # only selected heads at full strength
    assert "L1H1 supports the choice" in figure.layout.title.text and figure.layout.yaxis.title.text == "layer"
    assert "95% [+3.800, +4.300]" in figure.data[2].text[1][1]


def test_ranked_heads_carry_intervals(table):
    figure = plots.ranked_heads(table, most=5)
    points = figure.data[1]
    assert list(points.y)[-1] == "L1H1" and len(points.x) == 5
    np.testing.assert_allclose(points.error_x.array, 0.3)
    np.testing.assert_allclose(points.error_x.arrayminus, 0.2)
    assert "1 of 12 heads" in figure.layout.title.text and "logits" in figure.layout.xaxis.title.text


def test_attribution_figure_states_the_agreement(table):
    figure = plots.attribution_against_exact(table)
    assert "Spearman 1.00" in figure.layout.title.text and {d.name for d in figure.data} >= {"attribution", "direct"}


def test_the_null_figure_marks_the_winners(table):
    nulls = np.random.default_rng(0).normal(2, 0.5, 999)
    figure = plots.null_distribution(table, nulls)
    assert any(a.text == "L1H1" and a.x == 8.0 for a in figure.layout.annotations) and "1 of 1 selected heads" in figure.layout.title.text


def test_no_selected_head_is_said_so(table):
    assert "no head is selected" in plots.effect_map(table.assign(selected=False)).layout.title.text


@pytest.fixture
def controls():
    nan = float("nan")
    rows = [("true", "true", 30, 8.0, 7.0, 9.5, 0.9, nan), ("identity", "identity", 30, 0.0, 0.0, 0.0, 0.0, nan), ("other kind", "negative", 30, 1.0, 0.5, 1.5, 0.1, 0.002),
            ("own label", "negative", 3, -0.2, nan, nan, 0.0, nan), ("noise", "negative", 0, nan, nan, nan, nan, nan), ("another donor of the label", "positive", 12, 8.1, 7.0, 9.0, 1.0, 0.7)]
    return pd.DataFrame(rows, columns=["control", "role", "n", "shift", "low", "high", "flipped", "p"])


def test_knock_in_controls_carry_intervals_and_grey_what_has_no_donor(controls):
    figure = plots.knock_in_controls(controls, "region")
    points = {y: (x, plus, minus) for d in figure.data for y, x, plus, minus in zip(d.y, d.x, d.error_x.array, d.error_x.arrayminus, strict=True)}
    assert list(points) == [c for c in controls.control if c != "noise"] and points["true"] == (8.0, 1.5, 1.0)
    assert np.isnan(points["own label"][1:]).all() and "nan" not in "".join(t for d in figure.data for t in d.text)
    axis, beside = figure.layout.yaxis, {(a.y, a.text) for a in figure.layout.annotations}
    assert axis.categoryarray == tuple(controls.control[::-1]) and ["<i>" in t for t in axis.ticktext] == list(controls.n == 0)
    assert {("noise", "n/a"), ("true", "90%"), ("other kind", "0.002"), ("own label", "3")} <= beside and not any("nan" in str(t) for _, t in beside)
    assert figure.layout.title.text.replace("<br>", " ") == "Region: a donor's heads move the choice by +8.0 logits, more than every negative control (1 tested)"
    assert figure.layout.xaxis.title.text.replace("<br>", " ").startswith("shift towards the donor's choice, logits")


def test_a_knock_in_that_beats_nothing_is_said_so(controls):
    title = lambda frame: plots.knock_in_controls(frame, "label").layout.title.text.replace("<br>", " ")  # noqa: E731
    assert "not clearly more than 'other kind'" in title(controls.replace({"p": 0.002}, 0.2))
    assert "too few transcripts" in title(controls.replace({"p": 0.002}, np.nan)) and "no decision has a donor" in title(controls.assign(n=0))


def test_one_kind_is_picked_from_a_table_of_several(table):
    both = pd.concat([table, table.assign(kind="label", effect=-table["effect"])])
    label = plots.effect_map(both, "label")
    assert label.data[0].z[1][1] == -4.0 and label.layout.title.text.startswith("Label")
    for kind in (None, "regoin"):
        with pytest.raises(InputError, match=f"kind={kind!r}: the table holds region, label; name one of them"):
            plots.ranked_heads(both, kind)

    class Found:
        def to_frame(self):
            return both

    assert plots.effect_map(Found(), "region").data[0].z[1][1] == 4.0


def test_scores_are_drawn_with_their_interval_over_events():
    values = np.zeros((4, 2, 3), np.float32)
    values[:, 1, 2] = [1.0, 2.0, 3.0, 2.0]  # mean 2, sd .8165, t(3) 3.182: +- 1.299
    values[:, 0, 1] = [5.0, -5.0, 4.0, -4.0]
    figure = plots.score_map(HeadScores(values, "mean-ablation effect"))
    assert figure.data[0].z[1][2] == 2.0 and "95% [+0.701, +3.299] over 4 events" in figure.data[2].text[1][2]
    strong = np.array(figure.data[1].z, float)
    assert np.isfinite(strong).sum() == 1 and strong[1, 2] == 2.0 and [a.text for a in figure.layout.annotations] == ["+2.0"]
    assert "Mean-ablation effect over 4 events, not calibrated: highest L1H2 +2.00" in figure.layout.title.text.replace("<br>", " ")
    assert "no interval" in plots.score_map(HeadScores(values[:1], "x")).data[2].text[0][0]


def test_long_titles_are_broken_and_make_room(table):
    import plotly.graph_objects as go

    short, long = (layout(go.Figure(), "word " * n, "x", "y") for n in (3, 40))
    assert "<br>" not in short.layout.title.text and all(len(line) <= 50 for line in long.layout.title.text.split("<br>"))
    assert long.layout.margin.t > short.layout.margin.t and long.layout.height > short.layout.height


def test_a_figure_for_paper_is_black_on_white_and_a_copy(table):
    screen = plots.null_distribution(table, np.linspace(0, 3, 99))
    paper = plots.for_paper(screen, width=90.0)
    assert paper.layout.paper_bgcolor == "white" and paper.layout.font.color == "black" and paper.layout.width == 340
    assert screen.layout.font.color == TEXT and screen.layout.width is None
