"""Answers against gold labels: parsing, scores worked out by hand, and the command."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisionheads import InputError, LabelSpace, Transcript, save_transcripts
from decisionheads.cli import main
from decisionheads.task_score import AMBIGUOUS, EMPTY, NO_CODE, OUTSIDE, parse_answer, task_score

CODES = ["I10", "I50.1", "I50.23", "I50.9", "J44.9", "Z79.4", "S72.001A"]
SPACE = LabelSpace(CODES)


# -- answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [
    "I50.9", "i50.9", "I509", "i509", "I50.9.", "I509.", "(I50.9)", "[I50.9]", "`I50.9`", "'I50.9'", '"I50.9"', "**I50.9**", "_I50.9_", "- I50.9", "* I50.9", "1. I50.9", "1)I50.9",
    "•I50.9", "I50.9-Heart failure", "I50.9 - Heart failure", "I50.9: heart failure", "I50.9.Heart failure", "I50.9\r\n", "I50.9<|im_end|>", "<I50.9>", "\\boxed{I50.9}", '["I50.9"]', "code=I50.9;",
    "I50.9 I50.9, i509", "I50.9–", "I50.9/"])
def test_one_code_however_it_is_written(written):
    assert parse_answer(written, SPACE) == (("I50.9",), Counter())


@pytest.mark.parametrize(("written", "labels", "outside"), [
    ("I50.90", (), 1), ("I50.9a", (), 1), ("I50.9.1", (), 1), ("I50.9-1", (), 1), ("I50.99", (), 1), ("I50.99999", (), 1), ("J44", (), 1), ("I11", (), 1),  # never mended
    ("I50.1-I50.9", ("I50.1", "I50.9"), 0),  # not expanded
    ("I50-I52", (), 2), ("I50.1–I50.9", ("I50.1", "I50.9"), 0),
    ("S72.001a, S72001A", ("S72.001A",), 0), ("Z79.4, I10 and j449", ("Z79.4", "I10", "J44.9"), 0),  # in the order of the answer
    ("A1c and A1C and B12: I10", ("I10",), 2),  # words of a code's shape are counted, each once
    ("xI10 éI10 I10x1y2z3", (), 0), ("I 10", (), 0), ("I5.09", (), 0), ("T4N1M0", (), 1)])
def test_what_is_no_label_is_counted_and_never_mended(written, labels, outside):
    found, failures = parse_answer(written, SPACE)
    assert found == labels and failures[OUTSIDE] == outside
    assert set(failures) <= {OUTSIDE, NO_CODE} and failures[NO_CODE] == (not labels and not outside)


@pytest.mark.parametrize(("written", "reason"), [("no code fits", NO_CODE), ("", EMPTY), (" \r\n", EMPTY), ("<|im_end|>", EMPTY), ("\n</s>", EMPTY), ("12 50.9", NO_CODE)])
def test_answers_without_a_code(written, reason):
    assert parse_answer(written, SPACE) == ((), Counter({reason: 1}))


@given(st.lists(st.sampled_from(CODES), max_size=6), st.data())
def test_any_mixture_of_forms_is_read(codes, data):
    forms = [str, str.lower, lambda c: c.replace(".", ""), lambda c: f"{c}.", lambda c: f"({c})", lambda c: f"{c}-text", lambda c: f"`{c.lower()}`"]
    text = "".join(data.draw(st.sampled_from(forms))(c) + data.draw(st.sampled_from([" ", "\n", ", ", "; ", " and ", "\r\n- "])) for c in codes)
    found, failures = parse_answer(text, SPACE)
    assert found == tuple(dict.fromkeys(codes)) and not failures[OUTSIDE]


def test_labels_of_other_shapes():
    space = LabelSpace(["Vora-mi", "Vora-mi-ta", "Zel-so", "ABC", "abc", "İx"], lambda label: "r")
    assert parse_answer("1. VORA-MI\n2. zel-so, Zel-so", space) == (("Vora-mi", "Zel-so"), Counter())
    assert parse_answer("vora-mi-ta", space)[0] == ("Vora-mi-ta",)  # the longest at its place
    assert parse_answer("vora-mi-to, Zel", space) == ((), Counter({NO_CODE: 1}))
    assert parse_answer("abc, ABC", space)[0] == ("abc", "ABC") and parse_answer("Abc", space) == ((), Counter({AMBIGUOUS: 1}))
    assert parse_answer("İİ zel-so İx", space)[0] == ("Zel-so", "İx")  # places stay what they are in lower case
    mixed = LabelSpace(["I10", "heart failure"], lambda label: "r")
    assert parse_answer("Heart Failure; i10", mixed)[0] == ("heart failure", "I10")


def test_categories_of_two_letters():
    space = LabelSpace(["I10", "QA0.0101"], lambda label: label[:3])
    assert parse_answer("qa00101; pO2 is 60, See.I10", space) == (("QA0.0101", "I10"), Counter())


def test_label_files_without_dots():
    assert parse_answer("I50.9, I509, i5023", LabelSpace(["I509", "I5023"], lambda label: label[:3]))[0] == ("I509", "I5023")


# -- scores -------------------------------------------------------------------------------------------


def made(number, answer, gold, group=None):
    return Transcript(f"t{number}", "p", "r I50.23", answer, labels=tuple(gold), group=group)


WORKED = [
    made(0, "I10, I50.9, I50.9", ["I10", "I50.1"]),  # 1 of 2 right, 2 gold
    made(1, "J44.9, I50.90", ["J44.9"]),             # 1 of 1 right, 1 gold; one code outside
    made(2, "nothing to code", ["I10"]),             # 0 of 0, 1 gold
    made(3, "\n", ["I10", "Z79.4", "X99.9"]),        # 0 of 0, 2 gold; one gold outside
    made(4, "I10, I50.9", []),                       # left out
    made(5, "I10", ["X99.9"])]                       # left out


def test_a_worked_example():
    """Worked out by hand. Pairs: gold 6, predicted 3, right 2. By label 2 tp / (gold + predicted): I10 2/(3+1),
    I50.1 0, I50.9 0, J44.9 2/2, Z79.4 0. By transcript: 2/4, 2/2, 0, 0."""
    found = task_score(WORKED, SPACE)
    assert (found.transcripts, found.without_gold, found.gold, found.predicted, found.true_positives, found.gold_outside) == (4, 2, 6, 3, 2, 2)
    assert found.precision == pytest.approx(2 / 3) and found.recall == pytest.approx(2 / 6) and found.micro_f1 == pytest.approx(4 / 9)
    assert found.labels == 5 and found.macro_f1 == pytest.approx((0.5 + 0 + 0 + 1 + 0) / 5) and found.example_f1 == pytest.approx(1.5 / 4)
    assert found.empty_answers == 1 and found.failures == {NO_CODE: 1, OUTSIDE: 1}
    shown = str(found)
    assert "4 transcripts: 6 gold labels, 3 predicted, 2 of them right" in shown and "precision 0.667, recall 0.333" in shown
    assert "over 5 labels" in shown and "1 empty answers; no code in the answer: 1; not in the label space: 1" in shown and "left out: 2 transcripts" in shown
    assert json.loads(json.dumps(found.to_dict()))["micro_f1"] == found.micro_f1


def test_extremes():
    perfect = task_score([made(0, "I10, J44.9", ["J44.9", "I10"]), made(1, "I50.9", ["I50.9"])], SPACE)
    assert perfect.precision == perfect.recall == perfect.micro_f1 == perfect.macro_f1 == perfect.example_f1 == 1 and perfect.micro_f1_interval == (1, 1)
    nothing = task_score([made(0, "", ["I10"])], SPACE)
    assert nothing.precision is None and nothing.recall == nothing.micro_f1 == nothing.macro_f1 == 0 and nothing.micro_f1_interval is None and "precision undefined" in str(nothing)
    with pytest.raises(InputError, match="no transcript has a gold label"):
        task_score([made(0, "I10", []), made(1, "I10", ["i10"])], SPACE)


@given(st.lists(st.tuples(st.sets(st.sampled_from(CODES), min_size=1), st.sets(st.sampled_from(CODES))), min_size=1, max_size=8))
def test_scores_equal_those_of_the_matrix(pairs):
    """Against 0/1 matrices of transcripts and labels."""
    found = task_score([made(i, "; ".join(sorted(p)), sorted(g)) for i, (g, p) in enumerate(pairs)], SPACE)
    gold, predicted = (np.array([[code in pair[k] for code in CODES] for pair in pairs]) for k in (0, 1))
    right, both = gold & predicted, gold.astype(int) + predicted
    f1 = lambda axis: np.array([2 * a / b for a, b in zip(right.sum(axis), both.sum(axis), strict=True) if b]).mean()  # noqa: E731
    assert found.micro_f1 == pytest.approx(2 * right.sum() / both.sum()) and found.macro_f1 == pytest.approx(f1(0)) and found.example_f1 == pytest.approx(f1(1))


def test_intervals_draw_whole_patients():
    texts = [made(i, "I10" if i % 2 else "J44.9", ["I10"], group=f"p{i // 10}" if i < 40 else None) for i in range(60)]
    found = task_score(texts, SPACE)
    low, high = found.micro_f1_interval
    assert low < 0.5 < high and found.micro_f1_interval == task_score(texts, SPACE).micro_f1_interval and found.example_f1_interval == pytest.approx((low, high))
    sure = task_score([made(i, "I10" if i % 2 else "J44.9", ["I10"], group=f"p{i // 2}") for i in range(60)], SPACE)
    assert sure.micro_f1_interval == pytest.approx((0.5, 0.5))  # every patient is half right: patients do not differ
    alone = task_score([made(i, "I10" if i % 2 else "J44.9", ["I10"], group="p") for i in range(60)], SPACE)
    assert alone.micro_f1_interval is None


def test_reasoning_is_no_answer():
    assert task_score([made(0, "I10", ["I50.23"])], SPACE).true_positives == 0


# -- the command --------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    (tmp_path / "l.csv").write_text("label\n" + "\n".join(CODES) + "\n")
    save_transcripts(WORKED, tmp_path / "t.jsonl")
    with open(tmp_path / "t.jsonl", "a") as out:  # a reasoning without an end counts, as an empty answer
        out.write(json.dumps({"id": "cut", "prompt": "p", "content": "<think>I10", "labels": ["I10"]}) + "\n")
    return ["score", "--transcripts", str(tmp_path / "t.jsonl"), "--labels", str(tmp_path / "l.csv")]


def test_score_prints_text_or_json(files, capsys):
    assert main(files) == 0
    assert "5 transcripts: 7 gold labels, 3 predicted, 2 of them right" in capsys.readouterr().out
    assert main([*files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["empty_answers"] == 2 and found["recall"] == pytest.approx(2 / 7)


def test_score_refuses_in_one_sentence(files, tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text(json.dumps({"id": "a", "prompt": "p", "answer": "I10"}) + "\n")
    assert main(files) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"decisionheads: {tmp_path / 't.jsonl'}: no transcript has a gold label") and shown.err.count("\n") == 1 and shown.out == ""
