"""Kill a run with SIGKILL at random moments, start it again, and hold what comes out against a run that nobody touched.

    python -m tests.campaigns.kills                    (20 kills: within a quarter of an hour on two cores)
    python -m tests.campaigns.kills --sample 60        (as many as begin within a minute, at least two)

The run is the demo of an embedded model with 12 texts, from its own generation to the report, cue included. A moment is drawn
evenly over the time that the untouched run took; some kills are followed by a second one. Tables, sets, summary, splits and report must
be the same to the byte. Exit code 1 if one differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "decisionheads", "demo", "--texts", "12"]
QUIET = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}


def run(out: Path, kill_after: float | None = None) -> tuple[int, str]:
    """The exit code of the demo, and where it was: killed after so many seconds, or left alone."""
    process = subprocess.Popen([*COMMAND, "--out", str(out)], env=QUIET, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, said = process.communicate(timeout=kill_after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        _, said = process.communicate()
    return process.returncode, said


def state(out: Path) -> str:
    """How far a killed run had come, in words."""
    if not out.is_dir():
        return "nothing made"
    parts, kept = len(list((out / "parts").glob("*.safetensors"))), len(list((out / "parts" / "going").glob("*.safetensors")))
    tables = len(list(out.glob("*.csv")))
    finished = (out / "run.json").is_file() and json.loads((out / "run.json").read_text()).get("finished", False)
    return "finished" if finished else f"{parts} parts, {kept} later pieces, {tables} tables"


def hashes(out: Path) -> dict[str, str]:
    """Every file that must come out the same: all but run.json, which holds times, of which only the splits count."""
    found = {str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(out.rglob("*")) if p.is_file() and p.name != "run.json"}
    manifest = json.loads((out / "run.json").read_text())
    for name in ("splits", "warnings", "options", "inputs", "files"):
        found[f"run.json {name}"] = hashlib.sha256(json.dumps(manifest[name]).encode()).hexdigest()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=float, help="start no other kill after so many seconds (two are made at least)")
    args = parser.parse_args()
    rng, differ = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        code, said = run(Path(folder) / "untouched")
        took = time.monotonic() - begun
        if code:
            raise SystemExit(f"the untouched run failed: {said}")
        expected = hashes(Path(folder) / "untouched")
        print(f"untouched: {took:.1f} s, {len(expected)} things to compare")
        begun = time.monotonic()
        for n in range(args.kills):
            if args.sample is not None and n >= 2 and time.monotonic() - begun > args.sample:
                print(f"stopped after {n} of {args.kills} kills, as asked")
                break
            out, moments = Path(folder) / f"killed-{n}", [rng.uniform(0, took) for _ in range(1 + (rng.random() < 0.3))]
            seen = []
            for moment in moments:
                run(out, moment)
                seen.append(f"{moment:.1f} s ({state(out)})")
            code, said = run(out)
            wrong = sorted(k for k in {*expected, *hashes(out)} if expected.get(k) != hashes(out).get(k)) if code == 0 else [f"exit code {code}: {said[-300:]}"]
            differ += bool(wrong)
            print(f"{n + 1:3} killed at {', '.join(seen)}: {'same' if not wrong else 'DIFFERENT: ' + ', '.join(wrong)}", flush=True)
            shutil.rmtree(out, ignore_errors=True)
    print(f"{differ} of the killed runs came out different" if differ else "all came out the same")
    return int(differ > 0)


if __name__ == "__main__":
    raise SystemExit(main())
