"""The ICD-10-CM table: codes as text, what is flagged, regions, label files, and their way into `discover`."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache, partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decisionheads import InputError, LabelSpace
from decisionheads.cli import main
from decisionheads.corpora import icd10cm
from decisionheads.corpora.code_files import codes_in_file, codes_in_notes, write_labels
from decisionheads.corpora.codes import dotted
from decisionheads.corpora.icd10cm import check, edition, edition_beside, icd10cm_labels, normalise, region_by

from .conftest import shapes_unchecked

EDITION = "ICD-10-CM April 2026 (simple-icd-10-cm 1.5.0)"


@cache
def billable() -> tuple[str, ...]:
    return tuple(icd10cm._table().billable)


@cache
def every() -> tuple[str, ...]:
    return tuple(icd10cm._table().descriptions)


@cache
def every_set() -> frozenset[str]:
    return frozenset(every())


@pytest.fixture
def all_codes():
    """For tests that ask for every code of the table: there the types of arguments are not checked each time."""
    with shapes_unchecked():
        yield


# -- codes ---------------------------------------------------------------------------------


def test_the_table_is_this_edition():
    assert edition() == EDITION
    # the library's own lists count 98,505 names and 74,736 leaves: chapters, blocks, 5 codes twice, 12 blocks of blocks
    assert (len(every()), len(set(every())), len(billable())) == (98_186, 98_186, 74_719)
    assert not [code for code in every() if "-" in code or code.isdigit()]


def test_codes_are_text():  # J1
    four = ["0042", "042", "01882", "1882"]
    assert check(four)["label"].tolist() == four and set(check(four)["flag"]) == {"unknown"}
    assert [dotted(code) for code in four] == four  # no ICD-10-CM code begins so: they stay as they are
    assert list(icd10cm_labels(codes=four).space.labels) == four
    for code in (42, 4.2, None):
        with pytest.raises(InputError, match="is not text; read codes as text"):
            check([code])


def test_codes_that_are_not_leaves_or_not_there_stay_and_are_flagged():  # J3
    table = check(["I50.2", "I50.20", "I50.99"])
    assert list(table.columns) == ["code", "label", "flag", "region"]
    assert table.values.tolist() == [["I50.2", "I50.2", "not billable", "I50"], ["I50.20", "I50.20", "", "I50"], ["I50.99", "I50.99", "unknown", "I50"]]
    labels = icd10cm_labels(codes=["I50.2", "I50.20", "I50.99"])
    assert labels.space.labels == ("I50.2", "I50.20", "I50.99") and labels.flags == {"I50.2": "not billable", "I50.99": "unknown"}


def test_the_seventh_character_and_its_padding():  # J4
    assert check(["W21.89XA", "W21.89A", "W21.89", "W2189XA"])["flag"].tolist() == ["", "unknown", "not billable", "listed twice"]
    assert icd10cm_labels(codes=["W21.89XA"]).space.descriptions["W21.89XA"].endswith(", initial encounter")


@pytest.mark.parametrize(("text", "code"), [
    ("I509", "I50.9"), ("I50.9", "I50.9"), ("i50.9", "I50.9"), (" I50.9", "I50.9"), ("I50.9.", "I50.9"), ("I50.9 \n", "I50.9"),  # J5
    ("I10", "I10"), ("i10.", "I10"), ("I502", "I50.2"), ("I50", "I50"), ("c7a010", "C7A.010"), ("qa00101", "QA0.0101"), ("B20", "B20"),
    ("I50.90", None), ("I5090", None), ("I50.", "I50"), ("I5.09", None), ("I50..9", None), ("I50 .9", None), ("I50.9x", None), ("W21.89A", None),
    ("", None), (".", None), ("9", None), ("I30-I5A", None), ("chapter 9", None), ("042", None), ("0042", None), ("428.0", None), ("E849.0", None),
    ("heart failure", None), ("ı50.9", None), ("I５0", None), ("I50.9, I10", None)])
def test_a_code_is_written_as_the_table_writes_it(text, code):
    assert normalise(text) == code


def test_every_code_is_itself_however_it_is_written(all_codes):
    assert [code for code in every() if normalise(code) != code] == []
    assert [code for code in every() if normalise(f" {code.replace('.', '').lower()}") != code] == []
    assert [code for code in every() if dotted(code.replace(".", "")) != code or dotted(f"{code} ") != code] == []


@given(st.text("I5019. a", max_size=9) | st.deferred(lambda: st.sampled_from(billable())))
def test_what_is_normalised_is_the_same_code(text):
    code = normalise(text)
    assert code is None or code in every_set() and normalise(code) == code and code.replace(".", "") == text.strip().replace(".", "").upper()


def test_no_billable_code_begins_another_and_every_other_code_does():
    begins = [[a for a, b in zip(codes, codes[1:], strict=False) if b.startswith(a)] for codes in (sorted(every()), sorted(billable()))]
    assert len(begins[0]) == 23_467 == len(every()) - len(billable()) and not ({*begins[0]} & {*billable()}) and begins[1] == []


def test_a_code_listed_twice_is_flagged_once_in_each_way():
    table = check([" i509", "I50.9", "x", "x", ""])
    assert table["code"].tolist() == [" i509", "I50.9", "x", "x", ""] and table["label"].tolist() == ["I50.9", "I50.9", "x", "x", ""]
    assert table["flag"].tolist() == ["", "listed twice", "unknown", "listed twice", "unknown"] and table["region"].tolist() == ["I50", "I50", "unknown", "unknown", "unknown"]
    assert check([]).shape == (0, 4) and check(["C7A.010"], "block")["region"].tolist() == ["C7A"]


# -- regions -------------------------------------------------------------------------------


def test_every_code_has_one_region_of_each_level(all_codes):
    by = {level: dict(zip(every(), map(region_by(level), every()), strict=True)) for level in icd10cm.LEVELS}
    assert all(region == code[:3] for code, region in by["category"].items())
    assert [len(set(regions.values())) for regions in by.values()] == [1_918, 285, 22]
    for fine, coarse in (("category", "block"), ("block", "chapter")):  # each fine region lies in one coarse region
        assert len({(by[fine][code], by[coarse][code]) for code in every()}) == len(set(by[fine].values()))
    for code in every():  # and lies where the names say; C4A stands among C43-C44 and M1A among M05-M14
        for name in (by["block"][code], icd10cm._table().spans[by["chapter"][code].removeprefix("chapter ")]):
            first, _, last = name.partition("-")
            n = 2 if code[2].isalpha() else 3
            assert first[:n] <= code[:n] <= (last or first)[:n], (code, name)


@pytest.mark.parametrize(("code", "block", "chapter"), [
    ("C7A.010", "C7A", "chapter 2"), ("C7A", "C7A", "chapter 2"), ("B20", "B20", "chapter 1"), ("B99.9", "B99", "chapter 1"), ("C50.911", "C50", "chapter 2"),
    ("D3A.00", "D3A", "chapter 2"), ("I50.9", "I30-I5A", "chapter 9"), ("I5A", "I30-I5A", "chapter 9"), ("C34.10", "C30-C39", "chapter 2"), ("QA0.0101", "QA0", "chapter 17"),
    ("W21.89XA", "W20-W49", "chapter 20"), ("U07.1", "U00-U49", "chapter 22"), ("I50.99", "I30-I5A", "chapter 9"), ("I5023", "I30-I5A", "chapter 9")])
def test_blocks_and_chapters(code, block, chapter):
    assert region_by("block")(code) == block and region_by("chapter")(code) == chapter


def test_names_that_are_both_keep_the_description_of_the_code():
    described = icd10cm_labels(codes=["C50", "B99", "B20"]).space.descriptions
    assert described == {"C50": "Malignant neoplasm of breast", "B99": "Other and unspecified infectious diseases", "B20": "Human immunodeficiency virus [HIV] disease"}


def test_regions_that_cannot_be_told():
    assert region_by("category")("I72.99") == "I72" and region_by("category")("Z9999") == "Z99"
    for level in icd10cm.LEVELS:
        with pytest.raises(InputError, match=f"'heart' is not an ICD-10 code, so its {level} is not known; add a region column or name another with --region-by"):
            region_by(level)("heart")
    with pytest.raises(InputError, match="'I29.1' is not in ICD-10-CM April 2026 .*, nor is I29, so its block is not known"):
        region_by("block")("I29.1")
    with pytest.raises(InputError, match="unknown region level 'subcategory': choose category, block or chapter"):
        region_by("subcategory")


# -- label spaces --------------------------------------------------------------------------


def test_all_billable_codes_are_the_default():
    labels = icd10cm_labels()
    assert labels.space.labels == billable() and not labels.flags and not labels.left_out and labels.edition == EDITION
    assert len(labels.space.descriptions) == 74_719 and labels.space.descriptions["I50.9"] == "Heart failure, unspecified"
    assert str(labels) == f"74,719 labels in 1,918 regions (by category), from {EDITION}"
    assert LabelSpace(billable()).regions == labels.space.regions  # all are shaped like codes


@pytest.mark.parametrize("name", ["9", 9, "IX", "ix", "I00-I99", "i00-i99", " chapter 9"])
def test_a_chapter_has_several_names(all_codes, name):
    labels = icd10cm_labels(chapters=[name], region="block").space
    assert labels.labels == tuple(code for code in billable() if code.startswith("I")) and len(set(labels.regions.values())) == 10


def test_chapters_add_up(all_codes):
    both, ninth = icd10cm_labels(chapters=["9", "X"]).space, icd10cm_labels(chapters="9").space
    assert {code[0] for code in both.labels} == {"I", "J"} and set(ninth.labels) < set(both.labels) and icd10cm_labels(chapters="9,10").space.labels == both.labels
    assert icd10cm_labels(chapters=range(1, 23)).space.labels == billable()
    for name in ("23", "0", "IIX", "I30-I5A", ""):
        with pytest.raises(InputError, match="is not in ICD-10-CM April 2026 .* write a number from 1 to 22"):
            icd10cm_labels(chapters=[name])
    assert {code[0] for code in icd10cm_labels(chapters=["I"]).space.labels} == {"A", "B"}  # a Roman one, not a letter of codes


def test_listed_codes_keep_their_order_and_nothing_is_lost_in_silence():
    labels = icd10cm_labels(codes=["J44.9", "i509", "I50.9", "I50.2", "I50.99", "heart", "heart "], region="block")
    assert labels.space.labels == ("J44.9", "I50.9", "I50.2", "I50.99", "heart") and labels.left_out == {"listed twice": 2}
    assert [labels.space.region(code) for code in labels.space.labels] == ["J40-J4A", "I30-I5A", "I30-I5A", "I30-I5A", "unknown"]
    assert labels.flags == {"I50.2": "not billable", "I50.99": "unknown", "heart": "unknown"} and "flagged: 1 not billable, 2 unknown\nleft out: 2 listed twice" in str(labels)
    assert icd10cm_labels(codes=["J44.9", "I50.9", "0042"], chapters=["9"]).left_out == {"of another chapter": 2}
    for code in ("", " ", "I50.9\tHeart failure", "I50.9\nI10"):
        with pytest.raises(InputError, match="is not one line of text"):
            icd10cm_labels(codes=["I10", code])


def test_codes_seen_in_a_corpus():
    seen = Counter({"J449": 2, "I50.9": 1, "I509": 2, "I10": 2, "99.9": 3, "I50.2": 3})
    three = icd10cm_labels(seen=seen, at_least=3)
    assert three.space.labels == ("99.9", "I50.2", "I50.9") and three.flags == {"99.9": "unknown", "I50.2": "not billable"}  # two ways of writing are one code
    assert three.left_out == {"seen less than 3 times": 2} and len(icd10cm_labels(seen=seen).space) == 5
    given = icd10cm_labels(codes=["I10", "I50.9", "I50.1"], seen=seen, chapters=["IX"])
    assert given.space.labels == ("I10", "I50.9") and given.left_out == {"not seen": 1}
    with pytest.raises(InputError, match=r"no code is left \(5 seen less than 4 times\); give more codes or ask for less"):
        icd10cm_labels(seen=seen, at_least=4)
    with pytest.raises(InputError, match=r"no code is left \(none was given\)"):
        icd10cm_labels(codes=[])
    for wrong in (partial(icd10cm_labels, at_least=0, seen=seen), partial(icd10cm_labels, at_least=2)):
        with pytest.raises(InputError, match="cannot be asked for"):
            wrong()


# -- files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", icd10cm.LEVELS)
def test_saved_labels_load_again(all_codes, tmp_path, level):
    file = tmp_path / "labels.csv"
    for made in (icd10cm_labels(region=level), icd10cm_labels(codes=["I50.2", "0042", 'a,"b"', "I10"], region=level)):
        made.save(file)
        loaded = LabelSpace.load(file)
        assert (loaded.labels, loaded.regions, loaded.descriptions) == (made.space.labels, made.space.regions, made.space.descriptions)
        assert file.read_text().splitlines()[0] == ("label,description,region,flag" if made.flags else "label,description,region")
        about = json.loads((tmp_path / "labels.csv.json").read_text())
        assert about == {"edition": EDITION, "labels": len(loaded), "regions": len(set(loaded.regions.values())), "region": level,
                         "flags": dict(Counter(made.flags.values())), "left_out": {}}
        assert sorted(p.name for p in tmp_path.iterdir()) == ["labels.csv", "labels.csv.json"] and edition_beside(file) == EDITION
    with open(file, newline="") as rows:
        assert {row["label"]: row["flag"] for row in csv.DictReader(rows)} == {"I50.2": "not billable", "0042": "unknown", 'a,"b"': "unknown", "I10": ""}


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "labels.csv"
    made = icd10cm_labels(chapters=["9"])
    made.save(file)
    before, real, done = file.read_bytes(), icd10cm.os.replace, []

    def fails(a, b, at):
        done.append(b)
        if len(done) == at:
            raise OSError(28, "No space left on device")
        real(a, b)

    for at, left in ((1, ["labels.csv"]), (2, ["labels.csv"])):  # never with the JSON of another table
        made.save(file)
        done.clear()
        monkeypatch.setattr(icd10cm.os, "replace", partial(fails, at=at))
        with pytest.raises(InputError, match="cannot be written .No space left on device."):
            icd10cm_labels(chapters=["10"]).save(file)
        monkeypatch.setattr(icd10cm.os, "replace", real)
        assert sorted(p.name for p in tmp_path.iterdir()) == left and (file.read_bytes() == before) == (at == 1)
    for path, said in ((tmp_path / "none" / "l.csv", "is not a folder; make it first"), (tmp_path, "is a folder"), (tmp_path / "l.jsonl", "ends in .csv")):
        with pytest.raises(InputError, match=said):
            made.save(path)


def test_a_note_beside_the_labels_that_is_no_such_note_is_left_alone(tmp_path):
    for content in (b"{", b"[1]", b'{"edition": 5}', b"\xff", b"{}"):
        (tmp_path / "l.csv.json").write_bytes(content)
        assert edition_beside(tmp_path / "l.csv") is None


def test_codes_from_files(tmp_path):
    text, table, rows = tmp_path / "codes.txt", tmp_path / "codes.csv", tmp_path / "codes.jsonl"
    text.write_bytes("\ufeff I509\r\n\r\n0042\n".encode())
    table.write_text("name,code\nx,I50.9\ny,0042\n")
    rows.write_text('{"label": "I50.9", "code": "no"}\n{"label": "0042"}\n')
    for file in (text, table, rows):
        assert icd10cm_labels(codes=codes_in_file(file)).space.labels == ("I50.9", "0042")
    for name, content, said in (("a.csv", "name\nI10\n", "no column 'label' or 'code'; its columns are name"), ("a.csv", "code,x\n,1\n", "row 1: no code"), ("a.csv", "", "no column"),
                                ("a.txt", " \n", "there is no code in it"), ("a.jsonl", '{"code": 42}\n', "row 1: no code, or not as text"), ("a.csv", "code\n", "there is no code")):
        (tmp_path / name).write_text(content)
        with pytest.raises(InputError, match=said):
            codes_in_file(tmp_path / name)


def test_codes_from_notes(tmp_path):
    file = tmp_path / "notes.jsonl"
    file.write_text('\n{"id": "a", "note": "x", "labels": ["I509", "I50.9", "0042"]}\n{"id": "b", "note": "x"}\n{"id": "c", "note": "x", "labels": ["I50.9"]}\n')
    assert codes_in_notes(file) == {"I50.9": 2, "0042": 1}  # how many notes, not how often
    for content, said in (('{"labels": ["I10"]}\n{"labels": [10]}\n', "line 2: labels are not a list of codes"), ("[]\n", "line 1: labels"), ("{}\n", "no note has a code"),
                          ('{"labels": "I10"}', "line 1: labels"), ('{"labels": []}\n{', "line 2: not JSON")):
        file.write_text(content)
        with pytest.raises(InputError, match=said):
            codes_in_notes(file)
    file.write_bytes(b'{"labels": ["I10"]}\n{"id": "\xff"}\n')
    with pytest.raises(InputError, match="not UTF-8 at byte 28"):
        codes_in_notes(file)


# -- the library that is not there, or not as it came ----------------------------------------


def test_without_the_library_one_sentence_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "simple_icd_10_cm", None)
    icd10cm._table.cache_clear()
    try:
        with pytest.raises(InputError, match=r'run: pip install "decisionheads\[icd\]"$'):
            normalise("I10")
        assert main(["labels", "icd10cm", "--out", str(tmp_path / "l.csv")]) == 2
        assert 'pip install "decisionheads[icd]"' in capsys.readouterr().err and not list(tmp_path.iterdir())
        assert region_by("category")("I50.99") == "I50" and dotted("I509") == "I50.9"  # these need no table
    finally:
        icd10cm._table.cache_clear()


def test_the_library_says_nothing_and_waits_until_it_is_needed():
    code = ("import sys; from decisionheads.corpora import icd10cm, code_files; assert 'simple_icd_10_cm' not in sys.modules and 'pandas' not in sys.modules; "
            "assert icd10cm.region_by('category')('I50.9') == 'I50' and 'simple_icd_10_cm' not in sys.modules; print(icd10cm.normalise('i509'))")
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "I50.9\n" and done.stderr == ""


def test_another_release_is_not_called_by_the_name_of_this_one(tmp_path):
    (tmp_path / "t.xml").write_text('<x><version>1</version><introduction/><chapter><name>9</name><desc>Hearts (I00-I99)</desc><section id="I30-I52"><desc>Other (I30-I52)</desc>'
                                    '<diag><name>I50</name><desc>Heart failure</desc><diag><name>I50.9</name><desc>Heart failure, unspecified</desc></diag></diag></section></chapter></x>')
    (tmp_path / "c.txt").write_text("I50\nI509\n")
    code = (f"import simple_icd_10_cm as cm; cm.change_version({str(tmp_path / 'c.txt')!r}, {str(tmp_path / 't.xml')!r}); from decisionheads.corpora import icd10cm; "
            "made = icd10cm.icd10cm_labels(chapters=['9'], region='block'); print(made.space.regions, made.edition)")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "{'I50.9': 'I30-I52'} ICD-10-CM, a release that is not the package's own (simple-icd-10-cm 1.5.0)\n"


# -- the command line ------------------------------------------------------------------------


def test_labels_by_command(tmp_path, capsys):
    out, codes, notes = tmp_path / "l.csv", tmp_path / "c.txt", tmp_path / "n.jsonl"
    assert main(["labels", "icd10cm", "--chapter", "9,X", "--chapter", "P00-P96", "--region", "chapter", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"2,250 labels in 3 regions (by chapter), from {EDITION}\nlabels: {out}\n"
    assert set(LabelSpace.load(out).regions.values()) == {"chapter 9", "chapter 10", "chapter 16"}
    codes.write_text("I50.9\ni50.2\nI50.99\nI509\nJ44.9\n")
    assert main(["labels", "icd10cm", "--codes", str(codes), "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"4 labels in 2 regions (by category), from {EDITION}\nflagged: 1 not billable, 1 unknown\nleft out: 1 listed twice\nlabels: {out}\n" and shown.err == ""
    notes.write_text('{"id": "a", "labels": ["I50.9", "I10"]}\n{"id": "b", "labels": ["I509"]}\n')
    assert main(["labels", "icd10cm", "--notes", str(notes), "--at-least", "2", "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("1 label in 1 region ") and LabelSpace.load(out).labels == ("I50.9",)


@pytest.mark.parametrize(("more", "said"), [
    (["--chapter", "23"], "chapter '23' is not in ICD-10-CM"), (["--chapter", "9,"], "chapter '' is not in"), (["--region", "letter"], "unknown region level 'letter'"),
    (["--codes", "none.txt"], "none.txt: no such file of codes"), (["--notes", "none.jsonl"], "no such notes file"), (["--at-least", "2"], "give --notes as well"),
    (["--at-least", "0"], "--at-least"), (["--codes", "{}/empty"], "there is no code in it"), (["--codes", "{}/bytes"], "not UTF-8"), (["--codes", "{}/l.csv"], "is what codes are read from"),
    (["--notes", "{}/notes", "--at-least", "3"], "no code is left (1 seen less than 3 times)"), (["--notes", "{}/empty"], "no note has a code")])
def test_bad_requests_for_labels_write_nothing(tmp_path, capsys, more, said):
    for name, content in (("empty", b""), ("bytes", b"I10\n\xff"), ("notes", b'{"labels": ["I10"]}\n'), ("l.csv", b"label\nI10\n")):
        (tmp_path / name).write_bytes(content)
    assert main(["labels", "icd10cm", *(text.format(tmp_path) for text in more), "--out", str(tmp_path / "l.csv")]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and shown.out == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bytes", "empty", "l.csv", "notes"] and (tmp_path / "l.csv").read_bytes() == b"label\nI10\n"


def test_write_labels_takes_what_files_say(tmp_path):
    (tmp_path / "c.csv").write_text("label\nI10\nI50.9\n")
    (tmp_path / "n.jsonl").write_text('{"id": "a", "labels": ["I50.9"]}\n')
    made = write_labels(tmp_path / "l.csv", codes=tmp_path / "c.csv", notes=tmp_path / "n.jsonl")
    assert made.space.labels == ("I50.9",) and made.left_out == {"not seen": 1} and replace(made, left_out={}).about()["left_out"] == {}


# -- regions of a run ------------------------------------------------------------------------


def spaces_of(folder, monkeypatch, *more):
    """The label space and the inputs that `discover` would run with."""
    from decisionheads import tiny, workflow

    texts, found = folder / "t.jsonl", []
    texts.write_text("".join(json.dumps({"id": str(i), "prompt": "p", "answer": "I50.9, C7A.010, blue"}) + "\n" for i in range(12)))
    monkeypatch.setattr(workflow, "run", lambda model, texts, space, out, inputs, *rest: found.append((space, inputs)) or {"summary": {}})
    code = main(["discover", "--model", str(tiny.path("llama")), "--transcripts", str(texts), "--labels", str(folder / "l.csv"), "--out", str(folder / "run"), "--json", *more])
    return code, *(found[0] if found else (None, None))


@pytest.mark.parametrize(("choice", "regions", "said"), [
    (None, ["a", "b"], {}), ("category", ["I50", "C7A"], {"region_by": "category"}), ("block", ["I30-I5A", "C7A"], {"region_by": "block", "region_table": EDITION}),
    ("chapter", ["mine", "mine too"], {"region_by": "chapter"}), ("ward", ["x", "y"], {"region_by": "ward"}), ("region", ["a", "b"], {"region_by": "region"})])
def test_regions_of_a_run_are_chosen_and_remembered(tmp_path, monkeypatch, capsys, choice, regions, said):
    (tmp_path / "l.csv").write_text("label,region,ward,chapter\nI50.9,a,x,mine\nC7A.010,b,y,mine too\n")  # a column comes before a level of its name
    code, space, inputs = spaces_of(tmp_path, monkeypatch, *(["--region-by", choice] if choice else []))
    assert code == 0 and [space.region(label) for label in space.labels] == regions
    assert {k: v for k, v in inputs.items() if k in ("region_by", "region_table", "edition")} == said
    (tmp_path / "l.csv.json").write_text(json.dumps({"edition": "of 1977"}))
    assert spaces_of(tmp_path, monkeypatch)[2]["edition"] == "of 1977"


@pytest.mark.parametrize(("content", "choice", "said"), [
    ("label,ward\nblue,\n", "ward", "'blue' has no region"), ("label,ward\nblue,x\n", "room", "no column 'room' for --region-by; choose category, block, chapter or one of its columns (label, ward)"),
    ("label,ward\nblue,x\n", None, "'blue' is not an ICD-10 code, so its region is not known; add a region column or name another with --region-by"),
    ("label,ward\nblue,x\n", "category", "'blue' is not an ICD-10 code, so its category is not known; add a region column or name another with --region-by"),
    ("label\nI29.1\n", "block", "nor is I29, so its block is not known"), ("label\nI50.9\n", "region", "no column 'region' for --region-by")])
def test_regions_that_are_not_there_are_refused(tmp_path, monkeypatch, capsys, content, choice, said):
    (tmp_path / "l.csv").write_text(content)
    code, space, _ = spaces_of(tmp_path, monkeypatch, *(["--region-by", choice] if choice else []))
    shown = capsys.readouterr()
    assert code == 2 and space is None and said in shown.err and str(tmp_path / "l.csv") in shown.err and shown.err.count("\n") == 1 and not (tmp_path / "run").exists()


def test_categories_of_a_run_need_no_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(icd10cm, "_table", lambda: pytest.fail("the table was asked for"))
    (tmp_path / "l.csv").write_text("label,region\nI50.9,a\nC7A.010,b\n")
    assert spaces_of(tmp_path, monkeypatch, "--region-by", "category")[1].region("I50.9") == "I50"


def test_files_that_hold_something_else_are_spared(tmp_path, capsys):
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    (tmp_path / "o.csv.json").write_text("I10\n")
    for codes, out in ((tmp_path / "o.csv.json", "mine.csv"), (tmp_path / "o.csv.json", "o.csv")):
        assert main(["labels", "icd10cm", "--codes", str(codes), "--out", str(tmp_path / out)]) == 2
    said = capsys.readouterr().err
    assert "mine.csv exists and is not a label file" in said and "o.csv.json is what codes are read from" in said
    assert (tmp_path / "mine.csv").read_text() == "a,b\n1,2\n" and (tmp_path / "o.csv.json").read_text() == "I10\n"
