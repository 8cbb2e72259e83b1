"""Knock-in: z of a set of heads at one decision, put into another transcript's decision.

Donor A and recipient B are events of the same kind in different transcripts, aligned by decision, so
their contexts may have any lengths. The pair `(a_A, a_B)` of what each chose is fixed by the true donor
(both tokens live at B, and different), and *everything* is scored on that pair:

    shift = (logit[a_A] - logit[a_B]) after - before, in logits; positive: B moves towards A's choice

Controls: identity (B's own z; exactly 0), and other heads, as many in each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float

from .ablation import check_clean
from .branches import MEMORY, Branch, branch_logits, clean_z, run_pack
from .events import DecisionEvent
from .heads import HeadSet
from .interventions import KnockIn

if TYPE_CHECKING:
    from .model import DecisionModel, Reading

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class KnockedIn:
    """What knock-in did, for each recipient that has a donor.

    Attributes:
        shift: `[recipient]` with the true donor, logits.
        random_shift: `[recipient]` with as many other heads in each layer.
        identity: `[recipient]` largest change of any logit when B's own z is put in; 0 exactly.
        flipped: `[recipient]` whether a_A is now the best among B's live tokens.
        pairs: `(donor event, recipient event)` names.
        without_donor: how many recipients had none.
    """

    shift: Float[Array, " recipient"]
    random_shift: Float[Array, " recipient"]
    identity: Float[Array, " recipient"]
    flipped: Float[Array, " recipient"]
    pairs: tuple[tuple[str, str], ...]
    without_donor: int

    def __repr__(self) -> str:
        if not len(self.shift):
            return f"KnockedIn(no recipient with a donor, {self.without_donor} without)"
        return (f"KnockedIn({len(self.shift)} recipients: shift {self.shift.mean():+.2f} logits, {self.flipped.mean():.0%} flipped; "
                f"other heads {self.random_shift.mean():+.2f}; identity {self.identity.max():g})")


def knock_in(model: DecisionModel, readings: Sequence[Reading], heads: HeadSet, kind: str, *, seed: int = 0, memory: int = MEMORY) -> KnockedIn:
    """Knock `heads` of one random donor into every recipient event of a kind.

    Args:
        readings: transcripts with their events; donors and recipients both come from them.
        heads: the set to transplant; the empty set changes nothing.
        kind: kind of events.
        seed: of the choice of donors and of random heads.
    """
    rng = np.random.default_rng(seed)
    events = [(r, e) for r in readings for e in r.events if e.kind == kind and e.primary]
    z = {r.transcript.id: as_array(clean_z(model.hooked, r.prefix, [e.position for e in r.events], memory)) for r in readings}
    own = lambda r, e: z[r.transcript.id][r.events.index(e)]  # noqa: E731
    rows, pairs, without = [], [], 0
    for reading, event in events:
        donors = [(r, e) for r, e in events if r is not reading and e.chosen != event.chosen and e.chosen in event.alternatives]
        if not donors:
            without += 1
            continue
        donor_reading, donor = donors[rng.integers(len(donors))]
        others = random_heads(heads, model.n_layers, model.n_heads, rng)
        given = own(donor_reading, donor)
        branches = [Branch(event.position), Branch(event.position, (), (KnockIn(heads, given),)), Branch(event.position, (), (KnockIn(others, given),))]
        clean, true, random = (logits[0] for _, logits in sorted(branch_logits(model.hooked, reading.prefix, branches, memory)))
        check_clean(reading, event, clean, model.hooked.limit)
        pair = lambda logits, a=donor.chosen, b=event.chosen: float(logits[a] - logits[b])  # noqa: E731
        best = event.alternatives[int(true[list(event.alternatives)].argmax())]
        rows.append((pair(true) - pair(clean), pair(random) - pair(clean), identity_change(model, reading, event, heads), best == donor.chosen))
        pairs.append((donor.name, event.name))
    table = np.array(rows, np.float64).reshape(-1, 4)
    return KnockedIn(*table.T, tuple(pairs), without)


@torch.no_grad()
def identity_change(model: DecisionModel, reading: Reading, event: DecisionEvent, heads: HeadSet) -> float:
    """Largest change of any logit when an event's own z is put in, through the same hooks; 0 exactly.

    Both forwards have one row, so that their sums are taken in the same order.
    """
    hooked = model.hooked
    own = as_array(torch.zeros(hooked.n_layers, hooked.n_heads, hooked.d_head, dtype=hooked.dtype))

    def keep(layer: int, z: torch.Tensor) -> torch.Tensor:
        own[layer] = as_array(z[0])
        return z

    clean = run_pack(hooked, reading.prefix, [Branch(event.position)], keep)[0]
    # on_z, so that the row runs through every layer as the clean one did
    again = run_pack(hooked, reading.prefix, [Branch(event.position, (), (KnockIn(heads, own),))], lambda layer, z: z)[0]
    return float((again - clean).abs().max())


def as_array(z: torch.Tensor) -> np.ndarray:
    """z for an intervention; numpy has no bfloat16, and float32 holds it exactly."""
    return (z.float() if z.dtype == torch.bfloat16 else z).cpu().numpy()


def random_heads(heads: HeadSet, n_layers: int, n_heads: int, rng: np.random.Generator) -> HeadSet:
    """As many heads in each layer, none of `heads` itself; fewer where a layer has too few others."""
    found = []
    for layer, count in heads.per_layer().items():
        free = [h for h in range(n_heads) if (layer, h) not in heads]
        found += [(layer, int(h)) for h in rng.permutation(free)[:count]]
    return HeadSet(found)
