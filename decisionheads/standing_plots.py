"""Figures of causal standing: head sets, families and blocked reads. Plotly, returned and never shown.

Each takes a table of a run folder, or what `Standing.tables()` gives; intervals are 95%.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from .looks import AGAINST, FOR, LINE, MUTED, SCALE, layout, legend_below, names_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from .comparison import Comparison

FAMILY_COLOUR = {"region": FOR, "near-miss": AGAINST, "neither": MUTED}


def texts_judged(table: pd.DataFrame, name: str, random_95: tuple[float | None, float | None] = (None, None)) -> Figure:
    """Necessity and sufficiency of a set, one point for each held-out text (rows of `texts.csv`, or `Judged.to_frame()`).

    Args:
        name: of the set.
        random_95: 95% quantiles of pooled N and R of random sets, drawn as a band from 0.
    """
    import plotly.graph_objects as go

    mine = table[table["set"] == name] if "set" in table else table
    figure = go.Figure()
    shares = []
    for x, (column, p, word) in enumerate((("necessity", "necessity_p", "necessary"), ("sufficiency", "sufficiency_p", "sufficient"))):
        value = mine[column].to_numpy(float)
        yes = (value >= 0.5) & (mine[p].to_numpy(float) <= 0.05)
        shares.append(f"{word} in {int(yes.sum())} of {int(np.isfinite(value).sum())}")
        jitter = x + np.random.default_rng(0).uniform(-0.28, 0.28, len(value))
        if random_95[x] is not None:
            figure.add_shape(type="rect", x0=x - 0.42, x1=x + 0.42, y0=0, y1=random_95[x], fillcolor=MUTED, opacity=0.35, line_width=0, layer="below")
        figure.add_scatter(x=jitter, y=value, mode="markers", text=mine["transcript"], marker={"size": 7, "opacity": 0.75, "color": np.where(yes, FOR, MUTED).tolist()},
                           hovertemplate="%{text}<br>%{y:.2f}<extra></extra>")
    figure.add_hline(y=0.5, line={"color": LINE, "dash": "dot", "width": 1}, annotation={"text": "half of what attention carries", "font": {"size": 11}})
    layout(figure, f"{name.capitalize()} set: {' and '.join(shares)} held-out texts", "", "share of the margin that attention carries", 400)
    return figure.update_xaxes(tickvals=[0, 1], ticktext=["lost without the set", "kept by the set alone"], range=[-0.6, 1.6], showgrid=False, zeroline=False)


def phase_map(table: pd.DataFrame) -> Figure:
    """Each set ablated (rows), each kind of decision measured (columns): share of the margin lost."""
    import plotly.graph_objects as go

    grid = table.pivot(index="ablated", columns="measured", values="necessity")
    rows, columns = list(dict.fromkeys(table["ablated"])), list(dict.fromkeys(table["measured"]))
    value = grid.loc[rows, columns].to_numpy(float)
    low, high, random = (table.pivot(index="ablated", columns="measured", values=c).loc[rows, columns].to_numpy(float) for c in ("low", "high", "random"))
    text = [[f"<b>{value[i, j]:.2f}</b><br>[{low[i, j]:.2f}, {high[i, j]:.2f}]<br>random {random[i, j]:.2f}" if np.isfinite(value[i, j]) else "n/a"
             for j in range(len(columns))] for i in range(len(rows))]
    limit = max(1.0, float(np.nanmax(np.abs(value))))
    figure = go.Figure(go.Heatmap(z=value, x=columns, y=rows, colorscale=SCALE, zmin=-limit, zmax=limit, xgap=3, ygap=3, hoverinfo="skip", showscale=False))  # every cell says its number
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            figure.add_annotation(x=column, y=row, text=text[i][j], showarrow=False, font={"size": 11, "color": "white" if abs(value[i, j]) > 0.6 * limit else "#222222"})
    own = [value[rows.index(k), columns.index(k)] for k in columns if k in rows]
    other = [value[i, j] for i, r in enumerate(rows) for j, c in enumerate(columns) if r != c and r in columns]
    layout(figure, f"Own set ablated: {np.nanmin(own):.2f} to {np.nanmax(own):.2f} of the margin lost; another kind's set: {np.nanmin(other):.2f} to {np.nanmax(other):.2f}"
           if own and other else "What each set takes from each kind of decision", "decisions measured (share of the margin lost)", "set ablated", 130 + 80 * len(rows), narrowest=120 + 80 * len(columns))
    figure.update_xaxes(showgrid=False)
    return figure.update_yaxes(autorange="reversed", showgrid=False, zeroline=False)


def family_reads(table: pd.DataFrame) -> Figure:
    """What calibrated heads read at each kind of decision: share of attention outside sinks, beside control windows and null tokens."""
    import plotly.graph_objects as go

    mine = table[table["calibrated"]].drop_duplicates(["kind", "span", "layer", "head"]).copy()
    mine["row"] = names_of(mine) + "  " + mine["kind"] + ", " + mine["span"]
    mine = mine.sort_values(["span", "kind", "reading"])
    figure = go.Figure()
    for family, colour in FAMILY_COLOUR.items():
        part = mine[mine["family"] == family]
        figure.add_scatter(x=part["reading"], y=part["row"], mode="markers", name=f"{family} family" if family != "neither" else "reads neither",
                           marker={"size": 10, "color": colour, "symbol": np.where(part["reads"], "circle", "circle-open").tolist()},
                           error_x={"type": "data", "symmetric": False, "array": part["high"] - part["reading"], "arrayminus": part["reading"] - part["low"], "color": LINE},
                           hovertemplate="%{y}<br>%{x:+.3f} more than control windows<extra></extra>")
    figure.add_scatter(x=mine["null_reading"], y=mine["row"], mode="markers", name="at null tokens", marker={"symbol": "line-ns-open", "size": 13, "color": LINE},
                       hovertemplate="%{y} at null tokens %{x:+.3f}<extra></extra>")
    heads = {family: mine[(mine["family"] == family)][["layer", "head"]].drop_duplicates().shape[0] for family in FAMILY_COLOUR}
    layout(figure, f"{heads['region']} heads read the chosen block, {heads['near-miss']} the near-miss, {heads['neither']} neither", "share of attention on the span, more than on control windows", "",
           160 + 20 * len(mine), narrowest=520)
    figure.update_yaxes(categoryorder="array", categoryarray=list(mine["row"]), dtick=1)
    return legend_below(figure.update_layout(margin={"l": 190}), 2)


def family_depth(table: pd.DataFrame) -> Figure:
    """Heads of each family by layer."""
    import plotly.graph_objects as go

    heads = table.drop_duplicates(["layer", "head"])
    layers = int(table["layer"].max()) + 1
    figure, said = go.Figure(), []
    for family, colour in FAMILY_COLOUR.items():
        part = heads[heads["family"] == family]
        count = part.groupby("layer").size().reindex(range(layers), fill_value=0)
        figure.add_bar(x=list(range(layers)), y=count, name=f"{family} family" if family != "neither" else "reads neither", marker={"color": colour},
                       hovertemplate="layer %{x}: %{y}<extra></extra>")
        if len(part):
            said.append(f"{family} {part['layer'].mean() / max(1, layers - 1):.2f}")
    layout(figure, f"Mean relative depth: {', '.join(said)}" if said else "No head belongs to a family", "layer", "heads", 320)
    figure.update_yaxes(dtick=max(1, int(heads.groupby(["family", "layer"]).size().max() // 5)) if said else 1)
    figure.update_xaxes(dtick=1 if layers <= 16 else 4, zeroline=False)
    return legend_below(figure.update_layout(barmode="group"), 2)


def blocked_reads(table: pd.DataFrame) -> Figure:
    """What is left of a family's effect when it cannot read: removed share with its interval, arms above, controls below.

    Rows of `read_blocking.csv`, or `Blocked.to_frame()`. Families and kinds for which it is undefined are left out.
    """
    import plotly.graph_objects as go

    if "family" not in table:  # of one set, not of a run
        table = table.assign(family=np.where(table["span"] == "near-miss", "near-miss", "region"))
    defined = table[table["removed"].notna()].copy()
    panels = list(dict.fromkeys(zip(defined["family"], defined["kind"], defined["span"], strict=True)))
    if not panels:
        return layout(go.Figure(), "No family has an effect that blocking could remove", "", "", 160)
    names = list(dict.fromkeys(table["name"]))
    figure = go.Figure()
    for number, (family, kind, span) in enumerate(panels):
        part = defined[(defined["family"] == family) & (defined["kind"] == kind) & (defined["span"] == span)]
        offset = (number - (len(panels) - 1) / 2) * 0.7 / len(panels)
        y = [names.index(n) + offset for n in part["name"]]
        colour = FAMILY_COLOUR[family]
        figure.add_scatter(x=part["removed"], y=y, mode="markers", name=f"{family} family, {span}, {kind} decisions",
                           marker={"size": 9, "color": colour, "symbol": ["circle", "diamond", "square", "triangle-up", "cross"][number % 5]}, text=part["name"],
                           error_x={"type": "data", "symmetric": False, "array": part["high"] - part["removed"], "arrayminus": part["removed"] - part["low"], "color": LINE},
                           hovertemplate="%{text}: %{x:.2f}<extra></extra>")
    arms, controls = defined[defined["name"] == "before softmax"]["removed"], defined[defined["role"] == "control"]["removed"].abs()
    for x in (0, 1):
        figure.add_vline(x=x, line={"color": LINE, "dash": "dot", "width": 1})
    n_arms = int((table.drop_duplicates("name")["role"] == "arm").sum())
    figure.add_hrect(y0=-0.5, y1=n_arms - 0.5, fillcolor=MUTED, opacity=0.12, line_width=0)
    layout(figure, f"Blocking what a family reads removes {arms.min():.0%} to {arms.max():.0%} of its effect, controls at most {controls.max():.0%}", "share of the family's effect removed", "", 240 + 34 * len(names), narrowest=440)
    figure.update_yaxes(tickvals=list(range(len(names))), ticktext=names, autorange="reversed", showgrid=False, zeroline=False)
    return legend_below(figure.update_layout(margin={"l": 160}), len(panels))


def reference_choices(table: pd.DataFrame) -> Figure:
    """Necessity and recovery of each kind's set under other references than the mean, and with all positions from the answer on ablated."""
    import plotly.graph_objects as go

    table = table if "kind" in table else table.assign(kind="set")
    kinds, references = list(dict.fromkeys(table["kind"])), list(dict.fromkeys(table["reference"]))
    figure = go.Figure()
    for column, colour, symbol, shift in (("necessity", FOR, "circle", -0.12), ("recovery", AGAINST, "diamond-open", 0.12)):
        y = [references.index(r) + shift + (kinds.index(k) - (len(kinds) - 1) / 2) * 0.07 for r, k in zip(table["reference"], table["kind"], strict=True)]
        figure.add_scatter(x=table[column], y=y, mode="markers", name="lost without the set" if column == "necessity" else "kept by the set alone", text=table["kind"],
                           marker={"size": 9, "color": colour, "symbol": symbol}, hovertemplate="%{text}: %{x:.2f}<extra></extra>",
                           error_x={"type": "data", "symmetric": False, "array": table[f"{column}_high"] - table[column], "arrayminus": table[column] - table[f"{column}_low"], "color": LINE})
    low = table.groupby("reference")[["necessity", "recovery"]].min()
    worst = low["recovery"].idxmin()
    layout(figure, f"Necessity is at least {low['necessity'].min():.2f} under every reference; recovery falls to {low['recovery'].min():.2f} ({worst})", "share of the margin that attention carries", "",
           170 + 60 * len(references), narrowest=420)
    figure.update_yaxes(tickvals=list(range(len(references))), ticktext=references, autorange="reversed", showgrid=False, zeroline=False)
    return legend_below(figure.update_layout(margin={"l": 140}), 2)


def two_models(found: Comparison) -> Figure:
    """Two runs side by side: depth of every selected head by kind, and both phase matrices."""
    from plotly.subplots import make_subplots

    runs, colours = (found.one, found.other), (FOR, AGAINST)
    kinds = list(dict.fromkeys(k for run in runs for k in run.summary["kinds"]))
    figure = make_subplots(2, 2, specs=[[{"colspan": 2}, None], [{}, {}]], row_heights=[0.42, 0.58], vertical_spacing=0.24, horizontal_spacing=0.06, shared_yaxes=True,
                           subplot_titles=["", *found.names])
    for side, (run, name, colour) in enumerate(zip(runs, found.names, colours, strict=True)):
        heads = run.tables["heads"]
        heads = heads[heads["selected"]]
        y = [kinds.index(k) + (side - 0.5) * 0.3 for k in heads["kind"]]
        figure.add_scatter(x=heads["layer"] / max(1, run.shape[0] - 1), y=y, mode="markers", name=name, text=name + " " + names_of(heads), row=1, col=1,
                           marker={"size": 11, "opacity": 0.75, "color": colour, "symbol": ["circle", "diamond"][side]}, hovertemplate="%{text}: depth %{x:.2f}<extra></extra>")
        table = run.tables["phase_matrix"]
        rows, columns = list(dict.fromkeys(table["ablated"])), list(dict.fromkeys(table["measured"]))
        value = table.pivot(index="ablated", columns="measured", values="necessity").loc[rows, columns].to_numpy(float) if len(table) else np.zeros((0, 0))
        figure.add_heatmap(z=value, x=columns, y=rows, colorscale=SCALE, zmin=-1, zmax=1, xgap=3, ygap=3, hoverinfo="skip", showscale=False, row=2, col=1 + side,
                           text=[[f"{v:.2f}" for v in row] for row in value], texttemplate="%{text}")
        figure.update_yaxes(autorange="reversed", showgrid=False, title="set ablated" if side == 0 else "", row=2, col=1 + side)
        figure.update_xaxes(title="share of the margin lost" if side == 0 else "", showgrid=False, row=2, col=1 + side)
    sizes = " and ".join(f"{run.summary['global']['set_size']} of {run.shape[0] * run.shape[1]} heads in {name}" for run, name in zip(runs, found.names, strict=True))
    named = [axis.title.text for axis in (figure.layout.xaxis2, figure.layout.yaxis2, figure.layout.xaxis3)]
    layout(figure, f"Global sets: {sizes}", "relative depth of selected heads (0 first layer, 1 last)", "", 600)
    for axis, text in zip((figure.layout.xaxis2, figure.layout.yaxis2, figure.layout.xaxis3), named, strict=True):  # layout names all axes alike
        axis.title.text = text
    figure.update_xaxes(range=[-0.03, 1.03], zeroline=False, row=1, col=1)
    figure.update_yaxes(tickvals=list(range(len(kinds))), ticktext=kinds, range=[len(kinds) - 0.5, -0.5], zeroline=False, row=1, col=1)
    figure.update_xaxes(showgrid=False, row=2)
    return legend_below(figure.update_layout(margin={"l": 90}), 2)
