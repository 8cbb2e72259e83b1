"""Several texts continued side by side over one cache that holds what they share once.

A prompt of thousands of candidates is gigabytes of keys and values. Texts that begin alike are packed
behind one copy of it: every row sees the shared keys and those of its own text, at their true
positions, and never those of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ._cache import Prefix, full_cache

if TYPE_CHECKING:
    from ._hooked import Hooked


class Together:
    """Texts that a model goes on writing.

    Args:
        hooked: the model; `packed`.
        shared: what all texts begin with; None for nothing.
        room: how many tokens all texts together have beyond it, those that are still to be written included.
    """

    def __init__(self, hooked: Hooked, shared: Prefix | None, room: int):
        self.hooked, self.shared = hooked, shared
        self.common = 0 if shared is None else len(shared)
        self.cache = full_cache(hooked.n_layers, self.common + room, shared, self.common)
        self.owner = torch.full((self.common,), -1, device=hooked.device)  # of each key: the text it belongs to
        self.place = torch.arange(self.common, device=hooked.device)
        self.length = torch.zeros(0, dtype=torch.long, device=hooked.device)

    def add(self, text: Prefix) -> int:
        """Take in a text that was read; returns its number."""
        if len(text) <= self.common or (self.common and not torch.equal(text.ids[:self.common], self.shared.ids)):
            raise ValueError("the text does not begin with what all are said to share")
        for layer, (keys, values) in enumerate(text.layers):
            self.cache.update(keys[:, :, self.common:], values[:, :, self.common:], layer)
        number = len(self.length)
        own = torch.arange(self.common, len(text), device=self.hooked.device)
        self.owner, self.place = torch.cat([self.owner, torch.full_like(own, number)]), torch.cat([self.place, own])
        self.length = torch.cat([self.length, own.new_tensor([len(text)])])
        return number

    @torch.no_grad()
    def step(self, which: Int[Tensor, " row"], tokens: Int[Tensor, " row"]) -> Float[Tensor, "row vocabulary"]:
        """Give some of the texts one more token each; float32 logits of what follows it."""
        hooked, positions = self.hooked, self.length[which]
        self.owner, self.place = torch.cat([self.owner, which]), torch.cat([self.place, positions])
        self.length[which] += 1
        distance = positions[:, None] - self.place[None]
        visible = (distance >= 0) & ((self.owner[None] < 0) | (self.owner[None] == which[:, None]))
        masks = {w: hooked.additive((visible if w is None else visible & (distance < w))[None]) for w in set(hooked.windows)}
        mask = lambda layer: masks[hooked.windows[layer]]  # noqa: E731
        way = hooked.way()
        with way.hooks(mask), hooked.unembedding.hidden(way.norm) as hidden:
            out = way.forward(tokens[None], positions[None], self.cache, mask(0), None)
        return hooked.unembedding.logits(out, hidden)
