"""The command line: what it prints, what it refuses, and with which exit code."""

from __future__ import annotations

import csv

import pytest

from decisionheads import HeadScores
from decisionheads.cli import main

from .conftest import save_random


def test_demo_prints_heads_with_intervals_and_writes_what_it_says(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["demo", "--texts", "9", "--seed", "3", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{kind}: " in shown for kind in ("region", "label", "departure")) and "[+" in shown and "% of m" in shown
    scores = HeadScores.load(out / "effects.safetensors")
    with open(out / "events.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(scores.values) >= 20 and {r["kind"] for r in rows} == {"region", "label", "departure"}
    assert main(["demo", "--texts", "9", "--seed", "3", "--out", str(tmp_path / "again")]) == 0
    assert capsys.readouterr().out.replace("/again", "/run") == shown  # the same seed, the same tables
    assert (tmp_path / "again" / "effects.safetensors").read_bytes() == (out / "effects.safetensors").read_bytes()


def test_verify_prints_the_self_test(tmp_path, capsys):
    save_random("llama", tmp_path)
    assert main(["verify", "--model", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "an edit of z equals a pre-hook on the output projection" in shown and shown.rstrip().endswith(": exact")


def test_verify_refuses_with_exit_code_two(tmp_path, capsys, monkeypatch):
    from decisionheads import _hooked

    save_random("llama", tmp_path)
    monkeypatch.setattr(_hooked, "_repair_cache_argument", lambda bridge, layers: [])
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
    assert "already exists" in capsys.readouterr().err and [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    assert {"demo", "verify"} <= set(capsys.readouterr().out.split())
