"""Findings in words: lines of plain text for the terminal, from the summary of a run."""

from __future__ import annotations

import re
import textwrap
from typing import Any


def fitted(lines: list[str], width: int = 79) -> list[str]:
    """Lines broken at words to fit a terminal of 80 columns; what goes on stands four columns further in."""
    out = []
    for line in lines:
        indent = line[:len(line) - len(line.lstrip())]
        whole = re.sub(r"\[[^][]*\]", lambda m: m[0].replace(" ", "\xa0"), line)  # an interval stays in one piece
        out += textwrap.wrap(whole, width, subsequent_indent=indent + "    ", break_long_words=False, break_on_hyphens=False) if len(line) > width else [whole]
    return [line.replace("\xa0", " ") for line in out]


def percent(x: float | None) -> str:
    return "n/a" if x is None else f"{round(100 * x) + 0}%"  # adding 0 leaves no minus before a zero


def number(x: float | None, digits: int = 2, sign: str = "") -> str:
    return "n/a" if x is None else f"{round(x, digits) + 0:{sign}.{digits}f}"


def limits(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"


def p_words(p: float | None) -> str:
    return "p n/a" if p is None else f"p {p:.4f}"


def some_heads(heads: list[str], most: int = 8) -> str:
    return " ".join(heads[:most]) + (f" and {len(heads) - most} more" if len(heads) > most else "") if heads else "no heads"


def judged_lines(found: dict[str, Any]) -> list[str]:
    """A set on held-out texts: necessity, sufficiency and the choice, each beside its control."""
    if not found.get("set"):
        return ["  held out: no set to test"]
    lines = [f"  set: {some_heads(found['set'])}; held out on {found['transcripts']} texts, {found['events']} decisions"]
    helpers = [h for h in found["set"] if h not in found["selection"]["selected"]] if "selection" in found else []
    if helpers:  # such a head matters wherever something is written, so that no null tells it apart
        lines.append(f"    not selected by itself, but the set falls short without: {some_heads(helpers)}")
    for word, share, ratio in (("necessary", "necessary", "necessity"), ("sufficient", "sufficient", "recovery")):
        k, r = found[share], found[ratio]
        texts = f"{k['k']} of {k['n']} texts{limits(k['low'], k['high'])}" if k["share"] is not None else f"undefined ({found['undefined']} of {found['transcripts']} texts)"
        lines.append(f"    {word:10} {texts}; {'N' if word == 'necessary' else 'R'} {number(r['pooled'])}{limits(r['low'], r['high'])}, random {number(r['random'])}")
    kappa = found["kappa"]
    lines.append(f"    the choice is kept in {percent(found['kept'])} without it, {percent(found['kept_without_random'])} without a random set "
                 f"(chance {percent(found['chance'])}; kappa {number(kappa['value'])}{limits(kappa['low'], kappa['high'])})")
    return lines


def knock_in_line(found: dict[str, Any] | None) -> str:
    """Knock-in and whether it beats each negative control."""
    if not found or found["shift"] is None:
        return "    knock-in: no recipient has a donor"
    negatives = {name: c for name, c in found["controls"].items() if c["p"] is not None and name != "another donor of the label"}
    lost = [name for name, c in negatives.items() if c["p"] > 0.05]
    claim = f"beats {len(negatives)} controls, {p_words(found['p'])}" if negatives and not lost else f"does not beat {', '.join(lost)} ({p_words(found['p'])})" if lost else "no control could be tested"
    return f"    knock-in: {number(found['shift'], sign='+')} logits towards a donor's choice, {percent(found['flipped'])} flipped; {claim}; identity {found['identity']:g}"


def blocking_lines(found: dict[str, Any]) -> list[str]:
    """What blocked reads remove of a family's effect."""
    lines = []
    for name, b in found.items():
        if not b["defined"]:
            continue
        arm, controls = b["before softmax"], ("other family's span", "equal span", "other heads", "all but the span")
        said = ", ".join(f"{c} {percent(b[c]['removed'])}" for c in controls if b[c]["removed"] is not None)
        lines.append(f"    {name} blocked removes {percent(arm['removed'])}{limits(arm['low'], arm['high'])} of the effect of {b['heads']} head{'' if b['heads'] == 1 else 's'} ({said})")
    return lines


def kind_lines(found: dict[str, Any]) -> list[str]:
    """All that is said of one kind beyond single heads."""
    if not found.get("set"):
        return ["  held out: no set to test"]
    return [*judged_lines(found), knock_in_line(found.get("knock_in")), *blocking_lines(found.get("read_blocking", {}))]


def elicitation_lines(found: dict[str, Any] | None) -> list[str]:
    """From where on a region can be had by asking, its baselines, and the heads that make it so."""
    if not found:
        return []
    if not found["mentions"]:
        reasons = ", ".join(f"{n} {reason}" for reason, n in found.get("dropped", {}).get("codes", {}).items())
        return ["", f"elicitation: {found.get('undefined') or f'no code could be asked for ({reasons})'}"]
    share, lead, base = found["elicitable"], found["lead"], found["baselines"]
    lines = ["", f"elicitation: {share['k']} of {share['n']} regions{limits(share['low'], share['high'])} can be had by asking before they are written; lead {number(lead['median'], 0)} tokens "
             f"before the {found['where']} (median; mean {number(lead['mean'], 1)}{limits(lead['low'], lead['high'])})",
             f"  right at {percent(found['right'])} of all cuts; with another text's note {percent(base['note_replaced']['right'])}, before the mention {percent(base['before_mention']['right'])}, "
             f"chance {percent(base['chance'])}; region's name written before: {percent(found['strata']['named']['right'])}, not: {percent(found['strata']['not_named']['right'])}"]
    for at, heads in found["heads"].items():
        if "undefined" in heads:
            lines.append(f"  heads, ablated at the {at}: {heads['undefined']}")
            continue
        held = heads["held_out"]
        shared = ", ".join(f"{o['shared']} with {o['sets'][1]} (p {o['p']:.3f})" for o in heads["overlaps"] if o["sizes"][1])
        lines.append(f"  heads, ablated at the {at}: {some_heads(heads['selected'])}; right in {percent(held['right_without_selected'])} of {held['events']} without them, "
                     f"{percent(held['right_without_random'])} without random heads" + (f"; shared {shared}" if heads["selected"] and shared else ""))
    return lines


def family_lines(summary: dict[str, Any]) -> list[str]:
    """The heads of each family, and how deep they lie."""
    lines = []
    for name in ("region", "near-miss", "neither"):
        f = summary["families"][name]
        lines.append(f"{'heads that read neither' if name == 'neither' else name + ' family'}: {some_heads(f['heads'])}" + (f" (relative depth {f['depth']:.2f})" if f["depth"] is not None else ""))
    return lines


def dissociation_lines(summary: dict[str, Any]) -> list[str]:
    """How much more of a family's effect its own span removes than the other family's."""
    return [f"  {d['family']} family at {d['kind']} decisions: its own span removes {number(d['difference'], sign='+')}{limits(d['low'], d['high'])} more of its effect than the other family's"
            for d in summary["families"]["dissociation"] if d["difference"] is not None]


def closing_lines(summary: dict[str, Any]) -> list[str]:
    """The global set, the families and their dissociation."""
    whole = summary["global"]
    return ["", f"global set: {whole['set_size']} of {whole['heads']} heads", *judged_lines(whole), "", *family_lines(summary), *dissociation_lines(summary),
            *elicitation_lines(summary.get("elicitation"))]
