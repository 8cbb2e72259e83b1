"""Head sets: which few heads carry a kind of decision together.

Any set is measured both ways, ablated and alone; a set is selected on one split by its joint recovery

    R = sum(m(all but S ablated) - m0) / sum(m - m0)

where `m0` is the margin with every head ablated, and judged on another split (`necessity`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float

from ._cache import Prefix
from ._keeping import kept
from ._processes import spread
from .ablation import ReferenceMeans, event_margin
from .branches import MEMORY, Branch, branch_logits
from .decisions import Kind, check_kind
from .errors import InputError
from .heads import Head, HeadSet
from .interventions import Keep, MeanAblate
from .margin import Margin
from .views import Brief, Viewed

if TYPE_CHECKING:
    import pandas as pd

    from .model import DecisionModel, Reading

Array = np.ndarray
WORTH_KEEPING = 8  # sets, from which on what a text gives is kept for a run that is gone on with


@dataclass(frozen=True, eq=False, repr=False)
class Case(Brief):
    """One decision, ready to be measured with any set of heads ablated.

    Attributes:
        answer: position of the first token of the answer.
        everywhere: ablate at all positions from there on, up to the decision; else at the decision alone.
    """

    prefix: Prefix
    position: int
    zbar: Float[Array, "layer head d_head"]
    margin: Margin
    alternatives: tuple[int, ...]
    transcript: str
    group: str
    answer: int
    everywhere: bool = False

    def branch(self, change: tuple, ids: tuple[int, ...]) -> Branch:
        """The decision's last row is the one that is read."""
        if not self.everywhere:
            return Branch(self.position, (), change, ids)
        begin = min(self.answer, self.position)
        return Branch(begin, tuple(self.prefix.ids[begin:self.position + 1].tolist()), change, ids, everywhere=True)


def cases_of(readings: Iterable[Reading], kind: Kind, means: ReferenceMeans) -> list[Case]:
    """The primary events of a kind; raises InputError if a transcript, or its group, is of the reference split, or for an unknown kind."""
    check_kind(kind)
    found = []
    for r in readings:
        answer = int(r.encoded.tokens_in(r.transcript.answer_start, len(r.transcript.text))[0])
        found += [Case(r.prefix, e.position, means.of(e, r.transcript.group), event_margin(r, e), e.alternatives, e.transcript, r.transcript.group or e.transcript, answer)
                  for e in r.events if e.kind == kind and e.primary]
    return found


def with_reference(cases: Sequence[Case], zbar: Callable[[int], Float[Array, "layer head d_head"]]) -> list[Case]:
    """The same decisions, ablated with other values: `zbar(i)` for the i-th."""
    return [replace(c, zbar=zbar(i)) for i, c in enumerate(cases)]


@dataclass(frozen=True, eq=False, repr=False)
class SetMargins(Brief):
    """Margins with sets of heads ablated, and with all others ablated.

    Attributes:
        m, m0: clean, and with every head ablated, in logits.
        without, only: with each set ablated, and with all heads but the set ablated.
        kept_without, kept_only: whether the chosen token is still the best of all alternatives.
    """

    m: Float[Array, " case"]
    m0: Float[Array, " case"]
    without: Float[Array, "set case"]
    only: Float[Array, "set case"]
    kept_without: Bool[Array, "set case"]
    kept_only: Bool[Array, "set case"]


def set_margins(model: DecisionModel, cases: Sequence[Case], sets: Sequence[HeadSet], *, without: bool = True, only: bool = True, memory: int = MEMORY) -> SetMargins:
    """Measure every set at every case; the empty set is exactly `m` and `m0`.

    Args:
        without: measure each set ablated; if not wanted, those stay clean.
        only: measure all heads but each set ablated; if not wanted, those stay `m0`.
    """
    m, m0 = np.zeros(len(cases), np.float32), np.zeros(len(cases), np.float32)
    margins = np.zeros((2, len(sets), len(cases)), np.float32)
    still = np.zeros((2, len(sets), len(cases)), bool)
    wanted = [(s, which) for which, asked in enumerate((without, only)) for s, heads in enumerate(sets) if asked and len(heads)]

    def of_text(mine: list[int]) -> dict[str, Array]:
        about = [x for i in mine for x in (cases[i].transcript, cases[i].position, cases[i].margin.chosen, cases[i].margin.against, cases[i].alternatives, cases[i].everywhere, cases[i].answer, cases[i].zbar)]
        measure = lambda: margins_of(mine)  # noqa: E731
        return kept("sets", [without, only, *(s.digest for s in sets), *about], measure) if len(sets) >= WORTH_KEEPING else measure()

    def margins_of(mine: list[int]) -> dict[str, Array]:
        branches: list[Branch] = []
        place: list[tuple[int, int]] = []  # case, and its row
        jobs = [(-1, 0), (-1, 1), *wanted]  # set -1: the clean text, and m0
        ids = {i: tuple(sorted({cases[i].margin.chosen, *cases[i].margin.against, *cases[i].alternatives})) for i in mine}
        for i in mine:
            c = cases[i]
            for n, (s, which) in enumerate(jobs):
                change = () if (s, which) == (-1, 0) else ((MeanAblate, Keep)[which](sets[s] if s >= 0 else HeadSet(), c.zbar),)
                branches.append(c.branch(change, ids[i]))
                place.append((i, n))
        logits = {i: torch.empty(len(jobs), len(ids[i])) for i in mine}
        for n, rows in branch_logits(model.hooked, cases[mine[0]].prefix, branches, memory):
            i, row = place[n]
            logits[i][row] = rows[-1]
        value = [cases[i].margin.among(ids[i])(logits[i]).numpy() for i in mine]
        best = [(logits[i][:, [ids[i].index(a) for a in cases[i].alternatives]].argmax(1) == cases[i].alternatives.index(cases[i].margin.chosen)).numpy() for i in mine]
        return {"margins": np.stack(value), "best": np.stack(best)}

    texts: dict[int, list[int]] = {}
    for i, c in enumerate(cases):
        texts.setdefault(id(c.prefix), []).append(i)
    which, where = np.array([w for _, w in wanted], int), np.array([s for s, _ in wanted], int)
    for mine, found in zip(texts.values(), spread(of_text, list(texts.values())), strict=True):
        for i, value, best in zip(mine, found["margins"], found["best"], strict=True):
            m[i], m0[i] = value[:2]
            margins[:, :, i], still[:, :, i] = value[:2, None], best[:2, None]  # the empty set, and what is not wanted
            margins[which, where, i], still[which, where, i] = value[2:], best[2:]
    return SetMargins(m, m0, margins[0], margins[1], still[0], still[1])


def pooled_recovery(found: SetMargins) -> Float[Array, " set"]:
    """R over all cases together."""
    return (found.only - found.m0).sum(1, dtype=np.float64) / (found.m - found.m0).sum(dtype=np.float64)


# -- selection ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Selection(Viewed):
    """A set, frozen.

    Attributes:
        heads: what was kept.
        recovery: joint recovery of the set, on the split it was selected on.
        added: helpers that the candidates needed to reach the target.
        removed: `(head, recovery after it)`, in order.
        reached: whether the target was reached at all.
        seen: ids and groups of the transcripts it was selected on, which may not judge it.
    """

    heads: HeadSet
    recovery: float
    added: tuple[Head, ...]
    removed: tuple[tuple[Head, float], ...]
    reached: bool
    seen: frozenset[str] = frozenset()

    @property
    def digest(self) -> str:
        """Content hash of the set."""
        return self.heads.digest

    def to_frame(self) -> pd.DataFrame:
        """One row for each head that was tried: `kept`, whether it was a helper, and the recovery once it was removed."""
        import pandas as pd

        removed, tried = dict(self.removed), sorted({*self.heads, *(h for h, _ in self.removed)})
        return pd.DataFrame([{"layer": h.layer, "head": h.head, "kept": h in self.heads, "helper": h in self.added, "recovery_without": removed.get(h, np.nan)} for h in tried],
                            columns=["layer", "head", "kept", "helper", "recovery_without"])

    def __repr__(self) -> str:
        helped = f", {len(self.added)} helpers tried" if self.added else ""
        return f"Selection({self.heads!r}, recovery {self.recovery:.2f}{'' if self.reached else ', short of the target'}{helped})"


def select(model: DecisionModel, cases: Sequence[Case], candidates: HeadSet, *, target: float = 0.8, memory: int = MEMORY) -> Selection:
    """Eliminate candidates backward, by joint recovery, as long as the rest reaches the target (or, where
    the target is out of reach, does no worse).

    All members are scored again at each step: a ranking is not monotone where heads back each other up,
    and going forward gets stuck where two are needed together. Candidates that fall short of the target
    together are joined first by helpers, as few as reach it: heads that add most to their joint recovery, or
    that matter most once they are ablated. Without a candidate nothing is selected.
    """
    if not cases:
        raise InputError("there is no decision of this kind in the selection split; add transcripts")
    score = lambda sets: pooled_recovery(set_margins(model, cases, sets, without=False, memory=memory))  # noqa: E731
    heads, added, removed = candidates, [], []
    recovery = float(score([heads])[0])
    if recovery < target and len(candidates):
        helpers = _helpers(model, cases, candidates, recovery, memory)
        scores = score([candidates | HeadSet(helpers[:n]) for n in range(1, len(helpers) + 1)]) if helpers else np.zeros(0)
        enough = np.flatnonzero(scores >= target)
        added = helpers[:int(enough[0]) + 1] if len(enough) else helpers
        heads, recovery = candidates | HeadSet(added), float(scores[len(added) - 1]) if helpers else recovery
    while len(heads):
        members = list(heads)
        scores = score([heads - HeadSet([head]) for head in members])
        goal = min(target, recovery)
        order = np.argsort(-scores, kind="stable")  # ties: the first in (layer, head) order
        if scores[order[0]] < goal:
            break
        least = [members[i] for i in order[:max(1, len(members) // 8)]]  # several at once while there are many, if they may go together
        while len(least) > 1 and (joint := float(score([heads - HeadSet(least)])[0])) < goal:
            least = least[:len(least) // 2]
        recovery = float(scores[order[0]]) if len(least) == 1 else joint
        heads = heads - HeadSet(least)
        removed += [(head, recovery) for head in least]
    return Selection(heads, recovery, tuple(added), tuple(removed), recovery >= target, frozenset(n for c in cases for n in (c.transcript, c.group)))


def _helpers(model: DecisionModel, cases: Sequence[Case], candidates: HeadSet, recovery: float, memory: int) -> list[Head]:
    """Heads outside the candidates by what they add to joint recovery, or by what they are worth once the candidates are
    ablated, whichever is more; the useless left out.

    The second alone finds heads that stand in for the candidates, not those that the candidates read from.
    """
    others = [head for head in model.hooked.heads if head not in candidates]
    found = set_margins(model, cases, [candidates, *(candidates | HeadSet([h]) for h in others)], memory=memory)
    backed = (found.without[:1] - found.without[1:]).sum(1) / (found.m - found.m0).sum()
    worth = np.maximum(backed, pooled_recovery(found)[1:] - recovery)
    return [others[i] for i in np.argsort(-worth, kind="stable") if worth[i] > 0]
