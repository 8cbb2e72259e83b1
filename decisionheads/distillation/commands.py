"""`distill` and `evaluate` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .._options import AsJson, Caliper, Device, Dtype, Longest, Mark, Memory, Minimum, RegionBy, Size, Writes


def distill(
    teacher: Annotated[str, typer.Option(help="the model that wrote the transcripts")],
    run: Annotated[Path, typer.Option(help="run folder of its discovery, whose heads are distilled")],
    transcripts: Annotated[Path, typer.Option(help="JSONL: what students are trained on")],
    held_out: Annotated[Path, typer.Option(help="JSONL: what they are judged on; none of the training texts, groups or ids")],
    labels: Annotated[Path, typer.Option(help="CSV or JSONL: label, description, region")],
    student: Annotated[list[str], typer.Option(help="untrained student, folder or hub name; may be given several times")],
    out: Annotated[Path, typer.Option(help="folder, new or to be continued; the same command again, beside this one, takes other runs of it")],
    arms: Annotated[str, typer.Option(help="with commas; all-heads and wrong-group are there as well")] = "cot,mistill,shuffled,random-pool",
    seeds: Annotated[int, typer.Option(help="seeds of each arm; 6 or more allow a claim", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="optimizer steps of a run", min=1)] = 300,
    batch: Annotated[int, typer.Option(help="texts of a step, in one process", min=1)] = 8,
    accumulate: Annotated[int, typer.Option(help="batches of a step", min=1)] = 1,
    rate: Annotated[float, typer.Option(help="highest learning rate")] = 1e-4,
    lam: Annotated[float, typer.Option("--lambda", help="weight of the distance between attentions")] = 1.0,
    lora: Annotated[int, typer.Option(help="rank of low-rank adapters; 0 trains all weights", min=0)] = 0,
    precision: Annotated[str, typer.Option(help="mixed precision: no, bf16 or fp16")] = "no",
    heads: Annotated[str, typer.Option(help="of the teacher: selected (calibrated ones) or set (its frozen sets)")] = "selected",
    pool_texts: Annotated[int, typer.Option(help="training texts on which a student's heads are chosen; 0 for all", min=0)] = 400,
    k: Size = 4,
    write_: Writes = "all",
    mark: Mark = "\\nCodes:",
    longest: Longest = 1024,
    minimum: Minimum = 30,
    caliper: Caliper = 0.25,
    region_by: RegionBy = None,
    device: Device = None,
    memory: Memory = 512,
) -> None:
    """Train students in arms, and judge them.

    On what a teacher wrote, and on what its heads read as well; each arm over several seeds.
    """
    from .arms import Training
    from .campaign import Plan
    from .evaluation import Judging
    from .work import distill_files

    judging = Judging(size=k, curve=max(16, 2 * k), write=write_, mark=mark.replace("\\n", "\n"), longest=longest, minimum=minimum, caliper=caliper)
    training = Training(steps, batch, accumulate, rate, lam=lam, lora=lora, precision=precision)
    plan = Plan(training, judging, tuple(part.strip() for part in arms.split(",") if part.strip()), seeds, heads, pool_texts)
    said = distill_files(teacher, run, transcripts, held_out, labels, student, out, plan, regions=region_by, device=device, memory=memory * 2**20, say=lambda line: typer.echo(line, err=True))
    if said is not None:
        typer.echo(said[0])
        typer.echo(f"tables and figure: {out}" if said[1] else f"other processes are still at work on {out}; the last one writes the rest")


def evaluate(
    model: Annotated[str, typer.Option(help="student, folder or hub name")],
    held_out: Annotated[Path, typer.Option(help="JSONL: transcripts it was not trained on")],
    labels: Annotated[Path, typer.Option(help="CSV or JSONL: label, description, region")],
    out: Annotated[Path, typer.Option(help="write what was found here, a .json file")],
    kind: Annotated[str, typer.Option(help="kind of decision whose recovery is measured")] = "departure",
    k: Size = 4,
    write_: Writes = "all",
    mark: Mark = "\\nCodes:",
    longest: Longest = 1024,
    minimum: Minimum = 30,
    caliper: Caliper = 0.25,
    seed: Annotated[int, typer.Option(help="seed of splits and permutations", min=0)] = 0,
    region_by: RegionBy = None,
    dtype: Dtype = "float32",
    device: Device = None,
    memory: Memory = 512,
    as_json: AsJson = False,
) -> None:
    """Judge one student.

    The heads that decide in it, what the best few recover, and how well it does the task.
    """
    from ..workflow import kinds_of
    from .evaluation import Judging
    from .work import evaluate_files, judged

    judging = Judging(kinds_of(kind)[0], k, max(16, 2 * k), write_, mark.replace("\\n", "\n"), longest, seed=seed, caliper=caliper, minimum=minimum)
    found = evaluate_files(model, held_out, labels, out, judging, regions=region_by, dtype=dtype, device=device, memory=memory * 2**20)
    if found is not None:
        typer.echo(json.dumps(found) if as_json else judged(found))
