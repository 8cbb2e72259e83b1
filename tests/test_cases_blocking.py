"""Known failures of this trade, each a test named after its case: pads, blocked reads, patterns, patching."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decisionheads import (
    AddToZ,
    BlockReads,
    DecisionModel,
    HeadSet,
    Keep,
    KnockIn,
    MeanAblate,
    find_events,
    reference_means,
    tiny,
)
from decisionheads._hooked import Hooked
from decisionheads.ablation import ReferenceMeans
from decisionheads.branches import clean_z
from decisionheads.heads import HeadScores
from decisionheads.interventions import ReplaceValues
from decisionheads.model import _bridge
from decisionheads.tiny.clinic import clinic_tokenizer

from . import oracle
from .cases import EXACT, IDS, hf_of, pattern_at, run, z_at
from .conftest import plain_hf, random_hf

# -- padding and positions ------------------------------------------------------------------------------


def test_c1_pads_on_either_side_move_no_margin(built):
    ours = run(built)
    for left in range(9):
        for right in range(0, 9, 2):
            ids = torch.cat([torch.zeros(left, dtype=torch.long), IDS[:41], torch.zeros(right, dtype=torch.long)])
            mask = torch.cat([torch.zeros(left), torch.ones(41), torch.zeros(right)]).long()
            with torch.no_grad():
                row = built.plain(input_ids=ids[None], attention_mask=mask[None], position_ids=(mask.cumsum(0) - 1).clamp(min=0)[None]).logits[0, left + 40]
            assert abs(float((row[9] - row[11]) - (ours[9] - ours[11]))) <= 1e-4
    with torch.no_grad():
        unmasked = built.plain(input_ids=ids[None]).logits[0]
    assert (unmasked[left + 40] - ours).abs().max() > 0.1 and (unmasked[-1] - ours).abs().max() > 0.1  # left pads seen, a right pad read


def test_c3_a_mean_counts_events_and_nothing_else(model, readings, monkeypatch):
    """z values 1 and 3 with two pads of 100 behind them, and 2, 4, 6, 8: their mean is 4.0, not 28.0, nor the 3.5 of a mean of means."""
    from dataclasses import replace

    import decisionheads.ablation as ablation

    tables = {"a": [1.0, 3.0, 100.0, 100.0], "b": [2.0, 4.0, 6.0, 8.0]}
    event = readings[0].events[0]
    given = [replace(readings[i], transcript=replace(readings[i].transcript, id=name, group=None),
                     events=tuple(replace(event, transcript=name, kind="label", position=p, primary=True) for p in range(n))) for i, (name, n) in enumerate((("a", 2), ("b", 4)))]
    names = {id(r.prefix): r.transcript.id for r in given}
    monkeypatch.setattr(ablation, "check_events", lambda *_: None)
    monkeypatch.setattr(ablation, "clean_z", lambda hooked, prefix, positions, memory: torch.tensor(tables[names[id(prefix)]])[list(positions)].view(-1, 1, 1, 1))
    with pytest.warns(UserWarning, match="are advised"):
        found = reference_means(model, given, minimum=1)
    assert found.means["label"].ravel().tolist() == [4.0] and found.counts == {"label": 6}


# -- blocking and patterns --------------------------------------------------------------------------------


def test_d1_a_head_that_may_read_nothing_reads_itself_and_no_nan(built):
    values = oracle.values_of(built.plain, IDS)
    other = built.hooked.prefill(torch.cat([IDS[:41], IDS[41:].flip(0)]))
    for head in range(built.hooked.n_heads):
        block = BlockReads(HeadSet([(0, head)]), 0, 1000)
        row, z = run(built, block), z_at(built, block)
        assert torch.isfinite(row).all() and (z[0, head] - values[0, head, 40]).abs().max() <= EXACT
        assert pattern_at(built, block)[0, head, :40].sum() == 0 and torch.equal(row, run(built, block, prefix=other))  # nothing later is read instead
    everything = BlockReads(built.hooked.heads, 0, 1000)
    assert torch.isfinite(run(built, everything)).all() and not everything.keys(80, 40)[40] and everything.keys(80, 40).sum() == 79
    assert torch.equal(run(built, everything, everything), run(built, everything))  # blocked twice is blocked


def test_d1_a_masked_key_weighs_nothing_however_large_the_scores():
    """Scores of more than 1e5 apart: a mask of -1e5, or one in a format of 16 bits, would still let the best key win."""
    hf = hf_of("llama")
    with torch.no_grad():
        for layer in hf.model.layers:
            layer.self_attn.q_proj.weight.mul_(2e5)
    model = DecisionModel(_bridge(hf), clinic_tokenizer(), test=False)
    b = SimpleNamespace(hooked=model.hooked, prefix=model.hooked.prefill(IDS))
    scores = []
    handle = model.bridge.blocks[0].attn.hook_attn_scores.register_forward_hook(lambda m, a, out: scores.append(out[0, :, 0]))
    clean = pattern_at(b)
    handle.remove()
    assert (scores[0].max(-1).values - scores[0].min(-1).values).min() > 1e5
    for head in range(9):
        best = int(clean[0, head].argmax())
        if best < 40:
            cut = pattern_at(b, BlockReads(HeadSet([(0, head)]), best, best + 1))[0, head]
            assert cut[best] == 0 and abs(float(cut.sum()) - 1) <= 1e-6 and clean[0, head, best] > 0.5


def test_d3_blocked_before_softmax_rows_sum_to_one_and_zeroed_after_it_they_are_another_option(built):
    for layer, head in [(0, 0), (1, 2), (1, built.hooked.n_heads - 1)]:
        span = (HeadSet([(layer, head)]), 5, 30)
        rows = pattern_at(built, BlockReads(*span))
        assert (rows.sum(-1) - 1).abs().max() <= 1e-6 and rows[layer, head, 5:30].sum() == 0
        clean, blocked, zeroed = run(built), run(built, BlockReads(*span)), run(built, ReplaceValues(*span))
        assert min((a - b).abs().max() for a, b in ((clean, blocked), (clean, zeroed), (blocked, zeroed))) > 1e-4
        z, at = z_at(built), z_at(built, ReplaceValues(*span))
        given = torch.einsum("k,kd->d", pattern_at(built)[layer, head, 5:30], oracle.values_of(built.plain, IDS)[layer, head, 5:30])
        assert (z[layer, head] - given - at[layer, head]).abs().max() <= EXACT  # no weight was handed on


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_d4_patterns_of_a_model_loaded_with_sdpa_are_there_and_margins_are_the_same(family, tmp_path):
    from transformers import AutoModelForCausalLM

    hf_of(family).save_pretrained(tmp_path)
    sdpa, eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval(), plain_hf(tmp_path)
    assert sdpa.config._attn_implementation == "sdpa"
    want, ours = oracle.logits(eager, IDS)[40], oracle.logits(sdpa, IDS)[40]
    assert (ours - want).abs().max() <= 1e-4
    model = DecisionModel(_bridge(sdpa), clinic_tokenizer())
    b = SimpleNamespace(hooked=model.hooked, prefix=model.hooked.prefill(IDS))
    rows = pattern_at(b)
    assert len(rows) == model.n_layers and (rows - oracle.attention_of(eager, IDS)[:, :, 40, :41]).abs().max() <= EXACT
    assert (run(b) - want).abs().max() <= 1e-4 and (run(b, BlockReads(HeadSet([(1, 0)]), 5, 30)) - want).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["OPT", "GPT-J"])
def test_b3_d4_a_bridge_that_was_booted_in_sdpa_gives_patterns_or_raises(name):
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    from .families import FAMILIES

    hf = FAMILIES[name].make()
    hf.set_attn_implementation("sdpa")
    hooked = Hooked(build_bridge_from_module(hf, type(hf).__name__, hf_config=hf.config))
    b = SimpleNamespace(hooked=hooked, prefix=hooked.prefill(IDS[:41] % 50))
    with pytest.raises(RuntimeError, match=r"hook blocks\.0\.attn\.hook_pattern fired 0 times"):
        pattern_at(b)
    hf.set_attn_implementation("eager")
    assert (pattern_at(b).sum(-1) - 1).abs().max() <= 1e-6


# -- attribution and patching -----------------------------------------------------------------------------


def test_f1_contexts_of_eighteen_and_seventeen_tokens_are_aligned_by_decision(built):
    donor, recipient = IDS[:18], IDS[30:47]
    a, b = built.hooked.prefill(donor), built.hooked.prefill(recipient)
    z = clean_z(built.hooked, a, [17])[0].numpy()
    heads = [(0, 1), (1, 3)]
    ours = run(built, KnockIn(HeadSet(heads), z), at=16, prefix=b)
    every = [(layer, head) for layer in range(built.hooked.n_layers) for head in range(built.hooked.n_heads) if (layer, head) not in heads]
    literal = oracle.z_of(built.plain, donor, 17)
    assert (ours - oracle.all_ablated(built.plain, recipient, 16, literal, keep=every)).abs().max() <= EXACT
    shifted = oracle.all_ablated(built.plain, recipient, 16, oracle.z_of(built.plain, donor, 16), keep=every)
    assert (ours - shifted).abs().max() > 0.01  # the same place in the text is another thing
    with pytest.raises(ValueError, match="18 event names for 17 rows"):
        HeadScores(np.zeros((17, 1, 1)), "x", events=tuple(map(str, range(18))))
    with pytest.raises(ValueError, match=r"position 18 does not fit a prefix of 17 tokens"):
        run(built, KnockIn(HeadSet(heads), z), at=18, prefix=b)


def linear(slopes):
    """A Llama that is linear in z and whose logit `i` is `sum slopes[i][layer, head] * z[layer, head, 0]`; z is 2 everywhere.

    Norms with a vast epsilon only scale; values are a bias, so that they are the same at every key.
    """
    layers, heads = next(iter(slopes.values())).shape
    hf = random_hf("llama", hidden_size=32, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, attention_bias=True, rms_norm_eps=1e12, tie_word_embeddings=False)
    with torch.no_grad():
        hf.lm_head.weight.zero_()
        hf.model.embed_tokens.weight[:, :layers * heads] = 0
        hf.model.norm.weight.fill_(1e6)
        for token, row in slopes.items():
            hf.lm_head.weight[token, :layers * heads] = torch.as_tensor(row.ravel()).float()
        for number, layer in enumerate(hf.model.layers):
            layer.mlp.down_proj.weight.zero_(), layer.self_attn.v_proj.weight.zero_()
            layer.self_attn.v_proj.bias.fill_(2.0), layer.self_attn.o_proj.bias.zero_(), layer.self_attn.o_proj.weight.zero_()
            for head in range(heads):
                layer.self_attn.o_proj.weight[number * heads + head, head * hf.config.head_dim] = 1.0
    return hf


@pytest.mark.parametrize("steps", [0, 3])
def test_f2_nine_are_lost_by_attribution_and_by_exact_patch_alike(space, steps):
    t = tiny.transcript("t", tiny.draw(1, seed=5)[0])
    event = find_events(t, space, clinic_tokenizer()).events[0]
    slopes = np.zeros((2, 4))
    slopes[0, 3], slopes[1, 0], slopes[1, 2] = 3.0, -1.0, 0.5
    model = DecisionModel(_bridge(linear({event.chosen: slopes})), clinic_tokenizer(), test=False)
    reading = model.read(t, [event])
    corrupt = np.full((2, 4, model.hooked.d_head), 2.0, np.float32)
    corrupt[0, 3, 0] = corrupt[1, 2, 0] = 5.0
    corrupt[1, 0, 0] = 4.0
    means = ReferenceMeans({event.kind: corrupt}, {}, frozenset())
    exact, found = model.mean_ablate(reading, means), model.attribute(reading, means, steps=steps)
    want = np.zeros((2, 4))
    want[0, 3], want[1, 0], want[1, 2] = -9.0, 2.0, -1.5  # 3 x (2 - 5), and never at (3, 0)
    for scores in (exact.scores, found.gradient, found.direct):
        np.testing.assert_allclose(scores.values[0], want, atol=1e-4)
    assert exact.margins[0] == pytest.approx(2 * slopes.sum(), abs=1e-4)
    assert found.gradient.values.sum() == pytest.approx(float(exact.margins[0] - exact.floors[0]), abs=1e-4) == want.sum()


def test_f4_what_changes_nothing_is_exactly_zero(built):
    for at in (1, 17, 40, 79):
        clean, own = run(built, at=at), clean_z(built.hooked, built.prefix, [at])[0].numpy()
        for idle in (KnockIn(HeadSet(), built.values), MeanAblate(HeadSet(), built.values), Keep(built.hooked.heads, built.values), AddToZ(HeadSet(), built.values),
                     BlockReads(HeadSet(), 0, 50), BlockReads(built.hooked.heads, 90, 99), KnockIn(built.hooked.heads, own)):
            assert torch.equal(run(built, idle, at=at), clean), idle
        assert not torch.equal(run(built, KnockIn(built.hooked.heads, own + np.float32(1e-3)), at=at), clean)
        assert (run(built, Keep(HeadSet(), built.values), at=at) - clean).abs().max() > 0.1
