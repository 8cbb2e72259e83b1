"""`decisionheads distill` and `evaluate`, as functions: from files to a campaign's folder, its tables and its figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ._processes import agreed, first, working_together
from .distillation.campaign import Campaign, Plan, tables_of
from .distillation.evaluation import Judging, evaluate
from .errors import InputError
from .model import DecisionModel
from .run_folder import RunFolder, hash_files, model_hash, read_json, write
from .transcripts import Transcript, load_transcripts
from .workflow import check_device, check_usable, load_space, own_device


def distill_files(teacher: str, run: Path, transcripts: Path, held_out: Path, labels: Path, students: Sequence[str], out: Path, plan: Plan, *, regions: str | None = None,
                  device: str | None = None, memory: int, progress: bool = True, say: Callable[[str], None] = lambda line: None) -> tuple[str, bool] | None:
    """Train every student in every arm with every seed, or go on with it; write tables and figure once all are done.

    Args:
        teacher, run: the model that wrote the transcripts, and the folder of its discovery.
        transcripts, held_out: texts that students are trained on, and others that they are judged on.
        students: folders or hub names; called by their last part.
        say: is told of every run that begins.

    Returns:
        what came of it, and whether all is done; None in all but the first of several processes.

    Raises:
        InputError: before anything is loaded, for whatever is wrong with files, names and settings.
    """
    names = [Path(s).name for s in students]
    if not students or len(set(names)) < len(names):
        raise InputError(f"students are {', '.join(names) or 'none'}; give one or more whose folders have different names")
    space, _ = load_space(labels, regions)
    texts, held = (_texts(path, space) for path in (transcripts, held_out))
    for student in students:
        DecisionModel.load_tokenizer(student)  # what is missing is missed now
    check_device(device)
    campaign = Campaign(out, teacher, run, texts, held, dict(zip(names, students, strict=True)), space, plan, [transcripts, held_out, labels], memory=memory, progress=progress and first())
    with working_together(device):
        done = campaign.train(say if first() else lambda line: None)
        if not first():
            return None
        return conclude(out, names, campaign.runs()), done


def _texts(path: Path, space) -> list[Transcript]:
    found = load_transcripts(path)
    check_usable(found, space, path)
    return found


def conclude(out: Path, students: Sequence[str], runs: Sequence[tuple[str, str, int]]) -> str:
    """Write tables, verdicts and figure of what is done, and say it."""
    tables = tables_of(out, students, runs)
    for name, frame in tables.items():
        write(out / f"{name}.csv", frame.to_csv(index=False, float_format="%.6g"))
    return ""
