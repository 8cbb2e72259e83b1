"""A trie of 300,000 titles: how long it takes to build, how much memory, how fast a query is.

    python benchmarks/label_space.py [--labels 300000]
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import numpy as np

from decisionheads import LabelSpace

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.bpe import bpe  # noqa: E402

WORDS = ["acute", "chronic", "open", "closed", "left", "right", "upper", "lower", "initial", "subsequent", "sequela", "displaced", "fracture", "burn", "of", "hand", "foot", "arm", "leg", "head", "neck"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--labels", type=int, default=300_000)
    n = parser.parse_args().labels
    rng = np.random.default_rng(0)
    labels = [f"{' '.join(rng.choice(WORDS, 5))} {i}" for i in range(n)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    space = LabelSpace(labels, lambda label: label.split()[0])
    trie = space.trie(bpe(), "\n", "")
    built = time.perf_counter() - started
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    started = time.perf_counter()
    for i in rng.integers(0, n, 100):
        node = trie.root
        for token in trie.sequence(int(trie.rank[i])):
            node = trie.children(node)[token]
    walked = (time.perf_counter() - started) / 100
    text = " and ".join(labels[i] for i in rng.integers(0, n, 100))
    started = time.perf_counter()
    found = len(space.mentions(text))
    parsed = time.perf_counter() - started
    print(f"{n} labels: built in {built:.1f} s, {peak:.0f} MB more; walking one label {1e3 * walked:.2f} ms; "
          f"{found} mentions in {len(text)} characters {1e3 * parsed:.1f} ms")


if __name__ == "__main__":
    main()
