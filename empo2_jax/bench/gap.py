"""Suite `gap`: how far the engine's log-probs of what it sampled are from the trainer's, in f32 and bf16."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import DTypeLike

from empo2_jax.bench.base import Case, Side
from empo2_jax.bench.shapes import make_model, prompts, train_batch
from empo2_jax.bench.train import make_learner
from empo2_jax.rollout.base import Request, Sampling
from empo2_jax.rollout.jax_engine import JaxEngine


def cases(quick: bool) -> list[Case]:
    """Largest gaps in nats, over 8 completions of 32 tokens at temperature 1; not timed."""
    sizes = {"shape": "small", "rows": 8, "prompt": 96, "count": 32}
    return [Case("gap/engine and trainer", "empo2_jax.bench.gap:ours", arguments=sizes, timed=False)]


def ours(shape: str, rows: int, prompt: int, count: int) -> Side:
    """A side with only the figures `gap_f32` and `gap_bf16`."""
    kinds = {"gap_f32": jnp.float32, "gap_bf16": jnp.bfloat16}
    return Side(
        lambda: None,
        figures=lambda: {name: _gap(shape, rows, prompt, count, dtype) for name, dtype in kinds.items()},
    )


def _gap(shape: str, rows: int, prompt: int, count: int, dtype: DTypeLike) -> float:
    model = make_model(shape, dtype)
    engine = JaxEngine(model, slots=rows, max_length=prompt + count)
    sampling = Sampling(max_tokens=count, temperature=1.0, stop_ids=())
    given = prompts(shape, rows, prompt).first
    requests = [Request(str(row), ids, np.array([0, row], np.uint32), sampling) for row, ids in enumerate(given)]
    done = engine.generate(requests)
    batch = train_batch(shape, rows, prompt + count)
    ids = np.concatenate([given, np.stack([completion.ids for completion in done])], axis=1)
    mask = np.zeros(ids.shape, bool)
    mask[:, prompt:] = True
    graphdef, params = nnx.split(model)
    logprobs, _ = make_learner(graphdef).logprobs(params, batch._replace(token_ids=ids, loss_mask=mask))
    return float(np.abs(logprobs[:, prompt:] - np.stack([completion.logprobs for completion in done])).max())
