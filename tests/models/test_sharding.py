"""The table of axes, its errors, and a sharded model equal to the unsharded one."""

import os
import subprocess
import sys

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from empo2_jax.doctor import diagnose
from empo2_jax.errors import ConfigError
from empo2_jax.models.qwen2 import Qwen2, Qwen2Config
from empo2_jax.models.sharding import batch_shards, check_divides, make_mesh, partition, shardings, visible_devices

FOUR_DEVICES = """
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from empo2_jax.models.qwen2 import Qwen2, Qwen2Config
from empo2_jax.models.sharding import make_mesh, shardings
from empo2_jax.ops.attention_kernels import KERNELS, splash_attention

KERNELS["splash"] = partial(splash_attention, interpret=True)
cudnn.check_cudnn_version = lambda: 91000

config = Qwen2Config(vocab_size=32, hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
                     intermediate_size=24)
params = nnx.split(Qwen2(config, rngs=nnx.Rngs(0)))[1]
ids = jnp.arange(32, dtype=jnp.int32).reshape(4, 8)
positions, segments = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (4, 8)), jnp.ones((4, 8), jnp.int32)

def of(attention, dtype=jnp.float32):
    graph = nnx.split(Qwen2(config, rngs=nnx.Rngs(0), dtype=dtype, attention=attention))[0]

    def loss(params):
        model = nnx.merge(graph, params)
        return jnp.sum(jnp.sin(model(ids, positions, segments, remat="full") @ model.head.T))

    return jax.value_and_grad(loss)

expected, gradients = jax.jit(of("xla"))(params)
mesh = make_mesh(jax.devices(), 1, 2, 2)
places = shardings(params, mesh)
placed = jax.device_put(params, places)
q = placed["layers"][0]["self_attn"]["q_proj"]
assert q["weight"][...].addressable_shards[0].data.shape == (16, 8), "heads over tensor, embed over fsdp"
assert q["bias"][...].addressable_shards[0].data.shape == (16,)
for attention in ("xla", "splash"):
    with jax.set_mesh(mesh):
        got, sharded = jax.jit(of(attention), out_shardings=(None, places))(placed)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
with jax.set_mesh(mesh):
    traced = jax.jit(of("cudnn", jnp.bfloat16), out_shardings=(None, places)).trace(placed)
program = traced.lower(lowering_platforms=("cuda",)).as_text()
calls = [line for line in program.splitlines() if "custom_call @__cudnn" in line]
assert ["tensor<2x8x2x8xbf16>, tensor<2x8x1x8xbf16>" in line for line in calls] == [True] * 3, "rows, heads of a device"
print("equal")
"""


def abstract(**changes: int) -> nnx.State:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 24} | changes
    config = Qwen2Config(num_layers=1, head_dim=4, **sizes)
    return nnx.state(nnx.eval_shape(lambda: Qwen2(config, rngs=nnx.Rngs(0))), nnx.Param)


def wide_mesh(data: int, fsdp: int, tensor: int) -> jax.sharding.AbstractMesh:
    return jax.sharding.AbstractMesh((data, fsdp, tensor), ("data", "fsdp", "tensor"))


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("heads", "embed"), PartitionSpec("tensor", "fsdp")),
        (("embed", "mlp"), PartitionSpec("fsdp", "tensor")),
        (("vocab", "hidden"), PartitionSpec(("fsdp", "tensor"), None)),
        (("norm", "embed"), PartitionSpec(None, "fsdp")),
        (("batch", "length"), PartitionSpec(("data", "fsdp"), None)),
    ],
)
def test_names_map_to_mesh_axes(axes: tuple[str, str], expected: PartitionSpec) -> None:
    assert partition("x", (8, 8), axes, wide_mesh(2, 2, 2)) == expected


def test_axes_of_one_device_are_left_out() -> None:
    assert partition("x", (7, 8), ("heads", "embed"), wide_mesh(1, 2, 1)) == PartitionSpec(None, "fsdp")


def test_a_size_that_does_not_divide_is_named() -> None:
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.k_proj.* kv_heads of size 8 .* 16 devices"):
        shardings(abstract(vocab_size=64, num_heads=16, intermediate_size=32), wide_mesh(1, 1, 16))


def test_one_device_is_a_mesh_too() -> None:
    params = abstract()
    placed = shardings(params, make_mesh(jax.devices()[:1], 1, 1, 1))
    assert jax.tree.structure(placed) == jax.tree.structure(params)
    assert all(place.spec in (PartitionSpec(None), PartitionSpec(None, None)) for place in jax.tree.leaves(placed))


def test_a_mesh_needs_its_devices() -> None:
    with pytest.raises(ConfigError, match=r"model\.mesh = \[1, 2, 2\] .* needs 4 devices; there are 1"):
        make_mesh(jax.devices()[:1], 1, 2, 2)


@pytest.mark.parametrize(
    ("fsdp", "tensor", "message"),
    [
        (1, 4, "2 key/value heads do not divide over tensor = 4; allowed: 1, 2"),
        (1, 6, "4 attention heads do not divide over tensor = 6; allowed: 1, 2"),
        (5, 1, "16 elements of the hidden states do not divide over fsdp = 5; allowed: 1, 2, 4"),
        (16, 2, "48 tokens of the vocabulary do not divide over fsdp × tensor = 32; allowed: 1, 2, 3, 4, 6, 8, 12"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_named_with_what_does(fsdp: int, tensor: int, message: str) -> None:
    # The elements of the two key/value heads, 8, would divide over 4: the heads do not.
    model = Qwen2Config(48, 16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4, intermediate_size=24)
    check_divides(model, fsdp=2, tensor=2)
    with pytest.raises(ConfigError, match=message):
        check_divides(model, fsdp, tensor)


def test_rows_of_a_batch_are_split_over_data_and_fsdp() -> None:
    assert batch_shards(wide_mesh(2, 3, 5)) == 6


def test_four_devices_compute_what_one_does() -> None:
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", FOUR_DEVICES], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize(
    ("error", "said"), [(AssertionError(), "it finds none here"), (RuntimeError("no backend\nmore"), "no backend;")]
)
def test_a_machine_without_what_was_asked_for_is_told(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(ConfigError, match=f"JAX_PLATFORMS = 'cuda': {said}"):
        visible_devices()
    checks = {check.name: check for check in diagnose()}
    assert not checks["JAX devices"].ok and checks["JAX devices"].needed
