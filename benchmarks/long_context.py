"""All heads at several decisions of a prompt of 60,000 tokens, on a small random Llama.

    python benchmarks/long_context.py [--tokens 60000] [--events 4] [--threads 2] [--memory 512]

The model has 4 layers of 8 heads over 256 dimensions, grouped to 2 key-value heads, and a context that is
long enough. Peak memory is that of the whole process. The clean rows must give the prefill's logits.
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np
import torch
from common import forget_peak, machine, peak, timed
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from decisionheads import DecisionModel, HeadSet, MeanAblate
from decisionheads._packs import plan_packs
from decisionheads.branches import Branch, branch_logits

VOCABULARY = 8192


def small_llama(folder: str, context: int) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
                                 num_key_value_heads=2, max_position_embeddings=context, initializer_range=0.1)).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), unk_token="w0").save_pretrained(folder)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--events", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", type=int, default=512, help="MiB for one pack of rows")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        small_llama(folder, args.tokens + 8)
        model = DecisionModel.from_pretrained(folder)
    hooked, rng = model.hooked, np.random.default_rng(0)
    ids = torch.tensor(rng.integers(8, VOCABULARY, args.tokens))
    positions = tuple(args.tokens - 1 - 37 * n for n in range(args.events))
    means = rng.normal(0, 0.3, (hooked.n_layers, hooked.n_heads, hooked.d_head)).astype(np.float32)
    print(f"random Llama, 4 layers x 8 heads, d_model 256; {args.tokens:,} tokens; {machine(args.threads)}\nloaded: {forget_peak():,.0f} MiB", flush=True)
    taken, prefix = timed(lambda: hooked.prefill(ids, positions))
    print(f"prefill: {taken:.0f} s; peak {peak():,.0f} MiB", flush=True)
    branches = [Branch(t) for t in positions] + [Branch(t, (), (MeanAblate(HeadSet([head]), means),), (10, 11)) for t in positions for head in hooked.heads]
    taken, out = timed(lambda: dict(branch_logits(hooked, prefix, branches, args.memory * 2**20)))
    error = max(float((out[i][0] - prefix.logits[i]).abs().max() / prefix.logits[i].std()) for i in range(len(positions)))
    clean = {t: float(prefix.logits[i][10] - prefix.logits[i][11]) for i, t in enumerate(positions)}
    effects = [clean[b.position] - float(out[i][0, 0] - out[i][0, 1]) for i, b in enumerate(branches) if b.ids]
    assert error <= 1e-4 and np.abs(effects).max() > 1e-3
    print(f"all {len(hooked.heads)} heads at {args.events} decisions: {taken:.0f} s in {len(plan_packs(hooked, branches, args.memory * 2**20))} packs; peak {peak():,.0f} MiB; "
          f"clean rows within {error:.0e} of the prefill; largest effect {np.abs(effects).max():.3f} logits")


if __name__ == "__main__":
    main()
