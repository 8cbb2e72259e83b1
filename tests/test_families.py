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
# Linear attention runs in chunks over a text and step by step from a cache: two algorithms, up to 2e-5 apart in the plain
# model itself on one processor; on another the engine was seen 7e-5 from the oracle.
RECURRENT = 2e-4
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


def exact(name: str) -> float:
    """How far the engine may be from the oracle."""
    return RECURRENT if name == "Qwen3-Next" else EXACT


@pytest.mark.parametrize("name", EVERY)
def test_every_head_tokens_and_blocked_reads_equal_the_oracle(small, name):
    hf, hooked, tested = small(name)
    assert tested.verdict == ("slow" if name in SLOW else "exact"), tested.reason
    found, bound = parity(hf, hooked, tested), exact(name)
    assert found.worst <= bound
    assert found.least > 100 * bound  # no reference is zero


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
    assert parity(hf, hooked, tested).worst > 100 * exact(name)


@pytest.mark.families
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_handled_is_refused_in_one_sentence(name):
    from decisionheads import InputError

    with pytest.raises((InputError, ValueError)) as caught:
        engine(FAMILIES[name].make())
    assert "\n" not in str(caught.value) and len(str(caught.value)) > 30


def test_a_slow_model_is_loaded_verified_and_measured(tmp_path, capsys):
    """From a folder on disk to effects, one branch a batch row; `verify` exits with 0."""
    from decisionheads import DecisionModel, tiny
    from decisionheads.ablation import ReferenceMeans
    from decisionheads.cli import main
    from decisionheads.tiny.clinic import clinic_tokenizer

    from . import oracle
    from .families import output_projections, z_set

    hf = FAMILIES["Bloom"].make()
    hf.save_pretrained(tmp_path)
    clinic_tokenizer().save_pretrained(tmp_path)
    assert main(["verify", "--model", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "not possible: packed rows (" in shown and shown.rstrip().endswith("slow but exact, one branch a batch row")
    model = DecisionModel.from_pretrained(tmp_path)
    text = tiny.transcript("t0", tiny.draw(1, seed=5)[0])
    reading = model.read(text, [e for e in model.find_events(text, tiny.labels()).events if e.primary and e.kind != "departure"][:3])
    zbar = np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)
    found = model.mean_ablate(reading, ReferenceMeans({"region": zbar, "label": zbar}, {}, frozenset()))
    assert len(found.margins) >= 2
    for n, event in enumerate(reading.events):
        ids, margin = torch.as_tensor(reading.encoded.ids)[: event.position + 1], found.measured[n]
        clean = margin(oracle.logits(hf, ids)[-1])
        for layer, head in ((0, 1), (2, 3)):
            with z_set(output_projections(hf)[layer], 4, head, event.position, zbar[layer, head]):
                want = float(clean - margin(oracle.logits(hf, ids)[-1]))
            assert abs(want - float(found.scores.values[n, layer, head])) <= EXACT and abs(want) > 100 * EXACT
    a = model.attribute(reading, ReferenceMeans({"region": zbar, "label": zbar}, {}, frozenset()))
    assert a.gradient.values.shape == found.scores.values.shape and np.corrcoef(a.gradient.values.ravel(), found.scores.values.ravel())[0, 1] > 0.5


def test_direct_attribution_counts_what_a_layer_is_scaled_by(small):
    """Granite adds half of a layer's output: the direct effect of its last layer's heads, by hand."""
    from decisionheads.branches import Branch, run_pack

    hf, hooked, _ = small("Granite")
    text = torch.arange(10, 40)
    prefix, t = hooked.prefill(text, (29,)), 29
    with torch.enable_grad(), hooked.unembedding.frozen() as path:
        leaves: list[torch.Tensor] = []
        logits = run_pack(hooked, prefix, [Branch(t)], lambda layer, z: leaves.append(z.detach()) or z)[0][0]
        (direction,) = torch.autograd.grad(logits[5] - logits[6], path.leaves[0])
    layer = hooked.layers[-1]
    written = hooked.head_outputs(layer, leaves[-1])[0]
    ours = written @ path.readout(direction.flatten(0, -2), layer)[0]
    norm, before = hf.model.norm, path.final.input[0]
    scale = (before.pow(2).mean() + norm.variance_epsilon).rsqrt()
    unembed = (hf.lm_head.weight[5] - hf.lm_head.weight[6]) / hf.config.logits_scaling
    want = (hf.config.residual_multiplier * written * scale * norm.weight) @ unembed
    assert (ours - want).abs().max() <= 1e-5 and want.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["Bloom", "Llama"])
def test_sixteen_bit_margins_are_projected_in_float32_on_either_path(name):
    from decisionheads.branches import Branch, branch_logits

    hooked, tested = engine(FAMILIES[name].make().to(torch.bfloat16))
    assert tested.verdict in ("exact", "slow")
    text = torch.arange(10, 58)
    ((_, logits),) = branch_logits(hooked, hooked.prefill(text), [Branch(47)])
    assert (logits != logits.bfloat16().float()).float().mean() > 0.5


def test_layers_with_a_state_have_no_attribution_and_say_so(small):
    from types import SimpleNamespace

    from decisionheads import InputError
    from decisionheads.attribution import attribute

    _, hooked, _ = small("Qwen3-Next")
    with pytest.raises(InputError, match="no gradients of rows; use mean_ablate"):
        attribute(SimpleNamespace(hooked=hooked, name="hybrid"), SimpleNamespace(events=()), None)


def test_discover_refuses_layers_without_attention(model, space, monkeypatch):
    from decisionheads import InputError, tiny
    from decisionheads.discovery import discover

    texts = [tiny.transcript(f"t{i}", drawn) for i, drawn in enumerate(tiny.draw(12, seed=5))]
    monkeypatch.setattr(model.hooked, "heads", HeadSet([(1, 0), (1, 1)]))
    with pytest.raises(InputError, match="has layers without attention, and discover compares the heads of all layers"):
        discover(model, texts, space)
