"""The report: one self-contained HTML file that opens offline, in light and in dark."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

import pandas as pd

from .run_folder import read_json, read_table
from .words import closing_lines, kind_lines

STYLE = """
:root { color-scheme: light dark; --line: rgba(128,128,128,.35); --soft: rgba(128,128,128,.12); --for: #01857b; --against: #b06a1a; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); } small, .soft { opacity: .75; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; font-size: .9rem; } .wide { overflow-x: auto; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--line); } th:first-child, td:first-child { text-align: left; }
tr.selected td:first-child { font-weight: 700; color: var(--for); } .warning { border-left: 4px solid var(--against); background: var(--soft); padding: .4rem .8rem; margin: .4rem 0; }
.said { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; }
.tokens { font: 14px/1.9 ui-monospace, monospace; white-space: pre-wrap; background: var(--soft); padding: .8rem; border-radius: .4rem; }
.tokens mark { background: var(--for); color: white; border-radius: .2rem; padding: 0 .1rem; } .tokens i { background: var(--against); color: white; font-style: normal; border-radius: .2rem; }
@media print { body { max-width: none; } h2 { break-before: page; } }
"""


def build_report(folder: Path) -> str:
    """The report of a run folder, as HTML.

    Args:
        folder: a run folder whose tables are written.
    """
    from plotly.offline import get_plotlyjs
    from safetensors.numpy import load_file

    from . import plots, standing_plots

    manifest, summary = read_json(folder / "run.json"), read_json(folder / "summary.json")
    heads = pd.read_csv(folder / "heads.csv")
    nulls = load_file(folder / "null_max.safetensors")
    parts = [f"<h1>Heads that decide: {escape(Path(str(manifest['model'])).name)}</h1>", _opening(manifest, summary)]
    parts += [f"<p class=warning>{escape(note)}</p>" for note in summary["warnings"]]
    if summary["set_aside"]:
        parts.append(f"<p class=warning>{len(summary['set_aside'])} transcripts were set aside: {escape('; '.join(list(summary['set_aside'].values())[:3]))}</p>")
    if (folder / "example.json").is_file():
        parts.append(_example(read_json(folder / "example.json")))
    table_of = lambda name: read_table(folder / f"{name}.csv")  # noqa: E731
    draw = lambda figures: [f.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True}) for f in figures]  # noqa: E731
    together = "global" in summary
    texts, knocked = (table_of("texts"), table_of("knock_in")) if together else (None, None)
    for kind, found in summary["kinds"].items():
        table = heads[heads["kind"] == kind].reset_index(drop=True)
        parts.append(f"<h2>{escape(kind.capitalize())} decisions</h2>{_kind(kind, found)}")
        figures = [plots.effect_map(table), plots.ranked_heads(table), plots.attribution_against_exact(table)]
        if kind in nulls:
            figures.append(plots.null_distribution(table, nulls[kind]))
        parts += [*draw(figures), _table(table, found["selection"]["noise_floor"])]
        if not together:
            continue
        parts += ["<h3>The set, on held-out texts</h3>", _lines(kind_lines(found))]
        if found.get("set"):
            parts += draw([standing_plots.texts_judged(texts, kind, (found["necessity"]["random_95"], found["recovery"]["random_95"]))])
        if found.get("knock_in") and found["knock_in"]["recipients"]:
            parts += draw([plots.knock_in_controls(knocked[knocked["kind"] == kind], kind)])
    if together:
        parts.append(_together(summary, table_of, draw, texts))
    parts.append(f"<h2>How this was made</h2>{_made(manifest)}")
    return ("<!doctype html>\n<html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
            f"<title>decisionheads report</title><style>{STYLE}</style><script>{get_plotlyjs()}</script><body>\n" + "\n".join(parts) + "\n</body></html>\n")


def _together(summary: dict, table_of, draw, texts: pd.DataFrame) -> str:
    """The global set, families and blocked reads."""
    from . import plots, standing_plots

    whole = summary["global"]
    parts = ["<h2>All decisions together</h2>", _lines(closing_lines(summary))]
    if whole.get("set"):
        parts += draw([standing_plots.texts_judged(texts, "global", (whole["necessity"]["random_95"], whole["recovery"]["random_95"]))])
    for name, figures in (("phase_matrix", [standing_plots.phase_map]), ("reads", [standing_plots.family_reads, standing_plots.family_depth]),
                          ("read_blocking", [standing_plots.blocked_reads]), ("references", [standing_plots.reference_choices])):
        table = table_of(name)
        if len(table):
            parts += draw([figure(table) for figure in figures])
    if (summary.get("elicitation") or {}).get("mentions"):
        parts += draw([plots.elicitation_lead(summary["elicitation"])])
    return "\n".join(parts)


def _lines(lines: list[str]) -> str:
    return "<pre class=said>" + escape("\n".join(lines).strip("\n")) + "</pre>"


def _opening(manifest: dict, summary: dict) -> str:
    sizes = summary["transcripts"]
    found = "; ".join(f"<b>{len(k['selection']['selected'])}</b> of {k['heads']} heads for {escape(kind)} decisions" for kind, k in summary["kinds"].items())
    return (f"<p>{sum(sizes.values())} transcripts ({sizes['reference']} reference, {sizes['selection']} selection, {sizes['evaluation']} evaluation): {found}.</p>"
            "<p class=soft>Every effect is exact: a real forward pass with the head's output at the decision replaced by its mean. Positive means that the head supports "
            "the decision. Heads are selected against matched null tokens on the selection split; what is called held out was measured on the evaluation split.</p>")


def _kind(kind: str, found: dict) -> str:
    found = found["selection"]
    dropped = ", ".join(f"{n} {escape(reason)}" for reason, n in found["dropped"].items()) or "none"
    agree = ", ".join(f"{escape(name)} {'n/a' if x is None else f'{x:.2f}'}" for name, x in found["reference_agreement"].items())
    return (f"<p>{found['events']} events in {found['transcripts']} transcripts, mean margin {found['m']:.2f} logits, {found['m0']:.2f} with every head ablated. "
            f"{found['calibrated_events']} events have matched null tokens, {found['left_out']} have too few. Dropped: {dropped}.</p>"
            f"<p class=soft>Ablated with other references than the mean, the ranking of heads agrees with Spearman {agree}.</p>")


def _table(table: pd.DataFrame, floor: float = 0.0, most: int = 15) -> str:
    columns = ["effect", "ci_low", "ci_high", "null_effect", "statistic", "p_value", "p_maxt", "q_value", "attribution", "dla"]
    head = "".join(f"<th>{c.replace('_', ' ')}</th>" for c in ["head", *columns])
    rows = "".join(f"<tr{' class=selected' if r.selected else ''}><td>{'~' if abs(r.effect) < floor else ''}L{r.layer}H{r.head}</td>"
                   + "".join(f"<td>{getattr(r, c):.4f}</td>" if c in ("p_value", "p_maxt", "q_value") else f"<td>{getattr(r, c):+.3f}</td>" for c in columns) + "</tr>"
                   for r in table.head(most).itertuples())
    return (f"<div class=wide><table><tr>{head}</tr>{rows}</table></div><small>The first {min(most, len(table))} of {len(table)} heads; all of them are in heads.csv. Effects and attributions in logits."
            + (f" ~: the effect is smaller than what rounding in 16 bits does to a single one, {floor:.3f} logits." if floor else "") + "</small>")


def _example(example: dict) -> str:
    tokens = "".join(f"<mark>{escape(t)}</mark>" if i == example["chosen"] else f"<i>{escape(t)}</i>" if i in example["near_miss"] else escape(t)
                     for i, t in enumerate(example["tokens"]))
    return (f"<h2>One decision</h2><p>At the marked token the model wrote <b>{escape(repr(example['wrote']))}</b> and not <b>{escape(repr(example['against']))}</b>, "
            f"by a margin of <b>{example['m']:.2f} logits</b>; with every head ablated at that position {example['m0']:.2f} are left. It is a {escape(example['kind'])} event"
            f"{', and the near-miss that the reasoning named is marked too' if example['near_miss'] else ''}.</p><div class=tokens>{tokens}</div>")


def _made(manifest: dict) -> str:
    rows = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(json.dumps(v) if not isinstance(v, str) else v)}</td></tr>"
                   for part in ("versions", "options", "inputs", "timings") for k, v in manifest.get(part, {}).items())
    return f"<div class=wide><table>{rows}</table></div>"

