"""Example calls under the help of each command; a test parses every one of them."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("decisionheads demo", "decisionheads demo --model gpt2 --texts 100 --out small"),
    "generate": ("decisionheads generate --model M --notes notes.jsonl --labels labels.csv \\\n      --out t.jsonl",
                 "decisionheads generate --model M --notes notes.jsonl --labels labels.csv \\\n      --listing compact --within-labels --longest 2048 --out t.jsonl"),
    "discover": ("decisionheads discover --model M --transcripts t.jsonl --labels labels.csv \\\n      --out run",
                 "decisionheads discover --model M --transcripts t.jsonl --labels labels.csv \\\n      --kinds region --single-heads --json --out quick",
                 "accelerate launch --multi_gpu -m decisionheads discover --model M \\\n      --transcripts t.jsonl --labels labels.csv --out run"),
    "show": ("decisionheads show run", "decisionheads show run --check", "decisionheads show run --json | jq .global.set"),
    "report": ("decisionheads report run",),
    "compare": ("decisionheads compare run other-run --figure both.html", "decisionheads compare run other-run --json"),
    "score": ("decisionheads score --transcripts t.jsonl --labels labels.csv",),
    "verify": ("decisionheads verify --model M", "decisionheads verify --model M --dtype bfloat16 --json"),
    "prepare": ("decisionheads prepare mimic-iv --path physionet.org/files \\\n      --out notes.jsonl --labels-out labels.csv --at-least 10",
                "decisionheads prepare codiesp --path codiesp --split dev --out notes.jsonl"),
    "distill": ("decisionheads distill --teacher M --run run --transcripts t.jsonl \\\n      --held-out h.jsonl --labels labels.csv --student S --out students",
                "decisionheads distill --teacher M --run run --transcripts t.jsonl \\\n      --held-out h.jsonl --labels labels.csv --student S --lora 8 \\\n      --arms cot,mistill --seeds 6 --out students"),
    "evaluate": ("decisionheads evaluate --model S --held-out h.jsonl --labels labels.csv \\\n      --out judged.json",),
    "evidence": ("decisionheads evidence --model M --run run --spans mdace.jsonl \\\n      --labels labels.csv --out evidence",
                 "decisionheads evidence --model M --run run --model S --run s-run \\\n      --spans mdace.jsonl --in-domain mdace.jsonl --spans codiesp.jsonl \\\n      --labels labels.csv --out evidence"),
    "labels icd10cm": ("decisionheads labels icd10cm --out labels.csv", "decisionheads labels icd10cm --chapter IX --notes notes.jsonl \\\n      --at-least 10 --out labels.csv"),
    "flip register": ("decisionheads flip register --model M --spans mdace.jsonl \\\n      --labels labels.csv --like t.jsonl --out plan.json",),
    "flip run": ("decisionheads flip run --plan plan.json --out flipped",),
}


def examples(command: str) -> str:
    """The calls as the last lines of a help text, kept as they are broken here."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[command])
