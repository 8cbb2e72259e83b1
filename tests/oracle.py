"""The literal oracle: plain PyTorch hooks on a plain Hugging Face model, one full forward each.

Slow on purpose, and it shares no line with the engine.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch


def output_projections(hf):
    """The modules that map z to the residual stream, of a Llama- or GPT-2-type model."""
    if hasattr(hf, "transformer"):
        return [block.attn.c_proj for block in hf.transformer.h]
    return [layer.self_attn.o_proj for layer in hf.model.layers]


def logits(hf, ids):
    with torch.no_grad():
        return hf(input_ids=torch.as_tensor(ids)[None], use_cache=False).logits[0].float()


def z_of(hf, ids, position):
    """z `[layer, head, d_head]` at a position: the input of the output projections."""
    seen = []
    handles = [p.register_forward_pre_hook(lambda m, args: seen.append(args[0][0, position].clone())) for p in output_projections(hf)]
    logits(hf, ids)
    for handle in handles:
        handle.remove()
    return torch.stack(seen).view(len(seen), hf.config.num_attention_heads, -1)


@contextmanager
def z_set(hf, layer, head, position, value):
    """z of one head at one position set to `value`."""

    def pre(module, args):
        flat = args[0].clone()
        width = flat.shape[-1] // hf.config.num_attention_heads
        flat[0, position, head * width:(head + 1) * width] = torch.as_tensor(value)
        return (flat,)

    handle = output_projections(hf)[layer].register_forward_pre_hook(pre)
    try:
        yield
    finally:
        handle.remove()


def ablated(hf, ids, position, layer, head, value):
    """Logits at a position with z of one head there replaced: one full forward."""
    with z_set(hf, layer, head, position, value):
        return logits(hf, ids)[position]


def all_ablated(hf, ids, position, values, keep=()):
    """Logits at a position, or a slice of them, with z of every head but `keep` replaced there."""
    handles = []
    for layer, projection in enumerate(output_projections(hf)):

        def pre(module, args, layer=layer):
            flat = args[0].clone()
            z = flat[0, position].view(-1, hf.config.num_attention_heads, torch.as_tensor(values[layer]).shape[-1])
            for head in range(z.shape[1]):
                if (layer, head) not in keep:
                    z[:, head] = torch.as_tensor(values[layer][head])
            return (flat,)

        handles.append(projection.register_forward_pre_hook(pre))
    try:
        return logits(hf, ids)[position]
    finally:
        for handle in handles:
            handle.remove()


def values_of(hf, ids):
    """Values `[layer, head, position, d_head]`, by query head, from the projections themselves."""
    seen, heads = [], hf.config.num_attention_heads
    if hasattr(hf, "transformer"):
        parts = [(block.attn.c_attn, lambda out: out[0].chunk(3, -1)[2]) for block in hf.transformer.h]
    else:
        parts = [(layer.self_attn.v_proj, lambda out: out[0]) for layer in hf.model.layers]
    handles = [module.register_forward_hook(lambda m, args, out, take=take: seen.append(take(out).detach())) for module, take in parts]
    logits(hf, ids)
    for handle in handles:
        handle.remove()
    width = z_of(hf, ids, 0).shape[-1]
    split = torch.stack(seen).unflatten(-1, (-1, width)).transpose(1, 2)
    return split.repeat_interleave(heads // split.shape[1], 1)


def attention_of(hf, ids):
    """Attention weights `[layer, head, query, key]`."""
    with torch.no_grad():
        return torch.stack([a[0] for a in hf(input_ids=torch.as_tensor(ids)[None], use_cache=False, output_attentions=True).attentions])


def values_replaced(hf, ids, position, heads, keys, instead=None, renormalise=False):
    """Logits at a position whose `heads` get `instead` (zeros) for the values of some keys, after softmax.

    With `renormalise` the keys' weights are dropped and the rest sums to 1 again, as if they had been masked.
    Layer after layer, since a change in one layer moves what the next one attends to.
    """
    edits = {}

    @contextmanager
    def edited():
        handles = []
        for layer, changes in edits.items():

            def pre(module, args, changes=changes):
                flat = args[0].clone()
                for head, z in changes.items():
                    flat[0, position].view(hf.config.num_attention_heads, -1)[head] = z
                return (flat,)

            handles.append(output_projections(hf)[layer].register_forward_pre_hook(pre))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    for layer in sorted({layer for layer, _ in heads}):
        with edited(), torch.no_grad():
            pattern = attention_of(hf, ids)[layer, :, position]
            values, z = values_of(hf, ids)[layer], z_of(hf, ids, position)[layer]
        edits[layer] = {}
        for head in (h for at, h in heads if at == layer):
            weight = pattern[head, keys]
            given = (weight[:, None] * values[head, keys]).sum(0)
            left = z[head] - given
            edits[layer][head] = left / (1 - weight.sum()) if renormalise else left + (0 if instead is None else weight.sum() * torch.as_tensor(instead[layer][head]))
    with edited():
        return logits(hf, ids)[position]
