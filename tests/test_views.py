"""Values say what they are in a line, and show it in a small table; none of them shows a transcript's text."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pytest

from decisionheads import Head, HeadScores, HeadSet, LabelSpace, Span, Transcript
from decisionheads.branches import Branch
from decisionheads.head_sets import cases_of
from decisionheads.interventions import Keep, KnockIn, MeanAblate
from decisionheads.knock_in import knock_in
from decisionheads.necessity import judge
from decisionheads.views import MOST, brief, view


@pytest.fixture(scope="module")
def values(model, space, readings, means):
    reading = readings[6]
    events = model.find_events(reading.transcript, space)
    ablation, attribution = model.mean_ablate(readings[6:], means), model.attribute(readings[6:8], means)
    zbar = means.means["region"]
    heads = HeadSet([(1, 2), (0, 3)])
    return [Head(3, 1), heads, HeadSet.all(4, 8), ablation.scores, ablation.scores.top(5), space, reading.transcript, reading.encoded, *events, events, *ablation.measured[:2], reading, reading.prefix, means,
            ablation, attribution, MeanAblate(heads, zbar), Keep(heads, zbar), KnockIn(heads, zbar), Branch(3, (1, 2), (MeanAblate(heads, zbar),)), model,
            knock_in(model, readings[6:], heads, "region"), judge(model, cases_of(readings[6:], "region", means), heads, some=20)]


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag), self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def tags(html: str) -> list[str]:
    parser = Tags()
    parser.feed(html)
    assert not parser.open, "a tag is left open"
    return parser.seen


def test_a_line_for_every_value(values):
    for value in values:
        said = repr(value)
        assert "\n" not in said and len(said) < 420 and "tensor(" not in said and "array(" not in said and " at 0x" not in said, said


def test_a_small_table_for_what_is_looked_at(values):
    viewed = [v for v in values if hasattr(v, "_repr_html_")]
    assert len(viewed) >= 15
    for value in viewed:
        html = value._repr_html_()
        assert set(tags(html)) <= {"div", "b", "table", "thead", "tbody", "tr", "th", "td"} and html.count("<tr>") <= 2 * MOST + 1 and len(html) < 9000, type(value)


def test_no_text_of_a_transcript_is_shown(values, readings):
    t = readings[6].transcript
    for piece in (t.prompt[:30], t.reasoning[5:35], t.answer[:25]):
        assert len(piece) >= 20
        for value in values:
            assert piece not in repr(value) and piece not in getattr(value, "_repr_html_", str)(), type(value)


def test_findings_stand_in_them(values, space, readings):
    by_type = {type(v).__name__: v for v in values}
    ablation = by_type["Ablation"]
    best, score = next(iter(ablation.scores.top(1)))
    assert f"{best} {score:+.2f}" in repr(ablation.scores) and f"{score:+.3f}" in ablation.scores._repr_html_() and str(best) in ablation.scores._repr_html_()
    event = by_type["DecisionEvent"]
    assert event.label in repr(event) and event.kind in repr(event) and str(event.position) in repr(event)
    assert f"{len(space)} labels" in repr(space) and space.region(space.labels[0]) in space._repr_html_()
    assert "L0H3" in HeadSet(["L0H3"])._repr_html_() and "HeadSet(32" in repr(HeadSet.all(4, 8))


def test_what_comes_from_files_is_escaped():
    hostile = "<script>alert(1)</script>"
    for value in (LabelSpace(["a", "b"], {"a": hostile, "b": hostile}), Transcript(hostile, "p", "r", "a", spans=(Span(hostile, 0, 1, hostile),)),
                  HeadScores(np.zeros((1, 1, 1), np.float32), hostile, unit=hostile, sign=hostile)):
        assert "<script" not in value._repr_html_() and "&lt;script" in value._repr_html_()


def test_brief_gives_shapes_and_sizes():
    assert brief(np.zeros((2, 3))) == "[2 x 3]" and brief(np.float64(0.123456)) == "0.1235" and brief(1 / 3) == "0.3333"
    assert brief("short") == "'short'" and brief("x" * 50) == "50 characters" and brief(tuple(range(9))) == "9 of them" and brief((1, 2)) == "(1, 2)"
    assert brief({"a": np.zeros(2), "b": 1}) == "{a: [2], b: 1}" and brief(dict.fromkeys(range(9))) == "9 entries"


def test_a_view_says_how_much_it_leaves_out():
    rows = [{"name": f"n{i}", "value": float(i)} for i in range(3)]
    html = view("Thing", "of 5", (rows, 5), "and more")
    assert "3 of 5 rows; and more" in html and html.count("<tr>") == 4 and "text-align:right'>value" in html and "text-align:left'>name" in html
    assert "nan" not in view("T", "", ([{"x": float("nan"), "y": None}], 1)) and "rows" not in view("T", "", (rows, 3))
