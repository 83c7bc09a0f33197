"""The critic of Retrospex: two Q networks and a value network over text embeddings, trained by implicit Q-learning.

Small on purpose (two hidden layers over frozen embeddings, where the original trains recurrent encoders): it sees a few
thousand transitions and rates a handful of actions per step. The policy is not touched. Losses are in `ops/iql.py`.
"""

import io
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from empo2_jax.config_offline import RetrospexConfig
from empo2_jax.errors import DataError
from empo2_jax.learner.optim import Optimizer, critic_optimizer, descend
from empo2_jax.metrics import write_atomically
from empo2_jax.ops.iql import expectile_loss, td_target
from empo2_jax.randomness import generator, words
from empo2_jax.types import Transitions

CRITIC_FILE = "critic.npz"  # in a run directory

Rows = Float[Array | np.ndarray, "N D"]
Network = list[tuple[Float32[Array, "..."], Float32[Array, "..."]]]  # weights and biases by layer


class CriticState(NamedTuple):
    """All that an update changes; `q` and `target` hold two networks on their first axis."""

    q: Any
    target: Any
    v: Any
    opt_state: Any


class Critic:
    """Rates actions: the lesser of two trained Q values."""

    def __init__(self, q: Any):
        self._q = q

    def values(
        self, states: Float32[np.ndarray, "N D"], actions: Float32[np.ndarray, "N D"]
    ) -> Float32[np.ndarray, " N"]:
        """Q of pairs of embeddings, in units of the reward that it was trained on."""
        count = len(states)
        if not count:
            return np.zeros(0, np.float32)
        room = max(8, 1 << (count - 1).bit_length())  # few shapes compile
        padded = (np.pad(part, ((0, room - count), (0, 0))) for part in (states, actions))
        return np.asarray(_least(self._q, *padded))[:count]

    def save(self, path: Path) -> None:
        """Write it as one file, which is there in full or not at all."""
        content = io.BytesIO()
        layers = {
            f"{kind}{place}": part for place, pair in enumerate(self._q) for kind, part in zip("wb", pair, strict=True)
        }
        np.savez(content, **layers)
        write_atomically(path, content.getvalue())

    @classmethod
    def load(cls, path: Path) -> "Critic":
        """The critic in a file; raises `DataError` if it is not there or none."""
        try:
            with path.open("rb") as file, np.lib.npyio.NpzFile(file) as layers:
                q = [(jnp.asarray(layers[f"w{n}"]), jnp.asarray(layers[f"b{n}"])) for n in range(len(layers) // 2)]
            if not q:
                raise ValueError("no layers")
        except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
            raise DataError(f"{path}: not a critic: {error}") from None
        return cls(q)


def train_critic(data: Transitions, config: RetrospexConfig, *, seed: int) -> tuple[Critic, list[float]]:
    """A critic of `data` and the loss of every update; the same arguments give the same critic."""
    size = data.states.shape[1]
    first, second, third = (jax.random.key(int(words(seed, "critic", part)[0])) for part in ("q1", "q2", "v"))
    twins = [init_network(key, (2 * size, config.hidden_size, config.hidden_size, 1)) for key in (first, second)]
    q = jax.tree.map(lambda *leaves: jnp.stack(leaves), *twins)
    v = init_network(third, (size, config.hidden_size, config.hidden_size, 1))
    optimizer = critic_optimizer(config.learning_rate)
    state = CriticState(q, jax.tree.map(jnp.copy, q), v, jax.jit(optimizer.init)((q, v)))
    chosen = generator(seed, "critic-batches").integers(len(data.rewards), size=(config.updates, config.batch))
    state, losses = jax.jit(partial(_all_updates, optimizer, config))(state, data, jnp.asarray(chosen, jnp.int32))
    return Critic(state.q), np.asarray(losses).tolist()


def init_network(key: Array, sizes: tuple[int, ...]) -> Network:
    """Layers of these sizes, scaled for the rectifier; biases 0."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(key, (size, units)) * (2 / size) ** 0.5, jnp.zeros(units))
        for key, size, units in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def apply_network(network: Network, inputs: Rows) -> Float[Array, " N"]:
    """The network's number for each input."""
    hidden = jnp.asarray(inputs)
    for weights, biases in network[:-1]:
        hidden = jax.nn.relu(hidden @ weights + biases[None])
    weights, biases = network[-1]
    return (hidden @ weights + biases[None])[:, 0]


def _both(q: Any, states: Rows, actions: Rows) -> Float[Array, "2 N"]:
    return jax.vmap(apply_network, in_axes=(0, None))(q, jnp.concatenate([states, actions], axis=1))


@jax.jit
def _least(q: Any, states: Rows, actions: Rows) -> Float[Array, " N"]:
    return _both(q, states, actions).min(axis=0)


def _all_updates(
    optimizer: Optimizer, config: RetrospexConfig, state: CriticState, data: Transitions, chosen: Int32[Array, "U B"]
) -> tuple[CriticState, Float32[Array, " U"]]:
    def one(state: CriticState, rows: Int32[Array, " B"]) -> tuple[CriticState, Float32[Array, ""]]:
        return _update(optimizer, config, state, jax.tree.map(lambda field: jnp.asarray(field)[rows], data))

    return jax.lax.scan(one, state, chosen)


def _update(
    optimizer: Optimizer, config: RetrospexConfig, state: CriticState, batch: Transitions
) -> tuple[CriticState, Float32[Array, ""]]:
    def loss(trained: tuple[Any, Any]) -> Float32[Array, ""]:
        q, v = trained
        rewards, ended = jnp.asarray(batch.rewards), jnp.asarray(batch.ended)
        aim = td_target(rewards, ended, apply_network(v, batch.next_states), config.discount)
        q_error = _both(q, batch.states, batch.actions) - jax.lax.stop_gradient(aim)[None]
        above = _least(state.target, batch.states, batch.actions) - apply_network(v, batch.states)
        return jnp.square(q_error).mean() + expectile_loss(above, config.expectile).mean()

    value, grads = jax.value_and_grad(loss)((state.q, state.v))
    (q, v), opt_state, _ = descend(optimizer, (state.q, state.v), state.opt_state, grads)
    rate = config.target_rate
    target = jax.tree.map(lambda old, new: (1 - rate) * old + rate * new, state.target, q)
    return CriticState(q, target, v, opt_state), value
