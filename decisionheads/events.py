"""Decision events: the tokens of an answer at which the model picks among live labels.

Three kinds, exclusive, in this order of precedence:

departure
    the first token at which the label differs from a near-miss, a label of the same region that the
    reasoning named and the answer does not give;
region
    a token after which fewer regions are alive; the one that leaves a single region is *primary*;
label
    a later token with two or more live next tokens.

Everything that is not an event is counted by reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from .decisions import DecisionEvent, Dropped, Events
from .label_trie import END, LabelTrie, Node, token_sequences
from .labels import LabelSpace, Mention
from .transcripts import Encoded, Transcript, encode

_AROUND = 48  # characters on either side that are re-tokenized to see a label in place


def find_events(transcript: Transcript, labels: LabelSpace, tokenizer, *, encoded: Encoded | None = None,
                closers: Sequence[int] = (), exclude_emitted: bool = False) -> Events:
    """Find the decision events in the answer of a transcript, one round per first mention of a label.

    Args:
        transcript: prompt, reasoning and answer.
        labels: the label space; the transcript's own candidates narrow it.
        tokenizer: a fast Hugging Face tokenizer, the model's own.
        encoded: the tokens of the text, if they are at hand.
        closers: token ids that follow complete labels (see `find_closers`); used where a label is the
            beginning of another one.
        exclude_emitted: labels already given are no longer alive.
    """
    encoded = encoded or encode(transcript, tokenizer)
    every = labels  # a longer label that is no candidate is not the candidate it begins with
    if transcript.candidates is not None:
        labels = labels.subset(transcript.candidates)
    text, answer_at = transcript.text, transcript.answer_start
    mentions = first_mentions(every.mentions(text, answer_at))
    dropped = [Dropped(transcript.id, m.label, m.start, "not among the candidates") for m in mentions if m.label not in labels]
    mentions = [m for m in mentions if m.label in labels]
    named = [m for m in every.mentions(text, transcript.reasoning_start, answer_at) if m.label in labels]
    given = {m.label for m in mentions}
    regions = set(labels.regions.values())  # blocks of other regions than are asked about say nothing of these
    listed = {} if any(s.name == "block" and s.of in regions for s in transcript.spans) else _listed(text, every.mentions(text, 0, transcript.reasoning_start), labels)
    events: list[DecisionEvent] = []
    for number, mention in enumerate(mentions):
        alive = labels
        if exclude_emitted and number:
            before = {m.label for m in mentions[:number]}
            alive = labels.subset([label for label in labels.labels if label not in before])
        try:
            walk = _walk(text, mention, alive, tokenizer, encoded)
        except _Drop as drop:
            dropped.append(Dropped(transcript.id, mention.label, mention.start, str(drop)))
            continue
        near = _near_miss(walk, mention, named, given, alive)
        about = dict(transcript=transcript.id, label=mention.label, region=labels.region(mention.label),
                     start=mention.start, end=mention.end, copied=any(m.label == mention.label for m in named),
                     spans=_readable(transcript, labels.region(mention.label), mention, near, listed))
        kept, reasons = _events_of(walk, mention, near, alive, closers, about)
        events += kept
        dropped += [Dropped(transcript.id, mention.label, mention.start, reason) for reason in reasons]
    shown = {m.label for m in named} & given
    accepted = sum(any(labels.region(n) == labels.region(y) for n in shown - {y}) for y in given)
    return Events(tuple(events), tuple(dropped), accepted)


def find_closers(transcripts: Iterable[Transcript], labels: LabelSpace, tokenizer) -> tuple[int, ...]:
    """The token ids seen right after complete labels in the answers, ascending."""
    found = set()
    for transcript in transcripts:
        encoded = encode(transcript, tokenizer)
        for mention in labels.mentions(transcript.text, transcript.answer_start):
            after = encoded.tokens_in(mention.start, mention.end)
            if len(after) and after[-1] + 1 < len(encoded) and encoded.offsets[after[-1], 1] == mention.end:
                found.add(int(encoded.ids[after[-1] + 1]))
    return tuple(sorted(found))


def first_mentions(mentions: Iterable[Mention]) -> list[Mention]:
    """The first mention of each label, in order."""
    seen: set[str] = set()
    return [m for m in mentions if not (m.label in seen or seen.add(m.label))]


# -- one mention ----------------------------------------------------------------------------


class _Drop(Exception):
    """A mention that cannot be walked; the message is the reason that is counted."""


class _Step(NamedTuple):
    """One token of the label: `tokens` are all live next tokens with the labels they lead to."""

    position: int  # of the logits that predict it
    start: int  # its first character
    chosen: int
    before: Node
    tokens: dict[int, Node]

    @property
    def after(self) -> Node:
        return self.tokens[self.chosen]


class _Walk(NamedTuple):
    steps: list[_Step]
    trie: LabelTrie
    row: int  # of the emitted label
    following: int | None  # the token written after the label


def _walk(text: str, mention: Mention, labels: LabelSpace, tokenizer, encoded: Encoded) -> _Walk:
    """Follow the emitted label through the trie of live labels, checking tokens in place."""
    where = encoded.tokens_in(mention.start, mention.end)
    if not len(where) or where[0] == 0:
        raise _Drop("no token before it")
    begin = int(encoded.offsets[where[0], 0])
    lead, before = text[begin:mention.start], text[max(begin - 1, 0):begin]
    if lead.strip() or encoded.offsets[where[-1], 1] > mention.end:
        raise _Drop("merged with the text around it")
    trie = labels.trie(tokenizer, before, lead)
    written = [int(i) for i in encoded.ids[where]]
    node, steps = trie.root, []
    for depth, token in enumerate([*written, END]):
        tokens = trie.children(node)
        if len(tokens) > 1:
            tokens = _in_place(text, mention, begin, tokens, trie, labels, tokenizer, written[:depth])
        if token not in tokens:
            raise _Drop("tokenized otherwise in place")
        start = int(encoded.offsets[where[depth], 0]) if token != END else mention.end
        steps.append(_Step(int(where[0]) + depth - 1, start, token, node, tokens))
        node = tokens[token]
    after = int(where[-1]) + 1
    return _Walk(steps, trie, node.lo, int(encoded.ids[after]) if after < len(encoded) else None)


def _in_place(text: str, mention: Mention, begin: int, tokens: dict[int, Node], trie: LabelTrie, labels: LabelSpace,
              tokenizer, prefix: list[int]) -> dict[int, Node]:
    """Keep the next tokens for which a label, put where the emitted one stands, really tokenizes so."""
    left = max(0, begin - _AROUND)
    head, tail = text[left:mention.start], text[mention.end:mention.end + _AROUND]
    # a short label may merge with what follows where a longer one of the same branch does not: try up to three
    tried = [(token, row) for token, node in tokens.items() for row in sorted({node.lo, (node.lo + node.hi) // 2, node.hi - 1})]
    sequences = token_sequences(tokenizer, [head + labels.labels[trie.order[row]] + tail for _, row in tried], begin - left)
    alive = {token for (token, _), ids in zip(tried, sequences, strict=True)
             if ids[: len(prefix)] == prefix and (token == END or ids[len(prefix):len(prefix) + 1] == [token])}
    return {token: node for token, node in tokens.items() if token in alive}


def _near_miss(walk: _Walk, mention: Mention, named: Sequence[Mention], given: set[str], labels: LabelSpace) -> Mention | None:
    """The rejected label of the same region: longest shared token prefix, then the latest mention.

    Where the reasoning names the emitted label too, what it rejected on the way there, since the last label
    that it accepted, comes first.
    """
    region, written = labels.region(mention.label), walk.trie.sequence(walk.row)
    own = max((m.start for m in named if m.label == mention.label), default=None)

    def shared(other: Mention) -> int:
        ids = walk.trie.sequence(int(walk.trie.rank[labels.index[other.label]]))
        return next((i for i, (a, b) in enumerate(zip(ids, written, strict=False)) if a != b), min(len(ids), len(written)))

    same = [m for m in named if m.label not in given and m.label in labels and labels.region(m.label) == region]
    if own is not None:
        since = max((m.end for m in named if m.label in given and m.start < own), default=0)
        same = [m for m in same if since <= m.start < own] or same
    return max(same, key=lambda m: (shared(m), m.start), default=None)


def _events_of(walk: _Walk, mention: Mention, near: Mention | None, labels: LabelSpace, closers: Sequence[int],
               about: dict) -> tuple[list[DecisionEvent], list[str]]:
    """The events of one mention, and the reasons for which others were dropped."""
    trie, found, reasons = walk.trie, [], []
    region = int(trie.region[walk.row])
    near_row = int(trie.rank[labels.index[near.label]]) if near else -1
    departed = False
    for step in walk.steps:
        others = {token: node for token, node in step.tokens.items() if token != step.chosen}
        if not others:
            continue
        chosen = walk.following if step.chosen == END else step.chosen
        if chosen is None:
            reasons.append("nothing was written after it")
            continue

        def ids(tokens: Iterable[int], chosen: int = chosen) -> tuple[int, ...]:
            """Token ids, with the known closers where a label would end."""
            return tuple(sorted({i for t in tokens for i in (closers if t == END else (t,))} - {chosen}))

        alternatives = tuple(sorted({chosen, *ids(others)}))
        event = DecisionEvent(kind="label", position=step.position, chosen=chosen, alternatives=alternatives,
                              competitors=ids(others), **about)
        if near and not departed and not step.after.lo <= near_row < step.after.hi:
            departed = True
            rivals = ids(token for token, node in others.items() if node.lo <= near_row < node.hi)
            event = replace(event, kind="departure", competitors=rivals, near_miss=near.label,
                            short_prefix=step.start - mention.start <= 1)
        elif trie.n_regions(step.after) < trie.n_regions(step.before):
            mixed = [token for token, node in others.items() if trie.has_region(node, region)]
            event = replace(event, kind="region", competitors=ids(set(others) - set(mixed)), mixed=ids(mixed),
                            primary=trie.n_regions(step.after) == 1)
        elif trie.n_regions(step.before) > 1:
            reasons.append("several regions alive and none removed")
            continue
        if event.competitors:
            found.append(event)
        else:
            mixed_only = event.kind == "region" and event.mixed
            reasons.append("every other token may lead to the same region" if mixed_only else "no closer is known")
    if not found and not reasons:
        reasons.append("nothing else alive")
    return found, reasons


def _listed(text: str, mentions: Iterable[Mention], labels: LabelSpace) -> dict[str, list[tuple[int, int]]]:
    """Region -> lines of the prompt that list its labels, for transcripts that name no blocks; lines that follow each other are one."""
    found: dict[str, list[tuple[int, int]]] = {}
    for m in mentions:
        if m.label in labels:
            stop = text.find("\n", m.end)
            lines = found.setdefault(labels.region(m.label), [])
            start, end = text.rfind("\n", 0, m.start) + 1, len(text) if stop < 0 else stop
            if lines and start <= lines[-1][1] + 1:
                start = lines.pop()[0]
            lines.append((start, end))
    return found


def _readable(transcript: Transcript, region: str, mention: Mention, near: Mention | None, listed: dict[str, list[tuple[int, int]]]) -> tuple[tuple[str, int, int], ...]:
    """Named spans as this event sees them: its own region block, mention and evidence apart from the others."""
    found = [("own block", start, end) for start, end in listed.get(region, ())]
    for span in transcript.spans:
        own = {"block": region, "mention": mention.label, "evidence": mention.label}.get(span.name)
        name = span.name if own is None else f"{'own' if span.of == own else 'other'} {span.name}"
        found.append((name, span.start, span.end))
    if near is not None:
        found.append(("near-miss", near.start, near.end))
    return tuple(found)
