"""SmolLM2-135M-Instruct itself: what holds for small random models holds for 30 layers of real weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int32
from transformers import AutoTokenizer

from empo2_jax.assembly import load_policy
from empo2_jax.config import ModelConfig
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.randomness import words
from empo2_jax.rollout.base import Request, Sampling
from empo2_jax.rollout.chat import Chat
from empo2_jax.rollout.jax_engine import JaxEngine

LENGTH = 384
TURNS = (
    "You are in a kitchen. You see a stove, a sink and a door to the hallway. Your task is to boil water. What now?",
    "You move to the sink. The tap is off. In the sink is a metal pot.",
    "The pot is now filled with water. The stove is turned off.",
)


@jax.jit
def _logits(model: Qwen2, ids: Int32[Array, " T"]) -> Float[Array, "T V"]:
    positions = jnp.arange(ids.shape[0], dtype=jnp.int32)[None]
    return model(ids[None], positions, jnp.ones_like(positions))[0] @ model.head.T


@pytest.mark.slow
def test_auto_tokenizer_gives_our_ids() -> None:
    ours = load_policy(ModelConfig(path="smollm2-135m-instruct")).tokenizer
    theirs = AutoTokenizer.from_pretrained(str(ours))
    for text in (*TURNS, "look around", "you scored 75 of 100 ²½", "don't\n\n  x"):
        assert theirs(text)["input_ids"] == ours.encode(text)


@pytest.mark.slow
def test_engine_and_trainer_agree_to_the_resolution_of_f32() -> None:
    """Mean within 1e-5 nats; at most 16 units in the last place of the largest logit, which is near 40."""
    policy = load_policy(ModelConfig(path="smollm2-135m-instruct"))
    chat = Chat(policy.tokenizer)
    engine = JaxEngine(policy.model, slots=1, max_length=LENGTH)
    prompt, gaps, largest = chat.opening(TURNS[0]), [], 0.0
    for turn in range(len(TURNS)):
        sampling = Sampling(max_tokens=48, temperature=1.0, stop_ids=chat.stop_ids)
        (done,) = engine.generate([Request("a", prompt, words(0, "turn", turn), sampling)])
        ids = np.concatenate([prompt, done.ids])
        logits = _logits(policy.model, jnp.asarray(np.pad(ids, (0, LENGTH - len(ids)))))[len(prompt) - 1 : len(ids) - 1]
        expected = jax.nn.log_softmax(logits)[np.arange(len(done.ids)), done.ids]
        gaps.append(np.abs(np.asarray(expected) - done.logprobs))
        largest = max(largest, float(jnp.abs(logits).max()))
        prompt = np.concatenate([ids, chat.following(done.ids, TURNS[(turn + 1) % len(TURNS)])])
    gap = np.concatenate(gaps)
    assert len(gap) > 60
    assert gap.mean() < 1e-5
    assert gap.max() < 16 * largest * np.finfo(np.float32).eps
