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
    """Logits at a position with z of every head but `keep` replaced there."""
    handles = []
    for layer, projection in enumerate(output_projections(hf)):

        def pre(module, args, layer=layer):
            flat = args[0].clone()
            z = flat[0, position].view(hf.config.num_attention_heads, -1)
            for head in range(len(z)):
                if (layer, head) not in keep:
                    z[head] = torch.as_tensor(values[layer][head])
            return (flat,)

        handles.append(projection.register_forward_pre_hook(pre))
    try:
        return logits(hf, ids)[position]
    finally:
        for handle in handles:
            handle.remove()
