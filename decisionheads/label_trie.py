"""The trie of a label space in tokens: a sorted matrix, in which every query is a few binary searches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .views import Brief

if TYPE_CHECKING:
    from .labels import LabelSpace

END = -1  # the label ends here
_BATCH = 4096  # texts tokenized at once: offsets of 300,000 titles would fill gigabytes


class Node(NamedTuple):
    """A node of the trie: the labels `lo <= i < hi` of the sorted order share `depth` tokens."""

    lo: int
    hi: int
    depth: int


@dataclass(frozen=True, eq=False, repr=False)
class LabelTrie(Brief):
    """Token sequences of labels, sorted; a node is a range of rows.

    Attributes:
        ids: `[label, token]` token ids, padded with END; column-major, so that a search copies nothing.
        region: `[label]` region number of each row.
        order: `[label]` index into `LabelSpace.labels` of each row.
        rank: `[label]` the row of each index: the inverse of `order`.
        rows_of_region: for each region its rows, ascending.
    """

    ids: np.ndarray
    region: np.ndarray
    order: np.ndarray
    rank: np.ndarray
    rows_of_region: tuple[np.ndarray, ...]

    @classmethod
    def build(cls, space: LabelSpace, tokenizer, before: str, lead: str) -> LabelTrie:
        sequences = token_sequences(tokenizer, [before + lead + label for label in space.labels], len(before))
        return cls.from_sequences(sequences, [space.regions[label] for label in space.labels])

    @classmethod
    def from_sequences(cls, sequences: Sequence[Sequence[int]], regions: Sequence[str]) -> LabelTrie:
        ids = np.full((len(sequences), max(map(len, sequences)) + 1), END, np.int32)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = sequence
        order = np.lexsort(ids.T[::-1])
        names = {name: i for i, name in enumerate(dict.fromkeys(regions))}
        region = np.array([names[name] for name in regions], np.int32)[order]
        by_region = np.argsort(region, kind="stable")
        splits = np.searchsorted(region[by_region], np.arange(1, len(names)))
        trie = cls(np.asfortranarray(ids[order]), region, order, np.argsort(order), tuple(np.split(by_region, splits)))
        object.__setattr__(trie, "_distinct", lru_cache(maxsize=None)(trie._count_regions))
        return trie

    @property
    def root(self) -> Node:
        return Node(0, len(self.ids), 0)

    def children(self, node: Node) -> dict[int, Node]:
        """All next tokens (END where a label ends) with their nodes, by jumping over each run."""
        found, column, at = {}, self.ids[node.lo:node.hi, node.depth], 0
        while at < len(column):
            token = int(column[at])
            stop = int(np.searchsorted(column, token, "right"))
            found[token] = Node(node.lo + at, node.lo + stop, node.depth + 1)
            at = stop
        return found

    def sequence(self, row: int) -> list[int]:
        """The token ids of a row, without the end."""
        return [int(i) for i in self.ids[row] if i != END]

    def has_region(self, node: Node, region: int) -> bool:
        rows = self.rows_of_region[region]
        return bisect_left(rows, node.hi) > bisect_left(rows, node.lo)

    def n_regions(self, node: Node) -> int:
        """How many regions are alive at a node; counted once a node, then remembered."""
        return self._distinct(node.lo, node.hi)

    def _count_regions(self, lo: int, hi: int) -> int:
        return len(np.unique(self.region[lo:hi]))


def token_sequences(tokenizer, texts: Sequence[str], skip: int) -> list[list[int]]:
    """Token ids of each text from the first token that starts at character `skip` or reaches past it."""
    found: list[list[int]] = []
    for start in range(0, len(texts), _BATCH):
        encoded = tokenizer(list(texts[start:start + _BATCH]), add_special_tokens=False, return_offsets_mapping=True)
        for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            first = next((i for i, (_, stop) in enumerate(offsets) if stop > skip), len(ids))
            found.append(ids[first:])
    return found
