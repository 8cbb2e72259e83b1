"""Figures hold the numbers they claim and say the finding."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from decisionheads import plots


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
    assert axis.categoryarray == tuple(controls.control[::-1]) and [plots.MUTED in t for t in axis.ticktext] == list(controls.n == 0)
    assert {("noise", "n/a"), ("true", "90%"), ("other kind", "0.002"), ("own label", "3")} <= beside and not any("nan" in str(t) for _, t in beside)
    assert figure.layout.title.text == "Region: a donor's heads move the choice by +8.0 logits, more than every negative control (1 tested)"
    assert figure.layout.xaxis.title.text.startswith("shift towards the donor's choice, logits")


def test_a_knock_in_that_beats_nothing_is_said_so(controls):
    title = lambda frame: plots.knock_in_controls(frame, "label").layout.title.text  # noqa: E731
    assert "not clearly more than 'other kind'" in title(controls.replace({"p": 0.002}, 0.2))
    assert "too few transcripts" in title(controls.replace({"p": 0.002}, np.nan)) and "no decision has a donor" in title(controls.assign(n=0))
