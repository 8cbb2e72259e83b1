"""Several processes on one run: each takes its share of the texts, and all go on with everybody's results.

Every process runs the same program. Where it comes to a list of texts, `spread` gives each process a part
of them and hands all results to all, in order, so that whatever is concluded afterwards is concluded alike.
Started by `accelerate launch` or `torchrun`; alone, `spread` is a plain loop.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

Item, Result = TypeVar("Item"), TypeVar("Result")
PATIENCE = timedelta(days=7)  # a process may wait as long for the others; a failed one ends all


class _Crew:
    """Of how many processes this is which."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size, self.busy = rank, size, False


_crew = _Crew()


@contextmanager
def working_together(device: str | None = None) -> Iterator[int]:
    """For the length of one run: split its texts over the processes that were started for it.

    Args:
        device: where the model will be; "cpu" keeps accelerators out of it.

    Yields:
        the number of this process on its machine, 0 where there is one.
    """
    global _crew
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "LOCAL_RANK" not in os.environ:
        yield 0
        return
    import torch
    from accelerate import PartialState

    alone = torch.distributed.is_initialized()  # somebody else's group is left as it is
    state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available(), backend="gloo", timeout=PATIENCE)
    _crew = _Crew(state.process_index, state.num_processes)
    try:
        yield state.local_process_index
    finally:
        _crew = _Crew()
        if not alone:
            gc.collect()  # whatever still holds the group would end the process when it is gone
            state.destroy_process_group()


def first() -> bool:
    """Whether this process writes files and speaks; one of them does."""
    return _crew.rank == 0


def agreed(value: Any) -> Any:
    """What the first process says, in all of them; also a place where all wait for each other."""
    if _crew.size == 1 or _crew.busy:
        return value
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]


def spread(work: Callable[[Item], Result], items: Iterable[Item], *, by: Callable[[Item], Hashable] | None = None,
           unpack: Callable[[Result], Result] | None = None) -> list[Result]:
    """`[work(item) for item in items]`, each process doing its share.

    Args:
        work: must depend on its item alone, and give something that can be pickled.
        by: items of which this is equal go to one process: those of one text, whose keys it then has at hand.
        unpack: puts a result that came from elsewhere into place (on this device, say).
    """
    if _crew.size == 1 or _crew.busy:
        return [work(item) for item in items]
    from accelerate.utils import gather_object

    _crew.busy = True  # a share is worked on alone, whatever `work` itself would spread
    number: dict[Hashable, int] = {}
    try:
        mine = [(i, work(item)) for i, item in enumerate(items) if number.setdefault(i if by is None else by(item), len(number)) % _crew.size == _crew.rank]
    finally:
        _crew.busy = False
    own = dict(mine)
    found = {i: own[i] if i in own else result if unpack is None else unpack(result) for i, result in gather_object(mine)}
    return [found[i] for i in range(len(found))]
