"""`decisionheads evidence` as a function: from models, their run folders and files of spans to a folder of tables, and from that to text.

    run.json         inputs with their hashes, options, arms with their heads, versions
    evidence.csv     corpus x arm x measure, against random heads
    comparisons.csv  corpus x further arm x measure, against the first arm
    blocking.csv     corpus x arm: what blocking the evidence takes from the margin
    left_out.csv     corpus x arm x reason: codes that were not measured
    parts/           texts that are done
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from .._processes import agreed, first, spread, working_together
from ..errors import ExactnessError, InputError
from ..events import find_closers
from ..generation import Generating
from ..labels import LabelSpace
from ..model import DecisionModel
from ..prefixes import Prefixes
from ..provenance import hash_files, model_hash, versions
from ..run_folder import RunFolder, read_json, read_table, table_records, write
from ..transcripts import Encoded, encode, prompt_ids
from ..views import Brief
from ..words import fitted
from ..workflow import check_device, load_space, own_device
from .arms import Corpus, arms_of, corpora_of, generating_like
from .reading import RANDOM, Aligned, Arm, Evidence, Measured, align, conclude
from .texts import Asked, EvidenceText, Unit, texts_of_notes, texts_of_transcripts, units_of

TABLES = ("evidence", "comparisons", "blocking", "left_out")
ALPHA = 0.05
SAID = {"mass": "share of the note's attention on a code's evidence", "lift": "lift over the evidence's share of the note", "specificity": "log lift over other codes' evidence",
        "auroc": "AUROC of own against other codes' evidence", "iou": "overlap of the most read tokens with the evidence"}


@dataclass(frozen=True)
class Options:
    """What was asked for; all of it is part of the result.

    Attributes:
        kind: `first`, the code's primary region decision, else its departure, else its first label decision; or a kind.
        heads_from, top: see `evidence_arms.arms_of`.
        sets: sets of random heads of an arm.
        draws, seed: of random heads, sign-flips and intervals.
    """

    kind: Asked = "first"
    heads_from: str = "set"
    top: int = 0
    sets: int = RANDOM
    draws: int = 9_999
    seed: int = 0

    def __post_init__(self):
        if self.kind not in ("first", "region", "label", "departure"):
            raise InputError(f"unknown kind {self.kind!r}: choose first, region, label or departure")


@dataclass(frozen=True, repr=False)
class Prepared(Brief):
    """One corpus in the tokens of one arm."""

    corpus: Corpus
    texts: list[tuple[EvidenceText, Encoded, list[Unit]]]
    left_out: Counter[str]


def evidence_files(models: Sequence[str], runs: Sequence[Path], spans: Sequence[Path], labels: Path, out: Path, options: Options = Options(), *, in_domain: Sequence[Path] = (),
                   like: Path | None = None, regions: str | None = None, dtype: str = "float32", device: str | None = None, memory: int, progress: bool = True) -> dict[str, Any] | None:
    """Align the reads of decision heads with human evidence, into a folder, or take what a finished one says.

    Args:
        models, runs: the arms; the first is the reference.
        spans: corpora, notes or transcripts with `evidence` spans.
        in_domain: those of them that the models were trained or tuned on; the others are read zero-shot.
        like: transcripts that `generate` wrote: notes are put into prompts of that kind.
        regions: what regions are, as in `workflow.load_space`.

    Returns:
        `run.json`; None in all but the first of several processes.

    Raises:
        InputError: before any model is loaded, for whatever is wrong with files, heads, prompts and lengths.
    """
    arms = arms_of(models, runs, options.kind, options.heads_from, options.top)
    corpora, asked = corpora_of(spans, in_domain), generating_like(like)
    space, said = load_space(labels, regions)
    inputs = {"models": [model_hash(m) for m in models], "runs": [hash_files([run / name for name in ("sets.json", "heads.csv", "summary.json")]) for run in runs],
              "spans": {c.name: hash_files([c.path]) for c in corpora}, "in_domain": [c.name for c in corpora if c.in_domain], "labels": hash_files([labels]),
              "options": asdict(options), "prompts": asdict(asked), "dtype": dtype, **said}
    RunFolder.check(out, inputs)
    store = RunFolder(out, inputs)
    check_device(device)
    with working_together(device) as number:
        if not agreed(store.finished):
            prepared = prepare(models, arms, corpora, space, asked, options)
            measured = [x for i, model in enumerate(models) for x in _measure(model, i, arms[i], prepared[i], options, store, memory, dtype, device or own_device(number), progress and first())]
            found = conclude(measured, draws=options.draws, seed=options.seed)
            if first():
                finish(store, found, arms, corpora)
        return read_json(out / "run.json") if first() else None


def prepare(models: Sequence[str], arms: Sequence[Arm], corpora: Sequence[Corpus], space: LabelSpace, asked: Generating, options: Options) -> list[list[Prepared]]:
    """For each arm and corpus the texts, tokens and units; needs tokenizers and no model."""
    tokenizers, contexts = [DecisionModel.load_tokenizer(m) for m in models], [DecisionModel.load_context(m) for m in models]
    found: list[list[Prepared]] = [[] for _ in models]
    for corpus in corpora:
        try:
            sides, counts = (texts_of_notes(corpus.notes, space, tokenizers, contexts, asked) if corpus.notes else (texts_of_transcripts(corpus.transcripts, tokenizers, contexts), Counter()))
        except InputError as error:
            raise InputError(f"{corpus.path}: {error}") from None
        for arm, tokenizer, texts, mine in zip(arms, tokenizers, sides, found, strict=True):
            closers = find_closers((t.transcript for t in texts), space, tokenizer)
            rows, left_out = [], counts + corpus.wrong_spans
            for text in texts:
                encoded = encode(text.transcript, tokenizer)
                units, why = units_of(text, space, tokenizer, encoded, closers, options.kind)
                left_out += why
                bare = Counter(f"no decision heads for {u.event.kind} decisions" for u in units if u.event.kind not in arm.heads)
                left_out += bare
                rows.append((text, encoded, [u for u in units if u.event.kind in arm.heads]))
            mine.append(Prepared(corpus, rows, left_out))
        if not set.intersection(*({(t.transcript.id, u.code) for t, _, units in mine[-1].texts for u in units} for mine in found)):
            why = ", ".join(f"{n} {reason}" for reason, n in found[0][-1].left_out.most_common(3)) or "the arms have no decision in common"
            raise InputError(f"{corpus.path}: no code with evidence has a decision in all arms ({why}); are labels, notes and spans written the same way?")
    return found


def _measure(model: str, number: int, arm: Arm, prepared: Sequence[Prepared], options: Options, store: RunFolder, memory: int, dtype: str, device: str | None, progress: bool) -> list[Measured]:
    """All corpora in one arm; texts that are done are taken from the folder, and without any left the model is not loaded."""
    name_of = lambda p, text: f"{number}/{p.corpus.name}/{text.transcript.id}"  # noqa: E731
    done = agreed({name: arrays for p in prepared for text, _, units in p.texts if (arrays := store.load_part(name := name_of(p, text))) is not None and _whole(arrays, units)})
    left = any(units and name_of(p, text) not in done for p in prepared for text, _, units in p.texts)
    loaded = DecisionModel.from_pretrained(model, dtype=dtype, device=device) if left else None
    found = []
    for p in prepared:
        prefixes = None if loaded is None else Prefixes(loaded.hooked, 4 * memory).share(prompt_ids((t.transcript for t, _, _ in p.texts), loaded.tokenizer))

        def measure(item: tuple[EvidenceText, Encoded, list[Unit]], p: Prepared = p, prefixes: Prefixes | None = prefixes) -> dict[str, np.ndarray] | None:
            text, encoded, units = item
            if (known := done.get(name_of(p, text))) is not None:
                return known
            try:
                arrays = vars(align(loaded, text, encoded, units, arm, prefixes, sets=options.sets, seed=options.seed, memory=memory))
            except ExactnessError:
                return None
            store.save_part(name_of(p, text), arrays)
            return arrays

        jobs = [item for item in p.texts if item[2]]
        results = spread(measure, tqdm(jobs, desc=f"{arm.name}, {p.corpus.name}", unit="text", disable=not progress))
        rows, left_out = {}, Counter(p.left_out)
        for (text, _, units), arrays in zip(jobs, results, strict=True):
            if arrays is None:
                left_out["packed rows differ from the plain model"] += len(units)
                continue
            a = Aligned(**arrays)
            for i, u in enumerate(units):
                rows[text.document, text.transcript.id, u.code] = (a.own[i], a.random[i], a.on_note[i], a.margin[i], a.lost[i], a.lost_control[i])
        found.append(Measured(p.corpus.name, p.corpus.in_domain, arm.name, rows, left_out))
    return found


def _whole(arrays: dict[str, np.ndarray], units: Sequence[Unit]) -> bool:
    return set(arrays) == set(Aligned.__dataclass_fields__) and all(len(a) == len(units) for a in arrays.values())


def finish(store: RunFolder, found: Evidence, arms: Sequence[Arm], corpora: Sequence[Corpus]) -> None:
    """Write the tables, then mark the folder finished."""
    store.make()
    for name in TABLES:
        write(store.path / f"{name}.csv", getattr(found, name).to_csv(index=False, float_format="%.6g"))
    said = {"inputs": store.inputs, "finished": True, "versions": versions(), "texts": {c.name: len(c.notes) or len(c.transcripts) for c in corpora},
            "arms": {a.name: {"heads": {k: list(map(str, h)) for k, h in a.heads.items()}, "sinks": sorted(a.sinks.ids)} for a in arms}}
    write(store.path / "run.json", json.dumps(said, indent=1) + "\n")


# -- words ------------------------------------------------------------------------------------------------


def finished_evidence(folder: Path) -> dict[str, Any]:
    """`run.json` of a finished folder; raises InputError for any other."""
    state = read_json(folder / "run.json")
    if not state.get("finished") or "arms" not in state:
        raise InputError(f"{folder} is not a finished folder of decisionheads evidence; run the same command again to continue it")
    return state


def evidence_records(folder: Path) -> dict[str, Any]:
    """A finished folder for scripts: arms, texts, and the rows of every table."""
    state = finished_evidence(folder)
    return {"arms": state["arms"], "texts": state["texts"], **{name: table_records(folder / f"{name}.csv") for name in TABLES}}


def show_evidence(folder: Path) -> str:
    """A finished folder as text: a sentence for each claim."""
    state = finished_evidence(folder)
    tables = {name: read_table(folder / f"{name}.csv") for name in TABLES}
    lines = [f"{name}: " + "; ".join(f"{kind} {' '.join(heads)}" for kind, heads in arm["heads"].items()) for name, arm in state["arms"].items()]
    for corpus in tables["evidence"]["corpus"].unique():
        mine = {name: table[table["corpus"] == corpus] if len(table) else table for name, table in tables.items()}
        lines += ["", f"{corpus} ({mine['evidence']['read'].iloc[0]}), {state['texts'][corpus]} texts"]
        for r in mine["evidence"].itertuples():
            lines.append(f"  {r.arm}: {SAID[r.measure]} {_sides(r, r.random_mean, 'random heads')}")
        for r in mine["comparisons"].itertuples():
            lines.append(f"  {r.arm} against {r.against}: {SAID[r.measure]} {_sides(r, r.other_mean, r.against)}")
        for r in mine["blocking"].itertuples():
            lines.append(f"  {r.arm}: blocking the evidence takes logits of a margin of {r.margin:.2f}: {_sides(r, r.control_mean, 'a window of equal length')}")
        for (arm, *_), table in mine["left_out"].groupby(["arm"], sort=False) if len(mine["left_out"]) else ():
            lines.append(f"  {arm}: not measured: " + ", ".join(f"{r.codes} {r.reason}" for r in table.itertuples()))
    tests = len(tables["evidence"]) + len(tables["comparisons"])
    for corpus, few in tables["evidence"].groupby("corpus", sort=False)["documents"].min().items():
        if 2.0 ** (1 - few) * tests > ALPHA:
            lines += ["", f"note: {corpus} has {few} documents for some of {tests} tests: after Holm's correction even the clearest difference could not be found there"]
    lines += ["", f"Differences are paired within documents, two-sided, Holm-corrected; 'no difference found' where p > {ALPHA}. Attention is not cause: blocking stands beside it."]
    return "\n".join(fitted(lines))


def _sides(r: Any, other: float, name: str) -> str:
    if not r.documents:
        return f"undefined (no document of {r.undefined} codes has it)"
    p = "p < 0.0005" if r.holm_p < 0.0005 else f"p = {r.holm_p:.3f}"
    verdict = f"{r.difference:+.2f} [{r.difference_low:+.2f}, {r.difference_high:+.2f}], {p}"
    said = f"difference {verdict}" if r.holm_p <= ALPHA else f"no difference found, {verdict}"
    return f"{r.mean:.2f} [{r.low:.2f}, {r.high:.2f}], {name} {other:.2f}: {said} ({r.documents} documents, {r.codes} codes{f', {r.undefined} undefined' if r.undefined else ''})"
