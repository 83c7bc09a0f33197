"""The arithmetic behind `empo2 plan`: bytes, FLOPs and traffic of a model's shape on a mesh.

Weights are exact: they come from the abstract model and the table of `models/sharding.py`. Temporaries are a formula
that was fitted to bound the compiler's figures (`plan_compile.py`). What a run makes of them is `planning.py`'s.
"""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh

from empo2_jax.config import LoraConfig
from empo2_jax.models.lora import adapt, split
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.models.sharding import MESH_AXES, check_divides, shardings
from empo2_jax.ops.attention import QUERY_CHUNK
from empo2_jax.ops.logprobs import CHUNK

ALL_WEIGHTS = LoraConfig()
Mesh3 = tuple[int, int, int]


@cache
def abstract_parameters(
    shape: Qwen2Config, dtype: str = "float32", lora: LoraConfig = ALL_WEIGHTS
) -> tuple[nnx.GraphDef, Any, Any]:
    """Structure, trained and frozen parameters, without values."""
    return split(nnx.eval_shape(lambda: adapt(Qwen2(shape, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype)), lora, 0)))


@cache
def weight_bytes(shape: Qwen2Config, fsdp: int, tensor: int, lora: LoraConfig = ALL_WEIGHTS) -> int:
    """Bytes on one device of the f32 parameters that are trained, exact: of all of them, or of the adapters.

    Raises:
        ConfigError: the mesh does not divide the model.
    """
    check_divides(shape, fsdp, tensor)
    mesh = AbstractMesh((1, fsdp, tensor), MESH_AXES)

    def of_layers(count: int) -> int:
        params = abstract_parameters(replace(shape, num_layers=count), lora=lora)[1]
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(shardings(params, mesh)), strict=True)
        return sum(math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, place in pairs)

    one, two = of_layers(1), of_layers(2)  # all layers are alike, and 80 of them take seconds to make
    return one + (shape.num_layers - 1) * (two - one)


def temporary_bytes(
    shape: Qwen2Config,
    mesh: Mesh3,
    rows: int,
    length: int,
    branches: int,
    remat: str = "full",
    lora: LoraConfig = ALL_WEIGHTS,
) -> int:
    """Upper estimate of what adding one gradient needs on one device beyond its arguments and its result.

    All in f32, which the CPU compiler widens to: the layers' weights stacked, the gradients of those that are trained,
    what is kept of each layer, the larger of one layer's and the head's working set, and the vocabulary's two ends.
    A row has `length` tokens of trunk and `branches` of side branches.
    """
    data, fsdp, tensor = mesh
    shards, mine = fsdp * tensor, rows // (data * fsdp)
    tokens = mine * (length + branches)
    d, heads, mlp = shape.hidden_size, shape.num_heads * shape.head_dim / tensor, shape.intermediate_size / tensor
    layer = layer_matrices(shape)
    vocab = shape.vocab_size / shards
    dots = 2 * heads + 2 * mlp + 3 * d  # outputs of the linear layers, per token
    kept = {"full": d, "dots": d + dots, "none": 3 * d + 2 * dots}[remat] * tokens * shape.num_layers
    scores = 14 * mine * min(QUERY_CHUNK, length) * heads / shape.head_dim * length
    scores += 4 * mine * branches * heads  # of branches over the trunk and over themselves, before they are merged
    working = 2 * layer / tensor + tokens * (4 * mlp + 4 * heads + (6 if tensor == 1 else 28) * d) + scores
    head = 3 * min(CHUNK, tokens * fsdp) * vocab + 3 * tokens * d
    ends = (
        1 if lora.enabled else 3
    ) * vocab * d + tokens * fsdp * d  # the vocabulary's gradients, and what is exchanged
    stacked = layer / shards * shape.num_layers
    gradients = weight_bytes(shape, fsdp, tensor, lora) / 2 if lora.enabled else stacked  # and the adapters stacked
    return int(4 * (stacked + gradients + kept + max(working, head) + ends))


def layer_matrices(shape: Qwen2Config) -> int:
    """Elements of one layer's matrices."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return shape.hidden_size * (2 * q + 2 * kv + 3 * shape.intermediate_size)


def kv_bytes(shape: Qwen2Config, dtype: str) -> int:
    """Of one token in the engine's cache, over all devices."""
    width = np.dtype(np.float32).itemsize if dtype == "float32" else 2
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * width


def forward_flops(shape: Qwen2Config, tokens: int, context: int, actions: int) -> int:
    """Of one forward pass: matrices, causal attention in rows of `context` tokens, the head on action tokens only."""
    attention = 2 * context * shape.num_heads * shape.head_dim
    layers = shape.num_layers * (2 * layer_matrices(shape) + attention)
    return tokens * layers + 2 * actions * shape.vocab_size * shape.hidden_size


def traffic(
    shape: Qwen2Config, mesh: Mesh3, tokens: int, actions: int, width: int, remat: str, adapter: int
) -> dict[str, float]:
    """Bytes one device sends for a micro-batch of `tokens` per shard: ring algorithms, `width` bytes per activation.

    Gradients are those of an adapter of so many bytes on a device, or of all weights if it is 0.
    """
    _, fsdp, tensor = mesh
    passes = 1 if remat == "none" else 2  # a recomputed layer gathers and reduces again
    matrices = shape.num_layers * layer_matrices(shape) / tensor
    ring = {name: (size - 1) / size for name, size in zip(MESH_AXES, mesh, strict=True)}
    sums = 2 * (passes + 1) * shape.num_layers * tokens * shape.hidden_size * width
    ends = 2 * (tokens + actions) * fsdp * shape.hidden_size * width
    found = {
        "all-gather of weights (fsdp)": (passes + (passes == 1)) * matrices * width * ring["fsdp"],
        "reduce-scatter of gradients (fsdp)": (adapter * fsdp or matrices * 4) * ring["fsdp"],
        "exchange at embedding and head (fsdp)": ends * ring["fsdp"],
        "all-reduce of activations (tensor)": (sums + ends) * 2 * ring["tensor"],
        "all-reduce of gradients (data)": (adapter or shape.num_parameters / (fsdp * tensor) * 4) * 2 * ring["data"],
    }
    return {what: size for what, size in found.items() if size}
