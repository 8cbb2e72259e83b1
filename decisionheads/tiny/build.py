"""The embedded models before training: two families, and the start that lets look-ups form.

The start is not neutral, and claims about these models should remember it: three heads of layer 0
begin as "look 1, 2, 3 tokens back", all other heads begin with equal query and key weights and an
output projection that is plus (even heads) or minus (odd heads) the transposed value projection.
Look-ups then form in hundreds of steps instead of not at all; which head ends up suppressing the
near-miss is nudged by it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .clinic import BOS, END, PAD, TOKENS

LAYERS, HEADS, LENGTH = 4, 8, 320
WIDTH = {"llama": 96, "gpt2": 128}  # heads are 16 wide in both; in gpt2 that fixes the width
INDEX = {token: i for i, token in enumerate(TOKENS)}


def build(family: str, seed: int) -> nn.Module:
    """A fresh model of the family with the start described above."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    ids = dict(bos_token_id=INDEX[BOS], eos_token_id=INDEX[END], pad_token_id=INDEX[PAD])
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(TOKENS), hidden_size=WIDTH["llama"], intermediate_size=128, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=16, attention_bias=True,
            max_position_embeddings=LENGTH, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **ids))
    elif family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(
            vocab_size=len(TOKENS), n_embd=WIDTH["gpt2"], n_layer=LAYERS, n_head=HEADS, n_inner=192, n_positions=LENGTH,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ids))
    else:
        raise ValueError(f"unknown family {family!r}: expected llama or gpt2")
    with torch.no_grad():
        (_start_llama if family == "llama" else _start_gpt2)(model)
    return model


def _matching_heads(q: Tensor, k: Tensor, v: Tensor, o: Tensor, first: int) -> None:
    """Views `[head, d_head, width]` (o: `[head, width, d_head]`): heads that match equal content."""
    q.normal_(0, 0.08), v.normal_(0, 0.08)
    k.copy_(q)
    v[:first] = v[:1].clone()  # the look-back heads write into one subspace: a bag of recent tokens
    for h in range(q.shape[0]):
        o[h].copy_(v[h].T * (1 if h % 2 == 0 or h < first else -1))


def _start_llama(model: nn.Module) -> None:
    d, width = model.config.head_dim, WIDTH["llama"]
    for index, layer in enumerate(model.model.layers):
        a = layer.self_attn
        views = [p.weight.view(HEADS, d, width) for p in (a.q_proj, a.k_proj, a.v_proj)]
        _matching_heads(*views, a.o_proj.weight.view(width, HEADS, d).transpose(0, 1),
                        first=3 if index == 0 else 0)
        for bias in (a.q_proj.bias, a.k_proj.bias, a.v_proj.bias, a.o_proj.bias):
            bias.zero_()
        if index == 0:
            theta = 1e6 ** (-torch.arange(d // 2) / (d // 2))
            qb, kb = a.q_proj.bias.view(HEADS, d), a.k_proj.bias.view(HEADS, d)
            for h in range(3):
                a.q_proj.weight.view(HEADS, d, width)[h].mul_(0.1)
                a.k_proj.weight.view(HEADS, d, width)[h].mul_(0.1)
                qb[h] = 6.5 * torch.cat([torch.cos(-(h + 1) * theta), torch.sin(-(h + 1) * theta)])
                kb[h, : d // 2] = 6.5


def _start_gpt2(model: nn.Module) -> None:
    width = WIDTH["gpt2"]
    d, pairs = width // HEADS, width // HEADS // 2
    positions = torch.arange(LENGTH).float()
    theta = 1e3 ** (-torch.arange(pairs) / pairs)
    waves = torch.cat([torch.cos(positions[:, None] * theta), torch.sin(positions[:, None] * theta)], 1)
    place, words = model.transformer.wpe.weight, model.transformer.wte.weight
    place[:, : 2 * pairs] = 0.1 * waves
    words.normal_()[:, : 2 * pairs] = 0  # room for the waves
    # LayerNorm must treat all tokens alike, or it drowns the waves: equal means and lengths
    place[:, 2 * pairs:] = -0.1 * waves.sum(1, keepdim=True) / (width - 2 * pairs)
    words[:, 2 * pairs:] -= words[:, 2 * pairs:].mean(1, keepdim=True)
    words.mul_(0.05 * math.sqrt(width) / words.norm(dim=1, keepdim=True))
    for index, block in enumerate(model.transformer.h):
        w = block.attn.c_attn.weight
        q, k, v = (w[:, i * width:(i + 1) * width].view(width, HEADS, d).permute(1, 2, 0) for i in range(3))
        o = block.attn.c_proj.weight.view(HEADS, d, width).transpose(1, 2)
        _matching_heads(q, k, v, o, first=3 if index == 0 else 0)
        for view in (q, k, v):
            view[:, :, : 2 * pairs] = 0  # heads match and copy content, not place
        if index == 0:
            for h in range(3):
                q[h].mul_(0.1), k[h].mul_(0.1)
                for i in range(pairs):  # rotate the position waves by h + 1 steps
                    c, s = math.cos((h + 1) * theta[i]), math.sin((h + 1) * theta[i])
                    k[h, i, i] = k[h, i + pairs, i + pairs] = 5.0
                    q[h, i, i], q[h, i, i + pairs] = 5.0 * c, 5.0 * s
                    q[h, i + pairs, i], q[h, i + pairs, i + pairs] = -5.0 * s, 5.0 * c
