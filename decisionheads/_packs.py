"""Packs: branches cut to a memory budget, and cut again where the memory is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from ._keeping import note
from ._rows import Engine
from .errors import InputError

if TYPE_CHECKING:
    from .branches import Branch

MEMORY = 512 * 2**20  # bytes for the attention scores of one pack and what goes with them
ROWS = 256  # rows of one pack: what they might read of each other is computed and thrown away
Result = TypeVar("Result")


def in_packs(hooked: Engine, branches: Sequence[Branch], memory: int, work: Callable[[list[int]], Result]) -> Iterator[tuple[list[int], Result]]:
    """Work on pack after pack: `(indices of its branches, result)`.

    A pack for which memory runs out is cut in half and worked on again, and so are those that follow; that is said. `work` may
    write where a second call writes the same.

    Raises:
        InputError: where there is not even memory for a single branch.
    """
    waiting = plan_packs(hooked, branches, memory)
    while waiting:
        pack, *waiting = waiting
        failed = False
        try:
            found = work(pack)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            failed = True  # gone on with outside of this handler, whose traceback holds on to what was allocated
        if not failed:
            yield pack, found
            continue
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(pack) == 1:
            raise InputError(f"{hooked.name}: out of memory for a single row at position {branches[pack[0]].position}; take a machine with more, a smaller dtype, or shorter texts")
        most = len(pack) // 2
        waiting = [part[i:i + most] for part in (pack, *waiting) for i in range(0, len(part), most)]
        note(f"out of memory with {len(pack)} rows at once: going on with {most}; a lower memory budget saves the trying")


def each_pack(hooked: Engine, branches: Sequence[Branch], memory: int, work: Callable[[list[int]], None]) -> None:
    """Work on every pack for what it leaves behind; see `in_packs`."""
    for _ in in_packs(hooked, branches, memory, work):
        pass


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on whatever device."""
    said = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in said or "not enough memory" in said or "can't allocate memory" in said


def plan_packs(hooked: Engine, branches: Sequence[Branch], memory: int = MEMORY) -> list[list[int]]:
    """Cut branches into packs of at most `memory` bytes and `ROWS` rows, those of nearby positions together.

    Where branches cannot be packed, those of one position and length make a batch.
    """
    if memory < 1:
        raise ValueError("the memory budget must be positive")
    alike = (lambda b: 0) if hooked.packed else (lambda b: (b.position, b.width))
    order = sorted(range(len(branches)), key=lambda i: (branches[i].position, 0 if hooked.packed else branches[i].width))
    packs: list[list[int]] = []
    rows = full = 0
    for i in order:
        count = branches[i].width
        whole = count if branches[i].ids is None else 0
        if packs and rows + count <= ROWS and alike(branches[packs[-1][0]]) == alike(branches[i]) and pack_bytes(hooked, branches[i].position, rows + count, full + whole) <= memory:
            packs[-1].append(i)
            rows, full = rows + count, full + whole
        else:
            packs.append([i])
            rows, full = count, whole
    return packs


def pack_bytes(hooked: Engine, length: int, rows: int, full: int) -> int:
    """Bytes that a pack needs: scores and weights of one layer, masks, keys, logits.

    Args:
        length: positions of the prefix.
        rows: how many.
        full: those of them whose logits are all wanted.
    """
    edits = 2 * rows * hooked.n_layers * hooked.n_heads
    if not hooked.packed:  # each row holds keys and values of its own in every layer
        keys = 2 * hooked.n_layers * rows * (length + 1) * hooked.n_heads * hooked.d_head
        return 4 * (keys + 3 * hooked.n_heads * rows * (length + 1) + rows * hooked.vocabulary + edits)
    scores = 3 * hooked.n_heads * rows * (length + rows)
    repeated = 2 * hooked.n_heads * (length + rows) * hooked.d_head
    return 4 * (scores + repeated + (full if hooked.narrow else rows) * hooked.vocabulary + edits)
