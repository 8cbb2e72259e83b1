"""Arms and corpora as files: run folders that name decision heads, and files that hold human spans. Read before any model is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..corpora.notes import EVIDENCE, Note, load_notes
from ..decisions import KINDS, Kind
from ..errors import InputError
from ..generation import Generating, beside
from ..heads import Head, HeadSet
from ..labels import read_jsonl
from ..prompts import Layout
from ..provenance import model_hash
from ..run_folder import open_run, read_json, read_table, whole
from ..spans import Sinks
from ..transcripts import Transcript, load_transcripts
from .reading import Arm
from .texts import Asked


@dataclass(frozen=True)
class Corpus:
    """A file of human spans: notes, or transcripts."""

    name: str
    path: Path
    in_domain: bool
    notes: list[Note]
    transcripts: list[Transcript]
    wrong_spans: Counter[str]

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}: {len(self.notes) or len(self.transcripts)} {'notes' if self.notes else 'transcripts'})"


def corpora_of(spans: Sequence[Path], in_domain: Sequence[Path] = ()) -> list[Corpus]:
    """Read files of spans: notes as `prepare` writes them, or transcripts with `note` and `evidence` spans.

    Raises:
        InputError: for a file that cannot be read, or that holds no evidence; two of one name; an in-domain file that is not among them.
    """
    names = [path.stem for path in spans]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"two files of spans are named {twice!r}; tables are by name, so give each its own")
    other = next((path for path in in_domain if path not in spans), None)
    if other is not None:
        raise InputError(f"{other} is called in-domain and is not one of the files of spans; give it with --spans, too")
    return [_corpus(path, path in in_domain) for path in spans]


def _corpus(path: Path, in_domain: bool) -> Corpus:
    if not path.is_file():
        raise InputError(f"{path}: no such file of notes or transcripts; give a JSONL file that is there")
    first = next((record for _, record in read_jsonl(path)), None)
    counts: Counter[str] = Counter()
    if isinstance(first, dict) and "note" in first:
        found = Corpus(path.stem, path, in_domain, load_notes(path, counts), [], counts)
    else:
        found = Corpus(path.stem, path, in_domain, [], load_transcripts(path), counts)
    if not any(s.name == EVIDENCE for text in (*found.notes, *found.transcripts) for s in text.spans):
        raise InputError(f"{path}: no span named {EVIDENCE!r} in it, so there is nothing to align with; give notes or transcripts with human spans")
    return found


def generating_like(transcripts: Path | None) -> Generating:
    """How a file of transcripts was generated, from what `generate` wrote beside it; the defaults without one."""
    if transcripts is None:
        return Generating()
    path = beside(transcripts)
    try:
        options = read_json(path)["inputs"]["options"] if path.is_file() else None
        return Generating(**{**options, "layout": Layout(**options["layout"])})
    except (TypeError, KeyError, AttributeError):
        raise InputError(f"{transcripts}: nothing beside it says how it was generated ({path.name}); give a file that decisionheads generate wrote") from None


def arm_names(models: Sequence[str]) -> list[str]:
    """A name for each model: that of its folder or file, numbered where it comes again."""
    plain = [Path(m).stem if Path(m).suffix == ".gguf" else Path(m).name or m for m in models]
    return [name if plain[:i].count(name) == 0 else f"{name} ({plain[:i].count(name) + 1})" for i, name in enumerate(plain)]


def arms_of(models: Sequence[str], runs: Sequence[Path], kind: Asked, heads_from: str = "set", top: int = 0) -> list[Arm]:
    """Arms with equally many decision heads of each kind: the best by rank of their own sets, as many as the smallest set has.

    Args:
        models, runs: a model, and the finished run folder that `discover` made of it; the first pair is the reference.
        heads_from: `set`, the frozen set of a kind; `selected`, all heads that were selected on their own.
        top: instead, the first so many heads of the ranking.

    Raises:
        InputError: where runs and models do not belong together, or an arm has no heads.
    """
    if len(models) != len(runs):
        raise InputError(f"{len(models)} models and {len(runs)} run folders are given; give each --model the --run that names its decision heads")
    if heads_from not in ("set", "selected"):
        raise InputError(f"unknown source of heads {heads_from!r}: choose set or selected, or give --top")
    kinds: tuple[Kind, ...] = KINDS if kind == "first" else (kind,)
    ranked: list[dict[Kind, list[Head]]] = []
    sinks = []
    for model, run in zip(models, runs, strict=True):
        state = open_run(run)
        with whole(run):
            if state["manifest"].get("inputs", {}).get("model") != model_hash(model):
                raise InputError(f"{run} was not made of the model {model}; give each --model its own --run, in the same order")
            found = state["summary"].get("families", {}).get("sinks")
            if found is None:
                raise InputError(f"{run} names no sink keys, which are left out of attention (it was made with --single-heads); run discover without that")
            sinks.append(Sinks(frozenset(map(int, found))))
            ranked.append(_ranked(run, kinds, heads_from, top))
    sizes = {k: min(len(r.get(k, ())) for r in ranked) for k in kinds}
    if not any(sizes.values()):
        bare = next(run for run, r in zip(runs, ranked, strict=True) if not all(r.get(k) for k in kinds))
        raise InputError(f"{bare} has no decision heads for {' or '.join(kinds)} decisions; choose another --kind, --heads-from selected, or --top")
    return [Arm(name, {k: HeadSet(r[k][:n]) for k, n in sizes.items() if n}, sink) for name, r, sink in zip(arm_names(models), ranked, sinks, strict=True)]


def _ranked(run: Path, kinds: Sequence[Kind], heads_from: str, top: int) -> dict[Kind, list[Head]]:
    """The decision heads of each kind, best first."""
    sets, table = read_json(run / "sets.json"), read_table(run / "heads.csv")
    found: dict[Kind, list[Head]] = {}
    for kind in kinds:
        mine = table[table["kind"] == kind].sort_values("rank") if "kind" in table else table
        order = [Head(int(r.layer), int(r.head)) for r in mine.itertuples()]
        if top > len(order) > 0:
            raise InputError(f"--top {top} is more than the {len(order)} heads of {run}")
        given = sets.get(kind, {})
        named = given.get("heads") if heads_from == "set" else given.get("selected", {}).get("heads")
        found[kind] = order[:top] if top else [h for h in order if h in HeadSet(named or ())]
    return found
