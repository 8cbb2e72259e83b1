"""Small GPT-2 models whose deciding heads are put there by hand, and the texts that they write.

A prompt binds a word to every slot, one token each, in any order: ` d7Kora` where slot 7 is to be decided, ` n7Kora`
where it is only to be recited. Then the model writes all slots, a number and its word each:

    n2Tufa d1Kora n3Bemi ... | 1 Kora 2 Tufa 3 Bemi ...

Which slots decide and which words they get is drawn anew for every text, and the words of its decisions are the
labels of that text alone: number, word and position tell nothing of whether a token is a decision.

    deciders  look up `d` bindings and write their words, each a share; at other slots they rest on <bos>
    reciter   does so for `n` bindings, as strongly as all deciders: the model is as sure at nulls as at events
    general   does so for both, and looks up the next number too: it matters for every next token
    others    small random weights
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch

from decisionheads import DecisionModel, HeadSet, LabelSpace, Transcript
from decisionheads.heads import Head
from decisionheads.writing import continuations

SLOTS, REASONED, DECIDED, SPARE = 20, 4, 3, 8  # of a text: slots, those in its reasoning, decisions, candidates never written
HEADS, D_HEAD, WORD, NUMBER = 8, 24, 16, 8  # what a head carries: the code of a word and the code of a number
BOS, END, PAD, UNKNOWN = "<bos>", "<end>", "<pad>", "<unk>"
NUMBERS = [str(slot) for slot in range(1, SLOTS + 1)]
WORDS = [a + b for a in ("Ko", "Be", "Tu", "Li", "Sa", "Ny") for b in ("ra", "mi", "fa", "zo", "du", "pek")]
BINDINGS = [kind + number + word for kind in "dn" for number in NUMBERS for word in WORDS]
ID = {token: i for i, token in enumerate([PAD, UNKNOWN, BOS, END, *(f" {x}" for x in [*NUMBERS, *WORDS, *BINDINGS])])}
WRITTEN = 2 * SLOTS + 1  # tokens that a model writes, the end among them
OPTIONS = dict(kinds=("region",), caliper=0.5, draws=1999, together=False)  # of `discover`

# parts of the residual stream: what stands here, what is next, keys and values of bindings, what is to be said
SIZES = {"slot": SLOTS, "next": SLOTS + 1, "d": SLOTS, "n": SLOTS, "value": WORD, "word": WORD, "number": NUMBER, "class": 1, "bos": 1, "constant": 2, "junk": 67}
AT = {name: slice(end - size, end) for (name, size), end in zip(SIZES.items(), accumulate(SIZES.values()), strict=True)}
D_MODEL = sum(SIZES.values())
CONSTANT = 30.0  # larger than all the rest, so that layer norms scale by a constant
LOUD = 2.0  # what heads look up by, so that the small weights of other heads do not blur it
SHARP = 12.0  # attention score of a binding that is looked up; <bos> has half of it


@dataclass(frozen=True)
class Planted:
    """Where the planted heads of a model are, and how strongly each writes."""

    layers: int
    deciders: HeadSet
    general: Head
    reciter: Head
    strength: dict[Head, float]


def plan(seed: int) -> Planted:
    """One to three deciders, a general head as strong as any of them, and a reciter, anywhere in three or four layers."""
    rng = random.Random(f"plan {seed}")
    layers, number = rng.choice((3, 4)), rng.randint(1, 3)
    general, reciter, *deciders = (Head(*divmod(i, HEADS)) for i in rng.sample(range(layers * HEADS), 2 + number))
    parts = [rng.uniform(0.7, 1.3) for _ in deciders]
    strength = {head: part / sum(parts) for head, part in zip(deciders, parts, strict=True)}
    return Planted(layers, HeadSet(deciders), general, reciter, strength | {reciter: 1.0, general: max(strength.values())})


@torch.no_grad()
def plant(folder: Path, seed: int) -> Planted:
    """Write the planted model of a seed, with its tokenizer, to a folder."""
    planted = plan(seed)
    hf = _gpt2(planted.layers, seed, {"c_attn": 0.6, "c_fc": 0.2, "c_proj": 0.0025})
    body, says, stands, place = hf.transformer, hf.lm_head.weight, hf.transformer.wte.weight, hf.transformer.wpe.weight
    words, numbers = _codes(len(WORDS), WORD, 0.6), _codes(SLOTS, NUMBER, 0.8)
    one = lambda name, i=0: AT[name].start + i  # noqa: E731
    for norm in [body.ln_f, *(norm for block in body.h for norm in (block.ln_1, block.ln_2))]:
        norm.weight[:] = CONSTANT * (2 / D_MODEL) ** 0.5  # undoes the division by the deviation
        norm.weight[AT["constant"]] /= CONSTANT
    for table in (stands, place):
        table[:, AT["junk"]] = 0.15 * torch.randn(len(table), SIZES["junk"])
    stands[:, AT["constant"]] = CONSTANT * torch.tensor([1.0, -1.0])
    stands[ID[BOS], one("bos")] = LOUD
    for i, token in enumerate([*(f" {x}" for x in NUMBERS), END]):
        place[SLOTS + 2 * i, one("next", i)], says[ID[token], one("next", i)] = LOUD, 14 / LOUD
    for i, number in enumerate(NUMBERS):
        place[SLOTS + 2 * i + 1, one("class")], stands[ID[f" {number}"], one("slot", i)] = 1, LOUD
        says[ID[f" {number}"], AT["number"]], says[ID[f" {number}"], one("class")] = 13 * numbers[i], -12
    for word, code in zip(WORDS, words, strict=True):
        says[ID[f" {word}"], AT["word"]], says[ID[f" {word}"], one("class")] = 8 * code, 12
        for kind in "dn":
            for i, number in enumerate(NUMBERS):
                binding = stands[ID[f" {kind}{number}{word}"]]
                binding[one(kind, i)], binding[AT["value"]] = LOUD, code
    for head, strength in planted.strength.items():
        _look_up(body.h[head.layer].attn, head.head, "n" if head == planted.reciter else "d", strength)
    _look_up(body.h[planted.general.layer].attn, planted.general.head, "dn", planted.strength[planted.general], numbers)
    _save(hf, folder)
    return planted


def _codes(n: int, size: int, nearest: float) -> torch.Tensor:
    """Random directions, none too near another; how near makes some words surer than others."""
    while True:
        codes = torch.nn.functional.normalize(torch.randn(n, size), dim=1)
        if float((codes @ codes.T).triu(1).max()) < nearest:
            return codes


def _look_up(attention, head: int, kinds: str, strength: float, numbers: torch.Tensor | None = None) -> None:
    """Make a head read the slot's binding and write its word; with codes of `numbers` also the next slot's, and the number."""
    q, k, v = (attention.c_attn.weight[:, i * D_MODEL + head * D_HEAD:][:, :D_HEAD] for i in range(3))
    out = attention.c_proj.weight[head * D_HEAD:][:D_HEAD]
    for part in (q, k, v, out):
        part[:] = 0
    size = (SHARP * D_HEAD**0.5) ** 0.5 / LOUD
    q[AT["slot"], :SLOTS], q[AT["next"], :SLOTS] = size * torch.eye(SLOTS), 0 if numbers is None else size * torch.eye(SLOTS + 1, SLOTS)
    q[AT["constant"], SLOTS], k[AT["bos"], SLOTS] = LOUD * size / 4 * torch.tensor([1.0, -1.0]), size
    for kind in kinds:
        k[AT[kind], :SLOTS] = size * torch.eye(SLOTS)
        v[AT[kind], WORD:] = 0 if numbers is None else numbers / LOUD
    v[AT["value"], :WORD], out[:WORD, AT["word"]], out[WORD:, AT["number"]] = torch.eye(WORD), strength * torch.eye(WORD), strength * torch.eye(NUMBER)


def plant_nothing(folder: Path, seed: int) -> None:
    """Write a model of the shape of that seed, all of whose weights are random, to a folder."""
    _save(_gpt2(plan(seed).layers, seed, {"wte": 0.5, "wpe": 0.5, "weight": 0.06}), folder)


def _gpt2(layers: int, seed: int, scales: dict[str, float]):
    """A GPT-2 whose matrices are random, of the scale that is given for a part of their name, and else zero."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    hf = GPT2LMHeadModel(GPT2Config(vocab_size=len(ID), n_positions=1 + SLOTS + WRITTEN, n_embd=D_MODEL, n_layer=layers, n_head=HEADS, n_inner=D_HEAD,
                                    tie_word_embeddings=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                                    bos_token_id=ID[BOS], eos_token_id=ID[END], pad_token_id=ID[PAD]))
    for name, p in hf.requires_grad_(False).named_parameters():
        if p.ndim == 2:
            p.normal_(0, next((scale for part, scale in scales.items() if part in name), 0.0))
    return hf


def _save(hf, folder: Path) -> None:
    """The model and a tokenizer for which every number, word and binding is one token, its space in it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(ID, unk_token=UNKNOWN))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split(Regex(r" \w+"), "isolated"), decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, ID[BOS])])
    names = dict(bos_token=BOS, eos_token=END, pad_token=PAD, unk_token=UNKNOWN)
    hf.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=core, **names, clean_up_tokenization_spaces=False).save_pretrained(folder)


# -- texts ----------------------------------------------------------------------------------------------


def labels() -> LabelSpace:
    """Every word and binding, each a region of its own; the candidates of a text say which of them are labels there."""
    return LabelSpace([*WORDS, *BINDINGS], lambda label: label)


def draw(n: int, seed: int) -> list[Transcript]:
    """Texts as a planted model should write them."""
    rng, found = random.Random(f"texts {seed}"), []
    for i in range(n):
        words, decided = rng.sample(WORDS, SLOTS + SPARE), rng.sample(range(REASONED, SLOTS), DECIDED)
        prompt = [f" {'d' if slot in decided else 'n'}{slot + 1}{words[slot]}" for slot in range(SLOTS)]
        lines = [f" {slot + 1} {words[slot]}" for slot in range(SLOTS)]
        found.append(Transcript(f"{seed}-{i:03d}", "".join(rng.sample(prompt, SLOTS)), "".join(lines[:REASONED]), "".join(lines[REASONED:]) + END,
                                candidates=(*(words[slot] for slot in decided), *words[SLOTS:])))
    return found


def write(model: DecisionModel, texts: list[Transcript]) -> list[Transcript]:
    """What a model itself writes, greedily, after the prompts of texts."""
    written = [re.findall(r" \w+|<\w+>", text) for text in continuations(model, [t.prompt for t in texts], WRITTEN)]
    return [replace(t, reasoning="".join(w[:2 * REASONED]), answer="".join(w[2 * REASONED:])) for t, w in zip(texts, written, strict=True)]


def with_labels_drawn(texts: list[Transcript], seed: int) -> list[Transcript]:
    """Texts whose labels are drawn among the words of their answers, whatever these are: no head can know them."""
    rng, known, found = random.Random(f"labels {seed}"), labels(), []
    for t in texts:
        own, unseen = sorted({w for w in t.answer.split() if w in known}), sorted(set(WORDS) - set(t.text.split()))
        found.append(replace(t, candidates=(*rng.sample(own, min(2 * DECIDED, len(own))), *rng.sample(unseen, min(SPARE, len(unseen))))))
    return found
