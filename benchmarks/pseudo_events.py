"""Sanity: random null tokens called events, on the trained embedded models. Nothing should be found.

    python benchmarks/pseudo_events.py [--runs 20] [--texts 120]

Prints, for each model, in how many runs max-T reports any head at .05 (the level allows one in twenty), and
how many heads Benjamini-Hochberg and the least effect select in all.
"""

from __future__ import annotations

import argparse

import torch

from decisionheads import DecisionModel, tiny
from decisionheads.discovery import discover


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--texts", type=int, default=120)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | runs | runs with a head at max-T .05 | selected heads in all | tests in all |\n|---|---|---|---|---|")
    for name in ("llama", "gpt2"):
        model, space = DecisionModel.from_pretrained(tiny.path(name), test=False), tiny.labels()
        hits = selected = tests = 0
        for seed in range(args.runs):
            found = discover(model, tiny.generate(model, args.texts, seed=1000 + seed), space, seed=seed, caliper=0.5, minimum=5, draws=999, together=False, pseudo=True)
            hits += min(r.calibration.p_maxt.min() for r in found.kinds.values()) <= 0.05
            selected += sum(len(r.selected) for r in found.kinds.values())
            tests += sum(len(r.table) for r in found.kinds.values())
        print(f"| {name} | {args.runs} | {hits} | {selected} | {tests} |", flush=True)


if __name__ == "__main__":
    main()
