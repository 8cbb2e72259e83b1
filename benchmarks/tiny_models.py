"""What the embedded models know: teacher-forced accuracy, and what they write by themselves.

    python benchmarks/tiny_models.py [--texts 40]

Free-running: texts that come to an answer, whose steps take the three coded findings once each, and codes
that fit the finding and were not rejected by the model's own reasoning.
"""

from __future__ import annotations

import argparse
import json

import torch

from decisionheads import DecisionModel, tiny


def free_running(name: str, texts: int) -> tuple[int, int, int, int]:
    """Texts that end, texts whose steps take each finding once, right codes, codes in all."""
    model, space = DecisionModel.from_pretrained(tiny.path(name), test=False), tiny.labels()
    drawn = tiny.draw(texts, seed=31)
    ended = complete = right = codes = 0
    for clinic in drawn:
        written = model.generate("".join(piece.text for piece in clinic.prompt()), 110)
        reasoning, _, answer = written.partition("answer\n")
        ended += written.endswith("<end>")
        taken = [line.split()[2] for line in reasoning.splitlines() if line.startswith("step") and len(line.split()) > 2]
        complete += sorted(taken) == sorted(f.concept for f in clinic.findings)
        rejected = {m.label for m in space.mentions(reasoning)}
        fits = {f.concept: {e.label for e in (f.right, f.near_miss) if e} for f in clinic.findings}
        for line in answer.splitlines():
            given = [m.label for m in space.mentions(line)]
            if line.startswith("code") and given:
                codes += 1
                right += given[0] in fits.get(line.split()[2], set()) - rejected
    return ended, complete, right, codes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--texts", type=int, default=40)
    texts = parser.parse_args().texts
    torch.set_num_threads(1)
    print("| model | parameters | region | label | departure | cue | region, label, departure without attention | steps, minutes | free-running: ended, complete, right codes |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in tiny.NAMES:
        record = json.loads((tiny.path(name) / "training.json").read_text())
        model = DecisionModel.from_pretrained(tiny.path(name), test=False)
        size = sum(p.numel() for p in model.hooked.plain.parameters())
        know, without = record["accuracy"], record["accuracy_without_attention"]
        ended, complete, right, codes = free_running(name, texts)
        shown = " | ".join(f"{know[role]:.3f}" for role in ("region", "label", "departure", "cue"))
        print(f"| {name} | {size // 1000}k | {shown} | {', '.join(f'{without[k]:.2f}' for k in ('region', 'label', 'departure'))} | "
              f"{record['steps']}, {record['seconds'] / 60:.0f} | {ended}/{texts}, {complete}/{texts}, {right}/{codes} |", flush=True)


if __name__ == "__main__":
    main()
