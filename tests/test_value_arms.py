"""What happens after softmax, and at every row of a branch, against the literal oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decisionheads import BlockReads, HeadSet, InputError, Keep, MeanAblate
from decisionheads.branches import Branch, branch_logits, run_pack
from decisionheads.interventions import ReplaceValues

from . import oracle

EXACT = 2e-5  # logits, float32
IDS = torch.randperm(80, generator=torch.Generator().manual_seed(3)) + 8
HEADS = HeadSet([(0, 1), (1, 2), (1, 4), (2, 5)])


@pytest.fixture(scope="module")
def prefix(random_model):
    return random_model.hooked.prefill(IDS, (40,))


@pytest.fixture(scope="module")
def values(random_model):
    h = random_model.hooked
    return np.random.default_rng(0).normal(size=(h.n_layers, h.n_heads, h.d_head)).astype(np.float32)


def run(model, prefix, *branches):
    out = dict(branch_logits(model.hooked, prefix, branches))
    return [out[i] for i in range(len(branches))]


@pytest.mark.parametrize("mean", [False, True])
def test_values_replaced_after_softmax_equal_the_oracle(random_model, random_plain, prefix, values, mean):
    instead = values if mean else None
    clean, one, all_four = run(random_model, prefix, Branch(40), Branch(40, (), (ReplaceValues(HeadSet([(1, 2)]), 5, 30, instead),)),
                               Branch(40, (), (ReplaceValues(HEADS, 5, 30, instead),)))
    for got, heads in ((one, [(1, 2)]), (all_four, HEADS.to_list())):
        want = oracle.values_replaced(random_plain, IDS, 40, heads, slice(5, 30), instead)
        assert (got[0] - want).abs().max() <= EXACT and (want - clean[0]).abs().max() > 0.01


def test_the_three_arms_differ_and_rows_that_enter_late_change_nothing(random_model, prefix, values, monkeypatch):
    head = HeadSet([(2, 5)])
    branches = [Branch(40, (), (c,)) for c in (BlockReads(head, 5, 30), ReplaceValues(head, 5, 30), ReplaceValues(head, 5, 30, values))]
    late = run(random_model, prefix, *branches)
    assert min(float((a - b).abs().max()) for a, b in zip(late, late[1:] + late[:1], strict=True)) > 1e-3
    monkeypatch.setattr(random_model.hooked, "skipping", False)
    for a, b in zip(late, run(random_model, prefix, *branches), strict=True):
        assert (a - b).abs().max() <= EXACT


def test_a_span_without_attention_changes_nothing_at_all(random_model, prefix):
    """Keys from the row on are never read: blocking them, or dropping their values, is exactly nothing, in the copy and in the bridge."""
    blocks, replaced = (BlockReads(HEADS, 40, 80), BlockReads(HEADS, 12, 12)), (ReplaceValues(HEADS, 40, 80), ReplaceValues(HEADS, 12, 12), ReplaceValues(HeadSet(), 0, 40))
    for on_pattern, changes in ((None, blocks), (lambda layer, pattern: None, blocks + replaced)):
        rows = lambda *changes, on_pattern=on_pattern: run_pack(random_model.hooked, prefix, [Branch(40, (), changes)], lambda layer, z: z, on_pattern)[0]  # noqa: E731
        bare = rows()
        for change in changes:
            assert (rows(change) - bare).abs().max() == 0.0


def test_an_ablated_head_stays_ablated_when_its_values_are_replaced_too(random_model, prefix, values):
    ablate = MeanAblate(HEADS, values)
    alone, both = run(random_model, prefix, Branch(40, (), (ablate,)), Branch(40, (), (ablate, ReplaceValues(HEADS, 5, 30))))
    assert (alone - both).abs().max() <= EXACT


def test_edits_at_every_row_equal_one_forward_with_all_of_them(random_model, random_plain, prefix, values):
    """From the answer on: position 30 to 40, z of two heads set at each of them."""
    heads = [(0, 1), (1, 4)]
    everywhere = run(random_model, prefix, Branch(30, tuple(IDS[30:41].tolist()), (MeanAblate(HeadSet(heads), values),), everywhere=True))[0]
    handles = []
    for layer, head in heads:

        def pre(module, args, layer=layer, head=head):
            flat = args[0].clone()
            flat[0].view(len(flat[0]), random_model.n_heads, -1)[30:41, head] = torch.as_tensor(values[layer, head])
            return (flat,)

        handles.append(oracle.output_projections(random_plain)[layer].register_forward_pre_hook(pre))
    want = oracle.logits(random_plain, IDS)[30:41]
    for handle in handles:
        handle.remove()
    first = run(random_model, prefix, Branch(30, tuple(IDS[30:41].tolist()), (MeanAblate(HeadSet(heads), values),)))[0]
    assert (everywhere - want).abs().max() <= EXACT and (first[-1] - want[-1]).abs().max() > 0.01
    nothing = run(random_model, prefix, Branch(30, tuple(IDS[30:41].tolist()), (Keep(random_model.hooked.heads, values),), everywhere=True))[0]
    assert (nothing - oracle.logits(random_plain, IDS)[30:41]).abs().max() <= EXACT


def test_what_cannot_be_done_is_refused(random_model, prefix, values, monkeypatch):
    with pytest.raises(ValueError, match="first row of a branch only"):
        run(random_model, prefix, Branch(40, (), (BlockReads(HEADS, 5, 9),), everywhere=True))
    with pytest.raises(ValueError, match="do not fit"):
        run(random_model, prefix, Branch(40, (), (ReplaceValues(HEADS, 5, 9, values[:1]),)))
    monkeypatch.setattr(random_model.hooked, "weighted", False)
    with pytest.raises(InputError, match="values cannot be replaced after softmax"):
        run(random_model, prefix, Branch(40, (), (ReplaceValues(HEADS, 5, 9),)))


def test_the_self_test_sees_that_z_is_a_weighted_sum_of_values_or_is_not(random_model, monkeypatch):
    from decisionheads._self_test import _weighted_error

    hooked = random_model.hooked
    prefix = hooked.prefill(IDS[:30])
    assert hooked.weighted and _weighted_error(hooked, prefix, 29) <= hooked.limit
    gated = hooked.bridge.blocks[1].attn.hook_z.register_forward_hook(lambda m, a, out: out * 1.01)
    assert _weighted_error(hooked, prefix, 29) > hooked.limit
    gated.remove()
