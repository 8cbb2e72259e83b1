"""The command line: a thin program over the public API.

Exit codes: 0 done; 2 bad input, one sentence on stderr; 1 our own fault, with a traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .errors import InputError

_UsageError = typer.BadParameter.__mro__[2]  # ClickException, wherever this typer keeps click
app = typer.Typer(name="decisionheads", help="Which attention heads decide what a language model writes.",
                  no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="embedded model: llama or gpt2")] = "llama",
    texts: Annotated[int, typer.Option(help="how many texts the model writes", min=4)] = 40,
    seed: Annotated[int, typer.Option(help="seed of the texts")] = 0,
    out: Annotated[Path | None, typer.Option(help="new folder for events.csv and effects.safetensors")] = None,
) -> None:
    """Find the heads that decide in an embedded model, from what it writes itself."""
    from .demo import run_demo

    run_demo(model, texts, seed, out)


@app.command()
def verify(
    model: Annotated[str, typer.Option(help="model folder, .gguf file or hub name")],
    dtype: Annotated[str, typer.Option(help="float32, float64, float16 or bfloat16")] = "float32",
    device: Annotated[str | None, typer.Option(help="torch device")] = None,
) -> None:
    """Test whether a model can be handled exactly, and print what was tried."""
    from ._self_test import self_test
    from .model import DecisionModel

    loaded = DecisionModel.from_pretrained(model, dtype=dtype, device=device, test=False)
    result = self_test(loaded.hooked, loaded.tokenizer)
    typer.echo(str(result))
    if result.verdict == "refused":
        raise typer.Exit(2)


def main(arguments: list[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    try:
        result = app(arguments, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except _UsageError as error:
        sys.stderr.write(f"decisionheads: {' '.join(error.format_message().split())}\n")
    except InputError as error:
        sys.stderr.write(f"decisionheads: {error}\n")
    except typer.Abort:
        sys.stderr.write("decisionheads: interrupted\n")
        return 1
    return 2


def entry() -> None:
    sys.exit(main())
