"""Kill a run with SIGKILL at random moments, start it again, and hold what comes out against a run that nobody touched.

    python -m tests.campaigns.kills                    (20 kills: within a quarter of an hour on two cores)
    python -m tests.campaigns.kills --sample 60        (as many as begin within a minute, at least two)
    python -m tests.campaigns.kills --brief            (of a run without a cue, which takes half the time)

The run is the demo of an embedded model with 12 texts, from its own generation to the report, cue included. A moment is drawn over
the files that the untouched run wrote on its way, or (one in four) over the time it took; some kills are followed by a second one. Tables, sets, summary, splits and report must
be the same to the byte. Exit code 1 if one differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

DEMO = ["demo", "--texts", "12"]
# a server imports these once and forks a process for each run, which is then killed as any other: half of a short run is imports
IMPORTED = ["decisionheads.workflow", "decisionheads.cli", "transformer_lens.model_bridge"]
PROCESSES = multiprocessing.get_context("forkserver")


def discovery(folder: Path) -> list[str]:
    """The discovery of twelve written texts, as a command."""
    from decisionheads import DecisionModel, save_transcripts, tiny

    texts = tiny.generate(DecisionModel.from_pretrained(tiny.path("llama")), 12, seed=1)
    save_transcripts(texts, folder / "texts.jsonl")
    space = tiny.labels()
    (folder / "labels.csv").write_text("label,region\n" + "".join(f"{label},{space.region(label)}\n" for label in space.labels))
    return ["discover", "--model", str(tiny.path("llama")), "--transcripts", str(folder / "texts.jsonl"), "--labels", str(folder / "labels.csv"),
            "--minimum", "2", "--caliper", "1", "--draws", "99", "--random-sets", "20", "--held-out", "4"]


def run(command: list[str], out: Path, kill: Callable[[float], bool] = lambda seconds: False) -> tuple[int, str, int, float]:
    """Run a command until it ends, or until `kill` (of the seconds so far) says so: exit code, what it said, most files at once, seconds."""
    with tempfile.NamedTemporaryFile("r") as errors:
        process, most = PROCESSES.Process(target=program, args=([*command, "--out", str(out)], errors.name)), 0
        process.start()
        begun = time.monotonic()
        while process.is_alive():
            most = max(most, files(out))
            if kill(time.monotonic() - begun):
                process.kill()
            process.join(0.01)
        return process.exitcode, errors.read(), most, time.monotonic() - begun


def program(command: list[str], errors: str) -> None:
    """The program in a process of its own, on one thread; what it says on stderr goes into a file."""
    import torch
    import tqdm

    from decisionheads.cli import main

    torch.set_num_threads(1)
    tqdm.tqdm.set_lock(threading.RLock())  # tqdm's own is shared between processes, and one that is killed leaves it behind
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(errors, os.O_WRONLY), 2)
    raise SystemExit(main(command))


def files(out: Path) -> int:
    """How many files a run has written so far."""
    return sum(len(names) for _, _, names in os.walk(out))


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
    parser.add_argument("--brief", action="store_true", help="kill the discovery of twelve written texts instead of the whole demo")
    args = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TQDM_DISABLE="1")
    PROCESSES.set_forkserver_preload(IMPORTED)
    rng, differ = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        command = discovery(Path(folder)) if args.brief else DEMO
        code, said, most, took = run(command, Path(folder) / "untouched")
        if code:
            raise SystemExit(f"the untouched run failed: {said}")
        expected = hashes(Path(folder) / "untouched")
        print(f"untouched: {took:.1f} s, {most} files on its way, {len(expected)} things to compare")
        begun, kills = time.monotonic(), 0
        for n in range(args.kills):
            if args.sample is not None and n >= 2 and time.monotonic() - begun > args.sample:
                print(f"stopped after {n} of {args.kills} kills, as asked")
                break
            out, seen = Path(folder) / f"killed-{n}", []
            for _ in range(1 + (rng.random() < 0.3)):
                if rng.random() < 0.25:
                    code, *_ = run(command, out, lambda seconds, moment=rng.uniform(0, took): seconds >= moment)
                else:
                    code, *_ = run(command, out, lambda seconds, out=out, count=rng.randint(1, most): files(out) >= count)
                seen.append(state(out) if code else "nothing: it had ended")
                kills += bool(code)
            code, said, *_ = run(command, out)
            wrong = sorted(k for k in {*expected, *hashes(out)} if expected.get(k) != hashes(out).get(k)) if code == 0 else [f"exit code {code}: {said[-300:]}"]
            differ += bool(wrong)
            print(f"{n + 1:3} killed after {', '.join(seen)}: {'same' if not wrong else 'DIFFERENT: ' + ', '.join(wrong)}", flush=True)
            shutil.rmtree(out, ignore_errors=True)
    print(f"{kills} kills: " + (f"{differ} of the runs came out different" if differ else "all came out the same"))
    return int(differ > 0)


if __name__ == "__main__":
    raise SystemExit(main())
