"""Branches: many counterfactual continuations of one prefilled text in one forward.

An intervention at position `t` leaves keys and values before `t` untouched, so one prefill serves
every intervention on every event of a text. A branch is a position, the tokens from there on (by
default the text's own), and interventions at its first row. Branches are packed side by side into
one sequence: each row keeps its true position and sees the prefix up to its own `t` and the earlier
rows of its own branch, nothing else. A row that changes nothing below layer l enters at layer l.
Packs are cut to a memory budget; the order of branches and the size of packs change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ._cache import Prefix
from ._packs import MEMORY, each_pack, in_packs
from ._rows import Engine, Rows, ZHook
from .errors import InputError
from .interventions import READS, AddToZ, BlockReads, Intervention, Keep, KnockIn, MeanAblate, ReplaceValues
from .views import Brief


@dataclass(frozen=True, eq=False, repr=False)
class Branch(Brief):
    """A continuation of the first `position` tokens of a text.

    Attributes:
        position: `t`; the branch reads the prefix before it.
        tokens: token ids from `t` on; empty for the text's own token at `t`.
        interventions: at the branch's first row; later rows are re-run and not edited.
        everywhere: edit z at every row of the branch, not at the first alone.
        ids: token ids whose logits are wanted, in this order; None for the whole vocabulary.
    """

    position: int
    tokens: tuple[int, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    ids: tuple[int, ...] | None = None
    everywhere: bool = False

    @property
    def width(self) -> int:
        """How many rows it takes."""
        return max(1, len(self.tokens))

    def entry(self) -> int:
        """The first layer at which it differs from the clean text; 0 where it has no clean twin."""
        if self.tokens or not self.interventions:
            return 0
        first = []
        for change in self.interventions:
            if isinstance(change, (MeanAblate, KnockIn, AddToZ, *READS)):
                first += [h.layer for h in list(change.heads)[:1]]  # the lowest layer comes first
            else:
                first += [int(np.argmax(touched)) for touched in [change.edit().weight.any(1)] if touched.any()]
        return min(first, default=0)


def branch_logits(hooked: Engine, prefix: Prefix, branches: Sequence[Branch], memory: int = MEMORY) -> Iterator[tuple[int, Float[Tensor, "token vocabulary"]]]:
    """Yield `(index of the branch, float32 logits of its rows)`, pack after pack.

    Args:
        hooked: the model.
        prefix: the text, prefilled at least up to the last position of any branch.
        branches: what to run; they may stand at different positions.
        memory: bytes that one pack may take.
    """

    def logits(pack: list[int]) -> list[Float[Tensor, "token vocabulary"]]:
        with torch.no_grad():  # never around a yield: it would reach into the caller
            return run_pack(hooked, prefix, [branches[i] for i in pack])

    for pack, found in in_packs(hooked, branches, memory, logits):
        yield from zip(pack, found, strict=True)


def run_pack(hooked: Engine, prefix: Prefix, branches: Sequence[Branch], on_z: ZHook | None = None,
             on_pattern: Callable[[int, Tensor], None] | None = None) -> list[Float[Tensor, "token vocabulary"]]:
    """One packed forward, differentiable where grad is enabled: the logits of each branch.

    Args:
        on_z: called after the interventions with `(layer, z [row, head, d_head])`, rows in the order
            of the branches; returns z.
        on_pattern: called with `(layer, pattern [head, row, key])`.
    """
    watched = on_z is not None or on_pattern is not None
    plan = _Plan(hooked, prefix, branches, skip=hooked.skipping and hooked.packed and not watched)
    edits = _z_edits(hooked, branches, plan.first)
    replaced = _replaced_values(hooked, branches, plan.first)
    held, patterns = prefix.layers if replaced else (), {}
    blocks = _blocks(hooked, branches, plan.first, plan.rows, int(plan.rows.seen.max()))

    def pattern_hook(layer: int, pattern: Tensor) -> None:
        if layer in replaced:
            patterns[layer] = pattern
        if on_pattern is not None:
            on_pattern(layer, pattern)

    def z_hook(layer: int, z: Tensor) -> Tensor:
        if layer in replaced:
            z = _with_values_replaced(z, patterns.pop(layer), held[layer][1][0], replaced[layer])
        for weight, values, row, adds in edits.get(layer, ()):
            # lerp is exactly z at weight 0 and exactly the values at weight 1, for finite values
            share = weight[..., None]
            changed = z[row] + share * values if adds else torch.lerp(z[row], values.expand_as(z[row]), share)
            z = z.index_copy(0, row, torch.where(share == 0, z[row], changed))
        return on_z(layer, z) if on_z is not None else z

    wanted = tuple(sorted({i for b in branches if b.ids is not None for i in b.ids})) or None
    if not hooked.narrow:
        wanted = None
    full, narrow = hooked.run(prefix, plan.rows, z_hook if edits or replaced or on_z is not None else None, blocks, wanted,
                              pattern_hook if replaced or on_pattern is not None else None)
    return plan.share_out(full, narrow, wanted)


class _Plan:
    """Branches as rows: where each branch begins, which rows enter late, which logits are wanted."""

    def __init__(self, hooked: Engine, prefix: Prefix, branches: Sequence[Branch], skip: bool):
        for branch in branches:
            _check(hooked, prefix, branch)
        self.branches, self.all_full = branches, not hooked.narrow
        entry = [b.entry() if skip else 0 for b in branches]
        clean = {b.position for b in branches if not b.tokens and not b.interventions}
        # a clean row for every position at which rows enter late
        extra = sorted({b.position for b, e in zip(branches, entry, strict=True) if e > 0} - clean)
        order = sorted(range(len(branches)), key=lambda i: entry[i])
        tokens, positions, numbers, seen, late, full = [], [], [], [], [], []
        self.first = [0] * len(branches)
        parents: dict[int, int] = {}

        def add(number: int, position: int, own: tuple[int, ...], enters: int, whole: bool) -> int:
            start = len(tokens)
            for step, token in enumerate(own):
                if whole:
                    full.append(len(tokens))
                tokens.append(token), positions.append(position + step)
                numbers.append(number), seen.append(position), late.append(enters)
            return start

        own_token = lambda position: (int(prefix.ids[position]),)  # noqa: E731
        for number, position in enumerate(extra):
            parents[position] = add(len(branches) + number, position, own_token(position), 0, False)
        for i in order:
            branch = branches[i]
            self.first[i] = add(i, branch.position, branch.tokens or own_token(branch.position), entry[i], self.all_full or branch.ids is None)
            if not branch.tokens and not branch.interventions:
                parents.setdefault(branch.position, self.first[i])
        self.place = {row: n for n, row in enumerate(full)}
        as_tensor = lambda x: torch.tensor(x, device=hooked.device)  # noqa: E731
        skips = any(late)
        self.rows = Rows(as_tensor(tokens), as_tensor(positions), as_tensor(numbers), as_tensor(seen),
                         tuple(late) if skips else (), tuple(parents.get(p, 0) for p in positions) if skips else (),
                         tuple(full) if len(full) < len(tokens) else None)

    def share_out(self, full: Tensor, narrow: Tensor | None, wanted: tuple[int, ...] | None) -> list[Tensor]:
        """The logits of each branch, in the order they were given."""
        column = {token: n for n, token in enumerate(wanted or ())}
        few: dict[tuple[int, ...], Tensor] = {}  # the columns of each choice of ids, taken once for all rows
        out = []
        for branch, first in zip(self.branches, self.first, strict=True):
            if branch.ids == ():
                out.append(full.new_empty(branch.width, 0))
            elif branch.ids is None or self.all_full:
                logits = full[[self.place[r] for r in range(first, first + branch.width)]]
                out.append(logits if branch.ids is None else logits[:, list(branch.ids)])
            else:
                if branch.ids not in few:
                    few[branch.ids] = narrow[:, [column[i] for i in branch.ids]]
                out.append(few[branch.ids][first:first + branch.width])
        return out


def _check(hooked: Engine, prefix: Prefix, branch: Branch) -> None:
    """Refuse what would be run silently as something else."""
    if prefix.source is not None and prefix.source.hooked is not hooked:
        raise InputError(f"this text was read with another model ({prefix.source.hooked.name}) than {hooked.name}; read it again with model.read")
    if not 0 <= branch.position <= len(prefix) - (not branch.tokens):
        raise ValueError(f"a branch at position {branch.position} does not fit a prefix of {len(prefix)} tokens")
    if hooked.context and branch.position + branch.width > hooked.context:
        raise ValueError(f"a branch that ends at position {branch.position + branch.width} is longer than the {hooked.context} tokens that the model can read")
    shape = (hooked.n_layers, hooked.n_heads, hooked.d_head)
    if branch.everywhere and any(isinstance(change, READS) for change in branch.interventions):
        raise ValueError("reads are blocked at the first row of a branch only, not everywhere")
    for change in branch.interventions:
        if isinstance(change, ReplaceValues) and not hooked.weighted:
            raise InputError(f"{hooked.name}: z is not the plain weighted sum of cached values, so values cannot be replaced after softmax; use BlockReads")
        heads = getattr(change, "heads", None)
        if heads is not None and not isinstance(change, Keep):
            heads.check(hooked.n_layers, hooked.n_heads, hooked.name)
            if len(hooked.heads) < hooked.n_layers * hooked.n_heads and not heads <= hooked.heads:
                raise InputError(f"{next(iter(heads - hooked.heads))} is not a head of {hooked.name}: its layer has no attention; choose heads of other layers")
        given = next((getattr(change, name).shape for name in ("means", "donor", "values") if getattr(change, name, None) is not None), shape)
        if tuple(given) != shape:
            raise ValueError(f"values of shape {tuple(given)} do not fit {hooked.name}, whose heads are {shape}")


def _z_edits(hooked: Engine, branches: Sequence[Branch], first: list[int]) -> dict[int, list[tuple[Tensor, Tensor, Tensor, bool]]]:
    """For each layer: weights `[row, head]`, values `[head, d_head]` and rows, grouped by equal values."""
    groups: dict[tuple, tuple[np.ndarray, bool, list[int], list[np.ndarray]]] = {}
    for order in range(max((len(b.interventions) for b in branches), default=0)):
        for branch, row in zip(branches, first, strict=True):
            if order < len(branch.interventions) and not isinstance(branch.interventions[order], READS):
                edit = branch.interventions[order].edit()
                _, _, rows, weights = groups.setdefault((order, id(edit.values), edit.adds), (edit.values, edit.adds, [], []))
                count = branch.width if branch.everywhere else 1
                rows += range(row, row + count)
                weights += [edit.weight] * count
    layers: dict[int, list[tuple[Tensor, Tensor, Tensor, bool]]] = {}
    for values, adds, rows, weights in groups.values():
        weight, row = np.stack(weights), np.array(rows)
        for layer in np.flatnonzero(weight.any((0, 2))):
            chosen = np.flatnonzero(weight[:, layer].any(-1))
            layers.setdefault(int(layer), []).append((
                torch.as_tensor(weight[chosen, layer], dtype=hooked.dtype, device=hooked.device),
                torch.as_tensor(values[layer]).to(hooked.device, hooked.dtype),
                torch.as_tensor(row[chosen], device=hooked.device), adds))
    return layers


def _replaced_values(hooked: Engine, branches: Sequence[Branch], first: list[int]) -> dict[int, list[tuple[int, list[int], int, int, Tensor | None]]]:
    """For each layer: row, its heads, the span, and what they get from it instead `[head, d_head]`."""
    layers: dict[int, list] = {}
    for branch, row in zip(branches, first, strict=True):
        for change in branch.interventions:
            if isinstance(change, ReplaceValues):
                for layer in change.heads.per_layer():
                    heads = [h.head for h in change.heads if h.layer == layer]
                    instead = None if change.values is None else torch.as_tensor(change.values[layer][heads]).to(hooked.device, hooked.dtype)
                    layers.setdefault(layer, []).append((row, heads, change.start, min(change.end, branch.position), instead))
    return layers


def _with_values_replaced(z: Tensor, pattern: Float[Tensor, "head row key"], values: Float[Tensor, "kv_head position d_head"], changes: list) -> Float[Tensor, "row head d_head"]:
    z, group = z.clone(), z.shape[1] // len(values)
    for row, heads, start, end, instead in changes:
        weight = pattern[heads, row, start:end]
        given = torch.einsum("hk,hkd->hd", weight, values[[h // group for h in heads], start:end])
        z[row, heads] += (0 if instead is None else weight.sum(-1, keepdim=True) * instead) - given
    return z


def _blocks(hooked: Engine, branches: Sequence[Branch], first: list[int], rows: Rows, length: int):
    """`layer -> [head, row, key]` of reads to remove, or None where no branch blocks any."""
    wanted = [(row, branch.position, block) for branch, row in zip(branches, first, strict=True)
              for block in branch.interventions if isinstance(block, BlockReads)]
    if not wanted:
        return None

    def blocked(layer: int) -> Tensor | None:
        here = [(row, position, [h.head for h in block.heads if h.layer == layer], block) for row, position, block in wanted]
        if not any(heads for _, _, heads, _ in here):
            return None
        cut = torch.zeros(hooked.n_heads, len(rows), length + len(rows), dtype=torch.bool)
        for row, position, heads, block in here:
            cut[heads, row, :length] |= torch.as_tensor(block.keys(length, position))
        return cut.to(hooked.device)

    return blocked


@torch.no_grad()
def clean_z(hooked: Engine, prefix: Prefix, positions: Sequence[int], memory: int = MEMORY) -> Float[Tensor, "position layer head d_head"]:
    """z of every head at some positions of a text, from clean rows; zeros where a layer has no heads."""
    branches = [Branch(position, ids=()) for position in positions]
    out = torch.zeros(len(branches), hooked.n_layers, hooked.n_heads, hooked.d_head, dtype=hooked.dtype, device=hooked.device)

    def read(pack: list[int]) -> None:
        def keep(layer: int, z: Tensor) -> Tensor:
            out[pack, layer] = z
            return z

        run_pack(hooked, prefix, [branches[i] for i in pack], keep)

    each_pack(hooked, branches, memory, read)
    return out
