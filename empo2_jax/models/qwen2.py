"""Qwen2.5 (and bias-free Llama) in Flax NNX, one file read top to bottom.

A decoder of pre-norm blocks: RMSNorm, grouped-query attention with rotary positions, SwiGLU. Parameters are f32 and
named as in Hugging Face checkpoints, with kernels [out, in], so that loading and publishing weights are plain copies;
compute runs in `dtype`. Two ways through the same layers: `__call__` for packed training rows and `extend` for the
engine's slots with a KV cache.

There is no language-model head here: the model returns hidden states, and `ops/logprobs.py` applies `head` in chunks.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Float32, Int32

from empo2_jax.models.qwen2_config import Qwen2Config, rope_frequencies
from empo2_jax.models.sharding import constrain, spec
from empo2_jax.models.vocabulary import embed
from empo2_jax.ops.attention import cached_attention
from empo2_jax.ops.attention_kernels import KERNELS
from empo2_jax.ops.branch_attention import branch_attention
from empo2_jax.types import Branches

__all__ = ["REMAT_POLICIES", "KVCache", "Qwen2", "Qwen2Config", "init_cache"]

REMAT_POLICIES: Mapping[str, Callable[..., Any]] = {  # what the forward pass of a layer keeps for the backward pass
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # outputs of the linear layers
    "full": jax.checkpoint_policies.nothing_saveable,  # only the residual stream between layers
}

Rotation = tuple[Float32[Array, "B T half"], Float32[Array, "B T half"]]
Attend = Callable[[int | None, Array, Array, Array], Array]  # window, q, k, v → heads


class KVCache(NamedTuple):
    """Keys (rotated) and values of every slot; one array per layer, column `c` holds position `c`."""

    keys: tuple[Float[Array, "S K M d"], ...]
    values: tuple[Float[Array, "S K M d"], ...]


def init_cache(config: Qwen2Config, slots: int, max_length: int, dtype: DTypeLike = jnp.float32) -> KVCache:
    """An empty cache for `slots` sequences of up to `max_length` tokens."""
    shape = (slots, config.num_kv_heads, max_length, config.head_dim)
    keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in range(2))
    return KVCache(keys, values)


class Linear(nnx.Module):
    """y = x Wᵀ + b with W stored [out, in]."""

    def __init__(self, axes: tuple[str, str], shape: tuple[int, int], std: float, bias: bool, rngs: nnx.Rngs):
        self.weight = _kernel(axes, shape, std, rngs)
        self.bias = nnx.Param(jnp.zeros(shape[:1], jnp.float32), axes=axes[:1]) if bias else None

    def __call__(self, x: Float[Array, "B T in"]) -> Float[Array, "B T out"]:
        """Apply in the dtype of `x`."""
        flat = x.reshape(-1, x.shape[-1])  # einsum, not `@ W.T`: of one row XLA would transpose the kernel every time
        y = jnp.einsum("ni,oi->no", flat, self.weight[...].astype(x.dtype)).reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)[None, None]


class Embedding(nnx.Module):
    """One row per token id."""

    def __init__(self, config: Qwen2Config, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.hidden_size)
        self.weight = _kernel(("vocab", "hidden"), shape, config.initializer_range, rngs)


class RMSNorm(nnx.Module):
    """x / rms(x) · weight, normalized in f32."""

    def __init__(self, size: int, eps: float):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((size,), jnp.float32), axes=("norm",))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Normalize the last axis."""
        wide = x.astype(jnp.float32)
        normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (normal * self.weight[...][None, None]).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention; how keys are found (packed row or cache) is the caller's `attend`."""

    def __init__(self, config: Qwen2Config, layer: int, rngs: nnx.Rngs):
        d, std, bias = config.hidden_size, config.initializer_range, config.attention_bias
        self.head_dim, self.window = config.head_dim, config.window(layer)
        queries, pairs = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(("heads", "embed"), (queries, d), std, bias, rngs)
        self.k_proj = Linear(("kv_heads", "embed"), (pairs, d), std, bias, rngs)
        self.v_proj = Linear(("kv_heads", "embed"), (pairs, d), std, bias, rngs)
        self.o_proj = Linear(("embed", "heads"), (d, queries), std, False, rngs)

    def __call__(self, x: Float[Array, "B T D"], rotation: Rotation, attend: Attend) -> Float[Array, "B T D"]:
        """Project, rotate, attend, project back."""
        q = self._heads(self.q_proj(x), "heads")
        k, v = (self._heads(project(x), "kv_heads") for project in (self.k_proj, self.v_proj))
        heads = attend(self.window, _rotate(q, rotation), _rotate(k, rotation), v)
        return self.o_proj(heads.reshape(*x.shape[:2], -1))

    def _heads(self, x: Float[Array, "B T flat"], axis: str) -> Float[Array, "B T heads d"]:
        return constrain(x.reshape(*x.shape[:2], -1, self.head_dim), "batch", "length", axis, "head_dim")


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: Qwen2Config, rngs: nnx.Rngs):
        d, f, std = config.hidden_size, config.intermediate_size, config.initializer_range
        self.gate_proj = Linear(("mlp", "embed"), (f, d), std, False, rngs)
        self.up_proj = Linear(("mlp", "embed"), (f, d), std, False, rngs)
        self.down_proj = Linear(("embed", "mlp"), (d, f), std, False, rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Apply position by position."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: Qwen2Config, layer: int, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, rngs)

    def __call__(self, x: Float[Array, "B T D"], rotation: Rotation, attend: Attend) -> Float[Array, "B T D"]:
        """One step of the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return constrain(x, "batch", "length", "hidden")


class Qwen2(nnx.Module):
    """The decoder; attribute paths equal Hugging Face tensor names after `model.`."""

    def __init__(self, config: Qwen2Config, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32, attention: str = "xla"):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.attention = attention  # name in `ops.attention_kernels.KERNELS`; of packed rows, not of the cache
        self.embed_tokens = Embedding(config, rngs)
        self.layers = nnx.List([Block(config, layer, rngs) for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_embeddings else Embedding(config, rngs)

    @property
    def head(self) -> Float[Array, "V D"]:
        """Weight that maps hidden states to logits: its own, or the embedding when tied."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head).weight[...]

    def __call__(
        self,
        token_ids: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        segment_ids: Int32[Array, "B T"],
        branches: Branches | None = None,
        *,
        remat: str = "none",
    ) -> Float[Array, "B T D"]:
        """Normed hidden states of packed rows.

        Args:
            token_ids: Tokens, each below the vocabulary size.
            positions: Position inside the segment, ascending from 0; in a branch going on from its cut.
            segment_ids: Attention stays inside a segment; 0 is padding, whose outputs are finite and meaningless.
            branches: What the last columns see, if they hold side branches.
            remat: Name in `REMAT_POLICIES`: what is kept for the backward pass; the rest is computed again.
        """
        trunk = token_ids.shape[1] - (0 if branches is None else branches.ids.shape[1])

        def attend(window: int | None, q: Array, k: Array, v: Array) -> Array:
            own = (x[:, :trunk] for x in (q, k, v))
            heads = _packed_attention(self.attention, window, *own, positions[:, :trunk], segment_ids[:, :trunk])
            if branches is None:
                return heads
            sides = branch_attention(q[:, trunk:], k, v, positions, segment_ids, branches, window)
            return jnp.concatenate([heads, sides], axis=1)

        x, rotation = self._embed(token_ids), self._rotation(positions)
        # One loop over stacked weights for each run of equal layers: 30 unrolled ones take a minute to compile.
        for _, run in groupby(self.layers, key=lambda block: block.self_attn.window):
            graphs, weights = zip(*(nnx.split(block) for block in run), strict=True)

            def step(x: Array, weights: Any, graph: nnx.GraphDef = graphs[0]) -> tuple[Array, None]:
                return nnx.merge(graph, weights)(x, rotation, attend), None

            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
            layer: Callable[..., tuple[Array, None]] = step
            if remat != "none":  # a scan's backward pass is a loop of its own: nothing to be merged with
                layer = jax.checkpoint(step, policy=REMAT_POLICIES[remat], prevent_cse=False)
            x, _ = jax.lax.scan(layer, x, stacked)
        return self.norm(x)

    def extend(
        self,
        cache: KVCache,
        token_ids: Int32[Array, "S Tb"],
        lengths: Int32[Array, " S"],
        counts: Int32[Array, " S"],
        width: int,
    ) -> tuple[Float[Array, "S Tb D"], KVCache]:
        """Append tokens to every slot and return their normed hidden states with the new cache.

        Args:
            cache: Keys and values so far; donate it, the update is in place.
            token_ids: New tokens; those at and beyond `counts` are ignored and their outputs meaningless.
            lengths: Valid tokens of each slot; lowering one rolls its slot back.
            counts: New tokens of each slot, 0 to Tb. `lengths + counts` is at most `width`.
            width: Cache columns that are read, static; at most the cache's length.
        """
        new = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
        positions = lengths[:, None] + new
        columns = jnp.where(new < counts[:, None], positions, cache.keys[0].shape[2])  # out of range: dropped
        x, rotation = self._embed(token_ids), self._rotation(positions)
        keys, values = list(cache.keys), list(cache.values)
        for index, block in enumerate(self.layers):

            def attend(window: int | None, q: Array, k: Array, v: Array, layer: int = index) -> Array:
                keys[layer], values[layer] = _write(keys[layer], columns, k), _write(values[layer], columns, v)
                return cached_attention(q, keys[layer][:, :, :width], values[layer][:, :, :width], positions, window)

            x = block(x, rotation, attend)
        return self.norm(x), KVCache(tuple(keys), tuple(values))

    def _embed(self, token_ids: Int32[Array, "B T"]) -> Float[Array, "B T D"]:
        x = embed(self.embed_tokens.weight[...], token_ids, self.dtype)
        return constrain(x, "batch", "length", "hidden")

    def _rotation(self, positions: Int32[Array, "B T"]) -> Rotation:
        frequencies, stretch = rope_frequencies(self.config)
        angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)[None, None]
        return jnp.cos(angles) * stretch, jnp.sin(angles) * stretch


def _packed_attention(
    name: str,
    window: int | None,
    q: Float[Array, "B T H d"],
    k: Float[Array, "B T K d"],
    v: Float[Array, "B T K d"],
    positions: Int32[Array, "B T"],
    segment_ids: Int32[Array, "B T"],
) -> Float[Array, "B T H d"]:
    """Run a kernel; the compiler cannot split a fused one, so on a mesh each device has its own rows and heads."""
    kernel = partial(KERNELS[name], window=window)
    if name != "xla" and not jax.sharding.get_abstract_mesh().empty:
        rows, queries, pairs = (
            spec("batch", "length", *axes) for axes in ((), ("heads", "head_dim"), ("kv_heads", "head_dim"))
        )
        places = (queries, pairs, pairs, rows, rows)
        kernel = jax.shard_map(kernel, in_specs=places, out_specs=queries, check_vma=False)
    return kernel(q, k, v, positions, segment_ids)


def _kernel(axes: tuple[str, str], shape: tuple[int, int], std: float, rngs: nnx.Rngs) -> nnx.Param:
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


def _rotate(x: Float[Array, "B T heads d"], rotation: Rotation) -> Float[Array, "B T heads d"]:
    """Rotate the pairs (i, i + d/2) of every head by position; f32 inside."""
    cos, sin = (part[:, :, None, :] for part in rotation)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _write(
    cache: Float[Array, "S K M d"], columns: Int32[Array, "S Tb"], new: Float[Array, "S Tb K d"]
) -> Float[Array, "S K M d"]:
    """Put each new token into its slot's column; columns beyond the cache are dropped."""
    if columns.size == 1:  # XLA makes of a single one a choice between two caches, and copies the cache to have both
        columns = jnp.concatenate([columns, jnp.full_like(columns, cache.shape[2])], axis=1)
        new = jnp.concatenate([new, new], axis=1)
    slots = jnp.arange(cache.shape[0])[:, None]
    return cache.at[slots, :, columns].set(new.astype(cache.dtype), mode="drop")
