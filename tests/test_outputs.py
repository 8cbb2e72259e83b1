"""What a model wrote, taken apart into reasoning and answer, verbatim."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisionheads import InputError, Transcript, load_transcripts, save_transcripts
from decisionheads.outputs import separate

HARMONY = "<|channel|>analysis<|message|>maybe I50.9<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(("reasoning", "answer"), [
    ("<think>\nmaybe I50.9\n</think>", "\n\nI10"),
    ("maybe I50.9\n</think>", "\n\nI10<|im_end|>"),  # the opening tag stands in the prompt
    ("<think>a</think> or I50.9? <think>b</think>", "I10"),  # taken up again: the last closing counts
    ("<think>a</think> or I50.9? b</think>", "I10"),
    ("<think>\n\n</think>", "I10"),
    ("[THINK]maybe I50.9[/THINK]", "I10</s>"),
    ("maybe I50.9[/THINK]", "I10"),
    (HARMONY, "I10<|return|>"),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>", '["I10"]'),
    ("<|channel|>final<|message|>", "I10"),
    ("<think>like [THINK] this, [/THINK] or </think>", "I10"),  # the tags that occur first are the model's
    ("", "I10\nI50.9"),
    ("", "")])
def test_tags(reasoning, answer):
    assert separate(reasoning + answer) == (reasoning, answer)
    assert separate(reasoning + answer, "no such mark") == (reasoning, answer)


@pytest.mark.parametrize("written", [
    "<think>maybe I50.9", "<think>a</think>I10<think>or I50.9", "[THINK]a", "<|channel|>analysis<|message|>I10", "<|channel|>commentary<|message|>I10",
    HARMONY + "I10<|end|><|start|>assistant<|channel|>analysis<|message|>wait", "<think>a\nCodes: I10"])
def test_a_reasoning_that_was_not_finished_has_no_answer(written):
    assert separate(written, "\nCodes:") == (written, "")


def test_a_mark_belongs_to_the_answer():
    assert separate("I will write Codes: at the end.\nCodes: I10", "\nCodes:") == ("I will write Codes: at the end.", "\nCodes: I10")
    assert separate("Final answer: I50.9? No.\nFinal answer: I10", "Final answer:") == ("Final answer: I50.9? No.\n", "Final answer: I10")  # the last one
    assert separate("<think>Codes: I50.9</think>Codes: I10", "Codes:") == ("<think>Codes: I50.9</think>", "Codes: I10")
    with pytest.raises(InputError, match="mark of the answer is empty"):
        separate("I10", "")


pieces = st.lists(st.sampled_from(["<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>", "final", "analysis", "<|message|>", "<|end|>", "\nCodes:", "I10", "\r\n", " ", "é", "<"]) | st.text(max_size=3), max_size=12)


@given(pieces.map("".join), st.none() | st.just("\nCodes:") | st.text(min_size=1, max_size=2))
def test_nothing_is_lost_and_answers_hold_no_closing_tag(written, mark):
    reasoning, answer = separate(written, mark)
    assert reasoning + answer == written
    first = min((written.find(tag) for tag in ("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>") if tag in written), default=-1)
    if first >= 0 and written.startswith(("<think>", "</think>"), first):
        assert "</think>" not in answer and "<think>" not in answer


# -- records ------------------------------------------------------------------------------------------


def test_content_with_tags_is_taken_apart():
    record = {"id": "a", "prompt": "p", "content": "<think>maybe I50.9</think>\nI10"}
    want = Transcript("a", "p", "<think>maybe I50.9</think>", "\nI10")
    assert Transcript.from_record(record) == want == Transcript.from_record({**record, "reasoning_content": None})
    assert Transcript.from_record({"id": "a", "prompt": "p<think>", "answer": "hm</think>I10"}) == Transcript("a", "p<think>", "hm</think>", "I10")


def test_a_reasoning_of_its_own_is_left_alone(tmp_path):
    tagged = "<think>b</think>I10"
    assert Transcript.from_record({"id": "a", "prompt": "p", "reasoning": "hm", "answer": tagged}) == Transcript("a", "p", "hm", tagged)
    whole = Transcript("a", "p", "", tagged)
    save_transcripts([whole], tmp_path / "t.jsonl")
    assert load_transcripts(tmp_path / "t.jsonl") == [whole]  # what was written as an answer stays one


def test_an_unfinished_reasoning_is_refused_or_kept_for_scoring(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"id": "a", "prompt": "p", "content": "<think>maybe"}) + "\n")
    with pytest.raises(InputError, match=r"line 1: there is a reasoning and no answer after it; .*more room"):
        load_transcripts(file)
    assert load_transcripts(file, unanswered=True) == [Transcript("a", "p", "<think>maybe", "")]
    file.write_text(json.dumps({"id": "a", "prompt": "p", "answer": ""}) + "\n")
    assert load_transcripts(file, unanswered=True) == [Transcript("a", "p", "", "")]
    file.write_text(json.dumps({"id": "a", "prompt": "p"}) + "\n")
    with pytest.raises(InputError, match="no answer"):
        load_transcripts(file, unanswered=True)
