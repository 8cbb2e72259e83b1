"""A training step with attention read at decisions, against plain sdpa and against whole eager patterns.

    python benchmarks/event_rows.py [--lengths 256 1024 2048] [--threads 2]

A random Llama of SmolLM2-135M's width with 6 layers, one text with 12 events, a pool of 12 heads; forward and backward of
cross-entropy plus distance. Seconds are medians of three after one for warming up; the peak is that of a process of
its own, less what it holds after loading.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

import torch
from common import forget_peak, machine, peak, timed

WAYS = ("plain", "rows", "patterns")
EVENTS, VOCABULARY = 12, 8192


def one(way: str, length: int, threads: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from decisionheads import HeadSet
    from decisionheads.distillation.groups import GROUPS
    from decisionheads.distillation.loss import mistill_loss
    from decisionheads.distillation.rows import EventAttention, EventBatch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=length))
    model.set_attn_implementation("eager" if way == "patterns" else "sdpa")
    pool = {"departure": HeadSet([(layer, head) for layer in (1, 2, 3, 4) for head in (0, 4, 8)])}
    ids = torch.randint(0, VOCABULARY, (1, length))
    positions = torch.linspace(length // 2, length - 2, EVENTS).long()[None]
    groups = torch.randint(0, len(GROUPS), (1, EVENTS, length), dtype=torch.int8)
    groups[torch.arange(length) > positions[..., None]] = -1
    wanted = torch.rand(EVENTS, len(GROUPS))
    watched = EventAttention(model, pool)

    def step() -> float:
        model.zero_grad()
        if way == "rows":
            with watched.reading(EventBatch(positions, torch.zeros_like(positions), groups)):
                loss = model(input_ids=ids, labels=ids).loss
            loss = loss + mistill_loss(wanted, watched.mass[0])
        elif way == "patterns":
            out = model(input_ids=ids, labels=ids, output_attentions=True)
            row = torch.stack([out.attentions[h.layer][0, h.head, positions[0]] for h in pool["departure"]]).mean(0)
            member = torch.stack([groups[0] == g for g in range(len(GROUPS))], -1).float()
            loss = out.loss + mistill_loss(wanted, torch.einsum("ek,ekg->eg", row, member))
        else:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return float(loss)

    before = forget_peak()
    found = [timed(step) for _ in range(4)]
    print(statistics.median(seconds for seconds, _ in found[1:]), peak() - before, found[0][1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return one(args.one, args.lengths[0], args.threads)
    print(f"random Llama, 6 layers x 9 heads, d_model 576; {machine(args.threads)}")
    print("tokens   plain s   rows / plain   patterns / plain   peak MiB: plain, rows, patterns   same loss")
    for length in args.lengths:
        found = {way: [float(x) for x in subprocess.run([sys.executable, __file__, "--one", way, "--lengths", str(length), "--threads", str(args.threads)], capture_output=True, text=True, check=True).stdout.split()]
                 for way in WAYS}
        plain, rows, patterns = (found[way] for way in WAYS)
        print(f"{length:6,} {plain[0]:9.2f} {rows[0] / plain[0]:14.2f} {patterns[0] / plain[0]:18.2f}   {plain[1]:15,.0f}, {rows[1]:,.0f}, {patterns[1]:,.0f} {abs(rows[2] - patterns[2]):24.0e}", flush=True)
    return None


if __name__ == "__main__":
    main()
