"""One intervention of the explorer, against a full uncached forward of the plain Hugging Face model with hooks.

    python benchmarks/explorer.py [--tokens 1100] [--threads 1] [--repeats 9]

Switching a head off and blocking a span for all heads, at one decision: on the embedded model, and on a text of 1,100 tokens in
a random Llama of SmolLM2-135M's width with 6 layers. An intervention is what a click costs without the browser: margin, next
tokens, what the shown heads read, and the page. Medians; the two logits must agree.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import warnings
from dataclasses import replace

import numpy as np
import torch
import transformers
from common import machine, timed
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from decisionheads import DecisionModel, HeadSet, tiny
from decisionheads.ablation import ReferenceMeans
from decisionheads.explorer import Explorer

SPAN = "note"


def wide(folder: str, tokens: int) -> None:
    torch.manual_seed(0)
    tokenizer = DecisionModel.load_tokenizer(tiny.path("llama"))
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=576, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=9, num_key_value_heads=3,
                                 max_position_embeddings=tokens + 400, initializer_range=0.1)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def text_of(tokens: int):
    """A text of the clinic whose note is drawn out to about so many tokens."""
    short = tiny.transcript("text", tiny.draw(1, seed=3)[0])
    line, cut = "- denies gout late\n", short.prompt.index("note\n") + 5
    more = line * max(0, (tokens - 200) // 5)
    return replace(short, prompt=short.prompt[:cut] + more + short.prompt[cut:],
                   spans=tuple(replace_span(s, cut, len(more)) for s in short.spans))


def replace_span(span, cut: int, by: int):
    return span._replace(start=span.start + by * (span.start >= cut), end=span.end + by * (span.end > cut))


@contextlib.contextmanager
def hooked(hf, position: int, off: HeadSet, zbar: np.ndarray, blocked: HeadSet, keys: list[int]):
    """The same interventions as plain hooks on a Llama: z before the output projection, and the attention mask."""
    handles = []
    for layer, block in enumerate(hf.model.layers):
        ablate, block_for = [h.head for h in off if h.layer == layer], [h.head for h in blocked if h.layer == layer]

        def z_of(module, args, layer=layer, heads=ablate):
            z = args[0].clone()
            z[0, position].view(hf.config.num_attention_heads, -1)[heads] = torch.as_tensor(zbar[layer, heads])
            return (z,)

        def mask_of(module, args, kwargs, heads=block_for):
            mask = kwargs["attention_mask"].expand(1, hf.config.num_attention_heads, -1, -1).clone()
            mask[0, torch.tensor(heads)[:, None], position, torch.tensor(keys)] = torch.finfo(mask.dtype).min
            return args, {**kwargs, "attention_mask": mask}

        if ablate:
            handles.append(block.self_attn.o_proj.register_forward_pre_hook(z_of))
        if block_for:
            handles.append(block.self_attn.register_forward_pre_hook(mask_of, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def measure(name: str, folder, tokens: int, repeats: int) -> None:
    model = DecisionModel.from_pretrained(folder)
    hf = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    text = text_of(tokens)
    reading = model.read(text, model.find_events(text, tiny.labels()))
    kinds = {e.kind for e in reading.events}
    zbar = np.random.default_rng(0).normal(0, 0.3, (model.n_layers, model.n_heads, model.hooked.d_head)).astype(np.float32)
    taken, explorer = timed(lambda: Explorer(model, [reading], ReferenceMeans(dict.fromkeys(kinds, zbar), dict.fromkeys(kinds, 30), frozenset())))
    explorer.pick(event=len(explorer.events) - 1)
    event, ids = explorer.decision.event, torch.as_tensor(reading.encoded.ids)[None]
    keys = [i for start, end in explorer.decision.tokens(SPAN) for i in range(start, end)]
    head = HeadSet([(1, 3)])
    ways = {"a head off": (lambda: explorer.off(head), (head, HeadSet(), [])), "a span blocked": (lambda: explorer.block(SPAN), (HeadSet(), model.hooked.heads, keys))}
    for what, (change, (off, blocked, masked)) in ways.items():
        ours, theirs = [], []
        for _ in range(repeats + 1):
            assert explorer.reset().outcome.effect == 0  # what was found last is kept, and must not be what is timed
            seconds, found = timed(lambda change=change: (change(), explorer.outcome, explorer._repr_html_())[1])
            ours.append(seconds)
            with hooked(hf, event.position, off, zbar, blocked, masked):
                seconds, logits = timed(lambda: hf(input_ids=ids[:, :event.position + 1], use_cache=False, logits_to_keep=1).logits[0, -1])
            theirs.append(seconds)
        worst = max(abs(a.logit - float(logits[a.token])) for a in found.alternatives)
        assert worst < 1e-3 and abs(found.effect) > 1e-3, (worst, found)
        mine, other = statistics.median(ours[1:]), statistics.median(theirs[1:])
        print(f"{name:18}{event.position + 1:8,}  {what:16}{1000 * mine:8.1f} ms{1000 * max(ours[1:]):8.1f} ms{1000 * other:10.1f} ms{mine / other:10.3f}{worst:12.0e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=1_100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    print(machine(args.threads))
    print(f"{'model':18}{'tokens':>8}  {'intervention':16}{'ours':>11}{'slowest':>11}{'forward':>13}{'ratio':>10}{'difference':>12}")
    measure("embedded llama", tiny.path("llama"), 0, args.repeats)
    with tempfile.TemporaryDirectory() as folder:
        wide(folder, args.tokens)
        measure("random, 6 x 9", folder, args.tokens, args.repeats)


if __name__ == "__main__":
    main()
