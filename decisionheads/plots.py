"""Figures: Plotly, returned and never shown. Titles say the finding, axes carry units.

Signed effects use one diverging scale centred at zero (brown against, blue-green for) that colour-blind
readers can tell apart; heads that were not selected are muted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import pandas as pd

from .errors import InputError
from .looks import AGAINST, FOR, LINE, MUTED, PALE, SCALE, for_paper, layout, legend_below, names_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from .heads import HeadScores

    class HasFrame(Protocol):
        def to_frame(self) -> pd.DataFrame: ...

__all__ = ["effect_map", "score_map", "ranked_heads", "attribution_against_exact", "null_distribution", "knock_in_controls", "elicitation_lead", "for_paper"]


def of_kind(table: pd.DataFrame | HasFrame, kind: str | None) -> pd.DataFrame:
    """The rows of one kind, of a table or of anything that gives one by `to_frame()`.

    Raises:
        InputError: for a kind that is not there, or none where there are several.
    """
    table = table if isinstance(table, pd.DataFrame) else table.to_frame()
    kinds = list(dict.fromkeys(table["kind"]))
    if kind is None and len(kinds) == 1:
        return table.reset_index(drop=True)
    if kind not in kinds:
        raise InputError(f"kind={kind!r}: the table holds {', '.join(kinds) or 'no head'}; name one of them")
    return table[table["kind"] == kind].reset_index(drop=True)


def _found(table: pd.DataFrame) -> str:
    heads = list(names_of(table[table.selected]))
    if not heads:
        return "no head is selected"
    return f"{', '.join(heads[:4])}{f' and {len(heads) - 4} more' if len(heads) > 4 else ''} {'support' if len(heads) > 1 else 'supports'} the choice"


def effect_map(table: pd.DataFrame | HasFrame, kind: str | None = None) -> Figure:
    """Layer by head: mean exact effect of every head on one kind of decision, logits.

    Selected heads carry their number; the others are drawn paler. Hover shows interval and q-value.

    Args:
        table: a `Discovery`, or rows of `heads.csv`.
        kind: which kind of decision; may be left out where the table holds one.
    """
    table = of_kind(table, kind)
    layers, heads = int(table["layer"].max()) + 1, int(table["head"].max()) + 1
    grid = table.set_index(["layer", "head"]).sort_index()
    at = lambda column: grid[column].to_numpy().reshape(layers, heads)  # noqa: E731
    selected = at("selected").astype(bool)
    columns = [at(c) for c in ("effect", "ci_low", "ci_high", "null_effect", "q_value")]
    hover = [[f"L{i}H{j}<br>effect {e:+.3f} logits<br>95% [{low:+.3f}, {high:+.3f}]<br>at null tokens {null:+.3f}<br>q {q:.4f}{'<br>selected' if selected[i, j] else ''}"
              for j, (e, low, high, null, q) in enumerate(zip(*(c[i] for c in columns), strict=True))] for i in range(layers)]
    return _map(columns[0], selected, hover, f"{str(table['kind'].iloc[0]).capitalize()}: {_found(table)}", "logits", "not selected")


def score_map(scores: HeadScores) -> Figure:
    """Layer by head: the mean over events of any `HeadScores`, before anything is calibrated.

    Hover shows the 95% t-interval over events; heads whose interval holds 0 are drawn paler. An interval says how sure the
    mean is, not that the head matters more here than at any other token: that takes `discover`.
    """
    from scipy.stats import t

    mean, n = scores.mean(), len(scores.values)
    half = np.full(mean.shape, np.inf) if n < 2 else t.ppf(0.975, n - 1) * scores.values.std(0, ddof=1, dtype=np.float64) / np.sqrt(n)
    clear = np.abs(mean) > half
    hover = [[f"L{i}H{j}<br>mean {mean[i, j]:+.3f} {scores.unit}<br>" + (f"95% [{mean[i, j] - half[i, j]:+.3f}, {mean[i, j] + half[i, j]:+.3f}] over {n} events" if n > 1 else "one event, no interval")
              for j in range(mean.shape[1])] for i in range(mean.shape[0])]
    best = ", ".join(f"{head} {score:+.2f}" for head, score in scores.top(3))
    return _map(mean, clear, hover, f"{scores.name[:1].upper()}{scores.name[1:]} over {n} event{'' if n == 1 else 's'}, not calibrated: highest {best}", scores.unit, "95% interval holds 0")


def _map(value: np.ndarray, strong: np.ndarray, hover: list[list[str]], title: str, unit: str, pale: str) -> Figure:
    """Layer by head on the signed scale; what is not strong is drawn paler and without its number."""
    import plotly.graph_objects as go

    layers, heads = value.shape
    limit = float(np.abs(value).max()) or 1.0
    look = {"colorscale": SCALE, "zmin": -limit, "zmax": limit, "hoverinfo": "skip", "showscale": False, "xgap": 2, "ygap": 2}
    figure = go.Figure()
    figure.add_heatmap(z=value, **look | {"colorscale": PALE})
    figure.add_heatmap(z=np.where(strong, value, np.nan), **look)
    figure.add_heatmap(z=value, colorscale=[[0, "rgba(0,0,0,0)"], [1, "rgba(0,0,0,0)"]], showscale=False, text=hover, hovertemplate="%{text}<extra></extra>")
    # a scale of its own: a trace without any number, as where no head is selected, would show none
    figure.add_scatter(x=[0], y=[0], mode="markers", hoverinfo="skip", showlegend=False,
                       marker={"color": [0.0], "size": 0.1, "opacity": 0, "colorscale": SCALE, "cmin": -limit, "cmax": limit, "showscale": True,
                               "colorbar": {"title": {"text": unit}, "thickness": 12}})
    if strong.sum() <= 40:
        for i, j in np.argwhere(strong):
            dark = abs(value[i, j]) > 0.6 * limit
            figure.add_annotation(x=int(j), y=int(i), text=f"{value[i, j]:+.1f}", showarrow=False, font={"color": "white" if dark else "#222222", "size": 12 if heads <= 12 else 9})
    figure.update_xaxes(dtick=1 if heads <= 16 else 4, showgrid=False, zeroline=False, range=[-0.5, heads - 0.5])
    figure.update_yaxes(dtick=1 if layers <= 16 else 4, showgrid=False, zeroline=False, range=[-0.5, layers - 0.5])
    return layout(figure, title, "head" if strong.all() else f"head (pale: {pale})", "layer", 180 + 34 * min(layers, 24), narrowest=max(340, min(900, 170 + 36 * heads)))


def ranked_heads(table: pd.DataFrame | HasFrame, kind: str | None = None, *, most: int = 12) -> Figure:
    """The first heads of the ranking: exact effect with its 95% interval, beside the effect at null tokens."""
    import plotly.graph_objects as go

    table = of_kind(table, kind)
    top = table.head(most).iloc[::-1]
    colour = [FOR if chosen else MUTED for chosen in top["selected"]]
    figure = go.Figure()
    figure.add_scatter(x=top["null_effect"], y=names_of(top), mode="markers", marker={"symbol": "line-ns-open", "size": 14, "color": AGAINST},
                       hovertemplate="%{y} at null tokens %{x:+.3f} logits<extra></extra>")
    figure.add_scatter(x=top["effect"], y=names_of(top), mode="markers", marker={"size": 10, "color": colour},
                       error_x={"type": "data", "symmetric": False, "array": top["ci_high"] - top["effect"], "arrayminus": top["effect"] - top["ci_low"], "color": LINE},
                       hovertemplate="%{y} %{x:+.3f} logits<extra></extra>")
    n, kind = int(table["selected"].sum()), table["kind"].iloc[0]
    return layout(figure, f"{kind.capitalize()}: {n} of {len(table)} heads stand out from matched null tokens (bars)",
                   "exact effect on the margin, logits (95% interval over transcripts)", "", 140 + 26 * len(top))


def attribution_against_exact(table: pd.DataFrame | HasFrame, kind: str | None = None) -> Figure:
    """Integrated attribution and direct logit attribution of every head against its exact effect."""
    import plotly.graph_objects as go
    from scipy.stats import spearmanr

    table = of_kind(table, kind)
    figure = go.Figure()
    agreement = {}
    for column, name, symbol, colour in (("attribution", "attribution", "circle", FOR), ("dla", "direct", "diamond-open", AGAINST)):
        agreement[name] = spearmanr(table["effect"], table[column]).statistic
        figure.add_scatter(x=table["effect"], y=table[column], mode="markers", name=name, text=names_of(table), marker={"symbol": symbol, "size": 9, "color": colour},
                           hovertemplate="%{text}<br>exact %{x:+.3f}<br>" + name + " %{y:+.3f}<extra></extra>")
    low, high = float(table["effect"].min()), float(table["effect"].max())
    figure.add_scatter(x=[low, high], y=[low, high], mode="lines", line={"color": LINE, "dash": "dot", "width": 1}, hoverinfo="skip", showlegend=False)
    layout(figure, f"{table['kind'].iloc[0].capitalize()}: attribution ranks heads with Spearman {agreement['attribution']:.2f} of the exact effect, the direct path {agreement['direct']:.2f}",
            "exact effect, logits", "attribution, logits")
    return legend_below(figure)


def null_distribution(table: pd.DataFrame | HasFrame, null_max: np.ndarray, kind: str | None = None) -> Figure:
    """The largest statistic of all heads and kinds in every permutation, with this kind's selected heads marked."""
    import plotly.graph_objects as go

    table = of_kind(table, kind)
    figure = go.Figure()
    figure.add_histogram(x=null_max, nbinsx=60, marker={"color": MUTED}, hovertemplate="%{x:.2f}: %{y}<extra></extra>")
    threshold = float(np.quantile(null_max, 0.95))
    figure.add_vline(x=threshold, line={"color": LINE, "dash": "dot"}, annotation={"text": "5% of permutations reach this", "font": {"size": 11}})
    counts, _ = np.histogram(null_max, bins=60)
    chosen = table[table["selected"]]
    for i, (name, value) in enumerate(zip(names_of(chosen.head(12)), chosen["statistic"].head(12), strict=True)):
        figure.add_annotation(x=float(value), y=0, ax=0, ay=-30 - 22 * (i % 5), text=name, showarrow=True, arrowcolor=FOR, font={"color": FOR})
    beyond = int((chosen["statistic"] > threshold).sum())
    return layout(figure, f"{table['kind'].iloc[0].capitalize()}: {beyond} of {len(chosen)} selected heads also pass the family-wise threshold",
                   "largest statistic among all heads and kinds, labels permuted", "permutations")


def knock_in_controls(frame: pd.DataFrame, kind: str) -> Figure:
    """Mean shift of every knock-in control with its 95% interval, and how many recipients it flips.

    Args:
        frame: rows of `KnockedIn.to_frame()`; a control without recipients is listed and greyed.
        kind: kind of events, for the title.
    """
    import plotly.graph_objects as go

    looks = {"true": (FOR, "circle"), "positive": (FOR, "circle-open"), "negative": (AGAINST, "diamond"), "identity": (LINE, "x-thin")}
    found = frame[frame["n"] > 0].set_index("control")
    figure = go.Figure()
    for role, rows in found.groupby("role", sort=False):
        colour, symbol = looks[role]
        error = {"type": "data", "symmetric": False, "array": rows["high"] - rows["shift"], "arrayminus": rows["shift"] - rows["low"], "color": LINE}
        hover = [f"{r.Index}: {r.shift:+.2f} logits" + (f"<br>95% [{r.low:+.2f}, {r.high:+.2f}]" if np.isfinite(r.low) else "") for r in rows.itertuples()]
        figure.add_scatter(x=rows["shift"], y=list(rows.index), mode="markers", name=role, error_x=error, text=hover, hovertemplate="%{text}<extra></extra>",
                           marker={"symbol": symbol, "size": 10, "color": colour, "line": {"width": 2, "color": colour}})
    columns = {"recipients": 62, "flipped": 110, "p": 155}  # pixels to the right of the plot

    def beside(name: str, y: str | float, text: str, **look) -> None:
        figure.add_annotation(x=1, xref="paper", xshift=columns[name], xanchor="right", y=y, text=text, showarrow=False, font={"size": 12, **look.pop("font", {})}, **look)

    for name in columns:
        beside(name, 1.0, name, yref="paper", yanchor="bottom")
    for r in frame.itertuples():
        if not r.n:
            beside("recipients", r.control, "n/a", opacity=0.55)
            continue
        for name, text in (("recipients", str(r.n)), ("flipped", f"{r.flipped:.0%}"), ("p", f"{r.p:.2g}")):
            if text != "nan":
                beside(name, r.control, text)
    names = list(frame["control"])
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=names[::-1], range=[-0.6, len(names) - 0.4], tickvals=names, tickfont={"size": 12},
                        ticktext=[name if n else f"<i>{name}</i>" for name, n in zip(names, frame["n"], strict=True)])
    layout(figure, f"{kind.capitalize()}: {_verdict(found)}", "shift towards the donor's choice, logits (95% interval over transcripts)", "", 170 + 32 * len(names), narrowest=520)
    figure.update_xaxes(nticks=4, tickangle=0)
    return figure.update_layout(margin={"l": 160, "r": 165, "t": figure.layout.margin.t + 20})


def _verdict(found: pd.DataFrame) -> str:
    """What the knock-in controls of a kind say together."""
    if "true" not in found.index:
        return "no decision has a donor"
    start = f"a donor's heads move the choice by {found.loc['true', 'shift']:+.1f} logits"
    tested = found.loc[(found["role"] == "negative") & np.isfinite(found["p"]), "p"]
    if tested.empty:
        return f"{start}; too few transcripts to test it"
    return f"{start}, " + (f"more than every negative control ({len(tested)} tested)" if tested.max() <= 0.05 else f"not clearly more than '{tested.idxmax()}'")


def elicitation_lead(summary: dict) -> Figure:
    """Share of regions had right by asking, `k` tokens before the code, with its 95% band, beside what it is held against.

    Args:
        summary: of an `elicitation.Elicitation`.
    """
    import plotly.graph_objects as go

    figure, table, where = go.Figure(), pd.DataFrame(summary["right_by_k"]), summary["where"]
    if table.empty:
        return layout(figure, "Elicitation: no code has a mention to ask after", f"tokens before the {where}", "share right")
    x, low, high = table["tokens_before"], table["low"], table["high"]
    figure.add_scatter(x=pd.concat([x, x[::-1]]), y=pd.concat([high, low[::-1]]), mode="lines", fill="toself", fillcolor="rgba(1,133,123,.18)", line={"width": 0}, hoverinfo="skip", name="95%")
    figure.add_scatter(x=x, y=table["share"], mode="lines+markers", marker={"size": 5}, line={"color": FOR}, name="right", customdata=table["n"],
                       hovertemplate="%{x} tokens before: %{y:.0%} of %{customdata}<extra></extra>")
    figure.add_scatter(x=x, y=table["note_replaced"].astype(float), mode="lines", line={"color": AGAINST, "dash": "dash"}, name="note replaced", hovertemplate="%{x} tokens before: %{y:.0%}<extra>note replaced</extra>")
    for value, name, dash in ((summary["baselines"]["before_mention"]["right"], "before the mention", "dashdot"), (summary["baselines"]["chance"], "chance", "dot")):
        if value is not None:
            figure.add_scatter(x=[x.min(), x.max()], y=[value, value], mode="lines", line={"color": LINE, "dash": dash}, name=name, hovertemplate=f"{name}: %{{y:.0%}}<extra></extra>")
    lead, elicitable = summary["lead"], summary["elicitable"]
    title = (f"Elicitation: {elicitable['share']:.0%} of {elicitable['n']} regions can be had by asking before they are written, "
             f"half of them from {lead['median']:g} tokens before the {where} on without a miss")
    layout(figure, title, f"tokens before the {where}", "share right")
    figure.update_xaxes(range=[x.max() + 1, 0])  # towards the code, as the text is read
    figure.update_yaxes(range=[-0.03, 1.03], tickformat=".0%")
    return legend_below(figure, 5)
