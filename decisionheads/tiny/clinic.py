"""The clinic: an invented coding task in which a label can be found only by reading.

Each text draws its own candidate list: six regions of three labels, each entry
`concept qualifier Region-leaf`. A note holds three coded findings, one denied finding and some
filler. The reasoning takes the findings in an order of its own, by numbered steps; a finding
with two qualifiers fits two labels of its region, and the step names one of them as a near-miss
and rejects it. The answer gives a label for each step and must take the other one.

    list
    - fever mild Vora-mi, fever acute Vora-ta, fever late Vora-so
    - gout acute Nexa-ta, ...
    note
    - had fever mild late since monday
    - denies gout acute
    - slept well
    think
    step 1: fever mild late maybe Vora-so but no, since monday
    step 2: rash focal clear, at home
    answer
    code 1: fever mild late Vora-mi
    code 2: rash focal Quil-re

A cue, `cue 2:`, asks for the region of a step by its number alone: it restates nothing of the
finding, so whoever answers it has read the reasoning and then the list.

Every piece below is exactly one token of `clinic_tokenizer()`, so that the roles of tokens (what
they are trained for, what they are) are known without parsing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import NamedTuple

CONCEPTS = ["fever", "cough", "rash", "ulcer", "tremor", "edema", "angina", "gout", "asthma", "anemia", "colic", "migraine", "sepsis", "stroke", "hernia", "vertigo"]
QUALIFIERS = ["mild", "acute", "chronic", "severe", "late", "focal"]
REGIONS = ["Vora", "Nexa", "Quil", "Brim", "Tavo", "Zeph", "Lumo", "Karn", "Pyra", "Odex", "Sile", "Gant"]
LEAVES = ["-mi", "-ta", "-so", "-re", "-ko", "-lu", "-ze", "-pa"]
WHEN = ["since", "at", "after", "during"]
WHAT = ["monday", "home", "lunch", "sleep", "work", "night", "travel", "sport"]
FILLER = (("slept", "well"), ("seen", "today"), ("eats", "well"), ("walks", "alone"))

BOS, END, PAD, UNKNOWN = "<bos>", "<end>", "<pad>", "<unk>"
TOKENS = (
    [PAD, UNKNOWN, BOS, END, "\n", ",", ":", "-"]
    + ["list", "note", "think", "answer", "step", "code", "cue"]
    + [" " + word for word in (
        ["1", "2", "3", "4", "5", "6", "had", "denies", "maybe", "but", "no", "clear"]
        + CONCEPTS + QUALIFIERS + REGIONS + WHEN + WHAT
        + sorted({word for line in FILLER for word in line}))]
    + LEAVES
)


class Piece(NamedTuple):
    """One token of text and its role: prompt, word, mark, region, label, departure or cue."""

    text: str
    role: str


class Entry(NamedTuple):
    concept: str
    qualifier: str
    region: str
    leaf: str

    @property
    def label(self) -> str:
        return self.region + self.leaf


class Finding(NamedTuple):
    """A finding of the note: its right label and, with two qualifiers, the rejected one."""

    concept: str
    qualifiers: tuple[str, ...]
    when: str
    what: str
    right: Entry
    near_miss: Entry | None


@dataclass(frozen=True)
class Clinic:
    """One text as a structure: `blocks` is the candidate list, `findings` are in step order."""

    blocks: tuple[tuple[Entry, ...], ...]
    note: tuple[tuple[str, ...], ...]
    findings: tuple[Finding, ...]

    # -- edits: each gives a text that differs in one thing -------------------------------

    def with_new_list(self, rng: random.Random) -> Clinic:
        """The same note and findings; region and leaf of every entry drawn again."""
        blocks = _draw_codes([[(e.concept, e.qualifier) for e in block] for block in self.blocks], rng)
        found = {(e.concept, e.qualifier): e for block in blocks for e in block}
        moved = lambda e: e and found[e.concept, e.qualifier]  # noqa: E731
        return replace(self, blocks=blocks, findings=tuple(
            f._replace(right=moved(f.right), near_miss=moved(f.near_miss)) for f in self.findings))

    def with_near_miss_swapped(self) -> Clinic:
        """In every step with a near-miss the other label is named, so the answer must flip."""
        return replace(self, findings=tuple(
            f._replace(right=f.near_miss, near_miss=f.right) if f.near_miss else f for f in self.findings))

    # -- text ------------------------------------------------------------------------------

    def prompt(self) -> list[Piece]:
        words = ["list", "\n"]
        for block in self.blocks:
            words.append("-")
            for i, entry in enumerate(block):
                words += [","] * (i > 0) + [" " + entry.concept, " " + entry.qualifier, " " + entry.region, entry.leaf]
            words.append("\n")
        words += ["note", "\n"]
        for line in self.note:
            words += ["-"] + [" " + word for word in line] + ["\n"]
        return [Piece(word, "prompt") for word in words + ["think", "\n"]]

    def step(self, number: int) -> list[Piece]:
        f = self.findings[number - 1]
        out = [Piece("step", "mark"), Piece(f" {number}", "mark"), Piece(":", "mark")]
        out += [Piece(" " + word, "word") for word in (f.concept, *f.qualifiers)]
        if f.near_miss:
            out += [Piece(" maybe", "word"), Piece(" " + f.near_miss.region, "region"),
                    Piece(f.near_miss.leaf, "near"), Piece(" but", "mark"), Piece(" no", "mark")]
        else:
            out.append(Piece(" clear", "word"))
        out += [Piece(",", "mark"), Piece(" " + f.when, "word"), Piece(" " + f.what, "word")]
        return out + [Piece("\n", "mark")]

    def reasoning(self) -> list[Piece]:
        return [piece for n in range(1, len(self.findings) + 1) for piece in self.step(n)]

    def code(self, number: int) -> list[Piece]:
        f = self.findings[number - 1]
        return [Piece("code", "mark"), Piece(f" {number}", "mark"), Piece(":", "mark"),
                *(Piece(" " + word, "word") for word in (f.concept, *f.qualifiers)),
                Piece(" " + f.right.region, "region"),
                Piece(f.right.leaf, "departure" if f.near_miss else "label"), Piece("\n", "mark")]

    def answer(self) -> list[Piece]:
        lines = [piece for n in range(1, len(self.findings) + 1) for piece in self.code(n)]
        return [Piece("answer", "mark"), Piece("\n", "mark"), *lines, Piece(END, "mark")]

    def cue(self, number: int) -> list[Piece]:
        """The elicitation cue for a step, and the region that answers it."""
        return [Piece("\n", "prompt"), Piece("cue", "prompt"), Piece(f" {number}", "prompt"),
                Piece(":", "prompt"), Piece(" " + self.findings[number - 1].right.region, "cue")]

    def candidates(self) -> list[str]:
        return [entry.label for block in self.blocks for entry in block]


def _draw_codes(keys, rng: random.Random) -> tuple[tuple[Entry, ...], ...]:
    names = rng.sample(REGIONS, len(keys))
    return tuple(
        tuple(Entry(concept, qualifier, name, leaf)
              for (concept, qualifier), leaf in zip(block, rng.sample(LEAVES, len(block)), strict=True))
        for name, block in zip(names, keys, strict=True))


def draw(rng: random.Random, regions: int = 6, labels: int = 3, findings: int = 3) -> Clinic:
    """Draw a text. With two findings or more, at least one is clear and one has a near-miss."""
    blocks = _draw_codes(
        [[(concept, q) for q in rng.sample(QUALIFIERS, labels)] for concept in rng.sample(CONCEPTS, regions)], rng)
    findings = min(findings, regions)
    chosen = rng.sample(blocks, min(findings + 1, regions))
    doubles = rng.sample(range(findings), rng.randint(1, max(1, findings - 1)))
    found = []
    for i, block in enumerate(chosen[:findings]):
        right, other = rng.sample(block, 2)
        near_miss = other if i in doubles else None
        qualifiers = [e.qualifier for e in (right, near_miss) if e]
        rng.shuffle(qualifiers)
        found.append(Finding(right.concept, tuple(qualifiers), rng.choice(WHEN), rng.choice(WHAT), right, near_miss))
    note = [("had", f.concept, *f.qualifiers, f.when, f.what) for f in found]
    for block in chosen[findings:]:
        denied = rng.choice(block)
        note.append(("denies", denied.concept, denied.qualifier))
    note += rng.sample(FILLER, 2)
    rng.shuffle(note)
    return Clinic(blocks, tuple(note), tuple(found))


def join(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def clinic_tokenizer():
    """The tokenizer of the clinic: whole words with their leading space, leaves apart from regions."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token=UNKNOWN))
    pattern = Regex(r" ?[A-Za-z]+|-[a-z]+| ?[0-9]+|\n| ?[^\sA-Za-z0-9]|\s")
    core.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, TOKENS.index(BOS))])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BOS, eos_token=END, pad_token=PAD, unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False, model_max_length=320)
