"""The page: what an explorer shows, as HTML that needs nothing from outside; with controls, or without.

All text of transcripts, labels and families is escaped here and nowhere else. Colours are laid thinly over whatever
background there is, so that light and dark both work, and no meaning rests on colour alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from ..events import DecisionEvent
from ..looks import AGAINST, FOR
from .bench import ALL, OFF, Decision, Outcome

if TYPE_CHECKING:
    from .explore import Explorer

WHOLE = 500  # tokens, up to which a text is shown whole
TAIL, AROUND, MOST, SHARE = 80, 8, 40, 0.9  # of longer ones: tokens before the decision, around what is read, most places, share of the mass they hold
AFTER = 10  # tokens shown after the decision
GRID = 160  # heads, up to which each has a button
LISTED = 500  # transcripts, up to which they are listed
FIRST_TAKES = "the first token, where attention often rests, takes"

STYLE = f"""
.dhx {{ --for: {FOR}; --against: {AGAINST}; --line: color-mix(in srgb, currentColor 28%, transparent); --soft: color-mix(in srgb, currentColor 8%, transparent);
  color: var(--jp-content-font-color1, inherit); font: 14px/1.45 system-ui, sans-serif; container-type: inline-size; padding: 2px; }}
.dhx p {{ margin: 0 0 .5rem; }} .dhx small {{ opacity: .8; font-size: 12px; }} .dhx * {{ box-sizing: border-box; }}
.dhx-cols {{ display: grid; grid-template-columns: minmax(0, 1fr); gap: 12px; }}
@container (min-width: 720px) {{ .dhx-cols {{ grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); }} }}
.dhx-text {{ font: 13px/1.75 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); border-radius: 6px; padding: 8px; position: relative; }}
.dhx.live .dhx-text {{ max-height: 32rem; overflow: auto; }}
.dhx-text .c {{ outline: 2px solid var(--for); font-weight: 700; border-radius: 2px; }} .dhx-text .n {{ border-bottom: 3px dotted var(--against); }}
.dhx-text .x {{ text-decoration: line-through 2px; background-image: repeating-linear-gradient(135deg, var(--line) 0 1px, transparent 1px 5px); }}
.dhx-text .s {{ outline: 2px dashed currentColor; }} .dhx-text .later {{ opacity: .55; }} .dhx-text details {{ white-space: pre-wrap; border-left: 3px solid var(--line); padding-left: 6px; }}
.dhx-text summary {{ opacity: .8; cursor: pointer; }} .dhx.live .dhx-text [data-i] {{ cursor: pointer; user-select: none; }}
.dhx .dhx-bars {{ display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 3px 8px; align-items: center; position: relative; margin-bottom: .5rem; font-variant-numeric: tabular-nums; }}
.dhx-track {{ position: relative; height: 16px; background: var(--soft); }} .dhx-track i {{ position: absolute; top: 2px; bottom: 2px; display: block; min-width: 2px; }}
.dhx-track u {{ position: absolute; top: -2px; bottom: -2px; border-left: 2px dashed currentColor; }}
.dhx table {{ border-collapse: collapse; width: 100%; margin: 0 0 .5rem; font-size: 13px; font-variant-numeric: tabular-nums; table-layout: auto; }}
.dhx td, .dhx th {{ text-align: right; padding: 1px 5px; border-bottom: 1px solid var(--line); background: transparent; vertical-align: bottom; }} .dhx td {{ white-space: nowrap; }} .dhx tr {{ background: transparent !important; }}
.dhx td:first-child, .dhx th:first-child {{ text-align: left; white-space: normal; overflow-wrap: anywhere; }} .dhx code {{ font: 12px ui-monospace, monospace; background: var(--soft); color: inherit; padding: 0 3px; white-space: nowrap; }}
.dhx-grid {{ display: grid; gap: 2px; margin-bottom: .5rem; max-width: 34rem; }} .dhx-grid > * {{ min-width: 0; padding: 2px 0 !important; text-align: center; font-size: 11px; border: 1px solid var(--line); border-radius: 3px; overflow: hidden; }}
.dhx .off {{ background: color-mix(in srgb, var(--against) 55%, transparent) !important; text-decoration: line-through 2px; }} .dhx .seen {{ box-shadow: inset 0 -3px 0 var(--for); }}
.dhx button, .dhx select, .dhx input {{ font: inherit; font-size: 13px; color: inherit; background: transparent; border: 1px solid var(--line); border-radius: 4px; padding: 2px 7px; max-width: 100%; min-height: 24px; margin: 0; }}
.dhx button {{ cursor: pointer; }} .dhx button:hover, .dhx select:hover {{ background: var(--soft); }} .dhx option, .dhx optgroup {{ background: var(--jp-layout-color1, Canvas); color: var(--jp-content-font-color1, CanvasText); }}
.dhx :focus-visible {{ outline: 3px solid color-mix(in srgb, var(--for) 70%, currentColor); outline-offset: 1px; }}
.dhx-controls {{ display: flex; flex-wrap: wrap; gap: 6px 12px; margin-bottom: 8px; align-items: end; }} .dhx-controls label {{ display: grid; grid-template-columns: minmax(0, max-content); font-size: 12px; min-width: 0; max-width: 100%; }}
.dhx-row {{ display: flex; flex-wrap: wrap; gap: 4px; margin-bottom: .5rem; align-items: center; }} .dhx-row input {{ flex: 1 1 8rem; min-width: 6rem; }}
.dhx-error {{ border-left: 4px solid var(--against); background: var(--soft); padding: 4px 8px; margin-bottom: 8px; }} .dhx-error:empty {{ display: none; }}
.dhx h4 {{ font-size: 13px; font-weight: 600; margin: .3rem 0; }} .dhx[aria-busy=true] {{ opacity: .6; }}
"""


def visible(text: str) -> str:
    """A token's text with its white space to be seen, not escaped."""
    return text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·") or "(nothing)"


@dataclass
class Hand:
    """What a page with controls remembers besides the state.

    Attributes:
        unfolded: tokens of a long text that are shown besides those chosen for it.
        picked: the token at which a span that is being chosen begins.
        readers: the heads that the next span is kept from, by name.
        error, entry: a sentence to show, and what was typed.
    """

    unfolded: frozenset[int] = frozenset()
    picked: int | None = None
    readers: str = ALL
    error: str = ""
    entry: str = ""


def page(explorer: Explorer, hand: Hand | None = None) -> str:
    """What an explorer shows: with a hand, a page with controls; without, one that stands by itself."""
    decision, outcome, live = explorer.decision, explorer.outcome, hand is not None
    hand = hand or Hand()
    first = _controls(explorer, hand) + f"<div class=dhx-error role=alert>{escape(hand.error)}</div>" if live else ""
    side = _sentence(explorer, decision, outcome) + _bars(outcome) + _table(outcome) + _heads(explorer, live, hand.entry)
    return (f"<div class='dhx{' live' * live}'><style>{STYLE}</style>{first}<div class=dhx-cols><div>{_text(explorer, decision, live, hand.unfolded, hand.picked)}</div>"
            f"<div>{side}</div></div></div>")


def event_line(e: DecisionEvent, number: int) -> str:
    """An event in a line: number, kind, label, near-miss; not escaped."""
    return f"{number}: {e.kind} {e.label}" + (f", not {e.near_miss}" if e.near_miss else "")


# -- what it does to the choice ---------------------------------------------------------------------


def _sentence(explorer: Explorer, decision: Decision, o: Outcome) -> str:
    s, e = explorer.state, decision.event
    text = lambda i: f"<code>{escape(visible(explorer.bench.text_of(i)))}</code>"  # noqa: E731
    carried = o.m - o.m0
    moved = (f" → <b>{o.margin:+.2f}</b> logits: {abs(o.effect):.2f} {'lost' if o.effect > 0 else 'won'}" + (f", {abs(o.effect) / carried:.0%} of what attention here carries" if carried > 0.5 else "")
             if len(s.off) or s.block is not None else " logits; nothing is changed")
    near = f", the near-miss {escape(e.near_miss)}" if e.near_miss else ""
    return (f"<p><b>{escape(s.transcript)}</b>, event {s.event} of {len(explorer.events)} ({escape(e.kind)} of {escape(e.label)}): {text(decision.margin.chosen)} and not "
            f"{' '.join(map(text, decision.margin.against))}{near}</p><p aria-live=polite>Margin <b>{o.m:+.2f}</b>{moved}.</p>{_changed(explorer)}")


def _changed(explorer: Explorer) -> str:
    """Heads off and what is blocked, in words."""
    s = explorer.state
    off = ", ".join(map(str, s.off)) or "none"
    said = f"<p>Heads off ({len(s.off)}): {off}. "
    if s.block is None:
        return said + "Nothing is kept from being read.</p>"
    what = escape(s.block) if isinstance(s.block, str) else f"characters {s.block[0]}:{s.block[1]}"
    return said + f"Not read: <b>{what}</b>, by {escape(_who(explorer))}.</p>"


def _who(explorer: Explorer) -> str:
    """The heads that may not read, by the name they have."""
    blocked = explorer.state.blocked
    if blocked == explorer.bench.model.hooked.heads:
        return ALL
    return next((name for name, heads in explorer.families.items() if heads == blocked), ", ".join(map(str, blocked)) or "no head")


def _bars(o: Outcome) -> str:
    low, high = min(0.0, o.m, o.m0, o.margin), max(0.0, o.m, o.m0, o.margin)
    at = lambda x: 100 * (x - low) / ((high - low) or 1.0)  # noqa: E731

    def track(value: float, style: str) -> str:
        begin, end = sorted((at(0), at(value)))
        return (f"<div class=dhx-track><i style='left:{begin:.1f}%;width:{end - begin:.1f}%;{style}'></i><u style='left:{at(o.m0):.1f}%'></u></div>")

    colour = "var(--for)" if o.margin >= 0 else "var(--against)"
    return (f"<div class=dhx-bars role=img aria-label='margin before {o.m:+.2f}, now {o.margin:+.2f}, with every head off {o.m0:+.2f} logits'>"
            f"<span>before {o.m:+.2f}</span>{track(o.m, 'border:2px solid var(--for)' if o.m >= 0 else 'border:2px solid var(--against)')}<span>now {o.margin:+.2f}</span>{track(o.margin, f'background:{colour}')}"
            f"</div><p><small>Dashed: {o.m0:+.2f} with every head off. Logits; right of zero the model writes what it chose.</small></p>")


def _table(o: Outcome) -> str:
    roles = {"chosen": "chosen", "against": "rival", "live": "label", "": ""}
    rows = "".join(f"<tr><td><code>{escape(visible(a.text))}</code> <small>{roles[a.role]}</small></td><td>{a.probability_before:.1%}</td><td><b>{a.probability:.1%}</b></td>"
                   f"<td>{a.logit_before:.2f}</td><td><b>{a.logit:.2f}</b></td></tr>" for a in o.alternatives)
    return f"<table><tr><th>next token</th><th>before</th><th>now</th><th>logit before</th><th>logit now</th></tr>{rows}</table>"


# -- the text ---------------------------------------------------------------------------------------


def pieces(decision: Decision, explorer: Explorer) -> list[tuple[int, int, str, str]]:
    """The text cut at its tokens: `(first token, end token, text before it that no token holds, its own text)`; tokens of one character are one piece."""
    text, offsets, ids = decision.reading.transcript.text, decision.reading.encoded.offsets, decision.reading.encoded.ids
    found: list[tuple[int, int, str, str]] = []
    at = 0
    for i in range(min(len(ids), decision.event.position + 2 + AFTER)):
        start, end = int(offsets[i, 0]), int(offsets[i, 1])
        if end == 0:  # it stands for no character
            found.append((i, i + 1, "", str(explorer.bench.model.tokenizer.convert_ids_to_tokens(int(ids[i])))))
        elif end <= at and found:  # a further token of the same character
            found[-1] = (found[-1][0], i + 1, *found[-1][2:])
        else:
            found.append((i, i + 1, text[at:max(at, start)], text[max(at, start):end]))
            at = end
    return found


def opened(mass: Float[np.ndarray, " position"], chosen: int, marked: set[int], length: int) -> np.ndarray:
    """Which tokens of a text are shown: all of a short one; of a long one what is read, what is marked, and what stands before the decision.

    Args:
        mass: attention to each position up to the decision's own.
        chosen: position of the chosen token.
        marked: positions that must be seen.
        length: tokens that could be shown.
    """
    show = np.ones(length, bool)
    if length > WHOLE:
        show[:max(0, chosen - TAIL)] = False
        order = np.argsort(-mass[1:], kind="stable")[:MOST] + 1
        held = np.cumsum(mass[order])
        for i in {0, *marked, *(int(i) for i in order[:int(np.searchsorted(held, SHARE * mass[1:].sum())) + 1])}:
            show[max(0, i - AROUND):i + AROUND + 1] = True
    return show


def _text(explorer: Explorer, decision: Decision, live: bool, unfolded: frozenset[int], picked: int | None) -> str:
    mass, state, chosen = explorer.reads, explorer.state, decision.event.position + 1
    blocked = {i for start, end in (decision.tokens(state.block) if state.block is not None else ()) for i in range(start, end)} - {decision.event.position}
    near = {i for start, end in decision.spans.get("near-miss", ()) for i in range(start, end)}
    full = max(0.05, float(mass[1:].max(initial=0.0)))
    units = pieces(decision, explorer)
    edges = {i for i in blocked if not {i - 1, i + 1} <= blocked}
    show = opened(mass, chosen, near | edges | ({picked} if picked is not None else set()), units[-1][1])
    show[[i for i in unfolded if i < len(show)]] = True
    out, n = [], 0
    while n < len(units):
        if show[units[n][0]]:
            out.append(_unit(units[n], mass, full, chosen, near, blocked, live, picked))
            n += 1
            continue
        stop = n
        while stop < len(units) and not show[units[stop][0]]:
            stop += 1
        out.append(_folded(units[n:stop], float(mass[units[n][0]:units[stop - 1][1]].sum()), live))
        n = stop
    rest = len(decision.reading.encoded) - units[-1][1]
    end = f"<small> … {rest} more tokens</small>" if rest else ""
    hint = ("<p><small>Click two tokens, or drag, to keep what lies between from being read. Arrow keys move, Enter picks, Escape drops. <b data-say aria-live=polite></b></small></p>" if live else "")
    legend = (f"<p><small>Colour: attention that <b>{escape(_colour(explorer))}</b> pays from the token before the decision; full colour {full:.2f} of it, and {FIRST_TAKES} {float(mass[0]):.2f}. "
              f"Framed: chosen. {'Dotted: the near-miss. ' if near else ''}Struck through: not read.</small></p>")
    attributes = f" role=group tabindex=-1 aria-label='the text, token by token' data-roving=10 data-scene='{escape(state.transcript)}/{state.event}'" if live else ""
    return f"<div class=dhx-text{attributes}>{''.join(out)}{end}</div>{legend}{hint}"


def _colour(explorer: Explorer) -> str:
    heads = explorer.shown
    return f"{explorer.state.colour} ({len(heads)} head{'s' * (len(heads) != 1)})" if explorer.state.colour != str(heads) else explorer.state.colour


def _unit(unit: tuple[int, int, str, str], mass: np.ndarray, full: float, chosen: int, near: set[int], blocked: set[int], live: bool, picked: int | None) -> str:
    first, end, before, text = unit
    weight = float(mass[first:end].sum())
    names = [name for name, there in (("c", first <= chosen < end), ("n", first in near), ("x", first in blocked), ("s", first == picked), ("later", first > chosen)) if there]
    style = f" style='background-color:rgba(1,133,123,{0.8 * min(1.0, weight / full) ** 0.5:.2f})'" if weight >= 0.005 else ""
    title = f" title='{weight:.3f} of the attention'" if weight >= 0.005 else ""
    keys = f" data-i={first} data-k=t{first} tabindex={0 if first == chosen else -1}" if live else ""
    shown = escape(text) if text.strip("\n") else "<small>↵</small>" * bool(text) + text
    return f"{escape(before)}<span{' class=' + repr(' '.join(names)) if names else ''}{keys}{style}{title}>{shown}</span>"


def _folded(units: list[tuple[int, int, str, str]], mass: float, live: bool) -> str:
    count = units[-1][1] - units[0][0]
    said = f"… {count:,} tokens, {mass:.1%} of the attention …"
    if live:
        return f"<button data-do=unfold data-value={units[0][0]}:{units[-1][1]} data-k=u{units[-1][1]}>{said}</button>"
    return f"<details><summary>{said}</summary>{escape(''.join(before + text for _, _, before, text in units))}</details>"


# -- heads and controls -----------------------------------------------------------------------------


def _heads(explorer: Explorer, live: bool, entry: str) -> str:
    off, shown, every = explorer.state.off, explorer.shown, explorer.bench.model.hooked.heads
    out, columns = ["<h4>Heads</h4>"], explorer.bench.model.n_heads
    if live and explorer.families:
        buttons = "".join(_toggle("family", name, f"{name} ({len(heads)})", len(heads) > 0 and heads <= off, f"{name}: {', '.join(map(str, heads))}", False) for name, heads in explorer.families.items())
        out.append(f"<div class=dhx-row role=group aria-label='families, pressed when off'>{buttons}</div>")
    if len(every) <= GRID:
        of = {h: ", ".join([str(h), *(name for name, heads in explorer.families.items() if h in heads)]) for h in every}
        cells = "".join(_toggle("head", str(h), str(h), h in off, of[h], h in shown, -1 if n else 0) if live
                        else f"<span class='{_classes(h in off, h in shown)}' title='{escape(of[h])}'>{h}</span>" for n, h in enumerate(every))
        keys = f" role=group aria-label='heads, pressed when off' data-roving={columns}" if live else ""
        out.append(f"<div class=dhx-grid style='grid-template-columns:repeat({columns},minmax(0,1fr))'{keys}>{cells}</div>"
                   "<p><small>Struck through: off, its output here is its reference mean. Underlined: its reads are shown.</small></p>")
    if live:
        doing = (("off", "off"), ("on", "on"), ("colour", "show reads"), ("block", "block for them"))
        out.append(f"<div class=dhx-row><input aria-label='heads by name' placeholder='heads, such as L1H7, L0H1' data-k=entry value='{escape(entry)}'>"
                   + "".join(f"<button data-do=entry-{do} data-k=entry-{do}>{text}</button>" for do, text in doing) + "</div>")
    return "".join(out)


def _classes(off: bool, seen: bool) -> str:
    return " ".join(["off"] * off + ["seen"] * seen)


def _toggle(do: str, value: str, text: str, off: bool, title: str, seen: bool, tab: int = 0) -> str:
    return (f"<button data-do={do} data-value='{escape(value)}' data-k='{do} {escape(value)}' aria-pressed={str(off).lower()} tabindex={tab} class='{_classes(off, seen)}' "
            f"title='{escape(title)}'>{escape(text)}</button>")


def _controls(explorer: Explorer, hand: Hand) -> str:
    s, bench = explorer.state, explorer.bench
    events = [(str(n), f"{event_line(e, n)} ({m:+.2f})") for n, (e, m) in enumerate(zip(explorer.events, bench.margins(s.transcript), strict=True))]
    sets = [(name, name) for name in (*explorer.families, OFF, ALL)]
    single = [(str(h), str(h)) for h in bench.model.hooked.heads] if len(bench.model.hooked.heads) <= GRID else []
    colours = [*sets, *single] if s.colour in dict([*sets, *single]) else [*sets, *single, (s.colour, s.colour)]
    names = [("", "nothing"), *((name, name) for name in explorer.spans)]
    span = s.block if isinstance(s.block, str) else "" if s.block is None else "{}:{}".format(*s.block)
    if not isinstance(s.block, str | None):
        names.append((span, f"characters {span}"))
    who = _who(explorer) if s.block is not None else hand.readers
    readers = [(ALL, ALL), *((name, name) for name in explorer.families)]
    readers += [] if who in dict(readers) else [(who, who if len(who) < 40 else f"{len(s.blocked)} heads")]
    if len(explorer.transcripts) <= LISTED:
        text = _select("transcript", "Transcript", [(t, t) for t in explorer.transcripts], s.transcript)
    else:
        text = f"<label>Transcript, one of {len(explorer.transcripts)}<input data-do=transcript data-k=transcript value='{escape(s.transcript)}'></label>"
    return ("<div class=dhx-controls>" + text + _select("event", "Event (margin in logits)", events, str(s.event)) + _select("colour", "Colour by what is read by", colours, s.colour)
            + _select("span", "Keep from being read", names, span) + _select("readers", "by", readers, who) + "<button data-do=reset data-k=reset>reset</button></div>")


def _select(do: str, label: str, options: list[tuple[str, str]], chosen: str) -> str:
    items = "".join(f"<option value='{escape(value)}'{' selected' * (value == chosen)}>{escape(text)}</option>" for value, text in options)
    return f"<label>{label}<select data-do={do} data-k={do}>{items}</select></label>"
