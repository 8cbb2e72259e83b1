"""The command line as its users meet it: help that fits, examples that parse, JSON for scripts."""

from __future__ import annotations

import json
import shlex

import pytest
import typer

from decisionheads import __version__, tiny
from decisionheads._examples import EXAMPLES
from decisionheads.cli import app, main
from decisionheads.words import fitted

GROUP = typer.main.get_command(app)


def leaves(group=GROUP, before: str = ""):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, f"{name} ")
        else:
            yield before + name, command


@pytest.mark.parametrize("name", [name for name, _ in leaves()])
def test_help_fits_and_ends_in_examples(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*name.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80 and "Examples:" in said
    for line in EXAMPLES[name]:
        assert line.splitlines()[0] in said


def test_every_command_has_examples_and_a_line_that_is_not_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert set(EXAMPLES) == {name for name, _ in leaves()}
    for asked in ([], ["labels"], ["flip"]):
        assert main([*asked, "--help"]) == 0
        assert "..." not in capsys.readouterr().out.split("Commands:")[1]


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_every_example_parses(line):
    """Options that are not there, or are missing, are found without running anything."""
    words = shlex.split(line.split("|")[0].replace("\\\n", " "))
    words = words[words.index("decisionheads") + 1:]
    command = GROUP
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words)


def test_the_version(capsys):
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"decisionheads {__version__}\n"


def test_nothing_asked_for_gives_the_help(capsys):
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "\n  discover " in shown.err and "Usage:" in shown.err


def test_lines_are_broken_at_words_and_go_on_further_in():
    lines = fitted(["short", "  " + "word " * 30, "", "x" * 100 + " y"], 40)
    assert lines[0] == "short" and lines[1].startswith("  word") and lines[2].startswith("      word") and all(len(line) <= 40 for line in lines if "x" not in line)
    assert "x" * 100 in lines and " ".join(" ".join(lines).split()) == "short " + "word " * 30 + "x" * 100 + " y"  # nothing is lost


def test_an_interval_stays_in_one_piece():
    for width in range(20, 40):
        assert "[0.94, 1.00]" in "\n".join(fitted(["the choice is kept in 60 of 60 texts [0.94, 1.00], random 0.02"], width))


def test_findings_fit_80_columns(demo, capsys):
    assert main(["show", str(demo)]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and "necessary" in shown
    assert main(["compare", str(demo), str(demo)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_json_for_scripts(demo, capsys):
    assert main(["show", str(demo), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((demo / "summary.json").read_text())
    assert main(["verify", "--model", str(tiny.path("llama")), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "exact" and len(found["checks"]) > 5 and all(c["ok"] for c in found["checks"])
