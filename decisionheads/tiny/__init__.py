"""The embedded default: small trained models of two families and the clinic they were trained on.

    from decisionheads import DecisionModel, tiny
    model = DecisionModel.from_pretrained(tiny.path("llama"))
    transcripts = tiny.generate(model, n=20, seed=1)

`llama` and `gpt2` are the teachers; `llama-student` and `gpt2-student` look labels up as well but
toss a coin where the reasoning has rejected a near-miss. See `clinic` for the task and `train` for
the recipe and its caveats.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from ..errors import InputError
from ..labels import LabelSpace
from ..transcripts import Span, Transcript
from . import clinic

if TYPE_CHECKING:
    from ..model import DecisionModel

CUE = "\ncue {number}:"  # asks for the region of a step by its number alone
NAMES = ("llama", "gpt2", "llama-student", "gpt2-student")


def path(name: str) -> Path:
    """The folder of an embedded model, loadable with `AutoModelForCausalLM.from_pretrained`."""
    if name not in NAMES:
        raise InputError(f"there is no embedded model {name!r}: choose one of {', '.join(NAMES)}")
    return Path(__file__).parent / name


def labels() -> LabelSpace:
    """All labels that the clinic can draw; each transcript lists its own candidates."""
    regions = {region + leaf: region for region in clinic.REGIONS for leaf in clinic.LEAVES}
    return LabelSpace(regions, regions)


def transcript(name: str, drawn: clinic.Clinic, reasoning: str | None = None, answer: str | None = None) -> Transcript:
    """A text of the clinic as a transcript; by default with the right reasoning and answer.

    Its spans: `block` (of a region), `mention` (a finding: its line in the note, of its right label, and its
    words in every step that is really written, of the label that the step leaves), `note`.
    """
    prompt, spans = "", []
    for line in clinic.join(drawn.prompt()).splitlines(keepends=True):
        start = len(prompt)
        prompt += line
        words = line.split()
        if len(spans) < len(drawn.blocks) and line.startswith("- "):
            spans.append(Span("block", start, len(prompt) - 1, drawn.blocks[len(spans)][0].region))
        for finding in drawn.findings:
            if words[1:4:2] and words[1] == "had" and words[2] == finding.concept:
                spans.append(Span("mention", start, len(prompt) - 1, finding.right.label))
    spans.append(Span("note", prompt.index("note\n"), prompt.index("think\n")))
    reasoning = clinic.join(drawn.reasoning()) if reasoning is None else reasoning
    spans += _steps(drawn, reasoning, len(prompt))
    return Transcript(name, prompt, reasoning,
                      clinic.join(drawn.answer()) if answer is None else answer,
                      candidates=tuple(drawn.candidates()), labels=tuple(f.right.label for f in drawn.findings), spans=tuple(spans))


def _steps(drawn: clinic.Clinic, reasoning: str, start: int) -> list[Span]:
    """The finding words of every step of a reasoning that begins at character `start`.

    What a model writes by itself may reject the label that was drawn as right; then the step leaves the other one.
    """
    step = re.compile(rf"^step \d+: (({'|'.join(clinic.CONCEPTS)})(?: (?:{'|'.join(clinic.QUALIFIERS)})\b)+)(?: maybe (\S+))?", re.MULTILINE)
    findings = {finding.concept: finding for finding in drawn.findings}
    spans = []
    for found in step.finditer(reasoning):
        if finding := findings.get(found[2]):
            left = finding.near_miss if finding.near_miss and finding.right.label == found[3] else finding.right
            spans.append(Span("mention", start + found.start(1), start + found.end(1), left.label))
    return spans


def draw(n: int, seed: int = 0) -> list[clinic.Clinic]:
    """Fresh texts, none of which a training run has seen: its streams have other names."""
    rng = random.Random(f"transcripts {seed}")
    return [clinic.draw(rng) for _ in range(n)]


def generate(model: DecisionModel, n: int = 40, seed: int = 0, longest: int = 110, progress: bool = False) -> list[Transcript]:
    """What a model itself writes, greedily, for `n` fresh prompts: reasoning, then answer.

    A text that does not come to an answer within `longest` tokens is left out, so fewer may return.
    """
    from ..writing import continuations

    found, asked = [], draw(n, seed)
    texts = continuations(model, [clinic.join(drawn.prompt()) for drawn in asked], longest)
    for i, written in enumerate(tqdm(texts, desc="writing", unit="text", total=n, disable=not progress)):
        reasoning, mark, answer = written.partition("answer\n")
        if mark and answer:
            found.append(transcript(f"clinic-{seed}-{i:04d}", asked[i], reasoning, mark + answer))
    return found
