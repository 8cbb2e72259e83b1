"""Hostile inputs for tests: valid files of every format, ways to break them, and the contract that a command keeps when it is given one.

The contract: exit code 2, one sentence on stderr that names the file or its folder and a remedy, nothing on stdout, and no file made,
changed or removed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

from decisionheads import DecisionModel, save_transcripts, tiny
from decisionheads.cli import main
from decisionheads.corpora.notes import Note, save_notes
from decisionheads.flip.plan import plan_digest
from decisionheads.transcripts import Span

LONGEST, SLOWEST = 2_000, 60  # characters of a sentence, seconds of a refusal
CODES = {"I50.1": "heart failure", "I50.9": "failure of the heart", "J44.0": "lung disease", "J44.9": "disease of the lung", "E11.9": "diabetes"}


class Reached(BaseException):
    """A command came to the point at which it loads a model: its input was taken."""


@dataclass(frozen=True)
class Outcome:
    """What a command did: its exit code (None where it would have loaded a model), what it wrote to both streams, and what is wrong with that."""

    code: int | None
    out: str
    err: str
    wrong: tuple[str, ...]


# -- valid files ------------------------------------------------------------------------------------


def valid(folder: Path) -> Path:
    """Valid files of every format that commands read."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, seed in (("t", 5), ("held", 6)):
        save_transcripts([replace(t, id=f"{name}-{i}", group=f"patient {name} {i}") for i, t in enumerate(texts(16, seed))], folder / f"{name}.jsonl")
    space = tiny.labels()
    (folder / "l.csv").write_text("label,description,region\n" + "".join(f"{x},{x} as it is described,{space.region(x)}\n" for x in space.labels))
    (folder / "l.jsonl").write_text("".join(json.dumps({"label": x, "region": space.region(x)}) + "\n" for x in space.labels))
    (folder / "codes.csv").write_text("label,description\n" + "".join(f"{code},{said}\n" for code, said in CODES.items()))
    (folder / "codes.txt").write_text("".join(f"{code}\n" for code in CODES))
    save_notes([clinic_note(t) for t in texts(8, 7)], folder / "notes.jsonl")
    for name in ("train", "dev"):
        (folder / "codiesp" / name / "text_files").mkdir(parents=True)
        (folder / "codiesp" / name / "text_files" / f"{name}.txt").write_text("Known heart failure.\n")
        (folder / "codiesp" / name / f"{name}D.tsv").write_text(f"{name}\ti50.9\n")
        (folder / "codiesp" / name / f"{name}X.tsv").write_text(f"{name}\tDIAGNOSTICO\ti50.9\theart failure\t6 19\n")
    (folder / "mimic").mkdir()
    (folder / "mimic" / "discharge.csv").write_text('note_id,subject_id,hadm_id,note_type,note_seq,charttime,storetime,text\n1-DS-1,1,11,DS,1,2100,2100,"Known ""heart"" failure,\nseen"\n')
    (folder / "mimic" / "diagnoses_icd.csv").write_text("subject_id,hadm_id,seq_num,icd_code,icd_version\n1,11,1,I509,10\n")
    (folder / "mimic" / "d_icd_diagnoses.csv").write_text("icd_code,icd_version,long_title\nI509,10,Heart failure\n")
    return folder


def texts(n: int, seed: int):
    from .marked import flippable

    return flippable(n, seed)


def clinic_note(t) -> Note:
    """A transcript of the clinic as a note with evidence spans."""
    return Note(t.id, t.prompt, t.labels, subject_id=f"p-{t.id}", spans=tuple(Span(s.name, s.start, s.end, s.of) for s in t.spans if s.name == "evidence"))


def plan(folder: Path) -> Path:
    """A registered plan over the files of `valid`."""
    said = ["flip", "register", "--model", str(tiny.path("llama")), "--spans", str(folder / "t.jsonl"), "--labels", str(folder / "l.csv"), "--cue", "answer\\n", "--longest", "110", "--affirmed", "had ",
            "--out", str(folder / "plan.json")]
    with redirect_stdout(io.StringIO()):
        assert main(said) == 0
    return folder / "plan.json"


def run_folder(folder: Path, finished: Path) -> Path:
    """A finished run folder beside them, without what is large and not read."""
    shutil.copytree(finished, folder / "run", ignore=shutil.ignore_patterns("parts", "report.html", "events.parquet", "effects.safetensors", "transcripts.jsonl"))
    return folder / "run"


def commands(folder: Path, model: str, out: str = "out") -> dict[str, list[str]]:
    """Commands by name; each refuses bad input before a model is loaded."""
    at = lambda name: str(folder / name)  # noqa: E731
    files = ["--labels", at("l.csv"), "--out", at(out)]
    return {
        "score": ["score", "--transcripts", at("t.jsonl"), "--labels", at("l.csv")],
        "score jsonl": ["score", "--transcripts", at("t.jsonl"), "--labels", at("l.jsonl")],
        "discover": ["discover", "--model", model, "--transcripts", at("t.jsonl"), *files],
        "generate": ["generate", "--model", model, "--notes", at("notes.jsonl"), "--longest", "4", "--listing", "compact", "--plain", "--instruction", "x", *files],
        "evaluate": ["evaluate", "--model", model, "--held-out", at("held.jsonl"), "--longest", "4", *files],
        "distill": ["distill", "--teacher", model, "--student", model + "-student", "--run", at("run"), "--transcripts", at("t.jsonl"), "--held-out", at("held.jsonl"), "--longest", "4", *files],
        "evidence": ["evidence", "--model", model, "--run", at("run"), "--spans", at("t.jsonl"), *files],
        "register": ["flip", "register", "--model", model, "--spans", at("t.jsonl"), "--cue", "answer\\n", "--longest", "110", "--affirmed", "had ", *files],
        "flip run": ["flip", "run", "--plan", at("plan.json"), "--out", at(out)],
        "icd codes": ["labels", "icd10cm", "--codes", at("codes.txt"), "--out", at(out + ".csv")],
        "icd table": ["labels", "icd10cm", "--codes", at("codes.csv"), "--out", at(out + ".csv")],
        "icd notes": ["labels", "icd10cm", "--notes", at("notes.jsonl"), "--out", at(out + ".csv")],
        "codiesp": ["prepare", "codiesp", "--path", at("codiesp"), "--out", at(out + ".jsonl")],
        "mimic": ["prepare", "mimic-iv", "--path", at("mimic"), "--out", at(out + ".jsonl"), "--labels-out", at(out + ".csv")],
        "show": ["show", at("run")],
        "show json": ["show", at("run"), "--json"],
        "compare": ["compare", at("run"), at("run")],
        "report": ["report", at("run")],
    }


# -- the contract -----------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, str]:
    """Every file below a folder with a hash of its bytes; links and other things by their kind."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "folder" if path.is_dir() else "special"
    return found


@contextmanager
def no_model() -> Iterator[None]:
    """Loading a model ends the command; tokenizers are loaded once."""
    known: dict[str, object] = {}
    load = DecisionModel.load_tokenizer

    def tokenizer(name):
        if str(name) not in known:
            known[str(name)] = load(name)
        return known[str(name)]

    def reached(*args, **options):
        raise Reached

    with patch.object(DecisionModel, "from_pretrained", reached), patch.object(DecisionModel, "load_tokenizer", staticmethod(tokenizer)):
        yield


def judge(code: int, out: str, err: str, named: list[str], before: dict[str, str], after: dict[str, str]) -> tuple[str, ...]:
    """What is wrong with a refusal."""
    wrong = []
    if code not in (0, 2):
        wrong.append(f"exit code {code}")
    if "Traceback" in err:
        wrong.append("a traceback")
    if code == 2:
        if not err.startswith("decisionheads: ") or err.count("\n") != 1 or not err.endswith("\n") or len(err.splitlines()) != 1:
            wrong.append("not one line on stderr")
        if len(err) > LONGEST:
            wrong.append(f"a sentence of {len(err)} characters")
        if not all(c.isprintable() for c in err[:-1]):
            wrong.append("control characters on the terminal")
        if not any(name in err for name in named):
            wrong.append("does not name the file")
        if not any(mark in err for mark in (";", "?", ": choose ")):
            wrong.append("names no remedy")
        if out:
            wrong.append("something on stdout")
        changed = sorted(k for k in {*before, *after} if before.get(k) != after.get(k))
        if changed:
            wrong.append(f"files changed: {', '.join(changed)}")
    return tuple(wrong)


def attempt(arguments: list[str], folder: Path, named: list[str]) -> Outcome:
    """Run a command in this process and hold it against the contract; `named`: one of these stands in the sentence."""
    before, started = snapshot(folder), time.time()
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", newline=""), io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", newline="")
    code: int | None = None
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main(arguments)
    except Reached:
        pass
    except BaseException:
        code = 1
        err.write(traceback.format_exc())
    said = [(stream.flush(), stream.buffer.getvalue().decode())[1] for stream in (out, err)]
    wrong = judge(code, *said, named, before, snapshot(folder)) if code is not None else ()
    slow = (f"took {time.time() - started:.0f} s",) if time.time() - started > SLOWEST else ()
    return Outcome(code, *said, wrong + slow)


# -- ways to break a file ---------------------------------------------------------------------------

VALUES: list[object] = [None, True, False, 0, -1, 1.5, 1e308, float("nan"), float("inf"), -float("inf"), 10**400, 2**63, "", " ", "x", "../../escape", "/escape", "a\0b", "\ud800", "a\nb", "a\rb",
                        "\x1b[31mred", "\u202eabc", "e\u0301", "x" * 50_000, "nan", "L999H999", "L-1H0", [], {}, [[]], [None], [1, "a"], {"a": 1}, {"heads": 3}, "2026-01-01"]
PIECES = [b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\n", b'"', b"\\", b",", b"{", b"}", b"[", b"]", b"NaN", b"Infinity", b"\\ud800", b"\\u0000", b"9" * 5000, b"1e999", b"\x1b[2J", b"\xe2\x80\xa8", b"\t"]


def broken_bytes(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """Bytes flipped, cut, doubled or put in, without a look at what they mean."""
    if not data:
        return "put in", rng.choice(PIECES)
    at, far = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    way = rng.randrange(6)
    if way == 0:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return "bits flipped", bytes(changed)
    if way == 1:
        return "cut off", data[:at]
    if way == 2:
        return "a piece left out", data[:at] + data[min(far, at + rng.randint(1, 40)):]
    if way == 3:
        return "a piece doubled", data[:far] + data[at:far][:200] + data[far:]
    piece = rng.choice(PIECES)
    return f"{piece[:10]!r} put in", data[:at] + piece + data[at:]


def broken_lines(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """Lines swapped, left out, doubled, emptied or ended otherwise."""
    lines = data.splitlines(keepends=True) or [b"\n"]
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    way = rng.randrange(6)
    if way == 0:
        lines[i], lines[j] = lines[j], lines[i]
        return "lines swapped", b"".join(lines)
    if way == 1:
        return "a line left out", b"".join(lines[:i] + lines[i + 1:])
    if way == 2:
        return "a line doubled", b"".join(lines[:i] + [lines[i]] + lines[i:])
    if way == 3:
        return "line ends of old Macintoshes", data.replace(b"\r\n", b"\n").replace(b"\n", b"\r")
    if way == 4:
        return "UTF-16", data.decode("utf-8", "replace").encode("utf-16")
    return "a line of something else", b"".join(lines[:i] + [rng.choice([b"[]\n", b"null\n", b"3\n", b'"x"\n', b"{}\n", b",\n", b"NaN\n", b"[" * 100_000 + b"\n", b"\xef\xbb\xbf{}\n"])] + lines[i:])


def broken_json(rng: random.Random, data: bytes, whole: bool) -> tuple[str, bytes]:
    """A value of a JSON record exchanged, dropped, doubled or renamed, somewhere in it."""
    try:
        lines = [data.decode()] if whole else data.decode().splitlines(keepends=True)
        n = rng.randrange(len(lines))
        record = json.loads(lines[n])
    except (ValueError, RecursionError, IndexError):
        return broken_bytes(rng, data)
    holders: list[tuple[object, object]] = []

    def walk(value):
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            holders.append((value, key))
            walk(value[key])

    walk(record)
    if not holders:
        return broken_bytes(rng, data)
    holder, key = rng.choice(holders)
    way = rng.randrange(8)
    if way == 0:
        del holder[key]
        what = "a value dropped"
    elif way == 1 and isinstance(holder, dict):
        holder[rng.choice(["x", key.upper(), key + " ", ""])] = holder.pop(key)
        what = "a key renamed"
    elif way == 2 and isinstance(holder, dict):
        double = json.dumps(key) + ": " + json.dumps(rng.choice([None, 0, "x", holder[key]])) + ", "
        holder["\u0001mark"] = 1
        text = json.dumps(record).replace('"\\u0001mark": 1', double.rstrip(", "))
        lines[n] = text + "\n"
        return f"key {key!r} doubled", "".join(lines).encode("utf-8", "surrogatepass")
    elif way == 3:
        holder[key] = [holder[key]] if rng.random() < 0.5 else {"x": holder[key]}
        what = "a value wrapped"
    elif way == 4 and holders:
        other, k = rng.choice(holders)
        other[k] = json.loads(json.dumps(holder[key]))
        what = "a value copied to another place"
    else:
        holder[key] = rng.choice(VALUES)
        what = f"{str(key)[:20]!r} made {str(holder[key])[:20]!r}"
    lines[n] = json.dumps(record, ensure_ascii=rng.random() < 0.7) + "\n"
    return what, "".join(lines).encode("utf-8", "surrogatepass")


def broken_csv(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """A cell exchanged, a cell more or fewer, a header renamed or doubled."""
    lines = data.decode("utf-8", "replace").splitlines() or [""]
    mark = "\t" if "\t" in lines[0] else ","
    n = 0 if rng.random() < 0.2 else rng.randrange(len(lines))
    cells = lines[n].split(mark)
    i, way = rng.randrange(len(cells)), rng.randrange(5)
    if way == 0:
        del cells[i]
    elif way == 1:
        cells.insert(i, rng.choice(["", "x", '"']))
    elif way == 2:
        cells[i] = cells[rng.randrange(len(cells))]
    else:
        cells[i] = rng.choice([str(v) for v in VALUES])
    lines[n] = mark.join(cells)
    return f"line {n + 1} of a table: cells changed", ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


def broken(rng: random.Random, name: str, data: bytes) -> tuple[str, bytes]:
    """One mutation of a file's bytes, chosen by what kind of file it is; sometimes two."""
    ways: list[Callable[[], tuple[str, bytes]]] = [lambda: broken_bytes(rng, data), lambda: broken_lines(rng, data)]
    if name.endswith((".json", ".jsonl")):
        ways += [lambda: broken_json(rng, data, name.endswith(".json"))] * 6
    elif name.endswith((".csv", ".tsv")):
        ways += [lambda: broken_csv(rng, data)] * 2
    what, made = rng.choice(ways)()
    if name == "plan.json" and rng.random() < 0.7:  # as by somebody who knows how plans are hashed
        try:
            record = json.loads(made)
            record["digest"] = plan_digest(record)
            made = json.dumps(record).encode()
            what += ", hashed again"
        except (ValueError, TypeError, RecursionError):
            pass
    return what, made


def not_a_file(rng: random.Random, path: Path) -> str:
    """Something else in the place of a file: a folder, nothing, a pipe, a link to itself, nothing in it, spaces, deep nesting."""
    path.unlink()
    way = rng.randrange(7 if hasattr(os, "mkfifo") else 2)
    if way == 0:
        path.mkdir()
        return "a folder in its place"
    if way == 1:
        return "not there"
    if way == 2:
        os.mkfifo(path)
        return "a pipe in its place"
    if way == 3:
        path.symlink_to(path.name)
        return "a link to itself"
    path.write_bytes([b"", b" \n\n", b"[" * 100_000 + b"]" * 100_000][way - 4])
    return ["empty", "blank", "100,000 brackets"][way - 4]


def restore(folder: Path, kept: Path) -> None:
    """Put back what a command or a mutation changed."""
    for path in sorted(folder.rglob("*"), reverse=True):
        there = kept / path.relative_to(folder)
        if path.is_symlink() or not path.is_dir():
            if path.is_symlink() or not there.is_file() or not path.is_file() or path.read_bytes() != there.read_bytes():
                path.unlink()
        elif not there.is_dir():
            shutil.rmtree(path)
    shutil.copytree(kept, folder, dirs_exist_ok=True)


def python() -> list[str]:
    """How a user's shell starts the program."""
    return [sys.executable, "-m", "decisionheads"]
