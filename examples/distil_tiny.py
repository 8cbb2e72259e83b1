"""Distil the embedded teacher into two weak students, in four arms, and judge them: one command.

    python examples/distil_tiny.py --out distilled              (three seeds: within an hour on two cores)
    python examples/distil_tiny.py --out distilled --seeds 6    (goes on from there)

`llama-student` is of the teacher's family; `gpt2-student` is of another one and has another tokenizer. Both
look labels up and toss a coin where the reasoning rejected a near-miss. The students answer after the
teacher's reasoning, so that there is something to depart from. Two processes share the runs; killed, the
same command goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from decisionheads import DecisionModel, save_transcripts, tiny
from decisionheads.transcripts import Transcript

TEXTS = {"training": (800, 11), "held_out": (240, 12)}  # how many, and the seed of their stream; the teacher's own discovery has seed 0


def written(model: DecisionModel, n: int, seed: int) -> list[Transcript]:
    """What the teacher writes by itself; gold is what its own reasoning leaves, and this is what it answers."""
    space = tiny.labels()
    return [replace(t, labels=tuple(dict.fromkeys(m.label for m in space.mentions(t.text, t.answer_start)))) for t in tiny.generate(model, n, seed, progress=True)]


def prepare(out: Path) -> None:
    """The teacher's discovery (the demo) and its texts."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "teacher" / "report.html").is_file():
        subprocess.run([sys.executable, "-m", "decisionheads", "demo", "--out", str(out / "teacher")], check=True, stdout=subprocess.DEVNULL)
    model = DecisionModel.from_pretrained(tiny.path("llama"))
    for name, (n, seed) in TEXTS.items():
        if not (out / f"{name}.jsonl").is_file():
            save_transcripts(written(model, n, seed), out / f".{name}")
            (out / f".{name}").replace(out / f"{name}.jsonl")


def command(out: Path, seeds: int, arms: str) -> list[str]:
    """`decisionheads distill`, as anybody would type it."""
    return [sys.executable, "-m", "decisionheads", "distill", "--teacher", str(tiny.path("llama")), "--run", str(out / "teacher"), "--transcripts", str(out / "training.jsonl"),
            "--held-out", str(out / "held_out.jsonl"), "--labels", str(out / "teacher" / "labels.csv"), "--student", str(tiny.path("llama-student")), "--student", str(tiny.path("gpt2-student")),
            "--out", str(out / "students"), "--seeds", str(seeds), "--arms", arms, "--steps", "300", "--rate", "1e-3", "--write", "answer", "--mark", "answer\\n", "--longest", "60",
            "--minimum", "20", "--caliper", "0.5"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", default="cot,mistill,shuffled,random-pool")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    quiet = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    prepare(args.out)
    run = command(args.out, args.seeds, args.arms)
    others = [subprocess.Popen(run, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(args.processes - 1)]
    code = subprocess.run(run, env=quiet).returncode
    for other in others:
        code = other.wait() or code
    return code or subprocess.run(run, env=quiet | {"TQDM_DISABLE": "1"}).returncode  # all is done: tables, figure, and what may be said


if __name__ == "__main__":
    raise SystemExit(main())
