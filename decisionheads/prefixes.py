"""Texts that were read: what they share is read once, and what is not used for long is let go.

Keys and values of one long text can take gigabytes, so a run over many texts keeps those of the last
few, within a budget, and reads the others again. The candidate list that opens every prompt is read
once: texts are forked from it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ._cache import Prefix
from ._rows import Engine

BUDGET = 2 * 2**30
WORTH = 64  # fewer shared tokens are not worth a fork


class Prefixes:
    """Reads texts for one model.

    Args:
        hooked: the model.
        budget: bytes of keys and values that are kept; those of the text last used always are.
        shared: what texts may begin with, read already; see `share`.
    """

    def __init__(self, hooked: Engine, budget: int = BUDGET, shared: Prefix | None = None):
        self.hooked, self.budget, self.shared = hooked, budget, shared
        self._kept: OrderedDict[bytes, tuple] = OrderedDict()

    def share(self, prompts: Sequence[Int[np.ndarray, " _"]]) -> Prefixes:
        """The same, forking every text from the longest beginning that all prompts share."""
        if len(prompts) < 2 or not self.hooked.packed:  # a cache of the model's own cannot be cut
            return self
        n = self.common(prompts)
        if n < WORTH:
            return self
        ids = torch.as_tensor(prompts[0][:n], dtype=torch.long, device=self.hooked.device)
        return Prefixes(self.hooked, self.budget, self.hooked.prefill(ids))

    @staticmethod
    def common(prompts: Sequence[Int[np.ndarray, " _"]]) -> int:
        """How many tokens all prompts begin with; the last token of a prompt is its own, since it predicts the first written one."""
        n = min(map(len, prompts)) - 1
        for prompt in prompts[1:]:
            differs = np.flatnonzero(prompts[0][:n] != prompt[:n])
            n = int(differs[0]) if len(differs) else n
        return n

    def read(self, ids: Int[Tensor, " position"], positions: tuple[int, ...]) -> Prefix:
        """Read a text, with logits at some positions."""
        prefix = self.hooked.prefill(ids, positions, shared=self.shared)
        self._keep(ids, prefix.held)
        return replace(prefix, held=None, source=self)

    def adopt(self, prefix: Prefix) -> Prefix:
        """A text that another process has read, as one of these."""
        device = self.hooked.device
        return replace(prefix, ids=prefix.ids.to(device), logits=prefix.logits.to(device), source=self)

    def layers(self, ids: Int[Tensor, " position"]) -> tuple[tuple[Tensor, Tensor], ...]:
        """Keys and values of a text, read again if they were let go."""
        name = _name(ids)
        if name in self._kept:
            self._kept.move_to_end(name)
        else:
            self._keep(ids, self.hooked.prefill(ids, shared=self.shared).held)
        return self._kept[name]

    def _keep(self, ids: Tensor, layers: tuple) -> None:
        size = lambda held: sum(x.numel() * x.element_size() for pair in held for x in pair)  # noqa: E731
        self._kept[_name(ids)] = layers
        self._kept.move_to_end(_name(ids))
        total = sum(map(size, self._kept.values()))
        while total > self.budget and len(self._kept) > 1:
            total -= size(self._kept.popitem(last=False)[1])


def _name(ids: Tensor) -> bytes:
    return ids.cpu().numpy().tobytes()
