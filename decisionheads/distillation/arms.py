"""Arms: one student trained in one way with one seed, the same texts in the same order whatever the way."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._processes import agreed, first
from .._sources import locate, quiet
from ..errors import InputError
from ..labels import LabelSpace
from ..model import DecisionModel
from .pool import Pool
from .targets import Targets, misdirected, shuffled

ARMS = ("cot", "mistill", "shuffled", "random-pool")  # what is compared unless other arms are named
MORE_ARMS = ("all-heads", "wrong-group")


@dataclass(frozen=True)
class Training:
    """The budget and the settings that all arms share.

    Attributes:
        steps: optimizer steps; the last one's weights are what is judged (the rule for checkpoints).
        batch: texts of one step in one process; accumulate: batches of one step.
        rate: highest learning rate (AdamW); warmup: share of the steps until it is reached; it then falls along a line to 0.
        decay: weight decay.
        lam: lambda of the arms that are supervised.
        weights: kind -> w_kind; 1 where it is not named.
        lora: rank of low-rank adapters on all linear layers, merged when trained; 0 trains all weights.
        precision: no, bf16 or fp16: Trainer's mixed precision.
        save_every: steps between checkpoints to resume from.
    """

    steps: int = 300
    batch: int = 8
    accumulate: int = 1
    rate: float = 1e-4
    warmup: float = 0.1
    decay: float = 0.0
    lam: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)
    lora: int = 0
    precision: str = "no"
    save_every: int = 100

    def __post_init__(self):
        for name in ("steps", "batch", "accumulate", "save_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give at least 1")
        if not self.rate > 0 or self.lam < 0 or self.lora < 0:
            raise InputError("the learning rate must be positive, lambda and the rank of adapters not negative")
        if self.precision not in ("no", "bf16", "fp16"):
            raise InputError(f"unknown precision {self.precision!r}: choose no, bf16 or fp16")


def arm_of(name: str, targets: Targets, pool: Pool, training: Training, seed: int) -> tuple[Targets, Pool, float]:
    """What an arm is trained on: targets, heads and lambda.

    Raises:
        InputError: for an arm that is not known, or a random pool that cannot be drawn.
    """
    if name not in (*ARMS, *MORE_ARMS):
        raise InputError(f"unknown arm {name!r}: choose from {', '.join((*ARMS, *MORE_ARMS))}")
    targets = {"shuffled": lambda: shuffled(targets, seed), "wrong-group": lambda: misdirected(targets)}.get(name, lambda: targets)()
    pool = {"random-pool": lambda: pool.random(seed), "all-heads": pool.all}.get(name, lambda: pool)()
    return targets, pool, 0.0 if name == "cot" else training.lam


def train_student(student: str, out: Path, name: str, targets: Targets, pool: Pool, labels: LabelSpace, training: Training, seed: int, *, device: str | None = None,
                  callbacks=(), progress: bool = False) -> dict[str, Any]:
    """Train a student in one arm into `out/model`; goes on from the last checkpoint, and returns at once where it is done.

    Args:
        student: folder or hub name of the untrained student.
        out: folder of this run alone.
        name: the arm.
        device: "cpu" keeps accelerators out of it; Trainer chooses otherwise.
        callbacks: of Trainer.

    Returns:
        what was done: steps, losses by step, decisions that could not be carried over.
    """
    if agreed((out / "training.json").is_file()):
        return json.loads((out / "training.json").read_text())
    import torch
    from transformers import AutoModelForCausalLM, TrainingArguments, set_seed

    from .trainer import Collator, MistillTrainer, all_kinds, examples

    targets, heads, lam = arm_of(name, targets, pool, training, seed)
    tokenizer = DecisionModel.load_tokenizer(student)
    data, lost = examples(targets, labels, tokenizer, heads, DecisionModel.load_context(student))
    set_seed(seed)
    where, extra = locate(student)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(where, use_safetensors=True, dtype=torch.float32, **extra)
    if training.lora:
        model = _with_adapters(model, training.lora)
    batch = training.batch * training.accumulate
    arguments = TrainingArguments(
        output_dir=str(out / "checkpoints"), max_steps=training.steps, per_device_train_batch_size=training.batch, gradient_accumulation_steps=training.accumulate,
        learning_rate=training.rate, warmup_steps=round(training.warmup * training.steps), lr_scheduler_type="linear", weight_decay=training.decay,
        bf16=training.precision == "bf16", fp16=training.precision == "fp16", seed=seed, data_seed=seed, save_steps=training.save_every, save_total_limit=1,
        logging_steps=min(25, training.steps), report_to="none", use_cpu=device == "cpu", remove_unused_columns=False, label_names=["labels"], disable_tqdm=not progress, dataloader_pin_memory=torch.cuda.is_available(), dataloader_drop_last=len(data) >= batch)
    trainer = MistillTrainer(model, arguments, Collator(_pad(tokenizer), all_kinds(heads), training.weights), data, pool=heads.heads, lam=lam, callbacks=list(callbacks))
    if not progress:
        from transformers import PrinterCallback

        trainer.remove_callback(PrinterCallback)  # it prints what the log holds anyway
    if lam:
        checked = _check(trainer, data[:2])
    with quiet():
        trainer.train(resume_from_checkpoint=_last_checkpoint(out / "checkpoints"))
    if trainer.state.global_step < training.steps:
        return {}  # a callback stopped it; it can be gone on with
    done = {"arm": name, "seed": seed, "steps": trainer.state.global_step, "lam": lam, "lost": dict(sorted(lost.items())), "texts": len(data), "events": sum(len(e.placed) for e in data),
            "pool": {kind: list(map(str, h)) for kind, h in heads.heads.items()} if lam else {}, "checked": checked if lam else None,
            "log": [{k: v for k, v in row.items() if k in ("step", "loss", "distance", "grad_norm")} for row in trainer.state.log_history if "loss" in row]}
    if first():
        _save(trainer.model, tokenizer, out, bool(training.lora))
        beside = out / ".training.json"
        beside.write_text(json.dumps(done, indent=1) + "\n")
        os.replace(beside, out / "training.json")
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    trainer.model_wrapped = trainer.model  # what joins the processes has to go before their group does
    trainer.accelerator.free_memory()
    agreed(None)
    return done


def _last_checkpoint(folder: Path) -> str | None:
    """The last whole checkpoint; Trainer writes its state last, so that one without it was torn by a kill."""
    whole = [path for path in folder.glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    return str(max(whole, key=lambda path: int(path.name.split("-")[1]))) if whole else None


def _check(trainer, data) -> float:
    """Hold what is supervised against whole patterns, on the first texts with a decision."""
    from .rows import EventBatch, check_attention

    batch = {name: x.to(trainer.args.device) for name, x in trainer.data_collator(list(data)).items()}
    events = EventBatch(batch["event_positions"], batch["event_kinds"], batch["event_groups"])
    return check_attention(trainer.watched.model, trainer.watched, {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}, events)


def _with_adapters(model, rank: int):
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise InputError('adapters need peft; install it with pip install -c constraints.txt -e ".[train]", or train all weights') from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it asks for what transformers has renamed
        return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def _save(model, tokenizer, out: Path, adapters: bool) -> None:
    """The trained student as a folder that anybody can load, whole or not at all."""
    beside = out / ".model"
    shutil.rmtree(beside, ignore_errors=True)
    with quiet():
        (model.merge_and_unload() if adapters else model).save_pretrained(beside)
        tokenizer.save_pretrained(beside)
    shutil.rmtree(out / "model", ignore_errors=True)
    os.replace(beside, out / "model")


def _pad(tokenizer) -> int:
    """Nothing attends to pads and no loss counts them, so any id serves."""
    return next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)

