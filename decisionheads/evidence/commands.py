"""`evidence` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .._options import AsJson, Device, Dtype, Memory, RegionBy


def evidence(
    model: Annotated[list[str], typer.Option(help="model of an arm; again for more, the first is the reference")],
    run: Annotated[list[Path], typer.Option("--run", "--run-folder", help="its run folder, which names its decision heads; one for each model")],
    spans: Annotated[list[Path], typer.Option(help="JSONL of notes (prepare writes them) or transcripts, with evidence spans; again for more corpora")],
    labels: Annotated[Path, typer.Option(help="CSV or JSONL: label, description, region")],
    out: Annotated[Path, typer.Option(help="folder, new or to be continued")],
    in_domain: Annotated[list[Path] | None, typer.Option(help="a file of spans that the models were trained on; the others are read zero-shot")] = None,
    like: Annotated[Path | None, typer.Option(help="transcripts that generate wrote: notes are put into prompts of that kind")] = None,
    kind: Annotated[str, typer.Option(help="decision of a code that is looked at: first, region, label or departure")] = "first",
    heads_from: Annotated[str, typer.Option(help="decision heads: set or selected; the best of each arm, equally many")] = "set",
    top: Annotated[int, typer.Option(help="instead, the first so many heads of the ranking", min=0)] = 0,
    random_sets: Annotated[int, typer.Option(help="sets of random heads of the same layers", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="seed of random heads, sign-flips and intervals", min=0)] = 0,
    region_by: RegionBy = None,
    dtype: Dtype = "float32",
    device: Device = None,
    memory: Memory = 512,
    as_json: AsJson = False,
) -> None:
    """Hold what heads read against human evidence spans."""
    from .work import Options, evidence_files, evidence_records, show_evidence

    state = evidence_files(model, run, spans, labels, out, Options(kind, heads_from, top, random_sets, seed=seed), in_domain=in_domain or (), like=like, regions=region_by, dtype=dtype,
                           device=device, memory=memory * 2**20)
    if state is not None:
        typer.echo(json.dumps(evidence_records(out)) if as_json else show_evidence(out))
