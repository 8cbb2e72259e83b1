"""What a model wrote, taken apart: reasoning and answer, verbatim."""

from __future__ import annotations

import re

from .errors import InputError

# what opens a reasoning, and what ends it: <think> of most models, [THINK] of Magistral, channels of gpt-oss
_TAGS = tuple((re.compile(opening), re.compile(closing, re.DOTALL)) for opening, closing in (
    (r"<think>", r"</think>"),
    (r"\[THINK\]", r"\[/THINK\]"),
    (r"<\|channel\|>(?!final)", r"<\|channel\|>final.*?<\|message\|>")))


def separate(written: str, mark: str | None = None) -> tuple[str, str]:
    """Reasoning and answer of a generated text; one after the other they are the text.

    Tags count first: those of the kind that occurs first in the text. The reasoning runs through the
    *last* closing tag, as in the models' own chat templates, so that thinking which was taken up again is
    no answer; an opening tag is not needed, since many prompts end with it. Without tags the answer begins
    at the last occurrence of `mark` and holds it. With neither, everything is answer.

    Args:
        written: the raw text after the prompt, special tokens kept.
        mark: plain text that begins the answer, such as "Final answer:" or a line break and "Codes:".

    Returns:
        `(reasoning, answer)`. A reasoning that was opened (again) and not closed is `(written, "")`.

    Raises:
        InputError: for an empty mark.
    """
    if mark == "":
        raise InputError("the mark of the answer is empty; give the text that begins it, or none")
    kinds = []
    for opening, closing in _TAGS:
        opened, closed = list(opening.finditer(written)), list(closing.finditer(written))
        if opened or closed:
            kinds.append((min(m.start() for m in (*opened, *closed)), opened, closed))
    if kinds:
        _, opened, closed = min(kinds, key=lambda kind: kind[0])
        end = closed[-1].end() if closed else 0
        unfinished = not closed or any(m.start() >= end for m in opened)
        return (written, "") if unfinished else (written[:end], written[end:])
    at = written.rfind(mark) if mark is not None else 0
    return written[:max(at, 0)], written[max(at, 0):]
