"""The command line: what it prints, what it refuses, and with which exit code."""

from __future__ import annotations

import contextlib
import io
import json
import shutil

import pandas as pd
import pytest

from decisionheads import HeadScores, HeadSet
from decisionheads.cli import main

from .conftest import save_random, shapes_unchecked

COLUMNS = ["kind", "layer", "head", "rank", "effect", "ci_low", "ci_high", "null_effect", "statistic", "p_value", "p_maxt", "q_value", "attribution", "dla", "resample", "selected"]
AS_THE_DEMO = ["--caliper", "0.5", "--minimum", "5", "--random-sets", "20", "--held-out", "60"]


def test_demo_prints_heads_and_writes_a_run_folder(demo, capsys):
    assert main(["demo", "--texts", "32", "--out", str(demo)]) == 0  # finished: it reprints
    shown = capsys.readouterr().out
    assert all(f"\n{kind}: " in shown for kind in ("region", "label", "departure")) and "held out on" in shown and "near-miss family" in shown and "identity 0" in shown
    heads = pd.read_csv(demo / "heads.csv")
    assert list(heads.columns) == COLUMNS and len(heads) == 3 * 32 and not heads.isna().any().any()
    for _, table in heads.groupby("kind"):
        assert table["rank"].tolist() == list(range(1, 33)) and (table["statistic"].diff().dropna() <= 1e-6).all()
    events = pd.read_parquet(demo / "events.parquet")
    assert len(events) == len(HeadScores.load(demo / "effects.safetensors").values) > 40
    sets, summary, manifest = (json.loads((demo / f"{name}.json").read_text()) for name in ("sets", "summary", "run"))
    for kind, found in summary["kinds"].items():
        assert sets[kind]["digest"] == HeadSet(sets[kind]["heads"]).digest and len(sets[kind]["heads"]) == found["set_size"]
        assert found["knock_in"]["identity"] == 0.0 if found["set_size"] else found["knock_in"] is None
    assert manifest["finished"] and "2026" not in (demo / "sets.json").read_text() and manifest["versions"]["torch"]
    parts = [set(manifest["splits"][name]) for name in ("reference", "selection", "evaluation")]
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2]) and sum(map(len, parts)) == 32
    page = (demo / "report.html").read_text()
    assert page.count("Plotly.newPlot") >= 20 and "src=\"http" not in page and "One decision" in page


@pytest.fixture(scope="module")
def files(demo, tmp_path_factory):
    """The demo's transcripts and labels as a user's own files."""
    folder = tmp_path_factory.mktemp("files")
    shutil.copy(demo / "transcripts.jsonl", folder / "t.jsonl")
    shutil.copy(demo / "labels.csv", folder / "l.csv")
    return folder


def discover(files, out, *more, transcripts=None, labels=None, model=None):
    from decisionheads import tiny

    with shapes_unchecked():
        return main(["discover", "--model", str(model or tiny.path("llama")), "--transcripts", str(transcripts or files / "t.jsonl"),
                     "--labels", str(labels or files / "l.csv"), "--out", str(out), *more])


@pytest.fixture(scope="module")
def run_on_files(files, tmp_path_factory):
    """A run on the user's own files: where it is, and what it printed with --json."""
    out, said = tmp_path_factory.mktemp("on-files") / "run", io.StringIO()
    with contextlib.redirect_stdout(said):
        assert discover(files, out, *AS_THE_DEMO, "--json") == 0
    return out, json.loads(said.getvalue())


def test_discover_on_files_equals_the_demo(demo, files, run_on_files, capsys):
    out, summary = run_on_files
    assert set(summary["kinds"]) == {"region", "label", "departure"}
    assert (out / "heads.csv").read_bytes() == (demo / "heads.csv").read_bytes()
    assert "One decision" not in (out / "report.html").read_text()  # text only when asked for
    assert main(["show", str(out), "--most", "2"]) == 0 and capsys.readouterr().out.count("\n *L") + 1 >= 3
    before = (out / "report.html").read_bytes()
    assert main(["report", str(out)]) == 0 and (out / "report.html").read_bytes() == before and len(before) > 10**6
    capsys.readouterr()
    assert discover(files, out, "--caliper", "0.5", "--minimum", "5", "--seed", "1") == 2
    assert "was made from other inputs (options differ)" in capsys.readouterr().err


def first(files, n: int, folder):
    """The first texts, as a file."""
    (folder / "some.jsonl").write_text("".join((files / "t.jsonl").read_text().splitlines(keepends=True)[:n]))
    return folder / "some.jsonl"


def test_a_killed_run_continues_to_the_same_tables(files, tmp_path, monkeypatch):
    """Parts that are done are taken as they are; the tables come out byte for byte."""
    from decisionheads import scoring

    whole, again = tmp_path / "whole", tmp_path / "again"
    some, options = first(files, 14, tmp_path), ["--caliper", "1", "--minimum", "2", "--draws", "99", "--random-sets", "20", "--held-out", "4"]
    assert discover(files, whole, *options, transcripts=some) == 0
    (again / "parts").mkdir(parents=True)
    manifest = json.loads((whole / "run.json").read_text())
    (again / "run.json").write_text(json.dumps({"inputs": manifest["inputs"], "versions": manifest["versions"], "finished": False}))
    for part in sorted((whole / "parts").iterdir())[:5]:
        shutil.copy(part, again / "parts")
    measured = []
    real = scoring.measure
    monkeypatch.setattr(scoring, "measure", lambda *a, **k: measured.append(1) or real(*a, **k))
    assert discover(files, again, *options, transcripts=some) == 0
    assert len(measured) == len(list((whole / "parts").iterdir())) - 5
    tables = [p.name for p in whole.iterdir() if p.suffix == ".csv"]
    assert len(tables) >= 9
    for name in (*tables, "sets.json", "summary.json", "events.parquet", "effects.safetensors"):
        assert (again / name).read_bytes() == (whole / name).read_bytes(), name
    assert not [p for p in again.iterdir() if p.name.startswith(".")]


def test_every_option_of_discover_changes_something(files, demo, tmp_path, capsys):  # B2
    some = first(files, 12, tmp_path)
    base = ["--caliper", "0.5", "--minimum", "2", "--draws", "199", "--single-heads"]
    assert discover(files, tmp_path / "base", *base, transcripts=some) == 0
    capsys.readouterr()
    reference = (tmp_path / "base" / "heads.csv").read_bytes()
    for i, more in enumerate((["--kinds", "region"], ["--alpha", "0.5"], ["--seed", "3"], ["--draws", "299"])):
        out = tmp_path / str(i)
        assert discover(files, out, *base, *more, transcripts=some) == 0
        assert (out / "heads.csv").read_bytes() != reference, more


@pytest.mark.parametrize(("change", "said"), [
    (lambda f: f.write_text(""), "the file is empty"),
    (lambda f: f.unlink(), "no such transcript file"),
    (lambda f: f.write_text(f.read_text() + "{oops\n"), "line 33: not JSON"),
    (lambda f: f.write_text(f.read_text() + f.read_text().splitlines()[3] + "\n"), "line 33: id"),
    (lambda f: f.write_text(f.read_text().replace('"answer": "answer', '"answer": "", "other": "answer', 1)), "line 1: no answer"),
    (lambda f: f.write_text("".join(f.read_text().splitlines(keepends=True)[:7])), "at least 10 are needed"),
    (lambda f: f.write_text("".join(json.dumps({"id": str(i), "prompt": "p", "answer": "nothing here"}) + "\n" for i in range(12))), "no label of the label file occurs"),
    (lambda f: f.write_text(f.read_text().replace('"candidates": ["', '"candidates": ["Zzz-zz", "', 1)), "lists the candidate 'Zzz-zz'")])
def test_bad_transcripts_are_refused_before_anything_is_made(files, tmp_path, capsys, change, said):
    file = tmp_path / "t.jsonl"
    shutil.copy(files / "t.jsonl", file)
    change(file)
    refused(discover(files, tmp_path / "out", transcripts=file), said, tmp_path, capsys)


def refused(code, said, tmp_path, capsys):
    shown = capsys.readouterr()
    assert code == 2 and said in shown.err and shown.err.count("\n") == 1 and shown.out == "" and not (tmp_path / "out").exists()


def test_bad_labels_models_and_folders(files, tmp_path, capsys):
    bad = tmp_path / "l.csv"
    bad.write_text("code,region\nVora-mi,Vora\n")
    refused(discover(files, tmp_path / "out", labels=bad), "give the file a 'label' column", tmp_path, capsys)
    bad.write_text("label\nVora-mi\n")
    refused(discover(files, tmp_path / "out", labels=bad), "add a region column", tmp_path, capsys)
    refused(discover(files, tmp_path / "out", "--kinds", "region,colour"), "kind='colour' is no kind of event", tmp_path, capsys)
    from .conftest import random_hf

    random_hf("llama").save_pretrained(tmp_path / "model")
    capsys.readouterr()
    refused(discover(files, tmp_path / "out", model=tmp_path / "model"), "no tokenizer could be loaded", tmp_path, capsys)
    from .bpe import bpe

    bpe().save_pretrained(tmp_path / "model")  # a tokenizer with more ids than the model knows
    refused(discover(files, tmp_path / "out", model=tmp_path / "model"), "use the model's own tokenizer", tmp_path, capsys)
    assert discover(files, tmp_path / "l.csv") == 2 and "is not a run folder" in capsys.readouterr().err
    assert main(["show", str(tmp_path)]) == 2 and "is not a run folder" in capsys.readouterr().err


def test_too_few_reference_events_says_how_many_texts_are_needed(files, tmp_path, capsys):
    assert discover(files, tmp_path / "out") == 2
    assert "30 are needed" in capsys.readouterr().err


def test_verify_prints_the_self_test(tmp_path, capsys):
    save_random("llama", tmp_path)
    assert main(["verify", "--model", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "an edit of z equals a pre-hook on the output projection" in shown and shown.rstrip().endswith(": exact, packed rows on the plain copy")


def test_verify_refuses_with_exit_code_two(tmp_path, capsys, monkeypatch):
    from decisionheads import _ways

    save_random("llama", tmp_path)
    monkeypatch.setattr(_ways, "repair_cache_argument", lambda bridge, layers: [])
    assert main(["verify", "--model", str(tmp_path)]) == 2
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "said"), [
    (["verify"], "--model"),
    (["verify", "--model", "./nowhere"], "no such model folder"),
    (["verify", "--model", "./nowhere", "--dtype"], "--dtype"),
    (["demo", "--texts", "many"], "--texts"),
    (["demo", "--texts", "1"], "--texts"),
    (["demo", "--model", "bert"], "choose llama or gpt2"),
    (["dance"], "dance"),
    (["demo", "--loud"], "--loud")])
def test_bad_input_is_one_sentence_and_exit_code_two(arguments, said, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and shown.out == "" and "Traceback" not in shown.err


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "mine").write_text("precious")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err and [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    assert {"demo", "verify", "discover", "show", "report"} <= set(capsys.readouterr().out.split())


def test_a_cue_that_cannot_be_used_is_refused_before_anything_is_loaded(files, tmp_path, capsys):
    for more, said in ((["--cue", "code {name}:"], "cue"), (["--cue", "x", "--cut-from", "end"], "choose code or answer")):
        refused(discover(files, tmp_path / "out", *more), said, tmp_path, capsys)
