"""Training: `transformers.Trainer` with one more term.

    loss = cross-entropy on what the teacher wrote + lambda * mean over texts of mean over their decisions of w_kind * KL

The first term is the model's own loss, untouched; with lambda 0 nothing else happens, and the weights are
those of plain training, bit for bit. Mixed precision, accumulation, several processes, checkpoints and
resuming are Trainer's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from ..decisions import KINDS, Kind
from ..errors import InputError
from ..events import find_closers
from ..labels import LabelSpace
from ..null_tokens import first_generated
from ..transcripts import encode
from ..views import Brief
from .groups import DROPPED, GROUPS
from .loss import mistill_loss
from .pool import Pool
from .rows import EventAttention, EventBatch
from .targets import Placed, Targets, place

IGNORED = -100  # labels that cross-entropy leaves out


@dataclass(frozen=True, eq=False, repr=False)
class Example(Brief):
    """A text in a student's tokens.

    Attributes:
        ids: token ids.
        written: position of the first token that the teacher wrote; cross-entropy counts from there.
        placed: its decisions.
    """

    ids: tuple[int, ...]
    written: int
    placed: tuple[Placed, ...]


def examples(targets: Targets, labels: LabelSpace, tokenizer, pool: Pool, context: int | None = None) -> tuple[list[Example], Counter[str]]:
    """Every text of targets in a student's tokens, and what could not be carried over, counted by reason.

    Args:
        tokenizer: the student's own.
        context: the most tokens it can take; longer texts are left out and counted.

    Raises:
        InputError: for token ids that are not the student's own, and where nothing is left.
    """
    closers = find_closers(targets.transcripts, labels, tokenizer)
    found, lost = [], Counter()
    for t in targets.transcripts:
        encoded = encode(t, tokenizer)
        if context is not None and len(encoded) > context:
            lost["text longer than the student's context"] += 1
            continue
        placed, missed = place(t, targets.of[t.id], labels, tokenizer, pool.sinks, encoded=encoded, closers=closers)
        kept = [p for p in placed if p.target.kind in pool.heads]
        lost.update(missed)
        found.append(Example(tuple(map(int, encoded.ids)), first_generated(t, encoded), tuple(kept)))
    if not found:
        raise InputError(f"no text fits the student ({dict(lost)}); give a student with a longer context")
    return found, lost


class Collator:
    """Examples as padded tensors; `targets`, of the same transcripts, may hold other shares than the examples' own.

    Args:
        pad: token id of pads, which nothing attends to and no loss counts.
        kinds: of events, in the order of the pool.
        weights: kind -> w; 1 where it is not named.
    """

    def __init__(self, pad: int, kinds: Sequence[Kind], weights: Mapping[Kind, float] | None = None):
        self.pad, self.kinds, self.weights = pad, list(kinds), dict(weights or {})

    def __call__(self, batch: Sequence[Example]) -> dict[str, Tensor]:
        length = max(len(e.ids) for e in batch)
        most = max(1, max(len(e.placed) for e in batch))
        ids = torch.full((len(batch), length), self.pad)
        seen = torch.zeros(len(batch), length, dtype=torch.long)
        labels = torch.full((len(batch), length), IGNORED)
        positions = torch.zeros(len(batch), most, dtype=torch.long)
        kinds = torch.full((len(batch), most), -1)
        groups = torch.full((len(batch), most, length), DROPPED, dtype=torch.int8)
        mass = torch.zeros(len(batch), most, len(GROUPS))
        weights = torch.zeros(len(batch), most)
        texts = sum(bool(e.placed) for e in batch)
        for i, e in enumerate(batch):
            n = len(e.ids)
            ids[i, :n], seen[i, :n] = torch.tensor(e.ids), 1
            labels[i, e.written:n] = ids[i, e.written:n]
            for j, p in enumerate(e.placed):
                positions[i, j], kinds[i, j] = p.position, self.kinds.index(p.target.kind)
                groups[i, j, :len(p.groups)] = torch.from_numpy(p.groups)
                mass[i, j] = torch.tensor(p.target.mass)
                weights[i, j] = self.weights.get(p.target.kind, 1.0) / len(e.placed) / texts
        return {"input_ids": ids, "attention_mask": seen, "labels": labels, "event_positions": positions, "event_kinds": kinds, "event_groups": groups,
                "event_mass": mass, "event_weights": weights}


class MistillTrainer(Trainer):
    """`Trainer` that also supervises what a pool of heads reads at decisions.

    Args:
        pool: kind -> heads that are supervised; their mean is held against the teacher's.
        lam: lambda; 0 is plain training on what the teacher wrote.
        options: of `Trainer`; batches come from a `Collator`.

    Raises:
        InputError: for settings under which attention cannot be read: checkpointed activations, one process with several devices.
    """

    def __init__(self, *options, pool: Mapping[Kind, Any], lam: float = 1.0, **more):
        super().__init__(*options, **more)
        if lam < 0:
            raise InputError(f"lambda is {lam:g}; it weighs a distance and must not be negative")
        self.lam, self.distances = lam, []
        self.watched = None
        if lam:
            if self.args.n_gpu > 1:
                raise InputError("one process with several devices cannot be supervised; start one process a device with accelerate launch")
            model = self.accelerator.unwrap_model(self.model)
            self.watched = EventAttention(model.get_base_model() if hasattr(model, "get_base_model") else model, pool)

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch=None):
        given = dict(inputs)
        asked = {name: given.pop(name) for name in [n for n in given if n.startswith("event_")]}
        if not self.lam or not model.training:
            return super().compute_loss(model, given, return_outputs, num_items_in_batch)
        with self.watched.reading(EventBatch(asked["event_positions"], asked["event_kinds"], asked["event_groups"])):
            loss, outputs = super().compute_loss(model, given, True, num_items_in_batch)
        read = self.watched.mass.flatten(0, 1)
        distance = mistill_loss(asked["event_mass"].flatten(0, 1).to(read.device), read, asked["event_weights"].flatten().to(read.device))
        self.distances.append(float(distance.detach()))
        scaled = self.model_accepts_loss_kwargs and num_items_in_batch is not None  # then Trainer does not divide by the steps of accumulation
        loss = loss + self.lam * distance / (self.current_gradient_accumulation_steps if scaled else 1)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *options, **more) -> None:
        """Adds `distance`: the mean KL since the last line, in nats."""
        if self.distances and "loss" in logs:
            own = torch.tensor(self.distances, device=self.args.device).mean()
            logs["distance"] = float(self.accelerator.gather(own).mean())  # over all processes, which all come by here
            self.distances.clear()
        super().log(logs, *options, **more)


def all_kinds(pool: Pool) -> list[Kind]:
    """The kinds of a pool, in order of precedence."""
    return [kind for kind in KINDS if kind in pool.heads]
