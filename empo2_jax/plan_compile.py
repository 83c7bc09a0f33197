"""The temporaries of a plan from the compiler: the learner's own program, lowered for virtual devices.

Arrays are abstract, so nothing is allocated; the compiler is the CPU's and widens bf16, hence an upper estimate.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from empo2_jax.assembly import make_learner
from empo2_jax.config import Config
from empo2_jax.models.sharding import make_mesh, shardings, spec
from empo2_jax.plan_costs import abstract_parameters, temporary_bytes
from empo2_jax.planning import BATCH_FIELDS, Plan
from empo2_jax.types import Branches, TrainBatch

_COMPILED_LAYERS = 3


def virtual_devices(count: int) -> None:
    """Make this process one of `count` CPU devices; only before JAX is first used."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    jax.config.update("jax_enable_compilation_cache", False)  # keeping the program would need its size again


def lower_update(plan: Plan, config: Config) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
    """Both programs of an update (see `Learner.lower`) for as many devices as the mesh has; nothing is allocated."""
    mesh = make_mesh(jax.devices(), *plan.mesh)
    graphdef, *parts = abstract_parameters(plan.shape, config.model.compute_dtype, config.lora)

    def place(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params, frozen = (jax.tree.map(place, part, shardings(part, mesh)) for part in parts)
    over_rows = NamedSharding(mesh, spec("batch", "length"))

    def rows_of(length: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((plan.rows, length), dtype, sharding=over_rows)

    fields = [rows_of(plan.length + plan.branches, dtype) for dtype in BATCH_FIELDS.values()]
    sides = Branches._make(rows_of(plan.branches, np.int32) for _ in Branches._fields) if plan.branches else None
    batch = TrainBatch._make([*fields, sides])
    # Where moments wait between updates is not part of either program: they are there when it runs.
    update = config.update.model_copy(update={"offload_moments": False})
    learner = make_learner(config.model_copy(update={"update": update}), graphdef, frozen, mesh)
    return learner.lower(params, batch)


def compiled(plan: Plan, config: Config) -> Plan:
    """The plan with the compiler's temporaries of adding a gradient instead of the formula's.

    A few layers are compiled and the rest is added by the formula: the layers are a loop, and each one more only adds
    its stacked weights, their gradients and what is kept of it.
    """
    short = replace(plan, shape=replace(plan.shape, num_layers=min(plan.shape.num_layers, _COMPILED_LAYERS)))
    adding, _ = lower_update(short, config)
    # Buffers are assigned before code is optimized, and this code will not run.
    memory = adding.compile(compiler_options={"xla_backend_optimization_level": "0"}).memory_analysis()
    assert memory is not None, "the CPU's compiler reports its buffers"
    sizes = (plan.mesh, plan.rows, plan.length, plan.branches, config.model.remat, config.lora)
    rest = temporary_bytes(plan.shape, *sizes) - temporary_bytes(short.shape, *sizes)
    return replace(plan, temporaries=memory.temp_size_in_bytes + rest, compiled=True)
