"""Suite `decode`: greedy tokens per second of the engine against `generate` of transformers, prefill included."""

import numpy as np

from empo2_jax.bench.base import Case, Side
from empo2_jax.bench.shapes import SHAPES, make_model, prompts
from empo2_jax.rollout.base import Request, Sampling
from empo2_jax.rollout.jax_engine import JaxEngine

_PROMPT = 64


def cases(quick: bool) -> list[Case]:
    """Batches of 1, 8 and 32."""
    return [_case("small", batch, 32 if quick else 64) for batch in (1, 8, 32)]


def _case(shape: str, batch: int, count: int) -> Case:
    parameters = SHAPES[shape].num_parameters
    return Case(
        name=f"decode/batch {batch}",
        ours="empo2_jax.bench.decode:ours",
        peer="empo2_jax.bench.torch_peer:decode",
        arguments={"shape": shape, "batch": batch, "prompt": _PROMPT, "count": count},
        tolerances={"ids": 0.0},
        unit="token",
        flops=2.0 * parameters,
        bytes=4.0 * parameters / batch,
    )


def ours(shape: str, batch: int, prompt: int, count: int) -> Side:
    """The engine with a slot for each prompt, its caches dropped before every run."""
    engine = JaxEngine(make_model(shape), slots=batch, max_length=prompt + count)
    sampling = Sampling(max_tokens=count, temperature=0.0, stop_ids=())
    key = np.zeros(2, np.uint32)
    requests = [
        Request(str(number), ids, key, sampling) for number, ids in enumerate(prompts(shape, batch, prompt).first)
    ]

    def generate() -> np.ndarray:
        for request in requests:
            engine.release(request.session)
        return np.stack([completion.ids for completion in engine.generate(requests)])

    ids = generate()
    return Side(generate, answer=lambda: {"ids": ids}, work=batch * count)
