"""A trained student, judged blind to its arm: which heads decide in it now, and how well it does the task.

Texts that nobody was trained on, given to every arm alike, so that the events are the same ones. A fifth of
them gives reference means, two fifths calibrate heads and choose sets of fixed sizes, two fifths judge these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._processes import spread
from .._progress import Progress
from ..ablation import event_margin, reference_means
from ..branches import MEMORY
from ..calibration import ratio_interval
from ..decisions import Kind
from ..discovery import discover
from ..errors import InputError
from ..events import find_closers, find_events
from ..head_sets import Case, cases_of, set_margins
from ..heads import Head, HeadSet
from ..labels import LabelSpace
from ..model import DecisionModel
from ..necessity import LEAST, judge, plain
from ..outputs import separate
from ..prefixes import Prefixes
from ..survey import split
from ..task_score import TaskScore, parse_answer, task_score
from ..transcripts import Transcript, encode
from ..writing import Greedy, appended, end_tokens
from ..writing import write as write_texts


@dataclass(frozen=True)
class Judging:
    """How students are judged; the same for every arm, fixed before any is trained.

    Attributes:
        kind: the kind of decision whose recovery is compared.
        size: `k`, heads of the set that is judged.
        curve: the curve goes from 1 to as many heads.
        write: `answer`: the student answers after the reasoning that it is given; `all`: it writes the reasoning, too.
        mark: text that opens the answer, where there are no tags of a reasoner.
        longest: most tokens that it writes.
        random_sets: random sets that the set is held against.
        options: of `discover`.
    """

    kind: Kind = "departure"
    size: int = 4
    curve: int = 16
    write: str = "all"
    mark: str = "\nCodes:"
    longest: int = 1024
    random_sets: int = 100
    seed: int = 0
    caliper: float = 0.25
    minimum: int = 30
    draws: int = 9_999

    def __post_init__(self):
        if self.write not in ("all", "answer"):
            raise InputError(f"unknown part to write {self.write!r}: choose all or answer")
        if not 1 <= self.size <= self.curve:
            raise InputError(f"the set is to have {self.size} heads and the curve ends at {self.curve}; the size must lie on the curve")


def evaluate(model: DecisionModel, held_out: Sequence[Transcript], labels: LabelSpace, asked: Judging, *, memory: int = MEMORY, progress: bool = False) -> dict[str, Any]:
    """Everything that is measured of one student, as plain values; ids and numbers, no text.

    Returns:
        `decisions` (recovery at `k`, margins, the curve, per text), `heads` (of every kind), `task`, `emitted`.
    """
    found = discover(model, held_out, labels, memory=memory, progress=progress, seed=asked.seed, caliper=asked.caliper, minimum=asked.minimum, draws=asked.draws, greedy=False, together=False)
    bar = Progress({"choosing the set": 6, "writing": 4}, progress)
    ranking = [Head(r.layer, r.head) for r in found.kinds[asked.kind].table.itertuples()] if asked.kind in found.kinds else list(model.hooked.heads)
    said = {"heads": {kind: list(map(str, r.selected)) for kind, r in found.kinds.items()}, "warnings": list(found.warnings)}
    said |= decisions(model, held_out, labels, asked, ranking, bar, memory)
    said |= task(model, held_out, labels, asked, bar, memory)
    bar.close()
    return said


# -- the decision ------------------------------------------------------------------------------------------


def decisions(model: DecisionModel, held_out: Sequence[Transcript], labels: LabelSpace, asked: Judging, ranking: Sequence[Head], bar: Callable, memory: int) -> dict[str, Any]:
    """Recovery of the best sets of each size, chosen on one part of the texts and judged on another."""
    parts = split(held_out, asked.seed)
    closers = find_closers(parts["reference"], labels, model.tokenizer)

    def readings(name: str) -> list:
        found = []
        for t in parts[name]:
            events = [e for e in find_events(t, labels, model.tokenizer, closers=closers) if e.primary and e.kind == asked.kind]
            if events:
                found.append((t, events))
        return spread(lambda x: model.read(*x), found)

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few reference events: discover said so
        means = reference_means(model, readings("reference"), minimum=min(asked.minimum, 3))
    selection, evaluation = (cases_of(readings(name), asked.kind, means) for name in ("selection", "evaluation"))
    if not selection or not evaluation:
        raise InputError(f"the held-out texts have no {asked.kind} decision to choose sets on, or none to judge them on; give more of them")
    order = nested(model, selection, HeadSet(ranking[:max(2 * asked.curve, 4 * asked.size)]), bar, memory)
    sets = [HeadSet(order[:n]) for n in range(1, min(asked.curve, len(order)) + 1)]
    judged = judge(model, evaluation, sets[min(asked.size, len(sets)) - 1], seed=asked.seed, some=asked.random_sets, memory=memory)
    margins = set_margins(model, evaluation, [HeadSet(), *sets], memory=memory)
    carried, alone = margins.m - margins.m0, margins.only[1:] - margins.m0
    defined = float(carried.mean()) >= LEAST
    groups = [c.group for c in evaluation]
    low, high = ratio_interval(alone, carried, groups) if defined else (np.full(len(sets), np.nan), np.full(len(sets), np.nan))
    curve = [{"size": len(s), "recovery": plain(a.sum() / carried.sum()) if defined else None, "low": plain(lo), "high": plain(hi), "m_alone": plain(o.mean()), "kept_alone": plain(k.mean())}
             for s, a, lo, hi, o, k in zip(sets, alone, low, high, margins.only[1:], margins.kept_only[1:], strict=True)]
    at = curve[len(judged.heads) - 1]
    texts = [{"text": c.transcript, "group": c.group, "carried": plain(carried[i]), "alone": plain(alone[len(judged.heads) - 1, i]), "right": bool(margins.kept_without[0, i])} for i, c in enumerate(evaluation)]
    return {"set": list(map(str, judged.heads)), "order": list(map(str, order)), "recovery": at["recovery"], "recovery_low": at["low"], "recovery_high": at["high"],
            "random_recovery": plain(np.nanmedian(judged.random[1])) if judged.random.size and defined else None, "necessity": plain(judged.pooled[0]) if defined else None,
            "m": plain(margins.m.mean()), "m0": plain(margins.m0.mean()), "m_alone": at["m_alone"], "kept_alone": at["kept_alone"], "right": plain(margins.kept_without[0].mean()),
            "chance": plain(np.mean([1 / len(c.alternatives) for c in evaluation])), "undefined_texts": judged.undefined, "decisions": len(evaluation), "curve": curve, "texts": texts}


def nested(model: DecisionModel, cases: Sequence[Case], candidates: HeadSet, bar: Callable, memory: int) -> list[Head]:
    """Heads in the order in which backward elimination would keep them: the first `n` are the set of size `n`.

    At each step the head goes without which the others keep the largest mean margin. That margin has no
    denominator, so an order exists even where a student does not decide and its recovery is undefined.
    """
    left, gone = candidates, []
    for _ in bar(range(len(candidates) - 1), "choosing the set"):
        members = list(left)
        alone = set_margins(model, cases, [left - HeadSet([h]) for h in members], without=False, memory=memory).only.mean(1)
        gone.append(members[int(alone.argmax())])  # ties: the first in (layer, head) order
        left = left - HeadSet(gone[-1:])
    return [*left, *reversed(gone)]


# -- the task ----------------------------------------------------------------------------------------------


def task(model: DecisionModel, held_out: Sequence[Transcript], labels: LabelSpace, asked: Judging, bar: Callable, memory: int) -> dict[str, Any]:
    """What the student writes, held against gold labels, and how sure it was of each code.

    The confidence of a code is the least margin of its decisions, in logits. Texts for which it wrote no
    answer count with none.
    """
    written = {}
    gold = [t for t in held_out if any(label in labels for label in t.labels)]
    if not gold:
        return {"task": None, "emitted": []}
    ends = end_tokens(model)
    ids = [encode(Transcript("prompt", prompt_of(t, asked), "", ""), model.tokenizer).ids for t in gold]
    prefixes = Prefixes(model.hooked, 4 * memory).share(ids)

    def group(names: list[int]) -> dict[int, str]:
        return {names[n]: appended(model.tokenizer, ids[names[n]], w) for n, w, _ in write_texts(model.hooked, [ids[i] for i in names], lambda n: Greedy(asked.longest, ends), together=8, shared=prefixes.shared)}

    for found in spread(group, bar([list(range(i, min(i + 8, len(gold)))) for i in range(0, len(gold), 8)], "writing")):
        written.update(found)
    made = []
    for i, t in enumerate(gold):
        reasoning, answer = (t.reasoning, written[i]) if asked.write == "answer" else separate(written[i], asked.mark)
        made.append(Transcript(t.id, t.prompt, reasoning, answer, t.candidates, t.labels, t.group, tuple(s for s in t.spans if s.end <= len(t.prompt) + (len(t.reasoning) if asked.write == "answer" else 0))))
    score: TaskScore = task_score(made, labels)
    parts = {t.id: name for name, part in split(held_out, asked.seed).items() for t in part}
    closers = find_closers(made, labels, model.tokenizer)
    emitted = [row for rows in spread(lambda t: sure_of(model, t, labels, closers), made) for row in rows]
    return {"task": score.to_dict() | {"gold_per_text": {t.id: (len({g for g in t.labels if g in labels}), t.group or t.id) for t in made}, "part": {t.id: "test" if parts[t.id] == "evaluation" else "validation" for t in made}},
            "emitted": emitted}


def prompt_of(t: Transcript, asked: Judging) -> str:
    """What a student is given of a text, to go on from."""
    return t.prompt + (t.reasoning if asked.write == "answer" else "")


def sure_of(model: DecisionModel, t: Transcript, labels: LabelSpace, closers: Sequence[int]) -> list[dict[str, Any]]:
    """Every code of an answer with the least margin of its decisions, and whether it is right."""
    space = labels if t.candidates is None else labels.subset(t.candidates)
    given, _ = parse_answer(t.answer, space)
    try:
        events = [e for e in find_events(t, labels, model.tokenizer, closers=closers) if e.primary] if given else []
        reading = model.read(t, events) if events else None
    except InputError:  # what was written cannot be cut into tokens again
        events, reading = [], None
    least: dict[str, float] = {}
    for e in events:
        value = float(event_margin(reading, e)(reading.clean(e)))
        least[e.label] = min(value, least.get(e.label, np.inf))
    return [{"text": t.id, "label": label, "confidence": plain(least[label]) if label in least else None, "right": label in t.labels} for label in given]
