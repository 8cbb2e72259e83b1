"""Attention at decisions only, with its gradient, from a student that runs as it always does.

While a batch is read, the attention function that the model calls anyway (sdpa, say) is followed by one
more product: the queries of the pool's heads at the events' positions against all keys, softmaxed in
float32 under the very mask that the model was given, and pooled into groups. A few rows a text instead of
a square; the model's own output is untouched, to the bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor, nn

from ..decisions import Kind
from ..errors import ExactnessError, InputError
from ..heads import HeadSet
from ..views import Brief
from .groups import GROUPS

LIMIT = {torch.float32: 1e-4, torch.float64: 1e-4}  # of a pooled mass against whole eager patterns
LIMIT_16 = 3e-2


@dataclass(frozen=True, eq=False, repr=False)
class EventBatch(Brief):
    """The events of a batch of texts, padded to the same number.

    Attributes:
        positions: `t` of each event.
        kinds: index into the pool's kinds; -1 for padding.
        groups: group of every key, -1 for what is dropped: sinks, template, pads, and keys after `t`.
    """

    positions: Int[Tensor, "text event"]
    kinds: Int[Tensor, "text event"]
    groups: Int8[Tensor, "text event key"]


class EventAttention:
    """Pools the attention of a set of heads at the events of a batch, while the model reads it.

    Args:
        model: a Hugging Face causal language model whose attention goes through transformers' attention interface.
        pool: kind -> heads; the mass of an event is the mean over the heads of its kind.

    Raises:
        InputError: for heads that the model does not have; when reading, for a model that checkpoints its activations.
    """

    def __init__(self, model: nn.Module, pool: Mapping[Kind, HeadSet]):
        config = model.config.get_text_config()
        self.model, self.pool = model, dict(pool)
        self.implementation = model.config._attn_implementation
        self.kinds: tuple[Kind, ...] = tuple(pool)
        beyond = [h for heads in pool.values() for h in heads if h.layer >= config.num_hidden_layers or h.head >= config.num_attention_heads]
        if beyond:
            raise InputError(f"the student has no head {beyond[0]}: it has {config.num_hidden_layers} layers of {config.num_attention_heads} heads; choose its pool again")
        empty = [kind for kind, heads in pool.items() if not len(heads)]
        if empty:
            raise InputError(f"the pool has no head for {empty[0]} decisions; leave the kind out or name some")
        self.layers: dict[int, tuple[list[int], Tensor]] = {}
        for layer in sorted({h.layer for heads in pool.values() for h in heads}):
            mine = sorted({h.head for heads in pool.values() for h in heads if h.layer == layer})
            share = torch.tensor([[((layer, h) in heads) / len(heads) for h in mine] for heads in pool.values()])
            self.layers[layer] = (mine, share)
        self._batch: EventBatch | None = None
        self._mass: Tensor | None = None
        self._seen: list[int] = []

    @contextmanager
    def reading(self, batch: EventBatch) -> Iterator[None]:
        """The forward passes inside are watched; `mass` holds the last one's."""
        from transformers import AttentionInterface
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as interface

        if any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules()):
            raise InputError("the student checkpoints its activations, which would read its attention twice; turn gradient checkpointing off")
        name, local = self.implementation, interface._local_mapping
        before = local.get(name)
        original = before or AttentionInterface._global_mapping.get(name) or _eager
        self._batch, self._mass, self._seen = batch, None, []
        interface[name] = self._attend(original)
        try:
            yield
        finally:
            if before is None:
                del interface[name]
            else:
                interface[name] = before
            self._batch = None

    @property
    def mass(self) -> Float[Tensor, "text event group"]:
        """Pooled attention mass on each group, with its gradient; not renormalised.

        Raises:
            ExactnessError: where some layer of the pool did not come by exactly once.
        """
        if sorted(self._seen) != list(self.layers):
            raise ExactnessError(f"attention of layers {', '.join(map(str, self.layers))} was to be read once each and layers {self._seen} came by: "
                                 "this architecture does not send its attention through transformers' interface, so it cannot be supervised")
        return self._mass

    def _attend(self, original: Callable) -> Callable:
        def attend(module, query, key, value, attention_mask, *args, **kwargs):
            layer = getattr(module, "layer_idx", None)
            if self._batch is not None and layer in self.layers:
                self._seen.append(layer)
                found = self._rows(module, layer, query, key, attention_mask, kwargs)
                self._mass = found if self._mass is None else self._mass + found.to(self._mass.device)
            return original(module, query, key, value, attention_mask, *args, **kwargs)

        return attend

    def _rows(self, module, layer: int, query: Tensor, key: Tensor, mask: Tensor | None, options: Mapping) -> Tensor:
        """Mass `[text, event, group]` of one layer's heads of the pool, each kind's heads for its events."""
        if options.get("position_bias") is not None or options.get("alibi") is not None:
            raise ExactnessError("this architecture adds a bias to its scores outside the mask, so its attention cannot be supervised")
        heads, share = self.layers[layer]
        batch, device = self._batch, query.device
        at = batch.positions.to(device)
        texts = torch.arange(len(at), device=device)[:, None]
        q = query[:, heads].transpose(1, 2)[texts, at].float()  # text, event, head, width
        k = key[:, [h // (query.shape[1] // key.shape[1]) for h in heads]].float()
        scaling = options.get("scaling")
        scores = torch.einsum("tehd,thkd->tehk", q, k) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if options.get("softcap") is not None:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        keys = torch.arange(key.shape[2], device=device)
        if mask is None or mask.ndim == 2:
            allowed = keys <= at[..., None]
            window = options.get("sliding_window")
            if window is not None:
                allowed = allowed & (keys > at[..., None] - window)
            if mask is not None:
                allowed = allowed & mask[:, None].bool()
            scores = scores.masked_fill(~allowed[:, :, None], -torch.inf)
        else:
            rows = mask.expand(len(at), -1, -1, -1).transpose(1, 2)[texts, at][..., :key.shape[2]]  # text, event, 1 or head, key
            rows = rows[:, :, heads] if rows.shape[2] > 1 else rows
            scores = scores.masked_fill(~rows, -torch.inf) if rows.dtype == torch.bool else scores + rows.float()
        sink = options.get("s_aux")
        if sink is not None:  # a column of its own, that holds nothing
            scores = torch.cat([scores, sink[heads].float().expand(*scores.shape[:-1])[..., None]], -1)
        weights = scores.softmax(-1)[..., :key.shape[2]]
        groups = batch.groups.to(device)
        member = torch.stack([groups == g for g in range(len(GROUPS))], -1).to(weights.dtype)  # text, event, key, group
        of_kind = share.to(device, weights.dtype)[batch.kinds.to(device).clamp_min(0)]  # text, event, head
        return torch.einsum("teh,tehk,tekg->teg", of_kind, weights, member)


def _eager(module: nn.Module, *args, **kwargs):
    """The model's own eager attention, which stands beside its class."""
    function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise ExactnessError(f"{type(module).__name__} has no eager attention of transformers' form, so it cannot be supervised")
    return function(module, *args, **kwargs)


@torch.no_grad()
def check_attention(model: nn.Module, watched: EventAttention, inputs: Mapping[str, Tensor], batch: EventBatch) -> float:
    """Hold the pooled rows against whole patterns of the same model in eager attention.

    Args:
        inputs: `input_ids` and `attention_mask`.

    Returns:
        the largest difference of a mass.

    Raises:
        ExactnessError: where they differ, or the model gives no patterns.
    """
    training, before = model.training, model.config._attn_implementation
    model.eval()
    try:
        with watched.reading(batch):
            model(**inputs)
        fast = watched.mass
        model.set_attn_implementation("eager")
        patterns = model(**inputs, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
        model.train(training)
    if not patterns or any(p is None for p in patterns):
        raise ExactnessError("the student gives no attention patterns in eager mode, so what is supervised cannot be checked")
    worst = 0.0
    for text, event in (batch.kinds >= 0).nonzero().tolist():
        t, groups = int(batch.positions[text, event]), batch.groups[text, event]
        heads: Sequence = list(watched.pool[watched.kinds[int(batch.kinds[text, event])]])
        row = torch.stack([patterns[h.layer][text, h.head, t].float() for h in heads]).mean(0).cpu()
        slow = torch.stack([row[:len(groups)][groups.cpu() == g].sum() for g in range(len(GROUPS))])
        worst = max(worst, float((slow - fast[text, event].cpu()).abs().max()))
    limit = LIMIT.get(next(model.parameters()).dtype, LIMIT_16)
    if not worst <= limit:
        raise ExactnessError(f"attention read at decisions differs from the student's own patterns by {worst:.1e} (limit {limit:.0e}), so it cannot be supervised")
    return worst
