"""The page that a report is written on: style, figures under captions that wrap, claims with links, tables that fold.

Everything that comes from a file is escaped here or by the caller; nothing is loaded from anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MOST_ROWS = 200  # of a table in the page; the file beside it has the rest
TABLES = {
    "heads": "every head of every kind on the selection split: effect, interval, null, p and q",
    "opposing": "the same for heads that oppose the decision",
    "texts": "necessity and sufficiency of each set in each held-out text",
    "phase_matrix": "share of the margin that each set takes from each kind of decision",
    "knock_in": "another text's decision knocked in, and every control",
    "reads": "attention of each head on each span, beside control windows and null tokens",
    "read_blocking": "what blocking a span removes of a family's effect, arms and controls",
    "stability": "agreement of the heads selected on either half of the selection split",
    "references": "necessity and recovery under other references than the mean",
    "elicitation": "each cut at which the region was asked for",
    "elicitation_heads": "every head ablated at the cut and at the cue",
}
STYLE = """
:root { color-scheme: light dark; --line: rgba(128,128,128,.35); --soft: rgba(128,128,128,.12); --for: #01756c; --against: #a6611a; --link: light-dark(#01756c, #4cc7bb); }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { margin-top: 3rem; border-bottom: 1px solid var(--line); } h3 { margin-top: 2rem; }
small, .soft { opacity: .8; } a { color: var(--link); }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: .6rem 0; border-block: 1px solid var(--line); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; font-size: .9rem; overflow-wrap: normal; } .wide { overflow-x: auto; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; } th:first-child, td:first-child { text-align: left; }
table.facts td, table.facts th { text-align: left; } table.facts td { overflow-wrap: anywhere; } table.facts td:first-child { white-space: nowrap; }
tr.selected td:first-child { font-weight: 700; color: var(--link); } .warning { border-left: 4px solid var(--against); background: var(--soft); padding: .4rem .8rem; margin: .4rem 0; }
ul.said { padding-left: 1.1rem; margin: .6rem 0; } ul.said li.deep { margin-left: 1.1rem; } ul.said a { font-size: .85rem; white-space: nowrap; }
figure { margin: 1.4rem 0; } figcaption { font-weight: 600; margin-bottom: .2rem; }
details { margin: .6rem 0; } summary { cursor: pointer; }
.tokens { font: 14px/1.9 ui-monospace, monospace; white-space: pre-wrap; background: var(--soft); padding: .8rem; border-radius: .4rem; }
.tokens mark { background: var(--for); color: white; border-radius: .2rem; padding: 0 .1rem; } .tokens i { background: var(--against); color: white; font-style: normal; border-radius: .2rem; }
@media (max-width: 40rem) { body { margin: 1rem auto; } h1 { font-size: 1.35rem; } th, td { padding: .2rem .4rem; } }
@media print {
  body { max-width: none; margin: 0; font-size: 10.5pt; } nav, details:not([open]), ul.said a, #tables:not(:has(details[open])) { display: none; } a { color: inherit; text-decoration: none; }
  figure, tr, .tokens, ul.said { break-inside: avoid; } h2, h3 { break-after: avoid; } .wide { overflow: visible; } table { font-size: 7.5pt; } th, td { padding: .1rem .25rem; }
}
"""
SCRIPT = """
const opened = () => { const t = document.getElementById(location.hash.slice(1)); if (t && t.tagName === 'DETAILS') t.open = true; };
addEventListener('hashchange', opened); opened();
const plots = () => document.querySelectorAll('.js-plotly-plot');
addEventListener('beforeprint', () => plots().forEach(p => Plotly.relayout(p, {autosize: false, width: 660})));
addEventListener('afterprint', () => plots().forEach(p => Plotly.relayout(p, {autosize: true, width: null})));
"""


def page(title: str, opening: str, warnings: Sequence[str], sections: Mapping[str, str]) -> str:
    """A whole page; `opening` and the sections are HTML, title and warnings are text."""
    from plotly.offline import get_plotlyjs

    anchor = lambda name: name.lower().replace(" ", "-")  # noqa: E731
    links = "".join(f"<a href='#{anchor(name)}'>{name}</a>" for name in sections)
    body = "\n".join(f"<section id='{anchor(name)}'><h2>{name}</h2>\n{content}\n</section>" for name, content in sections.items())
    said = "".join(f"<p class=warning>{escape(note)}</p>" for note in warnings)
    return ("<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
            f"<title>{escape(title)}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head>\n<body>\n<h1>{escape(title)}</h1>\n{opening}\n<nav>{links}</nav>\n{said}\n"
            f"{body}\n<script>{SCRIPT}</script>\n</body></html>\n")


def figures(*drawn: Figure) -> list[str]:
    """Each figure under its title as a caption, which wraps where a title inside the figure would be cut off."""
    return [_figure(figure) for figure in drawn]


def _figure(figure: Figure) -> str:
    import plotly.graph_objects as go

    figure = go.Figure(figure)
    name = "figure-" + hashlib.sha256(figure.to_json().encode()).hexdigest()[:12]  # the same run, the same page; by title, too: kinds may be alike otherwise
    lines = (figure.layout.title.text or "").split("<br>")
    top, height = figure.layout.margin.t or 100, figure.layout.height or 450
    freed = min(26 + 22 * len(lines), top - 12)
    figure.update_layout(title={"text": ""}, margin={"t": top - freed}, height=height - freed)
    narrowest = (figure.layout.meta or {}).get("narrowest", 340)
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config={"displayModeBar": False, "responsive": True})
    return f"<figure><figcaption>{escape(' '.join(lines))}</figcaption><div class=wide><div style='min-width:{int(narrowest)}px'>{drawn}</div></div></figure>"


def claims(lines: Sequence[str], table: str) -> str:
    """Findings in words, the last with a link to the table that they were read from."""
    lines = [line for line in lines if line.strip()]
    items = "".join(f"<li{' class=deep' if line.startswith('    ') else ''}>{escape(line.strip())}{f' <a href=#table-{table}>table</a>' if line is lines[-1] else ''}</li>" for line in lines)
    return f"<ul class=said>{items}</ul>"


class Tables(dict[str, pd.DataFrame]):
    """The tables of a run by name, as far as there are any."""

    def filled(self, name: str) -> bool:
        """Whether a table is there and has rows."""
        return name in self and len(self[name]) > 0

    def of_kind(self, name: str, kind: str) -> pd.DataFrame:
        return self[name][self[name]["kind"] == kind].reset_index(drop=True)

    def html(self) -> str:
        """All tables, folded; of a long one the first rows."""
        return "\n".join(self._folded(name) for name in self)

    def _folded(self, name: str) -> str:
        table = self[name]
        rest = f", of which the first {MOST_ROWS} are here" if len(table) > MOST_ROWS else ""
        shown = table.head(MOST_ROWS).to_html(index=False, border=0, na_rep="", float_format=lambda x: f"{x:.4g}", classes="all", escape=True)
        return f"<details id=table-{name}><summary><b>{name}.csv</b>: {escape(TABLES[name])} ({len(table)} rows{rest})</summary><p><a href='{name}.csv'>{name}.csv</a> lies beside this page.</p><div class=wide>{shown}</div></details>"
