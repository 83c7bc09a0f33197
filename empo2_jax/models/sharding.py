"""Which array axis lies on which mesh axis: one table for parameters and activations.

A parameter carries the logical names of its axes as metadata (`axes`); the table below maps a name to mesh axes. The
mesh has three axes: `data` (replicas), `fsdp` (parameters and batch split) and `tensor` (heads, mlp and vocabulary
split). One device is the mesh 1 × 1 × 1, so there is no second code path.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from empo2_jax.errors import ConfigError

MESH_AXES = ("data", "fsdp", "tensor")
RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "length": None,
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "norm": None,
    "hidden": None,  # embedding axis of an activation
}


def make_mesh(devices: Sequence[jax.Device], data: int, fsdp: int, tensor: int) -> Mesh:
    """Mesh of `data` × `fsdp` × `tensor` devices with automatic sharding propagation.

    Raises:
        ConfigError: the sizes do not multiply to the number of devices.
    """
    shape = (data, fsdp, tensor)
    if math.prod(shape) != len(devices) or min(shape) < 1:
        raise ConfigError(f"mesh data × fsdp × tensor = {data} × {fsdp} × {tensor} does not use {len(devices)} devices")
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=list(devices))


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
    spec = []
    for size, axis in zip(shape, axes, strict=True):
        rule = RULES[axis]
        names = (rule,) if isinstance(rule, str) else rule or ()
        parts = math.prod(mesh.shape[mesh_axis] for mesh_axis in names)
        if size % parts:
            raise ConfigError(f"{name}: axis {axis} of size {size} does not divide over {parts} devices of {rule}")
        spec.append(rule if parts > 1 else None)
    return PartitionSpec(*spec)


def constrain(x: Float[Array, "..."], *axes: str) -> Float[Array, "..."]:
    """Pin an activation's layout by its axis names when a mesh is set (`jax.set_mesh`); else return it unchanged."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    spec = PartitionSpec(*(RULES[axis] for axis in axes))
    return jax.lax.with_sharding_constraint(x, spec)
