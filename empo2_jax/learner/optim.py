"""The optimizer: AdamW with a clipped global gradient norm, built by Optax from the configuration."""

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float32

from empo2_jax.config import UpdateConfig, WarmstartConfig

Optimizer = optax.GradientTransformation


def policy_rate(config: UpdateConfig) -> optax.Schedule:
    """Learning rate of the update after so many others: constant after a linear warm-up (paper: 1e-6)."""
    if config.warmup_updates:
        return optax.linear_schedule(0.0, config.learning_rate, config.warmup_updates)
    return optax.constant_schedule(config.learning_rate)


def policy_optimizer(config: UpdateConfig) -> Optimizer:
    """AdamW at `policy_rate` with a clipped gradient (paper: weight decay 0.01, norm 1.0)."""
    rate = policy_rate(config) if config.warmup_updates else config.learning_rate  # a constant keeps no count
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


def init_moments(optimizer: Optimizer, params: Any) -> tuple[Any, Sharding]:
    """Optimizer state whose moments lie where their parameters do, and the sharding of its scalars.

    A plain `jit(init)` would leave the moments unsharded without a word.
    """
    first = jax.tree.leaves(params)[0].sharding
    scalar = NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else first
    placed = optax.tree.map_params(
        optimizer,
        lambda _, param: param.sharding,
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda _: scalar,
    )
    return jax.jit(optimizer.init, out_shardings=placed)(params), scalar


def descend(optimizer: Optimizer, params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any, Float32[Array, ""]]:
    """One step: new parameters, new optimizer state, global norm of the gradient before clipping."""
    changes, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, changes), opt_state, optax.tree.norm(grads)
