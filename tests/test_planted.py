"""Planted ground truth: heads that decide by construction are found, and what only looks like one is not.

benchmarks/planted.py does the same for ten planted and ten random models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest

from decisionheads import DecisionModel, Transcript
from decisionheads.ablation import measure
from decisionheads.calibration import Sets, calibrate
from decisionheads.discovery import Discovery, discover
from decisionheads.survey import Options, null_probe, survey

from .conftest import shapes_unchecked
from .planted import DECIDED, END, HEADS, ID, OPTIONS, SLOTS, Planted, draw, labels, plan, plant, plant_nothing, with_labels_drawn, write

TEXTS = 55


@dataclass
class Found:
    planted: Planted
    model: DecisionModel
    asked: list[Transcript]
    written: list[Transcript]
    found: Discovery

    def row(self, head) -> pd.Series:
        table = self.found.kinds["region"].table
        return table[(table["layer"] == head.layer) & (table["head"] == head.head)].iloc[0]


@pytest.fixture(scope="module", params=[1, 4])
def case(request, tmp_path_factory) -> Found:
    folder = tmp_path_factory.mktemp("planted")
    planted = plant(folder, request.param)
    model, asked = DecisionModel.from_pretrained(folder), draw(TEXTS, request.param)
    written = write(model, asked)
    with shapes_unchecked():
        return Found(planted, model, asked, written, discover(model, written, labels(), **OPTIONS))


def test_the_model_writes_what_was_planned_and_its_decisions_are_the_events(case):
    assert case.model.tested.verdict == "exact" and not case.found.set_aside
    assert np.mean([a.text == b.text for a, b in zip(case.asked, case.written, strict=True)]) >= 0.9
    events, summary = case.found.events, case.found.kinds["region"].summary
    planned = {t.id: set(t.candidates[:DECIDED]) for t in case.asked}
    assert np.mean([e.label in planned[e.transcript] for e in events.itertuples()]) >= 0.95
    assert len(events) >= 0.9 * DECIDED * len(case.found.splits["selection"])
    assert summary["selection"]["calibrated_events"] >= 20 and not summary["selection"]["unbalanced"]


def test_all_planted_heads_are_selected_and_at_most_one_in_twenty_of_the_others(case):
    result, deciders = case.found.kinds["region"], case.planted.deciders
    others = case.planted.layers * HEADS - len(deciders)
    assert deciders <= result.selected and len(result.selected - deciders) <= others / 20
    assert all(case.row(head).p_maxt <= 0.05 and case.row(head)["rank"] <= len(deciders) for head in deciders)


def test_a_head_for_every_next_token_is_none_and_without_the_null_would_be_one(case):
    general = case.row(case.planted.general)
    least = 0.05 * np.median(case.found.events["m"] - case.found.events["m0"])
    assert not general.selected and general.q_value > 0.05 and general.p_maxt > 0.05

    # by its raw effect it is a decider: as large as theirs, and far from nothing
    assert general.effect >= 0.9 * min(case.row(head).effect for head in case.planted.deciders) and general.ci_low > 3 * least
    bare = [np.stack([e.ravel(), np.zeros(e.size)]) for e in case.found.effects.astype(float)]  # the same test, every null token worth nothing
    raw = calibrate({"region": Sets(tuple(bare), case.found.events["transcript"].factorize()[0])}, draws=1999)["region"]
    assert raw.p_maxt[case.planted.general.layer * HEADS + case.planted.general.head] <= 0.001

    # what tells them apart are the null tokens
    assert general.null_effect > 0.5 * general.effect
    assert all(abs(case.row(head).null_effect) < 0.05 * case.row(head).effect for head in case.planted.deciders)


def test_the_general_head_does_help_numbers_and_words_alike(case):
    s = survey(case.model, case.written[0], labels(), (), frozenset(), Options(**OPTIONS))
    nothing = np.zeros((case.model.n_layers, case.model.n_heads, case.model.hooked.d_head), np.float32)
    probes = [null_probe(s, j, nothing) for j, p in enumerate(s.nulls.positions) if s.reading.encoded.ids[p + 1] != ID[END]]
    helped = measure(case.model, s.reading.prefix, probes).effects[:, 0, *case.planted.general] > 0
    assert len(probes) == 2 * SLOTS - 2 * DECIDED and helped.all()  # all but decisions and the tokens after them


def test_a_model_with_random_weights_has_no_deciding_head(tmp_path):
    """It writes texts of its own, and what in them is a label is drawn afterwards."""
    plant_nothing(tmp_path, 4)
    model = DecisionModel.from_pretrained(tmp_path)
    with shapes_unchecked():
        result = discover(model, with_labels_drawn(write(model, draw(TEXTS, 4)), 4), labels(), **OPTIONS).kinds["region"]
    assert len(result.table) == plan(4).layers * HEADS and result.calibration.transcripts >= 15  # there was something to test
    assert result.calibration.p_maxt.min() > 0.05 and not len(result.selected)
