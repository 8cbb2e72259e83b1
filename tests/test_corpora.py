"""Corpora read from their documented formats: invented files of the exact schema, with the rows that go wrong."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import tracemalloc
import unicodedata
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decisionheads import InputError, LabelSpace
from decisionheads.cli import main
from decisionheads.corpora import codiesp, load_notes, mdace, mimic_iv
from decisionheads.corpora.codes import dotted, is_code, region
from decisionheads.corpora.labels_of import save_labels
from decisionheads.corpora.prepare import prepare
from decisionheads.corpora.tables import rows

# -- invented releases --------------------------------------------------------------------------

DISCHARGE = ["note_id", "subject_id", "hadm_id", "note_type", "note_seq", "charttime", "storetime", "text"]
DIAGNOSES = ["subject_id", "hadm_id", "seq_num", "icd_code", "icd_version"]
TITLES = ["icd_code", "icd_version", "long_title"]
EVENTS = ["ROW_ID", "SUBJECT_ID", "HADM_ID", "CHARTDATE", "CHARTTIME", "STORETIME", "CATEGORY", "DESCRIPTION", "CGID", "ISERROR", "TEXT"]

CRLF = 'Line one\r\n"quoted" words,\nline\rthree; dyspnée\t'
NOTES = [("1-DS-1", "1", "11", "DS", CRLF), ("1-AD-1", "1", "11", "AD", "An addendum."), ("1-DS-2", "1", "11", "DS", "A second summary."),
         ("2-DS-1", "2", "21", "DS", "a\r\nb"), ("3-DS-1", "3", "", "DS", "No admission."), ("4-DS-1", "4", "41", "DS", " \n "),
         ("5-DS-1", "5", "51", "DS", "No diagnoses."), ("6-DS-1", "6", "61", "DS", "Coded long ago."), ("7-RR-1", "7", "71", "RR", "A picture."),
         ("2-DS-1", "8", "81", "DS", "Another patient's."), (" ", "9", "91", "DS", "Without a name.")]
CODES = [("11", "I5023  ", "10"), ("11", "I10    ", "10"), ("11", "I5023  ", "10"), ("11", "4019   ", "9 "), ("21", "0042", "10"), ("21", "042", "10"), ("21", "01882", "10"),
         ("21", "1882", "10"), ("21", "E860   ", "10"), ("61", "E860   ", "9"), ("31", "J45909", "10"), ("31", "", "10"), ("", "J449", "10"), ("81", "J449", "10"), ("41", "X", "11"),
         ("91", "R05", "10")]
KNOWN = [("E860   ", "10", "Dehydration"), ("E860   ", "9", "Accidental poisoning by alcohol, not elsewhere classified"), ("I10    ", "10", 'Essential "primary" hypertension, plain')]


def table(file, header, lines, packed=True, bom=False):
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([header, *lines])
    data = (b"\xef\xbb\xbf" if bom else b"") + text.getvalue().encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(data, 1) if packed else data)
    return file


def mimic(root, notes=NOTES, codes=CODES, header=DISCHARGE, packed=True, bom=False):
    ending = ".csv.gz" if packed else ".csv"
    table(root / "mimic-iv-note/2.2/note" / f"discharge{ending}", header, [(i, s, h, k, 1, "2180-01-01", "", t) for i, s, h, k, t in notes], packed, bom)
    table(root / "mimiciv/2.2/hosp" / f"diagnoses_icd{ending}", DIAGNOSES, [(1, h, n, c, v) for n, (h, c, v) in enumerate(codes)], packed, bom)
    table(root / "mimiciv/2.2/hosp" / f"d_icd_diagnoses{ending}", TITLES, KNOWN, packed, bom)
    return root


def mark(begin, end, code="I50.9", system="ICD-10-CM", **more):
    return {"begin": begin, "end": end, "code": code, "code_system": system, "description": "a title", "type": "Human", **more}


HEART = "Heart\r\nfailure, an old\nfever"
CHARTS = {"100": [{"note_id": 7, "category": "Discharge summary", "description": "Report", "annotations": [
              mark(0, 14), mark(0, 14), mark(23, 28, "r50.9"), mark(23, 29, "R50.9"), mark(4, 4), mark(9, 4), mark(0, 5, "5A1945Z", "ICD-10-PCS"), mark(0, 5, "94003", "CPT"),
              mark(0, 5, "428.0", "ICD-9-CM"), mark(0, 5, "I10", "SNOMED"), mark(0, 5, "I10", type="APPROX"), mark(0, 5, "two words"), mark("0", 5, "I10"), mark(None, 5, "I10")]},
                  {"note_id": 7, "category": "Discharge summary", "description": "Report", "annotations": [mark(0, 5)]},
                  {"note_id": 8, "category": "ECG", "description": "Report", "annotations": [mark(0, 3, "93000", "CPT")]}],
          "200": [{"note_id": 9, "category": "Radiology", "description": "CT", "annotations": [mark(0, 3, "J44.9")]}],
          "300": [{"note_id": 10, "category": "Radiology", "description": "CT", "annotations": [mark(0, 3, "J44.9"), mark(0, 2, "J44.9")]},
                  {"note_id": 11, "category": "Radiology", "description": "CT", "annotations": [mark(0, 3, "J44.9")]},
                  {"note_id": 12, "category": "Radiology", "description": "CT", "annotations": []}]}
ROWS = [("7", "70", "100", HEART), ("8", "70", "100", "Sinus rhythm"), ("9", "70", "200", "a\r\nb"), ("11", "71", "999", "Of another stay"), ("12", "71", "300", "  "), ("13", "72", "400", "Passed by")]


def chart_files(root, charts=CHARTS, part="Inpatient", system="ICD-10", version="1.0"):
    folder = root / "data" / part / system / version
    folder.mkdir(parents=True, exist_ok=True)
    for hadm, notes in charts.items():
        (folder / f"{hadm}-{system}.json").write_text(json.dumps({"hadm_id": int(hadm), "comment": "", "notes": notes}))


def mdace_release(root, charts=CHARTS, lines=ROWS, splits=True, packed=True, header=EVENTS):
    chart_files(root, charts)
    chart_files(root, {"100": [], "500": []}, part="Profee")
    chart_files(root, {"100": []}, system="ICD-9")
    chart_files(root, {"100": []}, version="0.9")
    if lines is not None:
        table(root / ("NOTEEVENTS.csv.gz" if packed else "NOTEEVENTS.csv"), header, [(r, s, h, "2100-01-01", "", "", "Radiology", "Report", "", "", t) for r, s, h, t in lines], packed)
    for name, listed in {"train": ["100"], "val": ["200"], "test": ["400"]}.items() if splits else ():
        file = root / "splits/Inpatient" / f"MDace-ev-{name}.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(listed) + "\n")
    return root


CASE = "Mujer con úlcera duodenal\r\ny dolor; la fiebre del riñón."
WORDS = [("c-1", "DIAGNOSTICO", "k26.9", "úlcera duodenal", "10 25"), ("c-1", "DIAGNOSTICO", "n28.9", "riñón dolor", "50 55;29 34"), ("c-1", "DIAGNOSTICO", "n28.9", "dolor", "29 34"),
         ("c-1", "DIAGNOSTICO", "K26.9", "duodenal y", "17 28"), ("c-1", "PROCEDIMIENTO", "bt41zzz", "riñón", "50 55"), ("c-1", "DIAGNOSTICO", "r50.9", "fiebre", "39 45"),
         ("c-1", "DIAGNOSTICO", "k26.9", "ulcera duodenal", "10 25"), ("c-1", "DIAGNOSTICO", "k26.9", "riñón.", "50 57"), ("c-1", "DIAGNOSTICO", "k26.9", "", "9 9"),
         ("c-1", "DIAGNOSTICO", "k26.9", "úlcera", "ten 16"), ("c-1", "OTRO", "k26.9", "úlcera", "10 16"), ("c-9", "DIAGNOSTICO", "i10", "tensión", "0 7")]


def codiesp_release(root, split="train", codes=(("c-1", "k26.9"), ("c-1", "n28.9"), ("c-1", "K26.9"), ("c-1", ""), ("c-9", "i10")), words=WORDS, texts=None, newline="\n", bom=b""):
    texts = {"c-1": CASE, "c-2": "Sin códigos."} if texts is None else texts
    folder = root / split
    (folder / "text_files").mkdir(parents=True, exist_ok=True)
    for letter, lines in (("D", codes), ("P", [("c-1", "bt41zzz"), ("c-2", "ct13")]), ("X", words)):
        (folder / f"{split}{letter}.tsv").write_bytes(bom + (newline.join("\t".join(line) for line in lines) + newline * 2).encode())
    for name, text in texts.items():
        (folder / "text_files" / f"{name}.txt").write_bytes(bom + (text if isinstance(text, bytes) else text.encode()))
    return root


def total(counts, *starts):
    return sum(n for name, n in counts.items() if name.startswith(starts))


# -- codes --------------------------------------------------------------------------------------


def test_codes_are_text():  # J1
    assert [dotted(code) for code in ("I5023  ", "I10", "I50.23", "s02.0xxb", "S020XXB", "Z3A40", "M1A9", "0042", "042", "01882", "1882")] == [
        "I50.23", "I10", "I50.23", "S02.0XXB", "S02.0XXB", "Z3A.40", "M1A.9", "0042", "042", "01882", "1882"]
    assert [region(code) for code in ("I50.23", "Z3A.40", "0042")] == ["I50", "Z3A", "0042"]
    assert is_code("I50.23") and is_code("0042") and not any(map(is_code, ("", "X", "two words", "I50.\n", "I10.", "é10", "LONGER.THAN.THAT")))


# -- MIMIC-IV -----------------------------------------------------------------------------------


def test_mimic_iv_notes_are_verbatim_and_codes_are_theirs(tmp_path):  # H4, J1
    counts = Counter()
    found = {note.id: note for note in mimic_iv.notes(mimic(tmp_path), counts)}
    assert list(found) == ["1-DS-1", "2-DS-1"]
    assert found["1-DS-1"].note == CRLF and found["1-DS-1"].labels == ("I50.23", "I10")
    assert found["2-DS-1"].note == "a\r\nb" and len(found["2-DS-1"].note) == 4
    assert found["2-DS-1"].labels == ("0042", "042", "01882", "1882", "E86.0")
    assert (found["2-DS-1"].subject_id, found["2-DS-1"].hadm_id, found["2-DS-1"].split) == ("2", "21", None)
    left = {name: n for name, n in counts.items() if not name.startswith("read")}
    assert left == {
        "notes that are addenda": 1, "further notes of an admission": 1, "notes without an admission": 1, "notes without text": 1, "notes of admissions without diagnoses": 1,
        "notes of admissions that have no ICD-10 code": 1, "notes of another type than discharge summary": 1, "notes whose id came before": 1, "notes without an id": 1,
        "diagnosis rows of ICD-9": 2, "diagnosis rows that repeat a code of their admission": 1, "diagnosis rows without a code": 1, "diagnosis rows without an admission": 1,
        "diagnosis rows of another version": 1, "diagnosis rows of admissions without a note that is kept": 3, "admissions with ICD-10 codes, but no note that is kept": 3}


def test_mimic_iv_every_row_is_kept_or_counted(tmp_path):
    counts = Counter()
    kept = list(mimic_iv.notes(mimic(tmp_path), counts))
    assert counts["read: notes"] == len(NOTES) == len(kept) + total(counts, "notes ", "further notes")
    assert counts["read: diagnosis rows"] == len(CODES) == sum(len(note.labels) for note in kept) + total(counts, "diagnosis rows")


@pytest.mark.parametrize(("packed", "bom", "header"), [(False, False, DISCHARGE), (False, True, DISCHARGE), (True, True, [name.upper() for name in DISCHARGE]), (True, False, [f" {name} " for name in DISCHARGE])])
def test_mimic_iv_plain_files_boms_and_headers(tmp_path, packed, bom, header):
    found = list(mimic_iv.notes(mimic(tmp_path, packed=packed, bom=bom, header=header), Counter()))
    assert [note.id for note in found] == ["1-DS-1", "2-DS-1"] and found[0].note == CRLF


def test_mimic_iv_unpacked_under_the_packed_name_and_nearer_folders(tmp_path):
    mimic(tmp_path / "physionet.org/files")
    file = tmp_path / "physionet.org/files/mimic-iv-note/2.2/note/discharge.csv.gz"
    file.write_bytes(gzip.decompress(file.read_bytes()))
    assert len(list(mimic_iv.notes(tmp_path, Counter()))) == 2
    mimic(tmp_path, notes=NOTES[3:4])  # nearer to the top
    (tmp_path / ".cache").mkdir()
    table(tmp_path / ".cache/discharge.csv.gz", DISCHARGE, [])
    assert len(list(mimic_iv.notes(tmp_path, Counter()))) == 1


def test_mimic_iv_titles_are_of_version_ten(tmp_path):
    assert mimic_iv.titles(mimic(tmp_path)) == {"E86.0": "Dehydration", "I10": 'Essential "primary" hypertension, plain'}


@pytest.mark.parametrize(("change", "said"), [
    (lambda f, d: f.unlink(), "no discharge.csv.gz or discharge.csv at or below it; give a folder that holds note/discharge.csv.gz"),
    (lambda f, d: d.unlink(), "no diagnoses_icd.csv.gz or diagnoses_icd.csv at or below it; give a folder that holds hosp/diagnoses_icd.csv.gz"),
    (lambda f, d: table(f, [*DISCHARGE[:-1], "note"], []), "discharge.csv.gz: no column text; expected a header with note_id, subject_id, hadm_id, note_type, text"),
    (lambda f, d: table(d, ["subject_id", "hadm_id", "icd9_code"], []), "diagnoses_icd.csv.gz: no column icd_code, icd_version"),
    (lambda f, d: f.write_bytes(b""), "discharge.csv.gz: no column note_id"),
    (lambda f, d: f.write_bytes(f.read_bytes()[:12]), "discharge.csv.gz: the gzip data is cut off or damaged; download the file again"),
    (lambda f, d: table(d.parent.parent / "other/diagnoses_icd.csv", DIAGNOSES, [], packed=False), "diagnoses_icd.csv is in 2 folders (mimiciv/2.2/hosp, mimiciv/2.2/other)")])
def test_mimic_iv_refuses_before_the_first_note(tmp_path, change, said):
    mimic(tmp_path)
    change(tmp_path / "mimic-iv-note/2.2/note/discharge.csv.gz", tmp_path / "mimiciv/2.2/hosp/diagnoses_icd.csv.gz")
    with pytest.raises(InputError) as error:
        mimic_iv.notes(tmp_path, Counter())
    assert said in str(error.value)


def packed_notes(n=300):
    return [(f"{i}-DS-1", str(i), str(i), "DS", f"Planted phrase {i} " + "x y z " * 300) for i in range(n)], [(str(i), "I10", "10") for i in range(n)]


@pytest.mark.parametrize(("change", "said"), [
    (lambda data: gzip.compress(data)[:-900], "the gzip data is cut off or damaged"),
    (lambda data: data[:-3000] + b"\xff" + data[-3000:], "not UTF-8 at byte {}"),
    (lambda data: data + b"a,b\n", "a row of 2 cells under a header of 8"),
    (lambda data: data + b'1,2,3,4,5,6,7,"open', "not CSV (unexpected end of data)"),
    (lambda data: data + b'1,2,3,4,5,6,7,"closed"early\n', "not CSV")])
def test_damage_far_into_a_file_leaves_no_output(tmp_path, capsys, change, said):
    notes, codes = packed_notes()
    file = mimic(tmp_path, notes, codes, packed=False) / "mimic-iv-note/2.2/note/discharge.csv"
    said = said.format(len(file.read_bytes()) - 3000)
    file.write_bytes(change(file.read_bytes()))
    out = tmp_path / "out/notes.jsonl"
    out.parent.mkdir()
    out.write_text("as before")
    record = out.with_name("notes.jsonl.json")
    record.write_text('{"corpus": "mimic-iv"}')
    assert main(["prepare", "mimic-iv", "--path", str(tmp_path), "--out", str(out), "--labels-out", str(out.with_name("l.csv"))]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and shown.out == "" and "lanted" not in shown.err and str(file) in shown.err
    assert out.read_text() == "as before" and record.read_text() == '{"corpus": "mimic-iv"}' and len(list(out.parent.iterdir())) == 2


def test_a_file_cut_off_within_a_character(tmp_path):
    file = tmp_path / "t.csv"
    file.write_bytes("a,b\n1,é".encode()[:-1])
    with pytest.raises(InputError, match="not UTF-8 at byte 6 of its text"):
        list(rows(file, ("a", "b")))
    file.write_bytes(b'A,b\r\n1,"2\r\n3"\r\n\r\n\x00,\xef\xbb\xbf\r\n')  # a blank line is no row
    assert list(rows(file, ("b", "a"))) == [("2\r\n3", "1"), ("\ufeff", "\x00")]


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cells=st.lists(st.tuples(st.text(), st.text(alphabet="\r\n\"',;\x00\ufeff é\u2028a")), max_size=4), packed=st.booleans())
def test_whatever_stands_in_a_cell_comes_out_as_it_is(tmp_path, cells, packed):
    text = "a,b\n" + "".join(",".join(f'"{cell.replace(chr(34), chr(34) * 2)}"' for cell in row) + "\n" for row in cells)
    (tmp_path / "t.csv").write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert list(rows(tmp_path / "t.csv", ("a", "b"))) == cells


def test_mimic_iv_is_streamed(tmp_path):
    """20 MB of notes, each longer than the csv module takes by itself: the table is never held."""
    codes = [(str(i), "I10", "10") for i in range(140)]
    mimic(tmp_path, [(f"{i}-DS-1", str(i), str(i), "DS", f"{i} " + "words\r\n" * 20_000) for i in range(140)], codes)
    tracemalloc.start()
    size = sum(len(note.note) for note in mimic_iv.notes(tmp_path, Counter()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 19e6 and peak < 2e6


# -- MDACE --------------------------------------------------------------------------------------


def test_mdace_evidence_stands_where_it_is_said_to(tmp_path):  # H4
    counts = Counter()
    found = {note.id: note for note in mdace.notes(mdace_release(tmp_path), counts)}
    assert list(found) == ["100-7", "200-9"]
    note = found["100-7"]
    assert note.note == HEART and (note.subject_id, note.hadm_id, note.split) == ("70", "100", "train")
    assert [(span.name, span.of, note.note[span.start:span.end]) for span in note.spans] == [("evidence", "I50.9", "Heart\r\nfailure"), ("evidence", "R50.9", "fever")]
    assert note.labels == ("I50.9", "R50.9", "I10")  # the coder gave I10 to this note, at no offsets that can be read
    assert found["200-9"].split == "dev" and len(found["200-9"].note) == 4 and found["200-9"].note[:3] == "a\r\n"
    assert {name: n for name, n in counts.items() if n and not name.startswith("read")} == {
        "annotations of ICD-10-PCS": 1, "annotations of CPT": 1, "annotations of ICD-9-CM": 1, "annotations of another code system": 1,
        "annotations that were mapped, not made by a human": 1, "annotations without a code": 1, "annotations without offsets": 2, "annotations that repeat another": 1,
        "spans without characters": 2, "spans past the end of the note": 1, "annotations of notes that are left out": 5,
        "notes that a chart lists again": 1, "notes without an ICD-10-CM code": 1, "notes that are not in NOTEEVENTS": 1, "notes whose row of NOTEEVENTS is of another admission": 1,
        "notes without text": 1, "charts coded in ICD-9": 1, "charts of older versions": 1, "charts of the other part": 2}


@pytest.mark.parametrize("split", [None, "train", "dev"])
def test_mdace_every_annotation_is_kept_or_counted(tmp_path, split):
    counts = Counter()
    kept = list(mdace.notes(mdace_release(tmp_path), counts, split=split))
    listed = [note for notes in CHARTS.values() for note in notes]
    assert counts["read: charts"] == len(CHARTS) and {None: 2, "train": 1, "dev": 1}[split] == len(kept)
    assert counts["read: notes"] == len(listed) == len(kept) + total(counts, "notes ")
    assert counts["read: annotations"] == sum(len(note["annotations"]) for note in listed) == sum(len(note.spans) for note in kept) + total(counts, "annotations ", "spans ")


def injected(cover=lambda text: text, field="covered_text", text="a\r\nb c"):
    marks = [mark(0, 3, "I10", **{field: cover(text[0:3])}), mark(3, 4, "J44.9", **{field: text[3:4]})]
    return {"100": [{"note_id": 7, "category": "x", "description": "x", "text": text, "annotations": marks}]}


@pytest.mark.parametrize("field", ["covered_text", "text"])
def test_mdace_injected_texts_are_held_against_their_spans(tmp_path, field):  # H4
    counts = Counter()
    (note,) = mdace.notes(mdace_release(tmp_path, injected(field=field), lines=None), counts)
    assert [note.note[s.start:s.end] for s in note.spans] == ["a\r\n", "b"] and note.subject_id is None and counts["spans whose text is not what stands there"] == 0
    (note,) = mdace.notes(mdace_release(tmp_path, injected(lambda text: text.replace("\r\n", "\n"), field), lines=None), counts)
    assert [note.note[s.start:s.end] for s in note.spans] == ["b"] and counts["spans whose text is not what stands there"] == 1 and note.labels == ("I10", "J44.9")
    (note,) = mdace.notes(mdace_release(tmp_path, injected(field=field)), counts)
    assert note.note == "a\r\nb c" and note.subject_id == "70"  # the patient from the table, the text from the chart


def test_mdace_parts_and_folders(tmp_path):
    mdace_release(tmp_path / "r")
    chart_files(tmp_path / "r", {"200": CHARTS["200"]}, part="Profee")
    for path in ("r", "r/data", "r/data/Inpatient"):
        assert [note.id for note in mdace.notes(tmp_path / path, Counter(), tmp_path / "r/NOTEEVENTS.csv.gz")] == ["100-7", "200-9"], path
    counts = Counter()
    (note,) = mdace.notes(tmp_path / "r/data/Profee", counts, tmp_path / "r/NOTEEVENTS.csv.gz")
    assert note.id == "200-9" and note.split is None and counts["charts of the other part"] == 0  # the lists of Inpatient are not Profee's
    chart_files(tmp_path / "r", {"200": CHARTS["200"]}, version="10.0")
    chart_files(tmp_path / "r", {"100": CHARTS["100"]}, version="9.0")
    assert [note.id for note in mdace.notes(tmp_path / "r", counts)] == ["200-9"] and counts["charts of older versions"] == 5


@pytest.mark.parametrize(("change", "said"), [
    (lambda r: (r / "NOTEEVENTS.csv.gz").unlink(), "the charts hold no text and there is no NOTEEVENTS.csv.gz below; give MIMIC-III's with --notes-from"),
    (lambda r: table(r / "NOTEEVENTS.csv.gz", ["ROW_ID", "TEXT"], []), "no column subject_id, hadm_id"),
    (lambda r: (r / "data").rename(r / "elsewhere"), "no MDACE here; expected data/Inpatient/ICD-10/1.0/*.json below it"),
    (lambda r: [f.unlink() for f in (r / "data/Inpatient/ICD-10").glob("*/*")], "no charts; expected them at 1.0/<admission>-ICD-10.json"),
    (lambda r: (r / "data/Inpatient/ICD-10/1.0/100-ICD-10.json").write_text('{"hadm_id": 100, "notes": [planted'), "100-ICD-10.json: not JSON"),
    (lambda r: (r / "data/Inpatient/ICD-10/1.0/100-ICD-10.json").write_text('{"hadm_id": true, "notes": []}'), "100-ICD-10.json: no hadm_id or no list of notes"),
    (lambda r: (r / "data/Inpatient/ICD-10/1.0/100-ICD-10.json").write_text('{"hadm_id": 1, "notes": [{"note_id": "planted", "annotations": []}]}'), "note 1: no note_id or no list"),
    (lambda r: (r / "data/Inpatient/ICD-10/1.0/100-ICD-10.json").write_text('{"hadm_id": 1, "notes": [{"note_id": 2, "annotations": [], "text": "planted \\ud800"}]}'), "half of a character"),
    (lambda r: (r / "data/Inpatient/ICD-10/1.0/100-ICD-10.json").write_bytes(b'{"hadm_id": 1, "planted": "\xff"}'), "100-ICD-10.json: not UTF-8 at byte 27"),
    (lambda r: (r / "splits/Inpatient/MDace-ev-val.csv").unlink(), "MDace-ev-val.csv: cannot be read"),
    (lambda r: (r / "splits/Inpatient/MDace-ev-val.csv").write_text("hadm_id\n200\n"), "MDace-ev-val.csv, line 1: not the number of an admission"),
    (lambda r: (r / "splits/Inpatient/MDace-ev-val.csv").write_text("200\n100\n"), "MDace-ev-val.csv, line 2: admission 100 is in the train list as well")])
def test_mdace_refuses_before_the_first_note(tmp_path, change, said):
    change(mdace_release(tmp_path))
    with pytest.raises(InputError) as error:
        mdace.notes(tmp_path, Counter())
    assert said in str(error.value) and "planted" not in str(error.value)


# -- CodiEsp ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("newline", "bom"), [("\n", b""), ("\r\n", b""), ("\n", b"\xef\xbb\xbf")])
def test_codiesp_evidence_stands_where_it_is_said_to(tmp_path, newline, bom):  # H4
    counts = Counter()
    (note,) = codiesp.notes(codiesp_release(tmp_path, newline=newline, bom=bom), counts)
    assert note.id == "c-1" and note.note == CASE and note.labels == ("K26.9", "N28.9") and note.split == "train" and note.subject_id is None
    assert [(span.of, note.note[span.start:span.end]) for span in note.spans] == [("K26.9", "úlcera duodenal"), ("N28.9", "riñón"), ("N28.9", "dolor"), ("K26.9", "duodenal\r\ny")]
    assert {name: n for name, n in counts.items() if n and not name.startswith("read")} == {
        "kept: evidence rows": 4, "pieces of evidence that repeat another": 1, "evidence rows of procedures": 1, "evidence rows of codes that their article does not have": 1,
        "evidence rows whose words are not what stands there": 1, "evidence rows past the end of the article": 1, "evidence rows without characters": 1, "evidence rows without offsets": 1,
        "evidence rows of another kind": 1, "evidence rows of articles without a text file": 1, "code rows of articles without a text file": 1, "articles without a text file": 1,
        "articles without a diagnosis code": 1, "code rows without a code": 1, "code rows that repeat a code of their article": 1, "procedure rows": 2}


def test_codiesp_every_row_is_kept_or_counted(tmp_path):
    codiesp_release(tmp_path)
    codiesp_release(tmp_path, "dev", texts={"c-1": CASE, "c-3": " \n"}, codes=[("c-1", "i10"), ("c-3", "i10")], words=[("c-3", "DIAGNOSTICO", "i10", "x", "0 1")])
    (tmp_path / "background/text_files").mkdir(parents=True)
    (tmp_path / "background/text_files/b-1.txt").write_text("Sin nada.")
    counts = Counter()
    kept = list(codiesp.notes(tmp_path, counts))
    assert counts["articles that another split has as well"] == counts["articles without text"] == counts["articles of the background set, which has no codes"] == 1
    assert counts["read: articles"] == 4 == len(kept) + total(counts, "articles that", "articles without text", "articles without a diag")
    assert counts["read: code rows"] == 7 == sum(len(note.labels) for note in kept) + total(counts, "code rows")
    assert counts["read: evidence rows"] == len(WORDS) + 1 == counts["kept: evidence rows"] + total(counts, "evidence rows")
    (other,) = codiesp.notes(tmp_path, counts := Counter(), split="dev")
    assert other.split == "dev" and counts["articles of other splits"] == 2


def test_codiesp_accents_are_the_same_letter_either_way_but_offsets_are_not(tmp_path):
    apart = unicodedata.normalize("NFD", CASE)
    start = apart.index("dolor")
    words = [("c-1", "DIAGNOSTICO", "k26.9", "úlcera duodenal", "10 26"), ("c-1", "DIAGNOSTICO", "k26.9", "úlcera duodenal", "10 25"), ("c-1", "DIAGNOSTICO", "k26.9", "dolor", f"{start} {start + 5}")]
    counts = Counter()
    (note,) = codiesp.notes(codiesp_release(tmp_path, texts={"c-1": apart}, words=words), counts)
    assert note.note == apart != CASE and [note.note[s.start:s.end] for s in note.spans] == [unicodedata.normalize("NFD", "úlcera duodenal"), "dolor"]
    assert counts["evidence rows whose words are not what stands there"] == 1  # counted in composed letters
    odd = "úlcera\x85duodenal\u2028\"y"  # line ends to Unicode, not to a table; quotes that open nothing
    (note,) = codiesp.notes(codiesp_release(tmp_path, texts={"c-1": odd}, words=[("c-1", "DIAGNOSTICO", "k26.9", odd, f"0 {len(odd)}")]), Counter())
    assert note.note[note.spans[0].start:note.spans[0].end] == odd


@pytest.mark.parametrize(("change", "said"), [
    (lambda r: (r / "train/text_files").rename(r / "train/texts"), "no CodiEsp here; expected train/text_files/*.txt, train/trainD.tsv and train/trainX.tsv below it"),
    (lambda r: (r / "train/trainX.tsv").unlink(), "trainX.tsv: no such table; take the release with gold-standard annotations, version 1.4"),
    (lambda r: (r / "train/trainD.tsv").write_text("c-1\tDIAGNOSTICO\ti10\tplanted\n"), "trainD.tsv, line 1: 4 cells instead of 2"),
    (lambda r: (r / "train/trainX.tsv").write_bytes(b"c-1\tDIAGNOSTICO\ti10\tplanted\xff\t0 1\n"), "trainX.tsv: not UTF-8 at byte 27")])
def test_codiesp_refuses_before_the_first_note(tmp_path, change, said):
    change(codiesp_release(tmp_path))
    with pytest.raises(InputError) as error:
        codiesp.notes(tmp_path, Counter())
    assert said in str(error.value) and "planted" not in str(error.value)


def test_codiesp_folder_above_and_a_text_that_is_no_text(tmp_path):
    codiesp_release(tmp_path / "final_dataset_v4_to_publish", texts={"c-1": CASE})
    assert len(list(codiesp.notes(tmp_path, Counter()))) == 1
    codiesp_release(tmp_path / "final_dataset_v4_to_publish", texts={"c-1": CASE.encode("latin-1")})
    with pytest.raises(InputError, match="c-1.txt: not UTF-8 at byte 10"):
        list(codiesp.notes(tmp_path, Counter()))
    with pytest.raises(InputError, match="no split 'dev'; there is train"):
        codiesp.notes(tmp_path, Counter(), split="dev")


# -- labels and the command -------------------------------------------------------------------------


def test_labels_of_a_corpus_load_as_a_label_space(tmp_path):
    assert save_labels(Counter({"I50.23": 2, "I10": 3, "0042": 1, "R05": 2}), tmp_path / "l.csv", {"I10": 'High "pressure", plain', "R05": "Tos\nseca"}, at_least=2) == 3
    space = LabelSpace.load(tmp_path / "l.csv")
    assert space.labels == ("I10", "I50.23", "R05") and space.regions == {"I50.23": "I50", "I10": "I10", "R05": "R05"}
    assert space.descriptions == {"I10": 'High "pressure", plain', "R05": "Tos\nseca"}
    save_labels(Counter({"0042": 1, "042": 1, "01882": 1, "1882": 1}), tmp_path / "l.csv", {})
    assert LabelSpace.load(tmp_path / "l.csv").labels == ("0042", "01882", "042", "1882")  # J1
    with pytest.raises(InputError, match="no label is in 5 notes"):
        save_labels(Counter({"I10": 4}), tmp_path / "none.csv", {}, at_least=5)
    assert [p.name for p in tmp_path.iterdir()] == ["l.csv"]


def test_titles_come_from_the_table_where_it_is_installed(monkeypatch):
    from decisionheads.corpora import icd10cm
    from decisionheads.corpora.prepare import _official

    found, edition = _official(["I50.23", "W19.XXX"])
    assert found == {"I50.23": "Acute on chronic systolic (congestive) heart failure"} and edition.startswith("ICD-10-CM ")
    monkeypatch.setitem(sys.modules, "simple_icd_10_cm", None)
    icd10cm._table.cache_clear()
    try:
        assert _official(["I50.23"]) == ({}, None)
    finally:
        icd10cm._table.cache_clear()


def run(corpus, path, tmp_path, *more):
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    return main(["prepare", corpus, "--path", str(path), "--out", str(out / "notes.jsonl"), "--labels-out", str(out / "labels.csv"), *more])


RELEASES = {"mimic-iv": mimic, "mdace": mdace_release, "codiesp": codiesp_release}


@pytest.mark.parametrize("corpus", RELEASES)
def test_prepare_writes_what_it_counts(tmp_path, capsys, corpus):
    assert run(corpus, RELEASES[corpus](tmp_path / "in"), tmp_path) == 0
    shown = capsys.readouterr()
    notes, counts = load_notes(tmp_path / "out/notes.jsonl"), json.loads((tmp_path / "out/notes.jsonl.json").read_text())
    assert (counts["corpus"], counts["version"], counts["stopped_at_limit"]) == (corpus, "0.1.0", False)
    kept = counts["counts"]["kept"]
    assert (kept["notes"], kept["labels"], kept["evidence spans"]) == (len(notes), sum(len(n.labels) for n in notes), sum(len(n.spans) for n in notes))
    assert kept["distinct labels"] == len(LabelSpace.load(tmp_path / "out/labels.csv")) and (corpus == "mimic-iv") == (kept["evidence spans"] == 0)
    for part in ("read", "left_out"):
        assert counts["counts"][part] and all(f"{n:>10} {what}\n" in shown.out for what, n in counts["counts"][part].items())
    assert f"{len(notes):>10} notes\n" in shown.out and shown.err == ""
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["labels.csv", "notes.jsonl", "notes.jsonl.json"]
    before = [p.read_bytes() for p in sorted((tmp_path / "out").iterdir())]
    assert run(corpus, tmp_path / "in", tmp_path) == 0 and before == [p.read_bytes() for p in sorted((tmp_path / "out").iterdir())]


def test_prepare_options(tmp_path, capsys):
    notes, codes = packed_notes(5)
    mimic(tmp_path / "in", notes, [*codes, ("0", "R05", "10")])
    assert run("mimic-iv", tmp_path / "in", tmp_path, "--limit", "3", "--at-least", "2") == 0
    assert "stopped after 3 notes; what comes after was neither read nor counted" in capsys.readouterr().out
    record = json.loads((tmp_path / "out/notes.jsonl.json").read_text())
    assert record["options"] == {"split": None, "limit": 3, "at_least": 2, "notes_from": None, "labels_out": "labels.csv"} and record["stopped_at_limit"]
    assert record["counts"]["left_out"] == {"labels that are in fewer than 2 notes (left out of the label file only)": 1}
    assert (tmp_path / "out/labels.csv").read_bytes() == b'label,description,region\nI10,"Essential ""primary"" hypertension, plain",I10\n'
    assert load_notes(tmp_path / "out/notes.jsonl")[0].labels == ("I10", "R05")  # gold stays gold
    mdace_release(tmp_path / "m", lines=None)
    events = table(tmp_path / "texts/NOTEEVENTS.csv", [name.lower() for name in EVENTS], [(r, s, h, "", "", "", "", "", "", "", t) for r, s, h, t in ROWS], packed=False)
    assert run("mdace", tmp_path / "m", tmp_path, "--notes-from", str(events), "--split", "dev") == 0
    assert [note.id for note in load_notes(tmp_path / "out/notes.jsonl")] == ["200-9"]
    assert "notes of no split or another one" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "said"), [
    (["mimic", "--out", "o.jsonl"], "unknown corpus 'mimic': choose mimic-iv, mdace, codiesp"),
    (["mimic-iv", "--out", "o.jsonl", "--split", "train"], "mimic-iv has no splits"),
    (["codiesp", "--out", "o.jsonl", "--split", "val"], "unknown split 'val': choose train, dev, test"),
    (["mdace", "--out", "o.jsonl", "--split", "train"], "no admissions of split 'train'"),
    (["codiesp", "--out", "o.jsonl", "--notes-from", "x.csv"], "--notes-from is about mdace"),
    (["mdace", "--out", "o.jsonl", "--notes-from", "nowhere.csv"], "nowhere.csv: cannot be read (No such file or directory)"),
    (["codiesp", "--out", "o.jsonl", "--at-least", "2"], "name one with --labels-out"),
    (["codiesp", "--out", "o.csv"], "ends in .jsonl"),
    (["codiesp", "--out", "o.jsonl", "--labels-out", "l.txt"], "ends in .csv"),
    (["codiesp", "--out", "o.jsonl", "--labels-out", "mine.csv"], "mine.csv exists and is not a label file"),
    (["codiesp", "--out", "o.jsonl", "--labels-out", "l.csv", "--at-least", "9"], "no label is in 9 notes"),
    (["codiesp", "--out", "none/o.jsonl"], "none/o.jsonl cannot be written"),
    (["codiesp", "--out", "folder.jsonl"], "folder.jsonl cannot be written"),
    (["codiesp", "--out", "o.jsonl", "--limit", "0"], "--limit"),
    (["codiesp"], "--out"),
    (["mimic-iv", "--out", "o.jsonl", "--labels-out", "l.csv", "--path", "nowhere"], "nowhere is not a folder"),
    (["mdace", "--out", "o.jsonl", "--path", "mine.csv"], "mine.csv is not a folder"),
    (["codiesp", "--out", "o.jsonl", "--path", "mine.csv"], "mine.csv is not a folder"),
    (["codiesp", "--out", "o.jsonl", "--path", "bare"], "no note is left of 1; 1 are articles without a diagnosis code; is this the whole release?")])
def test_prepare_refuses_in_one_sentence_and_writes_nothing(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    mdace_release(tmp_path / "in", splits=False)
    codiesp_release(tmp_path / "in")
    codiesp_release(tmp_path / "bare", texts={"c-2": "Nada."}, codes=(), words=())
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "mine.csv").write_text("code\nI10\n")
    before = sorted(p for p in tmp_path.rglob("*"))
    assert main(["prepare", *arguments, *(() if "--path" in arguments else ("--path", "in"))]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and shown.out == "" and sorted(p for p in tmp_path.rglob("*")) == before


def test_text_is_in_the_notes_and_nowhere_else(tmp_path, capsys, monkeypatch):
    """Phrases planted in every text: only the notes file may hold them, whatever succeeds or fails."""
    phrase = "Zyxwv-planted"
    plant = lambda text: f"{text}, {phrase} é"  # noqa: E731
    mimic(tmp_path / "mimic-iv", [(*note, plant(text)) for *note, text in NOTES], [*CODES, ("11", phrase, "10"), ("11", phrase.upper()[:7], "10")])
    mdace_release(tmp_path / "mdace", {hadm: [{**note, "annotations": [*note["annotations"], mark(0, 3, phrase, phrase, type=phrase, covered_text=phrase)]} for note in notes] for hadm, notes in CHARTS.items()},
                  [(*row, plant(text)) for *row, text in ROWS])
    codiesp_release(tmp_path / "codiesp", words=[*WORDS, ("c-1", phrase, phrase, phrase, phrase), ("c-1", "DIAGNOSTICO", "k26.9", phrase, "0 3")], texts={"c-1": plant(CASE)})
    for corpus in RELEASES:
        assert run(corpus, tmp_path / corpus, tmp_path) == 0, corpus
        shown = capsys.readouterr()
        assert phrase in (tmp_path / "out/notes.jsonl").read_text()
        for text in (shown.out, shown.err, (tmp_path / "out/notes.jsonl.json").read_text(), (tmp_path / "out/labels.csv").read_text()):
            assert phrase.lower() not in text.lower(), corpus
    for damage in (lambda data: data + phrase.encode() + b",1\n", lambda data: data + b"\xff" + phrase.encode(), lambda data: f"{phrase}\n".encode() + data, lambda data: data + b'"' + phrase.encode()):
        mimic(tmp_path / "broken", packed=False)
        file = tmp_path / "broken/mimic-iv-note/2.2/note/discharge.csv"
        file.write_bytes(damage(file.read_bytes()))
        assert run("mimic-iv", tmp_path / "broken", tmp_path) == 2
        shown = capsys.readouterr()
        assert phrase.lower() not in (shown.out + shown.err).lower()


def test_prepare_takes_paths_as_text_and_gives_the_record(tmp_path):
    record = prepare("codiesp", str(codiesp_release(tmp_path / "in")), str(tmp_path / "n.jsonl"))
    assert record["counts"]["kept"]["notes"] == 1 and sorted(p.name for p in tmp_path.iterdir()) == ["in", "n.jsonl", "n.jsonl.json"]


def test_files_that_hold_something_else_are_spared(tmp_path, capsys):
    release = tmp_path / "release"
    codiesp_release(release)
    (tmp_path / "t.jsonl").write_text("mine\n")
    assert main(["prepare", "codiesp", "--path", str(release), "--out", str(tmp_path / "t.jsonl")]) == 2 and "was not prepared from a corpus" in capsys.readouterr().err
    (tmp_path / "new.jsonl.json").write_text('{"mine": 1}')
    assert main(["prepare", "codiesp", "--path", str(release), "--out", str(tmp_path / "new.jsonl")]) == 2 and "new.jsonl.json exists and was not prepared" in capsys.readouterr().err
    assert (tmp_path / "t.jsonl").read_text() == "mine\n" and not (tmp_path / "new.jsonl").exists()


def test_an_offset_too_long_to_be_one_is_counted(tmp_path):
    codiesp_release(tmp_path, words=(("c-1", "DIAGNOSTICO", "k26.9", "dolor", f"0 {'9' * 5000}"),))
    counts = Counter()
    list(codiesp.notes(tmp_path, counts))
    assert counts["evidence rows without offsets"] == 1
