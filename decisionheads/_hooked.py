"""What the engine needs of a hooked model: one packed forward over a read-only prefix.

`Hooked` wraps a `TransformerBridge` and knows four things about it: where each layer's z is (the
input of the output projection), where its attention mask comes in, how far each layer sees, and
how a key-value cache reaches its attention. Nothing here decides *what* to change (see
`interventions`) or *which* rows to run (see `branches`).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ._batch_rows import batch_rows
from ._cache import Prefix, arguments, cache_argument, full_cache, layer_windows, longest_reach, read_only_cache
from ._late_entry import entering
from ._rows import BlockedReads, Choose, PatternHook, Rows, ZHook, eval_mode
from ._unembed import LIMIT, Unembedding, same_weight
from ._ways import Bridged, Copied, Way
from .errors import InputError
from .heads import HeadSet


class Hooked:
    """A `TransformerBridge` seen through its z, its masks and its cache.

    Args:
        bridge: the bridge; it is never changed beyond hooks that are removed after every call.
        plain: optional weight-sharing copy of the Hugging Face model, for prefills and packed rows.

    Attributes:
        heads: every head there is; layers without attention have none.
        prefills: the plain copy reads texts; else the bridge does.
        copies: the plain copy runs packed rows, unless patterns are wanted; else the bridge does.
        packed: branches share one packed forward; else each takes a batch row of its own.
        skipping: rows enter at the first layer where they differ from a clean row.
        narrow: logits of a few token ids are projected from the final hidden state.
        weighted: z is the attention-weighted sum of the values that a prefix holds.
    """

    def __init__(self, bridge, plain=None):
        self.bridge, self.plain = bridge, plain
        self.n_layers, self.n_heads = bridge.cfg.n_layers, bridge.cfg.n_heads
        names = {i: f"blocks.{i}.attn.hook_z" for i in range(self.n_layers)}
        self.layers = [i for i, name in names.items() if name in bridge.hook_dict and hasattr(bridge.blocks[i], "attn")]
        self.config = bridge.original_model.config
        if not self.layers:
            raise ValueError(f"{type(bridge.original_model).__name__} has no attention heads (no hook_z in any layer); it is not supported")
        self.bridged = Bridged(bridge, {i: bridge.hook_dict[names[i]] for i in self.layers}, self.n_heads)
        self.copied = self._copied()
        self.heads = HeadSet([(layer, head) for layer in self.layers for head in range(self.n_heads)])
        self.windows = layer_windows(self.config, self.n_layers)
        self.d_head = _width(self.output_projection(self.layers[0])) // self.n_heads
        self.vocabulary = self.config.get_text_config().vocab_size
        parameter = next(bridge.original_model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.limit = LIMIT[self.dtype]
        self.unembedding = self._unembedding()
        self.name = self.config.name_or_path or type(bridge.original_model).__name__
        self.reach = longest_reach(self.config.get_text_config())
        self.context = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        self.paths = [(True, True, "packed rows"), (True, False, "packed rows, prefill by the bridge"), (False, True, "one branch a batch row")]
        if plain is None:
            del self.paths[0]
        self.prefills = self.packed = self.skipping = self.narrow = self.weighted = True
        self.copies = self.copied is not None
        self.last = None  # where branches are not packed: `(tokens, cache)` of the text last continued

    def _copied(self) -> Copied | None:
        """The way through the plain copy, whose modules are named as those that the bridge wraps; None where they are not."""
        if self.plain is None:
            return None
        blocks = self.bridge.blocks
        try:
            attentions = {layer: self.plain.get_submodule(f"{blocks[layer].name}.{blocks[layer].attn.name}") for layer in self.layers}
            layers = [self.plain.get_submodule(block.name) for block in blocks]
        except AttributeError:
            return None
        return Copied(self.plain, layers, attentions, {layer: self.output_projection(layer) for layer in self.layers}, same_weight(self.plain, self.bridge.ln_final), self.n_heads)

    def way(self, patterns: bool = False) -> Way:
        """What packed rows run through: the bridge for patterns, and where anybody touched it."""
        return self.bridged if patterns or not self.copies or self.bridged.touched else self.copied

    def _unembedding(self) -> Unembedding:
        final, head = self.bridge.ln_final, self.bridge.unembed.original_component
        after = {i: (block.ln1_post, block.ln1_post.original_component) for i, block in enumerate(self.bridge.blocks) if hasattr(block, "ln1_post")}
        cap = {name: getattr(self.config, name, None) for name in ("logit_scale", "logits_scaling", "final_logit_softcapping", "residual_multiplier")}
        return Unembedding((final, final.original_component), after, head.weight, getattr(head, "bias", None), self.limit, cap)

    # -- plain forwards ----------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """The Hugging Face model: the plain copy where there is one, else the one inside the bridge."""
        return self.plain if self.plain is not None else self.bridge.original_model

    @torch.no_grad()
    def full_logits(self, ids: Int[Tensor, " position"], start: int = 0,
                    edit: tuple[int, int, Tensor] | None = None) -> Float[Tensor, "position vocabulary"]:
        """Logits of one ordinary forward, without our cache and masks; z of `(layer, head)` at the last
        position set to a value by a plain pre-hook on the output projection."""
        given = {"position_ids": torch.arange(start, start + len(ids), device=ids.device)[None]} if start and _takes(self.model, "position_ids") else {}

        def pre(module, args):
            flat = args[0].clone()
            flat[0, -1].view(self.n_heads, -1)[edit[1]] = edit[2]
            return (flat, *args[1:])

        handle = self.output_projection(edit[0]).register_forward_pre_hook(pre) if edit else None
        try:
            with eval_mode(self.model):
                return self.model(input_ids=ids[None], use_cache=False, **given).logits[0].float()
        finally:
            if handle is not None:
                handle.remove()

    @torch.no_grad()
    def attention_output(self, ids: Int[Tensor, " position"], layer: int) -> tuple[Tensor, Tensor]:
        """z `[head, d_head]` and the attention output `[d_model]` of a layer at the last position."""
        seen: list[tuple[Tensor, Tensor]] = []
        handle = self.output_projection(layer).register_forward_hook(lambda module, args, out: seen.append((args[0][0, -1], out[0, -1])))
        try:
            self.full_logits(ids)
        finally:
            handle.remove()
        return seen[0][0].view(self.n_heads, -1), seen[0][1]

    @torch.no_grad()
    def generate(self, ids: Int[Tensor, " position"], longest: int, choose: Choose | None = None) -> Int[Tensor, " new"]:
        """The tokens that the model writes after a prompt: greedily up to its end token (kept), or as `choose` says."""
        given, stop = {}, []
        from transformers import GenerationConfig

        theirs = self.model.generation_config
        ends = {name: getattr(theirs, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        if choose is not None:

            def only(written: Tensor, scores: Tensor) -> Tensor:
                token = choose(scores[0])
                stop.extend([] if token is not None else [True])
                return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([token or 0], device=scores.device), 0)

            given = {"logits_processor": [only], "stopping_criteria": [lambda written, scores: torch.tensor([bool(stop)], device=written.device)], "eos_token_id": None}
        with self.bridged.hooks() if self.plain is None else eval_mode(self.model):  # a bridge needs its cache repaired
            self.model.generation_config = GenerationConfig(**ends)  # some models bring a penalty on repetition: that is not greedy
            try:
                out = self.model.generate(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], do_sample=False, max_new_tokens=longest, **given)
            finally:
                self.model.generation_config = theirs
        return out[0, len(ids):len(out[0]) - len(stop)]

    # -- output projection -------------------------------------------------------------------

    def output_projection(self, layer: int) -> torch.nn.Module:
        """The Hugging Face module that maps z to the residual stream: in the plain copy, found by
        its shared weight, where there is one; else the bridge's own."""
        component = self.bridge.blocks[layer].attn.o
        return component.original_component if self.plain is None else same_weight(self.plain, component)

    @torch.no_grad()
    def head_outputs(self, layer: int, z: Float[Tensor, "*row head d_head"]) -> Float[Tensor, "*row head d_model"]:
        """What each head adds to the residual stream; b_O, which belongs to no head, left out."""
        spread = torch.diag_embed(z.transpose(-1, -2)).movedim(-3, -1)  # [*row, head, head, d_head], zero off the diagonal
        projection = self.output_projection(layer)
        return projection(spread.flatten(-2)) - self.output_bias(layer)

    @torch.no_grad()
    def output_bias(self, layer: int) -> Float[Tensor, " d_model"]:
        """b_O of a layer; zeros where there is none."""
        zero = torch.zeros(self.n_heads * self.d_head, dtype=self.dtype, device=self.device)
        return self.output_projection(layer)(zero)

    # -- prefill ---------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, ids: Int[Tensor, " position"], positions: tuple[int, ...] = (), chunk: int = 512,
                shared: Prefix | None = None) -> Prefix:
        """Keys and values of `ids`, and float32 logits at `positions`.

        Runs the plain sdpa copy in chunks where there is one, else the bridge.

        Args:
            ids: the text.
            positions: where logits are wanted.
            chunk: tokens of one forward.
            shared: another text; what both begin with is not run again.

        Raises:
            InputError: for a text longer than the model's context.
        """
        if self.context and len(ids) > self.context:
            raise InputError(f"a text of {len(ids)} tokens is longer than the {self.context} that the model can read; shorten the prompt")
        ids = ids.to(self.device)
        wanted = sorted(set(positions))
        begin = common_length(ids, shared, wanted) if self.packed else 0
        cache, found = full_cache(self.n_layers, len(ids), shared, begin), []
        for start in range(begin, len(ids), chunk) if self.packed else [0]:
            part = ids[None, start:start + chunk] if self.packed else ids[None]
            here = [p - start for p in wanted if start <= p < start + part.shape[1]]
            keep = torch.tensor(here or [part.shape[1] - 1], device=self.device)
            out = self._read(part, start, cache, keep)
            if here:
                found.append(out)
        layers = tuple((layer.keys, layer.values) for layer in cache.layers) if self.packed else ()
        if self.packed and (len(layers) != self.n_layers or any(keys is None or keys.shape[-2] != len(ids) for keys, _ in layers)):
            raise RuntimeError("the cache does not hold every position of the text in every layer")
        order = {p: i for i, p in enumerate(wanted)}
        logits = torch.cat(found) if found else torch.empty(0, self.vocabulary, device=self.device)
        return Prefix(ids, layers, logits[[order[p] for p in positions]] if positions else logits, tuple(positions))

    def _read(self, part: Tensor, start: int, cache, keep: Tensor) -> Float[Tensor, "wanted vocabulary"]:
        """Logits of one chunk of a text at the rows `keep`."""
        if not self.packed or (self.plain is not None and self.prefills):
            model = self.model
            norm = self.bridge.ln_final if self.plain is None else same_weight(self.plain, self.bridge.ln_final)
            given = {cache_argument(model): cache} if self.packed else {}
            if _takes(model, "logits_to_keep"):
                given["logits_to_keep"] = keep
            with eval_mode(model), self.unembedding.hidden(norm) as hidden:
                out = model(input_ids=part, use_cache=self.packed, **given).logits[0]
            return self.unembedding.logits(out if "logits_to_keep" in given else out[keep], hidden, keep)
        places = torch.arange(start, start + part.shape[1], device=self.device)
        distance = places[:, None] - torch.arange(start + part.shape[1], device=self.device)[None]
        mask = lambda layer: self.additive(((distance >= 0) & (distance < (self.windows[layer] or start + part.shape[1])))[None])  # noqa: E731
        with self.bridged.hooks(mask), self.unembedding.hidden(self.bridged.norm) as hidden:
            out = self.bridged.forward(part, places[None], cache, mask(0), keep)
        return self.unembedding.logits(out, hidden, keep)

    # -- rows ------------------------------------------------------------------------------

    def run(self, prefix: Prefix, rows: Rows, z_hook: ZHook | None = None, blocked: BlockedReads | None = None,
            ids: tuple[int, ...] | None = None, on_pattern: PatternHook | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits of rows, all in one forward.

        Args:
            prefix: the text that the rows continue.
            rows: what to run.
            z_hook: `(layer, z [active row, head, d_head]) -> z`, called once a layer.
            blocked: `layer -> [head or 1, row, key]` of booleans, True where a read is removed; the
                keys are those of the prefix, then the rows.
            ids: token ids for which the logits of every row are wanted.
            on_pattern: `(layer, pattern [head, active row, key])`, called once a layer.

        Returns:
            float32 logits `[full row, vocabulary]`, and `[row, id]` or None.
        """
        if self.packed:
            return self._packed_rows(self.way(on_pattern is not None), prefix, rows, z_hook, blocked, ids, on_pattern)
        logits = batch_rows(self, prefix, rows, z_hook, blocked, on_pattern)
        full = logits if rows.full is None else logits[list(rows.full)]
        return full, None if ids is None else logits[:, list(ids)]

    def _packed_rows(self, way, prefix, rows, z_hook, blocked, ids, on_pattern):
        length = int(rows.seen.max()) if len(rows) else 0
        keys = torch.cat([torch.arange(length, device=self.device), rows.positions])
        own = torch.cat([torch.full((length,), -1, device=self.device), rows.branch])
        allowed = torch.where(own < 0, keys[None] < rows.seen[:, None], own[None] == rows.branch[:, None])
        allowed &= keys[None] <= rows.positions[:, None]
        distance = rows.positions[:, None] - keys[None]
        seen = {w: allowed if w is None else allowed & (distance < w) for w in set(self.windows)}
        masks: dict[tuple[int | None, int], Tensor] = {}  # by window and active rows: layers mostly share one

        def mask(layer: int) -> Tensor:
            window, n = self.windows[layer], rows.active(layer)
            visible = seen[window][None, :n, :length + n]
            cut = blocked(layer) if blocked is not None else None
            if cut is not None:
                return self.additive(visible & ~cut[:, :n, :length + n])
            if (window, n) not in masks:
                masks[window, n] = self.additive(visible)
            return masks[window, n]

        keep = None if rows.full is None else torch.tensor(rows.full or (0,), device=self.device)
        cache = read_only_cache(prefix, length)  # before any hook: a text that was let go is read again
        with way.hooks(mask, z_hook, on_pattern), entering(way.blocks, rows), self.unembedding.hidden(way.norm, always=ids is not None) as hidden:
            out = way.forward(rows.tokens[None], rows.positions[None], cache, self.additive(allowed[None]), keep)
        narrow = None if ids is None else self.unembedding.narrow(hidden, ids)
        full = self.unembedding.logits(out, hidden, keep)
        if narrow is not None:
            self.unembedding.compare(narrow if keep is None else narrow[keep], full[:, list(ids)], full)
        return full if rows.full != () else full[:0], narrow

    def additive(self, visible: Bool[Tensor, "head row key"]) -> Float[Tensor, "1 head row key"]:
        low = torch.finfo(self.dtype).min
        return torch.zeros(visible.shape, dtype=self.dtype, device=self.device).masked_fill_(~visible, low)[None]


def _takes(model, name: str) -> bool:
    return name in arguments(type(model))


def _width(projection: torch.nn.Module) -> int:
    """How many numbers an output projection reads: rows of a GPT-2 Conv1D, else columns of a Linear."""
    return getattr(projection, "in_features", projection.weight.shape[0])


def common_length(ids: Tensor, shared: Prefix | None, wanted: list[int]) -> int:
    """How many tokens of a text need not be run again; those with wanted logits always are."""
    if shared is None:
        return 0
    n = min(len(ids) - 1, len(shared), min(wanted, default=len(ids)))
    differs = (ids[:n] != shared.ids[:n].to(ids.device)).nonzero()
    return int(differs[0]) if len(differs) else n
