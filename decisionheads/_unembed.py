"""The last mile: final norm and unembedding, in float32 whatever the model's number format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from .views import Brief

# largest error of exact arithmetic, relative to the standard deviation of the logits; norms and
# softmax of many models compute in float32 even where the weights are float64
LIMIT = {torch.float32: 1e-4, torch.float64: 1e-5, torch.float16: 0.05, torch.bfloat16: 0.3}


Norm = tuple[torch.nn.Module, torch.nn.Module]


def same_weight(model: torch.nn.Module, component) -> torch.nn.Module:
    """The module of a weight-sharing copy that a bridge component wraps in its own model."""
    weight = component.original_component.weight
    return next(module for module in model.modules() if getattr(module, "weight", None) is weight)


class Unembedding:
    """The final norm and the unembedding of a model.

    Args:
        final: the final norm: the module that is hooked, and the one that holds its weights.
        after_attention: the same of each norm between an attention output and the residual stream.
        weight, bias: W_U `[vocabulary, d_model]` and its bias.
        limit: largest error against the model's own logits, relative to their standard deviation.
        shape: `logit_scale`, `logits_scaling`, `final_logit_softcapping`, `residual_multiplier` of the
            config, or None each.
    """

    def __init__(self, final: Norm, after_attention: dict[int, Norm], weight: Tensor, bias: Tensor | None, limit: float, shape: dict[str, float | None]):
        self.final, self.after_attention = final, after_attention
        self.weight, self.bias, self.limit, self.shape = weight, bias, limit, shape
        self.sixteen_bit = weight.dtype in (torch.float16, torch.bfloat16)

    @contextmanager
    def hidden(self, norm: torch.nn.Module, always: bool = False) -> Iterator[list[Tensor]]:
        """Collects the final norm's output `[row, d_model]`: in 16-bit models, whose own last projection
        rounds margins away, and wherever it is asked for."""
        seen: list[Tensor] = []
        handle = None
        if self.sixteen_bit or always:
            handle = norm.register_forward_hook(lambda module, args, out: seen.append(out.flatten(0, -2)))
        try:
            yield seen
        finally:
            if handle is not None:
                handle.remove()

    def logits(self, logits: Tensor, hidden: list[Tensor], keep: Tensor | None = None) -> Float[Tensor, "row vocabulary"]:
        """Float32 logits: the model's own, or in 16 bits projected again from the final hidden state.

        Raises:
            RuntimeError: if the projection does not give the model's logits (up to its rounding).
        """
        if not self.sixteen_bit or not hidden:
            return logits if logits.dtype == torch.float64 else logits.float()
        rows = hidden[0] if keep is None else hidden[0][keep]
        out = self._project(rows, self.weight, self.bias)
        self.compare(out, logits.float(), logits)
        return out

    def narrow(self, hidden: list[Tensor], ids: tuple[int, ...]) -> Float[Tensor, "row id"]:
        """Float32 logits of a few token ids, from the final hidden state."""
        where = list(ids)
        return self._project(hidden[0], self.weight[where], None if self.bias is None else self.bias[where])

    def compare(self, ours: Tensor, theirs: Tensor, full: Tensor) -> None:
        """Hold a projection of ours against the model's own logits, in units of their deviation.

        Raises:
            RuntimeError: where they differ by more than rounding.
        """
        if ours.numel() and not float((ours - theirs).detach().abs().max()) <= self.limit * float(full.detach().float().std()):
            raise RuntimeError("the last projection of this architecture cannot be repeated in float32; load it with dtype float32")

    def _project(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.sixteen_bit:
            hidden = hidden.float()  # in pieces: a float32 copy of W_U may be gigabytes
            out = torch.cat([hidden @ part.float().T for part in weight.split(16_384)], -1)
        else:
            out = hidden @ weight.T
        out = out if bias is None else out + bias.to(out)
        scale, over, cap = (self.shape.get(name) for name in ("logit_scale", "logits_scaling", "final_logit_softcapping"))
        out = out * scale if scale else out
        out = out / over if over else out
        out = torch.tanh(out / cap) * cap if cap else out
        return out if out.dtype == torch.float64 else out.float()

    @contextmanager
    def frozen(self) -> Iterator[Frozen]:
        """See the norms on the direct path of the forwards run inside, to hold their scales fixed."""
        final = FrozenNorm(self.final[1])
        after = {i: FrozenNorm(module) for i, (_, module) in self.after_attention.items()}
        leaves: list[Tensor] = []

        def add_leaf(module, args, out):
            final.see(args[0], out)
            leaves.append(torch.zeros_like(out, requires_grad=True))
            return out + leaves[-1]

        handles = [self.final[0].register_forward_hook(add_leaf)]
        handles += [self.after_attention[i][0].register_forward_hook(lambda module, args, out, norm=norm: norm.see(args[0], out)) for i, norm in after.items()]
        try:
            yield Frozen(final, after, leaves, self.shape.get("residual_multiplier") or 1.0)
        finally:
            for handle in handles:
                handle.remove()


@dataclass(frozen=True, eq=False, repr=False)
class Frozen(Brief):
    """The direct path from a layer's attention output to the logits, every norm's scale held fixed.

    Attributes:
        final: the norm before the unembedding.
        after_attention: layer -> the norm between its attention output and the residual stream, where
            an architecture has one (Gemma).
        leaves: zeros at the final norm's output; the gradient there is a margin's unembedding direction.
        multiplier: what a layer's output is scaled by on its way into the residual stream (Granite).
    """

    final: FrozenNorm
    after_attention: dict[int, FrozenNorm]
    leaves: list[Tensor]
    multiplier: float

    def readout(self, unembedding: Float[Tensor, "row d_model"], layer: int) -> Float[Tensor, "row d_model"]:
        """What a margin reads of a layer's attention output, given its unembedding direction."""
        direction = self.final.direction(unembedding) * self.multiplier
        norm = self.after_attention.get(layer)
        return direction if norm is None else norm.direction(direction)


class FrozenNorm:
    """A norm at rows: its input and output `[row, d_model]`, as seen."""

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self.input = self.output = torch.empty(0)

    def see(self, before: Tensor, after: Tensor) -> None:
        self.input, self.output = before.detach().flatten(0, -2), after.detach().flatten(0, -2)

    @torch.no_grad()
    def direction(self, unembedding: Float[Tensor, "row d_model"]) -> Float[Tensor, "row d_model"]:
        """Pull a gradient at the norm's output back to its input, its scale held fixed.

        Raises:
            ValueError: for a norm that is neither LayerNorm nor RMSNorm.
        """
        x, y = self.input.float(), self.output.float()
        close = 1e-3 if self.output.dtype in (torch.float32, torch.float64) else 2e-2
        eps = next((getattr(self.module, name) for name in ("variance_epsilon", "eps", "epsilon") if hasattr(self.module, name)), 1e-5)
        # TransformerLens' own norms call them w and b, and have none where they are folded into W_U
        weight, bias = (next((v for name in names if (v := getattr(self.module, name, None)) is not None), None) for names in (("weight", "w"), ("bias", "b")))
        weight = weight.float() if weight is not None else torch.ones_like(x[0])
        shift = bias.float() if bias is not None else 0.0
        for centred in (False, True):
            inner = x - x.mean(-1, keepdim=True) if centred else x
            scale = (inner.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
            for gain in (weight, 1 + weight):
                if torch.allclose(inner * scale * gain + shift, y, rtol=close, atol=close * float(y.std())):
                    back = unembedding.float() * gain * scale
                    return (back - back.mean(-1, keepdim=True) if centred else back).to(unembedding)
        raise ValueError(f"direct logit attribution does not know the final norm {type(self.module).__name__}")
