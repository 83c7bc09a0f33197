"""Attention of packed rows by name: the portable one, cuDNN's flash attention and splash attention for TPUs.

`KERNELS` is the whole choice and `resolve` the only place where a platform decides. Every entry computes what
`segment_attention` computes; what differs is memory, speed and rounding. They know nothing of meshes: each works on the
rows and heads of one device. The engine's cached attention is not chosen here.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int32

from empo2_jax.errors import ConfigError
from empo2_jax.ops.attention import segment_attention

_BLOCKS = (512, 256, 128)  # splash: queries and keys of a tile, the largest that divides the row


class Platform(NamedTuple):
    """What a device is, as far as kernels care."""

    name: str  # cpu, tpu, cuda, rocm, …
    capability: tuple[int, ...] = ()  # compute capability of an NVIDIA GPU


def platform_of(device: jax.Device) -> Platform:
    """The platform of a device."""
    version = device.client.platform_version.lower()
    if "cuda" in version:
        return Platform("cuda", tuple(int(part) for part in device.compute_capability.split(".")))
    return Platform("rocm" if "rocm" in version else device.platform)


def resolve(name: str, platform: Platform, dtype: DTypeLike, head_dim: int | None = None) -> str:
    """Name of the kernel in `KERNELS` that `model.attention` means on a platform.

    Args:
        name: `auto`, the first of `PREFERRED` that can run, or a kernel.
        platform: Of the devices that train.
        dtype: Of queries, keys and values.
        head_dim: Elements of a head; `None` when the model is not known yet.

    Raises:
        ConfigError: no such kernel, or it cannot run here.
    """
    if name == "auto":
        return next(kernel for kernel in PREFERRED if obstacle(kernel, platform, dtype, head_dim) is None)
    if name not in KERNELS:
        raise ConfigError(f"model.attention = {name!r}: no such kernel; allowed: auto, {', '.join(KERNELS)}")
    reason = obstacle(name, platform, dtype, head_dim)
    if reason is not None:
        raise ConfigError(f"model.attention = {name!r} needs {reason}; `auto` and `xla` run everywhere")
    return name


def obstacle(name: str, platform: Platform, dtype: DTypeLike, head_dim: int | None = None) -> str | None:
    """What a kernel needs that is not there, and what is there instead; `None` if it can run. See `resolve`."""
    if name == "cudnn":
        return _cudnn_obstacle(platform, jnp.dtype(dtype), head_dim)
    return f"a TPU, not {platform.name}" if name == "splash" and platform.name != "tpu" else None


def _cudnn_obstacle(platform: Platform, dtype: jnp.dtype, head_dim: int | None) -> str | None:
    if platform.name != "cuda":
        return f"an NVIDIA GPU, not {platform.name}"
    if platform.capability < (8, 0):
        return f"compute capability 8.0, not {'.'.join(map(str, platform.capability))}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f'model.compute_dtype = "bfloat16", not "{dtype.name}"'
    widest = 128 if platform.capability < (9, 0) else 256
    if head_dim is not None and (head_dim % 8 or head_dim > widest):
        return f"a head_dim that is a multiple of 8 up to {widest}, not {head_dim}"
    return None


def cudnn_attention(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B T K d"],
    v: Float[Array, "B T K d"],
    positions: Int32[Array, "B T"],
    segment_ids: Int32[Array, "B T"],
    window: int | None = None,
) -> Float[Array, "B T H d"]:
    """`segment_attention` by cuDNN. A GPU only.

    Segments go in as a mask, which cuDNN reads as a bias in the dtype of `q`: 2 T² bytes for each row, shared by the
    heads. Scores stay in the kernel, and tiles behind the queries are skipped. The other way, offsets of packed
    sequences, is not in JAX's public interface and needs a Hopper.
    """
    length = q.shape[1]
    q, k, v, positions, segment_ids = (_pad_rows(x, 2) for x in (q, k, v, positions, segment_ids))
    visible = segment_ids[:, :, None] == segment_ids[:, None, :]
    if window is not None:  # not as cuDNN's own window, which excludes a bias
        visible &= positions[:, :, None] - positions[:, None, :] < window
    out = jax.nn.dot_product_attention(q, k, v, mask=visible[:, None], is_causal=True, implementation="cudnn")
    return out[:, :length]


def splash_attention(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B T K d"],
    v: Float[Array, "B T K d"],
    positions: Int32[Array, "B T"],
    segment_ids: Int32[Array, "B T"],
    window: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B T H d"]:
    """`segment_attention` by JAX's splash kernel; `interpret` runs it anywhere, slowly.

    Rows are padded to a multiple of 128 tokens and heads to one of 64 elements. `positions` are not read: inside a
    segment they ascend as the row does.
    """
    # Pallas takes half a second to import, and only TPUs need it.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    del positions
    length, heads, size = q.shape[1:]
    q = q * jnp.asarray(size**-0.5, q.dtype)  # the kernel does not scale
    q, k, v = (jnp.pad(_pad_rows(x, 128), [(0, 0)] * 3 + [(0, -size % 64)]).swapaxes(1, 2) for x in (q, k, v))
    segment_ids = _pad_rows(segment_ids, 128)
    square = (q.shape[2], q.shape[2])
    mask = splash.CausalMask(square) if window is None else splash.LocalMask(square, (window - 1, 0), 0)
    block = next(block for block in _BLOCKS if q.shape[2] % block == 0)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    out = jax.vmap(kernel)(q, k, v, splash.SegmentIds(segment_ids, segment_ids))
    return out.swapaxes(1, 2)[:, :length, :, :size]


def _pad_rows(x: Array, multiple: int) -> Array:
    """Lengthen axis 1 to a multiple with zeros: further padding tokens, since segment 0 is padding."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % multiple)] + [(0, 0)] * (x.ndim - 2))


KERNELS: Mapping[str, Callable[..., Float[Array, "B T H d"]]] = {
    "xla": segment_attention,
    "cudnn": cudnn_attention,
    "splash": splash_attention,
}
PREFERRED = ("cudnn", "splash", "xla")  # what `auto` tries, in order
