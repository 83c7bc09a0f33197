"""Which array axis lies on which mesh axis: one table for parameters and activations.

A parameter carries the logical names of its axes as metadata (`axes`); the table below maps a name to mesh axes. The
mesh has three axes: `data` (replicas), `fsdp` (parameters and batch split) and `tensor` (heads and mlp split). The
vocabulary is split over `fsdp` and `tensor` together, so that embedding and head are never gathered
(`models/vocabulary.py`). One device is the mesh 1 × 1 × 1, so there is no second code path.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from empo2_jax.errors import ConfigError
from empo2_jax.models.qwen2_config import Qwen2Config

MESH_AXES = ("data", "fsdp", "tensor")
RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "length": None,
    "embed": "fsdp",
    "vocab": ("fsdp", "tensor"),
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "norm": None,
    "rank": None,  # of an adapter
    "head_dim": None,
    "hidden": None,  # embedding axis of an activation and of the two vocabulary matrices
}


def visible_devices() -> list[jax.Device]:
    """The devices of all processes.

    Raises:
        ConfigError: JAX can use none of those that it was told to use.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where a plug-in finds no accelerator
        reason = (str(error) or "it finds none here").splitlines()[0]
        raise ConfigError(
            f"no devices for JAX_PLATFORMS = {os.environ.get('JAX_PLATFORMS', '')!r}: {reason}; cpu is always there"
        ) from None


def make_mesh(devices: Sequence[jax.Device], data: int, fsdp: int, tensor: int) -> Mesh:
    """Mesh of the first `data` × `fsdp` × `tensor` devices with automatic sharding propagation.

    Raises:
        ConfigError: there are fewer devices.
    """
    shape = (data, fsdp, tensor)
    count = math.prod(shape)
    if count > len(devices):
        raise ConfigError(
            f"model.mesh = {list(shape)} (data × fsdp × tensor) needs {count} devices; there are {len(devices)}"
        )
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=list(devices[:count]))


def check_divides(model: Qwen2Config, fsdp: int, tensor: int) -> None:
    """Refuse a mesh that a model's sizes do not divide over; heads count, not their elements.

    Raises:
        ConfigError: names the size and the smaller values of the mesh axis that would do.
    """
    shared = math.gcd(model.num_heads, model.num_kv_heads, model.intermediate_size)
    for axis, parts, name, size, allowed in (
        ("tensor", tensor, "attention heads", model.num_heads, shared),
        ("tensor", tensor, "key/value heads", model.num_kv_heads, shared),
        ("tensor", tensor, "elements of the mlp", model.intermediate_size, shared),
        ("fsdp", fsdp, "elements of the hidden states", model.hidden_size, model.hidden_size),
        ("fsdp × tensor", fsdp * tensor, "tokens of the vocabulary", model.vocab_size, model.vocab_size),
    ):
        if size % parts:
            smaller = ", ".join(str(value) for value in range(1, parts) if allowed % value == 0)
            raise ConfigError(f"model.mesh: {size} {name} do not divide over {axis} = {parts}; allowed: {smaller}")


def batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Parts that the rows of a batch are split into: their number is a multiple of this."""
    return math.prod(mesh.shape[axis] for axis in RULES["batch"] or ())


def shardings(params: Any, mesh: Mesh | AbstractMesh) -> Any:
    """NamedSharding of every parameter, in a tree of the structure of `params` (values may be abstract).

    Raises:
        ConfigError: a size does not divide over its mesh axes; names the parameter and the axis.
    """

    def place(path: tuple[Any, ...], variable: Any) -> Any:
        name = ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        return variable.replace(
            NamedSharding(mesh, partition(name, variable.shape, variable.get_metadata("axes"), mesh))
        )

    return jax.tree_util.tree_map_with_path(place, params, is_leaf=lambda node: isinstance(node, nnx.Variable))


def partition(name: str, shape: Sequence[int], axes: Sequence[str], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """PartitionSpec of one array by the names of its axes; a mesh axis of size 1 is left out."""
    places = []
    for size, axis in zip(shape, axes, strict=True):
        rule = RULES[axis]
        names = (rule,) if isinstance(rule, str) else rule or ()
        parts = math.prod(mesh.shape[mesh_axis] for mesh_axis in names)
        if size % parts:
            raise ConfigError(f"{name}: axis {axis} of size {size} does not divide over {parts} devices of {rule}")
        places.append(rule if parts > 1 else None)
    return PartitionSpec(*places)


def constrain(x: Float[Array, "..."], *axes: str) -> Float[Array, "..."]:
    """Pin an activation's layout by its axis names when a mesh is set (`jax.set_mesh`); else return it unchanged."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(*axes))


def spec(*axes: str) -> PartitionSpec:
    """PartitionSpec of an array by the names of its axes, whatever the mesh."""
    return PartitionSpec(*(RULES[axis] for axis in axes))
