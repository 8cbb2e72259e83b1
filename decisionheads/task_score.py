"""How well the task itself was done: answers held against gold labels.

Heads that decide are worth knowing of a model that can do the task; this says whether it can.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .errors import InputError
from .labels import LabelSpace
from .transcripts import Transcript
from .views import Viewed

OUTSIDE, NO_CODE, EMPTY = "not in the label space", "no code in the answer", "empty answer"
AMBIGUOUS = "several labels but for case"
_CODE = re.compile(r"[A-Z]([0-9][0-9A-Z]|[A-Z][0-9])(\.?[0-9A-Z]{1,4})?")  # a few categories have two letters: QA0
_WRITTEN = re.compile(r"(?<![^\W_])[A-Za-z]([0-9][0-9A-Za-z]|[A-Za-z][0-9])(\.?[0-9A-Za-z]{1,4})?(?![^\W_])")  # between anything but letters and digits
_GOES_ON = re.compile(r"[.-][0-9]")  # as in I50.9.1 and I20-25
_TAG = re.compile(r"<[^<>\s]*>")  # special tokens that were kept, such as the end of a turn
DRAWS = 2_000


# -- answers ------------------------------------------------------------------------------------------


def parse_answer(text: str, labels: LabelSpace) -> tuple[tuple[str, ...], Counter[str]]:
    """The labels that an answer gives, in order, each once; and what could not be taken.

    Where all labels have the shape of ICD-10 codes, codes are found whatever their case, with their dot or
    without, between any brackets, bullets, quotes or marks. A code is taken as it is written or not at all:
    `I50.90` is not `I50.9`, and of the range `I50.1-I50.9` two codes are named. Other labels are found as
    `LabelSpace.mentions` finds them, whatever their case.

    Returns:
        labels, and counts of failures: "not in the label space", different words of the shape of a code that
        are no label (`A1c` is one); "several labels but for case"; and, once an answer, "no code in the
        answer" or "empty answer" (nothing but blanks and special tokens).
    """
    found, failures = _reader(labels)(text)
    if not found and not failures:
        failures[NO_CODE if _TAG.sub("", text).strip() else EMPTY] = 1
    return found, failures


@lru_cache(maxsize=4)
def _reader(labels: LabelSpace):
    """`text -> (labels, failures)` for a label space, which is indexed once."""
    keys = {label.replace(".", ""): label for label in labels.labels}
    if len(keys) == len(labels) and all(_CODE.fullmatch(label) for label in labels.labels):
        return lambda text: _codes(text, keys)
    folded: dict[str, list[str]] = {}
    for label in labels.labels:
        folded.setdefault(_fold(label), []).append(label)
    space = LabelSpace(folded, lambda label: "any")
    return lambda text: _names(text, folded, space)


def _codes(text: str, keys: dict[str, str]) -> tuple[tuple[str, ...], Counter[str]]:
    found, odd = {}, set()
    for written in _WRITTEN.finditer(text):
        key = written[0].replace(".", "").upper()
        if key in keys and not _GOES_ON.match(text, written.end()):
            found[keys[key]] = None
        elif key[1].isdigit():  # other words of two letters and a digit are no codes: pO2
            odd.add(key)
    return tuple(found), Counter({OUTSIDE: len(odd)} if odd else {})


def _names(text: str, folded: dict[str, list[str]], space: LabelSpace) -> tuple[tuple[str, ...], Counter[str]]:
    found, odd = {}, set()
    for mention in space.mentions(_fold(text)):
        same, written = folded[mention.label], text[mention.start:mention.end]
        if len(same) == 1 or written in same:
            found[written if written in same else same[0]] = None
        else:
            odd.add(mention.label)
    return tuple(found), Counter({AMBIGUOUS: len(odd)} if odd else {})


def _fold(text: str) -> str:
    """Lower case of the same length, so that places stay what they are."""
    low = text.lower()
    return low if len(low) == len(text) else "".join(c.lower() if len(c.lower()) == 1 else c for c in text)


# -- scores -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskScore(Viewed):
    """Answers against gold labels; only labels of the label space count, predicted or gold.

    Attributes:
        transcripts: how many are scored.
        without_gold: transcripts left out, since they bring no gold label of the label space.
        gold, predicted, true_positives: (transcript, label) pairs.
        gold_outside: gold pairs left out, since their label is not in the label space.
        precision: true positives of predicted ones; None if nothing was predicted.
        recall: true positives of gold ones.
        micro_f1: over all pairs, with its interval.
        macro_f1: mean over the `labels` that are gold or predicted anywhere, each once; labels that are
            neither do not count.
        example_f1: mean over transcripts, with its interval; 0 where nothing was predicted.
        micro_f1_interval, example_f1_interval: 95%, by a bootstrap over patients (`group`), or transcripts
            where none is known; None for fewer than two.
        empty_answers: scored answers without any text.
        failures: counts over the scored answers, see `parse_answer`. Codes outside the label space are
            no predictions.
    """

    transcripts: int
    without_gold: int
    gold: int
    predicted: int
    true_positives: int
    gold_outside: int
    precision: float | None
    recall: float
    micro_f1: float
    macro_f1: float
    example_f1: float
    micro_f1_interval: tuple[float, float] | None
    example_f1_interval: tuple[float, float] | None
    labels: int
    empty_answers: int
    failures: dict[str, int]

    def __repr__(self) -> str:
        return f"TaskScore({self.transcripts} transcripts, micro F1 {self.micro_f1:.3f}, macro F1 {self.macro_f1:.3f}, {self.predicted} predicted of {self.gold} gold)"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        limits = lambda x: "" if x is None else f" [{x[0]:.3f}, {x[1]:.3f}]"  # noqa: E731
        precision = "undefined" if self.precision is None else f"{self.precision:.3f}"
        lines = [f"{self.transcripts} transcripts: {self.gold} gold labels, {self.predicted} predicted, {self.true_positives} of them right",
                 f"precision {precision}, recall {self.recall:.3f}",
                 f"micro F1 {self.micro_f1:.3f}{limits(self.micro_f1_interval)}, macro F1 {self.macro_f1:.3f} over {self.labels} labels, "
                 f"example F1 {self.example_f1:.3f}{limits(self.example_f1_interval)}",
                 "; ".join([f"{self.empty_answers} empty answers", *(f"{what}: {n}" for what, n in self.failures.items())])]
        if self.without_gold or self.gold_outside:
            lines.append(f"left out: {self.without_gold} transcripts without a gold label of the label space, {self.gold_outside} gold labels outside it")
        return "\n".join(lines)


def task_score(transcripts: Iterable[Transcript], labels: LabelSpace, *, seed: int = 0) -> TaskScore:
    """Score the answers of transcripts against their gold `labels`.

    Raises:
        InputError: if no transcript has a gold label of the label space.
    """
    counts, failures = Counter(), Counter()
    rows, groups = [], []  # a row: true positives, gold, predicted of one transcript
    by_label: dict[str, np.ndarray] = {}
    for number, t in enumerate(transcripts):
        gold = {label for label in t.labels if label in labels}
        counts["outside"] += len(set(t.labels) - gold)
        if not gold:
            counts["without"] += 1
            continue
        found, failed = parse_answer(t.answer, labels)
        failures.update(failed)
        predicted = set(found)
        rows.append((len(gold & predicted), len(gold), len(predicted)))
        groups.append(("group", t.group) if t.group is not None else ("transcript", number))
        for label in gold | predicted:
            by_label.setdefault(label, np.zeros(2, int))
            by_label[label] += (label in gold and label in predicted, (label in gold) + (label in predicted))
    if not rows:
        raise InputError("no transcript has a gold label of the label space; give the transcripts 'labels', written as in the label file")
    table = np.array(rows)
    right, gold, predicted = (int(n) for n in table.sum(0))
    twice, both = 2 * table[:, 0], table[:, 1] + table[:, 2]
    number = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    owner = np.array([number[group] for group in groups])
    return TaskScore(
        transcripts=len(rows), without_gold=counts["without"], gold=gold, predicted=predicted, true_positives=right, gold_outside=counts["outside"],
        precision=right / predicted if predicted else None, recall=right / gold, micro_f1=2 * right / (gold + predicted),
        macro_f1=float(np.mean([2 * n / total for n, total in by_label.values()])), example_f1=float(np.mean(twice / both)),
        micro_f1_interval=_interval(twice, both, owner, seed), example_f1_interval=_interval(twice / both, np.ones(len(rows)), owner, seed),
        labels=len(by_label), empty_answers=failures.pop(EMPTY, 0), failures=dict(sorted(failures.items())))


def _interval(top: np.ndarray, bottom: np.ndarray, owner: np.ndarray, seed: int) -> tuple[float, float] | None:
    """95% percentile interval of `sum(top) / sum(bottom)`, drawing whole owners; arrays are `[transcript]`, bottoms positive."""
    n = int(owner.max()) + 1
    if n < 2:
        return None
    sums = np.stack([np.bincount(owner, top, n), np.bincount(owner, bottom, n)], 1)
    rng, ratios = np.random.default_rng(seed), []
    for start in range(0, DRAWS, 256):  # all draws at once would be gigabytes for many transcripts
        drawn = rng.multinomial(n, np.full(n, 1 / n), min(256, DRAWS - start)).astype(float) @ sums
        ratios.append(drawn[:, 0] / drawn[:, 1])
    low, high = np.percentile(np.concatenate(ratios), [2.5, 97.5])
    return float(low), float(high)
