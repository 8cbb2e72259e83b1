"""Draws the pictures of docs/events.md: python docs/pictures/make.py"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOR, AGAINST, BLUE, INK, SOFT = "#01665e", "#b06a1a", "#3b6fb6", "#1f2430", "#8a8f98"
MONO = "font-family='ui-monospace,Menlo,Consolas,monospace'"
SANS = "font-family='system-ui,sans-serif'"


def text(x, y, words, size=15, colour=INK, weight=400, family=MONO, anchor="start"):
    return f"<text x='{x}' y='{y}' font-size='{size}' fill='{colour}' font-weight='{weight}' text-anchor='{anchor}' {family} xml:space='preserve'>{escape(words)}</text>"


def box(x, y, w, h, fill, stroke="none", opacity=1.0):
    return f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='5' fill='{fill}' stroke='{stroke}' fill-opacity='{opacity}'/>"


def arrow(x1, y1, x2, y2, colour):
    return (f"<path d='M{x1},{y1} C{x1},{(y1 + y2) / 2} {x2},{(y1 + y2) / 2} {x2},{y2}' fill='none' stroke='{colour}' stroke-width='2'/>"
            f"<circle cx='{x2}' cy='{y2}' r='4' fill='{colour}'/>")


def page(width, height, parts):
    return (f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'>"
            f"<rect width='{width}' height='{height}' fill='white'/>" + "".join(parts) + "</svg>\n")


def events() -> str:
    """A transcript with its three kinds of events and what each reads."""
    p = [text(24, 34, "One answer, three decisions", 19, weight=700, family=SANS)]
    p += [text(24, 72, "candidates in the prompt", 13, SOFT, family=SANS), box(24, 82, 330, 62, BLUE, opacity=0.12),
          text(36, 106, "I50.9   heart failure, unspecified"), text(36, 130, "I50.23  acute on chronic ...", colour=INK),
          box(366, 82, 250, 62, SOFT, opacity=0.15), text(378, 106, "J44.9   COPD"), text(378, 130, "J45.909 asthma")]
    p += [text(24, 186, "reasoning", 13, SOFT, family=SANS), text(24, 212, "... could be"), box(140, 194, 72, 26, AGAINST, opacity=0.22),
          text(146, 212, "I50.23", colour=AGAINST, weight=700), text(214, 212, ", but nothing says acute ..."),
          text(224, 240, "near-miss: named, then not given", 12, AGAINST, family=SANS)]
    y = 322
    p += [text(24, y - 38, "answer", 13, SOFT, family=SANS), text(24, y, "codes:")]
    tokens = [(" I", FOR, "region"), ("5", FOR, "primary"), ("0", SOFT, ""), (".", SOFT, ""), ("9", AGAINST, "departure")]
    x = 96
    for token, colour, name in tokens:
        w = 64
        p += [box(x, y - 22, w - 8, 32, colour, opacity=0.9 if name else 0.25), text(x + (w - 8) / 2, y, token.strip() or token, 16, "white" if name else INK, 700, anchor="middle")]
        if name:
            p.append(text(x + (w - 8) / 2, y + 32, name, 12, colour, family=SANS, anchor="middle"))
        x += w
    p += [arrow(188, y - 26, 80, 148, BLUE), arrow(380, y - 26, 186, 224, AGAINST)]
    p += [text(24, y + 76, "' I' leaves J behind.  '5' leaves only I50 alive: the primary region event.", 13, INK, family=SANS),
          text(24, y + 98, "'9' departs from the near-miss, whose token here is '2'.  Without it this would be a label event.", 13, INK, family=SANS)]
    return page(660, 440, p)


def margin() -> str:
    """The margin of one event, and what is left of it when a head is ablated."""
    p = [text(24, 34, "The margin, and what a head is worth to it", 19, weight=700, family=SANS),
         text(24, 64, "logits at the position that predicts '9'", 13, SOFT, family=SANS)]
    rows = [("clean", 9.0, 3.4), ("L3H3 at its mean", 5.2, 4.6), ("every head at its mean", 4.1, 4.0)]
    for i, (name, chosen, rival) in enumerate(rows):
        y = 90 + i * 84
        p += [text(24, y + 14, name, 14, weight=700, family=SANS), box(230, y, chosen * 36, 22, FOR, opacity=0.9), text(236, y + 16, "9  chosen", 13, "white"),
              box(230, y + 26, rival * 36, 22, AGAINST, opacity=0.9), text(236, y + 42, "2  near-miss", 13, "white")]
        left, right = 230 + rival * 36, 230 + chosen * 36
        p += [f"<path d='M{left},{y + 58} h{right - left}' stroke='{INK}' stroke-width='2'/>", text(max(right, left) + 8, y + 63, f"{('m', 'm(ablated)', 'm0')[i]} = {chosen - rival:.1f}", 13, INK, 700)]
    p.append(text(24, 362, "effect of L3H3 = m - m(ablated) = 5.6 - 0.6 = +5.0 logits: it supports the decision.", 14, INK, family=SANS))
    return page(660, 384, p)


def rows() -> str:
    """Packed rows over a read-only prefix."""
    p = [text(24, 34, "One prefill, many rows", 19, weight=700, family=SANS)]
    cell, left, top = 26, 210, 66
    names = ["clean, t = 8", "L1H3 ablated, t = 8", "L2H0 ablated, t = 8", "clean, t = 5", "2 tokens from t = 5", ""]
    seen, own = [8, 8, 8, 5, 5, 5], [{0}, {1}, {2}, {3}, {4}, {4, 5}]
    p += [text(left, top - 8, "prefix, never changed", 12, SOFT, family=SANS), text(left + 8 * cell + 18, top - 8, "rows of one forward", 12, SOFT, family=SANS)]
    for r, name in enumerate(names):
        y = top + r * cell
        p.append(text(24, y + 18, name, 13, family=SANS))
        for k in range(8):
            p.append(box(left + k * cell, y, cell - 3, cell - 3, BLUE if k < seen[r] else SOFT, opacity=0.75 if k < seen[r] else 0.12))
        for k in range(6):
            p.append(box(left + 8 * cell + 18 + k * cell, y, cell - 3, cell - 3, FOR if k in own[r] else SOFT, opacity=0.9 if k in own[r] else 0.12))
    p.append(text(24, top + 6 * cell + 26, "Filled: what a row sees. Each row stands at its true position and sees nothing of the others.", 13, INK, family=SANS))
    return page(660, top + 6 * cell + 48, p)


if __name__ == "__main__":
    for draw in (events, margin, rows):
        Path(__file__).with_name(f"{draw.__name__}.svg").write_text(draw())
