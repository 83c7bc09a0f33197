"""One optimizer step over any number of micro-batches, and the log-probs that the ledgers need.

The objective is injected; it sees log-probs and the batch and has no branch on the mode. Token weights carry the
batch-global denominator, so the gradients of micro-batches, and of the shards of a batch, simply add up.

What is trained is apart from what is frozen: all parameters and none, or adapters and their base (`models/lora.py`).
Gradients and moments exist of the first only. All lie on the mesh as `models/sharding.py` says, the rows of a batch
over `data` and `fsdp`. Which device computes what is the compiler's choice, except at the vocabulary
(`models/vocabulary.py`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from empo2_jax.errors import ConfigError
from empo2_jax.learner.optim import Optimizer, descend, init_moments, place_moments
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.sharding import batch_shards, make_mesh, spec, visible_devices
from empo2_jax.models.vocabulary import Objective, action_logprobs, action_loss
from empo2_jax.types import TrainBatch


class LearnerState(NamedTuple):
    """All that an update changes: trained f32 master parameters, their optimizer moments, count of updates."""

    params: Any
    opt_state: Any
    updates: Int32[Array, ""]


class Learner:
    """Owns the compiled functions; the state is passed in and out (and donated).

    `row_multiple` is the number of shards of a batch: rows come in a multiple of it.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        optimizer: Optimizer,
        objective: Objective,
        *,
        frozen: Any = None,
        temperature: float,
        remat: str,
        mesh: Mesh | None = None,
        offload_moments: bool = False,
    ):
        """Compile nothing yet.

        Args:
            graphdef: Structure of the model.
            optimizer: Of the trained parameters.
            objective: The loss.
            frozen: Parameters beside the trained ones that the model needs, placed; never changed or donated.
            temperature: Divides the logits.
            remat: Name in `models.qwen2.REMAT_POLICIES`.
            mesh: Where the parameters lie; None is the first device alone.
            offload_moments: Keep the moments in host memory between updates.
        """
        self._graphdef, self._optimizer, self._objective = graphdef, optimizer, objective
        self._frozen = nnx.State({}) if frozen is None else frozen
        self._temperature, self._remat, self._offload = temperature, remat, offload_moments
        self._mesh = make_mesh(visible_devices(), 1, 1, 1) if mesh is None else mesh
        self.row_multiple = batch_shards(self._mesh)
        everywhere = NamedSharding(self._mesh, PartitionSpec())  # what goes to the host, whatever process that is of
        self._logprobs = jax.jit(self._forward, out_shardings=everywhere)
        self._sum = jax.jit(partial(jax.tree.map, jnp.add), out_shardings=everywhere, donate_argnums=0)

    def init(self, params: Any) -> LearnerState:
        """State at the start; moments take the sharding of their parameter, and updates keep every sharding.

        Raises:
            ConfigError: moments are to be offloaded and the platform has no memory for that.
        """
        opt_state, scalar = init_moments(self._optimizer, params, offload=self._offload)
        # From the host: JAX misplaces an array of a device over processes that have one device each.
        state = LearnerState(params, opt_state, jax.device_put(np.zeros((), np.int32), scalar))
        self._compile(state)
        return state

    def logprobs(self, params: Any, batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
        """(log-probs, entropies) f32[B, T] of the action tokens at the training temperature, nats; 0 elsewhere."""
        with jax.set_mesh(self._mesh):
            logprobs, entropy = self._logprobs(params, self._frozen, self._place(batch))
        return np.asarray(logprobs), np.asarray(entropy)

    def update(self, state: LearnerState, batches: Sequence[TrainBatch]) -> tuple[LearnerState, dict[str, np.ndarray]]:
        """One optimizer step on the summed loss of `batches`; returns sums of metrics with `grad_norm` and `loss`.

        Where the loss or the gradient norm is not finite the state comes back as it was and `skipped` is True.
        """
        with jax.set_mesh(self._mesh):
            grads, sums = self._zeros(state.params), None
            for batch in batches:
                grads, item = self._accumulate(grads, state.params, self._frozen, self._place(batch))
                sums = item if sums is None else self._sum(sums, item)
            assert sums is not None, "an update needs a batch"
            state, outcome = self._apply(state, grads, sums["loss"])
        return state, {name: np.asarray(value) for name, value in {**sums, **outcome}.items()}

    def lower(self, params: Any, batch: TrainBatch) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
        """The two programs of an update, for abstract arrays that carry their shardings; nothing is placed or run.

        Args:
            params: Trained parameters.
            batch: One micro-batch.

        Returns:
            The one that adds the gradient of `batch`, and the one that applies the sum.
        """
        opt_state, scalar = place_moments(self._optimizer, params)
        state = LearnerState._make((params, opt_state, jax.ShapeDtypeStruct((), jnp.int32, sharding=scalar)))
        loss = jax.ShapeDtypeStruct((), jnp.float32, sharding=scalar)
        self._compile(state)
        with jax.set_mesh(self._mesh):
            added = self._accumulate.lower(params, params, self._frozen, batch)
            return added, self._apply.lower(state, params, loss)

    def _compile(self, state: LearnerState) -> None:
        # Left alone, the compiler shards what was replicated, and the next update compiles again.
        placement = jax.tree.map(lambda leaf: leaf.sharding, state)
        self._zeros = jax.jit(partial(jax.tree.map, jnp.zeros_like), out_shardings=placement.params)
        self._accumulate = jax.jit(
            self._add_gradient,
            out_shardings=(placement.params, placement.updates),
            donate_argnums=0,
        )
        self._apply = jax.jit(self._descend, out_shardings=(placement, placement.updates), donate_argnums=0)

    def _hidden(self, params: Any, frozen: Any, batch: TrainBatch) -> tuple[Float[Array, "B T D"], Float[Array, "V D"]]:
        model: Qwen2 = nnx.merge(self._graphdef, params, frozen)
        token_ids, positions, segment_ids = map(jnp.asarray, (batch.token_ids, batch.positions, batch.segment_ids))
        return model(token_ids, positions, segment_ids, batch.branches, remat=self._remat), model.head

    def _forward(self, params: Any, frozen: Any, batch: TrainBatch) -> tuple[Array, Array]:
        hidden, head = self._hidden(params, frozen, batch)
        token_ids, mask = jnp.asarray(batch.token_ids), jnp.asarray(batch.loss_mask)
        return action_logprobs(hidden, head, token_ids, mask, temperature=self._temperature)

    def _add_gradient(self, total: Any, params: Any, frozen: Any, batch: TrainBatch) -> tuple[Any, dict[str, Array]]:
        """Add the gradient of a batch in the place of `total`, so that no second whole gradient exists."""
        (hidden, head), pull = jax.vjp(lambda trained: self._hidden(trained, frozen, batch), params)
        loss, sums, *slopes = action_loss(hidden, head, batch, self._objective, temperature=self._temperature)
        (grads,) = pull(tuple(slopes))
        return jax.tree.map(jnp.add, total, grads), {**sums, "loss": loss}

    def _descend(self, state: LearnerState, grads: Any, loss: Array) -> tuple[LearnerState, dict[str, Array]]:
        if self._offload:
            state = state._replace(opt_state=jax.device_put(state.opt_state, jax.memory.Space.Device))
        params, opt_state, norm = descend(self._optimizer, state.params, state.opt_state, grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        new = jax.tree.map(partial(jnp.where, finite), LearnerState(params, opt_state, state.updates + 1), state)
        return new, {"grad_norm": norm, "skipped": ~finite}

    def _place(self, batch: TrainBatch) -> TrainBatch:
        rows, shards = len(batch.loss_mask), self.row_multiple
        if rows % shards:
            raise ConfigError(f"a batch of {rows} rows does not divide over data × fsdp = {shards} devices of the mesh")
        place = NamedSharding(self._mesh, spec("batch", "length"))  # a process puts its own devices' rows there
        return jax.tree.map(lambda rows: jax.make_array_from_callback(rows.shape, place, rows.__getitem__), batch)


def supervised_loss(
    logprobs: Float32[Array, "B T"], entropy: Float32[Array, "B T"], batch: TrainBatch
) -> tuple[Float32[Array, ""], dict[str, Array]]:
    """Weighted negative log-likelihood of the answers (the warm start)."""
    loss = -jnp.sum(batch.token_weight * logprobs)
    return loss, {}
