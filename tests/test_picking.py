"""The picking task of `examples/icd_picking.py` on two real pretrained models, a handful of texts each."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from decisionheads import DecisionModel, LabelSpace
from decisionheads.ablation import ReferenceMeans

from . import oracle

pytestmark = [pytest.mark.pretrained, pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated")]
SHAPES = {"smollm2": (30, 9, 64), "gemma3": (18, 4, 256)}


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).parents[1] / "examples" / "icd_picking.py"
    spec = importlib.util.spec_from_file_location("icd_picking", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=list(SHAPES))
def picking(request, example, tmp_path_factory):
    """The model, the same model as any Hugging Face user would load it, and three texts it wrote."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    path = example.weights(request.param, tmp_path_factory.mktemp(request.param))
    model = DecisionModel.from_pretrained(path)
    plain = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, attn_implementation="eager", dtype=torch.float32).eval()
    texts, _ = example.write(model, 3, example.categories())
    yield request.param, model, plain, texts
    torch.set_num_threads(1)


def test_it_writes_decisions_and_their_effects_equal_the_oracle(picking):
    name, model, plain, texts = picking
    assert model.tested.verdict == "exact" and (model.n_layers, model.n_heads, model.hooked.d_head) == SHAPES[name]
    assert len(texts) >= 2
    labels = LabelSpace(sorted({c for t in texts for c in t.candidates}))
    events = {t.id: [e for e in model.find_events(t, labels) if e.primary] for t in texts}
    assert sum(len(e) for e in events.values()) >= 2
    text = next(t for t in texts if events[t.id])
    event = events[text.id][0]
    reading = model.read(text, [event])
    assert len(reading.encoded) > 600  # longer than Gemma's window
    assert len(reading.encoded.tokens_in(len(text.prompt), len(text.text))) >= 25
    zbar = np.random.default_rng(0).normal(0, 0.3, SHAPES[name]).astype(np.float32)
    found = model.mean_ablate(reading, ReferenceMeans({event.kind: zbar}, {}, frozenset()))
    ids, margin = reading.encoded.ids[: event.position + 1], found.measured[0]
    clean = float(margin(oracle.logits(plain, ids)[event.position]))
    worst = largest = 0.0
    for layer in range(0, model.n_layers, 5):
        for head in (0, model.n_heads - 1):
            want = clean - float(margin(oracle.ablated(plain, ids, event.position, layer, head, zbar[layer, head])))
            worst, largest = max(worst, abs(want - float(found.scores.values[0, layer, head]))), max(largest, abs(want))
    assert worst <= 2e-4 and largest > 0.05


def test_the_prompt_is_the_same_everywhere(example):
    prompt, blocks, right, spans = example.make_prompt(0, example.categories())
    again = example.make_prompt(0, example.categories())
    assert (prompt, blocks, right, spans) == again and right in {code for block in blocks for code in block}
    for span in spans:
        inside = prompt[span.start:span.end]
        assert inside.startswith("Finding:") if span.name == "finding" else all(line.split(" = ")[1].startswith(span.of) for line in inside.splitlines())
