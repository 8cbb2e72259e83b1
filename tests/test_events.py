"""Decision events in texts that can be checked by eye."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from decisionheads import LabelSpace, Transcript, find_closers, find_events, tiny
from decisionheads.decisions import Events

from .bpe import bpe, token

CODES = ["I50", "I50.9", "I50.23", "I10", "J44.9", "J45.909", "E11.9"]


def text(answer: str, reasoning: str = "", candidates=None, name: str = "t") -> Transcript:
    return Transcript(name, "codes:\n", reasoning, answer, candidates)


def found(transcript: Transcript, labels=CODES, **options) -> Events:
    return find_events(transcript, LabelSpace(labels), bpe(), **options)


def ids(*texts: str) -> tuple[int, ...]:
    return tuple(sorted(map(token, texts)))


def test_region_label_and_positions():
    t = text("answer: I50.9\n")
    events = found(t, ["I50.9", "I50.23", "I10", "J44.9"])
    assert [e.kind for e in events] == ["region", "region", "label"]
    first, resolving, label = events
    assert not first.primary and resolving.primary and label.primary
    assert first.chosen == token(" I") and first.competitors == ids(" J")
    assert resolving.chosen == token("5") and resolving.competitors == ids("1")
    assert label.chosen == token("9") and label.competitors == ids("2")
    tokens = bpe()(t.text)["input_ids"]
    assert all(tokens[e.position + 1] == e.chosen for e in events)
    assert {e.region for e in events} == {"I50"} and t.text[label.start:label.end] == "I50.9"


def test_no_decision_where_the_first_token_is_shared():  # E5
    events = found(text("answer: I50.9\n"), ["I50.9", "I10"])
    assert [(e.kind, e.chosen, e.competitors) for e in events] == [("region", token("5"), ids("1"))]
    events = found(text("answer: I50.9\n"), ["I50.9", "I10", "J44.9", "J45.909"])
    assert events.events[0].competitors == ids(" J") and events.events[0].alternatives == ids(" I", " J")


def test_the_decision_token_is_the_one_in_place():  # E3
    (event, *_) = found(text("answer: I50.9\n"), ["I50.9", "J44.9"])
    assert event.chosen == token(" I") != token("I")
    (event, *_) = found(text("answer:\nI50.9\n"), ["I50.9", "J44.9"])
    assert event.chosen == token("I")


def test_a_label_that_begins_another_has_an_end_branch():  # E6
    t = text("answer: I50\n")
    assert found(t, ["I50", "I50.9", "I10"]).of_kind("label")[0].competitors == ids(".")
    dot = found(text("answer: I50.9\n"), ["I50", "I50.9", "I10"], closers=(token("\n"),)).of_kind("label")
    assert [(e.chosen, e.competitors) for e in dot] == [(token("."), ids("\n"))]
    end = found(t, ["I50", "I50.9", "I10"]).of_kind("label")[0]
    assert end.chosen == token("\n")  # the closer that was written is the chosen token
    lost = found(text("answer: I50.9\n"), ["I50", "I50.9", "I10"])
    assert lost.dropped_by_reason() == {"no closer is known": 1}
    assert find_closers([t, text("answer: I10, J44.9;")], LabelSpace(CODES), bpe()) == ids("\n", ",", ";")


def test_labels_are_never_mixed_from_two_paths():  # E6
    events = found(text("answer: A12\n"), ["A12", "B13"])
    assert len(events) == 1 and events.events[0].competitors == ids(" B")


def test_departure_from_a_near_miss():
    t = text("answer: I50.9\n", "I50.23? no, J44.9 neither. ")
    events = found(t)
    (departure,) = events.of_kind("departure")
    assert departure.near_miss == "I50.23" and departure.chosen == token("9") and departure.competitors == ids("2")
    assert departure.alternatives == ids("2", "9") and not departure.short_prefix and not departure.copied
    assert ("near-miss", 7, 13) in departure.spans
    assert [e.kind for e in events if e.position == departure.position] == ["departure"]  # kinds are exclusive


def test_the_near_miss_shares_most_then_comes_last():
    labels = ["I50.1", "I50.21", "I50.22", "I50.23"]
    (event,) = found(text("answer: I50.23\n", "I50.22 or I50.21 or I50.1? "), labels).of_kind("departure")
    assert event.near_miss == "I50.21"  # longest shared beginning first, then the latest


def test_a_named_label_that_is_given_is_no_near_miss():
    events = found(text("answer: I50.9, I50.23\n", "I50.23 and I50.9? "))
    assert not events.of_kind("departure") and events.accepted_near_misses == 2
    assert all(e.copied for e in events)


def test_a_near_miss_of_another_region_does_not_count():
    assert not found(text("answer: I50.9\n", "I10? ")).of_kind("departure")
    by_chapter = LabelSpace(CODES, lambda label: label[0])
    (event,) = find_events(text("answer: I50.9\n", "I10? "), by_chapter, bpe()).of_kind("departure")
    assert event.near_miss == "I10" and event.chosen == token("5") and event.short_prefix  # they share no more than "I"


def test_only_the_first_mention_counts_and_candidates_narrow():
    events = found(text("answer: I10, I10\n", candidates=("I10", "J44.9")))
    assert [(e.kind, e.competitors) for e in events] == [("region", ids(" J"))]
    assert found(text("answer: I10\n", candidates=("I10",))).dropped_by_reason() == {"nothing else alive": 1}


def test_labels_already_given_stay_alive_unless_asked():
    t = text("answer: I10, I50.9\n")
    alive = [e for e in found(t, ["I10", "I50.9", "J44.9"]) if e.label == "I50.9"]
    gone = [e for e in found(t, ["I10", "I50.9", "J44.9"], exclude_emitted=True) if e.label == "I50.9"]
    assert [e.competitors for e in alive] == [ids(" J"), ids("1")] and [e.competitors for e in gone] == [ids(" J")]


def test_mixed_tokens_never_compete():
    labels = LabelSpace(["A1", "A2", "B1"], {"A1": "x", "A2": "y", "B1": "x"})
    # " A" leads to region x as well as y: " B" removes y, and " A" does not compete
    assert find_events(text("answer: B1\n"), labels, bpe()).dropped_by_reason() == {"every other token may lead to the same region": 1}
    events = find_events(text("answer: B1\n"), LabelSpace(["A1", "A2", "B1", "C1"], {"A1": "x", "A2": "y", "B1": "x", "C1": "z"}), bpe())
    (event,) = events.of_kind("region")
    assert event.mixed == ids(" A") and event.competitors == ids(" C") and event.alternatives == ids(" A", " B", " C")


def test_merged_tokens_are_dropped_and_counted():
    class Greedy:
        """A tokenizer that swallows what follows a code."""

        is_fast, all_special_ids, bos_token = True, [], None

        def __call__(self, texts, **options):
            one = [texts] if isinstance(texts, str) else texts
            offsets = [[(i, min(i + 9, len(t))) for i in range(0, len(t), 9)] for t in one]
            ids = [[hash(t[a:b]) % 1000 for a, b in spans] for t, spans in zip(one, offsets, strict=True)]
            return {"input_ids": ids[0], "offset_mapping": offsets[0]} if isinstance(texts, str) else {"input_ids": ids, "offset_mapping": offsets}

    events = find_events(text("answer: I50.9 and so on\n"), LabelSpace(["I50.9", "I10"]), Greedy())
    assert not len(events) and events.dropped_by_reason() == {"merged with the text around it": 1}


def test_the_order_of_labels_changes_nothing():
    t = text("answer: I50.9, J44.9, I50\n", "I50.23, J45.909? ")
    want = found(t, closers=(token("\n"),))
    assert len(want) >= 6
    for seed in range(5):
        labels = random.Random(seed).sample(CODES, len(CODES))
        assert found(t, labels, closers=(token("\n"),)) == want


def test_every_alternative_is_a_real_tokenization():
    """Each live token, put in place of the chosen one, begins some label there."""
    t = text("answer: I50.9, J44.9\n")
    for event in found(t):
        for other in event.alternatives:
            prefix = bpe()(t.text)["input_ids"][: event.position + 1]
            written = bpe().decode([*prefix, other])
            begun = written[event.start:]
            assert any(label.startswith(begun) for label in CODES)


def test_unknown_options_are_errors():  # B2
    with pytest.raises(TypeError):
        find_events(text("answer: I10\n"), LabelSpace(CODES), bpe(), closer=(1,))


def test_a_near_miss_belongs_to_its_own_mention():
    labels = ["I50.9", "I50.23", "I50.1", "I50.32", "I10"]
    reasoning = "step 1: I50.23? not acute, so I50.9. step 2: I50.1? no, so I50.32. "
    events = found(text("answer: I50.9, I50.32\n", reasoning), labels)
    assert {(e.label, e.near_miss) for e in events.of_kind("departure")} == {("I50.9", "I50.23"), ("I50.32", "I50.1")}


def test_a_longer_label_that_is_no_candidate_is_not_the_one_it_begins_with():
    t = text("answer: I50.23 and I10\n", candidates=("I50", "I10", "J44.9"))
    events = found(t, ["I50", "I50.23", "I10", "J44.9"])
    assert {e.label for e in events} == {"I10"} and events.dropped_by_reason() == {"not among the candidates": 1}


def test_accepted_near_misses_are_labels_of_the_same_region():
    assert found(text("answer: I50.9, I10\n", "I50.9 and I10. ")).accepted_near_misses == 0
    assert found(text("answer: I50.9, I50.23\n", "I50.23 or I50.9? ")).accepted_near_misses == 2


def test_a_branch_lives_if_any_of_its_labels_does():
    """`C+` merges with a comma after it, `C+x` does not: `+` stays alive."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(["C", "+", "x", "#", ",", " ", "z", "+,", "a"])}
    core = Tokenizer(models.BPE(vocabulary, [("+", ",")]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split(" ", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    space = LabelSpace(["C", "C+", "C+x", "C#"], {"C": "r", "C+": "r", "C+x": "r", "C#": "q"})
    events = find_events(Transcript("t", "a", "", " C, z"), space, tokenizer, closers=(vocabulary[","],))
    assert any(vocabulary["+"] in e.alternatives for e in events)


def test_without_named_blocks_the_lines_of_the_list_are_the_block(space):
    """A prompt that lists its labels line by line, and names no spans."""
    drawn = tiny.draw(1, seed=3)[0]
    named = tiny.transcript("t", drawn)
    bare = replace(named, spans=tuple(s for s in named.spans if s.name != "block"))
    tokenizer = tiny.clinic.clinic_tokenizer()
    for with_blocks, without in zip(find_events(named, space, tokenizer), find_events(bare, space, tokenizer), strict=True):
        own = [s for s in with_blocks.spans if s[0] == "own block"]
        assert len(own) == 1 and own == [s for s in without.spans if s[0] == "own block"]


def test_lines_of_one_region_that_stand_apart_are_spans_of_their_own():
    t = Transcript("t", "codes\nI50 heart\nI10 pressure\nI50.9 heart, other\nI50.23 acute\n", "", "answer: I50.9\n")
    e = next(iter(find_events(t, LabelSpace(["I50", "I50.9", "I50.23", "I10"]), bpe())))
    assert [t.text[a:b] for name, a, b in e.spans if name == "own block"] == ["I50 heart", "I50.9 heart, other\nI50.23 acute"]
