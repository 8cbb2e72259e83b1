"""From files of MIMIC's shape to a report, as three commands; and no note text anywhere it was not asked for."""

from __future__ import annotations

import csv
import gzip
import json
import random
from dataclasses import replace

import pytest

from decisionheads import load_transcripts
from decisionheads.cli import main

PLANTED = ("zebra quartz umbrella", "Xylophonist")  # in every note
TITLES = {"I501": "heart failure", "I509": "heart failure, unspecified", "J440": "pulmonary disease", "J449": "pulmonary disease, unspecified", "E119": "diabetes mellitus", "E1165": "diabetes"}


def table(path, header, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8", newline="") as out:
        csv.writer(out).writerows([header, *rows])


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("release"), random.Random(0)
    notes, codes = [], []
    for i in range(24):
        given = rng.sample(sorted(TITLES), 2)
        text = f"Name: {PLANTED[1]}\r\nHistory of Present Illness: {PLANTED[0]}, " + " and ".join(TITLES[c] for c in given) + f" for {i} days.\r\n"
        notes.append([f"{i}-DS-1", 100 + i, 500 + i, "DS", 1, "", "", text])
        codes += [[100 + i, 500 + i, n, code, 10] for n, code in enumerate(given, 1)]
    table(folder / "note" / "discharge.csv.gz", ["note_id", "subject_id", "hadm_id", "note_type", "note_seq", "charttime", "storetime", "text"], notes)
    table(folder / "hosp" / "diagnoses_icd.csv.gz", ["subject_id", "hadm_id", "seq_num", "icd_code", "icd_version"], codes)
    table(folder / "hosp" / "d_icd_diagnoses.csv.gz", ["icd_code", "icd_version", "long_title"], [[c, 10, t] for c, t in TITLES.items()])
    return folder


@pytest.fixture(scope="module")
def made(release, bpe_folder, tmp_path_factory):
    """The three commands; the folder of what they wrote, and whatever they said."""
    import contextlib
    import io

    from .conftest import shapes_unchecked

    out, said = tmp_path_factory.mktemp("made"), io.StringIO()
    commands = [["prepare", "mimic-iv", "--path", str(release), "--out", str(out / "notes.jsonl"), "--labels-out", str(out / "labels.csv")],
                ["generate", "--model", str(bpe_folder), "--notes", str(out / "notes.jsonl"), "--labels", str(out / "labels.csv"), "--out", str(out / "t.jsonl"), "--within-labels", "--longest", "24",
                 "--most", "2", "--instruction", "Give codes.", "--listing", "compact"],
                ["discover", "--model", str(bpe_folder), "--transcripts", str(out / "t.jsonl"), "--labels", str(out / "labels.csv"), "--out", str(out / "run"), "--minimum", "2", "--caliper", "2",
                 "--draws", "99", "--random-sets", "20", "--held-out", "4", "--exclude-emitted"]]
    with shapes_unchecked(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        for command in commands:
            assert main([*command, *(["--device", "cpu"] if command[0] != "prepare" else [])]) == 0, said.getvalue()
    return out, said.getvalue()


def test_three_commands_lead_to_a_report(made):
    out, said = made
    assert "24 notes" in said and "24 of 24 notes were written" in said and "heads selected" in said
    assert "<html" in (out / "run" / "report.html").read_text()[:200].lower()
    summary = json.loads((out / "run" / "summary.json").read_text())
    assert summary["kinds"]["region"]["selection"]["events"] > 5 and summary["kinds"]["region"]["selection"]["dropped"].get("not the best among live tokens", 0) == 0
    texts = load_transcripts(out / "t.jsonl")
    assert {t.group for t in texts} == {str(100 + i) for i in range(24)} and all(PLANTED[0] in t.prompt for t in texts)


def test_note_text_is_in_notes_and_transcripts_alone(made):
    """They are the data; nothing that is made of them, or said about them, holds a word of a note."""
    out, said = made
    holding = [p for p in out.rglob("*") if p.is_file() and any(word.encode() in p.read_bytes() for word in PLANTED)]
    assert sorted(p.name for p in holding) == ["notes.jsonl", "t.jsonl"]
    assert not any(word in said for word in PLANTED)


def test_text_comes_with_the_report_only_where_it_is_asked_for(made, bpe_folder, tmp_path):
    from .conftest import shapes_unchecked

    out, _ = made
    with shapes_unchecked():
        assert main(["discover", "--model", str(bpe_folder), "--transcripts", str(out / "t.jsonl"), "--labels", str(out / "labels.csv"), "--out", str(tmp_path / "run"), "--minimum", "2", "--caliper", "2",
                     "--draws", "99", "--random-sets", "20", "--exclude-emitted", "--single-heads", "--with-text", "--device", "cpu"]) == 0
    example = json.loads((tmp_path / "run" / "example.json").read_text())
    chosen = example["tokens"][example["chosen"]]
    assert len(example["tokens"]) > 8 and any(chosen in t.answer for t in load_transcripts(out / "t.jsonl")) and not (out / "run" / "example.json").exists()
    assert "example" in (tmp_path / "run" / "report.html").read_text()


def test_labels_given_already_are_not_alive_where_that_is_asked(made, bpe_folder):
    from decisionheads import DecisionModel, LabelSpace
    from decisionheads.survey import Options, survey

    model, out = DecisionModel.from_pretrained(bpe_folder), made[0]
    space, text = LabelSpace.load(out / "labels.csv"), load_transcripts(out / "t.jsonl")[0]
    text = replace(text, reasoning=" so", answer="\nCodes: I50.1, I50.9</s>", token_ids=None)
    events = {asked: survey(model, text, space, (), frozenset(), Options(greedy=False, exclude_emitted=asked)).reading.events for asked in (True, False)}
    last = {asked: [e.kind for e in found if e.label == "I50.9"] for asked, found in events.items()}
    assert "label" in last[False] and "label" not in last[True]  # once I50.1 is given, nothing is left to decide within I50
