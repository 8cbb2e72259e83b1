"""Knock-in: z of a set of heads at one decision, put into another transcript's decision.

Donor A and recipient B are events in different transcripts (and groups), aligned by decision, so their contexts
may have any lengths. The *true* donor is of B's kind and chose another token that is live at B. It fixes the pair
`(a_A, a_B)` of what each chose, and *every* control is scored on that pair, one draw for each recipient:

    shift = (logit[a_A] - logit[a_B]) after - before, in logits; positive: B moves towards A's choice

identity
    B's own z; must change nothing at all
other kind
    negative: the donor is an event of another kind
own label
    negative: of B's kind, and wrote B's label by the same token a_B; no shift upwards where heads carry the label itself
same token, other region
    negative: of B's kind, and chose a_A in another region than A's; none where the token names the region
random heads
    negative: the true donor's z in as many other heads of each layer (fewer where a layer has too few others)
noise
    negative: B's own z moved, in each head, in a random direction and as far as the true donor's z is away
another donor of the label
    positive: of B's kind, in a third transcript, and wrote A's label by the same token a_A

The claim is that the true donor beats each negative control: its p-value is their largest.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Shaped

from ._processes import spread
from .ablation import check_clean
from .branches import MEMORY, Branch, branch_logits, clean_z, run_pack
from .calibration import bootstrap_interval, p_value
from .decisions import DecisionEvent, Kind, check_kind
from .heads import HeadSet
from .interventions import KnockIn
from .views import Viewed

if TYPE_CHECKING:
    import pandas as pd

    from .model import DecisionModel, Reading

Array = np.ndarray
CONTROLS = ("true", "identity", "other kind", "own label", "same token, other region", "random heads", "noise", "another donor of the label")
NEGATIVE, DRAWN = CONTROLS[2:7], (CONTROLS[0], *CONTROLS[2:5], CONTROLS[7])  # DRAWN: those that have a donor event of their own
ROLES = {"true": "true", "identity": "identity", **dict.fromkeys(NEGATIVE, "negative"), CONTROLS[7]: "positive"}
FEWEST, FLIPS = 6, 9_999  # transcripts (or groups), below which p-values and intervals are undefined; random sign flips


@dataclass(frozen=True, eq=False)
class KnockedIn(Viewed):
    """What knock-in did, for each recipient that has a true donor. NaN: the recipient has no donor for the control.

    Attributes:
        controls: names of the rows below, the true donor among them.
        shift: `[control, recipient]` in logits; of the identity, the largest change of any logit (0 exactly).
        flipped: `[control, recipient]` 1 where a_A is now the best of B's live tokens, else 0.
        pairs: `(true donor, recipient)`, names of events.
        donors: control -> name of the donor of each recipient, or None; only controls that draw one.
        transcripts, groups: of each recipient; the group is the transcript where none is given.
        without_donor: how many events have no true donor.
    """

    controls: tuple[str, ...]
    shift: Float[Array, "control recipient"]
    flipped: Float[Array, "control recipient"]
    pairs: tuple[tuple[str, str], ...]
    donors: Mapping[str, tuple[str | None, ...]]
    transcripts: tuple[str, ...]
    groups: tuple[str, ...]
    without_donor: int

    def of(self, control: str) -> Float[Array, " recipient"]:
        """Shifts with one control."""
        return self.shift[self.controls.index(control)]

    @cached_property
    def p(self) -> dict[str, float]:
        """control -> p of the true donor's shift being no larger, over recipients that have both; NaN where undefined."""
        both = {c: self.of("true") - self.of(c) for c in self.controls if ROLES[c] in ("negative", "positive")}
        return {c: beats(d[np.isfinite(d)], np.array(self.groups, str)[np.isfinite(d)]) for c, d in both.items()}

    @property
    def claim_p(self) -> float:
        """Largest p of the negative controls that are defined: "the true donor beats each of them"."""
        return max((p for c, p in self.p.items() if ROLES[c] == "negative" and np.isfinite(p)), default=float("nan"))

    def rows(self) -> list[dict]:
        """For each control: `control, role, n` recipients, mean `shift` with its 95% limits `low, high`, share `flipped`, and `p`."""
        found = []
        for control, shift, flipped in zip(self.controls, self.shift, self.flipped, strict=True):
            has = np.isfinite(shift)
            mean = lambda x, has=has: float(x[has].mean()) if has.any() else float("nan")  # noqa: E731
            low, high = interval(shift[has], np.array(self.groups, str)[has])
            found.append({"control": control, "role": ROLES[control], "n": int(has.sum()), "shift": mean(shift), "low": low, "high": high,
                          "flipped": mean(flipped), "p": self.p.get(control, float("nan"))})
        return found

    def to_frame(self) -> pd.DataFrame:
        """One row for each control; see `rows`."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def summary(self) -> dict:
        """The figures as plain numbers to six digits, None where undefined. `shift` and `flipped` are the true donor's,
        `random_shift` that of random heads, `identity` the largest change that any recipient's own z made."""
        number = lambda x: float(f"{x:.6g}") if np.isfinite(x) else None  # noqa: E731
        controls = {r["control"]: {"n": r["n"], **{k: number(r[k]) for k in ("shift", "low", "high", "flipped", "p")}} for r in self.rows()}
        return {"recipients": len(self.pairs), "without_donor": self.without_donor, "p": number(self.claim_p), "controls": controls,
                "shift": controls["true"]["shift"], "flipped": controls["true"]["flipped"], "random_shift": controls["random heads"]["shift"],
                "identity": number(self.of("identity").max(initial=-np.inf))}

    def __repr__(self) -> str:
        if not len(self.pairs):
            return f"KnockedIn(no recipient with a donor, {self.without_donor} without)"
        true, named = self.rows()[0], lambda found: ", ".join(f"'{c}'" for c in found)
        lost, missing = [c for c in NEGATIVE if self.p[c] > 0.05], [c for c in NEGATIVE if not np.isfinite(self.p[c])]
        if len(missing) == len(NEGATIVE):
            claim = "no negative control has a p-value"
        else:
            claim = f"does not beat {named(lost)}" if lost else f"beats all {len(NEGATIVE) - len(missing)} negative controls that can be tested"
            claim += f", p {self.claim_p:.2g}" + (f" (not tested: {named(missing)})" if missing else "")
        return (f"KnockedIn({len(self.pairs)} recipients: shift {true['shift']:+.2f} logits, {true['flipped']:.0%} flipped; {claim}; "
                f"identity {self.of('identity').max():g})")


class Recipient(NamedTuple):
    """An event with the donors that were drawn for it: control -> event; controls without a donor are left out."""

    reading: Reading
    event: DecisionEvent
    donors: dict[str, DecisionEvent]


def knock_in(model: DecisionModel, readings: Sequence[Reading], heads: HeadSet, kind: Kind, *, seed: int = 0, memory: int = MEMORY) -> KnockedIn:
    """Knock `heads` of one random donor into every recipient event of a kind, with all controls.

    Args:
        readings: transcripts with their events; donors and recipients both come from them.
        heads: the set to transplant; the empty set changes nothing.
        kind: kind of events.
        seed: of donors, random heads and noise; donors do not depend on `heads`.

    Raises:
        InputError: for an unknown kind, or heads that the model does not have.
        ExactnessError: if the clean rows differ from the plain model's logits.
    """
    check_kind(kind)
    heads.check(model.n_layers, model.n_heads, model.name)
    recipients, without = draw_donors(readings, kind, seed)
    used = {e.name for b in recipients for e in (b.event, *b.donors.values())}

    def own_z(reading: Reading) -> dict[str, Array]:
        events = [e for e in reading.events if e.name in used]
        return dict(zip((e.name for e in events), as_array(clean_z(model.hooked, reading.prefix, [e.position for e in events], memory)), strict=True))

    z = {name: value for found in spread(own_z, readings) for name, value in found.items()}
    rng, size = np.random.default_rng([seed, 1]), (model.n_layers, model.n_heads, model.hooked.d_head)
    # drawn in order, before texts are spread: who works on one does not know what was drawn for the others
    draws = [(random_heads(heads, model.n_layers, model.n_heads, rng), rng.standard_normal(size)) for _ in recipients]

    def into(reading: Reading) -> list[tuple[int, int, float, bool]]:
        mine, found = [n for n, b in enumerate(recipients) if b.reading is reading], []
        given = {n: changes(recipients[n], z, heads, *draws[n]) for n in mine}
        jobs = [(n, c) for n in mine for c in ("clean", *(given[n] if len(heads) else ()))]  # no head, no change: those are the clean row
        branches = [Branch(e.position) if c == "clean" else Branch(e.position, (), (given[n][c],), e.alternatives)
                    for n, c in jobs for e in [recipients[n].event]]
        out = {jobs[i]: rows[0] for i, rows in branch_logits(model.hooked, reading.prefix, branches, memory)}
        for n in mine:
            event, towards = recipients[n].event, recipients[n].donors["true"].chosen
            check_clean(reading, event, out[n, "clean"], model.hooked.limit)
            live = event.alternatives
            before = out[n, "clean"][list(live)]
            pair = lambda x, a=live.index(towards), b=live.index(event.chosen): float(x[a] - x[b])  # noqa: E731
            for control in ("identity", *given[n]):
                row, after = CONTROLS.index(control), out.get((n, control), before)
                change = identity_change(model, reading, event, heads) if control == "identity" else pair(after) - pair(before)
                found.append((row, n, change, live[int(after.argmax())] == towards))
        return found

    shift, flipped = np.full((2, len(CONTROLS), len(recipients)), np.nan)
    for row, n, change, flip in (x for found in spread(into, readings) for x in found):
        shift[row, n], flipped[row, n] = change, flip
    drawn = {c: tuple(b.donors[c].name if c in b.donors else None for b in recipients) for c in DRAWN}
    return KnockedIn(CONTROLS, shift, flipped, tuple((b.donors["true"].name, b.event.name) for b in recipients), drawn,
                     tuple(b.event.transcript for b in recipients), tuple(_unit(b.reading) for b in recipients), without)


def draw_donors(readings: Sequence[Reading], kind: Kind, seed: int = 0) -> tuple[list[Recipient], int]:
    """The recipients of a kind with one random donor for each control that needs one, and how many events have no true donor."""
    rng = np.random.default_rng(seed)
    every = [(_unit(r), r, e) for r in readings for e in r.events if e.primary]
    found, without = [], 0
    for unit, reading, b in (x for x in every if x[2].kind == kind):
        away = [(u, e) for u, _, e in every if u != unit]
        same = [(u, e) for u, e in away if e.kind == kind]
        live = [(u, e) for u, e in same if e.chosen != b.chosen and e.chosen in b.alternatives]
        if not live:
            without += 1
            continue
        third, a = live[rng.integers(len(live))]
        pools = {
            "true": [a],
            "other kind": [e for _, e in away if e.kind != kind],
            # by the same token: a label that was written may have been decided at another one
            "own label": [e for _, e in same if e.label == b.label and e.chosen == b.chosen],
            "same token, other region": [e for _, e in same if e.chosen == a.chosen and e.region != a.region],
            "another donor of the label": [e for u, e in same if u != third and e.label == a.label and e.chosen == a.chosen]}
        found.append(Recipient(reading, b, {control: pool[rng.integers(len(pool))] for control, pool in pools.items() if pool}))
    return found, without


def changes(b: Recipient, z: Mapping[str, Array], heads: HeadSet, others: HeadSet, noise: Float[Array, "layer head d_head"]) -> dict[str, KnockIn]:
    """What is done to a recipient: control -> intervention.

    Args:
        z: name of an event -> its own z `[layer, head, d_head]`.
        others: the random heads; if there are none for a set that has some, the control is left out.
        noise: of which the direction is used.
    """
    own, true = z[b.event.name], z[b.donors["true"].name]
    given = {control: KnockIn(heads, z[e.name]) for control, e in b.donors.items()}
    if len(others) or not len(heads):
        given["random heads"] = KnockIn(others, true)
    norm = lambda x: np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True)  # noqa: E731
    # put in, not added: z of a later layer has moved by then, and would end up at another distance
    given["noise"] = KnockIn(heads, (own + noise / norm(noise) * norm(true - own)).astype(own.dtype))
    return given


def beats(differences: Float[Array, " recipient"], groups: Shaped[Array, " recipient"], *, draws: int = FLIPS, seed: int = 0) -> float:
    """One-sided p-value of a positive mean of paired differences, flipping the sign of whole transcripts or groups.

    All `2^n - 1` other flips where they are no more than `draws`, else random ones; NaN under six groups.
    """
    _, number = np.unique(groups, return_inverse=True)
    sums = np.bincount(number, differences)
    n = len(sums)
    if n < FEWEST:
        return float("nan")
    signs = np.random.default_rng(seed).choice([1.0, -1.0], (draws, n))
    if 2**n - 1 <= draws:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=n)))[1:]
    return p_value(sums.sum(), signs @ sums)


def interval(values: Float[Array, " recipient"], groups: Shaped[Array, " recipient"]) -> tuple[float, float]:
    """95% limits of a mean, drawing whole transcripts or groups; NaN under six."""
    names, number = np.unique(groups, return_inverse=True)
    if len(names) < FEWEST:
        return float("nan"), float("nan")
    low, high = bootstrap_interval(values[:, None], number)
    return float(low[0]), float(high[0])


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


def _unit(reading: Reading) -> str:
    """What is independent of other texts: the group, or where none is given the transcript."""
    return reading.transcript.group or reading.transcript.id
