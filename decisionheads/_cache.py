"""Keys and values of a text, computed once, and the caches that are made of them."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .views import Brief


@dataclass(frozen=True, repr=False)
class Prefix(Brief):
    """A text that the model has read; computed once and never changed.

    Attributes:
        ids: token ids `[position]`.
        held: for each layer `(keys, values)`, each `[1, kv_head, position, d_head]`; empty where a
            model's cache cannot be cut and branches run one a batch row; None where they are kept, or
            computed again, by `source`.
        logits: float32 `[wanted, vocabulary]` at the `positions` asked for, from the plain model
            where there is one: an independent reference for the clean rows.
        positions: the positions of `logits`.
        source: a `prefixes.Prefixes`.
    """

    ids: Int[Tensor, " position"]
    held: tuple[tuple[Tensor, Tensor], ...] | None
    logits: Float[Tensor, "wanted vocabulary"]
    positions: tuple[int, ...] = field(default=())
    source: Any = field(default=None, repr=False, compare=False)

    @property
    def layers(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Keys and values, read again where they were let go."""
        return self.held if self.held is not None else self.source.layers(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __getstate__(self) -> dict[str, Any]:
        """For another process: keys and values stay, and are read again there."""
        return {**self.__dict__, "ids": self.ids.cpu(), "logits": self.logits.cpu(), "held": None, "source": None}


def read_only_cache(prefix: Prefix, length: int):
    """A transformers cache over the first `length` positions that forgets whatever is added."""
    from transformers.cache_utils import Cache, DynamicLayer

    class ReadOnlyLayer(DynamicLayer):
        """Returns prefix and new keys side by side without keeping the new ones."""

        def update(self, key_states, value_states, *args, **kwargs):
            return (torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2))

    layers = []
    for keys, values in prefix.layers:
        layer = ReadOnlyLayer()
        layer.keys, layer.values = keys[:, :, :length], values[:, :, :length]
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        layers.append(layer)
    return Cache(layers=layers)


def full_cache(n_layers: int, room: int, base: Prefix | None = None, length: int = 0):
    """A cache with room for a whole text that keeps every key, in sliding layers too; forked from the
    first `length` positions of another text where one is given.

    Room is taken once: growing by concatenation would copy all keys in every chunk, and leave holes.
    """
    from transformers.cache_utils import Cache, DynamicLayer

    class RoomyLayer(DynamicLayer):
        """Writes new keys and values into their place and hands out views."""

        def update(self, key_states, value_states, *args, **kwargs):
            n, more = self.get_seq_length(), key_states.shape[-2]
            if not self.is_initialized:
                self.all_keys, self.all_values = (x.new_empty(*x.shape[:2], room, x.shape[-1]) for x in (key_states, value_states))
                self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.all_keys[:, :, n:n + more], self.all_values[:, :, n:n + more] = key_states, value_states
            self.keys, self.values = self.all_keys[:, :, :n + more], self.all_values[:, :, :n + more]
            return self.keys, self.values

    cache = Cache(layers=[RoomyLayer() for _ in range(n_layers)])
    for number, (keys, values) in enumerate(base.layers if base is not None and length else ()):
        cache.update(keys[:, :, :length], values[:, :, :length], number)
    return cache


def repeated(cache, count: int):
    """A copy of a cache of one text, for a batch of `count` rows."""
    cache = copy.deepcopy(cache)
    cache.reorder_cache(torch.zeros(count, dtype=torch.long))
    return cache


@lru_cache
def arguments(kind: type) -> frozenset[str]:
    """What a model of this class can be given; looking takes as long as a small layer."""
    return frozenset(inspect.signature(kind.forward).parameters)


def cache_argument(model) -> str:
    """The name under which this version of transformers takes a model's cache."""
    names = arguments(type(model))
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in names), "past_key_values")


def layer_windows(config, n_layers: int) -> tuple[int | None, ...]:
    """How many positions back each layer sees, itself included; None where it sees everything."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return (None,) * n_layers
    return (window,) * n_layers


def longest_reach(config) -> int:
    """The largest number in a config that may bound what attention sees: a test text must be longer.

    Read by name, since not every such bound is a sliding window (GPT-Neo has a `window_size`, others
    attend in chunks) and a bound that is overlooked shows only in a text that is longer.
    """
    names = [n for n in vars(config) if ("window" in n or "chunk" in n or "local_attn" in n) and "layer" not in n]
    bounds = [v for n in names if isinstance(v := getattr(config, n), int) and not isinstance(v, bool)]
    # rotary tables that depend on the longest position of a forward: chunks and rows would each have their own
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(r for r in ropes.values() if isinstance(r, dict))]:
        if rope.get("rope_type") in ("longrope", "dynamic"):
            bounds.append(rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings)
    context = getattr(config, "max_position_embeddings", None) or max(bounds, default=0) + 1
    return max((b for b in bounds if b < context), default=0)
