"""How figures look: one signed scale centred at zero, colours that colour-blind readers tell apart, light, dark and paper.

Figures have no background of their own and a grey that reads on white and on black, so that each works in a light and
in a dark notebook; `for_paper` gives a copy in black on white.
"""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SCALE = [[0.0, "#8c510a"], [0.25, "#d8b365"], [0.5, "#f2f2f2"], [0.75, "#5ab4ac"], [1.0, "#01665e"]]
PALE = [[0.0, "#d2c1ac"], [0.25, "#ede0c9"], [0.5, "#f7f7f7"], [0.75, "#c4e0dd"], [1.0, "#a5c9c5"]]  # a third of SCALE on white, opaque: it reads alike in light and dark
FOR, AGAINST, MUTED, LINE = "#12978b", "#b8742b", "#a8a8a8", "#888888"  # 3 to 1 and more on white and on Jupyter's dark ground; MUTED recedes
GRID = "rgba(136,136,136,.2)"
TEXT = "#7b7b7b"  # 4.2 to 1 on white, 4.4 to 1 on Jupyter's dark ground
ONE_LINE = 50  # characters of a title, which fit 400 pixels: Plotly cuts off what does not


def layout(figure: Figure, title: str, x: str, y: str, height: int = 420, narrowest: int = 340) -> Figure:
    """Title, axis titles with units, and the looks that all figures share.

    Args:
        narrowest: pixels under which the figure is scrolled rather than squeezed; kept in `layout.meta`.
    """
    lines = wrap(title, ONE_LINE)
    figure.update_layout(
        title={"text": "<br>".join(lines), "x": 0, "xanchor": "left", "pad": {"l": 10}, "font": {"size": 15}}, height=height + 22 * (len(lines) - 1),
        margin={"l": 70, "r": 30, "t": 48 + 22 * len(lines), "b": 60}, paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"color": TEXT, "size": 13},
        showlegend=False, meta={"narrowest": narrowest})
    said = lambda text: {"text": "<br>".join(wrap(text, 34)), "font": {"size": 14}}  # noqa: E731
    figure.update_xaxes(title=said(x), gridcolor=GRID, zerolinecolor=LINE, automargin=True)
    figure.update_yaxes(title=said(y), gridcolor=GRID, zerolinecolor=LINE)
    return figure


def legend_below(figure: Figure, lines: int = 1) -> Figure:
    """A legend under everything else, where it covers nothing however narrow the figure is.

    Args:
        lines: how many entries may come to stand one under the other.
    """
    room = 18 + 20 * lines
    return figure.update_layout(showlegend=True, legend={"orientation": "h", "x": 0, "xref": "container", "yref": "container", "y": 0, "yanchor": "bottom"},
                                margin={"b": (figure.layout.margin.b or 60) + room}, height=figure.layout.height + room)


def for_paper(figure: Figure, width: float = 180, height: float | None = None) -> Figure:
    """A copy in black on white for a paper: `for_paper(f).write_image("f.pdf")`, which needs kaleido and a Chrome or Chromium.

    Args:
        width: millimetres.
        height: millimetres; by default as high as on the screen.
    """
    import plotly.graph_objects as go

    copy = go.Figure(figure)
    pixels = 96 / 25.4
    copy.update_layout(paper_bgcolor="white", plot_bgcolor="white", font={"color": "black"}, width=round(width * pixels),
                       height=round(height * pixels) if height else figure.layout.height)
    copy.update_xaxes(gridcolor="#dddddd", linecolor="black")
    copy.update_yaxes(gridcolor="#dddddd", linecolor="black")
    for shown in copy.layout.annotations:  # what carries a colour of its own keeps it
        if shown.font.color in (TEXT, MUTED):
            shown.font.color = "black"
    return copy


def names_of(table: pd.DataFrame) -> pd.Series:
    """"L3H1" for each row with `layer` and `head`."""
    return "L" + table["layer"].astype(str) + "H" + table["head"].astype(str)
