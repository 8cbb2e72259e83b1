"""Train the embedded models: `python -m decisionheads.tiny.train llama --out DIR`.

Two families (llama, gpt2), each as a teacher that knows regions, labels and departures, and as a
student (`--student`) that was shown answers which ignore what the reasoning rejected, so that it
looks labels up and tosses a coin where there was a near-miss. Training goes by steps, holds its learning rate
until departures and cues are learned, then decays; what fails the gate (accuracy on fresh texts,
then a causal smoke test) is thrown away and the next seed is tried.

The models do not start from nothing: see `build`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from .build import INDEX, LENGTH, build
from .clinic import BOS, PAD, Clinic, Finding, Piece, clinic_tokenizer, draw, join

WEIGHT = {"prompt": 0.0, "mark": 0.2, "word": 0.5, "near": 1.0, "region": 1.0, "label": 1.0, "departure": 3.0, "cue": 3.0}
GATED = ("region", "label", "departure", "cue")


# -- texts ----------------------------------------------------------------------------------


def full_text(clinic: Clinic) -> list[Piece]:
    return clinic.prompt() + clinic.reasoning() + clinic.answer()


def coin_text(clinic: Clinic, rng: random.Random) -> list[Piece]:
    """As `full_text`, but the answer takes either label of a finding with a near-miss."""
    flipped = clinic.with_near_miss_swapped()
    answer = replace(clinic, findings=tuple(rng.choice(pair) for pair in zip(clinic.findings, flipped.findings, strict=True)))
    return clinic.prompt() + clinic.reasoning() + answer.answer()


def drill(rng: random.Random, regions: int, labels: int) -> list[Piece]:
    """A list, then a dozen single-qualifier codes: look-ups and nothing else."""
    clinic = draw(rng, regions, labels, 1)
    out = _only_list(clinic) + [Piece("answer", "prompt"), Piece("\n", "prompt")]
    for i in range(12):
        line = _clear(clinic, [rng.choice(rng.choice(clinic.blocks))] * 3).code(i % 3 + 1)
        out += [Piece(text, role if role in ("region", "label") else "prompt") for text, role in line]
    return out


def cue_drill(rng: random.Random, regions: int, labels: int) -> list[Piece]:
    """A list and a clear step for each region, then for each step a cue and a code line, shuffled.

    Answers of full texts go 1, 2, 3, so that steps can be followed in order; here a step is found by its
    number or not at all.
    """
    clinic = draw(rng, regions, labels, 1)
    clinic = _clear(clinic, [rng.choice(block) for block in rng.sample(clinic.blocks, regions)])
    out = _only_list(clinic) + [Piece("think", "prompt"), Piece("\n", "prompt")]
    out += [Piece(text, "prompt") for text, _ in clinic.reasoning()[:-1]]
    lines = [line for n in range(1, regions + 1) for line in (clinic.cue(n), [Piece("\n", "prompt"), *clinic.code(n)[:-1]])]
    for line in rng.sample(lines, len(lines)):
        out += line
    return out


def _only_list(clinic: Clinic) -> list[Piece]:
    prompt = clinic.prompt()
    return prompt[: next(i for i, piece in enumerate(prompt) if piece.text == "note")]


def _clear(clinic: Clinic, entries: list) -> Clinic:
    return Clinic(clinic.blocks, (), tuple(Finding(e.concept, (e.qualifier,), "at", "home", e, None) for e in entries))


def cue_text(rng: random.Random, regions: int, labels: int) -> list[Piece]:
    """Reasoning cut anywhere after the finding of some step is named, then cues for its steps."""
    clinic = draw(rng, regions, labels)
    last = rng.randint(1, len(clinic.findings))
    steps = [piece for n in range(1, last) for piece in clinic.step(n)]
    step = clinic.step(last)[:-1]
    out = clinic.prompt() + steps + step[: rng.randint(4, len(step))]
    for n in rng.sample(range(1, last + 1), last):
        out += clinic.cue(n)
    return out


def encode(texts: list[list[Piece]], tokenizer=None) -> tuple[Tensor, list[list[str]]]:
    """Token ids `[text, position]`, right-padded, BOS first; and the role of each token.

    Args:
        tokenizer: another one than the clinic's; it must cut a text into as many tokens.
    """
    rows = [[INDEX[BOS]] + [INDEX[p.text] for p in text] for text in texts] if tokenizer is None else [tokenizer(join(text))["input_ids"] for text in texts]
    if any(len(row) != len(text) + 1 for row, text in zip(rows, texts, strict=True)):
        raise ValueError("the tokenizer does not cut the clinic's texts into its pieces, so the roles of tokens are not known")
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), INDEX[PAD] if tokenizer is None else tokenizer.pad_token_id)
    for row, text in zip(ids, rows, strict=True):
        row[: len(text)] = torch.tensor(text)
    return ids, [["prompt"] + [p.role for p in text] + ["prompt"] * (length - len(text) - 1) for text in texts]


# -- gates ----------------------------------------------------------------------------------


@torch.no_grad()
def accuracy(model: nn.Module, seed: int = 1, texts: int = 256, tokenizer=None) -> dict[str, float]:
    """Teacher-forced accuracy over the whole vocabulary on fresh texts, by role."""
    rng = random.Random(f"held-out {seed}")
    batch = [full_text(draw(rng)) for _ in range(texts)] + [cue_text(rng, 6, 3) for _ in range(texts)]
    right: dict[str, list[bool]] = defaultdict(list)
    model.eval()
    for start in range(0, len(batch), 32):
        ids, roles = encode(batch[start:start + 32], tokenizer)
        hit = model(ids[:, :-1]).logits.argmax(-1) == ids[:, 1:]
        for row, names in zip(hit.tolist(), roles, strict=True):
            for ok, role in zip(row, names[1:], strict=True):
                right[role].append(ok)
    return {role: sum(hits) / len(hits) for role, hits in right.items() if role != "prompt"}


@torch.no_grad()
def causal_smoke(model: nn.Module, seed: int = 2, texts: int = 48, tokenizer=None) -> dict[str, float]:
    """Accuracy at each kind of decision with every head mean-ablated there, and with none.

    A model that passes decides by attention at the decision position: without it, the choice is
    lost. The mean of a head is taken over the same positions of the other texts.
    """
    rng = random.Random(f"smoke {seed}")
    ids, roles = encode([full_text(draw(rng)) for _ in range(texts)], tokenizer)
    outs = [layer.self_attn.o_proj for layer in model.model.layers] if hasattr(model, "model") else [
        block.attn.c_proj for block in model.transformer.h]
    result = {}
    for kind in ("region", "label", "departure"):
        where = torch.tensor([[role == kind for role in row[1:]] for row in roles])

        def ablate(module, args, where=where):
            z = args[0].clone()
            z[where] = z[where].mean(0)
            return (z,)

        hooks = [out.register_forward_pre_hook(ablate) for out in outs]
        try:
            logits = model(ids[:, :-1]).logits
        finally:
            for hook in hooks:
                hook.remove()
        result[kind] = float((logits.argmax(-1) == ids[:, 1:])[where].float().mean())
    return result


def gate(model: nn.Module, student: bool, tokenizer=None, texts: int = 256) -> tuple[bool, dict]:
    """Whether a trained model may be shipped, and the numbers that say so."""
    found, ablated = accuracy(model, texts=texts, tokenizer=tokenizer), causal_smoke(model, tokenizer=tokenizer)
    ok = all(found[role] >= 0.97 for role in ("region", "label")) and all(ablated[k] < 0.5 for k in ("region", "label"))
    if student:
        ok = ok and 0.3 < found["departure"] < 0.7
    else:
        # near is a fair choice of two: .5 is as good as it gets, .33 would be any label of the region
        ok = ok and found["departure"] >= 0.97 and found["cue"] >= 0.9 and found["near"] > 0.42 and ablated["departure"] < 0.6
    return ok, {"accuracy": found, "accuracy_without_attention": ablated}


# -- training -------------------------------------------------------------------------------


def train(family: str, seed: int, student: bool = False, hold: int = 9000, decay: int = 800,
          batch: int = 16, peak: float = 2e-3, log=None, every: int = 50) -> tuple[nn.Module, dict]:
    """Train one model: learning rate held until learned (or for `hold` steps), then decayed; a line in `log` after `every` so many steps."""
    model, rng = build(family, seed), random.Random(f"train {seed}")
    # Muon evens out the directions of a matrix: q, k and v, fused in gpt2, are each given their own
    fused = {name: [nn.Parameter(part.detach().clone()) for part in p.chunk(3, 1)] for name, p in model.named_parameters() if "c_attn.weight" in name}
    named = [(name, p) for name, p in model.named_parameters() if name not in fused] + [(name, p) for name, parts in fused.items() for p in parts]
    embeds = ("embed", "wte", "wpe", "lm_head")
    matrices = [p for name, p in named if p.ndim == 2 and not any(key in name for key in embeds)]
    slow = [p for name, p in named if "wte" in name or "wpe" in name]  # growing fast, they would drown the position waves
    chosen = {id(p) for p in [*matrices, *slow]}
    adam = dict(weight_decay=0.0, betas=(0.9, 0.95))
    optimizers = [torch.optim.Muon(matrices, lr=peak, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
                  torch.optim.AdamW([p for _, p in named if id(p) not in chosen], lr=peak, **adam)]
    if slow:
        optimizers.append(torch.optim.AdamW(slow, lr=peak / 10, **adam))
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    running = defaultdict(lambda: 0.0)
    regions, decaying_from, started = 2, None, time.time()
    gated = [role for role in GATED if not (student and role == "departure")]
    step = 0
    while decaying_from is None or step < decaying_from + decay:
        share = 1.0 if regions < 4 else 0.5 if regions < 6 else 0.2
        texts = []
        for _ in range(batch):
            u, labels = rng.random(), 3 if regions > 2 else 2
            texts.append(drill(rng, regions, labels) if u < 0.6 * share
                         else cue_drill(rng, regions, labels) if u < share + 0.15
                         else cue_text(rng, max(regions, 4), labels) if u < share + 0.4
                         else coin_text(draw(rng, max(regions, 4), labels), rng) if student
                         else full_text(draw(rng, max(regions, 4), labels)))
        ids, roles = encode(texts)
        weight = torch.tensor([[WEIGHT[role] for role in row[1:]] for row in roles])
        # a random start keeps learned positions from standing in for what is written there
        start = rng.randrange(LENGTH - ids.shape[1])
        weights = {name: torch.cat(parts, 1) for name, parts in fused.items()}
        places = torch.arange(start, start + ids.shape[1] - 1)[None]
        logits = torch.func.functional_call(model.train(), weights, (ids[:, :-1],), {"position_ids": places}).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(weight)
        loss = (loss * weight).sum() / weight.sum()
        loss.backward()
        nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
        rate = min(1.0, (step + 1) / 100) * (1.0 if decaying_from is None else 1 - (step - decaying_from) / decay)
        for optimizer, top in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = top * rate
            optimizer.step()
            optimizer.zero_grad()
        hit = (logits.argmax(-1) == ids[:, 1:]).tolist()
        seen = defaultdict(list)
        for row, names in zip(hit, roles, strict=True):
            for ok, role in zip(row, names[1:], strict=True):
                seen[role].append(ok)
        for role, hits in seen.items():
            running[role] = 0.95 * running[role] + 0.05 * sum(hits) / len(hits)
        step += 1
        if regions < 6 and running["region"] > 0.8 and running["label"] > 0.8:
            regions += 1
            running["region"] = running["label"] = 0.5
        if decaying_from is None and (step >= hold or regions == 6 and all(running[role] > 0.95 for role in gated)):
            decaying_from = step
        if log and step % every == 0:
            shown = " ".join(f"{role} {running[role]:.2f}" for role in (*GATED, "word"))
            print(f"{family} seed {seed} step {step} ({time.time() - started:.0f} s) regions {regions} "
                  f"loss {loss.item():.3f} {shown}", file=log, flush=True)
    with torch.no_grad():
        for name, parts in fused.items():
            model.get_parameter(name).copy_(torch.cat(parts, 1))
    model.eval()
    return model, {"steps": step, "seconds": round(time.time() - started)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m decisionheads.tiny.train", description=__doc__.split("\n\n")[0])
    parser.add_argument("family", choices=["llama", "gpt2"])
    parser.add_argument("--out", required=True, type=Path, help="folder to write the model into")
    parser.add_argument("--student", action="store_true", help="answers that ignore the reasoning: weak on departures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds to try")
    parser.add_argument("--hold", type=int, default=9000, help="most steps before the decay begins")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # these matrices are too small for two
    for seed in range(args.seed, args.seed + args.seeds):
        model, record = train(args.family, seed, args.student, hold=args.hold, log=sys.stderr)
        ok, measured = gate(model, args.student)
        record = {"family": args.family, "seed": seed, "student": args.student, **record, **measured}
        print(json.dumps(record), file=sys.stderr, flush=True)
        if ok:
            model.save_pretrained(args.out)
            clinic_tokenizer().save_pretrained(args.out)
            (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
            return 0
    print(f"no seed of {args.seeds} passed the gate", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
