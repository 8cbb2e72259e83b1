"""Malformed files, named by what is wrong with them: each is one sentence, exit code 2, and no file is touched.

The files of `tests/malformed` go to every command that reads their kind; what is huge, or no file at all, is made here.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from pathlib import Path

import pytest

from decisionheads import tiny
from decisionheads.cli import main
from decisionheads.flip.plan import plan_digest

from . import hostile
from .conftest import shapes_unchecked

FILES = sorted((Path(__file__).parent / "malformed").iterdir())
READERS = {"transcripts": {"score": "t.jsonl", "discover": "t.jsonl", "evaluate": "held.jsonl", "register": "t.jsonl"}, "labels": {"score": "l.csv", "discover": "l.csv", "generate": "l.csv", "register": "l.csv"},
           "notes": {"generate": "notes.jsonl", "register": "t.jsonl"}, "codes": {"icd codes": "codes.txt"}, "plan": {"flip run": "plan.json"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return hostile.valid(tmp_path_factory.mktemp("valid"))


@pytest.fixture
def folder(base, tmp_path):
    return Path(shutil.copytree(base, tmp_path / "work"))


@pytest.fixture(scope="module", autouse=True)
def no_model(demo):
    """Nothing but the demo loads a model, and types are not checked: so it is for users."""
    with hostile.no_model(), shapes_unchecked():
        yield


def refused(folder, command, old, new, said=""):
    """Give a command another file than the valid one."""
    arguments = [str(new) if x == str(folder / old) else x for x in hostile.commands(folder, str(tiny.path("llama")))[command]]
    assert str(new) in arguments
    outcome = hostile.attempt(arguments, folder, [str(new), str(new.parent)])
    assert outcome.code == 2 and outcome.wrong == () and said in outcome.err, (command, outcome)
    return outcome.err


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_malformed_files_are_one_sentence(path, folder):
    kind = path.name.split("-")[0]
    for command, old in READERS[kind].items():
        new = folder / path.name
        shutil.copy(path, new)
        err = refused(folder, command, old, new)
        assert len(err) < 1_100
        (folder / path.name).unlink()


def test_the_valid_files_are_taken(folder):
    """Else all of the above could be refused for another reason."""
    for command in ("score", "score jsonl", "discover", "generate", "evaluate", "register", "icd codes", "icd table", "icd notes", "codiesp", "mimic"):
        assert hostile.attempt(hostile.commands(folder, str(tiny.path("llama")), f"out-{command.replace(' ', '-')}")[command], folder, []).code in (0, None), command


@pytest.mark.parametrize("command", ["score", "discover", "register"])
@pytest.mark.parametrize(("make", "said"), [
    (lambda p: p.write_text('{"id": "a", "prompt": "' + "x" * 100_000_000 + '", "answer": 3}\n'), "line 1: answer is not text"),
    (lambda p: p.write_text("[" * 100_000 + "]" * 100_000 + "\n"), "line 1: not JSON"),
    (lambda p: p.write_text('{"a":' * 100_000 + "1" + "}" * 100_000 + "\n"), "line 1: not JSON"),
    (lambda p: p.write_text('{"id": "' + "a" * 1_000_000 + '\\n", "prompt": "p", "answer": "q"}\n'), "holds a line break"),
    (lambda p: p.mkdir(), "no such"), (lambda p: os.mkfifo(p), "no such"), (lambda p: p.symlink_to(p.name), "no such"), (lambda p: None, "no such")],
    ids=["100 MB", "brackets", "braces", "an id of 1 MB", "folder", "pipe", "link to itself", "nothing"])
def test_huge_files_and_things_that_are_no_files(command, make, said, folder):
    new = folder / "new.jsonl"
    make(new)
    refused(folder, command, "t.jsonl", new, said)


def test_a_file_that_may_not_be_read(folder, monkeypatch, capsys):
    """Root may read everything, so the refusal comes from here."""
    (folder / "new.jsonl").write_text("{}")
    arguments = [str(folder / "new.jsonl") if x == str(folder / "t.jsonl") else x for x in hostile.commands(folder, str(tiny.path("llama")))["score"]]
    real = io.open

    def opened(file, *more, **named):
        if str(file).endswith("new.jsonl"):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real(file, *more, **named)

    monkeypatch.setattr(io, "open", opened)
    monkeypatch.setattr("builtins.open", opened)
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert "new.jsonl: cannot be read (Permission denied); give a file that can be" in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_names_do_not_leave_the_folder(folder):
    """Ids and labels are anyone's: `../`, absolute paths and device names become no path."""
    records = [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]
    for record, name in zip(records, ["../../escape", "/escape", "..", ".", "a/b", "C:\\x", "CON", "~"], strict=True):
        record["id"] = name
    (folder / "notes.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    from decisionheads.generation import Parts
    from decisionheads.run_folder import RunFolder

    parts, run = Parts(folder / "out.jsonl", {}), RunFolder(folder / "run", {})
    for record in records:
        parts.save(record["id"], [[1, 2], None])
        assert parts.load(record["id"]) == [[1, 2], None]
        run.save_part(record["id"], {"x": __import__("numpy").ones(1)})
    assert len(list((folder / ".out.jsonl.parts").iterdir())) == len(list(run.parts.iterdir())) + 1 == len(records) + 1
    assert not (folder.parent / "escape").exists() and {p.name for p in folder.parent.iterdir()} == {"work"} and not Path("/escape").exists()


@pytest.fixture(scope="module")
def planned(base, tmp_path_factory):
    folder = Path(shutil.copytree(base, tmp_path_factory.mktemp("plan") / "work"))
    hostile.plan(folder)
    return folder


@pytest.mark.parametrize("change", [
    lambda p: p["options"].__setitem__("seed", 1), lambda p: p.__setitem__("digest", None), lambda p: p.clear()], ids=["an option", "no digest", "nothing"])
def test_a_changed_plan(planned, change):
    plan = json.loads((planned / "plan.json").read_text())
    change(plan)
    (planned / "changed.json").write_text(json.dumps(plan))
    refused(planned, "flip run", "plan.json", planned / "changed.json", "changed after it was registered")


@pytest.mark.parametrize("change", [
    lambda p: p.__setitem__("models", 3), lambda p: p.__setitem__("corpora", None), lambda p: p["options"].__setitem__("routes", 3), lambda p: p["options"].__setitem__("smallest", "x"),
    lambda p: p["options"].__setitem__("variance", 10**400), lambda p: p["options"].pop("wording"), lambda p: p["options"].__setitem__("wording", []), lambda p: p["prompts"].__setitem__("cue", 3),
    lambda p: p["prompts"]["layout"].__setitem__("listing", "none"), lambda p: p["labels"].__setitem__("path", "\0"), lambda p: p["models"][0].__setitem__("path", ["x"]), lambda p: p.pop("registered"),
    lambda p: p["options"].__setitem__("alpha", "x"), lambda p: p["options"].__setitem__("seed", -1), lambda p: p["options"].__setitem__("n", "x"), lambda p: p["labels"].pop("regions"), lambda p: p["models"][0].pop("arm"),
    lambda p: p["corpora"][0].pop("in_domain"), lambda p: p["options"].__setitem__("power", [1]), lambda p: p["prompts"].__setitem__("longest", "x")])
def test_a_plan_that_was_made_up_and_hashed(planned, change):
    plan = json.loads((planned / "plan.json").read_text())
    change(plan)
    plan["digest"] = plan_digest(plan)
    (planned / "changed.json").write_text(json.dumps(plan))
    refused(planned, "flip run", "plan.json", planned / "changed.json")


@pytest.fixture(scope="module")
def finished(demo, base, tmp_path_factory):
    folder = Path(shutil.copytree(base, tmp_path_factory.mktemp("run") / "work"))
    hostile.run_folder(folder, demo)
    return folder


@pytest.mark.parametrize(("name", "change", "commands"), [
    ("run.json", lambda b: b"", "show compare report evidence distill"), ("run.json", lambda b: b"[]", "show compare report evidence distill"), ("run.json", lambda b: b"[" * 100_000, "show compare report"),
    ("run.json", lambda b: b.replace(b'"finished": true', b'"finished": false'), "show compare report evidence distill"), ("run.json", lambda b: b.replace(b'"layers": 4', b'"layers": "x"'), "compare"),
    ("run.json", lambda b: b.replace(b'"model":', b'"model": 1, "model":'), "show compare report"), ("summary.json", lambda b: b"{}", "show compare report evidence distill"),
    ("summary.json", lambda b: b'{"kinds": 3}', "show compare report"), ("summary.json", lambda b: b.replace(b'"selection"', b'"x"'), "show compare report"), ("summary.json", lambda b: b.replace(b'"reference"', b'"\xff"'), "show compare report"),
    ("heads.csv", lambda b: b"", "show report"), ("heads.csv", lambda b: b.decode().encode("utf-16"), "show compare report evidence"), ("heads.csv", lambda b: b.replace(b"layer", b"x", 1), "show report evidence"),
    ("heads.csv", lambda b: b + b"1,2,3,4,5,6,7,8,9,0,1,2,3,4,5,6,7,8,9\n", "show compare report evidence"), ("null_max.safetensors", lambda b: b[:20], "report"), ("null_max.safetensors", lambda b: b"\xff" * 8 + b[8:], "report"),
    ("reads.csv", lambda b: b.replace(b"family", b"x"), "compare report"), ("sets.json", lambda b: b.replace(b'"L', b'"M'), "distill evidence"), ("sets.json", lambda b: b"{}", "distill evidence"),
    ("sets.json", lambda b: b'{"region": 3}', "distill evidence"), ("example.json", lambda b: b'{"tokens": 3}', "report")])
def test_a_changed_run_folder(finished, name, change, commands):
    path = finished / "run" / name
    before = path.read_bytes()
    assert change(before) != before
    path.write_bytes(change(before))
    try:
        for command in commands.split():
            outcome = hostile.attempt(hostile.commands(finished, str(tiny.path("llama")))[command], finished, [str(path), str(path.parent)])
            assert outcome.code == 2 and outcome.wrong == (), (command, outcome)
    finally:
        path.write_bytes(before)


def test_the_campaign_finds_nothing_in_a_sample(demo, tmp_path):
    from .campaigns.malformed_inputs import campaign

    counts, violations = campaign(60, 1, 25, demo, tmp_path)
    assert violations == [] and counts["refused in one sentence"] > 10 and counts["inputs"] > 20
