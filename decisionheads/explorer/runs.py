"""From a finished run folder to a bench: what was saved is taken, what was not is computed again as the run did."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..ablation import reference_means
from ..errors import ExactnessError, InputError
from ..events import find_closers
from ..heads import HeadSet
from ..labels import LabelSpace
from ..model import DecisionModel, Reading
from ..null_tokens import template_ids
from ..prefixes import Prefixes
from ..provenance import model_hash
from ..run_folder import open_run, read_json
from ..survey import Options, survey
from ..transcripts import Transcript, encode, prompt_ids
from .bench import Bench


def bench_of_run(folder: Path, model: DecisionModel, transcripts: Sequence[Transcript], labels: LabelSpace) -> Bench:
    """See `Explorer.of_run`."""
    state = open_run(folder)
    manifest = state["manifest"]
    shape = (manifest["layers"], manifest["heads"])
    if shape != (model.n_layers, model.n_heads):
        raise InputError(f"{folder} is a run of {Path(str(manifest['model'])).name}, {shape[0]} layers by {shape[1]} heads, and {Path(model.name).name} has "
                         f"{model.n_layers} by {model.n_heads}; load the model of the run")
    if Path(model.name).is_dir() and model_hash(model.name) != manifest["inputs"].get("model"):  # a bridge of the user's own has no folder to hash
        raise InputError(f"{folder} is a run of {Path(str(manifest['model'])).name} and the files of {model.name} are not the same; load the model of the run")
    known = {t.id: t for t in transcripts}
    splits, aside = manifest["splits"], state["summary"]["set_aside"]
    if missing := [name for part in splits.values() for name in part if name not in known]:
        raise InputError(f"{folder} was made from {sum(map(len, splits.values()))} transcripts and {len(missing)} of them, such as {missing[0]!r}, are not among those given; "
                         "give the transcripts of the run")
    options = manifest["options"]
    asked = Options(**{**options, "kinds": tuple(options["kinds"])})
    reference = [known[name] for name in splits["reference"]]
    closers = find_closers(reference, labels, model.tokenizer)
    template = template_ids(((t, encode(t, model.tokenizer)) for t in reference), model.tokenizer.all_special_ids)
    prefixes = Prefixes(model.hooked).share(prompt_ids([known[name] for part in splits.values() for name in part], model.tokenizer))

    def read(transcript: Transcript) -> Reading:
        return survey(model, transcript, labels, closers, template, asked, prefixes).reading

    readings = []
    for transcript in reference:
        try:
            readings.append(read(transcript))
        except (ExactnessError, InputError):  # set aside, as the run did
            continue
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run said so
        means = reference_means(model, readings, minimum=asked.minimum)
    texts = {name: partial(read, known[name]) for part in ("evaluation", "selection") for name in splits[part] if name not in aside}
    return Bench(model, texts, means, families_of(folder / "sets.json"))


def families_of(path: Path) -> dict[str, HeadSet]:
    """Named sets of a run that hold heads: the families, then the set of each kind and the global one.

    Raises:
        InputError: where a set is not the one that was frozen.
    """
    sets = read_json(path)
    records = {f"{name} family" if name != "neither" else "reads neither": record for name, record in sets.get("families", {}).items()}
    records |= {f"{name} set": record if "heads" in record else record["selected"] for name, record in sets.items() if name != "families"}
    found = {name: HeadSet(record["heads"]) for name, record in records.items()}
    for name, heads in found.items():
        if heads.digest != records[name]["digest"]:
            raise InputError(f"{path}: the {name} is not the one that was frozen; run discover again")
    return {name: heads for name, heads in found.items() if len(heads)}
