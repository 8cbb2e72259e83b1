"""Packed rows against the literal oracle: one plain Hugging Face forward per intervention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from decisionheads import AddToZ, BlockReads, HeadSet, Keep, KnockIn, MeanAblate
from decisionheads._hooked import Hooked
from decisionheads._packs import plan_packs
from decisionheads._rows import Rows
from decisionheads.branches import Branch, branch_logits, clean_z

from . import oracle

EXACT = 2e-5  # logits, float32
IDS = torch.randperm(80, generator=torch.Generator().manual_seed(3)) + 8
TIMES = (0, 1, 17, 40, 79)


@pytest.fixture(scope="module")
def ids(random_model):
    return IDS


@pytest.fixture(scope="module")
def prefix(random_model, ids):
    return random_model.hooked.prefill(ids, TIMES, chunk=32)


@pytest.fixture(scope="module")
def values(random_model):
    h = random_model.hooked
    return np.random.default_rng(0).normal(size=(h.n_layers, h.n_heads, h.d_head)).astype(np.float32)


def run(model, prefix, branches, **options):
    out = dict(branch_logits(model.hooked, prefix, branches, **options))
    return [out[i] for i in range(len(branches))]


def every_head(model, values, times=TIMES):
    """Every head at several positions, all in one packed forward; with the matching oracle calls."""
    plan = [(t, layer, head) for t in times for layer in range(model.n_layers) for head in range(model.n_heads)]
    return plan, [Branch(t, (), (MeanAblate(HeadSet([(layer, head)]), values),)) for t, layer, head in plan]


def parity(model, plain, prefix, ids, values) -> tuple[float, float]:
    """Largest difference to the oracle over heads and positions, and the smallest effect seen."""
    plan, branches = every_head(model, values)
    assert len(plan_packs(model.hooked, branches)) == 1
    clean = oracle.logits(plain, ids)
    worst, least = 0.0, np.inf
    for (t, layer, head), got in zip(plan, run(model, prefix, branches), strict=True):
        want = oracle.ablated(plain, ids, t, layer, head, values[layer, head])
        worst = max(worst, float((got[0] - want).abs().max()))
        least = min(least, float((want - clean[t]).abs().max()))
    return worst, least


@pytest.mark.parametrize("copies", [True, False])
def test_every_head_at_several_positions_equals_the_oracle(random_model, random_plain, prefix, ids, values, monkeypatch, copies):
    """On the plain copy, and through the bridge."""
    assert random_model.hooked.copies
    monkeypatch.setattr(random_model.hooked, "copies", copies)
    worst, least = parity(random_model, random_plain, prefix, ids, values)
    assert worst <= EXACT
    assert least > 1000 * EXACT  # the reference is not zero: every ablation does something


def test_prefill_equals_one_plain_forward(random_plain, prefix, ids):
    want = oracle.logits(random_plain, ids)[list(TIMES)]
    assert (prefix.logits - want).abs().max() <= EXACT


def test_keep_and_knock_in_equal_the_oracle(random_model, random_plain, prefix, ids, values):
    keep = HeadSet([(0, 1), (2, 3)])
    donor = clean_z(random_model.hooked, prefix, [17])[0].numpy()
    np.testing.assert_allclose(donor, oracle.z_of(random_plain, ids, 17).numpy(), atol=EXACT)
    kept, knocked = run(random_model, prefix, [Branch(40, (), (Keep(keep, values),)), Branch(40, (), (KnockIn(HeadSet([(1, 2)]), donor),))])
    assert (kept[0] - oracle.all_ablated(random_plain, ids, 40, values, keep.to_list())).abs().max() <= EXACT
    want = oracle.ablated(random_plain, ids, 40, 1, 2, donor[1, 2])
    assert (knocked[0] - want).abs().max() <= EXACT
    assert (want - prefix.logits[TIMES.index(40)]).abs().max() > 0.01


def test_branches_of_several_tokens_equal_a_plain_forward(random_model, random_plain, prefix, ids):
    own = tuple(map(int, ids[17:21]))
    other = (60, 61, 62)
    first, second, third = run(random_model, prefix, [Branch(17, own), Branch(40, other), Branch(17, (60,))])
    assert (first - oracle.logits(random_plain, ids)[17:21]).abs().max() <= EXACT
    want = oracle.logits(random_plain, torch.cat([ids[:40], torch.tensor(other)]))[40:]
    assert (second - want).abs().max() <= EXACT
    assert (third[0] - oracle.logits(random_plain, torch.cat([ids[:17], torch.tensor([60])]))[17]).abs().max() <= EXACT


def test_blocked_reads_equal_a_forward_without_those_keys(random_model, random_plain, prefix, ids):
    # blocking a key for every head of every layer at t is a forward whose last row cannot see it
    everything = HeadSet.all(random_model.n_layers, random_model.n_heads)
    blocked = run(random_model, prefix, [Branch(40, (), (BlockReads(everything, 5, 12),))])[0][0]
    mask = torch.zeros(41, 41).masked_fill(torch.ones(41, 41).triu(1).bool(), torch.finfo(torch.float32).min)
    mask[40, 5:12] = torch.finfo(torch.float32).min
    with torch.no_grad():
        want = random_plain(input_ids=ids[None, :41], attention_mask=mask[None, None], use_cache=False).logits[0, 40]
    assert (blocked - want).abs().max() <= EXACT
    assert (want - prefix.logits[TIMES.index(40)]).abs().max() > 0.01


def test_a_blocked_row_still_sums_to_one_and_is_not_a_zeroed_pattern(random_model, prefix):  # D3
    """Removed before softmax, the rest renormalises; weights zeroed after it are another thing."""
    model, head, block = random_model, 2, BlockReads(HeadSet([(1, 2)]), 5, 12)
    seen = []
    point = model.bridge.blocks[1].attn.hook_pattern
    handle = point.register_forward_hook(lambda m, args, out: seen.append(out[0, :, -1, :].clone()))
    blocked = run(model, prefix, [Branch(40, (), (block,))])[0][0]
    clean = run(model, prefix, [Branch(40)])[0][0]
    handle.remove()
    assert (seen[0].sum(-1) - 1).abs().max() <= 1e-6 and seen[0][head, 5:12].sum() == 0 and seen[1][head, 5:12].sum() > 1e-4
    assert (seen[0][head + 1, :40] - seen[1][head + 1, :40]).abs().max() <= 1e-6  # other heads of the layer read as before

    def zero(m, args, out):
        out = out.clone()
        out[0, head, 0, 5:12] = 0
        return out

    handle = point.register_forward_hook(zero)
    zeroed = run(model, prefix, [Branch(40)])[0][0]
    handle.remove()
    assert (zeroed - blocked).abs().max() > 1e-5 and (zeroed - clean).abs().max() > 1e-5


def test_blocking_everything_leaves_the_own_key_and_no_nan(random_model, random_plain, prefix, ids):  # D1
    everything = HeadSet.all(random_model.n_layers, random_model.n_heads)
    blocked = run(random_model, prefix, [Branch(40, (), (BlockReads(everything, 0, 1000),))])[0][0]
    assert torch.isfinite(blocked).all()
    # later tokens of the text are never read, whatever is blocked
    other = random_model.hooked.prefill(torch.cat([ids[:41], ids[41:].flip(0)]), ())
    again = run(random_model, other, [Branch(40, (), (BlockReads(everything, 0, 1000),))])[0][0]
    assert torch.equal(blocked, again)


def test_order_pack_size_and_chunk_size_change_nothing(random_model, prefix, ids, values):
    _, branches = every_head(random_model, values)
    once = run(random_model, prefix, branches)
    small = run(random_model, prefix, branches, memory=15 * 10**4)
    assert len(plan_packs(random_model.hooked, branches, 15 * 10**4)) > 3
    turned = run(random_model, prefix, branches[::-1])[::-1]
    chunked = run(random_model, random_model.hooked.prefill(ids, TIMES, chunk=7), branches)
    for a, b, c, d in zip(once, small, turned, chunked, strict=True):
        assert max((a - b).abs().max(), (a - c).abs().max(), (a - d).abs().max()) <= EXACT


def test_rows_that_enter_late_and_logits_of_few_ids_equal_the_long_way(random_model, prefix, values, monkeypatch):
    hooked = random_model.hooked
    assert hooked.skipping and hooked.narrow
    ids = (30, 9, 77)
    _, branches = every_head(random_model, values, (17, 40))
    branches += [Branch(40, (), (BlockReads(HeadSet([(2, 1)]), 3, 30),)), Branch(17, (60, 61)), Branch(79)]
    short = [replace(b, ids=ids) for b in branches]
    entries, real = [], Hooked.run
    monkeypatch.setattr(Hooked, "run", lambda self, p, rows, *a, **k: entries.append(rows.entry) or real(self, p, rows, *a, **k))
    quick = run(random_model, prefix, short)
    assert set(entries[0]) == {0, 1, 2} and entries[0] == tuple(sorted(entries[0]))
    monkeypatch.setattr(hooked, "skipping", False)
    monkeypatch.setattr(hooked, "narrow", False)
    for a, b in zip(quick, run(random_model, prefix, branches), strict=True):
        assert a.shape == (len(b), 3) and (a - b[:, list(ids)]).abs().max() <= EXACT
    assert entries[1] == ()


def test_parity_fails_when_a_row_takes_another_position_for_its_own(random_model, random_plain, prefix, ids, values, monkeypatch):
    break_rows(monkeypatch, lambda rows: replace(rows, parent=(0,) * len(rows)))
    assert parity(random_model, random_plain, prefix, ids, values)[0] > 100 * EXACT


def test_adding_to_z_equals_setting_it_to_the_sum(random_model, random_plain, prefix, ids, values):
    z = clean_z(random_model.hooked, prefix, [40])[0].numpy()
    heads = HeadSet([(1, 2)])
    added = run(random_model, prefix, [Branch(40, (), (AddToZ(heads, values),))])[0][0]
    want = oracle.ablated(random_plain, ids, 40, 1, 2, z[1, 2] + values[1, 2])
    assert (added - want).abs().max() <= EXACT
    assert (want - prefix.logits[TIMES.index(40)]).abs().max() > 0.01


def test_a_pack_leaves_the_prefix_as_it_was(random_model, prefix, values):
    before = [(k.clone(), v.clone()) for k, v in prefix.layers]
    run(random_model, prefix, every_head(random_model, values)[1])
    assert all(torch.equal(k, a) and torch.equal(v, b) for (k, v), (a, b) in zip(prefix.layers, before, strict=True))


def test_one_and_two_threads_agree(random_model, prefix, values):
    _, branches = every_head(random_model, values)
    one = run(random_model, prefix, branches)
    torch.set_num_threads(2)
    try:
        two = run(random_model, prefix, branches)
    finally:
        torch.set_num_threads(1)
    assert max(float((a - b).abs().max()) for a, b in zip(one, two, strict=True)) <= 1e-4


def test_pads_on_either_side_move_no_margin(random_model, random_plain, prefix, ids):  # C1
    row = prefix.logits[TIMES.index(40)]
    for left, right in ((0, 8), (8, 0), (3, 5)):
        padded = torch.cat([torch.zeros(left, dtype=torch.long), ids[:41], torch.zeros(right, dtype=torch.long)])
        mask = torch.cat([torch.zeros(left), torch.ones(41), torch.zeros(right)]).long()
        where = (mask.cumsum(0) - 1).clamp(min=0)
        with torch.no_grad():
            out = random_plain(input_ids=padded[None], attention_mask=mask[None], position_ids=where[None]).logits[0, left + 40]
            wrong = random_plain(input_ids=padded[None]).logits[0, -1]
        assert abs(float((out[9] - out[11]) - (row[9] - row[11]))) <= 1e-4
        assert (wrong - row).abs().max() > 0.1


# -- the parity test can fail --------------------------------------------------------------------


def break_rows(monkeypatch, change):
    """Run other rows than those that were asked for."""
    real = Hooked.run
    monkeypatch.setattr(Hooked, "run", lambda self, prefix, rows, *a, **k: real(self, prefix, change(rows), *a, **k))


def test_parity_fails_when_the_head_index_is_off(random_model, random_plain, prefix, ids, values, monkeypatch):
    monkeypatch.setattr(HeadSet, "to_mask", lambda self, layers, heads, real=HeadSet.to_mask: np.roll(real(self, layers, heads), 1, axis=1))
    assert parity(random_model, random_plain, prefix, ids, values)[0] > 100 * EXACT


def test_parity_fails_when_positions_are_off(random_model, random_plain, prefix, ids, values, monkeypatch):
    break_rows(monkeypatch, lambda rows: replace(rows, positions=rows.positions + 1))
    assert parity(random_model, random_plain, prefix, ids, values)[0] > 100 * EXACT


def test_parity_fails_when_rows_see_each_other(random_model, random_plain, prefix, ids, values, monkeypatch):
    break_rows(monkeypatch, lambda rows: replace(rows, branch=torch.zeros_like(rows.branch)))
    assert parity(random_model, random_plain, prefix, ids, values)[0] > 100 * EXACT


def test_parity_fails_when_z_is_not_edited(random_model, random_plain, prefix, ids, values, monkeypatch):
    real = Hooked.run
    monkeypatch.setattr(Hooked, "run", lambda self, p, rows, z_hook=None, *a, **k: real(self, p, rows, None, *a, **k))
    assert parity(random_model, random_plain, prefix, ids, values)[0] > 100 * EXACT


# -- sliding windows ------------------------------------------------------------------------------


@pytest.mark.parametrize("layer_types", [None, ["sliding_attention", "full_attention", "sliding_attention"]])
def test_windows_shorter_than_the_text(tmp_path, layer_types):
    """All-sliding (Mistral) and mixed (Qwen2) layers keep to their windows, cache and all."""
    from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

    from decisionheads import DecisionModel
    from decisionheads.tiny.clinic import TOKENS, clinic_tokenizer

    from .conftest import plain_hf

    torch.manual_seed(1)
    size = dict(vocab_size=len(TOKENS), hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=2, head_dim=8, max_position_embeddings=320, sliding_window=16)
    if layer_types is None:
        hf = MistralForCausalLM(MistralConfig(**size))
    else:
        hf = Qwen2ForCausalLM(Qwen2Config(**size, use_sliding_window=True, layer_types=layer_types))
    with torch.no_grad():
        for p in hf.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.3)
    hf.save_pretrained(tmp_path)
    tokenizer = clinic_tokenizer()
    model, plain = DecisionModel.from_pretrained(tmp_path, tokenizer=tokenizer), plain_hf(tmp_path)
    assert set(model.hooked.windows) == ({16} if layer_types is None else {16, None})
    prefix = model.hooked.prefill(IDS, TIMES, chunk=9)
    values = np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)
    worst, least = parity(model, plain, prefix, IDS, values)
    assert worst <= EXACT and least > 1000 * EXACT
    model.hooked.windows = (None,) * 3  # without the window the rows are wrong
    assert parity(model, plain, prefix, IDS, values)[0] > 100 * EXACT


# -- hooks -----------------------------------------------------------------------------------------


def test_the_callers_model_is_left_as_found(random_model, prefix, values):  # B4
    model = random_model
    hf = model.bridge.original_model
    count = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in hf.modules())  # noqa: E731
    hooks, clean = count(), run(model, prefix, [Branch(40)])[0]

    def fail(layer, z):
        raise KeyError("in the middle")

    for mode in (True, False):
        hf.train(mode)
        with pytest.raises(KeyError):
            model.hooked.run(prefix, Rows.single(prefix.ids, torch.tensor([5])), fail)
        assert hf.training is mode and count() == hooks
    assert torch.equal(run(model, prefix, [Branch(40)])[0], clean)


def test_a_callers_own_hook_still_fires_once(random_model, prefix, values):  # B4
    fired = []
    handle = random_model.bridge.blocks[1].attn.register_forward_hook(lambda *_: fired.append(1))
    try:
        run(random_model, prefix, [Branch(40)])
        assert len(fired) == 1
    finally:
        handle.remove()


def test_a_hook_that_does_not_fire_raises_with_its_name(random_model, prefix, monkeypatch, values):  # B3
    monkeypatch.setattr(random_model.hooked, "copies", False)
    monkeypatch.setattr(random_model.hooked.bridged, "z_points", {i: torch.nn.Identity() for i in range(random_model.n_layers)})
    with pytest.raises(RuntimeError, match=r"blocks\.0\.attn\.hook_z fired 0 times"):
        run(random_model, prefix, every_head(random_model, values)[1][:1])


def test_an_edit_of_one_query_head_changes_no_other(random_model, prefix, values):  # A2
    from decisionheads.branches import run_pack

    clean, edited = {}, {}
    run_pack(random_model.hooked, prefix, [Branch(40)], lambda layer, z: clean.setdefault(layer, z))
    run_pack(random_model.hooked, prefix, [Branch(40, (), (MeanAblate(HeadSet([(1, 5)]), values),))], lambda layer, z: edited.setdefault(layer, z))
    difference = (edited[1][0] - clean[1][0]).abs().amax(-1)
    assert torch.equal(edited[0], clean[0]) and not torch.equal(edited[2], clean[2])
    assert difference[5] > 0 and difference[[h for h in range(random_model.n_heads) if h != 5]].max() == 0


def test_zeroing_one_value_head_changes_its_whole_group():  # A2, A3
    from decisionheads.heads import kv_group

    from .conftest import random_hf

    hf = random_hf("llama")
    before = oracle.z_of(hf, IDS, 40)[1]
    width = hf.config.head_dim

    def zero(module, args, out):
        out = out.clone()
        out[..., width:2 * width] = 0
        return out

    handle = hf.model.layers[1].self_attn.v_proj.register_forward_hook(zero)
    after = oracle.z_of(hf, IDS, 40)[1]
    handle.remove()
    changed = [h for h in range(9) if not torch.equal(before[h], after[h])]
    assert changed == [3, 4, 5] == [h for h in range(9) if kv_group(h, 9, 3) == 1]
    with pytest.raises(ValueError, match="7 query heads do not divide into 3"):
        kv_group(1, 7, 3)


def test_a_head_is_the_input_of_the_output_projection_not_its_output(random_model, random_plain, ids, prefix):  # A1
    head, layer, t = 5, 1, 40
    zero = np.zeros((random_model.n_layers, random_model.n_heads, random_model.hooked.d_head), np.float32)
    ours = run(random_model, prefix, [Branch(t, (), (MeanAblate(HeadSet([(layer, head)]), zero),))])[0][0]
    assert (ours - oracle.ablated(random_plain, ids, t, layer, head, 0.0)).abs().max() <= 1e-4

    def slice_output(module, args, out):
        out = out.clone()
        width = out.shape[-1] // random_model.n_heads
        out[0, t, head * width:(head + 1) * width] = 0
        return out

    handle = oracle.output_projections(random_plain)[layer].register_forward_hook(slice_output)
    wrong = oracle.logits(random_plain, ids)[t]
    handle.remove()
    assert (ours - wrong).abs().max() > 0.01  # the test tells the two apart


def test_heads_and_bias_once_sum_to_the_block(random_model, random_plain, ids):  # A5
    seen = []
    projection = oracle.output_projections(random_plain)[1]
    handle = projection.register_forward_hook(lambda m, a, out: seen.append(out[0, 40]))
    z = oracle.z_of(random_plain, ids, 40)[1]
    handle.remove()
    parts = random_model.hooked.head_outputs(1, z)
    assert (parts.sum(0) + random_model.hooked.output_bias(1) - seen[0]).abs().max() <= 1e-5
    assert parts.abs().max() > 0.1


def test_a_branch_beyond_the_text_is_refused(random_model, prefix):
    with pytest.raises(ValueError, match="does not fit a prefix of 80 tokens"):
        run(random_model, prefix, [Branch(81, (1,))])


# -- what was silently something else ----------------------------------------------------------------


def test_heads_and_values_that_do_not_fit_are_refused(random_model, prefix, values):
    for change, said in [(BlockReads(HeadSet([(7, 0)]), 0, 10), "L7H0 is not in .* of 3 layers"), (MeanAblate(HeadSet([(1, 0)]), values[:, :1]), "do not fit"),
                         (Keep(HeadSet(), values[:2]), "do not fit"), (KnockIn(HeadSet([(0, 99)]), values), "L0H99 is not in .* heads are counted from 0")]:
        with pytest.raises(ValueError, match=said):
            run(random_model, prefix, [Branch(40, (), (change,), (5, 6))])
    with pytest.raises(ValueError, match="a branch at position 80 does not fit"):
        run(random_model, prefix, [Branch(80)])
    long = random_model.hooked.prefill(torch.arange(320) % 70 + 8)
    with pytest.raises(ValueError, match="longer than the 320 tokens"):
        run(random_model, long, [Branch(319, (5, 6, 7))])


def test_values_of_other_heads_are_never_touched(random_model, prefix, values):
    holes = values.copy()
    holes[:, 1:] = np.nan
    a, b = (run(random_model, prefix, [Branch(40, (), (MeanAblate(HeadSet([(1, 0)]), v),))])[0] for v in (values, holes))
    assert torch.equal(a, b)


def test_grad_mode_of_the_caller_is_its_own(random_model, prefix, values):
    """Also between packs, and when two walks are mixed."""
    _, branches = every_head(random_model, values, (17, 40))
    first, second = (branch_logits(random_model.hooked, prefix, branches, 10**5) for _ in range(2))
    for _ in zip(first, second, strict=True):
        assert torch.is_grad_enabled()
    list(first), list(second)
    assert torch.is_grad_enabled()


def test_every_module_keeps_its_own_mode(random_model, prefix):
    hf = random_model.bridge.original_model
    some = [m for m in hf.modules()][3::5]
    for m in some:
        m.training = True
    modes = [m.training for m in hf.modules()]
    try:
        a, b = (run(random_model, prefix, [Branch(40)])[0] for _ in range(2))
        assert torch.equal(a, b) and [m.training for m in hf.modules()] == modes
    finally:
        hf.eval()


def test_a_bridge_without_a_plain_copy_writes_what_the_model_writes(family):
    """Without the repaired cache every token after the first would ignore its context."""
    from decisionheads import DecisionModel, tiny
    from decisionheads.model import _bridge

    from .conftest import plain_hf

    tokenizer = DecisionModel.load_tokenizer(tiny.path(family))
    prompt = tiny.transcript("p", tiny.draw(1, seed=11)[0]).prompt
    alone = DecisionModel(_bridge(plain_hf(tiny.path(family))), tokenizer)
    assert alone.generate(prompt, 12) == DecisionModel.from_pretrained(tiny.path(family)).generate(prompt, 12) != ""


def test_rotary_tables_that_depend_on_the_length_are_refused(tmp_path):
    """longrope: chunks and packs would each have their own; every check on shorter texts passes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from decisionheads import DecisionModel, InputError
    from decisionheads.tiny.clinic import TOKENS, clinic_tokenizer

    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0, 3.0, 2.0, 8.0], original_max_position_embeddings=60, factor=4.0)
    torch.manual_seed(0)
    hf = LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENS), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
                                      max_position_embeddings=320, rope_parameters=rope, initializer_range=0.3))
    hf.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="this cache layout is not supported"):
        DecisionModel.from_pretrained(tmp_path, tokenizer=clinic_tokenizer())


def test_a_window_longer_than_the_context_does_not_stop_loading():
    from decisionheads._cache import longest_reach
    from decisionheads._self_test import self_test

    from .families import FAMILIES, Family
    from .families import engine as make

    wide = Family("Phi-3", "Phi3", FAMILIES["Phi-3"].options | dict(sliding_window=512))
    hooked, tested = make(wide.make())
    assert tested.verdict == "exact" and longest_reach(hooked.config) == 0 and self_test(hooked).error < 2e-5
