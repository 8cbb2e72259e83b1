"""An embedded student behind another tokenizer: `python -m decisionheads.tiny.retokenize FOLDER --out DIR`.

Words carry the space after them instead of the one before, and every token has another id, so a
character offset, and nothing else, finds a decision of the one in the other. Each word comes in two forms
(with a space after it and without) that begin with one embedding: the model is then the same function of the
text. A few hundred steps on texts that ignore the reasoning teach it which form follows; `gpt2-student` was
made so.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from .clinic import BOS, END, PAD, TOKENS, UNKNOWN, draw

SPECIAL = (PAD, UNKNOWN, BOS, END)


def vocabulary() -> list[tuple[str, int]]:
    """`(token, id of the clinic's token that it stands for)`; the place in the list is the new id."""
    forms = [(token, i) for i, token in enumerate(TOKENS) if token in SPECIAL or token == "\n"]
    forms += [(token.strip() + space, i) for i, token in enumerate(TOKENS) if token not in SPECIAL and token != "\n" for space in ("", " ")]
    random.Random("another tokenizer").shuffle(forms)
    return forms


def other_tokenizer():
    """A tokenizer of the clinic that keeps spaces at the ends of words."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, (token, _) in enumerate(vocabulary())}
    core = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[A-Za-z]+ ?|-[a-z]+ ?|[0-9]+ ?|\n|[^\sA-Za-z0-9] ?|\s"), "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, ids[BOS])])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=BOS, eos_token=END, pad_token=PAD, unk_token=UNKNOWN, clean_up_tokenization_spaces=False, model_max_length=320)


def retokenize(folder: str | Path, out: str | Path) -> Path:
    """Save an embedded model with the other tokenizer.

    Args:
        folder: a model with the clinic's tokenizer.
        out: a new folder; returned.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    old = torch.tensor([i for _, i in vocabulary()])
    layers = {id(layer): layer for layer in (model.get_input_embeddings(), model.get_output_embeddings())}.values()
    weights = {layer: layer.weight.detach()[old].clone() for layer in layers}
    model.resize_token_embeddings(len(old))
    with torch.no_grad():
        for layer, rows in weights.items():
            layer.weight.copy_(rows)
    tokenizer = other_tokenizer()
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return Path(out)


def adapt(model, tokenizer, steps: int = 300, seed: int = 0, batch: int = 16, rate: float = 5e-4) -> None:
    """Go on training a student through its other tokenizer, on answers that ignore what the reasoning rejected."""
    import torch

    from .train import WEIGHT, coin_text, cue_text, encode

    rng = random.Random(f"adapt {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30) * (1 - step / steps))
    model.train()
    for _ in range(steps):
        ids, roles = encode([cue_text(rng, 6, 3) if rng.random() < 0.25 else coin_text(draw(rng), rng) for _ in range(batch)], tokenizer)
        weight = torch.tensor([[WEIGHT[role] for role in row[1:]] for row in roles])
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(weight)
        ((loss * weight).sum() / weight.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
    model.eval()


def main(arguments: list[str] | None = None) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    from .train import gate

    parser = argparse.ArgumentParser(prog="python -m decisionheads.tiny.retokenize", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a student with the clinic's tokenizer")
    parser.add_argument("--out", required=True, type=Path, help="folder to write the model into")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    known = json.loads((args.folder / "training.json").read_text())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(retokenize(args.folder, args.out)), other_tokenizer()
    adapt(model, tokenizer, args.steps)
    ok, measured = gate(model, student=True, tokenizer=tokenizer)
    print(json.dumps(measured), file=sys.stderr)
    if not ok:
        print("the model did not pass the gate", file=sys.stderr)
        return 1
    model.save_pretrained(args.out)
    (args.out / "training.json").write_text(json.dumps({**known, "adapted_steps": args.steps, **measured}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
