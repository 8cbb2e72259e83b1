"""The demo: an embedded model writes, and its decisions are taken apart head by head."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from .errors import InputError


def run_demo(name: str, texts: int, seed: int, out: Path | None) -> None:
    """Generate, find events, ablate every head exactly, and print the strongest heads of each kind.

    Args:
        name: `llama` or `gpt2`.
        texts: how many texts to generate; a third of them, at least two, only give reference means.
        seed: of the texts.
        out: a new folder for `events.csv` and `effects.safetensors`.
    """
    if name not in ("llama", "gpt2"):
        raise InputError(f"there is no embedded model {name!r} for the demo: choose llama or gpt2")
    if out is not None and out.exists():
        raise InputError(f"{out} already exists; name a new folder")

    import torch
    import typer
    from tqdm import tqdm

    from . import tiny
    from .ablation import Ablation, reference_means
    from .events import KINDS, Events
    from .model import DecisionModel

    torch.set_num_threads(1)  # matrices this small are slower on two
    model = DecisionModel.from_pretrained(tiny.path(name))
    typer.echo(f"{model!r}")
    transcripts = tiny.generate(model, texts, seed)
    space = tiny.labels()
    found = [model.find_events(transcript, space) for transcript in transcripts]
    typer.echo(f"{len(transcripts)} of {texts} texts came to an answer: {Events.join(found)!r}")
    readings = [model.read(t, [e for e in events if e.primary]) for t, events in zip(transcripts, found, strict=True)]
    cut = max(2, len(readings) // 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        means = reference_means(model, readings[:cut], minimum=min(30, cut))
    typer.echo(f"{means!r}")
    ablation = Ablation.join(model.mean_ablate(reading, means) for reading in tqdm(readings[cut:], desc="ablating every head", unit="text"))
    direct = [model.attribute(reading, means, steps=3).gradient.values for reading in readings[cut:]]
    attribution = np.concatenate(direct)
    for kind in KINDS:
        here = ablation.of_kind(kind)
        if not len(here.margins):
            typer.echo(f"\n{kind}: no events")
            continue
        rows = [i for i, e in enumerate(ablation.events) if e.kind == kind]
        m, m0 = here.margins.mean(), here.floors.mean()
        typer.echo(f"\n{kind}: {len(here.margins)} events, mean margin m {m:.2f} logits, {m0:.2f} with every head ablated")
        typer.echo("  head    effect  [95% interval]   % of m   attribution")
        for head, effect in here.scores.top(5):
            low, high = _interval(here.scores.values[:, head.layer, head.head], [e.transcript for e in here.events], seed)
            estimate = attribution[rows, head.layer, head.head].mean()
            typer.echo(f"  {head!s:6}{effect:+8.2f}  [{low:+.2f}, {high:+.2f}]  {100 * effect / m:+6.0f}%  {estimate:+11.2f}")
    typer.echo("\nEffects are exact (one forward per head, packed) and not yet calibrated against a null.")
    if out is not None:
        out.mkdir(parents=True)
        ablation.to_frame().to_csv(out / "events.csv", index=False)
        ablation.scores.save(out / "effects.safetensors")
        typer.echo(f"wrote {out}")


def _interval(values: np.ndarray, groups: list[str], seed: int, draws: int = 2000) -> tuple[float, float]:
    """A 95% bootstrap interval of the mean that draws whole transcripts."""
    names = sorted(set(groups))
    index = np.array([names.index(g) for g in groups])
    sums = np.bincount(index, values, len(names))
    counts = np.bincount(index, minlength=len(names))
    drawn = np.random.default_rng(seed).integers(0, len(names), (draws, len(names)))
    low, high = np.percentile(sums[drawn].sum(1) / counts[drawn].sum(1), [2.5, 97.5])
    return float(low), float(high)
