"""`decisionheads flip run` as a function: from a registered plan to a folder of tables, and from that to text.

    run.json    the plan's hash and time, versions
    plan.json   the plan
    flip.csv    D for each corpus, route, outcome and arm, against the control edit and the first arm
    cases.csv   each case in each arm: ids, codes, offsets, outcomes
    .arm-N.parts/, parts/   what is done, until all is
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._processes import agreed, first, working_together
from ..corpora.notes import Note
from ..errors import InputError
from ..evidence.arms import corpora_of
from ..generation import Generating, Parts, generate
from ..labels import LabelSpace
from ..model import DecisionModel
from ..prompts import Prompt
from ..provenance import versions
from ..run_folder import RunFolder, read_json, read_table, table_records, write
from ..transcripts import Transcript
from ..words import fitted
from ..workflow import check_device, load_space, own_device
from .outcomes import Case, Flip, conclude_flips, given, live_flips
from .plan import Planned, generating_of, load_plan, plan_corpora, planning_of

OUTCOMES = {"absent": "the code is gone from what is written", "live": "another live token is the best"}


def run_plan(plan_file: Path, out: Path, *, together: int = 8, dtype: str = "float32", device: str | None = None, progress: bool = True) -> dict[str, Any] | None:
    """Run a plan into a folder, go on with one that was begun, or take what a finished one says.

    Args:
        together: texts written side by side; changes the time, and the result only where rounding decides.

    Returns:
        `run.json`; None in all but the first of several processes.

    Raises:
        InputError: for a plan that was changed, or whose files were; before any model is loaded.
    """
    plan = load_plan(plan_file)
    inputs = {"plan": plan["digest"], "registered": plan["registered"], "dtype": dtype}
    RunFolder.check(out, inputs)
    store = RunFolder(out, inputs)
    check_device(device)
    with working_together(device) as number:
        if not agreed(store.finished):
            planning, asked = planning_of(plan), generating_of(plan)
            space, _ = load_space(Path(plan["labels"]["path"]), plan["labels"]["regions"])
            paths = [Path(c["path"]) for c in plan["corpora"]]
            corpora = corpora_of(paths, [p for p, c in zip(paths, plan["corpora"], strict=True) if c["in_domain"]])
            models = [m["path"] for m in plan["models"]]
            planned = plan_corpora(corpora, models, space, asked, planning)
            rows, left_out = _run(planned, models, [m["arm"] for m in plan["models"]], space, asked, store, together, dtype, device or own_device(number), progress)
            import pandas as pd

            read = {p.corpus.name: "in domain" if p.corpus.in_domain else "zero-shot" for p in planned}
            found = conclude_flips(pd.DataFrame(rows), [m["arm"] for m in plan["models"]], planning.routes, read, smallest=planning.smallest, alpha=planning.alpha, power=planning.power, seed=planning.seed)
            if first():
                finish(store, plan, found, left_out)
        return read_json(out / "run.json") if first() else None


def _run(planned: Sequence[Planned], models: Sequence[str], arms: Sequence[str], space: LabelSpace, asked: Generating, store: RunFolder, together: int, dtype: str, device: str | None,
         progress: bool) -> tuple[list[dict], dict[str, dict[str, int]]]:
    """Write after unedited prompts in every arm, keep the codes that all give, then write after the edits; models are loaded one at a time."""
    if first():
        store.make()
    agreed(None)
    load = lambda i: DecisionModel.from_pretrained(models[i], dtype=dtype, device=device)  # noqa: E731
    parts = [Parts(store.path / f"arm-{i}", store.inputs) for i in range(len(models))]

    def written(i: int, model: DecisionModel, p: Planned, wanted: dict[str, tuple[str, ...]]) -> dict[str, Transcript]:
        """What arm `i` writes after some prompts, by name; texts that came to no answer are missing."""
        notes = [Note(f"{p.corpus.name}/{name}", "-", labels) for name, labels in wanted.items()]
        prompts: dict[str, Prompt] = {f"{p.corpus.name}/{name}": p.prompts[i][name] for name in wanted}
        made = generate(model, notes, space, asked, together=together, parts=parts[i], prompts=prompts, progress=progress and first()) if notes else None
        return {t.id.removeprefix(f"{p.corpus.name}/"): t for t in made.transcripts} if made else {}

    plain = []
    for i in range(len(models)):
        model = load(i)
        plain.append([written(i, model, p, {s.id: s.labels for s in p.sources}) for p in planned])
    rows, left_out = [], {}
    kept: list[list[Case]] = []
    for n, p in enumerate(planned):
        gives = [given(plain[i][n], space) for i in range(len(models))]
        ours = [c for c in p.cases if all(c.code in side.get(c.source.id, ()) for side in gives)]
        kept.append(ours)
        left_out[p.corpus.name] = dict(+Counter({**p.left_out, "of codes that not every arm gives unedited": len(p.cases) - len(ours)}))
    for i in range(len(models)):
        model = load(i) if any(kept) and (len(models) > 1 or i) else model  # the only one is still there
        for n, p in enumerate(planned):
            texts = written(i, model, p, {c.name(side): c.source.labels for c in kept[n] for side in (0, 1)})
            codes = given(texts, space)
            prefix = f"{i}/{p.corpus.name}/"
            known = lambda name, prefix=prefix: None if (part := store.load_part(prefix + name)) is None else float(part["live"][0])  # noqa: E731
            keep = lambda name, flip, prefix=prefix: store.save_part(prefix + name, {"live": np.array([flip])})  # noqa: E731
            live = live_flips(model, kept[n], p.prompts[i], plain[i][n], space, known, keep)
            for c in kept[n]:
                own, control = c.name(0), c.name(1)
                rows.append({"corpus": p.corpus.name, "document": c.source.document, "text": c.source.id, "code": c.code, "route": c.route, "arm": arms[i],
                             "own_start": c.places[0][0][0], "control_start": c.places[1][0][0], "characters": sum(b - a for a, b in c.places[0]), "places": len(c.places[0]),
                             **{f"absent_{side}": float(c.code not in codes.get(name, ())) for side, name in (("own", own), ("control", control))},
                             **{f"live_{side}": live[name] for side, name in (("own", own), ("control", control))},
                             **{f"unfinished_{side}": name not in texts for side, name in (("own", own), ("control", control))}})
    agreed(None)
    for part in parts if first() else ():
        part.remove()
    return rows, left_out


def finish(store: RunFolder, plan: dict[str, Any], found: Flip, left_out: dict[str, dict[str, int]]) -> None:
    """Write the tables, then mark the folder finished."""
    for name, table in (("flip", found.table), ("cases", found.cases)):
        write(store.path / f"{name}.csv", table.to_csv(index=False, float_format="%.6g"))
    write(store.path / "plan.json", json.dumps(plan, indent=1) + "\n")
    write(store.path / "run.json", json.dumps({"inputs": store.inputs, "finished": True, "versions": versions(), "left_out": left_out}, indent=1) + "\n")


# -- words ------------------------------------------------------------------------------------------------


def show_plan(plan: dict[str, Any], path: Path) -> str:
    """A plan as text."""
    options = plan["options"]
    lines = [f"{path}: registered {plan['registered']}, hash {plan['digest']}", f"arms: {', '.join(m['arm'] for m in plan['models'])}; routes: {', '.join(options['routes'])}; seed {options['seed']}"]
    for c in plan["corpora"]:
        left = ", ".join(f"{n} {why}" for why, n in c["left_out"].items()) or "none"
        lines.append(f"{c['name']} ({'in domain' if c['in_domain'] else 'zero-shot'}): {c['documents']} documents, cases {c['cases']}; left out: {left}; detectable D {c['detectable']['D of an arm']:.3f}, "
                     f"between arms {c['detectable']['between arms']:.3f}" + ("" if c["detectable"]["D of an arm"] <= options["smallest"] else f"; larger than the smallest effect of interest, {options['smallest']:g}"))
    return "\n".join([*lines, f"stop rule: {options['stop']}"])


def finished_flip(folder: Path) -> dict[str, Any]:
    """`run.json` of a finished folder; raises InputError for any other."""
    state = read_json(folder / "run.json")
    if not state.get("finished") or "left_out" not in state:
        raise InputError(f"{folder} is not a finished folder of decisionheads flip run; run the same command again to continue it")
    return state


def flip_records(folder: Path) -> dict[str, Any]:
    """A finished folder for scripts: the plan's hash, what was left out, and the rows of the table."""
    state = finished_flip(folder)
    return {"registered": state["inputs"]["registered"], "plan": state["inputs"]["plan"], "left_out": state["left_out"], "flip": table_records(folder / "flip.csv")}


def show_flip(folder: Path) -> str:
    """A finished folder as text: a sentence for each claim."""
    state = finished_flip(folder)
    table, cases = read_table(folder / "flip.csv"), read_table(folder / "cases.csv")
    lines = [f"plan of {state['inputs']['registered']}, hash {state['inputs']['plan']}, unchanged"]
    for (corpus, read), mine in table.groupby(["corpus", "read"], sort=False):
        lines += ["", f"{corpus} ({read}); cases left out: " + (", ".join(f"{n} {why}" for why, n in state["left_out"][corpus].items()) or "none")]
        for r in mine.itertuples():
            who = r.arm if r.against == "control edit" else f"{r.arm} against {r.against}"
            rates = f"own {r.rate:.2f}, control {r.other:.2f}" if r.against == "control edit" else f"D {r.rate:+.2f} and {r.other:+.2f}"
            lines.append(f"  {r.route}, {OUTCOMES[r.outcome]}{'' if r.outcome == 'absent' else ' (secondary)'}, {who}: {rates}: {r.verdict} ({r.documents} documents, {r.cases} cases)")
    broken = int(cases[["unfinished_own", "unfinished_control"]].to_numpy().sum()) if len(cases) else 0
    if broken:
        lines += ["", f"note: {broken} edited texts came to no answer; their codes count as gone"]
    return "\n".join(fitted(lines))
