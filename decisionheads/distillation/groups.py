"""Span groups: what a decision may read, as eight groups of keys that mean the same to every tokenizer.

    evidence     the note's own evidence for the label, or its mention there
    note         the rest of the note
    own block    the chosen region's block in the candidate list
    other blocks the other regions' blocks
    near-miss    the mention of the near-miss in the reasoning
    reasoning    the rest of the reasoning
    instruction  the instruction
    rest         everything else, the answer so far included

Groups are characters of the text, so teacher and student may cut it into different tokens. Every
character belongs to one group; a token belongs to the group of its first character that is no blank.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int8

from ..decisions import DecisionEvent
from ..spans import Sinks
from ..transcripts import Encoded, Transcript

GROUPS = ("evidence", "note", "own block", "other blocks", "near-miss", "reasoning", "instruction", "rest")
DROPPED = -1  # sinks, template, and keys that the event cannot see
_OWN = ("own evidence", "own mention", "own section")
_PAINTED = (("instruction", ("instruction",)), ("note", ("note",)), ("other blocks", ("other block",)), ("own block", ("own block",)),
            ("evidence", _OWN), ("near-miss", ("near-miss",)))  # a later one wins


def character_groups(transcript: Transcript, event: DecisionEvent) -> Int8[np.ndarray, " character"]:
    """The group of every character of a text, as this event sees it.

    Args:
        event: an event of the transcript, by whichever tokenizer; its spans are characters.
    """
    found = np.full(len(transcript.text), GROUPS.index("rest"), np.int8)
    found[transcript.reasoning_start:transcript.answer_start] = GROUPS.index("reasoning")
    for group, names in _PAINTED:
        for name, start, end in event.spans:
            if name in names and not (group == "evidence" and start >= transcript.reasoning_start):  # what restates it later is no evidence
                found[start:end] = GROUPS.index(group)
    return found


def key_groups(transcript: Transcript, encoded: Encoded, event: DecisionEvent, position: int, sinks: Sinks) -> Int8[np.ndarray, " position"]:
    """The group of every token up to and including `position`; -1 for sinks and tokens that stand for no character."""
    of_character = character_groups(transcript, event)
    text, found = transcript.text, np.full(position + 1, DROPPED, np.int8)
    for i, (start, end) in enumerate(encoded.offsets[:position + 1].tolist()):
        if end > start:
            while start < end - 1 and text[start].isspace():
                start += 1
            found[i] = of_character[start]
    found[sinks.keys(encoded.ids[:position + 1])] = DROPPED
    return found
