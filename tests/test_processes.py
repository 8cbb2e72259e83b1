"""One run over several processes: shares, results in order, and the tables of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from decisionheads._processes import agreed, first, spread, working_together
from decisionheads.cli import main

ROOT = Path(__file__).parent.parent
TABLES = ("heads.csv", "opposing.csv", "sets.json", "summary.json", "texts.csv", "phase_matrix.csv", "references.csv", "stability.csv", "knock_in.csv", "reads.csv",
          "read_blocking.csv", "elicitation.csv", "elicitation_heads.csv", "events.parquet", "effects.safetensors")


def launch(*command: str, processes: int = 2) -> str:
    """Run something in one or two processes of one thread each; what they print."""
    how = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(20_000 + os.getpid() % 20_000)] if processes > 1 else []
    done = subprocess.run([sys.executable, *how, *command], env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr  # all of it: whoever fails first may not speak last
    return done.stdout


def test_alone_it_is_a_plain_loop():
    with working_together() as number:
        assert number == 0 and first() and agreed("said") == "said"
        assert spread(lambda x: x * x, iter([3, 1, 2]), unpack=lambda x: -x) == [9, 1, 4]


SCRIPT = """
import json, os
import numpy as np
from decisionheads._processes import agreed, first, spread, working_together

mine = []
def work(x):
    mine.append(x)
    return {"x": x, "by": os.environ["RANK"], "inner": spread(lambda y: y + x, [1, 2])}  # inside a share nothing is spread

with working_together("cpu") as number:
    found = spread(work, range(5))
    by_text = spread(lambda x: os.environ["RANK"], "aabbca", by=lambda x: x)
    moved = spread(lambda x: (x, os.environ["RANK"]), [10, 20], unpack=lambda r: (r[0], "from " + r[1]))
    said = agreed(f"rank {os.environ['RANK']}")
    nothing = spread(work, [])
    print(json.dumps([number, first(), mine, found, by_text, moved, said, nothing]) + "\\n", end="", flush=True)  # one write: lines of two processes
assert first() and spread(abs, [-1]) == [1]
"""


def test_each_process_takes_its_share_and_all_have_all_results(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    lines = [json.loads(line) for line in launch(str(tmp_path / "script.py")).splitlines()]
    (zero, one) = sorted(lines)
    assert (zero[0], one[0]) == (0, 1) and (zero[1], one[1]) == (True, False)
    assert (zero[2], one[2]) == ([0, 2, 4], [1, 3])
    assert zero[3] == one[3] == [{"x": i, "by": str(i % 2), "inner": [i + 1, i + 2]} for i in range(5)]
    assert zero[4] == one[4] == ["0", "0", "1", "1", "0", "0"]  # of one text by one process
    assert zero[5] == [[10, "0"], [20, "from 1"]] and one[5] == [[10, "from 0"], [20, "1"]]
    assert zero[6] == one[6] == "rank 0" and zero[7] == []


@pytest.mark.whole
def test_two_processes_give_the_tables_of_one(demo, tmp_path):
    lines = (demo / "transcripts.jsonl").read_text().splitlines()[:14]
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    command = ["-m", "decisionheads", "discover", "--model", str(ROOT / "decisionheads" / "tiny" / "llama"), "--transcripts", str(tmp_path / "t.jsonl"), "--labels", str(demo / "labels.csv"),
               "--minimum", "2", "--caliper", "1", "--draws", "99", "--random-sets", "20", "--held-out", "4", "--cue", "\\ncue {number}:", "--device", "cpu"]
    alone = launch(*command, "--out", str(tmp_path / "one"), processes=1)
    shared = launch(*command, "--out", str(tmp_path / "two"))
    assert shared == alone and "region family" in alone  # the first process alone speaks
    for name in TABLES:
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name
    assert json.loads((tmp_path / "two" / "run.json").read_text())["finished"]
    again = launch(*command, "--out", str(tmp_path / "two"))
    assert again == alone


def test_two_processes_write_what_one_writes(bpe_folder, tmp_path, capsys):
    codes = ["E11.9", "I10", "I50.1", "I50.9"]
    (tmp_path / "labels.csv").write_text("label\n" + "\n".join(codes) + "\n")
    (tmp_path / "notes.jsonl").write_text("".join(json.dumps({"id": f"n{i}", "note": f"Number {i}: heart failure.", "labels": [codes[i % 4]]}) + "\n" for i in range(7)))
    command = ["-m", "decisionheads", "generate", "--model", str(bpe_folder), "--notes", str(tmp_path / "notes.jsonl"), "--labels", str(tmp_path / "labels.csv"), "--within-labels",
               "--longest", "8", "--most", "2", "--batch", "2", "--device", "cpu", "--instruction", "Give codes."]
    assert main([*command[2:], "--out", str(tmp_path / "one.jsonl")]) == 0
    alone = capsys.readouterr().out
    shared = launch(*command, "--out", str(tmp_path / "two.jsonl"))
    assert shared.replace("two.jsonl", "one.jsonl") == alone and (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_a_failing_process_ends_all(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.replace("    mine.append(x)", "    assert x != 3, 'broken'"))
    with pytest.raises(AssertionError, match="broken"):
        launch(str(tmp_path / "script.py"))
