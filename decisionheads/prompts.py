"""Prompts for the coding task: the candidate list, a note, the instruction, and where each of them stands.

The order is fixed: chat header, candidate list, note, instruction. Everything before the note is the same
in all prompts of a run, byte for byte, so that it can be read by the model once. When a prompt is too long
for the model, the note is cut at its end, and never anything else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from .corpora.notes import EVIDENCE, Note
from .errors import InputError
from .labels import LabelSpace
from .transcripts import Encoded, Span, Transcript, encode

SECTION = re.compile(r"^([A-Z][A-Za-z /]{2,50}):", re.MULTILINE)
OWN = ("block", "note", "instruction")  # names of the spans that are made here
LINE = 200  # a cut goes back to a line break that is at most so many characters before the place where it must be
NEAR = 64  # characters around the first guess of that place, where it nearly always lies


@dataclass(frozen=True)
class Layout:
    """How prompts are written.

    Attributes:
        listing: "described", a line for each label with its description under a line for its region;
            "titled", the same with the description first (`Heart failure = I50.9`), which small models copy
            from more easily; or "compact", a line for each region: `I50 .1 .20 .21`.
        instruction: what to do; stands last. Blank characters around it are left out.
        system: the system text; at the head of the user message where the chat template refuses or drops a
            system role, and at the head of the prompt where there is no template.
        chat: whether the tokenizer's chat template is used; None: if it has one.
        opening: put verbatim after everything else, as the beginning of what the model writes.
        cut: whether notes are cut where a prompt is too long; if not, it is an error.
    """

    listing: Literal["described", "titled", "compact"]
    instruction: str
    system: str = ""
    chat: bool | None = None
    opening: str = ""
    cut: bool = True

    def __post_init__(self):
        if self.listing not in ("described", "titled", "compact"):
            raise InputError(f"unknown listing {self.listing!r}: choose described, titled or compact")
        if not self.instruction.strip():
            raise InputError("the instruction is empty; say what the model is to do")


@dataclass(frozen=True)
class Prompt:
    """A prompt for one note.

    Attributes:
        text: what the model reads, the beginning of its own writing included.
        spans: characters of the text, in the order in which they begin: `block` (of a region), `note`,
            `section` (of a title), `evidence` (of a code), other spans of the note, `instruction`.
        cut: characters of the note that were cut away at its end.
        lost: the code of each evidence span that was wholly or partly cut away, in the note's order; a code
            stands here once for each such span.
        tokens: length of the text, a BOS token included.
    """

    text: str
    spans: tuple[Span, ...]
    cut: int
    lost: tuple[str, ...]
    tokens: int

    def __repr__(self) -> str:  # clinical text stays out of logs and tracebacks
        return f"Prompt({len(self.text)} characters, {self.tokens} tokens, {len(self.spans)} spans, {self.cut} characters cut, {len(self.lost)} evidence spans lost)"


class Prompter:
    """Writes the prompts of one label space for one tokenizer.

    Args:
        labels: the candidates; regions are listed in the order in which they first appear.
        tokenizer: a Hugging Face tokenizer, the model's own.
        layout: how prompts are written.

    Attributes:
        candidates: the candidate list, the same text in every prompt.
        least: tokens of a prompt without any note.

    Raises:
        InputError: if the chat template cannot be used, or would have other tokens in the model's server
            than here.
    """

    def __init__(self, labels: LabelSpace, tokenizer, layout: Layout):
        self.tokenizer, self.layout = tokenizer, layout
        has = bool(getattr(tokenizer, "chat_template", None))
        if layout.chat and not has:
            raise InputError("the tokenizer has no chat template; give it one, or use prompts without a template (--plain, chat=False)")
        self.chat = has if layout.chat is None else layout.chat
        title, parts = _listing(labels, layout.listing)
        self.candidates, blocks = "", []
        for region, block in parts:
            self.candidates += "\n" if self.candidates else ""
            blocks.append(Span("block", len(self.candidates), len(self.candidates) + len(block), region))
            self.candidates += block
        self._instruction, system = layout.instruction.strip(), layout.system.strip()
        self._messages = [{"role": "system", "content": system}] if system else []
        head = f"{title}\n"
        if system and not (self.chat and self._takes_system(system)):
            self._messages, head = [], f"{system}\n\n{head}"
        self._before = f"{head}{self.candidates}\n\nNote:\n"
        self._blocks = tuple(Span(s.name, s.start + len(head), s.end + len(head), s.of) for s in blocks)
        text, _ = self._render("")
        self.least = len(self._encode(text, ""))
        if self.chat:
            self._check_ids(text.removesuffix(layout.opening))

    def __repr__(self) -> str:
        return f"Prompter({len(self._blocks)} blocks, {self.layout.listing}, {'chat' if self.chat else 'plain'}, {self.least} tokens without a note)"

    def prompt(self, note: Note, room: int = 0, context: int | None = None) -> Prompt:
        """The prompt of a note.

        Args:
            note: its spans are checked already (see `corpora.notes`).
            room: tokens that will be written after the prompt.
            context: tokens that the model can take in all; None: no limit.

        Raises:
            InputError: where the prompt and what is to be written do not fit the context, even without a
                note or because the layout lets nothing be cut; both lengths are named.
        """
        clash = next((s.name for s in note.spans if s.name in OWN), None)
        if clash is not None:
            raise InputError(f"note {note.id!r} has a span named {clash!r}, a name that prompts use themselves; rename it")
        keep = len(note.note)
        text, at = self._render(note.note)
        encoded = self._encode(text, note.id)
        if context is not None and len(encoded) + room > context:
            if self.least + room > context:
                raise InputError(f"candidate list and instruction need {self.least} tokens without any note, and {room} are to be written, but the model's context is "
                                 f"{context}; list fewer labels, use the compact listing, or write less")
            if not self.layout.cut:
                raise InputError(f"note {note.id!r}: its prompt needs {len(encoded)} tokens, and {room} are to be written, but the model's context is {context}; "
                                 "shorten the note, or let notes be cut at their end")
            keep = self._fit(note, encoded, at + len(self._before), context - room)
            text, at = self._render(note.note[:keep])
            encoded = self._encode(text, note.id)
        begin, end = at + len(self._before), at + len(self._before) + keep
        inside, lost = _note_spans(note, keep)
        spans = [Span(s.name, at + s.start, at + s.end, s.of) for s in self._blocks]
        spans += [Span("note", begin, end)] if keep else []
        spans += [Span(s.name, begin + s.start, begin + s.end, s.of) for s in inside]
        spans.append(Span("instruction", end + 2, end + 2 + len(self._instruction)))
        return Prompt(text, tuple(sorted(spans, key=lambda s: (s.start, -s.end))), len(note.note) - keep, lost, len(encoded))

    # -- the text --------------------------------------------------------------------------

    def _user(self, note: str) -> str:
        return f"{self._before}{note}\n\n{self._instruction}"

    def _render(self, note: str) -> tuple[str, int]:
        """The whole text with a note, and where in it `_before` begins."""
        user = self._user(note)
        if not self.chat:
            return user + self.layout.opening, 0
        text = self._template([*self._messages, {"role": "user", "content": user}])
        if text.count(user) != 1:  # where it stands once, every span's text is the original's
            raise InputError("the chat template changes or repeats the text of the user message, so spans cannot be placed in it; use prompts without a template (--plain, chat=False)")
        return text + self.layout.opening, text.index(user)

    def _template(self, messages: list[dict[str, str]], **options):
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **{"tokenize": False, **options})
        except Exception as error:  # templates raise whatever they like
            raise InputError(f"the chat template does not take a user message ({type(error).__name__}); use prompts without a template (--plain, chat=False)") from None

    def _takes_system(self, system: str) -> bool:
        """Whether the template writes a system text out; some raise, some drop it."""
        user = {"role": "user", "content": "-"}
        try:
            return self._template([*self._messages, user]).count(system) > self._template([user]).count(system)
        except InputError:
            return False

    def _check_ids(self, text: str) -> None:
        """Ids of the text without a note must be those of the chat template, or a server would feed the model others than are read here."""
        ids = self._template([*self._messages, {"role": "user", "content": self._user("")}], tokenize=True, return_dict=False)
        if self._encode(text, "").ids.tolist() != list(ids):
            raise InputError("the tokenizer adds special tokens to a text that its chat template does not write; write the BOS token into the template, or use prompts without a template (--plain, chat=False)")

    def _encode(self, text: str, name: str) -> Encoded:
        return encode(Transcript(name, text, "", ""), self.tokenizer)

    # -- the cut ---------------------------------------------------------------------------

    def _fit(self, note: Note, encoded: Encoded, begin: int, limit: int) -> int:
        """How many characters of a note can stay; `encoded` is the whole text, in which the note begins at `begin`."""
        whole = note.note

        def fits(keep: int) -> bool:
            return len(self._encode(self._render(whole[:keep])[0], note.id)) <= limit

        tokens = encoded.tokens_in(begin, begin + len(whole))
        stay = len(tokens) - (len(encoded) - limit)  # a guess: tokens at the seams may merge otherwise
        guess = max(0, int(encoded.offsets[tokens[stay], 0]) - begin) if stay > 0 else 0
        line = whole.rfind("\n", 0, guess) + 1
        if line and guess - line <= LINE and fits(line):
            return line
        low, high = max(0, guess - NEAR), min(len(whole), guess + NEAR)
        if low and not fits(low):
            low, high = 0, low
        elif high < len(whole) and fits(high):
            low, high = high, len(whole)
        while high - low > 1:  # low fits, high does not
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        parts = whole[low - 1:low + 1] == "\r\n"  # a line end is one thing
        return low - 1 if parts and fits(low - 1) else low


def _listing(labels: LabelSpace, listing: str) -> tuple[str, list[tuple[str, str]]]:
    """The title of the candidate list, and `(region, block)` for each region."""
    regions: dict[str, list[str]] = {}
    for label in labels.labels:
        regions.setdefault(labels.region(label), []).append(label)
    if listing != "compact":
        return "Candidate labels:", [(region, _described(labels, region, members, listing == "titled")) for region, members in regions.items()]
    short = next((region for region, members in regions.items() if _endings(region, members)), None)
    if short is None:
        title = "Candidate labels:"
    else:
        ending = _endings(short, regions[short])[0]
        title = f"Candidate labels, by group ({short} {ending} stands for {short}{ending}):"
    return title, [(region, _compact(region, members)) for region, members in regions.items()]


def _described(labels: LabelSpace, region: str, members: list[str], titled: bool) -> str:
    said = lambda name: " ".join(labels.descriptions.get(name, "").split())  # noqa: E731
    one_line = lambda name: " ".join(filter(None, [name, said(name)]))  # noqa: E731
    titled_line = lambda name: f"{said(name)} = {name}" if said(name) else name  # noqa: E731
    head = region if region in labels else one_line(region)  # what is listed below need not be said twice
    return "\n".join([f"{head}:", *map(titled_line if titled else one_line, members)])


def _compact(region: str, members: list[str]) -> str:
    endings = _endings(region, members)
    if endings:
        return " ".join([region, *endings])
    if members == [region]:
        return region
    return f"{region}: " + ("; " if any(" " in label for label in members) else " ").join(members)


def _endings(region: str, members: list[str]) -> list[str]:
    """What follows the region's name in each label; empty where that could be read in two ways."""
    endings = [label[len(region):] for label in members if label.startswith(region)]
    clear = len(endings) == len(members) and all(ending and not any(c.isspace() for c in ending) for ending in endings)
    return endings if clear else []


# -- spans of a note ------------------------------------------------------------------------------------


def sections(note: str) -> list[Span]:
    """The sections of a note: from a header such as `Past Medical History:` at the start of a line to the next one."""
    found = []
    for head in reversed([*SECTION.finditer(note)]):
        stop = found[-1].start if found else len(note)
        found.append(Span("section", head.start(), head.start() + len(note[head.start():stop].rstrip()), head[1].strip()))
    return found[::-1]


def _note_spans(note: Note, keep: int) -> tuple[list[Span], tuple[str, ...]]:
    """Spans of a note of which `keep` characters stay, and the codes of evidence that was cut.

    Sections are cut with the note; a part of any other span is not what it names, so that is left out.
    """
    given = [s for s in note.spans if s.name == "section"]
    titled = [Span(s.name, s.start, min(s.end, keep), s.of) for s in given if s.start < keep] if given else sections(note.note[:keep])
    others = [s for s in note.spans if s.name != "section"]
    lost = tuple(s.of for s in others if s.name == EVIDENCE and s.end > keep)
    return [*titled, *(s for s in others if s.end <= keep)], lost
