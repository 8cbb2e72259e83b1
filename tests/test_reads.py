"""Attention masses on spans."""

from __future__ import annotations

import numpy as np
import torch

from decisionheads import BlockReads, HeadSet, KnockIn
from decisionheads.branches import Branch
from decisionheads.reads import pooled_attention, read_attention

IDS = torch.randperm(80, generator=torch.Generator().manual_seed(3)) + 8
SPANS = [(0, 10), (10, 41), (35, 80)]


def test_spans_that_cover_everything_hold_all_of_it(random_model):
    prefix = random_model.hooked.prefill(IDS)
    mass = pooled_attention(random_model.hooked, prefix, [Branch(40), Branch(79), Branch(0)], [(0, 80), *SPANS])
    assert mass.shape == (3, random_model.n_layers, random_model.n_heads, 4)
    assert (mass[..., 0] - 1).abs().max() <= 1e-6
    assert (mass[0, :, :, 1] + mass[0, :, :, 2] - 1).abs().max() <= 1e-6 and mass[0, :, :, 1].std() > 1e-3
    assert mass[2, ..., 1].min() == 1 and mass[2, ..., 2:].max() == 0  # the first token reads itself alone


def test_packs_change_nothing_and_a_blocked_span_is_not_read(random_model):
    hooked, prefix = random_model.hooked, random_model.hooked.prefill(IDS)
    chosen = HeadSet([(1, 2)])
    branches = [Branch(40, (), (BlockReads(chosen, 0, 10),)), Branch(40), Branch(41, (20, 30))]
    mass = pooled_attention(hooked, prefix, branches, SPANS)
    small = pooled_attention(hooked, prefix, branches, SPANS, memory=1)
    assert (mass - small).abs().max() <= 1e-5
    assert mass[0, 1, 2, 0] == 0 < mass[1, 1, 2, 0]
    rest = torch.ones(random_model.n_heads, dtype=torch.bool)
    rest[2] = False
    assert (mass[0, 1, rest] - mass[1, 1, rest]).abs().max() <= 1e-6


def test_an_edit_below_changes_what_is_read_above(random_model):
    hooked, prefix = random_model.hooked, random_model.hooked.prefill(IDS)
    donor = np.random.default_rng(0).normal(size=(hooked.n_layers, hooked.n_heads, hooked.d_head)).astype(np.float32)
    mass = pooled_attention(hooked, prefix, [Branch(40), Branch(40, (), (KnockIn(HeadSet([(1, 0)]), donor),))], SPANS)
    assert (mass[0, :2] - mass[1, :2]).abs().max() <= 1e-6 < (mass[0, 2] - mass[1, 2]).abs().max()


def test_events_are_read_where_they_stand(model, readings):
    reading = next(r for r in readings if len(r.events) > 2)
    mass = read_attention(model, reading, [(0, len(reading.prefix))])
    assert mass.shape == (len(reading.events), model.n_layers, model.n_heads, 1) and np.abs(mass - 1).max() <= 1e-5
