"""`decisionheads flip`: register a plan, and run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .._examples import examples
from .._options import AsJson, Device, Dtype, RegionBy

flip_app = typer.Typer(name="flip", help="Edit evidence: does its code go?", no_args_is_help=True, rich_markup_mode=None)


@flip_app.command(name="register", epilog=examples("flip register"))
def flip_register(
    model: Annotated[list[str], typer.Option(help="model of an arm; again for more, the first is the reference")],
    spans: Annotated[list[Path], typer.Option(help="JSONL of notes (prepare writes them) or transcripts, with evidence spans; again for more corpora")],
    labels: Annotated[Path, typer.Option(help="CSV or JSONL: label, description, region")],
    out: Annotated[Path, typer.Option(help="the plan to write (JSON); never overwritten")],
    in_domain: Annotated[list[Path] | None, typer.Option(help="a file of spans that the models were trained on; the others are read zero-shot")] = None,
    like: Annotated[Path | None, typer.Option(help="transcripts that generate wrote: texts are written as they were")] = None,
    cue: Annotated[str | None, typer.Option(help="what opens the answer, in place of that of --like")] = None,
    longest: Annotated[int | None, typer.Option(help="most tokens to write, in place of that of --like")] = None,
    routes: Annotated[str, typer.Option(help="edits, with commas")] = "delete,mask,negate,swap",
    n: Annotated[int, typer.Option(help="texts of each corpus; 0 for all", min=0)] = 0,
    shortest: Annotated[int, typer.Option(help="fewest characters of a code's evidence", min=1)] = 3,
    smallest: Annotated[float, typer.Option(help="smallest effect of interest, a difference of flip rates")] = 0.1,
    variance: Annotated[float, typer.Option(help="of a document's difference, as it is expected; .5 if both edits flip half of its codes")] = 0.5,
    pilot: Annotated[Path | None, typer.Option(help="folder of an earlier flip run, of other texts, that the variance is taken from, blinded")] = None,
    alpha: Annotated[float, typer.Option(help="level", min=0.0001, max=0.5)] = 0.05,
    power: Annotated[float, typer.Option(help="power of the detectable effect", min=0.5, max=0.999)] = 0.8,
    seed: Annotated[int, typer.Option(help="seed of the order of texts, sign-flips and intervals", min=0)] = 0,
    stop: Annotated[str, typer.Option(help="stop rule. Default: every planned text once, nothing looked at before")] = "",
    filler: Annotated[str, typer.Option(help="character that masks")] = "-",
    negation: Annotated[str, typer.Option(help="what negates, with its space")] = "denies ",
    affirmed: Annotated[str, typer.Option(help="word that the negation replaces where it stands right before evidence, with its space")] = "",
    region_by: RegionBy = None,
) -> None:
    """Write down what will be run, before anything is.

    With a time and a hash; a plan is never overwritten.
    """
    from .edits import Wording
    from .plan import STOP, Planning, register
    from .work import show_plan

    planning = Planning(tuple(r.strip() for r in routes.split(",") if r.strip()), n, shortest, smallest, variance, alpha, power, seed, stop or STOP, Wording(filler, negation, affirmed))  # type: ignore[arg-type]
    plan = register(model, spans, labels, out, planning, in_domain=in_domain or (), like=like, cue=None if cue is None else cue.replace("\\n", "\n"), longest=longest, pilot=pilot, regions=region_by)
    typer.echo(show_plan(plan, out))


@flip_app.command(name="run", epilog=examples("flip run"))
def flip_run(
    plan: Annotated[Path, typer.Option(help="a registered plan")],
    out: Annotated[Path, typer.Option(help="folder, new or to be continued")],
    batch: Annotated[int, typer.Option(help="texts that are written side by side", min=1)] = 8,
    dtype: Dtype = "float32",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Run a registered plan; one that was changed is refused."""
    from .work import flip_records, run_plan, show_flip

    if run_plan(plan, out, together=batch, dtype=dtype, device=device) is not None:
        typer.echo(json.dumps(flip_records(out)) if as_json else show_flip(out))
