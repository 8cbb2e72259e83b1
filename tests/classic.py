"""A `HookedTransformer` made from a Hugging Face model on disk; transformer-lens 3.9 only."""

from __future__ import annotations


def hooked_transformer(folder):
    """The Llama or GPT-2 in a folder as a HookedTransformer, its weights processed as users have them."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights, convert_llama_weights

    from decisionheads import DecisionModel

    from .conftest import plain_hf

    hf, tokenizer = plain_hf(folder), DecisionModel.load_tokenizer(folder)
    c = hf.config
    common = dict(n_layers=c.num_hidden_layers, n_heads=c.num_attention_heads, d_model=c.hidden_size, d_vocab=c.vocab_size,
                  n_ctx=c.max_position_embeddings, model_name=str(folder), device="cpu", default_prepend_bos=False)
    if c.model_type == "llama":
        cfg = HookedTransformerConfig(**common, d_head=c.head_dim, d_mlp=c.intermediate_size, n_key_value_heads=c.num_key_value_heads, act_fn="silu", gated_mlp=True,
                                      normalization_type="RMS", final_rms=True, eps=c.rms_norm_eps, positional_embedding_type="rotary", rotary_dim=c.head_dim,
                                      rotary_adjacent_pairs=False, rotary_base=c.rope_parameters["rope_theta"])
        weights = convert_llama_weights(hf, cfg)
        for i, layer in enumerate(hf.model.layers if c.attention_bias else ()):  # the library's conversion leaves them out
            attention, own = layer.self_attn, f"blocks.{i}.attn."
            for name, projection in (("Q", attention.q_proj), ("K", attention.k_proj), ("V", attention.v_proj)):
                weights[own + ("" if name == "Q" else "_") + f"b_{name}"] = projection.bias.detach().view(-1, c.head_dim)
            weights[own + "b_O"] = attention.o_proj.bias.detach()
    else:
        cfg = HookedTransformerConfig(**common, d_head=c.hidden_size // c.num_attention_heads, d_mlp=c.n_inner or 4 * c.hidden_size, act_fn=c.activation_function,
                                      normalization_type="LN", eps=c.layer_norm_epsilon)
        weights = convert_gpt2_weights(hf, cfg)
    model = HookedTransformer(cfg, tokenizer=tokenizer)
    model.load_and_process_state_dict(weights, center_writing_weights=c.model_type == "gpt2", fold_value_biases=c.model_type == "gpt2")
    return model
