"""Small random models of many architectures, for parity: `python -m tests.families` prints a table.

Every model has three layers where its architecture allows, a vocabulary of 120, windows of 16 tokens
where it has windows, and weights large enough to matter. The oracle is the plain Hugging Face model
with a pre-hook on the output projection, one full forward per head.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass

import torch

VOCABULARY, WINDOW = 120, 16
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
SIZE = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GROUPED = SIZE | dict(num_key_value_heads=2, head_dim=8)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=24)
LATENT = SIZE | dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12,
                     n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1,
                     n_group=1, topk_group=1)


@dataclass(frozen=True)
class Family:
    """An architecture: what its attention is like, and how to make a small one.

    Attributes:
        name: its usual name.
        classes: prefix of the transformers classes.
        options: arguments of the config.
        note: what is special about it.
    """

    name: str
    classes: str
    options: dict
    note: str = ""

    def make(self, seed: int = 0):
        """A small random model, in eval mode and eager attention.

        Raises:
            ImportError: where this version of transformers lacks the architecture.
        """
        import transformers

        config = getattr(transformers, self.classes + "TextConfig", getattr(transformers, self.classes + "Config", None))
        causal = [n for n in dir(transformers) if n.lower() in (self.classes.lower() + "forcausallm", self.classes.lower() + "lmheadmodel")]
        if config is None or not causal:
            raise ImportError(f"transformers {transformers.__version__} has no {self.classes}")
        torch.manual_seed(seed)
        hf = getattr(transformers, causal[0])._from_config(config(**self.options), attn_implementation="eager")
        with torch.no_grad():
            for name, p in hf.named_parameters():
                if p.ndim > 1 and "conv" not in name:
                    p.normal_(0, 0.25)
        hf.config.architectures = [type(hf).__name__]
        return hf.eval().requires_grad_(False)


GPT2 = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=1, eos_token_id=2)

FAMILIES: dict[str, Family] = {f.name: f for f in [
    Family("GPT-2", "GPT2", GPT2, "learned positions"),
    Family("GPT-BigCode", "GPTBigCode", GPT2 | dict(multi_query=True), "multi-query heads"),
    Family("GPT-NeoX", "GPTNeoX", SIZE | dict(rotary_pct=0.5), "partial rotary, parallel"),
    Family("GPT-J", "GPTJ", dict(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=256, rotary_dim=4, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
                                 bos_token_id=1, eos_token_id=2), "interleaved partial rotary"),
    Family("OPT", "OPT", dict(vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=256,
                              word_embed_proj_dim=32, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2), "learned positions with an offset"),
    Family("Falcon 7B", "Falcon", dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, alibi=False, new_decoder_architecture=False,
                                       multi_query=True, parallel_attn=True, bos_token_id=1, eos_token_id=2), "rotary, multi-query heads, parallel"),
    Family("Falcon 40B", "Falcon", dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, alibi=False, new_decoder_architecture=True,
                                    num_kv_heads=2, bos_token_id=1, eos_token_id=2), "rotary, fused grouped heads"),
    Family("Falcon ALiBi", "Falcon", dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, alibi=True, new_decoder_architecture=False,
                                          multi_query=False, bos_token_id=1, eos_token_id=2), "ALiBi"),
    Family("Bloom", "Bloom", dict(vocab_size=VOCABULARY, hidden_size=32, n_layer=3, n_head=4, hidden_dropout=0.0, attention_dropout=0.0, bos_token_id=1, eos_token_id=2), "ALiBi"),
    Family("MPT", "Mpt", dict(vocab_size=VOCABULARY, d_model=32, n_layers=3, n_heads=4, max_seq_len=256), "ALiBi"),
    Family("GPT-Neo", "GPTNeo", dict(vocab_size=VOCABULARY, hidden_size=32, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=WINDOW,
                                     max_position_embeddings=256, embed_dropout=0.0, attention_dropout=0.0, resid_dropout=0.0, bos_token_id=1, eos_token_id=2), "local layers"),
    Family("Llama", "Llama", GROUPED, "grouped heads"),
    Family("Mistral", "Mistral", GROUPED | dict(sliding_window=WINDOW), "all layers windowed"),
    Family("Qwen2", "Qwen2", GROUPED | dict(use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED), "mixed windows, q/k/v bias"),
    Family("Qwen3", "Qwen3", GROUPED | dict(use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED), "mixed windows, q/k norm"),
    Family("Gemma", "Gemma", GROUPED | dict(num_key_value_heads=1), "multi-query heads"),
    Family("Gemma 2", "Gemma2", GROUPED | dict(sliding_window=WINDOW, layer_types=MIXED, query_pre_attn_scalar=8), "mixed windows, soft caps"),
    Family("Gemma 3", "Gemma3", GROUPED | dict(sliding_window=WINDOW, layer_types=MIXED, query_pre_attn_scalar=8), "mixed windows, q/k norm, two rotary bases"),
    Family("Phi", "Phi", SIZE | dict(num_key_value_heads=4, partial_rotary_factor=0.5, resid_pdrop=0.0, embd_pdrop=0.0), "partial rotary, parallel"),
    Family("Phi-3", "Phi3", SIZE | dict(num_key_value_heads=2, sliding_window=WINDOW, resid_pdrop=0.0, embd_pdrop=0.0), "fused q/k/v, windowed"),
    Family("OLMo-2", "Olmo2", SIZE | dict(num_key_value_heads=2), "norms after the blocks"),
    Family("Cohere", "Cohere", SIZE | dict(num_key_value_heads=2), "parallel, scaled logits"),
    Family("Cohere 2", "Cohere2", SIZE | dict(num_key_value_heads=2, sliding_window=WINDOW, layer_types=MIXED), "mixed windows, layers without positions"),
    Family("StableLM", "StableLm", SIZE | dict(num_key_value_heads=2, partial_rotary_factor=0.5), "partial rotary"),
    Family("Granite", "Granite", SIZE | dict(num_key_value_heads=2, attention_multiplier=0.3, residual_multiplier=0.5, embedding_multiplier=2.0, logits_scaling=2.0), "multipliers"),
    Family("SmolLM3", "SmolLM3", SIZE | dict(num_key_value_heads=2, no_rope_layers=[1, 0, 1], use_sliding_window=False), "layers without positions"),
    Family("Starcoder2", "Starcoder2", SIZE | dict(num_key_value_heads=2, sliding_window=WINDOW, residual_dropout=0.0, embedding_dropout=0.0), "all layers windowed"),
    Family("GLM-4", "Glm4", GROUPED | dict(partial_rotary_factor=0.5), "partial rotary, norms around the blocks"),
    Family("EXAONE-4", "Exaone4", GROUPED | dict(sliding_window=WINDOW, layer_types=MIXED), "mixed windows, norms after the blocks"),
    Family("Mixtral", "Mixtral", GROUPED | dict(num_local_experts=4, num_experts_per_tok=2), "experts"),
    Family("Qwen2-MoE", "Qwen2Moe", SIZE | EXPERTS | dict(num_key_value_heads=2, num_experts=4, shared_expert_intermediate_size=24), "experts, shared expert"),
    Family("Qwen3-MoE", "Qwen3Moe", GROUPED | EXPERTS | dict(num_experts=4), "experts"),
    Family("OLMoE", "Olmoe", SIZE | dict(num_key_value_heads=4, num_experts=4, num_experts_per_tok=2), "experts"),
    Family("GPT-OSS", "GptOss", GROUPED | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, layer_types=MIXED), "sinks, experts, mixed windows"),
    Family("DeepSeek V2", "DeepseekV2", LATENT | dict(topk_method="greedy"), "latent attention"),
    Family("DeepSeek V3", "DeepseekV3", LATENT, "latent attention"),
    Family("Qwen3-Next", "Qwen3Next", GROUPED | EXPERTS | dict(num_hidden_layers=4, num_experts=4, shared_expert_intermediate_size=24, linear_num_key_heads=2, linear_num_value_heads=4,
                                                               linear_key_head_dim=8, linear_value_head_dim=8,
                                                               layer_types=["linear_attention", "full_attention"] * 2), "three linear layers of four"),
    Family("Mamba", "Mamba", dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2), "no attention"),
]}

PROJECTION = re.compile(r"\.(attn|self_attn|attention|self_attention)(\.attention)?\.(o_proj|c_proj|out_proj|dense)$")


def output_projections(hf) -> list[torch.nn.Module]:
    """The output projection of each attention layer, by name."""
    return [module for name, module in hf.named_modules() if PROJECTION.search("." + name)]


def logits(hf, ids) -> torch.Tensor:
    with torch.no_grad():
        return hf(input_ids=ids[None], use_cache=False).logits[0].float()


@contextmanager
def z_set(projection, heads: int, head: int, position: int, value):
    """z of one head at one position set to `value`."""

    def pre(module, args):
        flat = args[0].clone()
        flat[0, position].view(heads, -1)[head] = torch.as_tensor(value)
        return (flat, *args[1:])

    handle = projection.register_forward_pre_hook(pre)
    try:
        yield
    finally:
        handle.remove()


def ids(length: int = 48) -> torch.Tensor:
    return torch.randperm(VOCABULARY - 8, generator=torch.Generator().manual_seed(3))[:length] + 8


TIMES = (0, 1, 20, 47)
LENGTH = 48


@contextmanager
def reads_cut(projection_name: str, hf, head: int, position: int, start: int, end: int):
    """Keys start:end removed for one head at one position, through the mask the attention is given."""
    attention = dict(hf.named_modules())[projection_name.rpartition(".")[0]]

    def pre(module, args, kwargs):
        mask = kwargs["attention_mask"]
        boolean = mask.dtype == torch.bool
        mask = mask.expand(1, hf.config.num_attention_heads, *mask.shape[2:]).clone()
        mask[0, head, position, start:end] = (not bool(mask[0, 0, -1, -1])) if boolean else torch.finfo(mask.dtype).min
        return args, dict(kwargs, attention_mask=mask)

    handle = attention.register_forward_pre_hook(pre, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class Parity:
    """The engine against the oracle, in logits.

    Attributes:
        verdict, path: what the self-test chose.
        patterns: error of attention masses on three spans, own key included.
        heads: largest error over every head at four positions, all heads ablated one at a time.
        least: smallest of those effects, so that the reference is seen not to be zero.
        tokens: error of a branch of three other tokens.
        reads: error of a blocked read.
        shortcuts: whether rows enter late, logits are projected for a few ids, and values can be replaced.
    """

    verdict: str
    path: str
    patterns: float
    heads: float
    least: float
    tokens: float
    reads: float
    shortcuts: tuple[bool, bool, bool]

    @property
    def worst(self) -> float:
        return max(self.heads, self.tokens, self.reads, self.patterns)


def engine(hf):
    """The engine around a copy of a model, its path chosen; and the self-test's words."""
    import copy

    from decisionheads._hooked import Hooked
    from decisionheads._self_test import self_test
    from decisionheads.model import _bridge, _sharing_copy

    inner = copy.deepcopy(hf)
    plain = _sharing_copy(inner)
    hooked = Hooked(_bridge(inner), plain)
    return hooked, self_test(hooked)


def parity(hf, hooked, tested) -> Parity:
    """Ablate, continue and block through the engine and by hand."""
    import numpy as np

    from decisionheads import BlockReads, HeadSet, MeanAblate
    from decisionheads.branches import Branch, branch_logits

    text = ids(LENGTH)
    names = [name for name, _ in hf.named_modules() if PROJECTION.search("." + name)]
    projections = output_projections(hf)
    prefix = hooked.prefill(text, TIMES, chunk=19)
    values = np.random.default_rng(0).normal(size=(hooked.n_layers, hooked.n_heads, hooked.d_head)).astype(np.float32)
    clean, heads, least = logits(hf, text), 0.0, np.inf
    plan = [(t, n, layer, head) for t in TIMES for n, layer in enumerate(hooked.layers) for head in range(hooked.n_heads)]
    branches = [Branch(t, (), (MeanAblate(HeadSet([(layer, head)]), values),), tuple(range(VOCABULARY))) for t, _, layer, head in plan]
    for i, got in branch_logits(hooked, prefix, branches):
        t, n, layer, head = plan[i]
        with z_set(projections[n], hooked.n_heads, head, t, values[layer, head]):
            want = logits(hf, text)[t]
        heads, least = max(heads, float((got[0] - want).abs().max())), min(least, float((want - clean[t]).abs().max()))
    other, t = (20, 21, 22), 20
    got = dict(branch_logits(hooked, prefix, [Branch(t, other), Branch(47)]))
    tokens = float((got[0] - logits(hf, torch.cat([text[:t], torch.tensor(other)]))[t:]).abs().max())
    reads, n = 0.0, len(hooked.layers) - 1
    layer = hooked.layers[n]
    with reads_cut(names[n], hf, 1, 47, 35, 44):
        want = logits(hf, text)[47]
    got = dict(branch_logits(hooked, prefix, [Branch(47, (), (BlockReads(HeadSet([(layer, 1)]), 35, 44),)), Branch(20)]))
    reads = float((got[0][0] - want).abs().max())
    least = min(least, float((want - clean[47]).abs().max()))
    patterns = attention_error(hf, hooked, prefix, text)
    return Parity(tested.verdict, tested.path, patterns, heads, least, tokens, reads, (hooked.skipping, hooked.narrow, hooked.weighted))


def attention_error(hf, hooked, prefix, text) -> float:
    """Masses on spans against the attentions that the plain model gives out."""
    from decisionheads.branches import Branch
    from decisionheads.reads import pooled_attention

    spans, at = [(0, 5), (18, 21), (30, 48)], [20, 47]
    with torch.no_grad():
        seen = [a for a in hf(input_ids=text[None], use_cache=False, output_attentions=True).attentions if a is not None]
    ours = pooled_attention(hooked, prefix, [Branch(t) for t in at], spans)
    worst = 0.0
    for n, layer in enumerate(hooked.layers):
        for i, t in enumerate(at):
            want = torch.stack([seen[n][0, :, t, a:b].sum(-1) for a, b in spans], -1)
            worst = max(worst, float((ours[i, layer] - want).abs().max()))
    return worst


def row(family: Family) -> str:
    """One line of the table in docs/families.md."""
    from decisionheads.errors import InputError

    special = f"| {family.name} | {family.note} "
    try:
        hf = family.make()
        hooked, tested = engine(hf)
        if tested.verdict == "refused":
            return special + f"| refused | | | | | | {tested.reason.partition(': ')[2]} |"
        p = parity(hf, hooked, tested)
        quick = ", ".join(word for word, on in zip(("late entry", "few ids", "values"), p.shortcuts, strict=True) if on)
        return special + f"| {p.verdict} | {p.heads:.0e} | {p.tokens:.0e} | {p.reads:.0e} | {p.patterns:.0e} | {p.least:.0e} | {p.path}{'; ' + quick if quick else ''} |"
    except (InputError, ValueError, ImportError) as error:
        return special + f"| refused | | | | | | {str(error).splitlines()[0]} |"


def main() -> None:
    import warnings
    from importlib.metadata import version

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"torch {version('torch')}, transformers {version('transformers')}, transformer-lens {version('transformer-lens')}, float32\n")
    print("| family | attention | verdict | heads | tokens | blocked reads | masses | least effect | path |\n|---|---|---|---|---|---|---|---|---|")
    for family in FAMILIES.values():
        print(row(family), flush=True)


if __name__ == "__main__":
    main()
