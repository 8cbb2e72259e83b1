"""The task at matched precision: recall of several arms where all are held to one precision. Arrays only.

A student that writes fewer codes is more often right, so recalls compare only at the same precision. Each
arm's threshold on its own confidence is set on validation and applied to test as it is. A code that was not
written has no margin: a threshold takes codes away and never adds one, so recall is capped by what was written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, Int

from ..errors import InputError
from ..views import Brief, Viewed

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray
DRAWS = 2_000
CAP = "Codes that were not written have no margin: no threshold can bring recall above the cap."


@dataclass(frozen=True, eq=False, repr=False)
class Written(Brief):
    """The codes that one arm wrote on one split.

    Attributes:
        document: `[code]` the name of the document that each code was written for.
        confidence: `[code]` the margin at its decision, logits; higher is surer.
        right: `[code]` whether it is a gold code of its document.
        gold: document -> gold codes, for every document of the split, also where nothing was written.
        group: document -> patient, where known: intervals draw whole patients. Else documents.

    Raises:
        ValueError: for arrays of different lengths, a code of an unknown document, a confidence that is not
            finite, more right codes than gold ones, or no gold code at all.
    """

    document: Sequence[str] | Array
    confidence: Float[Array, " code"]
    right: Bool[Array, " code"]
    gold: Mapping[str, int]
    group: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.document) == len(self.confidence) == len(self.right):
            raise ValueError(f"{len(self.document)} documents, {len(self.confidence)} confidences and {len(self.right)} right or wrong, for one code each")
        if unknown := sorted(set(self.document) - set(self.gold)):
            raise ValueError(f"document {unknown[0]!r} has codes and no count of gold codes")
        if not np.isfinite(self.confidence).all():
            raise ValueError("every code that was written has a margin; a confidence is not finite")
        if sum(self.gold.values()) < 1:
            raise ValueError("there is no gold code, so there is no recall")
        top = self.counts(-np.inf)[0]
        if (over := [name for name, n, gold in zip(self.names, top, self.gold_counts, strict=True) if n > gold]):
            raise ValueError(f"document {over[0]!r} has more right codes than gold ones; each code counts once")

    @property
    def names(self) -> list[str]:
        """Documents in order of name, so that the order of the codes changes nothing."""
        return sorted(self.gold)

    @property
    def gold_counts(self) -> Int[Array, " document"]:
        return np.array([self.gold[name] for name in self.names], int)

    @property
    def owners(self) -> Int[Array, " document"]:
        """The number of the patient, or of the document itself, that is drawn as a whole."""
        keys = [("group", self.group[name]) if name in self.group else ("document", name) for name in self.names]
        number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        return np.array([number[key] for key in keys], int)

    def counts(self, threshold: float) -> tuple[Int[Array, " document"], Int[Array, " document"]]:
        """Right codes and all codes with a confidence of at least `threshold`, for each document."""
        at = {name: i for i, name in enumerate(self.names)}
        index = np.array([at[name] for name in self.document], int)
        kept = self.confidence >= threshold
        return np.bincount(index[kept & self.right], minlength=len(at)), np.bincount(index[kept], minlength=len(at))

    def precision(self, threshold: float = -np.inf) -> float | None:
        """Share right of the codes at or over `threshold`; None where there is none."""
        right, kept = (int(n.sum()) for n in self.counts(threshold))
        return right / kept if kept else None


def threshold_for(validation: Written, precision: float) -> float | None:
    """The lowest threshold that gives at least `precision`, so the one of highest recall; None where none does.

    `-inf` where the codes as they are suffice. Codes of the same confidence are kept or dropped together.
    """
    if (validation.precision() or 0.0) >= precision:
        return -np.inf
    levels, level = np.unique(validation.confidence, return_inverse=True)
    both = np.stack([np.bincount(level, validation.right, len(levels)), np.bincount(level, minlength=len(levels))])
    right, kept = both[:, ::-1].cumsum(1)[:, ::-1]  # with at least this confidence
    enough = np.flatnonzero(right >= precision * kept - 1e-9)
    return float(levels[enough[0]]) if len(enough) else None


@dataclass(frozen=True)
class MatchedArm:
    """One arm at the common precision; all of it on test but for the threshold and what begins with `validation`.

    Attributes:
        arm: its name.
        threshold: lowest confidence that is kept, logits; `-inf` keeps all; None where the precision is out of reach.
        reason: why it is out of reach; empty where it is not.
        validation_precision, validation_kept: at the threshold; without one, None and 0.
        precision, recall: at the threshold; None without one, and precision also where no code is kept.
        precision_interval, recall_interval: 95%, by a bootstrap over patients, or documents; None for fewer than two.
        recall_cap: recall of all codes that were written, which no threshold exceeds.
        kept, written, gold: codes.
    """

    arm: str
    threshold: float | None
    reason: str
    validation_precision: float | None
    validation_kept: int
    precision: float | None
    precision_interval: tuple[float, float] | None
    recall: float | None
    recall_interval: tuple[float, float] | None
    recall_cap: float
    kept: int
    written: int
    gold: int

    def __str__(self) -> str:
        if self.threshold is None:
            return f"{self.arm}: undefined, {self.reason}; recall without a threshold {self.recall_cap:.3f}"
        limits = lambda x: "" if x is None else f" [{x[0]:.3f}, {x[1]:.3f}]"  # noqa: E731
        precision = "undefined" if self.precision is None else f"{self.precision:.3f}{limits(self.precision_interval)}"
        where = "all codes kept" if self.threshold == -np.inf else f"from {self.threshold:.3f} logits on"
        return f"{self.arm}: recall {self.recall:.3f}{limits(self.recall_interval)} of at most {self.recall_cap:.3f}, precision {precision} ({where}, {self.kept} of {self.written})"


@dataclass(frozen=True, eq=False)
class Matched(Viewed):
    """Arms held to one precision.

    Attributes:
        precision: that they are held to on validation.
        chosen: where it comes from.
        arms: one result each.
        texts: arm, text, group, numerator (right codes kept), denominator (gold): test recall for each document, to
            be compared over seeds; without the arms that cannot reach the precision.
    """

    precision: float
    chosen: str
    arms: tuple[MatchedArm, ...]
    texts: pd.DataFrame

    def __repr__(self) -> str:
        return f"Matched({len(self.arms)} arms at precision {self.precision:.3f} ({self.chosen}))"

    def __getitem__(self, arm: str) -> MatchedArm:
        return next(a for a in self.arms if a.arm == arm)

    def to_frame(self) -> pd.DataFrame:
        """One row for each arm; NaN where undefined."""
        import pandas as pd

        nan = float("nan")
        number = lambda x: nan if x is None else float(x)  # noqa: E731
        rows = [{"arm": a.arm, "at_precision": self.precision, "threshold": number(a.threshold), "reason": a.reason, "validation_precision": number(a.validation_precision),
                 "validation_kept": a.validation_kept, "precision": number(a.precision), "precision_low": (a.precision_interval or (nan, nan))[0],
                 "precision_high": (a.precision_interval or (nan, nan))[1], "recall": number(a.recall), "recall_low": (a.recall_interval or (nan, nan))[0],
                 "recall_high": (a.recall_interval or (nan, nan))[1], "recall_cap": a.recall_cap, "kept": a.kept, "written": a.written, "gold": a.gold} for a in self.arms]
        return pd.DataFrame(rows)

    def __str__(self) -> str:
        return "\n".join([f"Thresholds set on validation for a precision of {self.precision:.3f} ({self.chosen}); recall and precision on test. {CAP}", *map(str, self.arms)])


def at_matched_precision(validation: Mapping[str, Written], test: Mapping[str, Written], *, precision: float | None = None, seed: int = 0,
                         draws: int = DRAWS) -> Matched:
    """Recall of every arm on test, at thresholds that give one precision on validation.

    Args:
        validation: arm -> what it wrote; every arm the same documents.
        test: the same of the other split, of the same arms.
        precision: that all are held to, in (0, 1]; by default the largest precision that an arm has on validation
            without a threshold: what the most careful one has for nothing, the others have to reach.
        seed: of the bootstrap.
        draws: of the bootstrap, in which every arm is given the same documents.

    Raises:
        InputError: for different arms or documents, a document (or patient) on both sides, or no code on validation.
        ValueError: for a precision outside (0, 1].
    """
    import pandas as pd

    if not validation or set(validation) != set(test):
        raise InputError(f"arms differ: {', '.join(validation) or 'none'} on validation, {', '.join(test) or 'none'} on test")
    for name, split in (("validation", validation), ("test", test)):
        first = next(iter(split.values()))
        for arm, written in split.items():
            if dict(written.gold) != dict(first.gold) or dict(written.group) != dict(first.group):
                raise InputError(f"{arm}: the {name} documents, their gold codes or patients are not those of the other arms")
    one, other = (next(iter(split.values())) for split in (validation, test))
    if shared := sorted((set(one.gold) & set(other.gold)) | (set(one.group.values()) & set(other.group.values()))):
        raise InputError(f"{shared[0]} is in validation and in test; keep the splits apart")
    if precision is not None and not 0 < precision <= 1:
        raise ValueError(f"a precision is in (0, 1], not {precision}")
    chosen = "given"
    if precision is None:
        without = {arm: p for arm, written in validation.items() if (p := written.precision()) is not None}
        best = max(without, key=without.get, default=None)
        if best is None or not without[best]:
            raise InputError("no arm wrote a right code on validation, so there is no precision to match")
        precision, chosen = without[best], f"that of {best} without a threshold"
    arms, texts = [], []
    for arm, written in validation.items():
        found, counts = _one_arm(arm, written, test[arm], precision, seed, draws)
        arms.append(found)
        if counts is not None:
            names = test[arm].names
            texts.append(pd.DataFrame({"arm": arm, "text": names, "group": [test[arm].group.get(n, n) for n in names], "numerator": counts, "denominator": test[arm].gold_counts}))
    columns = ["arm", "text", "group", "numerator", "denominator"]
    return Matched(precision, chosen, tuple(arms), pd.concat(texts, ignore_index=True) if texts else pd.DataFrame(columns=columns))


def _one_arm(arm: str, validation: Written, test: Written, precision: float, seed: int, draws: int) -> tuple[MatchedArm, Int[Array, " document"] | None]:
    threshold = threshold_for(validation, precision)
    gold = test.gold_counts
    everything, written = test.counts(-np.inf)
    cap, sizes = float(everything.sum() / gold.sum()), {"written": int(written.sum()), "gold": int(gold.sum())}
    if threshold is None:
        best = validation.precision()
        reason = "it wrote no code on validation" if best is None else f"no threshold reaches a precision of {precision:.3f} on validation ({best:.3f} without one)"
        return MatchedArm(arm, None, reason, None, 0, None, None, None, None, cap, 0, **sizes), None
    right, kept = test.counts(threshold)
    return MatchedArm(
        arm, threshold, "", validation.precision(threshold), int(validation.counts(threshold)[1].sum()),
        float(right.sum() / kept.sum()) if kept.any() else None, _interval(right, kept, test.owners, seed, draws),
        float(right.sum() / gold.sum()), _interval(right, gold, test.owners, seed, draws), cap, int(kept.sum()), **sizes), right


def _interval(top: Int[Array, " document"], bottom: Int[Array, " document"], owners: Int[Array, " document"], seed: int, draws: int) -> tuple[float, float] | None:
    """95% percentile interval of `sum(top) / sum(bottom)`, drawing whole owners; draws without a bottom are left out."""
    n = int(owners.max()) + 1
    if n < 2 or not bottom.any():
        return None
    sums = np.stack([np.bincount(owners, top, n), np.bincount(owners, bottom, n)], 1)
    rng, ratios = np.random.default_rng(seed), []
    for start in range(0, draws, 256):  # all draws at once would be gigabytes for many documents
        drawn = rng.multinomial(n, np.full(n, 1 / n), min(256, draws - start)).astype(float) @ sums
        ratios.append(drawn[drawn[:, 1] > 0, 0] / drawn[drawn[:, 1] > 0, 1])
    low, high = np.percentile(np.concatenate(ratios), [2.5, 97.5])
    return float(low), float(high)
