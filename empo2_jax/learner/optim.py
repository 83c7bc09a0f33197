"""The optimizer: AdamW with a clipped global gradient norm, built by Optax from the configuration."""

import optax

from empo2_jax.config import UpdateConfig, WarmstartConfig


def policy_optimizer(config: UpdateConfig) -> optax.GradientTransformation:
    """AdamW at a constant rate after a linear warm-up (paper: 1e-6, weight decay 0.01, norm 1.0)."""
    rate = (
        optax.linear_schedule(0.0, config.learning_rate, config.warmup_updates)
        if config.warmup_updates
        else config.learning_rate
    )
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(rate, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay),
    )


def warmstart_optimizer(config: WarmstartConfig) -> optax.GradientTransformation:
    """AdamW for supervised training: linear warm-up over a tenth of the updates, cosine to a tenth of the peak."""
    warmup = max(1, config.updates // 10)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, warmup, max(config.updates, warmup + 1), 0.1 * config.learning_rate
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
