"""Names and shapes of a model's tensors, from its configuration alone and without JAX.

Who checks a folder of weights on a host without an accelerator knows from here what must be in it. The model itself is
`qwen2.py`; a test holds the two together.
"""

from empo2_jax.models.qwen2_config import Qwen2Config


def tensor_shapes(config: Qwen2Config) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by its Hugging Face name, layer by layer; kernels are [out, in]."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        block = f"model.layers.{layer}."
        shapes[f"{block}input_layernorm.weight"] = (hidden,)
        for name, size in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            shapes[f"{block}self_attn.{name}.weight"] = (size, hidden)
            if config.attention_bias:
                shapes[f"{block}self_attn.{name}.bias"] = (size,)
        shapes[f"{block}self_attn.o_proj.weight"] = (hidden, heads)
        shapes[f"{block}post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{block}mlp.gate_proj.weight"] = (mlp, hidden)
        shapes[f"{block}mlp.up_proj.weight"] = (mlp, hidden)
        shapes[f"{block}mlp.down_proj.weight"] = (hidden, mlp)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
