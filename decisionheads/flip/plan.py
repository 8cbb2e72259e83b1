"""The registration of an evidence flip: everything that is decided before anything runs, with a time and a hash.

A plan is JSON. It names its files and their hashes, so that a run of a changed plan, or of changed files, is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ..corpora.notes import EVIDENCE
from ..errors import InputError, as_written
from ..evidence.arms import Corpus, arm_names, corpora_of, generating_like
from ..generation import Generating
from ..labels import LabelSpace
from ..model import DecisionModel
from ..prompts import Layout, Prompt
from ..provenance import digest, hash_files, model_hash, versions
from ..run_folder import read_json, read_table, write
from ..workflow import load_space
from .edits import COVER, ROUTES, Route, Wording
from .outcomes import Case, Source, cases_of, prompts_of, sources_of
from .statistics import blinded_variance, detectable_effect

STOP = "every planned text is run once; nothing is looked at before all are done, and none is added afterwards"
INCLUSION = "codes of the label file, gold where a text says which are, whose evidence lies in the note, has a control window of equal length, and which every arm gives unedited"
WORST = 0.5  # variance of a document's D if both edits flip half of its codes, independently of each other


@dataclass(frozen=True)
class Planning:
    """What a registration decides.

    Attributes:
        routes: of edits.
        n: texts of each corpus, in an order drawn by the seed; 0 for all that have a case.
        shortest: fewest characters of a code's evidence.
        smallest: the smallest D of interest.
        variance: of a document's D, as it is expected.
        alpha, power, seed, stop: level, power of the detectable effect, seed of everything, stop rule.
        wording: what edits are made of.
    """

    routes: tuple[Route, ...] = ROUTES
    n: int = 0
    shortest: int = 3
    smallest: float = 0.1
    variance: float = WORST
    alpha: float = 0.05
    power: float = 0.8
    seed: int = 0
    stop: str = STOP
    wording: Wording = Wording()

    def __post_init__(self):
        odd = next((r for r in self.routes if r not in ROUTES), None)
        if odd is not None or not self.routes or len(set(self.routes)) < len(self.routes):
            raise InputError(f"routes are {', '.join(ROUTES)}, each once; {odd!r} is none of them" if odd is not None else f"routes are to be named, each once: {', '.join(ROUTES)}")
        if not 0 < self.smallest <= 2 or not 0 < self.variance <= 1:
            raise InputError("the smallest effect of interest lies above 0 and up to 2, the variance of a document's D above 0 and up to 1; correct them")
        if any(not isinstance(x, int) or x < least for x, least in ((self.n, 0), (self.shortest, 1), (self.seed, 0))) or not 0 < self.alpha <= 0.5 or not 0.5 <= self.power < 1:
            raise InputError("texts and seed are whole numbers from 0 on, the shortest evidence from 1 on, the level up to .5, the power from .5 to below 1; correct them")


@dataclass(frozen=True)
class Planned:
    """One corpus of a plan: its cases, and prompts by arm."""

    corpus: Corpus
    cases: list[Case]
    prompts: list[dict[str, Prompt]]
    left_out: Counter[str]

    @property
    def sources(self) -> list[Source]:
        return list({c.source.id: c.source for c in self.cases}.values())


def plan_corpora(corpora: Sequence[Corpus], models: Sequence[str], space: LabelSpace, asked: Generating, planning: Planning) -> list[Planned]:
    """The cases of each corpus; those whose prompts, edited or not, do not fit a model whole are counted as truncated."""
    tokenizers, contexts = [DecisionModel.load_tokenizer(m) for m in models], [DecisionModel.load_context(m) for m in models]
    found = []
    for corpus in corpora:
        try:
            sources = sources_of(corpus.notes, corpus.transcripts)
            cases, left_out = cases_of(sources, space, planning.routes, n=planning.n, seed=planning.seed, shortest=planning.shortest, wording=planning.wording)
            used = list({c.source.id: c.source for c in cases}.values())
            prompts = [prompts_of(used, cases, space, tokenizer, asked, context) for tokenizer, context in zip(tokenizers, contexts, strict=True)]
        except InputError as error:
            raise InputError(f"{corpus.path}: {error}") from None
        whole = set.intersection(*(set(p) for p in prompts))
        kept = [c for c in cases if {c.source.id, c.name(0), c.name(1)} <= whole]
        left_out["truncated: longer than a model's context"] += len(cases) - len(kept)
        if not kept:
            raise InputError(f"{corpus.path}: no case can be made ({', '.join(f'{n} {why}' for why, n in left_out.most_common(3) if n) or 'no evidence'}); flips need codes whose evidence lies in the note")
        found.append(Planned(corpus, kept, prompts, +left_out))
    return found


def register(models: Sequence[str], spans: Sequence[Path], labels: Path, out: Path, planning: Planning = Planning(), *, in_domain: Sequence[Path] = (), like: Path | None = None,
             cue: str | None = None, longest: int | None = None, pilot: Path | None = None, regions: str | None = None) -> dict[str, Any]:
    """Write a plan; loads tokenizers and no model.

    Args:
        models: the arms, the first the reference.
        spans: corpora, as in `evidence`.
        in_domain: those that the models were trained on, as there.
        like: transcripts that `generate` wrote; texts are written as they were.
        cue: in place of what `like` or the defaults say.
        longest: in place of what `like` or the defaults say.
        pilot: folder of an earlier flip run, of other texts; the variance is that of its documents' D, blinded to which edit is the control.

    Raises:
        InputError: for whatever a run would refuse, and where `out` exists: a registration is never overwritten.
    """
    if out.exists() or not out.parent.is_dir():
        raise InputError(f"{out} exists, and a registration is never overwritten; name another file" if out.exists() else f"{out.parent} is not a folder; make it first")
    corpora = corpora_of(spans, in_domain)
    asked = generating_like(like)
    asked = replace(asked, **({"cue": cue} if cue is not None else {}), **({"longest": longest} if longest is not None else {}))
    space, said = load_space(labels, regions)
    source = "stated"
    if pilot is not None:
        planning, source = replace(planning, variance=pilot_variance(pilot)), "blinded, from a pilot"
    planned = plan_corpora(corpora, models, space, asked, planning)
    tests = len(planning.routes) * len(corpora)
    options = {**asdict(planning), "wording": asdict(planning.wording)}
    plan = {
        "registered": datetime.now(UTC).isoformat(timespec="seconds"), "version": versions()["decisionheads"],
        "models": [{"path": str(m), "hash": model_hash(m), "arm": name} for m, name in zip(models, arm_names(models), strict=True)],
        "corpora": [_corpus(p, planning, tests) for p in planned],
        "labels": {"path": str(labels), "hash": hash_files([labels]), "regions": regions, **said}, "prompts": asdict(asked), "options": options,
        "inclusion": {"rule": INCLUSION, "evidence": EVIDENCE, "shortest": planning.shortest, "least_share_of_evidence_in_a_control": COVER},
        "outcomes": {"primary": "absent: the code is not in what the arm's own model writes after the edited prompt, greedily",
                     "secondary": "live: the best live token at the code's first decision is another one, in the arm's unedited text read after the edited prompt"},
        "analysis": {"D": "P(flip | own) - P(flip | control), mean over documents", "test": "two-sided sign-flip of documents; Holm over routes and corpora, within an outcome, an arm and what it is held against",
                     "variance": {"value": planning.variance, "from": source}, "tests": tests}}
    plan["digest"] = plan_digest(plan)
    write(out, json.dumps(plan, indent=1) + "\n")
    return plan


def _corpus(planned: Planned, planning: Planning, tests: int) -> dict[str, Any]:
    corpus, documents = planned.corpus, len({c.source.document for c in planned.cases})
    bound = lambda variance: round(detectable_effect(variance, documents, alpha=planning.alpha, power=planning.power, tests=tests), 6)  # noqa: E731
    return {"name": corpus.name, "path": str(corpus.path), "hash": hash_files([corpus.path]), "in_domain": corpus.in_domain, "texts": len(planned.sources), "documents": documents,
            "cases": dict(Counter(c.route for c in planned.cases)), "left_out": dict(sorted((planned.left_out + corpus.wrong_spans).items())),
            "detectable": {"D of an arm": bound(planning.variance), "between arms": bound(2 * planning.variance)}}


def plan_digest(plan: dict[str, Any]) -> str:
    """A hash of everything in a plan but the hash itself."""
    return digest(json.dumps({k: v for k, v in plan.items() if k != "digest"}, sort_keys=True))


def pilot_variance(folder: Path) -> float:
    """Mean squared D of the documents of an earlier run, primary outcome, all arms and routes: blind to which edit was the control."""
    table = read_table(folder / "cases.csv")
    if not {"document", "absent_own", "absent_control"} <= set(table) or table.empty:
        raise InputError(f"{folder} holds no cases of a flip run; give the folder of one that is finished")
    return blinded_variance((table["absent_own"] - table["absent_control"]).to_numpy(float), np.unique(table["document"].astype(str), return_inverse=True)[1])


def load_plan(path: Path) -> dict[str, Any]:
    """A plan that is as it was registered, and whose files are.

    Raises:
        InputError: in one sentence, naming what was changed.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such plan; register one")
    plan = read_json(path)
    if plan.get("digest") != plan_digest(plan):
        raise InputError(f"{path} was changed after it was registered; restore it, or register a new plan")
    with as_written(path, "it is not a plan that decisionheads flip register wrote; register one"):
        named = [(Path(x["path"]), x["hash"]) for x in (*plan["corpora"], plan["labels"])]
        models = [(x["path"], x["hash"]) for x in plan["models"]]
        if not all(isinstance(x, str) for x in (plan["registered"], *(m["arm"] for m in plan["models"]), *(path for path, _ in models))) or not all(isinstance(c["in_domain"], bool) for c in plan["corpora"]):
            raise InputError(f"{path}: a name or time in it is not text; register a new plan")
        plan["labels"]["regions"], planning_of(plan), generating_of(plan)
    for file, known in named:
        if not file.is_file() or hash_files([file]) != known:
            raise InputError(f"{file} {'was changed after' if file.is_file() else 'is not there, as it was when'} {path} was registered; restore it, or register a new plan")
    for model, known in models:
        if model_hash(model) != known:
            raise InputError(f"model {model} was changed after {path} was registered; restore it, or register a new plan")
    return plan


def planning_of(plan: dict[str, Any]) -> Planning:
    options = plan["options"]
    return Planning(**{**options, "routes": tuple(options["routes"]), "wording": Wording(**options["wording"])})


def generating_of(plan: dict[str, Any]) -> Generating:
    return Generating(**{**plan["prompts"], "layout": Layout(**plan["prompts"]["layout"])})
