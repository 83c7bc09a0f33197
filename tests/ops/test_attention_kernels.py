"""Which kernel a platform gets, and that the kernels compute what `segment_attention` computes."""

import re
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from empo2_jax.errors import ConfigError
from empo2_jax.ops.attention import segment_attention
from empo2_jax.ops.attention_kernels import (
    KERNELS,
    Platform,
    cudnn_attention,
    platform_of,
    resolve,
    splash_attention,
)

Attention = Callable[..., jax.Array]
CPU, TPU = Platform("cpu"), Platform("tpu")
A100, H100, T4 = Platform("cuda", (8, 0)), Platform("cuda", (9, 0)), Platform("cuda", (7, 5))
LENGTH = 261  # odd; splash needs three tiles a side


def packed() -> tuple[jax.Array, ...]:
    """q, k, v of 4 and 2 heads of 16, positions and segments: a packed row with padding, and a row of padding."""
    draw = np.random.default_rng(0)
    q, k, v = (draw.normal(size=(2, LENGTH, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    lengths = [150, 1, 90, 20]
    positions = np.concatenate([np.arange(150), [0], np.arange(90), np.zeros(20)])
    segments = np.repeat([1, 2, 3, 0], lengths)
    rows = [np.stack([row, np.zeros(LENGTH)]).astype(np.int32) for row in (positions, segments)]
    return tuple(map(jnp.asarray, (q, k, v, *rows)))


def value_and_gradients(attend: Attention, window: int | None) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    q, k, v, positions, segments = packed()
    real = (segments > 0)[..., None, None]

    def outputs(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.where(real, attend(q, k, v, positions, segments, window), 0.0)

    out, pull = jax.vjp(jax.jit(outputs), q, k, v)
    return out, pull(jnp.sin(jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape)))


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("name", ["cudnn", "splash"])
def test_kernels_compute_what_the_portable_one_does(
    name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splash interpreted; cuDNN's mask and padding with JAX's own arithmetic in the place of the kernel."""
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **k: plain(*a, **k | {"implementation": "xla"}))
    attend = {"cudnn": cudnn_attention, "splash": partial(splash_attention, interpret=True)}[name]
    (expected, wanted), (got, gradients) = (value_and_gradients(each, window) for each in (segment_attention, attend))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    for one, other in zip(gradients, wanted, strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(one, other, atol=2e-5)
    assert np.isfinite(attend(*packed(), window)).all(), "padding too"


def lowered(attend: Attention, platform: str, head_dim: int, window: int | None) -> str:
    shapes = [jax.ShapeDtypeStruct((2, LENGTH, heads, head_dim), jnp.bfloat16) for heads in (4, 2, 2)]
    ids = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
        return attend(q, k, v, positions, segments, window).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*shapes, ids, ids)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("window", [None, 9])
def test_gpus_get_the_flash_kernel_both_ways(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)  # without the library there is no version
    text = lowered(cudnn_attention, "cuda", 64, window)
    assert re.findall(r"__cudnn\$\w+", text) == ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]
    assert '"mask_type": "CAUSAL"' in text.replace("\\22", '"')
    assert "tensor<2x4x262x262x" not in text, "scores of all heads"


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("head_dim", [24, 64, 128])
def test_tpus_get_the_splash_kernels(head_dim: int, window: int | None) -> None:
    text = lowered(splash_attention, "tpu", head_dim, window)
    kernels = re.findall(r'kernel_name = "splash_mha_(\w+)_segmented', text)
    assert kernels == ["fwd", "dkv", "dq"]


@pytest.mark.parametrize(
    ("platform", "dtype", "head_dim", "expected"),
    [
        (CPU, "float32", 64, "xla"),
        (A100, "bfloat16", 128, "cudnn"),
        (A100, "float32", 128, "xla"),
        (A100, "bfloat16", 192, "xla"),
        (H100, "bfloat16", 192, "cudnn"),
        (H100, "bfloat16", None, "cudnn"),
        (T4, "bfloat16", 64, "xla"),
        (Platform("rocm"), "bfloat16", 64, "xla"),
        (TPU, "float32", 64, "splash"),
        (TPU, "bfloat16", 128, "splash"),
    ],
)
def test_auto_takes_the_best_that_can_run(platform: Platform, dtype: str, head_dim: int | None, expected: str) -> None:
    assert resolve("auto", platform, dtype, head_dim) == expected
    assert resolve(expected, platform, dtype, head_dim) == expected


@pytest.mark.parametrize(
    ("name", "platform", "dtype", "head_dim", "message"),
    [
        ("cudnn", CPU, "bfloat16", 64, "'cudnn' needs an NVIDIA GPU, not cpu"),
        ("cudnn", T4, "bfloat16", 64, "needs compute capability 8.0, not 7.5"),
        ("cudnn", A100, "float32", 64, 'needs model.compute_dtype = "bfloat16", not "float32"'),
        ("cudnn", A100, "bfloat16", 132, "needs a head_dim that is a multiple of 8 up to 128, not 132"),
        ("cudnn", H100, "bfloat16", 264, "up to 256, not 264"),
        ("splash", A100, "bfloat16", 64, "'splash' needs a TPU, not cuda"),
        ("flash", A100, "bfloat16", 64, "'flash': no such kernel; allowed: auto, xla, cudnn, splash"),
    ],
)
def test_a_kernel_that_cannot_run_is_one_clear_line(
    name: str, platform: Platform, dtype: str, head_dim: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        resolve(name, platform, dtype, head_dim)
    assert "\n" not in str(caught.value)


def test_this_device_has_a_platform() -> None:
    platform = platform_of(jax.devices()[0])
    assert platform.name in {"cpu", "cuda", "tpu", "rocm"} and (platform.name == "cuda") == bool(platform.capability)
    assert resolve("auto", platform, "float32") in KERNELS
