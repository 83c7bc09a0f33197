"""all-MiniLM-L6-v2 (a six-layer BERT encoder) in JAX: the embedder of the paper's memory and novelty keys.

Reads the sentence-transformers folder as it is: `config.json`, `tokenizer.json`, `model.safetensors`. Mean pooling,
unit norm, window of 256 word pieces (a longer text is cut at its end). Inference only, f32, no dropout.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from empo2_jax.errors import DataError
from empo2_jax.readers import read_json, read_text

WINDOW = 256  # word pieces, the two special ones included
_LENGTH_BUCKETS = (16, 32, 64, 128, 256)
_EXACT = jax.lax.Precision.HIGHEST  # keeps accelerators from multiplying in bf16 or tf32

Weights = dict[str, Array]


class _Config(BaseModel):
    """What is read of `config.json`."""

    model_config = ConfigDict(strict=True, protected_namespaces=(), allow_inf_nan=False)

    model_type: Literal["bert"]
    hidden_act: Literal["gelu"]
    hidden_size: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    layer_norm_eps: float = Field(gt=0)


class _Shape(NamedTuple):
    layers: int
    heads: int
    epsilon: float  # of the layer norms


class MiniLMEmbedder:
    """`Embedder` from a folder with a BERT sentence encoder.

    Every call of the network has the batch size `batch` and a length that depends on the text alone, so the vector
    of a text does not depend on the texts beside it.
    """

    def __init__(self, folder: Path, *, batch: int = 8) -> None:
        """Load weights and tokenizer; raises `DataError` naming what is missing or unsupported in `folder`."""
        try:
            weights = load_file(folder / "model.safetensors")
        except (OSError, SafetensorError) as error:
            raise DataError(f"{folder} is no sentence-encoder folder: {error}") from error
        config = read_json(folder / "config.json", _Config)
        self.dimension = config.hidden_size
        self._window = min(WINDOW, config.max_position_embeddings)
        self._batch = batch
        self._shape = _Shape(config.num_hidden_layers, config.num_attention_heads, config.layer_norm_eps)
        self._weights: Weights = {
            name: jnp.asarray(value, jnp.float32)
            for name, value in weights.items()
            if name.startswith(("embeddings.", "encoder.")) and not name.endswith("position_ids")
        }
        self._tokenizer = Tokenizer.from_str(read_text(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(self._window)

    def embed(self, texts: Sequence[str]) -> Float32[np.ndarray, "K D"]:
        """Unit-norm rows."""
        token_ids = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        result = np.zeros((len(texts), self.dimension), np.float32)
        lengths = np.array([self._bucket(len(ids)) for ids in token_ids], np.int64)
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length)
            for start in range(0, len(rows), self._batch):
                chosen = rows[start : start + self._batch]
                padded, mask = self._pad([token_ids[row] for row in chosen], int(length))
                vectors = encode(self._weights, padded, mask, self._shape)
                result[chosen] = np.asarray(vectors)[: len(chosen)]
        return result

    def _bucket(self, length: int) -> int:
        return min(self._window, next(size for size in _LENGTH_BUCKETS if size >= length))

    def _pad(self, token_ids: list[list[int]], length: int) -> tuple[Int[np.ndarray, "B L"], Bool[np.ndarray, "B L"]]:
        padded = np.zeros((self._batch, length), np.int32)
        mask = np.zeros((self._batch, length), bool)
        mask[len(token_ids) :, 0] = True  # padding rows attend to one token, so that nothing is divided by zero
        for row, ids in enumerate(token_ids):
            padded[row, : len(ids)] = ids
            mask[row, : len(ids)] = True
        return padded, mask


@partial(jax.jit, static_argnames="shape")
def encode(
    weights: Weights, token_ids: Int[Array | np.ndarray, "B L"], mask: Bool[Array | np.ndarray, "B L"], shape: _Shape
) -> Float[Array, "B D"]:
    """Unit-norm mean of the last hidden states over the unmasked tokens of each row (at least one)."""
    hidden = _embeddings(weights, jnp.asarray(token_ids), shape.epsilon)
    for layer in range(shape.layers):
        hidden = _layer(weights, f"encoder.layer.{layer}.", hidden, jnp.asarray(mask), shape)
    pooled = jnp.sum(hidden * mask[..., None], axis=1) / jnp.sum(mask, axis=1, keepdims=True)
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


def _embeddings(weights: Weights, token_ids: Int[Array, "B L"], epsilon: float) -> Float[Array, "B L D"]:
    name = "embeddings."
    words = weights[name + "word_embeddings.weight"][token_ids]
    positions = weights[name + "position_embeddings.weight"][None, : token_ids.shape[1]]
    segment = weights[name + "token_type_embeddings.weight"][None, :1]
    return _layer_norm(weights, name + "LayerNorm", words + positions + segment, epsilon)


def _layer(
    weights: Weights, name: str, hidden: Float[Array, "B L D"], mask: Bool[Array, "B L"], shape: _Shape
) -> Float[Array, "B L D"]:
    attended = _linear(weights, name + "attention.output.dense", _attention(weights, name, hidden, mask, shape.heads))
    hidden = _layer_norm(weights, name + "attention.output.LayerNorm", hidden + attended, shape.epsilon)
    inner = jax.nn.gelu(_linear(weights, name + "intermediate.dense", hidden), approximate=False)
    outer = _linear(weights, name + "output.dense", inner)
    return _layer_norm(weights, name + "output.LayerNorm", hidden + outer, shape.epsilon)


def _attention(
    weights: Weights, name: str, hidden: Float[Array, "B L D"], mask: Bool[Array, "B L"], heads: int
) -> Float[Array, "B L D"]:
    def split(part: str) -> Float[Array, "B L H C"]:
        projected = _linear(weights, f"{name}attention.self.{part}", hidden)
        return projected.reshape(*projected.shape[:2], heads, -1)

    query, key, value = split("query"), split("key"), split("value")
    scores = jnp.einsum("blhc,bmhc->bhlm", query, key, precision=_EXACT) / jnp.sqrt(query.shape[-1])
    probabilities = jax.nn.softmax(jnp.where(mask[:, None, None, :], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhlm,bmhc->blhc", probabilities, value, precision=_EXACT).reshape(hidden.shape)


def _linear(weights: Weights, name: str, inputs: Float[Array, "B L I"]) -> Float[Array, "B L O"]:
    return jnp.matmul(inputs, weights[name + ".weight"].T, precision=_EXACT) + weights[name + ".bias"][None, None]


def _layer_norm(weights: Weights, name: str, inputs: Float[Array, "B L D"], epsilon: float) -> Float[Array, "B L D"]:
    centered = inputs - jnp.mean(inputs, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centered**2, axis=-1, keepdims=True) + epsilon)
    return centered * scale * weights[name + ".weight"][None, None] + weights[name + ".bias"][None, None]
