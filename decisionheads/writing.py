"""What a model writes: greedily, and within the labels where that is asked for.

Several texts are written side by side over one copy of what their prompts share. A `Writer` chooses
the tokens of one text, from float32 logits; the rest of the house does not know how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ._cache import Prefix
from ._rows import Engine
from ._together import Together
from .errors import InputError
from .label_trie import END, LabelTrie, Node, token_sequences
from .labels import LabelSpace
from .model import DecisionModel
from .transcripts import Transcript, encode


@runtime_checkable
class Writer(Protocol):
    """Chooses the tokens of one text.

    Attributes:
        longest: the most tokens that it may write.
    """

    longest: int

    def choose(self, logits: Float[Tensor, " vocabulary"]) -> int | None:
        """The next token; None where the text has ended."""


class Greedy:
    """The most probable token, up to an end token (kept) or `longest` tokens."""

    def __init__(self, longest: int, ends: frozenset[int]):
        self.longest, self.ends = longest, ends
        self.written: list[int] = []
        self.finished = False

    def choose(self, logits: Float[Tensor, " vocabulary"]) -> int | None:
        if self.finished or len(self.written) == self.longest:
            return None
        token = int(logits.argmax())
        self.written.append(token)
        self.finished = token in self.ends
        return token


class Answering:
    """Free reasoning, then a cue, then labels: at each token the most probable of those that are still alive.

    The cue ends the reasoning when the model ends it (its end token is not kept), at `until`, or after
    `reasoning` tokens. A label is never written twice. After a label the model chooses between another
    one and the end.

    Args:
        answers: which answers there are.
        reasoning: the most tokens of reasoning.
    """

    def __init__(self, answers: Answers, reasoning: int):
        self.answers, self.reasoning = answers, reasoning
        self.longest = reasoning + len(answers.cue) + min(answers.most, len(answers.space)) * (answers.first.ids.shape[1] + len(answers.between)) + 1
        self.forced: list[int] = []
        self.thoughts: list[int] = []  # the reasoning
        self.labels: list[int] = []  # indices into the label space
        self.trie: LabelTrie | None = None
        self.node: Node | None = None
        self.finished = False

    def choose(self, logits: Float[Tensor, " vocabulary"]) -> int | None:
        if self.finished:
            return None
        if self.trie is None:
            token = int(logits.argmax())
            if len(self.thoughts) < self.reasoning and token not in self.answers.ends and not self.answers.stops([*self.thoughts, token]):
                self.thoughts.append(token)
                return token
            self.trie, self.forced = self.answers.first, list(self.answers.cue)
            self.node = self.trie.root
        if self.forced:
            return self.forced.pop(0)
        return self._label(logits)

    def _label(self, logits: Float[Tensor, " vocabulary"]) -> int:
        """The best live token; where a label may end, the separator and the end stand for that."""
        a, children = self.answers, self.trie.children(self.node)
        given = np.sort(self.trie.rank[self.labels])
        alive = {t: n for t, n in children.items() if n.hi - n.lo > np.searchsorted(given, n.hi) - np.searchsorted(given, n.lo)}
        ended = alive.pop(END, None)
        more = len(self.labels) + 1 < min(a.most, len(a.space))
        closing = [] if ended is None else [*a.closers, *a.between[:1]] if more else [*a.closers]
        allowed = [*alive, *closing]
        token = allowed[int(logits[allowed].argmax())]
        if token in alive:
            self.node = alive[token]
            return token
        self.labels.append(int(self.trie.order[ended.lo]))
        if token in a.closers:
            self.finished = True
        else:
            self.trie, self.forced = a.later, list(a.between[1:])
            self.node = self.trie.root
        return token


class Answers:
    """The answers that can be written within a label space: a cue, then labels with separators, then an end.

    Args:
        space: the labels.
        tokenizer: the model's own.
        ends: token ids that end what the model writes; each of them closes an answer, and so does a line break.
        cue: what opens the answer, without a space at its end.
        between: what stands between two labels, without the space that opens the next.
        most: the most labels of an answer.
        until: text at which reasoning ends, such as a line break; the token that completes it is not kept.

    Raises:
        InputError: where this tokenizer writes the pieces otherwise than one after the other.
    """

    def __init__(self, space: LabelSpace, tokenizer, ends: frozenset[int], cue: str = "\nCodes:", between: str = ",", most: int = 16, until: str = ""):
        self.space, self.ends, self.most, self.until, self.tokenizer = space, ends, most, until, tokenizer
        pieces = []
        for name, text in (("cue", cue), ("separator", between)):
            before = "\n" if text[:1].isalnum() else "x"  # not alone: some tokenizers put a space in front of a text
            ids = token_sequences(tokenizer, [before + text], 1)[0]
            pieces.append(tuple(ids))
            if not text.strip() or text[-1] == " " or appended(tokenizer, tokenizer(before, add_special_tokens=False)["input_ids"], ids) != text:
                raise InputError(f"the {name} {text!r} is empty, ends in a space, or is not what this tokenizer gives back; choose other words")
        self.cue, self.between = pieces
        self.closers = frozenset({*ends, *tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]})
        self.first, self.later = space.trie(tokenizer, cue[-1], " "), space.trie(tokenizer, between[-1], " ")
        for trie in (self.first, self.later):
            odd = (trie.ids == (-2 if tokenizer.unk_token_id is None else tokenizer.unk_token_id)).any(1)
            odd[1:] |= (trie.ids[1:] == trie.ids[:-1]).all(1)
            if odd.any():
                raise InputError(f"label {space.labels[trie.order[odd.argmax()]]!r} cannot be told from others, or not be written, in the tokens of this model; leave it out, or do not answer within the labels")
        column = set(self.first.ids[:, 1:].ravel().tolist()) | set(self.later.ids[:, 1:].ravel().tolist())
        if {self.between[0], *self.closers} & column:
            raise InputError(f"the separator {between!r} or an end token is also how a label goes on in this tokenizer; choose another separator")

    def stops(self, thoughts: Sequence[int]) -> bool:
        """Whether reasoning ends with its last token."""
        return bool(self.until) and self.until in self.tokenizer.decode(list(thoughts[-len(self.until) - 1:]))


def appended(tokenizer, before: Iterable, ids: Iterable) -> str:
    """What tokens stand for after others; alone, some decoders take their first space away."""
    before = [int(i) for i in before]
    return tokenizer.decode([*before, *map(int, ids)])[len(tokenizer.decode(before)):]


def end_tokens(model: DecisionModel) -> frozenset[int]:
    """The token ids after which a model has nothing more to write: its generation config's and its tokenizer's."""
    config = getattr(getattr(model.hooked, "model", None), "generation_config", None)
    known = getattr(config, "eos_token_id", None)
    found = {*(known if isinstance(known, list | tuple) else [known]), model.tokenizer.eos_token_id} - {None}
    if not found:
        raise InputError(f"{model.name} has no end token; give its tokenizer an eos_token")
    beyond = next((i for i in found if not 0 <= int(i) < model.hooked.vocabulary), None)
    if beyond is not None:
        raise InputError(f"{model.name} says that token {beyond} ends its texts, and has a vocabulary of {model.hooked.vocabulary}; mend eos_token_id")
    return frozenset(int(i) for i in found)


def continuations(model: DecisionModel, prompts: Sequence[str], longest: int, *, together: int = 16) -> Iterator[str]:
    """What a model writes after each prompt, greedily, up to its end token (kept) or `longest` tokens; see `write`."""
    ends = end_tokens(model)
    ids = [np.array(encode(Transcript("prompt", prompt, "", ""), model.tokenizer).ids) for prompt in prompts]
    for _, written, _ in write(model.hooked, ids, lambda number: Greedy(longest, ends), together=together):
        yield model.tokenizer.decode(written)


@torch.no_grad()
def write(hooked: Engine, prompts: Sequence[Int[np.ndarray, " _"]], writers: Callable[[int], Writer], *, together: int = 8,
          shared: Prefix | None = None) -> Iterator[tuple[int, list[int], Writer]]:
    """Write a text after each prompt, several at a time.

    Args:
        prompts: token ids of each.
        writers: number of a prompt -> who chooses its tokens.
        together: texts that are written side by side; changes the time, and the result only where rounding decides.
        shared: what prompts begin with, read already (see `Prefixes.share`); where one begins otherwise, its group is read in full.

    Yields:
        `(number of the prompt, token ids that were written, its writer)`, in order.

    Raises:
        InputError: for a prompt that leaves too little room in the model's context.
    """
    for start in range(0, len(prompts), together):
        group = {n: writers(n) for n in range(start, min(start + together, len(prompts)))}
        for n, writer in group.items():
            if hooked.context and len(prompts[n]) + writer.longest > hooked.context:
                raise InputError(f"a prompt of {len(prompts[n])} tokens and up to {writer.longest} written ones are longer than the {hooked.context} that the model can read; shorten the prompt")
        ids = [torch.as_tensor(prompts[n], dtype=torch.long, device=hooked.device) for n in group]
        found = _side_by_side(hooked, ids, list(group.values()), shared) if hooked.packed else (hooked.generate(i, w.longest, w.choose).tolist() for i, w in zip(ids, group.values(), strict=True))
        yield from zip(group, found, group.values(), strict=True)


def _side_by_side(hooked: Engine, prompts: Sequence[Tensor], writers: Sequence[Writer], shared: Prefix | None) -> list[list[int]]:
    """What each writes after its prompt, all in one cache."""
    begins = lambda ids: len(ids) > len(shared) and torch.equal(ids[:len(shared)], shared.ids)  # noqa: E731
    shared = shared if shared is not None and all(map(begins, prompts)) else None
    texts = Together(hooked, shared, sum(len(ids) + w.longest for ids, w in zip(prompts, writers, strict=True)) - len(prompts) * (len(shared) if shared is not None else 0))
    latest = {}
    for ids in prompts:  # one after the other: each fork holds a copy of what is shared until its own part is taken in
        read = hooked.prefill(ids, (len(ids) - 1,), shared=shared)
        latest[texts.add(read)] = read.logits[0]
    written: list[list[int]] = [[] for _ in prompts]
    while latest:
        chosen = {i: token for i, logits in latest.items() if (token := writers[i].choose(logits)) is not None}
        for i, token in chosen.items():
            written[i].append(token)
        on = [i for i in chosen if len(written[i]) < writers[i].longest]
        if not on:
            break
        latest = dict(zip(on, texts.step(torch.tensor(on, device=hooked.device), torch.tensor([chosen[i] for i in on], device=hooked.device)), strict=True))
    return written
