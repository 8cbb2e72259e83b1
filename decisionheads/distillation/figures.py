"""The figure of a distillation: students side by side, every seed a point. Plotly, returned and never shown.

What is undefined is drawn in a strip of its own below the scale, never as 0. Titles say the finding, and that there
is none to claim under six paired seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..errors import InputError
from ..looks import AGAINST, FOR, LINE, MUTED, TEXT
from .verdicts import CLAIM_SEEDS, MINUS, REFERENCES, Verdict, compare_arms, mean_interval, need_columns, whole

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

LOOKS = {  # label, colour, symbol, dash: told apart by three of them, for colour-blind readers and in grey
    "cot": ("CoT", AGAINST, "diamond", "dash"), "mistill": ("MISTILL", FOR, "circle", "solid"), "shuffled": ("shuffled", "#7b3294", "square", "dot"),
    "random-pool": ("random pool", "#666666", "triangle-up", "dashdot"), "all-heads": ("all heads", "#5ab4ac", "cross", "longdash"),
    "wrong-group": ("wrong group", "#d8b365", "triangle-down", "longdashdot")}
OTHER = ("", MUTED, "pentagon", "solid")
COLUMNS = ["student", "arm", "seed", "k", "recovery", "m", "m0", "departures_right", "micro_f1"]
ENOUGH = 0.8  # joint recovery that a head set is selected for
JITTER, HALF = 0.24, 0.33  # of a category's width: seeds, and half a mean bar
ROW, LINE_HEIGHT = 215, 17  # pixels


@dataclass(frozen=True)
class _Panel:
    """Where a panel stands, and its scale; `strip` is the height at which undefined values are marked."""

    row: int
    col: int
    low: float
    high: float

    @property
    def strip(self) -> float:
        return self.low - 0.09 * (self.high - self.low)

    @property
    def at(self) -> dict[str, int]:
        return {"row": self.row, "col": self.col}


def label(arm: str) -> str:
    """An arm as it is printed."""
    return LOOKS.get(arm, OTHER)[0] or arm


def students_figure(table: pd.DataFrame, curves: pd.DataFrame, *, arm: str = "mistill", baseline: str = "cot", arms: Sequence[str] | None = None,
                    bounds: Mapping[str, float] | None = None, width: int = 1100) -> Figure:
    """Held-out recovery, margins, the curve over set size, and the task, of every arm, seed and student.

    A: recovery `R(S_k)` of every seed with its 95% interval over texts, the mean, and from six seeds on its t-interval;
    lines for the teacher and the untrained student. B: margin `m` and what is left of it with every head ablated, `m0`.
    C: recovery by the number of heads. D: micro F1 and the share of departures that are right.

    Args:
        table: one row for each (student, arm, seed) with `COLUMNS`, NaN where undefined; `recovery_low` and
            `recovery_high` if known. Arms "teacher" and "untrained" are references, and need no seed.
        curves: student, arm, seed, size, recovery.
        arm: what titles speak of, held against the baseline as `compare_arms` does.
        baseline: what it is held against.
        arms: those compared, which are one family for Holm's correction; by default all.
        bounds: measure -> preset bound of equivalence, for `recovery` and `micro_f1`.
        width: pixels that titles are broken for; under 700 all panels stand below each other.

    Raises:
        InputError: for a missing column, or more than one `k` for a student.
    """
    from plotly.subplots import make_subplots

    need_columns(table, COLUMNS, "the table of students")
    need_columns(curves, ["student", "arm", "seed", "size", "recovery"], "the table of curves")
    students = list(dict.fromkeys(table["student"]))
    across = 1 if width < 700 else max(2, len(students))
    k = {student: _one_k(table, student) for student in students}
    found = {measure: {v.student: v for v in compare_arms(table, measure, baseline=baseline, arms=arms, bound=(bounds or {}).get(measure)) if v.arm == arm}
             for measure in ("recovery", "micro_f1")}
    trained = table[~table["arm"].isin(REFERENCES)]
    scales = {"A": _scale([*table["recovery"], *_optional(table, "recovery_low"), *_optional(table, "recovery_high")], 0, 1),
              "B": _scale([*trained["m"], *trained["m0"]], 0), "C": _scale(curves["recovery"], 0, 1), "D": _scale([*trained["micro_f1"], *trained["departures_right"]])}
    chars = int((width - 110) / across / 6.6)
    panels, titles = {}, {}
    for i, student in enumerate(students):
        mine, lines = table[table["student"] == student], curves[curves["student"] == student]
        said = {"A": f"k = {k[student]:g}, {_finding(found['recovery'].get(student), arm, baseline)}", "B": _margins_title(mine, arm, baseline), "C": _curve_title(lines, arm, baseline),
                "D": f"micro F1, {_finding(found['micro_f1'].get(student), arm, baseline, 3)}"}
        for j, letter in enumerate("ABCD"):
            row, col = (j, i) if len(students) > 1 and across > 1 else divmod(i * 4 + j, across)
            panels[student, letter] = _Panel(row + 1, col + 1, *scales[letter])
            titles[student, letter] = wrap(f"{letter}  {student}: {said[letter]}", chars)
    rows, most = max(p.row for p in panels.values()), max(map(len, titles.values()))
    gap = 66 + LINE_HEIGHT * most
    inside = rows * ROW + (rows - 1) * gap
    figure = make_subplots(rows, across, vertical_spacing=gap / inside if rows > 1 else 0, horizontal_spacing=0.0 if across == 1 else 90 / width)
    named: set[str] = set()
    for student in students:
        mine, lines = table[table["student"] == student], curves[curves["student"] == student]
        for draw, letter, more in ((_recovery, "A", (mine,)), (_margins, "B", (mine,)), (_curves, "C", (lines, k[student], named)), (_task, "D", (mine,))):
            draw(figure, panels[student, letter], *more)
            axis, (first, *rest) = figure.get_subplot(panels[student, letter].row, panels[student, letter].col), titles[student, letter]
            figure.add_annotation(text="<br>".join([first.replace(f"{letter}  {student}:", f"<b>{letter}  {escape(student)}:</b>", 1), *rest]), x=axis.xaxis.domain[0], y=axis.yaxis.domain[1],
                                  xref="paper", yref="paper", xanchor="left", yanchor="bottom", yshift=6, showarrow=False, align="left", font={"size": 12.5})
    note = wrap(f"Points: seeds. Bars: means. Boxes: 95% t-interval over seeds, from {CLAIM_SEEDS} on. Whiskers: 95% over texts. m0: every head ablated. "
                "Crosses in the strip below a scale: undefined.", int((width - 100) / 6))
    figure.add_annotation(text="<br>".join(note), x=0, y=0, xref="paper", yref="paper", xanchor="left", yanchor="top", yshift=-50, showarrow=False, align="left", font={"size": 11})
    title = wrap(_headline(found["recovery"], students, arm, baseline), int((width - 40) / 8.4))
    top = 40 + 22 * len(title) + LINE_HEIGHT * most
    bottom = 66 + 15 * len(note) + 24 * math.ceil(115 * len(named) / (width - 100))
    figure.update_xaxes(gridcolor="rgba(136,136,136,.2)", zeroline=False, tickangle=0, tickfont={"size": 12 if width >= 700 else 10})
    figure.update_yaxes(gridcolor="rgba(136,136,136,.2)", zerolinecolor=LINE)
    return figure.update_layout(
        title={"text": "<br>".join(title), "x": 0, "xanchor": "left", "font": {"size": 16}, "y": 1 - 24 / (top + inside + bottom), "yref": "container", "yanchor": "top", "pad": {"l": 12}},
        height=top + inside + bottom, margin={"l": 78, "r": 20, "t": top, "b": bottom}, paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        font={"color": TEXT, "size": 12}, showlegend=True, legend={"orientation": "h", "x": 0, "xanchor": "left", "yref": "container", "y": 0, "yanchor": "bottom"})


# -- panels -------------------------------------------------------------------------------------------


def _recovery(figure: Figure, panel: _Panel, mine: pd.DataFrame) -> None:
    order = _arms(mine)
    for name, dash in zip(REFERENCES, ("dash", "dot"), strict=True):
        level = mine.loc[mine["arm"] == name, "recovery"].mean()
        if np.isfinite(level):
            end = len(order) - 0.4
            figure.add_scatter(x=[-0.5, end], y=[level, level], mode="lines", line={"color": LINE, "dash": dash, "width": 1.5}, name=name, showlegend=False,
                               hovertemplate=f"{name}: {level:.2f}<extra></extra>", **panel.at)
            figure.add_annotation(x=end, y=level, text=name, showarrow=False, xanchor="left", xshift=3, font={"size": 10, "color": LINE}, **panel.at)
    _per_arm(figure, panel, mine, order, "recovery", 0.0, whiskers=True, box=True)
    _axes(figure, panel, mine, order, "recovery R, share of m \u2212 m0", ["recovery"], room=0.75 if mine["arm"].isin(REFERENCES).any() else 0.0)


def _margins(figure: Figure, panel: _Panel, mine: pd.DataFrame) -> None:
    order = _arms(mine)
    _per_arm(figure, panel, mine, order, "m", -0.2, width=0.16)
    _per_arm(figure, panel, mine, order, "m0", 0.2, hollow=True, width=0.16)
    _axes(figure, panel, mine, order, "logits: m filled, m0 hollow", ["m", "m0"])


def _task(figure: Figure, panel: _Panel, mine: pd.DataFrame) -> None:
    order = _arms(mine)
    _per_arm(figure, panel, mine, order, "micro_f1", -0.2, width=0.16)
    _per_arm(figure, panel, mine, order, "departures_right", 0.2, hollow=True, width=0.16)
    _axes(figure, panel, mine, order, "F1 filled, departures right hollow", ["micro_f1", "departures_right"])


def _per_arm(figure: Figure, panel: _Panel, mine: pd.DataFrame, order: list[str], measure: str, shift: float, *, hollow: bool = False, width: float = HALF, whiskers: bool = False,
             box: bool = False) -> None:
    """Seeds as points, their mean as a bar, and undefined ones as crosses in the strip, arm by arm."""
    place = _places(mine, width * JITTER / HALF)
    for i, arm in enumerate(order):
        rows = mine[mine["arm"] == arm].sort_values("seed")
        _, colour, symbol, _ = LOOKS.get(arm, OTHER)
        value, x = rows[measure].to_numpy(float), np.array([i + shift + place[s] for s in rows["seed"]])
        fine, seeds = np.isfinite(value), np.array([whole(s) for s in rows["seed"]], object)
        ends = [i + shift - width, i + shift + width]
        interval = mean_interval(value[fine]) if box else None
        if interval:
            low, high = interval
            figure.add_scatter(x=[ends[0], ends[1], ends[1], ends[0]], y=[low, low, high, high], fill="toself", mode="lines", line={"width": 0}, fillcolor=colour, opacity=0.22, name=f"{arm} interval",
                               showlegend=False, hoverinfo="skip", **panel.at)
        if fine.any():
            error = None
            if whiskers and {"recovery_low", "recovery_high"} <= set(rows):
                error = {"type": "data", "symmetric": False, "array": rows["recovery_high"].to_numpy(float)[fine] - value[fine],
                         "arrayminus": value[fine] - rows["recovery_low"].to_numpy(float)[fine], "color": colour, "thickness": 1, "width": 0}
            figure.add_scatter(x=x[fine], y=value[fine], mode="markers", name=f"{arm} {measure}", showlegend=False, customdata=seeds[fine], error_y=error, opacity=0.85,
                               marker={"symbol": symbol + ("-open" if hollow else ""), "size": 7, "color": colour, "line": {"width": 1.5, "color": colour}},
                               hovertemplate=f"{label(arm)}, seed %{{customdata}}: {measure} %{{y:.3f}}<extra></extra>", **panel.at)
            mean = float(value[fine].mean())
            figure.add_scatter(x=ends, y=[mean, mean], mode="lines", line={"color": colour, "width": 3}, name=f"{arm} {measure} mean", showlegend=False,
                               hovertemplate=f"{label(arm)}, mean of {int(fine.sum())} seeds: {mean:.3f}<extra></extra>", **panel.at)
        if not fine.all():
            _undefined(figure, panel, x[~fine], [f"{label(arm)}, seed {s}: {measure} undefined" for s in seeds[~fine]], colour)


def _curves(figure: Figure, panel: _Panel, lines: pd.DataFrame, k: float, named: set[str]) -> None:
    """Recovery by set size: thin lines for seeds, the mean of those that are defined anywhere; gaps where undefined."""
    figure.add_scatter(x=[k, k], y=[panel.low, panel.high], mode="lines", line={"color": LINE, "width": 1.5, "dash": "dot"}, name="fixed k", showlegend=False, hoverinfo="skip", **panel.at)
    figure.add_annotation(x=k, y=panel.high, text=f"k = {k:g}", showarrow=False, xanchor="left", yanchor="top", xshift=4, font={"size": 11, "color": LINE}, **panel.at)
    references = [a for a in REFERENCES if a in set(lines["arm"])]
    for arm in [*references, *_arms(lines)]:
        part = lines[lines["arm"] == arm]
        _, colour, _, dash = LOOKS.get(arm, OTHER) if arm not in REFERENCES else ("", LINE, "", "dash" if arm == "teacher" else "dot")
        if arm not in REFERENCES:
            for s, one in part.sort_values("size").groupby("seed"):
                figure.add_scatter(x=one["size"], y=one["recovery"].astype(float), mode="lines", line={"color": colour, "width": 1}, opacity=0.35, name=f"{arm} seed {whole(s)}", showlegend=False,
                                   connectgaps=False, hovertemplate=f"{label(arm)}, seed {whole(s)}: %{{y:.2f}} with %{{x}} heads<extra></extra>", **panel.at)
        mean = _mean_curve(part)
        figure.add_scatter(x=mean.index, y=mean.to_numpy(float), mode="lines", line={"color": colour, "width": 3 if arm not in REFERENCES else 1.5, "dash": dash}, name=label(arm), legendgroup=arm,
                           showlegend=arm not in named, connectgaps=False, hovertemplate=f"{label(arm)}, mean: %{{y:.2f}} with %{{x}} heads<extra></extra>", **panel.at)
        named.add(arm)
        shift = 0.12 * (_arms(lines).index(arm) if arm not in REFERENCES else -1)
        gone = part[~np.isfinite(part["recovery"].astype(float))]
        never = part["recovery"].astype(float).groupby(part["seed"]).count() == 0  # one cross is enough for a seed that is undefined at every size
        places = gone["size"].where(~gone["seed"].isin(never[never].index), k)
        count = gone.groupby(places)["seed"].nunique()
        if len(count):
            _undefined(figure, panel, count.index + shift, [f"{label(arm)}, {size:g} heads: undefined in {n} of {part['seed'].nunique()} seeds" for size, n in count.items()], colour)
    _strip(figure, panel, "recovery R, share of m \u2212 m0", not np.isfinite(lines["recovery"].astype(float)).all())
    figure.update_xaxes(title={"text": "heads in the set", "standoff": 4, "font": {"size": 11}}, **panel.at)


def _undefined(figure: Figure, panel: _Panel, x: Sequence[float] | np.ndarray | pd.Index, text: list[str], colour: str) -> None:
    figure.add_scatter(x=np.asarray(x, float), y=np.full(len(x), panel.strip), mode="markers", name="undefined", showlegend=False, text=text, hovertemplate="%{text}<extra></extra>",
                       marker={"symbol": "x-thin", "size": 7, "line": {"width": 2, "color": colour}}, **panel.at)


# -- scales and order ---------------------------------------------------------------------------------


def _arms(frame: pd.DataFrame) -> list[str]:
    there = set(frame["arm"]) - set(REFERENCES)
    return [a for a in LOOKS if a in there] + sorted(there - set(LOOKS))


def _places(mine: pd.DataFrame, width: float) -> dict:
    """Seed -> place within its category, the same in every arm, so that pairs can be followed."""
    seeds = sorted(set(mine.loc[~mine["arm"].isin(REFERENCES), "seed"]))
    return dict(zip(seeds, np.linspace(-width, width, len(seeds)) if len(seeds) > 1 else [0.0], strict=True)) if seeds else {}


def _one_k(table: pd.DataFrame, student: str) -> float:
    found = table.loc[(table["student"] == student) & ~table["arm"].isin(REFERENCES), "k"].dropna().unique()
    if len(found) != 1:
        raise InputError(f"{student} has {len(found)} set sizes k; it is fixed beforehand, and one for all arms and seeds")
    return float(found[0])


def _optional(table: pd.DataFrame, column: str) -> list[float]:
    return list(table[column]) if column in table else []


def _scale(values: Sequence[float] | pd.Series, *others: int) -> tuple[float, float]:
    """Limits that hold all defined values and the others, with some room."""
    fine = [float(v) for v in values if v is not None and np.isfinite(v)] + list(others)
    low, high = (min(fine), max(fine)) if fine else (0.0, 1.0)
    room = 0.05 * (high - low or 1.0)
    return low - room, high + room


def _ticks(low: float, high: float) -> np.ndarray:
    """About five round numbers between limits."""
    raw = (high - low) / 5
    size = 10 ** math.floor(math.log10(raw))
    step = next(c * size for c in (1, 2, 5, 10) if c * size >= raw - 1e-12)
    return np.arange(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1) * step


def _axes(figure: Figure, panel: _Panel, mine: pd.DataFrame, order: list[str], y: str, measures: list[str], room: float = 0.0) -> None:
    rows = mine[mine["arm"].isin(order)]
    _strip(figure, panel, y, not np.isfinite(rows[measures].astype(float)).all(axis=None))
    figure.update_xaxes(tickvals=list(range(len(order))), ticktext=[label(a).replace(" ", "<br>") for a in order], range=[-0.55, len(order) - 0.45 + room], showgrid=False, **panel.at)


def _strip(figure: Figure, panel: _Panel, y: str, undefined: bool) -> None:
    ticks = _ticks(panel.low, panel.high)
    low = panel.strip - 0.06 * (panel.high - panel.low) if undefined else panel.low
    if undefined:
        figure.add_hrect(y0=low, y1=panel.low, fillcolor=MUTED, opacity=0.15, line_width=0, **panel.at)
    figure.update_yaxes(title={"text": y, "standoff": 4, "font": {"size": 11}}, range=[low, panel.high], tickvals=[*ticks, *([panel.strip] if undefined else [])],
                        ticktext=[*(f"{t:g}".replace("-", MINUS) for t in ticks.round(10)), *(["undefined"] if undefined else [])], **panel.at)


def _mean_curve(part: pd.DataFrame) -> pd.Series:
    """Mean over the seeds that are defined anywhere; NaN at a size where one of them is not: means of other seeds would not join."""
    wide = part.assign(seed=part["seed"].fillna(-1)).pivot_table(index="size", columns="seed", values="recovery", aggfunc="mean", dropna=False).astype(float).sort_index()
    return wide.loc[:, wide.notna().any()].mean(axis=1, skipna=False)


# -- titles -------------------------------------------------------------------------------------------


def _headline(found: Mapping[str, Verdict], students: Sequence[str], arm: str, baseline: str) -> str:
    what = f"{label(arm)} {MINUS} {label(baseline)} in held-out recovery"
    if not found:
        return f"{what}: not compared"
    short = {"no claim": lambda v: f"no claim ({len(v.seeds)} paired seeds)", "not shown": lambda v: "no difference shown"}
    said = [f"{short.get(v.difference, lambda v: v.difference)(v)} in {student}" for student in students if (v := found.get(student))]
    return f"{what}: {'; '.join(said)}"


def _finding(v: Verdict | None, arm: str, baseline: str, digits: int = 2) -> str:
    if v is None:
        return f"no {label(arm)} to compare"
    signed = lambda x: f"{x:+.{digits}f}".replace("-", MINUS)  # noqa: E731
    left = f"; {v.undefined} of {v.undefined + len(v.seeds)} seeds undefined" if v.undefined else ""
    start = f"{label(arm)} {MINUS} {label(baseline)} "
    if v.difference == "no claim" or v.interval is None:
        few = f"no claim under {CLAIM_SEEDS} paired seeds" if len(v.seeds) < CLAIM_SEEDS else f"no claim: {v.no_claim}"
        listed = f"{', '.join(map(signed, v.differences))}, higher in {v.higher} of {len(v.seeds)}" if v.seeds else "undefined"
        return f"{start}{listed}{left}; {few}"
    said = "no difference shown" if v.difference == "not shown" else v.difference
    equal = {"equivalent": f", equivalent within \u00b1{v.bound}", "inconclusive": f", equivalence within \u00b1{v.bound} inconclusive"}.get(v.equivalence or "", "")
    return f"{start}{signed(v.mean)} [{signed(v.interval[0])}, {signed(v.interval[1])}], {said} (Holm p {v.p_holm:.2g}){equal}, higher in {v.higher} of {len(v.seeds)} seeds{left}"


def _seeds(n: int) -> str:
    return f"means of {n} seeds, " + ("no claim" if n < CLAIM_SEEDS else "not tested")


def _margins_title(mine: pd.DataFrame, arm: str, baseline: str) -> str:
    said, fewest = [], []
    for name in (arm, baseline):
        rows = mine.loc[mine["arm"] == name, ["m", "m0"]].astype(float).dropna()
        if len(rows):
            fewest.append(len(rows))
            m, m0 = rows.mean()
            said.append(f"{m - m0:.1f} of {m:.1f} logits in {label(name)}".replace("-", MINUS))
    return f"at departures attention carries {', '.join(said)} ({_seeds(min(fewest))})" if said else "margins are undefined"


def _curve_title(lines: pd.DataFrame, arm: str, baseline: str) -> str:
    said, fewest = [], []
    for name in (arm, baseline):
        part = lines[lines["arm"] == name]
        mean = _mean_curve(part) if len(part) else pd.Series(dtype=float)
        if mean.notna().any():
            fewest.append(part.loc[np.isfinite(part["recovery"].astype(float)), "seed"].nunique())
            enough = mean.index[mean >= ENOUGH]
            said.append(f"{enough[0]:g} head{'' if enough[0] == 1 else 's'} in {label(name)}" if len(enough) else f"not reached in {label(name)} (at most {mean.max():.2f})")
    return f"R of {ENOUGH:g}: {', '.join(said)} ({_seeds(min(fewest))})" if said else "the curve is undefined"
