"""What a researcher brings: corpora of clinical notes and the ICD-10-CM table, read from their documented formats.

Each reader gives `Note`s, one at a time, and counts whatever it leaves out. No clinical text is part of
this package.
"""

from .notes import Note, load_notes, save_notes

__all__ = ["Note", "load_notes", "save_notes"]
