"""An invented clinic in the files of MIMIC-IV: discharge summaries whose findings are descriptions of ICD-10-CM codes.

    pip install -c constraints.txt -e ".[icd]"
    python examples/invented_clinic.py --out clinic

writes `note/discharge.csv.gz`, `hosp/diagnoses_icd.csv.gz` and `hosp/d_icd_diagnoses.csv.gz` of the real
schema, and `codes.txt`, a short list of codes that were drawn from. No patient is in them: they show the
way from such files to a report on a machine that may not hold the real ones.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
from collections import defaultdict
from pathlib import Path

import simple_icd_10_cm as cm

COURSE = ("was treated and improved over {days} days", "responded to {dose} mg twice daily", "was observed for {days} days", "needed {dose} ml of fluids")
HISTORY = ("no known allergies", "a fall {days} years ago", "an appendectomy at the age of {age}", "{dose} pack years of smoking")


def codes(rng: random.Random, categories: int, each: int) -> list[str]:
    """Billable codes with short descriptions, some of each of a few categories."""
    found = defaultdict(list)
    for code in dict.fromkeys(cm.get_all_codes(with_dots=True)):
        if cm.is_leaf(code) and len(code) == 5 and code[0] in "EFIJKLMN" and 12 <= len(cm.get_description(code)) <= 48:
            found[code[:3]].append(code)
    chosen = rng.sample(sorted(c for c, members in found.items() if len(members) >= each), categories)
    return sorted(code for c in chosen for code in rng.sample(found[c], each))


def note(rng: random.Random, right: list[str]) -> str:
    fill = lambda text: text.format(days=rng.randint(2, 9), dose=rng.randint(20, 90), age=rng.randint(6, 40))  # noqa: E731
    findings = [cm.get_description(code) for code in right]
    return (f"Chief Complaint: {findings[0]}\n\nHistory of Present Illness:\nA patient of {rng.randint(40, 90)} years with {fill(rng.choice(HISTORY))}. "
            + " ".join(f"{finding} {fill(rng.choice(COURSE))}." for finding in findings)
            + "\n\nDischarge Diagnosis:\n" + "".join(f"{n}. {finding}\n" for n, finding in enumerate(findings, 1)))


def write(path: Path, header: list[str], rows: list[list]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8", newline="") as out:
        csv.writer(out).writerows([header, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--notes", type=int, default=60)
    parser.add_argument("--categories", type=int, default=12)
    parser.add_argument("--each", type=int, default=3, help="codes of each category")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    space = codes(rng, args.categories, args.each)
    notes, diagnoses = [], []
    for i in range(args.notes):
        subject, admission = 10_000_000 + i, 20_000_000 + i
        right = rng.sample(space, rng.randint(1, 2))
        notes.append([f"{subject}-DS-1", subject, admission, "DS", 1, "2180-01-01 00:00:00", "2180-01-02 00:00:00", note(rng, right)])
        diagnoses += [[subject, admission, n, code.replace(".", ""), 10] for n, code in enumerate(right, 1)]
    write(args.out / "note" / "discharge.csv.gz", ["note_id", "subject_id", "hadm_id", "note_type", "note_seq", "charttime", "storetime", "text"], notes)
    write(args.out / "hosp" / "diagnoses_icd.csv.gz", ["subject_id", "hadm_id", "seq_num", "icd_code", "icd_version"], diagnoses)
    write(args.out / "hosp" / "d_icd_diagnoses.csv.gz", ["icd_code", "icd_version", "long_title"], [[code.replace(".", ""), 10, cm.get_description(code)] for code in space])
    (args.out / "codes.txt").write_text("\n".join(space) + "\n")
    print(f"{len(notes)} notes with {len(space)} codes: {args.out}")


if __name__ == "__main__":
    main()
