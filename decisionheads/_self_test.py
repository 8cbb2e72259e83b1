"""The self-test: may this model be used, and is it exact?

Loading runs it. It feeds random distinct tokens, so any tokenizer passes; errors are relative to the
standard deviation of the logits. Each failure is one sentence that names the cause and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ._hooked import Hooked


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
        checks: everything that was tried, in order.
        verdict: `exact` (packed rows) or `refused`.
    """

    model: str
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> Literal["exact", "refused"]:
        return "exact" if all(check.ok for check in self.checks) else "refused"

    @property
    def reason(self) -> str:
        """The first failure, in one sentence; empty when there is none."""
        return next((check.sentence for check in self.checks if not check.ok), "")

    def __str__(self) -> str:
        rows = [f"{'ok' if c.ok else 'FAILED':7}{c.error:10.2e}  {'>=' if c.at_least else '<='} {c.limit:.0e}  {c.name}" for c in self.checks]
        return "\n".join([*rows, f"{self.model}: {self.verdict}" + (f": {self.reason}" if self.reason else "")])


def self_test(hooked: Hooked, tokenizer=None, seed: int = 0) -> SelfTest:
    """Try on random tokens everything that the engine relies on; about a dozen short forwards."""
    name = hooked.config.name_or_path or type(hooked.bridge.original_model).__name__
    limit = hooked.limit
    moves = min(10 * limit, 0.01)  # what must change has to change by this much
    checks: list[Check] = []

    def check(what: str, error: float, sentence: str, at_least: float | None = None) -> None:
        checks.append(Check(what, error, limit if at_least is None else at_least, sentence, at_least is not None))

    ids = _random_ids(hooked, tokenizer, seed)
    n, deviation = len(ids), 1.0
    with torch.no_grad():
        full = _plain_forward(hooked, ids)
        deviation = float(full.std())
        relative = lambda a, b: float((a - b).abs().max()) / deviation  # noqa: E731

        try:
            last = n - 1
            prefix = hooked.prefill(ids, (last,), chunk=max(8, n // 3))
        except RuntimeError as error:
            check("cache holds every position", float("inf"), f"{name}: {error}; this attention layout is not supported")
            return SelfTest(name, tuple(checks))
        check("prefill equals one forward", relative(prefix.logits[0], full[last]),
              f"{name}: a prefill in chunks does not give the logits of one forward; this cache layout is not supported")

        cached = _rows(hooked, prefix, ids, torch.tensor([last], device=hooked.device))[0]
        lone = _plain_forward(hooked, ids[last:], start=last)[0]
        check("a lone token differs", relative(lone, full[last]), at_least=moves,
              sentence=f"{name}: the last token gives the same logits with and without its context; the model ignores its context")
        check("a cached token equals one forward", relative(cached, full[last]), _cache_sentence(name, relative(cached, lone) <= limit))
        half = n // 2
        # three equal rows, the first and the last compared, with a row of another position between them
        where = torch.tensor([last, last, half, last], device=hooked.device)
        clean = _rows(hooked, prefix, ids, where)
        check("first packed row equals one forward", relative(clean[0], full[last]),
              f"{name}: packed rows are not exact in this architecture; it is not supported")
        check("last packed row equals one forward", relative(clean[3], full[last]),
              f"{name}: later packed rows differ from the first; layers with a state of their own are not supported")
        check("a row at another position equals one forward", relative(clean[2], full[half]),
              f"{name}: packed rows at different positions are not exact; masks of this architecture are not supported")

        layer, head = hooked.n_layers // 2, hooked.n_heads // 2
        value = torch.linspace(-1, 1, hooked.d_head * 8, device=hooked.device, dtype=hooked.dtype)[: hooked.d_head]
        edited = _rows(hooked, prefix, ids, where, lambda at, z: _set(z, 1, head, value) if at == layer else z)
        literal = _plain_forward(hooked, ids, lambda: _o_proj_edit(hooked, layer, head, value))[last]
        check("an edit of z changes the output", relative(edited[1], clean[1]), at_least=moves,
              sentence=f"{name}: editing z of one head changes nothing; hook_z is not on the path of this architecture")
        check("an edit of z equals a pre-hook on the output projection", relative(edited[1], literal),
              f"{name}: an edit of z is not an edit of the output projection's input; this attention layout is not supported")
        check("an edit stays in its row", relative(edited[[0, 2, 3]], clean[[0, 2, 3]]),
              f"{name}: editing one row moves the others; packed rows are not independent in this architecture")

        blocked = _rows(hooked, prefix, ids, where, blocked=lambda at: _cut(hooked, at, layer, head, len(where), last))
        check("blocking a read changes the output", relative(blocked[1], clean[1]), at_least=moves,
              sentence=f"{name}: removing what a head reads changes nothing; attention masks do not reach this architecture")
        check("a blocked read stays in its row", relative(blocked[[0, 2, 3]], clean[[0, 2, 3]]),
              f"{name}: blocking one row moves the others; packed rows are not independent in this architecture")
        check("heads sum to the attention output", _heads_sum(hooked, ids, layer),
              f"{name}: the heads of a layer do not add up to its attention output; this output projection is not supported")
    return SelfTest(name, tuple(checks))


def _cache_sentence(name: str, context_lost: bool) -> str:
    from importlib.metadata import version

    if context_lost:
        return (f"{name}: the key-value cache does not reach attention with transformer-lens {version('transformer-lens')} and "
                f"transformers {version('transformers')}; install the versions of constraints.txt")
    return f"{name}: a token with a cached prefix does not give the logits of one forward; this cache layout is not supported"


def _random_ids(hooked: Hooked, tokenizer, seed: int) -> Tensor:
    """Random distinct non-special ids, a few more than the sliding window where there is one."""
    special = set(tokenizer.all_special_ids) if tokenizer is not None else set()
    usable = [i for i in range(min(hooked.vocabulary, 50_000)) if i not in special]
    window = max((w for w in hooked.windows if w), default=0)
    length = max(24, window + 8)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(usable), generator=generator)[torch.arange(length) % len(usable)]
    return torch.tensor(usable, device=hooked.device)[order.to(hooked.device)]


def _plain_forward(hooked: Hooked, ids: Tensor, edit: Callable | None = None, start: int = 0) -> Tensor:
    """Logits of one ordinary forward without our cache and masks; `edit` installs a plain hook."""
    model = hooked.plain if hooked.plain is not None else hooked.bridge.original_model
    handle = edit() if edit else None
    try:
        positions = torch.arange(start, start + len(ids), device=ids.device)[None]
        return model(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0].float()
    finally:
        if handle is not None:
            handle.remove()


def _rows(hooked: Hooked, prefix, ids: Tensor, where: Tensor, z_hook=None, blocked=None) -> Tensor:
    return hooked.rows(prefix, ids[where], where, torch.arange(len(where), device=hooked.device), where, z_hook, blocked)


def _set(z: Tensor, row: int, head: int, value: Tensor) -> Tensor:
    z = z.clone()
    z[row, head] = value
    return z


def _cut(hooked: Hooked, at: int, layer: int, head: int, rows: int, length: int) -> Tensor | None:
    if at != layer:
        return None
    cut = torch.zeros(hooked.n_heads, rows, length + rows, dtype=torch.bool, device=hooked.device)
    cut[head, 1, max(0, length - 6):length] = True
    return cut


def _o_proj_edit(hooked: Hooked, layer: int, head: int, value: Tensor):
    """A plain torch pre-hook on the output projection: head `head` of the last position becomes `value`."""

    def pre(_, args):
        flat = args[0].clone()
        flat[0, -1].view(hooked.n_heads, -1)[head] = value
        return (flat, *args[1:])

    return hooked.output_projection(layer).register_forward_pre_hook(pre)


def _heads_sum(hooked: Hooked, ids: Tensor, layer: int) -> float:
    """Largest relative difference between the block's output and the sum over heads plus b_O once."""
    seen: list[tuple[Tensor, Tensor]] = []
    projection = hooked.output_projection(layer)
    _plain_forward(hooked, ids, lambda: projection.register_forward_hook(
        lambda module, args, out: seen.append((args[0][0, -1], out[0, -1]))))
    z, out = seen[0]
    parts = hooked.head_outputs(layer, z.view(hooked.n_heads, -1))
    return float((parts.sum(0) + hooked.output_bias(layer) - out).abs().max() / out.std())
