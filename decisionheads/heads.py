"""Heads, sets of heads, and scores of heads: plain values, no model.

Heads are zero-based `(layer, head)` pairs of *query* heads, printed "L12H7" as TransformerLens does.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from ._reading import fingerprint, strict_json
from .errors import InputError, as_written
from .views import MOST, Viewed, view

if TYPE_CHECKING:
    from typing import Protocol

    import pandas as pd

    class Model(Protocol):
        name: str
        n_layers: int
        n_heads: int

Array = np.ndarray


class Head(NamedTuple):
    """One attention (query) head: zero-based layer and head."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """"L12H7" -> Head(12, 7); raises InputError for anything else."""
        found = re.fullmatch(r"L([0-9]{1,6})H([0-9]{1,6})", text)
        if not found:
            raise InputError(f"{text!r} is not a head; write L12H7 for layer 12, head 7")
        return cls(int(found[1]), int(found[2]))


def kv_group(head: int, n_heads: int, n_kv_heads: int) -> int:
    """The key-value head that a query head reads with, under grouped queries: `head // group size`.

    Raises:
        ValueError: when the query heads do not divide into the key-value heads.
    """
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ValueError(f"{n_heads} query heads do not divide into {n_kv_heads} key-value heads")
    if not 0 <= head < n_heads:
        raise ValueError(f"head {head} is not one of {n_heads} query heads")
    return head // (n_heads // n_kv_heads)


class HeadSet(Viewed):
    """An immutable, hashable set of heads, always in (layer, head) order.

    Supports `| & - ^ <= in len iter`. Any iterable of `Head`, `(layer, head)` or "L3H1" makes one.
    """

    __slots__ = ("_heads",)

    def __init__(self, heads: Iterable[Head | tuple[int, int] | str] = ()):
        if isinstance(heads, str):
            raise InputError(f"HeadSet({heads!r}): give a list of heads, such as HeadSet([{heads!r}])")
        parsed = (Head.parse(h) if isinstance(h, str) else Head(int(h[0]), int(h[1])) for h in heads)
        object.__setattr__(self, "_heads", tuple(sorted(set(parsed))))
        if any(h.layer < 0 or h.head < 0 for h in self._heads):
            raise ValueError("layers and heads are zero-based and never negative")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a HeadSet never changes; make another")

    def __iter__(self) -> Iterator[Head]:
        return iter(self._heads)

    def __len__(self) -> int:
        return len(self._heads)

    def __contains__(self, head: object) -> bool:
        return head in self._heads

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadSet) and self._heads == other._heads

    def __hash__(self) -> int:
        return hash(self._heads)

    def __or__(self, other: HeadSet) -> HeadSet:
        return HeadSet({*self, *other})

    def __and__(self, other: HeadSet) -> HeadSet:
        return HeadSet({*self} & {*other})

    def __sub__(self, other: HeadSet) -> HeadSet:
        return HeadSet({*self} - {*other})

    def __xor__(self, other: HeadSet) -> HeadSet:
        return HeadSet({*self} ^ {*other})

    def __le__(self, other: HeadSet) -> bool:
        return {*self} <= {*other}

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self._heads[:12])) + (", ..." if len(self) > 12 else "")
        return f"HeadSet({len(self)}: {shown})" if self._heads else "HeadSet(empty)"

    def _rows(self):
        layers = self.per_layer()
        return [{"layer": layer, "heads": " ".join(str(h) for h in self if h.layer == layer)} for layer in list(layers)[:MOST]], len(layers)

    def per_layer(self) -> dict[int, int]:
        """How many heads of each layer are in the set."""
        return dict(sorted(Counter(h.layer for h in self).items()))

    def to_list(self) -> list[tuple[int, int]]:
        return [(h.layer, h.head) for h in self]

    def check(self, n_layers: int, n_heads: int, name: str = "") -> None:
        """Refuse heads that a model of this shape does not have.

        Raises:
            InputError: names the first such head, and the heads there are.
        """
        odd = next((h for h in self if h.layer >= n_layers or h.head >= n_heads), None)
        if odd is not None:
            raise InputError(f"{odd} is not in {name or 'a model'} of {n_layers} layers by {n_heads} heads (L0H0 to {Head(n_layers - 1, n_heads - 1)}); "
                             "heads are counted from 0, and a set belongs to the model it was found in")

    def to_mask(self, n_layers: int, n_heads: int) -> Bool[Array, "layer head"]:
        mask = np.zeros((n_layers, n_heads), bool)
        self.check(n_layers, n_heads)
        for layer, head in self:
            mask[layer, head] = True
        return mask

    @classmethod
    def from_mask(cls, mask: Bool[Array, "layer head"]) -> HeadSet:
        return cls(map(tuple, np.argwhere(mask).tolist()))

    @classmethod
    def all(cls, n_layers: int, n_heads: int) -> HeadSet:
        return cls((layer, head) for layer in range(n_layers) for head in range(n_heads))

    @property
    def digest(self) -> str:
        """A content hash: equal sets, equal digests."""
        return hashlib.sha256(json.dumps(self.to_list()).encode()).hexdigest()[:16]

    def save(self, path: str | Path, model: Model | None = None) -> None:
        """Freeze the set in a JSON file, with the model that it belongs to if one is given."""
        of = {"model": {"name": model.name, "layers": model.n_layers, "heads": model.n_heads}} if model is not None else {}
        Path(path).write_text(json.dumps({"heads": [str(h) for h in self], "digest": self.digest, **of}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path, model: Model | None = None) -> HeadSet:
        """Read a frozen set.

        Args:
            model: refuse a set of another model than this one.

        Raises:
            InputError: for a file that is no head set, was changed since, or belongs to another model.
        """
        if not Path(path).is_file():
            raise InputError(f"{path}: no such file; HeadSet.save writes one")
        with as_written(path, "it is no head set; HeadSet.save writes one"):
            record = strict_json(Path(path).read_text(encoding="utf-8"))
            loaded, of = cls(record["heads"]), record.get("model")
            if model is not None and of is not None and of != {"name": model.name, "layers": model.n_layers, "heads": model.n_heads}:
                raise InputError(f"{path} is a head set of {of['name']} ({of['layers']} layers by {of['heads']} heads) and not of {model.name} ({model.n_layers} by {model.n_heads}); "
                                 "find one for this model, or load the other")
        if model is not None:
            loaded.check(model.n_layers, model.n_heads, model.name)
        if loaded.digest != record.get("digest"):
            raise InputError(f"{path}: the head set was changed after it was frozen; restore the file or freeze it again")
        return loaded

    def hooks(self, means: Float[Array, "layer head d_head"], position: int = -1) -> list[tuple[str, Callable]]:
        """`(name, hook)` pairs for plain TransformerLens: mean-ablate these heads at one position.

        `bridge.run_with_hooks(tokens, fwd_hooks=heads.hooks(means))`. Other positions are untouched.
        """
        import torch

        self.check(*means.shape[:2])
        values = torch.as_tensor(means)

        def at(layer: int) -> tuple[str, Callable]:
            heads = [h.head for h in self if h.layer == layer]

            def ablate(z, hook=None):
                z = z.clone()
                z[:, position, heads] = values[layer, heads].to(z)
                return z

            return f"blocks.{layer}.attn.hook_z", ablate

        return [at(layer) for layer in self.per_layer()]


@dataclass(frozen=True)
class Ranking(Viewed):
    """Heads in order of score, ties in (layer, head) order.

    Attributes:
        heads, scores: the ranked heads and their scores.
        tied: heads left out although their score equals the last one kept.
    """

    heads: tuple[Head, ...]
    scores: tuple[float, ...]
    tied: tuple[Head, ...] = ()

    def __iter__(self) -> Iterator[tuple[Head, float]]:
        return iter(zip(self.heads, self.scores, strict=True))

    def __len__(self) -> int:
        return len(self.heads)

    def __repr__(self) -> str:
        rows = ", ".join(f"{h} {s:+.3f}" for h, s in self)
        return f"Ranking({rows}{f'; {len(self.tied)} more tied at the cut' if self.tied else ''})"

    def _repr_html_(self) -> str:
        return view("Ranking", f"of {len(self)} heads", ([{"head": str(h), "score": s} for h, s in self], len(self)), f"{len(self.tied)} more tied at the cut" if self.tied else "")


@dataclass(frozen=True)
class HeadScores:
    """One number for each event and head.

    Attributes:
        values: `[event, layer, head]`.
        name: what was measured ("mean-ablation effect").
        unit: of `values` ("logits").
        sign: what a positive value means, in words.
        events: a name for each event, in the order of `values`.
        meta: anything that belongs to the numbers (options, versions).
    """

    values: Float[Array, "event layer head"]
    name: str
    unit: str = "logits"
    sign: str = "positive: the head supports the decision"
    events: tuple[str, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.values.ndim != 3:
            raise ValueError(f"scores are [event, layer, head]; got an array of shape {self.values.shape}")
        if self.events and len(self.events) != len(self.values):
            raise ValueError(f"{len(self.events)} event names for {len(self.values)} rows of scores")

    @classmethod
    def join(cls, parts: Iterable[HeadScores]) -> HeadScores:
        """The events of several scores of one name, one after the other; meta of the first."""
        parts = list(parts)
        if not parts:
            raise ValueError("nothing to join")
        if len({(p.name, p.unit, p.values.shape[1:]) for p in parts}) > 1:
            raise ValueError(f"scores of different names or models are not joined: {', '.join(sorted({p.name for p in parts}))}")
        return replace(parts[0], values=np.concatenate([p.values for p in parts]), events=tuple(name for p in parts for name in p.events))

    def mean(self) -> Float[Array, "layer head"]:
        """Mean over events, in float64; refuses when there is none."""
        if not len(self.values):
            raise ValueError(f"{self.name}: no events, so there is no mean")
        return self.values.mean(0, dtype=np.float64)

    def top(self, k: int = 10) -> Ranking:
        """The `k` heads of highest mean score. A top 3 is always the head of the top 5."""
        mean = self.mean()
        order = np.argsort(-mean.ravel(), kind="stable")
        heads = [Head(*map(int, np.unravel_index(i, mean.shape))) for i in order]
        scores = mean.ravel()[order]
        tied = tuple(h for h, s in zip(heads[k:], scores[k:], strict=True) if k and s == scores[k - 1])
        return Ranking(tuple(heads[:k]), tuple(map(float, scores[:k])), tied)

    def to_frame(self) -> pd.DataFrame:
        """A long table: event, layer, head, and the score under its name."""
        import pandas as pd

        n, layers, heads = self.values.shape
        index = np.indices((n, layers, heads)).reshape(3, -1)
        names = np.array(self.events, object) if self.events else np.arange(n)
        return pd.DataFrame({"event": names[index[0]], "layer": index[1], "head": index[2], self.name: self.values.ravel()})

    def save(self, path: str | Path) -> None:
        """Write safetensors, with name, unit, sign, events and meta as JSON in the header."""
        from safetensors.numpy import save_file

        about = {"name": self.name, "unit": self.unit, "sign": self.sign, "events": list(self.events), "meta": self.meta}
        arrays = {"values": np.ascontiguousarray(self.values)}
        about["digest"] = fingerprint(arrays, json.dumps(about))
        save_file(arrays, str(path), metadata={"about": json.dumps(about)})  # one key: safetensors writes several in any order

    @classmethod
    def load(cls, path: str | Path) -> HeadScores:
        """Read what `save` wrote; raises InputError where it is something else, or its values were changed."""
        from safetensors import safe_open

        with as_written(path, "it holds no head scores; HeadScores.save writes them"), safe_open(str(path), framework="numpy") as file:
            about, values = json.loads(file.metadata()["about"]), file.get_tensor("values")
            if about.pop("digest", "") not in ("", fingerprint({"values": values}, json.dumps(about))):
                raise InputError(f"{path}: the scores were changed after they were saved; restore the file")
            return cls(values, about["name"], about["unit"], about["sign"], tuple(about["events"]), about["meta"])

    def __repr__(self) -> str:
        n, layers, heads = self.values.shape
        best = ", ".join(f"{h} {s:+.2f}" for h, s in self.top(3)) if n else "no events"
        return f"HeadScores({self.name}, {self.unit}: {n} events x {layers} layers x {heads} heads; top {best})"

    def _repr_html_(self) -> str:
        n, layers, heads = self.values.shape
        rows = [{"head": str(h), self.unit: f"{s:+.3f}"} for h, s in self.top(8)] if n else []
        return view(self.name, f"mean over {n} events, {layers} layers x {heads} heads ({self.sign})", (rows, layers * heads))

def overlaps(sets: Mapping[str, HeadSet], total: int) -> list[dict[str, Any]]:
    """Every pair of sets: heads they share, how many would by chance, and the probability of at least as many.

    Args:
        sets: name -> heads.
        total: heads of the model, from which chance draws (hypergeometric).

    Raises:
        ValueError: when a set has more heads than there are.
    """
    from itertools import combinations

    from scipy.stats import hypergeom

    if (largest := max(map(len, sets.values()), default=0)) > total:
        raise ValueError(f"{largest} heads are not drawn from {total}")

    return [{"sets": [a, b], "sizes": [len(sets[a]), len(sets[b])], "shared": len(sets[a] & sets[b]), "expected": round(len(sets[a]) * len(sets[b]) / total, 4),
             "p": round(float(hypergeom.sf(len(sets[a] & sets[b]) - 1, total, len(sets[a]), len(sets[b]))), 6)} for a, b in combinations(sets, 2)]
