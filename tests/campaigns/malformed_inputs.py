"""A thousand malformed inputs, run as a user would: `python -m tests.campaigns.malformed_inputs`.

Valid files of every format are mutated by a seed, one at a time, and given to a command that refuses bad input before a model
is loaded. Each refusal is held against the contract of `tests.hostile`. A mutation that leaves the input valid is counted as
still valid. Some refusals are repeated in a process of their own. Exit code 1 if the contract was ever broken.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from decisionheads import tiny
from decisionheads.cli import main as program
from tests import hostile

# which file of each command is broken, and how often the command is drawn
TARGETS = {
    "score": (["t.jsonl", "l.csv"], 5), "score jsonl": (["l.jsonl"], 3), "discover": (["t.jsonl", "l.csv"], 5), "generate": (["notes.jsonl", "l.csv"], 5), "evaluate": (["held.jsonl", "l.csv"], 3),
    "distill": (["t.jsonl", "held.jsonl", "run/run.json", "run/summary.json", "run/sets.json"], 3), "evidence": (["t.jsonl", "run/run.json", "run/summary.json", "run/sets.json", "run/heads.csv"], 3),
    "register": (["t.jsonl", "l.csv"], 3), "flip run": (["plan.json", "t.jsonl", "l.csv"], 6), "icd codes": (["codes.txt"], 3), "icd table": (["codes.csv"], 3), "icd notes": (["notes.jsonl"], 3),
    "codiesp": (["codiesp/train/trainD.tsv", "codiesp/train/trainX.tsv", "codiesp/train/text_files/train.txt"], 3), "mimic": (["mimic/discharge.csv", "mimic/diagnoses_icd.csv", "mimic/d_icd_diagnoses.csv"], 4),
    "show": (["run/run.json", "run/summary.json", "run/heads.csv"], 6), "show json": (["run/run.json", "run/summary.json"], 2),
    "compare": (["run/run.json", "run/summary.json", "run/heads.csv", "run/reads.csv", "run/phase_matrix.csv"], 6),
    "report": (["run/run.json", "run/summary.json", "run/heads.csv", "run/reads.csv", "run/texts.csv", "run/knock_in.csv", "run/null_max.safetensors", "run/example.json", "run/phase_matrix.csv"], 4)}
BY_PROCESS = 25


def campaign(n: int, seed: int, seconds: float, run: Path, work: Path) -> tuple[Counter, list[str]]:
    """Counts, and a line for every violation."""
    kept, folder = work / "kept", work / "work"
    hostile.valid(folder)
    hostile.plan(folder)
    hostile.run_folder(folder, run)
    hostile.shutil.copytree(folder, kept)
    commands = hostile.commands(folder, str(tiny.path("llama")))
    counts, violations, refused = Counter(), [], []
    started = time.time()
    with hostile.no_model():
        for name, arguments in commands.items():  # the files are valid: whatever is refused below is refused for its mutation
            outcome = hostile.attempt(arguments, folder, [])
            assert outcome.code in (0, None), (name, outcome.err)
            hostile.restore(folder, kept)
        names, weights = list(TARGETS), [weight for _, weight in TARGETS.values()]
        for i in range(n):
            if seconds and time.time() - started > seconds:
                break
            rng = random.Random(f"malformed {seed} {i}")
            command = rng.choices(names, weights)[0]
            target = folder / rng.choice(TARGETS[command][0])
            what = broken(rng, target, kept / target.relative_to(folder))
            outcome = hostile.attempt(commands[command], folder, [str(target), str(target.parent), *(x for x in commands[command] if x.startswith(f"{folder}/") and "/out" not in x)])
            said = f"{i}: {command}, {target.relative_to(folder)}: {what}"
            counts["still valid" if outcome.code in (0, None) else "refused in one sentence" if not outcome.wrong else "violations"] += 1
            counts["inputs"] += 1
            if outcome.wrong:
                violations.append(f"{said}: {'; '.join(outcome.wrong)}: {outcome.err.strip()[-400:]!r}")
            elif outcome.code == 2:
                refused.append((i, command, target, outcome.err))
            if (work / "escape").exists() or Path("/escape").exists():
                violations.append(f"{said}: a file outside of the folder")
            hostile.restore(folder, kept)
    for i, command, target, err in random.Random(seed).sample(refused, min(len(refused), BY_PROCESS if not seconds else 2)):
        rng = random.Random(f"malformed {seed} {i}")
        rng.choices(names, weights), rng.choice(TARGETS[command][0])
        what, before = broken(rng, target, kept / target.relative_to(folder)), hostile.snapshot(folder)
        done = subprocess.run([*hostile.python(), *commands[command]], capture_output=True, timeout=120, env={**os.environ, "PYTHONPATH": os.getcwd()})
        wrong = hostile.judge(done.returncode, done.stdout.decode(), done.stderr.decode(), [""], before, hostile.snapshot(folder))
        counts["repeated in a process of their own"] += 1
        if wrong or done.returncode != 2 or done.stderr.decode() != err:
            violations.append(f"{i}, by itself: {command}, {target.relative_to(folder)}: {what}: {'; '.join(wrong) or 'another sentence'}: {done.stderr.decode()[-400:]!r}")
        hostile.restore(folder, kept)
    return counts, violations


def broken(rng: random.Random, target: Path, valid: Path) -> str:
    """Break a file, and say how."""
    if rng.random() < 0.08:
        return hostile.not_a_file(rng, target)
    for _ in range(20):
        what, data = hostile.broken(rng, target.name, valid.read_bytes())
        if data != valid.read_bytes():
            break
    target.write_bytes(data)
    return what


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=1000, help="inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=float, default=0, metavar="SECONDS", help="stop after so many seconds")
    parser.add_argument("--run", type=Path, help="a finished run folder of the demo; by default one of 40 texts is made")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        run = asked.run
        if run is None:
            run = Path(work) / "demo"
            with hostile.redirect_stdout(sys.stderr):
                assert program(["demo", "--texts", "40", "--out", str(run)]) == 0
        counts, violations = campaign(asked.n, asked.seed, asked.sample, run, Path(work))
    print(", ".join(f"{number} {name}" for name, number in counts.items()))
    print(*violations, sep="\n", end="\n" if violations else "")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
