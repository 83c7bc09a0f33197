"""The optimizer: AdamW with a clipped global gradient norm, built by Optax from the configuration."""

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float32

from empo2_jax.config import UpdateConfig, WarmstartConfig
from empo2_jax.errors import ConfigError

Optimizer = optax.GradientTransformation

HOST_MEMORY = "pinned_host"


def policy_rate(config: UpdateConfig) -> optax.Schedule:
    """Learning rate of the update after so many others: constant after a linear warm-up (paper: 1e-6).

    Update k of a warm-up over W has k/W of the rate, so that the first one moves too.
    """
    if config.warmup_updates > 1:
        rate, count = config.learning_rate, config.warmup_updates
        return optax.linear_schedule(rate / count, rate, count - 1)
    return optax.constant_schedule(config.learning_rate)


def policy_optimizer(config: UpdateConfig) -> Optimizer:
    """AdamW at `policy_rate` with a clipped gradient (paper: weight decay 0.01, norm 1.0)."""
    rate = policy_rate(config) if config.warmup_updates > 1 else config.learning_rate  # a constant keeps no count
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(rate, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay),
    )


def warmstart_optimizer(config: WarmstartConfig) -> Optimizer:
    """AdamW for supervised training: linear warm-up over a tenth of the updates, cosine to a tenth of the peak."""
    warmup = max(1, config.updates // 10)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, warmup, max(config.updates, warmup + 1), 0.1 * config.learning_rate
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))


def critic_optimizer(learning_rate: float) -> Optimizer:
    """Adam at a constant rate (Retrospex)."""
    return optax.adam(learning_rate)


def init_moments(optimizer: Optimizer, params: Any, *, offload: bool = False) -> tuple[Any, Sharding]:
    """Optimizer state placed as `place_moments` says, and the sharding of its scalars.

    A plain `jit(init)` would leave the moments unsharded without a word.

    Args:
        optimizer: Of the parameters.
        params: Placed parameters.
        offload: Keep the moments, sharded alike, in the memory of the device's host.

    Raises:
        ConfigError: `offload` on a platform without pinned host memory.
    """
    placed, scalar = place_moments(optimizer, params, offload=offload)
    return jax.jit(optimizer.init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, placed))(params), scalar


def place_moments(optimizer: Optimizer, params: Any, *, offload: bool = False) -> tuple[Any, Sharding]:
    """Abstract optimizer state whose moments lie where their parameters (abstract or not) do; sharding of scalars."""
    first = jax.tree.leaves(params)[0].sharding
    scalar = NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else first
    kind = _host_memory(first) if offload else first.memory_kind

    def place(leaf: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    placed = optax.tree.map_params(
        optimizer,
        lambda leaf, param: place(leaf, param.sharding.with_memory_kind(kind)),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda leaf: place(leaf, scalar),
    )
    return placed, scalar


def _host_memory(place: Sharding) -> str:
    kinds = {memory.kind for device in place.addressable_devices for memory in device.addressable_memories()}
    if HOST_MEMORY not in kinds:
        raise ConfigError(
            f"update.offload_moments = true: the devices have no memory of kind {HOST_MEMORY}, only "
            f"{', '.join(sorted(kinds))}; false is allowed"
        )
    return HOST_MEMORY


def descend(optimizer: Optimizer, params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any, Float32[Array, ""]]:
    """One step: new parameters, new optimizer state, global norm of the gradient before clipping."""
    changes, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, changes), opt_state, optax.tree.norm(grads)
