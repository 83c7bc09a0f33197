"""Suite `train`: one whole optimizer step with rematerialization against torch + transformers with checkpointing.

Same weights, batch, loss and optimizer. Every token counts in the loss, so that the peer, which computes all logits, is
asked for nothing that we leave out.
"""

from functools import partial

import jax
import numpy as np
from flax import nnx

from empo2_jax.bench.base import Case, Side
from empo2_jax.bench.shapes import CLIPS, SHAPES, placed_model, train_batch
from empo2_jax.config import UpdateConfig
from empo2_jax.learner.optim import policy_optimizer
from empo2_jax.learner.step import Learner
from empo2_jax.ops.losses import policy_loss
from empo2_jax.planning import forward_flops

TOLERANCES = {"logprobs": 1e-4, "loss": 1e-5, "relative_grad_norm": 1e-4}


def cases(quick: bool) -> list[Case]:
    """The small model, and in full the vocabulary of 151,936."""
    small, wide = ("small", 4, 512), ("0.5B cut to 4 layers", 2, 512)
    return [_case(*one) for one in ([small] if quick else [small, wide])]


def _case(shape: str, rows: int, length: int) -> Case:
    tokens = rows * length
    return Case(
        name=f"train/{shape}",
        ours="empo2_jax.bench.train:ours",
        peer="empo2_jax.bench.torch_peer:train",
        arguments={"shape": shape, "rows": rows, "length": length},
        tolerances=TOLERANCES,
        unit="token",
        flops=3 * forward_flops(SHAPES[shape], tokens, length, tokens) / tokens,
    )


def make_learner(graphdef: nnx.GraphDef) -> Learner:
    """The learner of a run with the default settings."""
    objective = partial(policy_loss, **CLIPS)
    return Learner(graphdef, policy_optimizer(UpdateConfig()), objective, temperature=1.0, remat="full")


def ours(shape: str, rows: int, length: int) -> Side:
    """The learner's update; its first one warms up and gives the answers."""
    graphdef, params = placed_model(shape)
    learner, batch = make_learner(graphdef), train_batch(shape, rows, length)
    logprobs, _ = learner.logprobs(params, batch)
    state, first = learner.update(learner.init(params), [batch])

    def run() -> None:
        nonlocal state
        state, _ = learner.update(state, [batch])
        jax.block_until_ready(state)

    answers = {"logprobs": logprobs[batch.loss_mask], **scalars(float(first["loss"]), float(first["grad_norm"]))}
    return Side(run, answer=lambda: answers, work=rows * length)


def scalars(loss: float, grad_norm: float) -> dict[str, np.ndarray]:
    """Loss and the logarithm of the gradient's norm, whose differences are relative."""
    return {"loss": np.array(loss), "relative_grad_norm": np.array(np.log(grad_norm))}
