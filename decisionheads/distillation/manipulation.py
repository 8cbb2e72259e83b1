"""The manipulation check: did training move what the pool reads, in this arm and in the others?

A student may have the teacher's answers without reading what it reads, or read it and decide otherwise. So the distance that
`mistill` is trained on is measured in every arm, trained on it or not, on held-out texts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .._sources import locate, quiet
from ..decisions import Kind
from ..errors import InputError
from ..heads import HeadSet
from ..labels import LabelSpace
from ..model import DecisionModel
from .groups import GROUPS
from .loss import floored
from .pool import Pool
from .rows import EventAttention, EventBatch
from .targets import Targets

TOGETHER = 8  # texts of a batch


@torch.no_grad()
def held_out_distance(student: str, pool: Pool, targets: Targets, labels: LabelSpace) -> dict[Kind, dict[str, Any]]:
    """What the heads of a pool read on texts with targets.

    Args:
        student: folder of the model, trained or not.
        pool: the heads that the supervised arms share.
        targets: the teacher's, of held-out texts.

    Returns:
        kind -> `distance`, mean KL of the teacher's shares to the student's in nats; `shares`, the student's mean share of
        each group; `decisions`.

    Raises:
        InputError: where no decision of the teacher's is found in the student's tokens.
    """
    from transformers import AutoModelForCausalLM

    from .trainer import Collator, all_kinds, examples  # transformers.Trainer takes seconds to import

    tokenizer = DecisionModel.load_tokenizer(student)
    data, _ = examples(targets, labels, tokenizer, pool, DecisionModel.load_context(student))
    where, extra = locate(student)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(where, use_safetensors=True, **extra).eval()
    kinds = all_kinds(pool)
    heads: Mapping[Kind, HeadSet] = {kind: pool.heads[kind] for kind in kinds}
    watched, collate = EventAttention(model, heads), Collator(0, kinds)
    found: dict[Kind, list[tuple[float, np.ndarray]]] = defaultdict(list)
    for start in range(0, len(data), TOGETHER):
        batch = collate(data[start:start + TOGETHER])
        with watched.reading(EventBatch(batch["event_positions"], batch["event_kinds"], batch["event_groups"])):
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        there = batch["event_kinds"] >= 0
        p, q = floored(batch["event_mass"][there]), floored(watched.mass.cpu()[there])
        for kind, kl, share in zip(batch["event_kinds"][there].tolist(), (p * (p.log() - q.log())).sum(-1).tolist(), q.numpy(), strict=True):
            found[kinds[kind]].append((kl, share))
    if not found:
        raise InputError(f"{student}: none of the teacher's decisions is found in this student's tokens, so nothing can be supervised; give a student with a finer tokenizer")
    return {kind: {"distance": round(float(np.mean([kl for kl, _ in rows])), 6), "decisions": len(rows),
                   "shares": dict(zip(GROUPS, np.mean([share for _, share in rows], 0).round(4).tolist(), strict=True))} for kind, rows in found.items()}
