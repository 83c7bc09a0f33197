"""The models and batches of the suites, the same for both sides: every value follows from a name and a seed."""

import zlib
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import DTypeLike, Float32, Int32

from empo2_jax.models.hf_weights import named
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.models.qwen2_sizes import QWEN2_5
from empo2_jax.models.sharding import make_mesh, shardings
from empo2_jax.types import TrainBatch

CLIPS = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 10.0}
_SMALL = Qwen2Config(
    vocab_size=32_000,
    hidden_size=512,
    num_layers=6,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=1_408,
    rope_theta=1e6,
    tie_embeddings=True,
)
SHAPES = {
    "small": _SMALL,
    "0.5B": QWEN2_5["0.5B"],
    "0.5B cut to 4 layers": replace(QWEN2_5["0.5B"], num_layers=4),
    "mini": replace(_SMALL, vocab_size=4_096, hidden_size=256, num_layers=3, num_heads=4, intermediate_size=704),
    "tiny": replace(
        _SMALL, vocab_size=128, hidden_size=32, num_layers=2, num_heads=4, head_dim=8, intermediate_size=64
    ),
}


def weight(name: str, shape: tuple[int, ...]) -> Float32[np.ndarray, "..."]:
    """The tensor of that Hugging Face name."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    return 1.0 + 0.1 * values if "norm" in name else 0.02 * values


def make_model(shape: str, dtype: DTypeLike = jnp.float32) -> Qwen2:
    """Our model with these weights."""
    graph, params = nnx.split(nnx.eval_shape(lambda: Qwen2(SHAPES[shape], rngs=nnx.Rngs(0), dtype=dtype)))
    for name, variable in named(params).items():
        variable.set_value(jnp.asarray(weight(name, variable.shape)))
    return nnx.merge(graph, params)


def placed_model(shape: str) -> tuple[Any, Any]:
    """Structure and f32 parameters of that model, on the mesh of one device as in a run.

    Left where they were made, they would be of another type than those an update returns, which compiles twice.
    """
    graph, params = nnx.split(make_model(shape))
    return graph, jax.device_put(params, shardings(params, make_mesh(jax.devices(), 1, 1, 1)))


class Prompts(NamedTuple):
    """Token ids to start from and to append."""

    first: Int32[np.ndarray, "B T"]
    turns: Int32[np.ndarray, "S K"]


def prompts(shape: str, rows: int, length: int, turns: int = 0, growth: int = 0) -> Prompts:
    """Random prompts, and for `turns` turns `growth` tokens each."""
    generator, vocabulary = np.random.default_rng(0), SHAPES[shape].vocab_size
    first = generator.integers(0, vocabulary, (rows, length), np.int32)
    return Prompts(first, generator.integers(0, vocabulary, (turns, growth), np.int32))


def train_batch(shape: str, rows: int, length: int) -> TrainBatch:
    """Full rows whose every token but the first counts: what a head on action tokens alone saves is not used."""
    generator, vocabulary = np.random.default_rng(0), SHAPES[shape].vocab_size
    size = (rows, length)
    mask = np.ones(size, bool)
    mask[:, 0] = False
    signs = generator.choice(np.array([-1.0, 1.0], np.float32), (rows, 1))
    arrays: dict[str, Any] = {
        "token_ids": generator.integers(0, vocabulary, size, np.int32),
        "segment_ids": np.ones(size, np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "loss_mask": mask,
        "advantages": np.where(mask, signs, 0.0).astype(np.float32),
        "denominator_logprobs": np.full(size, -np.log(vocabulary), np.float32),
        "rollout_weight": np.ones(size, np.float32),
        "token_weight": (mask / mask.sum()).astype(np.float32),
        "mask_threshold": np.zeros(size, np.float32),
        "reference_logprobs": np.zeros(size, np.float32),
        "mode": np.zeros(size, np.int8),
    }
    return TrainBatch(**arrays)
