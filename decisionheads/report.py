"""The report: one self-contained HTML file that opens offline, in light and dark, on a phone and on paper.

It tells a run in order: what was decided, which heads, how sure, which controls. Every claim links to its table, and
every table stands at the end, or says where the rest of it lies.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from . import words
from .report_page import TABLES, Tables, claims, figures, page
from .run_folder import read_json, read_table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def build_report(folder: Path) -> str:
    """The report of a run folder, as HTML.

    Args:
        folder: a run folder whose tables are written.
    """
    from safetensors.numpy import load_file

    manifest, summary = read_json(folder / "run.json"), read_json(folder / "summary.json")
    nulls = load_file(folder / "null_max.safetensors")
    together = "global" in summary
    tables = Tables({name: read_table(folder / f"{name}.csv") for name in TABLES if (folder / f"{name}.csv").is_file()})
    example = read_json(folder / "example.json") if (folder / "example.json").is_file() else None
    sections = {"What was decided": _decided(summary, example), "Which heads": _heads(summary, tables, together), "How sure": _sure(summary, tables, nulls, together)}
    if together:
        sections["Which controls"] = _controls(summary, tables)
    sections["Tables"] = tables.html()
    sections["How this was made"] = _made(manifest)
    name = Path(str(manifest["model"])).name
    return page(f"Heads that decide: {name}", _opening(summary), [*summary["warnings"], *_left_out(summary)], sections)


# -- what was decided ------------------------------------------------------------------------------------


def _opening(summary: dict) -> str:
    sizes = summary["transcripts"]
    found = "; ".join(f"<b>{len(k['selection']['selected'])}</b> of {k['heads']} heads for {escape(kind)} decisions" for kind, k in summary["kinds"].items())
    return (f"<p>{sum(sizes.values())} transcripts ({sizes['reference']} reference, {sizes['selection']} selection, {sizes['evaluation']} evaluation): {found}.</p>"
            "<p class=soft>Every effect is exact: a real forward pass with the head's output at the decision replaced by its mean. Positive means that the head supports "
            "the decision. Heads are selected against matched null tokens on the selection split; what is called held out was measured on the evaluation split.</p>")


def _left_out(summary: dict) -> list[str]:
    aside = list(summary["set_aside"].values())
    return [f"{len(aside)} transcripts were set aside: {'; '.join(aside[:3])}"] if aside else []


def _decided(summary: dict, example: dict | None) -> str:
    rows = []
    for kind, k in summary["kinds"].items():
        found = k["selection"]
        dropped = ", ".join(f"{n} {reason}" for reason, n in found["dropped"].items()) or "none"
        rows.append((kind, found["events"], found["transcripts"], f"{found['m']:.2f}", f"{found['m0']:.2f}", found["calibrated_events"], dropped))
    head = ("kind", "events", "texts", "margin, logits", "every head ablated", "with null tokens", "dropped")
    table = ("<div class=wide><table class=facts><tr>" + "".join(f"<th>{h}</th>" for h in head) + "</tr>"
             + "".join("<tr>" + "".join(f"<td>{escape(str(x))}</td>" for x in row) + "</tr>" for row in rows) + "</table></div>")
    return ("<p>A decision event is a token at which the model picks a region of the label space, a label within it, or leaves a near-miss that its own reasoning named. "
            "Each is scored by a margin: the logit of the token that was written, less that of its competitor.</p>" + table + (_example(example) if example else ""))


def _example(example: dict) -> str:
    tokens = "".join(f"<mark>{escape(t)}</mark>" if i == example["chosen"] else f"<i>{escape(t)}</i>" if i in example["near_miss"] else escape(t)
                     for i, t in enumerate(example["tokens"]))
    return (f"<h3>One decision</h3><p>At the marked token the model wrote <b>{escape(repr(example['wrote']))}</b> and not <b>{escape(repr(example['against']))}</b>, "
            f"by a margin of <b>{example['m']:.2f} logits</b>; with every head ablated at that position {example['m0']:.2f} are left. It is a {escape(example['kind'])} event"
            f"{', and the near-miss that the reasoning named is marked too' if example['near_miss'] else ''}.</p><div class=tokens>{tokens}</div>")


# -- which heads -------------------------------------------------------------------------------------------


def _heads(summary: dict, tables: Tables, together: bool) -> str:
    from . import plots, standing_plots

    parts = []
    for kind, k in summary["kinds"].items():
        heads = tables.of_kind("heads", kind)
        parts += [f"<h3>{escape(kind.capitalize())} decisions</h3>", *figures(plots.effect_map(heads)), _first_heads(heads, k["selection"]["noise_floor"])]
    if together:
        parts.append("<h3>Families</h3>" + claims(words.family_lines(summary), "reads"))
        if tables.filled("reads"):
            parts += figures(standing_plots.family_depth(tables["reads"]), standing_plots.family_reads(tables["reads"]))
    return "\n".join(parts)


def _first_heads(table: pd.DataFrame, floor: float = 0.0, most: int = 15) -> str:
    columns = ["effect", "ci_low", "ci_high", "null_effect", "statistic", "p_value", "p_maxt", "q_value", "attribution", "dla"]
    head = "".join(f"<th>{c.replace('_', ' ')}</th>" for c in ["head", *columns])
    rows = "".join(f"<tr{' class=selected' if r.selected else ''}><td>{'~' if abs(r.effect) < floor else ''}L{r.layer}H{r.head}</td>"
                   + "".join(f"<td>{getattr(r, c):.4f}</td>" if c in ("p_value", "p_maxt", "q_value") else f"<td>{getattr(r, c):+.3f}</td>" for c in columns) + "</tr>"
                   for r in table.head(most).itertuples())
    return (f"<div class=wide><table><tr>{head}</tr>{rows}</table></div><small>The first {min(most, len(table))} of {len(table)} heads; "
            "<a href='#table-heads'>all of them</a>. Effects and attributions in logits."
            + (f" ~: the effect is smaller than what rounding in 16 bits does to a single one, {floor:.3f} logits." if floor else "") + "</small>")


# -- how sure ----------------------------------------------------------------------------------------------


def _sure(summary: dict, tables: Tables, nulls: dict[str, np.ndarray], together: bool) -> str:
    from . import plots, standing_plots

    parts = []
    for kind, k in summary["kinds"].items():
        heads, found = tables.of_kind("heads", kind), k["selection"]
        agree = ", ".join(f"{name} {'n/a' if x is None else f'{x:.2f}'}" for name, x in found["reference_agreement"].items())
        parts += [f"<h3>{escape(kind.capitalize())} decisions</h3>", *figures(plots.ranked_heads(heads), *([plots.null_distribution(heads, nulls[kind])] if kind in nulls else [])),
                  *figures(plots.attribution_against_exact(heads)),
                  claims([f"{found['calibrated_events']} events have matched null tokens, {found['left_out']} have too few",
                          f"ablated with other references than the mean, the ranking of heads agrees with Spearman {agree}"], "heads")]
        if together and k.get("set"):
            parts += [claims(words.judged_lines(k), "texts"), *figures(_judged(tables, kind, k))]
    if together:
        whole = summary["global"]
        parts.append("<h3>All decisions together</h3>" + claims([f"global set: {whole['set_size']} of {whole['heads']} heads", *words.judged_lines(whole)], "texts"))
        parts += figures(_judged(tables, "global", whole)) if whole.get("set") else []
        parts += figures(standing_plots.reference_choices(tables["references"])) if tables.filled("references") else []
    return "\n".join(parts)


def _judged(tables: Tables, name: str, found: dict) -> Figure:
    from .standing_plots import texts_judged

    return texts_judged(tables["texts"], name, (found["necessity"]["random_95"], found["recovery"]["random_95"]))


# -- which controls ----------------------------------------------------------------------------------------


def _controls(summary: dict, tables: Tables) -> str:
    from . import plots, standing_plots

    parts = ["<h3>Another kind's heads</h3>"]
    parts += [*figures(standing_plots.phase_map(tables["phase_matrix"])), claims(["each number beside random sets of the same shape"], "phase_matrix")] if tables.filled("phase_matrix") else []
    parts.append("<h3>Another text's decision, knocked in</h3>")
    for kind, k in summary["kinds"].items():
        if k.get("knock_in"):
            parts.append(claims([f"{kind}: {words.knock_in_line(k['knock_in']).split(': ', 1)[1]}"], "knock_in"))
            if k["knock_in"]["recipients"]:
                parts += figures(plots.knock_in_controls(tables.of_kind("knock_in", kind), kind))
    parts.append("<h3>What families read, blocked</h3>")
    blocked = [line for k in summary["kinds"].values() for line in words.blocking_lines(k.get("read_blocking", {}))]
    parts.append(claims([*blocked, *words.dissociation_lines(summary)] or ["no family has an effect that blocking could remove"], "read_blocking"))
    parts += figures(standing_plots.blocked_reads(tables["read_blocking"])) if tables.filled("read_blocking") else []
    if summary.get("elicitation"):
        parts.append("<h3>Asked before it is written</h3>" + claims(words.elicitation_lines(summary["elicitation"]), "elicitation"))
        parts += figures(plots.elicitation_lead(summary["elicitation"])) if summary["elicitation"]["mentions"] else []
    return "\n".join(parts)


# -- how it was made ---------------------------------------------------------------------------------------


def _made(manifest: dict) -> str:
    rows = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(json.dumps(v) if not isinstance(v, str) else v)}</td></tr>"
                   for part in ("versions", "options", "inputs") for k, v in manifest.get(part, {}).items())
    return f"<div class=wide><table class=facts>{rows}</table></div>"
