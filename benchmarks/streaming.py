"""Memory and speed of reading a corpus: invented discharge summaries of growing size, read one at a time.

    python benchmarks/streaming.py [--sizes 10 50 200]

For each size (MiB of text, packed with gzip): the peak of what Python allocates while the notes pass
(tracemalloc), and, in a run without it, MiB of text a second. Needs no model.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path

from decisionheads.corpora import mimic_iv

LENGTH = 10_000  # characters of a note, as long as discharge summaries are
WORDS = ["heart", "failure", "fever\r\npain", '"stable"', "dose,", "two\ndaily", "renal"]


def invent(folder: Path, mib: int) -> None:
    """Files of MIMIC-IV's form: one note and eight codes an admission, a tenth as many notes left out."""
    rng, n = random.Random(0), mib * 2**20 // LENGTH
    (folder / "note").mkdir(parents=True)
    (folder / "hosp").mkdir()
    with gzip.open(folder / "note/discharge.csv.gz", "wt", 1, newline="", encoding="utf-8") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["note_id", "subject_id", "hadm_id", "note_type", "note_seq", "charttime", "storetime", "text"])
        for i in range(n):
            text = " ".join(rng.choices(WORDS, k=LENGTH // 7))
            writer.writerow([f"{i}-DS-1", i, i if i % 10 else "", "DS", 1, "", "", text])
    with gzip.open(folder / "hosp/diagnoses_icd.csv.gz", "wt", 1, newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["subject_id", "hadm_id", "seq_num", "icd_code", "icd_version"])
        for i in range(n):
            writer.writerows([i, i, k, f"I{rng.randrange(10, 99)}{rng.randrange(100)}  ", 10] for k in range(8))


def read(folder: Path) -> int:
    """Characters of all notes that are kept."""
    return sum(len(note.note) for note in mimic_iv.notes(folder, Counter()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 50, 200], help="MiB of text")
    args = parser.parse_args()
    print(f"{'MiB of text':>12}{'notes':>8}{'peak MiB':>10}{'MiB / s':>9}")
    for mib in args.sizes:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            invent(folder, mib)
            started = time.perf_counter()
            read(folder)
            seconds = time.perf_counter() - started
            tracemalloc.start()
            read(folder)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            print(f"{mib:>12}{mib * 2**20 // LENGTH:>8}{peak / 2**20:>10.1f}{mib / seconds:>9.0f}", flush=True)


if __name__ == "__main__":
    main()
