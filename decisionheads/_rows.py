"""Rows: the tokens of many branches side by side, as data; and what runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ._cache import Prefix
from ._unembed import Unembedding
from .heads import HeadSet
from .views import Brief

ZHook = Callable[[int, Tensor], Tensor]
PatternHook = Callable[[int, Tensor], None]
BlockedReads = Callable[[int], Tensor | None]
Choose = Callable[[Tensor], int | None]  # logits `[vocabulary]` -> the next token, or None to stop


@dataclass(frozen=True, repr=False)
class Rows(Brief):
    """Rows of one packed forward.

    A row sees the first `seen` positions of the prefix, and the rows of its own `branch` that stand
    before it; each at its true position.

    Attributes:
        tokens, positions: token id and position of each row.
        branch: number of the branch that each row belongs to.
        seen: how many positions of the prefix each row's branch continues.
        entry: first layer at which a row differs from its `parent`, ascending; below it the parent
            stands for both. Empty: every row runs through every layer.
        parent: index of an unedited row with the same token and position.
        full: rows of which all logits are wanted; None for all rows.
    """

    tokens: Int[Tensor, " row"]
    positions: Int[Tensor, " row"]
    branch: Int[Tensor, " row"]
    seen: Int[Tensor, " row"]
    entry: tuple[int, ...] = ()
    parent: tuple[int, ...] = field(default=(), repr=False)
    full: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def active(self, layer: int) -> int:
        """How many rows, from the first on, run through a layer."""
        return sum(e <= layer for e in self.entry) if self.entry else len(self)

    @classmethod
    def single(cls, prefix_ids: Tensor, positions: Tensor) -> Rows:
        """One row of the text's own token at each position, each a branch of its own."""
        positions = positions.to(prefix_ids.device)
        return cls(prefix_ids[positions], positions, torch.arange(len(positions), device=prefix_ids.device), positions)


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Every module in eval mode, each put back as it was."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@runtime_checkable
class Engine(Protocol):
    """A hooked model as the rest of the house sees it: `_hooked.Hooked`, `_classic.Classic`.

    Attributes:
        name: of the model.
        n_layers, n_heads, d_head, vocabulary: its shape.
        layers: those with attention; `heads`: every head there is.
        reach: the longest bound on what a layer sees, 0 for none; a test text must be longer.
        context: the longest text it can read; None where there is no limit.
        limit: largest relative error of exact arithmetic in its number format.
        copied: the way through a plain copy, where there is one.
        paths: ways to run branches, `(packed, plain prefill, words)`, fastest first; the self-test
            sets `packed`, `prefills`, `copies`, `skipping` and `narrow` to what is exact, and `weighted` if z
            is the attention-weighted sum of the values that a prefix holds.
    """

    name: str
    n_layers: int
    n_heads: int
    d_head: int
    vocabulary: int
    layers: list[int]
    heads: HeadSet
    reach: int
    context: int | None
    limit: float
    device: torch.device
    dtype: torch.dtype
    paths: list[tuple[bool, bool, str]]
    packed: bool
    prefills: bool
    copied: object | None
    copies: bool
    skipping: bool
    narrow: bool
    weighted: bool
    unembedding: Unembedding

    def full_logits(self, ids: Tensor, start: int = 0, edit: tuple[int, int, Tensor] | None = None) -> Tensor: ...
    def attention_output(self, ids: Tensor, layer: int) -> tuple[Tensor, Tensor]: ...
    def generate(self, ids: Tensor, longest: int, choose: Choose | None = None) -> Tensor: ...
    def head_outputs(self, layer: int, z: Tensor) -> Float[Tensor, "*row head d_model"]: ...
    def output_bias(self, layer: int) -> Tensor: ...
    def prefill(self, ids: Tensor, positions: tuple[int, ...] = (), chunk: int = 512, shared: Prefix | None = None) -> Prefix: ...
    def run(self, prefix: Prefix, rows: Rows, z_hook: ZHook | None = None, blocked: BlockedReads | None = None,
            ids: tuple[int, ...] | None = None, on_pattern: PatternHook | None = None) -> tuple[Tensor, Tensor | None]: ...
