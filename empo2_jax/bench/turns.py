"""Suite `turns`: an episode of many turns, the engine keeping its cache, against `generate` on each whole prompt."""

import numpy as np

from empo2_jax.bench.base import Case, Side
from empo2_jax.bench.shapes import make_model, prompts
from empo2_jax.rollout.base import Request, Sampling
from empo2_jax.rollout.jax_engine import JaxEngine


def cases(quick: bool) -> list[Case]:
    """30 turns that add 112 tokens to 1,000; in a quick run 4 turns."""
    turns = 4 if quick else 30
    return [
        Case(
            name=f"turns/{turns} turns",
            ours="empo2_jax.bench.turns:ours",
            peer="empo2_jax.bench.torch_peer:turns",
            arguments={"shape": "small", "turns": turns, "prompt": 1000, "growth": 112, "response": 32},
            tolerances={"ids": 0.0},
            unit="turn",
        )
    ]


def ours(shape: str, turns: int, prompt: int, growth: int, response: int) -> Side:
    """One session, forgotten before every run."""
    engine = JaxEngine(make_model(shape), slots=1, max_length=prompt + turns * growth)
    first, observations = prompts(shape, 1, prompt, turns, growth - response)
    sampling = Sampling(max_tokens=response, temperature=0.0, stop_ids=())
    key = np.zeros(2, np.uint32)

    def episode() -> np.ndarray:
        engine.release("episode")
        history, sampled = first[0], []
        for observation in observations:
            sampled.append(engine.generate([Request("episode", history, key, sampling)])[0].ids)
            history = np.concatenate([history, sampled[-1], observation])
        return np.concatenate(sampled)[None]

    ids = episode()  # also compiles every width that the episode reaches
    return Side(episode, answer=lambda: {"ids": ids}, work=turns)
