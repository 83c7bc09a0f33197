"""A small GGUF file written here, converted and compared with the model it was written from."""

import json
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from gguf.quants import dequantize, quantize

from empo2_jax.errors import DataError
from empo2_jax.models.gguf_weights import convert_gguf
from empo2_jax.models.hf_weights import load_model
from empo2_jax.models.tokenizer import Tokenizer
from empo2_jax.types import Message

LAYERS, WIDTH, HEADS, KV_HEADS, MLP = 2, 32, 4, 2, 64
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
NAMES = {  # ours: theirs
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def byte_tokens() -> list[str]:
    """The 256 printable stand-ins of bytes, as GPT-2 names them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + index) for index in range(len(shifted))]


TOKENS = [*SPECIALS, *byte_tokens(), "he", "ll", "Ġhe", "12"]
MERGES = ["h e", "l l", "Ġ he", "1 2"]


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: the two halves of a head alternate."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def peer_model(kind: str) -> torch.nn.Module:
    sizes = {
        "vocab_size": len(TOKENS),
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": MLP,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model.eval()


def write_gguf(
    path: Path, peer: torch.nn.Module, kind: str, pre: str = "smollm", extra: str = "", merges: bool = True
) -> None:
    """Write the peer's weights, kernels as Q8_0; the peer is changed to hold the quantized values."""
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    if merges:
        writer.add_token_merges(MERGES)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    quantized = gguf.GGMLQuantizationType.Q8_0
    for name, parameter in peer.named_parameters():
        values = parameter.detach().numpy()
        if values.ndim == 2:
            values = dequantize(quantize(values, quantized), quantized).astype(np.float32)
            parameter.data = torch.tensor(values)
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleave(values, HEADS if "q_proj" in name else KV_HEADS)
        if values.ndim == 2:
            writer.add_tensor(gguf_name(name), quantize(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(gguf_name(name), values)
    if extra:
        writer.add_tensor(extra, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        ours = {theirs: ours for ours, theirs in NAMES.items()}
        part, suffix = rest.rsplit(".", 1)
        return f"blk.{layer}.{ours[part]}.{suffix}"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_converted_model_computes_what_the_source_does(tmp_path: Path, kind: str) -> None:
    peer = peer_model(kind)
    write_gguf(tmp_path / "model.gguf", peer, kind)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    model = load_model(tmp_path / "hf")
    assert model.config.attention_bias == (kind == "qwen2")
    assert model.config.rms_norm_eps == 1e-5
    ids = np.arange(20, dtype=np.int32)[None] * 7 % len(TOKENS)
    positions = np.arange(20, dtype=np.int32)[None]
    hidden = model(jnp.asarray(ids), jnp.asarray(positions), jnp.ones((1, 20), jnp.int32))
    with torch.no_grad():
        expected = peer(torch.tensor(ids).long()).logits.numpy()
    np.testing.assert_allclose(hidden @ model.head.T, expected, atol=1e-4 * np.abs(expected).max())


def test_tokenizer_is_rebuilt_from_the_metadata(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", peer_model("llama"), "llama")
    convert_gguf(tmp_path / "model.gguf", tmp_path / "hf", dtype="bfloat16")
    tokenizer = Tokenizer.load(tmp_path / "hf")
    token = {text: index for index, text in enumerate(TOKENS)}
    assert tokenizer.stop_ids == (2, 0)
    assert tokenizer.size == len(TOKENS)
    ids = tokenizer.encode("hello he12<|im_end|>")
    digits = [token["1"], token["2"]]  # smollm splits digits before merging
    assert ids == [token["he"], token["ll"], token["o"], token["Ġhe"], *digits, 2]
    assert tokenizer.decode(ids) == "hello he12"
    assert tokenizer.chat_text([Message("user", "hé")], False) == "<|im_start|>user\nhé<|im_end|>\n"
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("pre", "digits"), [("gpt-2", ["12"]), ("qwen2", ["1", "2"]), ("llama-bpe", ["12"]), ("smollm", ["1", "2"])]
)
def test_each_pre_tokenizer_groups_digits_its_own_way(tmp_path: Path, pre: str, digits: list[str]) -> None:
    write_gguf(tmp_path / "model.gguf", peer_model("llama"), "llama", pre=pre)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    assert Tokenizer.load(tmp_path / "hf").encode("12") == [TOKENS.index(text) for text in digits]


def test_what_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for options, message in [
        ({"kind": "llama", "pre": "tekken"}, "tekken"),
        ({"kind": "llama", "extra": "rope_freqs.weight"}, r"rope_freqs\.weight"),
        ({"kind": "gemma3"}, "gemma3"),
        ({"kind": "llama", "merges": False}, r"metadata key tokenizer\.ggml\.merges is missing"),
    ]:
        write_gguf(path, peer_model("llama"), **options)
        with pytest.raises(DataError, match=message):
            convert_gguf(path, tmp_path / "hf")
    write_gguf(path, peer_model("llama"), "llama")
    whole = path.read_bytes()
    for part in (b"not a gguf file, only text", whole[: len(whole) // 2], whole[:64]):
        path.write_bytes(part)
        with pytest.raises(DataError, match=r"model\.gguf: not a readable GGUF file, or a part of one"):
            convert_gguf(path, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
