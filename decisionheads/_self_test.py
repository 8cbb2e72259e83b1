"""The self-test: may this model be used, and is it exact?

Loading runs it. It feeds random distinct tokens, so any tokenizer passes; errors are relative to the
standard deviation of the logits. Each failure is one sentence that names the cause and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ._cache import Prefix
from ._rows import Engine, Rows
from .errors import InputError


@dataclass(frozen=True)
class Check:
    """One thing that was tried: its error, the limit, and what a failure means."""

    name: str
    error: float
    limit: float
    sentence: str
    at_least: bool = False  # the error must exceed the limit (something must change)

    @property
    def ok(self) -> bool:
        return self.error >= self.limit if self.at_least else self.error <= self.limit


@dataclass(frozen=True)
class SelfTest:
    """What the self-test found.

    Attributes:
        model: name of the model.
        path: how branches are run, in words.
        checks: everything that was tried on this path, in order.
        packed: whether the path packs rows into one forward.
        before: what came of the faster paths that were tried before.
    """

    model: str
    path: str
    checks: tuple[Check, ...]
    packed: bool
    before: tuple[SelfTest, ...] = ()

    @property
    def verdict(self) -> Literal["exact", "slow", "refused"]:
        if not all(check.ok for check in self.checks):
            return "refused"
        return "exact" if self.packed else "slow"

    @property
    def reason(self) -> str:
        """The first failure, in one sentence; empty when there is none."""
        return next((f"{self.model}: {check.sentence}" for check in self.checks if not check.ok), "")

    @property
    def error(self) -> float:
        """The largest error of what must be equal, in deviations of the logits."""
        return max((check.error for check in self.checks if not check.at_least), default=float("nan"))

    def to_dict(self) -> dict[str, Any]:
        """The verdict and every check, as plain values; infinite errors as text, which JSON has no number for."""
        number = lambda x: x if math.isfinite(x) else str(x)  # noqa: E731
        return {"model": self.model, "verdict": self.verdict, "path": self.path, "reason": self.reason,
                "checks": [{"name": c.name, "ok": c.ok, "error": number(c.error), "limit": c.limit, "at_least": c.at_least} for c in self.checks],
                "not_possible": [{"path": t.path, "reason": t.reason} for t in self.before if t.reason]}

    def __str__(self) -> str:
        rows = [f"{'ok' if c.ok else 'FAILED':7}{c.error:10.2e}  {'>=' if c.at_least else '<='} {c.limit:.0e}  {c.name}" for c in self.checks]
        tried = [f"not possible: {t.path} ({t.reason.removeprefix(self.model + ': ')})" for t in self.before if t.reason]
        end = {"exact": f"exact, {self.path}", "slow": f"slow but exact, {self.path}", "refused": f"refused: {self.reason.removeprefix(self.model + ': ')}"}
        return "\n".join([*rows, *tried, f"{self.model}: {end[self.verdict]}"])


def self_test(hooked: Engine, tokenizer=None, seed: int = 0) -> SelfTest:
    """Find the fastest path on which everything that the engine relies on is exact, and set it.

    Packed rows over the plain model's prefill; packed rows over the bridge's own prefill; one branch a
    batch row. A dozen short forwards each, and for packed rows as many again on the plain copy.
    """
    before: list[SelfTest] = []
    for packed, prefills, path in hooked.paths:
        hooked.packed, hooked.prefills, hooked.copies = packed, prefills, False
        hooked.skipping = hooked.narrow = hooked.weighted = False
        result = SelfTest(hooked.name, path, tuple(_try(hooked, tokenizer, seed)), packed, tuple(before))
        if result.verdict != "refused":
            return _with_shortcuts(hooked, tokenizer, seed, result) if packed else result
        before.append(result)
    return before[0] if len(before) == 1 else SelfTest(before[0].model, before[0].path, before[0].checks, True, tuple(before[1:]))


def _with_shortcuts(hooked: Engine, tokenizer, seed: int, result: SelfTest) -> SelfTest:
    """Packed rows that are exact: which shortcuts give the same, and does the plain copy, shortcuts included?"""
    shortcuts = _choose_shortcuts(hooked, tokenizer, seed)
    if hooked.copied is None:
        return result
    hooked.copies, hooked.skipping, hooked.narrow = True, False, False
    copy = SelfTest(hooked.name, f"{result.path} on the plain copy", tuple(_try(hooked, tokenizer, seed)), True)
    if copy.verdict == "exact" and _choose_shortcuts(hooked, tokenizer, seed) != shortcuts:
        late = Check("shortcuts", float("inf"), hooked.limit, "rows that enter late, or logits of a few tokens, are not exact there")
        copy = replace(copy, checks=(*copy.checks, late))
    hooked.copies = copy.verdict == "exact"
    hooked.skipping, hooked.narrow, hooked.weighted = shortcuts
    if not hooked.copies:
        return replace(result, before=(*result.before, copy))
    same = Check("rows on the plain copy equal one forward", copy.error, hooked.limit, "")
    return replace(result, path=copy.path, checks=(*result.checks, same))


def _try(hooked: Engine, tokenizer, seed: int) -> list[Check]:
    """One path, check by check; what an architecture raises on the way is a failed check too."""
    checks: list[Check] = []
    try:
        for check in _checks(hooked, tokenizer, seed):
            checks.append(check)
    except InputError:
        raise
    except Exception as error:  # whatever an unknown architecture does with our calls: it ends in a refusal, never in numbers
        first = str(error).strip().split("\n")[0][:120].rstrip(".")
        checks.append(Check("runs", float("inf"), hooked.limit, f"this architecture does not run on this path ({type(error).__name__}: {first})"))
    return checks


def _checks(hooked: Engine, tokenizer, seed: int) -> Iterator[Check]:
    limit = hooked.limit
    moves = min(10 * limit, 0.01)  # what must change has to change by this much

    def check(what: str, error: float, sentence: str, at_least: float | None = None) -> Check:
        return Check(what, error, limit if at_least is None else at_least, sentence, at_least is not None)

    ids = _random_ids(hooked, tokenizer, seed)
    n = len(ids)
    last, half = n - 1, n // 2
    with torch.no_grad():
        full = hooked.full_logits(ids)
        deviation = float(full.std())
        relative = lambda a, b: float((a - b).abs().max()) / deviation  # noqa: E731
        prefix = hooked.prefill(ids, (last,), chunk=max(8, n // 3))
        yield check("prefill equals one forward", relative(prefix.logits[0], full[last]),
                    "a prefill in chunks does not give the logits of one forward; this cache layout is not supported")

        cached = _rows(hooked, prefix, [last])[0]
        lone = hooked.full_logits(ids[last:], start=last)[0]
        yield check("a lone token differs", relative(lone, full[last]), at_least=moves,
                    sentence="the last token gives the same logits with and without its context; the model ignores its context")
        yield check("a cached token equals one forward", relative(cached, full[last]), _cache_sentence(relative(cached, lone) <= limit))
        # three equal rows, the first and the last compared, with a row of another position between them
        where = [last, last, half, last]
        clean = _rows(hooked, prefix, where)
        yield check("first row equals one forward", relative(clean[0], full[last]),
                    "packed rows are not exact in this architecture; it is not supported")
        yield check("last row equals one forward", relative(clean[3], full[last]),
                    "later packed rows differ from the first; layers with a state of their own are not supported")
        yield check("a row at another position equals one forward", relative(clean[2], full[half]),
                    "packed rows at different positions are not exact; masks of this architecture are not supported")

        layer, head = hooked.layers[len(hooked.layers) // 2], hooked.n_heads // 2
        value = torch.linspace(-1, 1, hooked.d_head * 8, device=hooked.device, dtype=hooked.dtype)[: hooked.d_head]
        edited = _rows(hooked, prefix, where, lambda at, z: _set(z, 1, head, value) if at == layer else z)
        literal = hooked.full_logits(ids, edit=(layer, head, value))[last]
        yield check("an edit of z changes the output", relative(edited[1], clean[1]), at_least=moves,
                    sentence="editing z of one head changes nothing; hook_z is not on the path of this architecture")
        yield check("an edit of z equals a pre-hook on the output projection", relative(edited[1], literal),
                    "an edit of z is not an edit of the output projection's input; this attention layout is not supported")
        yield check("an edit stays in its row", relative(edited[[0, 2, 3]], clean[[0, 2, 3]]),
                    "editing one row moves the others; packed rows are not independent in this architecture")

        blocked = _rows(hooked, prefix, where, blocked=lambda at, rows: _cut(hooked, at == layer, head, rows, last))
        yield check("blocking a read changes the output", relative(blocked[1], clean[1]), at_least=1e-5,  # one head's last few keys may be worth little
                    sentence="removing what a head reads changes nothing; attention masks do not reach this architecture")
        yield check("a blocked read stays in its row", relative(blocked[[0, 2, 3]], clean[[0, 2, 3]]),
                    "blocking one row moves the others; packed rows are not independent in this architecture")
        yield check("heads sum to the attention output", _heads_sum(hooked, ids, layer),
                    "the heads of a layer do not add up to its attention output; this output projection is not supported")


def _choose_shortcuts(hooked: Engine, tokenizer, seed: int) -> tuple[bool, bool, bool]:
    """Rows that enter late, logits of a few ids, and values replaced in z: each where it gives what the long way gives."""
    ids = _random_ids(hooked, tokenizer, seed)
    last, deep, few = len(ids) - 1, hooked.layers[-1], tuple(ids[:3].tolist())
    token, where = ids[[last] * 3], torch.tensor([last] * 3, device=hooked.device)
    late = Rows(token, where, torch.arange(3, device=hooked.device), where, (0, 0, deep), (0, 0, 0))
    value = torch.linspace(-1, 1, hooked.d_head, device=hooked.device, dtype=hooked.dtype)
    edit = lambda at, z: _set(z, 2, 0, value) if at == deep else z  # noqa: E731
    prefix = hooked.prefill(ids)
    with torch.no_grad():
        long = hooked.run(prefix, Rows.single(ids, where), edit)[0]
        scale = float(long.std())
        try:
            hooked.skipping = float((hooked.run(prefix, late, edit)[0] - long).abs().max()) <= hooked.limit * scale
        except Exception:  # an architecture whose blocks are given more than positions: every row runs through every layer
            hooked.skipping = False
        try:
            narrow = hooked.run(prefix, Rows.single(ids, where), edit, ids=few)[1]
            hooked.narrow = float((narrow - long[:, list(few)]).abs().max()) <= hooked.limit * scale
        except RuntimeError:  # a last projection that is not a matrix alone: the model's own logits are used
            hooked.narrow = False
        try:
            hooked.weighted = _weighted_error(hooked, prefix, last) <= hooked.limit
        except Exception:  # patterns that are not handed out, or a cache of another form: values are never replaced
            hooked.weighted = False
    return hooked.skipping, hooked.narrow, hooked.weighted


@torch.no_grad()
def _weighted_error(hooked: Engine, prefix: Prefix, position: int) -> float:
    """Largest relative difference between z and the weighted sum of the prefix's values, over layers.

    A gate on z, or a cache that holds something else than values, shows here.
    """
    patterns, errors = {}, [0.0]

    def compare(layer: int, z: Tensor) -> Tensor:
        values = prefix.layers[layer][1][0, :, :position + 1]
        if hooked.n_heads % len(values) or values.shape[-1] != z.shape[-1]:
            errors.append(float("inf"))
            return z
        sums = torch.einsum("hk,hkd->hd", patterns[layer], values.repeat_interleave(hooked.n_heads // len(values), 0))
        errors.append(float((sums - z[0]).abs().max() / z.std()))
        return z

    at = torch.tensor([position], device=hooked.device)
    hooked.run(prefix, Rows.single(prefix.ids, at), compare, on_pattern=lambda layer, p: patterns.__setitem__(layer, p[:, 0]))
    return max(errors)


def _cache_sentence(context_lost: bool) -> str:
    from importlib.metadata import version

    if context_lost:
        return (f"the key-value cache does not reach attention with transformer-lens {version('transformer-lens')} and "
                f"transformers {version('transformers')}; install the versions of constraints.txt")
    return "a token with a cached prefix does not give the logits of one forward; this cache layout is not supported"


def _random_ids(hooked: Engine, tokenizer, seed: int) -> Tensor:
    """Random distinct non-special ids, a few more than the sliding window where there is one."""
    special = set(tokenizer.all_special_ids) if tokenizer is not None else set()
    usable = [i for i in range(min(hooked.vocabulary, 50_000)) if i not in special]
    length = max(24, hooked.reach + 8) if hooked.context is None else min(max(24, hooked.reach + 8), hooked.context)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(usable), generator=generator)[torch.arange(length) % len(usable)]
    return torch.tensor(usable, device=hooked.device)[order.to(hooked.device)]


def _rows(hooked: Engine, prefix: Prefix, where: list[int], z_hook=None, blocked=None) -> Tensor:
    """Logits of rows at several positions; hooks act on row 1 alone. Without packing, each position
    is a batch, and the batch that row 1 is in is hooked."""
    out: dict[int, Tensor] = {}
    for group in ([list(range(len(where)))] if hooked.packed else [[i for i, p in enumerate(where) if p == position] for position in dict.fromkeys(where)]):
        hooks = 1 in group or len(where) == 1
        positions = torch.tensor([where[i] for i in group], device=hooked.device)
        logits, _ = hooked.run(prefix, Rows.single(prefix.ids, positions), z_hook if hooks else None,
                               (lambda layer, n=len(group): blocked(layer, n)) if hooks and blocked else None)
        out |= dict(zip(group, logits, strict=True))
    return torch.stack([out[i] for i in range(len(where))])


def _set(z: Tensor, row: int, head: int, value: Tensor) -> Tensor:
    z = z.clone()
    z[row, head] = value
    return z


def _cut(hooked: Engine, here: bool, head: int, rows: int, length: int) -> Tensor | None:
    if not here:
        return None
    cut = torch.zeros(hooked.n_heads, rows, length + rows, dtype=torch.bool, device=hooked.device)
    cut[head, 1, max(0, length - 6):length] = True
    return cut


def _heads_sum(hooked: Engine, ids: Tensor, layer: int) -> float:
    """Largest relative difference between the block's output and the sum over heads plus b_O once."""
    z, out = hooked.attention_output(ids, layer)
    return float((hooked.head_outputs(layer, z).sum(0) + hooked.output_bias(layer) - out).abs().max() / out.std())
