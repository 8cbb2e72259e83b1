"""What larger models would need for 60,000 tokens of candidates: memory and time, from shapes and a measured efficiency.

    python benchmarks/projection.py --prefill .5 --rows .2

The two numbers are shares of a machine's matrix-multiplication speed that reading and rows reach;
`benchmarks/candidates.py` gives the seconds, `--measure` the speed of this machine. Assumed: the same
shares elsewhere, dense half-precision peaks of the vendors' data sheets, rows that enter halfway on average.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shape:
    """A decoder: parameters, layers, query heads, key-value heads, width of a head."""

    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    d_head: int

    def kept(self, tokens: int, size: int = 2) -> float:
        """Bytes of keys and values."""
        return 2 * self.layers * self.kv_heads * self.d_head * tokens * size

    def read(self, tokens: int, before: int = 0) -> float:
        """Operations of reading tokens after others."""
        return 2 * self.parameters * tokens + 4 * self.layers * self.heads * self.d_head * (before * tokens + tokens**2 / 2)

    def sweep(self, before: int) -> float:
        """Operations of ablating every head at one position; rows enter at their layer, halfway on average."""
        return self.layers * self.heads * self.read(1, before) / 2


@dataclass(frozen=True)
class Machine:
    """An accelerator: memory in bytes, dense half-precision operations a second."""

    name: str
    memory: float
    speed: float


MODELS = (Shape("8B", 8.0e9, 32, 32, 8, 128), Shape("70B", 70.6e9, 80, 64, 8, 128))
MACHINES = (Machine("80 GB (H100 SXM)", 80e9, 989e12), Machine("141 GB (H200 SXM)", 141e9, 989e12), Machine("192 GB (B200)", 192e9, 2.25e15))


def measured_speed(threads: int) -> float:
    """Operations a second of a large float32 product on this machine."""
    torch.set_num_threads(threads)
    a, best = torch.randn(1536, 1536), 0.0
    for _ in range(8):
        started = time.perf_counter()
        a @ a
        best = max(best, 2 * 1536**3 / (time.perf_counter() - started))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--prefill", type=float, default=0.5)
    parser.add_argument("--rows", type=float, default=0.2)
    parser.add_argument("--shared", type=int, default=60_000)
    parser.add_argument("--own", type=int, default=3_000, help="tokens of note, reasoning and answer")
    parser.add_argument("--positions", type=int, default=60, help="events and matched nulls of a transcript that is scored")
    parser.add_argument("--transcripts", type=int, default=240, help="of which 40% are scored")
    parser.add_argument("--measure", action="store_true", help="print the speed of this machine and stop")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.measure:
        print(f"{measured_speed(args.threads) / 1e9:.0f} GFLOP/s of float32 products with {args.threads} threads")
        return
    total = args.shared + args.own
    print(f"{args.shared:,} shared tokens, {args.own:,} of a transcript's own, {args.positions} positions scored; reading at {args.prefill:.0%} and rows at {args.rows:.0%} of the peak, 16 bit")
    for m in MODELS:
        weights, shared = 2 * m.parameters, m.kept(args.shared)
        print(f"\n{m.name}: weights {weights / 1e9:.0f} GB, {m.kept(1) / 1024:.0f} KiB of keys and values a token: {shared / 1e9:.1f} GB shared, {m.kept(total) / 1e9:.1f} GB for a fork of it")
        for a in MACHINES:
            need = weights + shared + m.kept(total)
            parts = -(-need // (0.9 * a.memory))  # accelerators that one copy is spread over
            speed = a.speed * parts
            first, own = m.read(args.shared) / (speed * args.prefill), m.read(args.own, args.shared) / (speed * args.prefill)
            sweep = args.positions * m.sweep(total) / (speed * args.rows)
            minutes = lambda copies: (first + args.transcripts * (own + 0.4 * sweep) / copies) / 60  # noqa: B023, E731
            where = f"{need / 1e9:.0f} GB" if parts == 1 else f"does not fit; over {parts:.0f} of them (not supported), {need / parts / 1e9:.0f} GB on each"
            print(f"  {a.name}: {where}; shared prefix {first:.1f} s, own tokens {own:.2f} s, every head at {args.positions} positions {sweep:.1f} s; "
                  f"single heads of {args.transcripts} transcripts {minutes(1):.0f} min, with 8 copies {minutes(8):.1f} min")


if __name__ == "__main__":
    main()
