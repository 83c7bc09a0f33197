"""One optimizer step over any number of micro-batches, and the log-probs that the ledgers need.

The objective is injected; it sees log-probs and the batch and has no branch on the mode. Token weights carry the
batch-global denominator, so the gradients of micro-batches simply add up.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int32

from empo2_jax.learner.optim import Optimizer, descend, init_moments
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.ops.logprobs import token_logprobs
from empo2_jax.types import TrainBatch

Objective = Callable[
    [Float32[Array, "B T"], Float32[Array, "B T"], TrainBatch], tuple[Float32[Array, ""], dict[str, Array]]
]


class LearnerState(NamedTuple):
    """All that an update changes: f32 master parameters, optimizer moments, count of updates."""

    params: Any
    opt_state: Any
    updates: Int32[Array, ""]


class Learner:
    """Owns the compiled functions; the state is passed in and out (and donated)."""

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        optimizer: Optimizer,
        objective: Objective,
        *,
        temperature: float,
        remat: bool,
    ):
        self._graphdef, self._optimizer, self._objective = graphdef, optimizer, objective
        self._temperature, self._remat = temperature, remat
        self._grad = jax.jit(jax.value_and_grad(self._loss, has_aux=True), static_argnames="capacity")
        self._logprobs = jax.jit(self._forward, static_argnames="capacity")
        self._add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)

    def init(self, params: Any) -> LearnerState:
        """State at the start; moments take the sharding of their parameter, and updates keep every sharding."""
        opt_state, scalar = init_moments(self._optimizer, params)
        state = LearnerState(params, opt_state, jax.device_put(jnp.zeros((), jnp.int32), scalar))
        # Left alone, the compiler shards what was replicated, and the next update compiles again.
        placement = jax.tree.map(lambda leaf: leaf.sharding, state)
        self._apply = jax.jit(self._descend, out_shardings=(placement, None), donate_argnums=0)
        return state

    def logprobs(self, params: Any, batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
        """(log-probs, entropies) f32[B, T] of the action tokens at the training temperature, nats; 0 elsewhere."""
        logprobs, entropy = self._logprobs(params, batch, capacity=_capacity(batch))
        return np.asarray(logprobs), np.asarray(entropy)

    def update(self, state: LearnerState, batches: Sequence[TrainBatch]) -> tuple[LearnerState, dict[str, np.ndarray]]:
        """One optimizer step on the summed loss of `batches`; returns sums of metrics with `grad_norm` and `loss`.

        Where the loss or the gradient norm is not finite the state comes back as it was and `skipped` is True.
        """
        total: Any = None
        for batch in batches:
            (loss, sums), grads = self._grad(state.params, batch, capacity=_capacity(batch))
            item = (grads, {**sums, "loss": loss})
            total = item if total is None else self._add(total, item)
        grads, sums = total
        state, outcome = self._apply(state, grads, sums["loss"])
        return state, {name: np.asarray(value) for name, value in {**sums, **outcome}.items()}

    def _forward(self, params: Any, batch: TrainBatch, capacity: int) -> tuple[Array, Array]:
        model: Qwen2 = nnx.merge(self._graphdef, params)
        token_ids, positions, segment_ids = map(jnp.asarray, (batch.token_ids, batch.positions, batch.segment_ids))
        hidden = model(token_ids, positions, segment_ids, remat=self._remat)
        flat = hidden.reshape(-1, hidden.shape[-1])
        # Only action tokens go to the head; the fill value 0 is never one, since nothing predicts a first token.
        (index,) = jnp.nonzero(batch.loss_mask.reshape(-1), size=capacity, fill_value=0)
        targets = batch.token_ids.reshape(-1)[index]
        logprobs, entropy = token_logprobs(flat[index - 1], model.head, targets, self._temperature)
        keep = index > 0

        def spread(values: Array) -> Array:
            empty = jnp.zeros(batch.token_ids.size, jnp.float32)
            return empty.at[index].add(jnp.where(keep, values, 0.0)).reshape(batch.token_ids.shape)

        return spread(logprobs), spread(entropy)

    def _loss(self, params: Any, batch: TrainBatch, capacity: int) -> tuple[Array, dict[str, Array]]:
        return self._objective(*self._forward(params, batch, capacity), batch)

    def _descend(self, state: LearnerState, grads: Any, loss: Array) -> tuple[LearnerState, dict[str, Array]]:
        params, opt_state, norm = descend(self._optimizer, state.params, state.opt_state, grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        new = jax.tree.map(partial(jnp.where, finite), LearnerState(params, opt_state, state.updates + 1), state)
        return new, {"grad_norm": norm, "skipped": ~finite}


def supervised_loss(
    logprobs: Float32[Array, "B T"], entropy: Float32[Array, "B T"], batch: TrainBatch
) -> tuple[Float32[Array, ""], dict[str, Array]]:
    """Weighted negative log-likelihood of the answers (the warm start)."""
    loss = -jnp.sum(batch.token_weight * logprobs)
    return loss, {}


def _capacity(batch: TrainBatch) -> int:
    """Room for the action tokens of a batch: a sixteenth, a quarter or all of it, so that few shapes compile."""
    count, size = int(np.asarray(batch.loss_mask).sum()), batch.loss_mask.size
    return next(room for room in (size // 16, size // 4, size) if room >= count)
