"""Branches: many counterfactual continuations of one prefilled text in one forward.

An intervention at position `t` leaves keys and values before `t` untouched, so one prefill serves
every intervention on every event of a text. A branch is a position, the tokens from there on (by
default the text's own), and interventions at its first row. Branches are packed side by side into
one sequence: each row keeps its true position and sees the prefix up to its own `t` and the earlier
rows of its own branch, nothing else. Packs are cut to a memory budget; the order of branches and
the size of packs change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ._hooked import Hooked, Prefix
from .interventions import BlockReads, Intervention

MEMORY = 512 * 2**20  # bytes for the attention scores of one pack and what goes with them


@dataclass(frozen=True, eq=False)
class Branch:
    """A continuation of the first `position` tokens of a text.

    Attributes:
        position: `t`; the branch reads the prefix before it.
        tokens: token ids from `t` on; empty for the text's own token at `t`.
        interventions: at the branch's first row; later rows are re-run and not edited.
    """

    position: int
    tokens: tuple[int, ...] = ()
    interventions: tuple[Intervention, ...] = ()


def branch_logits(hooked: Hooked, prefix: Prefix, branches: Sequence[Branch], memory: int = MEMORY) -> Iterator[tuple[int, Float[Tensor, "token vocabulary"]]]:
    """Yield `(index of the branch, float32 logits of its rows)`, pack after pack.

    Args:
        hooked: the model.
        prefix: the text, prefilled at least up to the last position of any branch.
        branches: what to run; they may stand at different positions.
        memory: bytes that one pack may take.
    """
    for pack in plan_packs(hooked, branches, memory):
        with torch.no_grad():
            logits = run_pack(hooked, prefix, [branches[i] for i in pack])
        at = 0
        for i in pack:
            count = max(1, len(branches[i].tokens))
            yield i, logits[at:at + count]
            at += count


def plan_packs(hooked: Hooked, branches: Sequence[Branch], memory: int = MEMORY) -> list[list[int]]:
    """Cut branches into packs of at most `memory` bytes, those of nearby positions together."""
    if memory < 1:
        raise ValueError("the memory budget must be positive")
    order = sorted(range(len(branches)), key=lambda i: branches[i].position)
    packs: list[list[int]] = []
    rows = 0
    for i in order:
        count = max(1, len(branches[i].tokens))
        if packs and pack_bytes(hooked, branches[i].position, rows + count) <= memory:
            packs[-1].append(i)
            rows += count
        else:
            packs.append([i])
            rows = count
    return packs


def pack_bytes(hooked: Hooked, length: int, rows: int) -> int:
    """Bytes that a pack needs: scores and weights of one layer, masks, repeated keys, logits."""
    scores = 3 * hooked.n_heads * rows * (length + rows)
    repeated = 2 * hooked.n_heads * (length + rows) * hooked.d_head
    return 4 * (scores + repeated + rows * (hooked.vocabulary + 2 * hooked.n_layers * hooked.n_heads))


def run_pack(hooked: Hooked, prefix: Prefix, branches: Sequence[Branch],
             on_z: Callable[[int, Tensor], Tensor] | None = None) -> Float[Tensor, "row vocabulary"]:
    """One packed forward, differentiable where grad is enabled.

    Args:
        on_z: called after the interventions with `(layer, z [row, head, d_head])`; returns z.
    """
    tokens, positions, numbers, seen, first = [], [], [], [], []
    for number, branch in enumerate(branches):
        if not 0 <= branch.position <= len(prefix):
            raise ValueError(f"a branch at position {branch.position} does not fit a prefix of {len(prefix)} tokens")
        own = branch.tokens or (int(prefix.ids[branch.position]),)
        first.append(len(tokens))
        for step, token in enumerate(own):
            tokens.append(token), positions.append(branch.position + step)
            numbers.append(number), seen.append(branch.position)
    edits = _z_edits(hooked, branches, first)
    blocks = _blocks(hooked, branches, first, positions, max(seen))

    def z_hook(layer: int, z: Tensor) -> Tensor:
        for weight, values, row in edits.get(layer, ()):
            # lerp is exactly z at weight 0 and exactly the values at weight 1
            z = z.index_copy(0, row, torch.lerp(z[row], values.expand_as(z[row]), weight[..., None]))
        return on_z(layer, z) if on_z is not None else z

    as_tensor = lambda x: torch.tensor(x, device=hooked.device)  # noqa: E731
    return hooked.rows(prefix, as_tensor(tokens), as_tensor(positions), as_tensor(numbers), as_tensor(seen),
                       z_hook if edits or on_z is not None else None, blocks)


def _z_edits(hooked: Hooked, branches: Sequence[Branch], first: list[int]) -> dict[int, list[tuple[Tensor, Tensor, Tensor]]]:
    """For each layer: weights `[row, head]`, values `[head, d_head]` and rows, grouped by equal values."""
    groups: dict[int, tuple[np.ndarray, list[int], list[np.ndarray]]] = {}
    for order in range(max((len(b.interventions) for b in branches), default=0)):
        for branch, row in zip(branches, first, strict=True):
            if order < len(branch.interventions) and not isinstance(branch.interventions[order], BlockReads):
                edit = branch.interventions[order].edit()
                _, rows, weights = groups.setdefault((order, id(edit.values)), (edit.values, [], []))
                rows.append(row), weights.append(edit.weight)
    layers: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for values, rows, weights in groups.values():
        weight, row = np.stack(weights), np.array(rows)
        for layer in np.flatnonzero(weight.any((0, 2))):
            chosen = np.flatnonzero(weight[:, layer].any(-1))
            layers.setdefault(int(layer), []).append((
                torch.as_tensor(weight[chosen, layer], dtype=hooked.dtype, device=hooked.device),
                torch.as_tensor(values[layer]).to(hooked.device, hooked.dtype),
                torch.as_tensor(row[chosen], device=hooked.device)))
    return layers


def _blocks(hooked: Hooked, branches: Sequence[Branch], first: list[int], positions: list[int], length: int):
    """`layer -> [head, row, key]` of reads to remove, or None where no branch blocks any."""
    wanted = [(row, block) for branch, row in zip(branches, first, strict=True)
              for block in branch.interventions if isinstance(block, BlockReads)]
    if not wanted:
        return None

    def blocked(layer: int) -> Tensor | None:
        here = [(row, [h.head for h in block.heads if h.layer == layer], block) for row, block in wanted]
        if not any(heads for _, heads, _ in here):
            return None
        cut = torch.zeros(hooked.n_heads, len(positions), length + len(positions), dtype=torch.bool)
        for row, heads, block in here:
            cut[heads, row, :length] |= torch.as_tensor(block.keys(length, positions[row]))
        return cut.to(hooked.device)

    return blocked


@torch.no_grad()
def clean_z(hooked: Hooked, prefix: Prefix, positions: Sequence[int], memory: int = MEMORY) -> Float[Tensor, "position layer head d_head"]:
    """z of every head at some positions of a text, from clean rows."""
    branches = [Branch(position) for position in positions]
    out: list[Tensor] = [torch.empty(0)] * len(branches)
    for pack in plan_packs(hooked, branches, memory):
        layers: list[Tensor] = []

        def keep(layer: int, z: Tensor, layers: list[Tensor] = layers) -> Tensor:
            layers.append(z)
            return z

        run_pack(hooked, prefix, [branches[i] for i in pack], keep)
        stacked = torch.stack(layers, 1)
        for row, i in enumerate(pack):
            out[i] = stacked[row]
    return torch.stack(out) if out else torch.empty(0, hooked.n_layers, hooked.n_heads, hooked.d_head)
