"""How values show themselves: a line in a console, a small table in a notebook. Shapes and findings, not numbers by the page.

Text of transcripts is never shown by a value: it may be clinical.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from html import escape
from typing import Any

MOST = 10  # rows of a table


def brief(value: Any) -> str:
    """A value in a few characters: arrays by their shape, collections by their size."""
    shape = getattr(value, "shape", None)
    if shape is not None and not isinstance(value, type):
        if len(shape) == 2 and hasattr(value, "columns"):
            return f"{shape[0]} rows"
        return f"[{' x '.join(map(str, shape))}]" if len(shape) else f"{float(value):.4g}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"{len(value)} characters"
    if isinstance(value, Mapping):
        return f"{len(value)} entries" if len(value) > 4 else "{" + ", ".join(f"{k}: {brief(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list, set, frozenset)) and (len(value) > 4 or not all(isinstance(x, (str, int, float, bool)) for x in value)):
        return f"{len(value)} of them"
    said = repr(value)
    return said if len(said) <= 80 and " at 0x" not in said else f"{type(value).__name__}(...)"


class Brief:
    """A dataclass whose repr gives each field in brief."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{f.name}={brief(getattr(self, f.name))}' for f in fields(self))})"


class Viewed:
    """A value with an HTML view: its repr as the finding, and the first rows of its table if it has one."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        name, _, said = repr(self).partition("(")
        return view(name, said.removesuffix(")"), self._rows())

    def _rows(self) -> tuple[list[Mapping[str, Any]], int]:
        """Rows to show and how many there are in all."""
        if not hasattr(self, "to_frame"):
            return [], 0
        frame = self.to_frame()
        return frame.head(MOST).to_dict("records"), len(frame)


def view(name: str, said: str, rows: tuple[list[Mapping[str, Any]], int] = ([], 0), note: str = "") -> str:
    """A finding over a small table, in the colours of whatever page it stands on. Everything is escaped."""
    shown, total = rows
    table = ""
    if shown:
        columns = list(shown[0])
        head = "".join(f"<th style='text-align:{_side(shown, c)}'>{escape(str(c))}</th>" for c in columns)
        body = "".join("<tr>" + "".join(f"<td style='text-align:{_side(shown, c)}'>{escape(cell(row[c]))}</td>" for c in columns) + "</tr>" for row in shown)
        rest = f"{len(shown)} of {total} rows" if total > len(shown) else ""
        note = "; ".join(filter(None, (rest, note)))
        table = f"<div style='overflow-x:auto'><table style='border-collapse:collapse;margin:.3em 0'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    foot = f"<div style='opacity:.7;font-size:.9em'>{escape(note)}</div>" if note else ""
    return f"<div style='color:inherit;background:transparent'><div><b>{escape(name)}</b> {escape(said)}</div>{table}{foot}</div>"


def cell(value: Any) -> str:
    """A table cell: numbers to four digits, others in brief."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else "yes" if value else "no"
    if isinstance(value, float):
        return "" if value != value else f"{value:.4g}"
    if isinstance(value, str):
        return value if len(value) <= 60 else value[:57] + "..."
    if isinstance(value, Iterable):
        return brief(value)
    return str(value)


def _side(rows: list[Mapping[str, Any]], column: str) -> str:
    return "left" if any(isinstance(row[column], str) for row in rows) else "right"
