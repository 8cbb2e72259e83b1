"""Small random models of several shapes, each with its plain twin, for tests that are named after a case."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from decisionheads import DecisionModel
from decisionheads.branches import Branch, branch_logits, run_pack
from decisionheads.model import _bridge, _sharing_copy
from decisionheads.tiny.clinic import clinic_tokenizer

from .conftest import random_hf

EXACT = 2e-5  # logits, float32
IDS = torch.randperm(80, generator=torch.Generator().manual_seed(3)) + 8
SHAPES = {"9 to 3": ("llama", {}), "8 to 2": ("llama", dict(hidden_size=40, num_attention_heads=8, num_key_value_heads=2, attention_bias=True)),
          "4 to 4": ("llama", dict(num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2)), "gpt2": ("gpt2", {})}  # query heads to key-value heads


def hf_of(family, **changes):
    """A random model whose biases are not zero either, so that one counted twice shows."""
    hf = random_hf(family, **changes)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in hf.named_parameters():
            if name.endswith("bias"):
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return hf


def build(name):
    """A model, its plain twin, a text that it has read, and values to put in."""
    family, changes = SHAPES[name]
    hf, plain = hf_of(family, **changes), hf_of(family, **changes)
    copy = _sharing_copy(hf)
    model = DecisionModel(_bridge(hf), clinic_tokenizer(), plain=copy)
    plain.set_attn_implementation("eager")
    assert model.tested.verdict == "exact", model.tested.before  # on the path that everyone takes, and not on one that is slower
    h = model.hooked
    values = np.random.default_rng(0).normal(size=(h.n_layers, h.n_heads, h.d_head)).astype(np.float32)
    return SimpleNamespace(model=model, hooked=h, plain=plain, prefix=h.prefill(IDS), values=values,
                           groups=getattr(plain.config, "num_key_value_heads", h.n_heads))


def run(b, *changes, at=40, prefix=None):
    """Logits at a position under some interventions."""
    ((_, logits),) = branch_logits(b.hooked, prefix or b.prefix, [Branch(at, (), changes)])
    return logits[0]


def z_at(b, *changes, at=40, prefix=None, on_pattern=None):
    """z `[layer, head, d_head]` at a position as later parts of the model see it; through the bridge where patterns are asked for."""
    seen = {}
    with torch.no_grad():
        run_pack(b.hooked, prefix or b.prefix, [Branch(at, (), changes)], lambda layer, z: seen.setdefault(layer, z)[:], on_pattern)
    return torch.stack([seen[layer][0] for layer in range(b.hooked.n_layers)])


def pattern_at(b, *changes, at=40):
    """Attention weights `[layer, head, key]` of the row at a position, its own key last."""
    seen = []
    with torch.no_grad():
        run_pack(b.hooked, b.prefix, [Branch(at, (), changes)], on_pattern=lambda layer, pattern: seen.append(pattern[:, 0]))
    return torch.stack(seen)
