"""The same inputs and seed give the same tables, whatever threads and packs; and after kills (see tests/campaigns/kills.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from decisionheads import DecisionModel, discover, tiny

from .conftest import shapes_unchecked

ROUNDING = 1e-4  # logits: what threads and packs may do to an effect in float32
OPTIONS = dict(together=False, caliper=0.5, minimum=2, draws=999)


@pytest.fixture(scope="module")
def llama():
    return DecisionModel.from_pretrained(tiny.path("llama"))


@pytest.fixture(scope="module")
def texts(llama):
    return tiny.generate(llama, 18, seed=6)


@pytest.fixture(scope="module")
def found(llama, texts, space):
    with shapes_unchecked():
        return discover(llama, texts, space, **OPTIONS)


def same_but_for_rounding(one, other) -> None:
    """Effects agree to rounding, decisions exactly, ranks except among heads that rounding could exchange."""
    assert np.abs(one.effects).max() > 1 and np.abs(one.effects - other.effects).max() <= ROUNDING
    assert list(one.events["position"]) == list(other.events["position"])
    for kind, result in one.kinds.items():
        again = other.kinds[kind]
        assert result.selected == again.selected and result.matched.nulls == again.matched.nulls
        a, b = (r.table.sort_values(["layer", "head"]).reset_index(drop=True) for r in (result, again))
        moved = a["rank"] != b["rank"]
        for i in np.flatnonzero(moved):
            near = np.abs(a["statistic"] - a["statistic"][i]) <= 1e-3
            assert abs(int(a["rank"][i]) - int(b["rank"][i])) < near.sum(), "a rank moved further than rounding explains"


def test_again(llama, texts, space, found):
    with shapes_unchecked():
        again = discover(llama, texts, space, **OPTIONS)
    assert again.to_frame().equals(found.to_frame()) and (again.effects == found.effects).all()


def test_two_threads(llama, texts, space, found):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with shapes_unchecked():
            same_but_for_rounding(found, discover(llama, texts, space, **OPTIONS))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("memory", [2**20, 2**31])
def test_other_packs(llama, texts, space, found, memory):
    with shapes_unchecked():
        same_but_for_rounding(found, discover(llama, texts, space, memory=memory, **OPTIONS))


def test_the_check_can_fail(found):
    import dataclasses

    for change in (dict(effects=found.effects + 1e-3), dict(events=found.events.assign(position=found.events["position"] + 1))):
        with pytest.raises(AssertionError):
            same_but_for_rounding(found, dataclasses.replace(found, **change))


def test_three_kills_change_nothing():
    done = subprocess.run([sys.executable, "-m", "tests.campaigns.kills", "--brief", "--kills", "3", "--seed", "5"], cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": same") == 3 and "all came out the same" in done.stdout, done.stdout + done.stderr
