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
