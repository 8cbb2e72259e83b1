from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisionheads import InputError, LabelSpace
from decisionheads.label_trie import END, LabelTrie

CODES = ["I50", "I50.9", "I50.23", "I10", "J44.9"]


def test_the_default_region_is_the_icd10_category():
    space = LabelSpace(CODES)
    assert space.region("I50.23") == "I50" and "2 labels" not in repr(space) and "5 labels in 3 regions" in repr(space)
    with pytest.raises(InputError, match="'heart failure' is not an ICD-10 code"):
        LabelSpace(["I10", "heart failure"])
    assert LabelSpace(["heart failure"], lambda label: "heart").region("heart failure") == "heart"


@pytest.mark.parametrize(("labels", "said"), [([], "empty"), (["I10", "I10"], "'I10' is listed more than once"), (["I10", " "], "empty label")])
def test_bad_label_spaces(labels, said):
    with pytest.raises(InputError, match=said):
        LabelSpace(labels, lambda label: "x")


def test_mentions_are_whole_and_longest():  # E6
    space = LabelSpace(["I50", "I50.9", "I10", "A12", "B13"])
    text = "I50.9, I50. Then I50.99 and XI10, I10/I50; I10-x A-1-3 (A12)"
    found = [(m.label, m.start) for m in space.mentions(text)]
    assert found == [("I50.9", 0), ("I50", 7), ("I10", text.index("I10/")), ("I50", text.index("I50;")), ("A12", text.index("A12"))]


def brute_force(labels, text):
    """Every place and label tried, the longest kept: the oracle of `mentions`."""
    found, at = [], 0

    def fits(label, at):
        stop = at + len(label)
        if not text.startswith(label, at) or at and text[at - 1].isalnum() and text[at].isalnum():
            return False
        if stop < len(text) and text[stop].isalnum() and text[stop - 1].isalnum():
            return False
        return not (stop + 1 < len(text) and text[stop] in ".-" and text[stop + 1].isalnum())

    while at < len(text):
        best = max((label for label in labels if fits(label, at)), key=len, default=None)
        if best is not None:
            found.append((best, at))
        at += len(best) if best is not None else 1
    return found


@given(st.sets(st.text("aAé1.- ", min_size=1, max_size=4).filter(str.strip), min_size=1, max_size=8), st.text("aAé1.- \n", max_size=30))
def test_mentions_equal_brute_force(labels, text):
    space = LabelSpace(sorted(labels), lambda label: "r")
    assert [(m.label, m.start) for m in space.mentions(text)] == brute_force(labels, text)


sequences = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5).map(tuple), min_size=1, max_size=20, unique=True)


@given(sequences, st.data())
def test_the_trie_equals_brute_force(found, data):
    regions = [data.draw(st.sampled_from("xyz")) for _ in found]
    trie = LabelTrie.from_sequences(found, regions)
    names = list(dict.fromkeys(regions))

    def check(node, prefix):
        alive = [i for i, s in enumerate(found) if s[: len(prefix)] == prefix and (node.depth == len(prefix))]
        assert sorted(int(i) for i in trie.order[node.lo:node.hi]) == alive
        assert trie.n_regions(node) == len({regions[i] for i in alive})
        for number, name in enumerate(names):
            assert trie.has_region(node, number) == any(regions[i] == name for i in alive)
        children = trie.children(node)
        assert set(children) == {found[i][len(prefix)] if len(found[i]) > len(prefix) else END for i in alive}
        for token, child in children.items():
            if token != END:
                check(child, (*prefix, token))

    check(trie.root, ())
    for i, s in enumerate(found):
        assert trie.sequence(int(trie.rank[i])) == list(s)


def test_files(tmp_path):
    good = tmp_path / "labels.csv"
    good.write_text("label,description,region\nheart failure,weak heart,heart\nI10,high pressure,vessels\n")
    space = LabelSpace.load(good)
    assert space.labels == ("heart failure", "I10") and space.region("I10") == "vessels" and space.descriptions["I10"] == "high pressure"
    (tmp_path / "labels.jsonl").write_text('{"label": "I50.9"}\n{"label": "I10"}\n')
    assert LabelSpace.load(tmp_path / "labels.jsonl").region("I50.9") == "I50"
    assert LabelSpace.load(good, region_by=lambda label: label[0]).region("I10") == "I"


def test_regions_from_another_column(tmp_path):
    file = tmp_path / "labels.csv"
    file.write_text("label,ward,region\nI10,x,a\nI50.9,y,a\n")
    assert LabelSpace.load(file, region_column="ward").region("I50.9") == "y" and LabelSpace.load(file, region_column="region").region("I50.9") == "a"
    with pytest.raises(InputError, match="there is no column 'room' to take regions from; its columns are label, ward, region"):
        LabelSpace.load(file, region_column="room")
    rows = tmp_path / "labels.jsonl"
    rows.write_text('\ufeff{"label": "I10", "ward": "x", "beds": 3}\n{"label": "I50.9"}\n', encoding="utf-8")
    assert LabelSpace.load(rows).region("I50.9") == "I50"  # other columns may hold anything
    for column, said in (("beds", "row 1: beds is not text"), ("ward", "'I50.9' has no region"), ("region", "no column 'region'")):
        with pytest.raises(InputError, match=said):
            LabelSpace.load(rows, region_column=column)


def test_the_category_with_two_letters():
    assert LabelSpace(["QA0.0101", "C7A.010", "I5A"]).regions == {"QA0.0101": "QA0", "C7A.010": "C7A", "I5A": "I5A"}
    for label in ("ABC", "QAA", "I５0", "I5023"):
        with pytest.raises(InputError, match="is not an ICD-10 code"):
            LabelSpace([label])


@pytest.mark.parametrize(("text", "said"), [
    ("code,description\nI10,x\n", "give the file a 'label' column"), ("", "give the file a 'label' column"),
    ("label\nI10\nI10\n", "'I10' is listed more than once"), ("label\nfoo\n", "add a region column")])
def test_bad_files_name_the_file(tmp_path, text, said):
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        LabelSpace.load(file)
    assert str(file) in str(caught.value)
    with pytest.raises(InputError, match="no such label file"):
        LabelSpace.load(tmp_path / "none.csv")


def test_codes_are_strings(tmp_path):  # J1
    file = tmp_path / "codes.csv"
    file.write_text("label,region\n0042,a\n042,a\n01882,b\n1882,b\n")
    assert LabelSpace.load(file).labels == ("0042", "042", "01882", "1882")


def test_candidates_must_be_labels():
    with pytest.raises(InputError, match="'I99' is not in the label file"):
        LabelSpace(CODES).subset(["I10", "I99"])


def test_a_large_space_is_never_scanned(monkeypatch):
    """Walking 20,000 titles reads a few columns' runs; the regions of a node are counted once."""
    from .bpe import bpe

    words = ["acute", "chronic", "open", "closed", "left", "right", "upper", "lower", "initial", "subsequent", "sequela", "displaced", "fracture", "burn", "of", "hand", "foot", "arm"]
    rng = np.random.default_rng(0)
    labels = [f"{' '.join(rng.choice(words, 5))} {i}" for i in range(20_000)]
    space = LabelSpace(labels, lambda label: label.split()[0])
    trie = space.trie(bpe(), "\n", "")
    assert space.trie(bpe(), "\n", "") is trie
    for i in (7, 19_999):
        row, node = int(trie.rank[i]), trie.root
        for token in [*trie.sequence(row), END]:
            children = trie.children(node)
            assert len(children) < 100
            node = children[token]
        assert labels[trie.order[node.lo]] == labels[i]
    counted = []
    monkeypatch.setattr(np, "unique", lambda rows, real=np.unique: counted.append(len(rows)) or real(rows))
    assert trie.n_regions(trie.root) == trie.n_regions(trie.root) == len(words)
    assert len(counted) == 1
    assert [m.label for m in space.mentions(f"first {labels[7]}, then {labels[12_345]}.")] == [labels[7], labels[12_345]]


def test_ordinary_csv_is_read_as_it_is(tmp_path):
    file = tmp_path / "l.csv"
    file.write_text('label, region,description\nI10, heart,"first\nsecond"\nI50.9,heart,a\x0cJ44.9\n')
    space = LabelSpace.load(file)
    assert space.labels == ("I10", "I50.9") and space.region("I10") == "heart" and space.descriptions["I10"] == "first\nsecond"
    (tmp_path / "l.jsonl").write_text('{"label": "I10", "description": "a\u2028b"}\n\n{"label": "I50.9"}\n')
    assert LabelSpace.load(tmp_path / "l.jsonl").labels == ("I10", "I50.9")


@pytest.mark.parametrize(("content", "said"), [
    (b"\xff\xfel\x00", "not UTF-8"), (b'label,region\n" I10",x\n', "has spaces around it"), (b'label\n"I10', "not CSV"),
    (b'{"label": 5}\n', "as text"), (b'{"label": "I10", "region": ["b"]}\n', "as text"), (b"[1]\n", "as text"), (b"{\n", "line 1: not JSON")])
def test_odd_files_are_one_sentence(tmp_path, content, said):
    file = tmp_path / ("l.jsonl" if content[:1] in b"{[" else "l.csv")
    file.write_bytes(content)
    with pytest.raises(InputError, match=said) as caught:
        LabelSpace.load(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
