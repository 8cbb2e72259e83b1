"""The command line: a thin program over the public API.

Exit codes: 0 done; 2 bad input, one sentence on stderr; 1 our own fault, with a traceback.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from ._examples import examples
from ._options import AsJson, Caliper, Device, Dtype, Memory, Minimum, RegionBy
from .distillation.commands import distill, evaluate
from .errors import InputError
from .evidence.commands import evidence
from .flip.commands import flip_app

LONGEST = 1_000  # characters of a sentence
_UsageError = typer.BadParameter.__mro__[2]  # ClickException, wherever this typer keeps click
app = typer.Typer(name="decisionheads", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
labels_app = typer.Typer(name="labels", help="Make label files.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def about(version: Annotated[bool, typer.Option("--version", help="print the version and leave", is_eager=True, callback=lambda asked: _print_version(asked))] = False) -> None:
    """Which attention heads decide what a language model writes.

    Each command has examples under its --help. Exit codes: 0 done, 2 bad input (one sentence), 1 a fault of ours.
    """


def _print_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"decisionheads {__version__}")
        raise typer.Exit()
    return asked


@app.command(epilog=examples("demo"))
def demo(
    out: Annotated[Path, typer.Option(help="run folder")] = Path("decisionheads-demo"),
    model: Annotated[str, typer.Option(help="embedded model: llama or gpt2")] = "llama",
    seed: Annotated[int, typer.Option(help="seed of texts, splits and permutations", min=0)] = 0,
    texts: Annotated[int, typer.Option(help="how many texts the model writes", min=12)] = 400,
    memory: Memory = 512,
    as_json: AsJson = False,
) -> None:
    """Run it all on an embedded model, from what it writes itself."""
    from .workflow import run_demo, show

    state = run_demo(model, out, seed, memory * 2**20, texts)
    typer.echo(json.dumps(state["summary"]) if as_json else f"{show(out)}\nreport: {out / 'report.html'}")


@app.command(epilog=examples("generate"))
def generate(
    model: Annotated[str, typer.Option(help="model folder, .gguf file or hub name")],
    notes: Annotated[Path, typer.Option(help="JSONL: id, note, labels, subject_id, spans; prepare writes it")],
    labels: Annotated[Path, typer.Option(help="CSV or JSONL: label, description, region; all of them are candidates")],
    out: Annotated[Path, typer.Option(help="transcripts, new or to be continued (JSONL)")],
    listing: Annotated[str, typer.Option(help="candidates with descriptions, a line each (described), descriptions first (titled), or a line for each region (compact)")] = "described",
    instruction: Annotated[str, typer.Option(help="what to do; stands after the note. Default: to name what comes close, then a line that begins with Codes:")] = "",
    system: Annotated[str, typer.Option(help="system text")] = "",
    opening: Annotated[str, typer.Option(help="what the model's own writing begins with, as part of the prompt")] = "",
    within_labels: Annotated[bool, typer.Option("--within-labels", help="reasoning freely, then the cue, then labels only")] = False,
    cue: Annotated[str, typer.Option(help="what opens the answer")] = "\\nCodes:",
    longest: Annotated[int, typer.Option(help="most tokens to write; within the labels, of reasoning", min=0)] = 1024,
    until: Annotated[str, typer.Option(help="text at which reasoning ends, within the labels")] = "",
    most: Annotated[int, typer.Option(help="most labels of an answer, within the labels", min=1)] = 16,
    keep_whole: Annotated[bool, typer.Option("--keep-whole", help="refuse notes that are too long, instead of cutting them at their end")] = False,
    region_by: RegionBy = None,
    between: Annotated[str, typer.Option(help="what stands between two labels, within the labels")] = ",",
    plain: Annotated[bool, typer.Option("--plain", help="no chat template, even if the model has one")] = False,
    limit: Annotated[int, typer.Option(help="only the first so many notes; 0 for all", min=0)] = 0,
    batch: Annotated[int, typer.Option(help="texts that are written side by side", min=1)] = 8,
    dtype: Dtype = "float32",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Let a model reason about notes and pick labels."""
    from .generation import INSTRUCTION, Generating
    from .prompts import Layout
    from .workflow import generate_files, summed_up

    asked = Generating(Layout(listing, instruction or INSTRUCTION, system, chat=False if plain else None, opening=opening.replace("\\n", "\n"), cut=not keep_whole), longest, within_labels, cue.replace("\\n", "\n"), most, until.replace("\\n", "\n"), between)
    state = generate_files(model, notes, labels, out, asked, limit=limit, together=batch, dtype=dtype, device=device, regions=region_by)
    if state is not None:
        typer.echo(json.dumps(state) if as_json else summed_up(state, out))


@app.command(epilog=examples("discover"))
def discover(
    model: Annotated[str, typer.Option(help="model folder, .gguf file or hub name")],
    transcripts: Annotated[Path, typer.Option(help="JSONL: id, prompt or messages, reasoning, answer")],
    labels: Annotated[Path, typer.Option(help="CSV or JSONL: label, description, region")],
    out: Annotated[Path, typer.Option(help="run folder, new or to be continued")],
    kinds: Annotated[str, typer.Option(help="kinds of events, with commas")] = "region,label,departure",
    alpha: Annotated[float, typer.Option(help="level of the false discovery rate", min=0.0, max=1.0)] = 0.05,
    seed: Annotated[int, typer.Option(help="seed of splits, donors and permutations", min=0)] = 0,
    draws: Annotated[int, typer.Option(help="permutations", min=99)] = 9_999,
    caliper: Caliper = 0.25,
    minimum: Minimum = 30,
    target: Annotated[float, typer.Option(help="joint recovery that a head set must reach", min=0.0, max=1.0)] = 0.8,
    random_sets: Annotated[int, typer.Option(help="random sets that a head set is held against", min=20)] = 1_000,
    held_out: Annotated[int, typer.Option(help="most evaluation transcripts that sets are judged on; 0 for all", min=0)] = 0,
    cue: Annotated[str, typer.Option(help="text that asks for the region of code {number} ('\\ncue {number}:'), for elicitation; none: left out")] = "",
    region_by: RegionBy = None,
    cut_from: Annotated[str, typer.Option(help="what cuts for the cue count back from: code or answer")] = "code",
    single_heads: Annotated[bool, typer.Option("--single-heads", help="stop after single heads: no sets, knock-in, families or blocked reads")] = False,
    given: Annotated[bool, typer.Option(help="answers are not the model's own greedy output: keep choices that lost")] = False,
    exclude_emitted: Annotated[bool, typer.Option("--exclude-emitted", help="labels given already are no longer alive: for answers written within the labels")] = False,
    sanity: Annotated[str, typer.Option(help="none, pseudo-events or random-weights: runs that should find nothing")] = "none",
    dtype: Dtype = "float32",
    device: Device = None,
    memory: Memory = 512,
    with_text: Annotated[bool, typer.Option("--with-text", help="let one example with its text into the report")] = False,
    as_json: AsJson = False,
) -> None:
    """Find the heads that decide in what a model wrote."""
    from .survey import Options
    from .workflow import discover_files, kinds_of, show

    if sanity not in ("none", "pseudo-events", "random-weights"):
        raise InputError(f"unknown sanity run {sanity!r}: choose none, pseudo-events or random-weights")
    if cut_from not in ("code", "answer"):
        raise InputError(f"unknown place {cut_from!r} to cut from: choose code or answer")
    random = sanity == "random-weights"
    options = Options(kinds_of(kinds), alpha, seed=seed, draws=draws, caliper=caliper, minimum=minimum, greedy=not (given or random), target=target, random_sets=random_sets,
                      held_out=held_out, cue=cue.replace("\\n", "\n"), cut_from=cut_from, exclude_emitted=exclude_emitted, together=sanity == "none" and not single_heads, pseudo=sanity == "pseudo-events")
    state = discover_files(model, transcripts, labels, out, options, dtype=dtype, device=device, memory=memory * 2**20, with_text=with_text, random_weights=random,
                           regions=region_by)
    if state is not None:
        typer.echo(json.dumps(state["summary"]) if as_json else show(out))


@labels_app.command(name="icd10cm", epilog=examples("labels icd10cm"))
def labels_icd10cm(
    out: Annotated[Path, typer.Option(help="CSV to write: label, description, region")],
    chapter: Annotated[list[str] | None, typer.Option(help="only these chapters: 9, IX or I00-I99; again for more, or with commas")] = None,
    codes: Annotated[Path | None, typer.Option(help="only these codes: text, one a line, or CSV with a column label or code")] = None,
    notes: Annotated[Path | None, typer.Option(help="only codes seen in these notes, JSONL")] = None,
    at_least: Annotated[int | None, typer.Option(help="in how many notes a code must be seen; 1 if not given", min=1)] = None,
    region: Annotated[str, typer.Option(help="what regions are: category, block or chapter")] = "category",
) -> None:
    """Write billable ICD-10-CM codes.

    With descriptions and regions; codes that are not billable or not known are flagged.
    """
    from .corpora.code_files import write_labels

    typer.echo(f"{write_labels(out, chapter, codes, notes, at_least, region)}\nlabels: {out}")


@app.command(name="show", epilog=examples("show"))
def show_run(
    folder: Annotated[Path, typer.Argument(help="run folder")],
    most: Annotated[int, typer.Option(help="heads of each kind", min=1)] = 5,
    check: Annotated[bool, typer.Option("--check", help="verify that manifest, tables and sets belong together")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what a finished run found."""
    from .run_check import check_run
    from .run_folder import open_run
    from .workflow import show

    if check:
        wrong = check_run(folder)
        if wrong:
            raise InputError(f"{folder}: {'; '.join(wrong)}; restore the files, or run discover again into another folder")
        typer.echo("manifest, tables, sets and summary belong together")
        return
    typer.echo(json.dumps(open_run(folder)["summary"]) if as_json else show(folder, most))


@app.command(epilog=examples("report"))
def report(folder: Annotated[Path, typer.Argument(help="run folder")]) -> None:
    """Write the report of a finished run again."""
    from .workflow import rebuild_report

    typer.echo(str(rebuild_report(folder)))


@app.command(name="compare", epilog=examples("compare"))
def compare_runs(
    one: Annotated[Path, typer.Argument(help="run folder")],
    other: Annotated[Path, typer.Argument(help="another run folder")],
    figure: Annotated[Path | None, typer.Option(help="write a figure of both to this HTML file")] = None,
    as_json: AsJson = False,
) -> None:
    """Put two finished runs side by side."""
    from .comparison import compare
    from .workflow import write_figure

    found = compare(one, other)
    if figure is not None:
        write_figure(found, figure)
    typer.echo(found.to_frame().to_json(orient="records") if as_json else str(found))


@app.command(epilog=examples("score"))
def score(
    transcripts: Annotated[Path, typer.Option(help="JSONL: id, prompt or messages, reasoning, answer, labels (gold)")],
    labels: Annotated[Path, typer.Option(help="CSV or JSONL: label, description, region")],
    model: Annotated[str | None, typer.Option(help="only for transcripts with messages: the model whose chat template they go through")] = None,
    as_json: AsJson = False,
) -> None:
    """Hold answers against gold labels.

    Precision, recall, F1, and what could not be read.
    """
    from .workflow import score_files

    found = score_files(transcripts, labels, model)
    typer.echo(json.dumps(found.to_dict()) if as_json else str(found))


@app.command(epilog=examples("verify"))
def verify(
    model: Annotated[str, typer.Option(help="model folder, .gguf file or hub name")],
    dtype: Dtype = "float32",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Test whether a model can be handled exactly.

    Prints what was tried. Exit code 0: exact, or slow but exact; 2: refused.
    """
    from ._self_test import self_test
    from .model import DecisionModel

    loaded = DecisionModel.from_pretrained(model, dtype=dtype, device=device, test=False)
    result = self_test(loaded.hooked, loaded.tokenizer)
    typer.echo(json.dumps(result.to_dict()) if as_json else str(result))
    if result.verdict == "refused":
        raise typer.Exit(2)


@app.command(name="prepare", epilog=examples("prepare"))
def prepare_notes(
    corpus: Annotated[str, typer.Argument(help="mimic-iv, mdace or codiesp")],
    path: Annotated[Path, typer.Option(help="folder of the corpus as it was released")],
    out: Annotated[Path, typer.Option(help="write the notes here, a .jsonl file; counts go to the same name with .json")],
    labels_out: Annotated[Path | None, typer.Option(help="write the labels that occur here, a .csv file")] = None,
    at_least: Annotated[int, typer.Option(help="fewest notes of a label in that file", min=1)] = 1,
    limit: Annotated[int | None, typer.Option(help="stop after this many notes", min=1)] = None,
    notes_from: Annotated[Path | None, typer.Option(help="mdace: MIMIC-III's NOTEEVENTS.csv or .csv.gz")] = None,
    split: Annotated[str | None, typer.Option(help="mdace, codiesp: train, dev or test")] = None,
    as_json: AsJson = False,
) -> None:
    """Read a corpus of clinical notes with codes.

    What is left out is counted.
    """
    from .corpora.prepare import prepare, show

    record = prepare(corpus, path, out, labels_out, at_least, limit, notes_from, split, progress=True)
    typer.echo(json.dumps(record) if as_json else f"{show(record)}\nwritten: {out}")


app.add_typer(labels_app)
for command in (distill, evaluate, evidence):
    app.command(epilog=examples(command.__name__))(command)
app.add_typer(flip_app)


def main(arguments: list[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    try:
        result = app(arguments, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # asked for nothing: the whole help, as it is laid out
            sys.stderr.write(f"{error.format_message()}\n")
            return 2
        _say(" ".join(error.format_message().split()))
    except InputError as error:
        _say(str(error))
    except OSError as error:  # a disk that is full, a name that is too long, a file that may not be read
        if error.filename is None:
            raise
        _say(f"{error.filename}: {str(error.strerror).lower()}; mend that, or name another file or folder")
    except typer.Abort:
        sys.stderr.write("decisionheads: interrupted\n")
        return 1
    return 2


def _say(sentence: str) -> None:
    """One line on stderr, whatever stands in names and values: nothing that moves a cursor, and no page of it."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in sentence)
    sys.stderr.write(f"decisionheads: {line if len(line) <= LONGEST else f'{line[:LONGEST // 2]} ... {line[-LONGEST // 2:]}'}\n")


def entry() -> None:
    sys.exit(main())
