"""How ICD-10-CM codes are written: as text, with a dot after the category."""

from __future__ import annotations

import re

from ..labels import ICD10, icd10_category

_UNDOTTED = re.compile(r"[A-Z](\d[0-9A-Z]|A\d)[0-9A-Z]{1,4}")  # a category may have two letters: QA0
_CODE = re.compile(r"(?=.{2,10}$)[0-9A-Z]+(\.[0-9A-Z]+)?")


def dotted(code: str) -> str:
    """`I5023` -> `I50.23`; padding goes, and what has no place for a dot stays as it is (`I10`, `0042`)."""
    code = code.strip().upper()
    return f"{code[:3]}.{code[3:]}" if _UNDOTTED.fullmatch(code) else code


def is_code(text: str) -> bool:
    """Whether a cell can be a code at all: letters, digits and a dot, so that no other text becomes a label."""
    return _CODE.fullmatch(text) is not None


def region(label: str) -> str:
    """The three-character category of an ICD-10-CM code; anything else is a region of its own."""
    return icd10_category(label) if ICD10.fullmatch(label) else label
