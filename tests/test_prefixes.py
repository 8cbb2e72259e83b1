"""What texts share is read once, and what is let go is read again, with the same numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from decisionheads import tiny
from decisionheads._hooked import Hooked
from decisionheads.discovery import discover
from decisionheads.prefixes import Prefixes
from decisionheads.transcripts import prompt_ids

IDS = torch.randperm(80, generator=torch.Generator().manual_seed(3)) + 8


def other(n: int) -> torch.Tensor:
    """Another text with the same first `n` tokens."""
    return torch.cat([IDS[:n], IDS[n:].flip(0)])


def count_tokens(monkeypatch) -> list[int]:
    read, real = [], Hooked._read
    monkeypatch.setattr(Hooked, "_read", lambda self, part, *a: read.append(part.shape[1]) or real(self, part, *a))
    return read


def test_a_forked_text_equals_the_unshared_one(random_model, monkeypatch):
    text = other(64)
    alone = random_model.hooked.prefill(text, (64, 79))
    shared = random_model.hooked.prefill(IDS)
    before = [(k.clone(), v.clone()) for k, v in shared.layers]
    read = count_tokens(monkeypatch)
    forked = random_model.hooked.prefill(text, (64, 79), shared=shared)
    assert sum(read) == 16  # only what differs
    assert (forked.logits - alone.logits).abs().max() <= 2e-5 and (forked.logits - random_model.hooked.prefill(IDS, (64, 79)).logits).abs().max() > 0.1
    for (k, v), (a, b) in zip(forked.layers, alone.layers, strict=True):
        assert k.shape == a.shape and max((k - a).abs().max(), (v - b).abs().max()) <= 2e-5
    assert all(torch.equal(k, a) and torch.equal(v, b) for (k, v), (a, b) in zip(shared.layers, before, strict=True))


def test_logits_inside_the_shared_part_are_still_computed(random_model):
    shared = random_model.hooked.prefill(IDS)
    forked = random_model.hooked.prefill(other(64), (10, 70), shared=shared)
    assert (forked.logits - random_model.hooked.prefill(other(64), (10, 70)).logits).abs().max() <= 2e-5


def test_what_is_shared_ends_before_the_first_difference_and_before_what_is_written(random_model):
    prompts = [IDS[:75].numpy(), other(70)[:78].numpy(), IDS.numpy()]
    assert len(Prefixes(random_model.hooked).share(prompts).shared) == 70
    assert len(Prefixes(random_model.hooked).share([IDS[:70].numpy(), IDS.numpy()]).shared) == 69
    assert Prefixes(random_model.hooked).share([IDS.numpy(), IDS.flip(0).numpy()]).shared is None
    assert Prefixes(random_model.hooked).share([IDS.numpy()]).shared is None


def test_texts_are_let_go_and_read_again(random_model, monkeypatch):
    size = sum(x.numel() * 4 for pair in random_model.hooked.prefill(IDS).layers for x in pair)
    prefixes = Prefixes(random_model.hooked, budget=size + 1)
    first = prefixes.read(IDS, (40,))
    want = [(k.clone(), v.clone()) for k, v in first.layers]
    prefixes.read(IDS.flip(0), (40,))
    read = count_tokens(monkeypatch)
    assert all(torch.equal(k, a) and torch.equal(v, b) for (k, v), (a, b) in zip(first.layers, want, strict=True))
    assert sum(read) == 80
    assert first.layers is first.layers and sum(read) == 80  # kept now


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_discovery_is_the_same_with_a_shared_prompt_and_a_small_budget(model, space, monkeypatch):
    """Every prompt opens with the same list: the tables are those of unshared texts."""
    shortest = 64 - 1
    texts = [tiny.transcript(f"t{i}", drawn) for i, drawn in enumerate(tiny.draw(20, seed=5))]
    opening = "".join(["note : "] + ["fever "] * 70 + ["\n"])
    texts = [replace(t, prompt=opening + t.prompt, spans=()) for t in texts]
    texts = [t for t in texts if len(model.tokenizer(t.text).input_ids) < 320]
    assert len(Prefixes(model.hooked).share(prompt_ids(texts, model.tokenizer)).shared) > shortest
    options = dict(minimum=2, draws=99, caliper=2.0, kinds=("region",), greedy=False, together=False)
    shared = discover(model, texts, space, **options)
    monkeypatch.setattr(Prefixes, "share", lambda self, prompts: self)
    alone = discover(model, texts, space, memory=2**20, **options)
    assert len(shared.effects) > 5 and np.abs(shared.effects - alone.effects).max() <= 1e-4 and np.abs(alone.effects).max() > 0.5
