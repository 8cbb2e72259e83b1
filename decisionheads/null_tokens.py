"""Null tokens: generated tokens at which nothing is decided about labels.

A null is generated, belongs to no label mention (reasoning included) and to no template. Events are
matched to nulls of their own transcript on token class and on how sure the model was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from .labels import LabelSpace
from .transcripts import Encoded, Transcript

Array = np.ndarray
SHARE = 0.9  # of reference transcripts: what begins a line in so many of them is template


def token_class(text: str) -> str:
    """word, digit, punctuation or space: what kind of token a text is."""
    bare = text.strip()
    if not bare:
        return "space"
    if any(c.isalpha() for c in bare):
        return "word"
    return "digit" if any(c.isdigit() for c in bare) else "punctuation"


def template_ids(transcripts: Iterable[tuple[Transcript, Encoded]], special: Iterable[int]) -> frozenset[int]:
    """Special tokens, and tokens that begin a generated line in nine of ten reference transcripts."""
    counts: Counter[int] = Counter()
    n = 0
    for transcript, encoded in transcripts:
        n += 1
        text, begins = transcript.text, set()
        for i in range(first_generated(transcript, encoded), len(encoded)):
            start = int(encoded.offsets[i, 0])
            if start == 0 or text[start - 1] == "\n":
                begins.add(int(encoded.ids[i]))
        counts.update(begins)
    return frozenset({*special, *(i for i, c in counts.items() if c >= SHARE * n)})


def first_generated(transcript: Transcript, encoded: Encoded) -> int:
    """Position of the first token that the model wrote."""
    return int(np.searchsorted(encoded.offsets[:, 1], transcript.reasoning_start, "right"))


def null_positions(transcript: Transcript, encoded: Encoded, labels: LabelSpace, template: frozenset[int], tokenizer) -> list[int]:
    """Positions `t` whose next token is a null, ascending.

    A token that was written while two or more labels were alive is none, whether or not it became a label.
    """
    inside = np.zeros(len(encoded), bool)
    for mention in labels.mentions(transcript.text, transcript.reasoning_start):
        tokens = encoded.tokens_in(mention.start, mention.end)
        inside[tokens] = True
        if len(tokens) and tokens[-1] + 1 < len(encoded):
            inside[tokens[-1] + 1] = True  # what closes a label may decide that it ends
    begin = max(1, first_generated(transcript, encoded))
    for i in range(begin, len(encoded)):
        if not inside[i]:
            inside[i:i + _alive(transcript.text, encoded, i, labels, tokenizer)] = True
    return [i - 1 for i in range(begin, len(encoded)) if not inside[i] and int(encoded.ids[i]) not in template]


def _alive(text: str, encoded: Encoded, i: int, labels: LabelSpace, tokenizer) -> int:
    """How many tokens from `i` on follow a path of the label trie on which two or more labels were alive."""
    start, end = map(int, encoded.offsets[i])
    word = text[start:end].lstrip()
    at = end - len(word)
    if not word or (at and text[at - 1].isalnum() and word[0].isalnum()) or not labels.begins_like(word):
        return 0
    trie = labels.trie(tokenizer, text[max(start - 1, 0):start], text[start:at])
    node, last = trie.root, 0
    for count, token in enumerate(encoded.ids[i:], 1):
        tokens = trie.children(node)
        if int(token) not in tokens:
            break
        last = count if len(tokens) > 1 else last
        node = tokens[int(token)]
    return last


@dataclass(frozen=True)
class Sureness:
    """How sure the model was at some positions of a text, and of what class the next token is.

    Attributes:
        positions: `[token]`.
        margin: `[token]` logit of the next token minus the best other token of the vocabulary.
        rival: `[token]` id of that other token.
        covariates: `[token, 3]` margin, log entropy (nats), position.
        classes: class of the next token.
    """

    positions: Int[Array, " token"]
    margin: Float[Array, " token"]
    rival: Int[Array, " token"]
    covariates: Float[Array, "token 3"]
    classes: tuple[str, ...]


def sureness(transcript: Transcript, encoded: Encoded, positions: Iterable[int], logits: Float[Tensor, "token vocabulary"]) -> Sureness:
    """Read margins, entropies and classes off clean logits at `positions`."""
    where = np.fromiter(positions, int)
    chosen = torch.as_tensor(encoded.ids[where + 1], dtype=torch.long, device=logits.device)
    own = logits.gather(1, chosen[:, None])[:, 0]
    others = logits.scatter(1, chosen[:, None], -torch.inf)
    best, rival = others.max(1)
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    margin = (own - best).double().cpu().numpy()
    text = transcript.text
    return Sureness(where, margin, rival.cpu().numpy(),
                    np.stack([margin, np.log(entropy.double().cpu().numpy().clip(1e-12)), where.astype(float)], 1),
                    tuple(token_class(text[encoded.offsets[i + 1, 0]:encoded.offsets[i + 1, 1]]) for i in where))
