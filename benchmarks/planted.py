"""Planted ground truth: are heads that decide by construction found, and nothing in random models?

    python benchmarks/planted.py [--models 10] [--texts 90] [--first 0]

For every planted model (tests/planted.py): how many of its deciders `discover` selects, how many of the other
heads it selects and max-T reports at .05, and how the general head, which matters for every next token, compares
with the deciders: by its effect, which is as large, and by its q-value against null tokens. Then random models of
the same shapes, on texts of their own whose labels were drawn afterwards: max-T may report a head in one of twenty.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from decisionheads import DecisionModel  # noqa: E402
from decisionheads.discovery import discover  # noqa: E402
from tests.planted import HEADS, OPTIONS, draw, labels, plan, plant, plant_nothing, with_labels_drawn, write  # noqa: E402


def planted(seed: int, texts: int) -> list:
    """A row of the first table."""
    with tempfile.TemporaryDirectory() as folder:
        truth = plant(Path(folder), seed)
        model = DecisionModel.from_pretrained(folder)
    asked = draw(texts, seed)
    written = write(model, asked)
    found = discover(model, written, labels(), **OPTIONS).kinds["region"]
    table = found.table.set_index(["layer", "head"])
    deciders, others = table.loc[list(truth.deciders)], table.drop(list(truth.deciders))
    general = table.loc[truth.general]
    right = sum(a.text == b.text for a, b in zip(asked, written, strict=True)) / texts
    return [seed, f"{truth.layers} x {HEADS}", len(deciders), int(deciders["selected"].sum()),
            len(others), int(others["selected"].sum()), int((others["p_maxt"] <= 0.05).sum()), f"{right:.0%}", len(found.matched.kept),
            f"{deciders['effect'].min():.2f}", f"{general['effect']:.2f}", f"{general['ci_low']:.2f} to {general['ci_high']:.2f}", f"{general['q_value']:.2f}"]


def random_weights(seed: int, texts: int) -> list:
    """A row of the second table."""
    with tempfile.TemporaryDirectory() as folder:
        plant_nothing(Path(folder), seed)
        model = DecisionModel.from_pretrained(folder)
    found = discover(model, with_labels_drawn(write(model, draw(texts, seed)), seed), labels(), **OPTIONS).kinds["region"]
    p = found.calibration.p_maxt
    return [seed, f"{plan(seed).layers} x {HEADS}", len(p), int((p <= 0.05).sum()), len(found.selected), f"{p.min():.3f}", len(found.matched.kept)]


def table(columns: str, row, seeds: range, texts: int) -> list[list]:
    names = columns.split(", ")
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    rows = []
    for seed in seeds:
        rows.append(row(seed, texts))
        print("| " + " | ".join(map(str, rows[-1])) + " |", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--texts", type=int, default=90)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds, started = range(args.first, args.first + args.models), time.time()
    rows = table("model, layers x heads, deciders, found, other heads, selected, at max-T .05, texts written as planned, calibrated events, "
                 "least decider's effect, general head's effect, 95% interval, its q", planted, seeds, args.texts)
    total = [sum(r[i] for r in rows) for i in range(2, 7)]
    print(f"\nDeciders found: {total[1]} of {total[0]}; other heads selected: {total[3]} of {total[2]} ({total[3] / total[2]:.1%}), at max-T .05: {total[4]}.\n")
    rows = table("random model, layers x heads, heads, at max-T .05, selected, smallest max-T p, calibrated events", random_weights, seeds, args.texts)
    print(f"\nRandom models with a head at max-T .05: {sum(r[3] > 0 for r in rows)} of {len(rows)} ({0.05 * len(rows):g} expected); "
          f"heads at max-T .05: {sum(r[3] for r in rows)} of {sum(r[2] for r in rows)}. {time.time() - started:.0f} s.")


if __name__ == "__main__":
    main()
