"""Convert a GGUF file (llama or qwen2 architecture) into a Hugging Face folder.

Weights are dequantized; the tokenizer is rebuilt from the file's metadata. Three things differ from the other format:
tensor names, reversed shapes (undone by the reader), and the q and k rows of llama models, which are stored with the
halves of each rotary pair interleaved. Whatever is not known for certain is refused by name. This module converts, it
does not run the model.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from jaxtyping import Float

from empo2_jax.errors import DataError
from empo2_jax.models.hf_folder import new_folder, write_json, write_tensors
from empo2_jax.models.qwen2_config import Qwen2Config

_ARCHITECTURES = ("llama", "qwen2")
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
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
_SHARD_BYTES = 4 << 30

_GPT2_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
_PLAIN_BYTES = _GPT2_BYTES | {"use_regex": False}
_WORDS = (  # the split shared by Qwen2 and Llama 3; only the length of digit groups differs
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str) -> dict[str, Any]:
    pattern = {"type": "Split", "pattern": {"Regex": _WORDS % digits}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [pattern, _PLAIN_BYTES]}


_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {  # tokenizer.ggml.pre
    "gpt-2": _GPT2_BYTES,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2_BYTES]},
    "qwen2": _split(""),
    "llama-bpe": _split("{1,3}"),
}


def convert_gguf(gguf_path: Path, out_folder: Path, *, dtype: str = "float32") -> None:
    """Write `out_folder` (config, safetensors, tokenizer, generation config) from one GGUF file; atomic.

    Args:
        gguf_path: The file; any quantization the `gguf` package can undo.
        out_folder: Must not exist or be empty.
        dtype: float32 or bfloat16, of the stored weights.

    Raises:
        DataError: the file is unreadable, or has an architecture, tensor or tokenizer that is not known here.
    """
    if dtype not in _DTYPES:
        raise DataError(f"dtype {dtype!r} is not supported; allowed: {', '.join(_DTYPES)}")
    try:
        reader = GGUFReader(gguf_path)
    except (ValueError, IndexError, OSError) as error:
        raise DataError(f"{gguf_path}: not a readable GGUF file, or a part of one: {error}") from error
    meta = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {_hf_name(tensor.name, gguf_path): tensor for tensor in reader.tensors}
    config = _config(meta, tensors, gguf_path)
    stops = _stop_ids(meta)

    def read(name: str) -> Float[np.ndarray, "..."]:
        return _tensor(tensors[name], name, meta["general.architecture"], config).astype(_DTYPES[dtype])

    sizes = {name: int(tensor.n_elements) * _DTYPES[dtype].itemsize for name, tensor in tensors.items()}
    with new_folder(Path(out_folder)) as work:
        write_json(work / "config.json", config.to_hf() | {"torch_dtype": dtype, "eos_token_id": stops[0]})
        write_json(work / "generation_config.json", {"eos_token_id": stops})
        write_json(work / "tokenizer.json", _tokenizer(meta))
        write_json(work / "tokenizer_config.json", _tokenizer_config(meta, config))
        write_tensors(work, sizes, read, _SHARD_BYTES)


def _hf_name(name: str, path: Path) -> str:
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK:
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
    raise DataError(f"{path}: tensor {name} is unknown to the architectures {', '.join(_ARCHITECTURES)}")


def _config(meta: dict[str, Any], tensors: dict[str, ReaderTensor], path: Path) -> Qwen2Config:
    """Architecture from the metadata; a scaled rope is refused, since each writer stores it differently."""
    kind = meta.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise DataError(f"{path}: architecture {kind!r} is not supported; allowed: {', '.join(_ARCHITECTURES)}")
    scaling = meta.get(f"{kind}.rope.scaling.type", "none")
    if scaling != "none":
        raise DataError(f"{path}: rope.scaling.type {scaling!r} is not supported; allowed: 'none'")

    def number(key: str, default: Any = None) -> Any:
        value = meta.get(f"{kind}.{key}", default)
        if value is None:
            raise DataError(f"{path}: metadata key {kind}.{key} is missing")
        return value

    _check_tokenizer(meta, path)
    heads, width = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", width // heads)
    if number("rope.dimension_count", head_dim) != head_dim:
        raise DataError(f"{path}: {kind}.rope.dimension_count must equal the head size {head_dim}")
    return Qwen2Config(
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        hidden_size=width,
        num_layers=number("block_count"),
        num_heads=heads,
        num_kv_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=number("feed_forward_length"),
        rope_theta=float(number("rope.freq_base", 10_000.0)),
        rms_norm_eps=_short(number("attention.layer_norm_rms_epsilon")),
        tie_embeddings="lm_head.weight" not in tensors,
        attention_bias=kind == "qwen2",
        max_position_embeddings=number("context_length"),
    )


def _short(value: float) -> float:
    """The decimal a f32 was written from: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _tensor(tensor: ReaderTensor, name: str, kind: str, config: Qwen2Config) -> Float[np.ndarray, "..."]:
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    values = values.reshape(tuple(int(size) for size in reversed(tensor.shape)))
    if kind == "llama" and ".q_proj." in name:
        return _halves(values, config.num_heads)
    if kind == "llama" and ".k_proj." in name:
        return _halves(values, config.num_kv_heads)
    return values


def _halves(rows: Float[np.ndarray, "rows in"], heads: int) -> Float[np.ndarray, "rows in"]:
    """Undo the interleaving of rotary pairs: per head [d/2, 2] → [2, d/2]."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _check_tokenizer(meta: dict[str, Any], path: Path) -> None:
    """Raise `DataError` where the tokenizer is not a byte-level BPE that is known, or a part of it is missing."""
    model, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        allowed = ", ".join(_PRE_TOKENIZERS)
        raise DataError(f"{path}: tokenizer {model!r} with pre-tokenizer {pre!r} is not supported; allowed: {allowed}")
    for key in ("tokens", "token_type", "merges"):
        if f"tokenizer.ggml.{key}" not in meta:
            raise DataError(f"{path}: metadata key tokenizer.ggml.{key} is missing")


def _tokenizer(meta: dict[str, Any]) -> dict[str, Any]:
    """`tokenizer.json` of a byte-level BPE."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    pre = meta["tokenizer.ggml.pre"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [  # type 3 is a control token, 4 a token the user defined
        {"id": index, "content": token, "special": kind == 3, **flags}
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (3, 4)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(meta: dict[str, Any], config: Qwen2Config) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    keys = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    ids = {name: meta.get(f"tokenizer.ggml.{key}_token_id") for key, name in keys.items()}
    settings: dict[str, Any] = {name: tokens[index] for name, index in ids.items() if index is not None}
    if "tokenizer.chat_template" in meta:
        settings["chat_template"] = meta["tokenizer.chat_template"]
    return settings | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }


def _stop_ids(meta: dict[str, Any]) -> list[int]:
    """End of turn first, then end of text."""
    tokens = meta["tokenizer.ggml.tokens"]
    index_of: Callable[[str], list[int]] = lambda token: [tokens.index(token)] if token in tokens else []  # noqa: E731
    eos = meta.get("tokenizer.ggml.eos_token_id")
    return list(dict.fromkeys([*([] if eos is None else [eos]), *index_of("<|im_end|>"), *index_of("<|endoftext|>")]))
