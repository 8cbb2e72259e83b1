"""Two runs side by side: set sizes, relative depth, what families read, phase matrices, shares of texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .errors import InputError
from .heads import Head
from .run_folder import open_run, read_table, whole
from .views import Brief, Viewed

COUNTS = ("set size", "heads selected one by one", "heads")  # figures that are whole numbers


@dataclass(frozen=True, eq=False, repr=False)
class Run(Brief):
    """What a comparison takes from a run folder.

    Attributes:
        name: of the model.
        shape: layers and heads a layer.
        summary: `summary.json`.
        tables: name -> table.
    """

    name: str
    shape: tuple[int, int]
    summary: dict[str, Any]
    tables: dict[str, pd.DataFrame]

    @classmethod
    def open(cls, folder: Path) -> Run:
        state = open_run(folder)
        manifest, tables = state["manifest"], {}
        if "global" not in state["summary"]:
            raise InputError(f"{folder} holds single heads only (a sanity run); compare runs that went on to head sets")
        for name in ("heads", "reads", "phase_matrix"):
            tables[name] = read_table(folder / f"{name}.csv")
        with whole(folder):
            found = cls(Path(str(manifest["model"])).name, (manifest["layers"], manifest["heads"]), state["summary"], tables)
            _figures(found)  # what is compared is all there
        return found

    def depth(self, heads: list[str]) -> float:
        """Mean relative depth of heads: 0 in the first layer, 1 in the last; NaN for none."""
        return float(np.mean([Head.parse(h).layer for h in heads]) / max(1, self.shape[0] - 1)) if heads else float("nan")


@dataclass(frozen=True, eq=False)
class Comparison(Viewed):
    """Two runs, with the same figures for each."""

    one: Run
    other: Run

    @property
    def names(self) -> tuple[str, str]:
        """The models' names, told apart where they are the same."""
        a, b = self.one.name, self.other.name
        return (a, b) if a != b else (f"{a} (1)", f"{b} (2)")

    def to_frame(self) -> pd.DataFrame:
        """One row for each figure: `about` (a kind, "global" or a family), `figure`, and the value, low and high of both."""
        left, right = (_figures(run) for run in (self.one, self.other))
        nothing = (float("nan"),) * 3
        keys = list(dict.fromkeys([*left, *right]))
        rows = [(*key, *left.get(key, nothing), *right.get(key, nothing)) for key in keys]
        return pd.DataFrame(rows, columns=["about", "figure", "one", "one_low", "one_high", "other", "other_low", "other_high"])

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {run.summary['global']['set_size']} of {run.shape[0] * run.shape[1]} heads" for name, run in zip(self.names, (self.one, self.other), strict=True))
        return f"Comparison({sizes} in the global set)"

    def __str__(self) -> str:
        a, b = self.names
        cell = lambda v, lo, hi, digits: "n/a" if not np.isfinite(v) else f"{v:.{digits}f}" + (f" [{lo:.2f}, {hi:.2f}]" if np.isfinite(lo) else "")  # noqa: E731
        lines, last = [f"{'':37}{a[:20]:>20}{b[:20]:>22}"], ""
        for r in self.to_frame().itertuples():
            if r.about != last:
                lines.append(r.about)
                last = r.about
            digits = 0 if r.figure in COUNTS else 2
            lines.append(f"  {r.figure:35}{cell(r.one, r.one_low, r.one_high, digits):>20}{cell(r.other, r.other_low, r.other_high, digits):>22}")
        return "\n".join(lines)


def compare(one: Path, other: Path) -> Comparison:
    """Open two finished run folders, of the same model or of different ones.

    Raises:
        InputError: if either is no finished run.
    """
    return Comparison(Run.open(one), Run.open(other))


def _figures(run: Run) -> dict[tuple[str, str], tuple[float, float, float]]:
    nan = float("nan")
    value = lambda x: nan if x is None else float(x)  # noqa: E731
    alone = lambda x: (value(x), nan, nan)  # noqa: E731
    total = run.shape[0] * run.shape[1]
    found: dict[tuple[str, str], tuple[float, float, float]] = {}
    for about, k in {**run.summary["kinds"], "global": run.summary["global"]}.items():
        found[about, "set size"], found[about, "share of all heads"] = alone(k["set_size"]), alone(k["set_size"] / total)
        found[about, "mean relative depth"] = alone(run.depth(k.get("set", [])))
        for word, key in (("texts where necessary", "necessary"), ("texts where sufficient", "sufficient")):
            if key in k:
                found[about, word] = tuple(value(k[key][x]) for x in ("share", "low", "high"))
        for word, key in (("N, lost without", "necessity"), ("R, kept alone", "recovery")):
            if key in k:
                found[about, word] = tuple(value(k[key][x]) for x in ("pooled", "low", "high"))
        if about == "global":
            continue
        found[about, "heads selected one by one"] = alone(len(k["selection"]["selected"]))
        found[about, "margin, logits"], found[about, "attention's share of it"] = alone(k.get("m")), alone(k.get("attention_share"))
        if k.get("knock_in"):
            found[about, "knock-in flips"], found[about, "knock-in p, worst control"] = alone(k["knock_in"]["flipped"]), alone(k["knock_in"]["p"])
    reads = run.tables["reads"]
    for family in ("region", "near-miss", "neither"):
        f = run.summary["families"][family]
        name = f"{family} family" if family != "neither" else "heads that read neither"
        found[name, "heads"], found[name, "mean relative depth"] = alone(len(f["heads"])), alone(f["depth"])
        mine = reads[(reads["family"] == family) & reads["reads"]] if len(reads) else reads
        if family != "neither" and len(mine):
            best = mine[mine["span"] == {"region": "own block", "near-miss": "near-miss"}[family]].groupby(["layer", "head"])["reading"].max()
            found[name, "attention on its span"] = alone(best.mean() if len(best) else nan)
    for r in run.tables["phase_matrix"].itertuples():
        found["phase matrix", f"{r.ablated} ablated, {r.measured} lost"] = (r.necessity, r.low, r.high)
    return found
