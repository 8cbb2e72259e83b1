"""Packed rows, or one branch a batch row, on many architectures, against one plain forward per head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from decisionheads import HeadSet
from decisionheads._hooked import Hooked

from .families import FAMILIES, engine, parity

EXACT = 2e-5  # logits, float32
DEFAULT = ["Gemma 3", "GPT-OSS", "DeepSeek V3", "Bloom"]  # windows, sinks and experts, latent attention, ALiBi
SLOW = ["Falcon ALiBi", "Bloom", "MPT", "GPT-Neo", "Qwen3-Next"]
REFUSED = ["Falcon 40B", "Mamba"]
EVERY = [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.families) for name in FAMILIES if name not in REFUSED]


@pytest.fixture(scope="module")
def small():
    """`name -> (plain model, engine, self-test)`, made once."""
    made = {}

    def get(name):
        if name not in made:
            try:
                hf = FAMILIES[name].make()
            except ImportError as error:
                pytest.fail(str(error))
            made[name] = (hf, *engine(hf))
        return made[name]

    return get


@pytest.mark.parametrize("name", EVERY)
def test_every_head_tokens_and_blocked_reads_equal_the_oracle(small, name):
    hf, hooked, tested = small(name)
    assert tested.verdict == ("slow" if name in SLOW else "exact"), tested.reason
    found = parity(hf, hooked, tested)
    assert found.worst <= EXACT
    assert found.least > 100 * EXACT  # no reference is zero


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("broken", ["mask", "positions", "head"])
def test_parity_fails_when_something_is_broken(small, name, broken, monkeypatch):
    hf, hooked, tested = small(name)
    real = Hooked.run
    if broken == "head":
        monkeypatch.setattr(HeadSet, "to_mask", lambda self, layers, heads, true=HeadSet.to_mask: np.roll(true(self, layers, heads), 1, axis=1))
    elif not hooked.packed:  # the cache carries mask and positions: give the rows a prefix that is too short
        short = 1 if broken == "positions" else 10
        monkeypatch.setattr(Hooked, "run", lambda self, p, rows, *a, **k: real(self, p, replace(rows, seen=(rows.seen - short).clamp(min=0)), *a, **k))
    elif broken == "mask":
        monkeypatch.setattr(Hooked, "run", lambda self, p, rows, *a, **k: real(self, p, replace(rows, branch=torch.zeros_like(rows.branch)), *a, **k))
    else:
        monkeypatch.setattr(Hooked, "run", lambda self, p, rows, *a, **k: real(self, p, replace(rows, positions=rows.positions + 3), *a, **k))
    assert parity(hf, hooked, tested).worst > 100 * EXACT


@pytest.mark.families
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_handled_is_refused_in_one_sentence(name):
    from decisionheads import InputError

    with pytest.raises((InputError, ValueError)) as caught:
        engine(FAMILIES[name].make())
    assert "\n" not in str(caught.value) and len(str(caught.value)) > 30
