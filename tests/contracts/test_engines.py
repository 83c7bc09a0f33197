"""What every engine promises, whatever serves the tokens."""

import numpy as np
import pytest
from flax import nnx

from empo2_jax.errors import EngineError
from empo2_jax.models.qwen2 import Qwen2, Qwen2Config
from empo2_jax.randomness import words
from empo2_jax.rollout.base import Request, Sampling
from empo2_jax.rollout.jax_engine import JaxEngine
from empo2_jax.rollout.replay import ReplayEngine
from empo2_jax.rollout.sglang import SglangEngine
from tests.fixtures.sglang_fake import FakeServer, fake_engine

VOCAB, MAX_LENGTH, STOP = 23, 48, 5


def jax_engine():
    config = Qwen2Config(VOCAB, 16, 2, 2, 1, 8, 32, initializer_range=0.3)
    model = Qwen2(config, rngs=nnx.Rngs(0))
    return JaxEngine(model, slots=3, max_length=MAX_LENGTH, policy_version=4), nnx.split(model)[1]


def replay_engine():
    script = lambda request: [(int(request.prompt_ids.sum()) + 3 * index) % VOCAB for index in range(99)]  # noqa: E731
    return ReplayEngine(script, max_length=MAX_LENGTH, policy_version=4), None


@pytest.fixture(params=[jax_engine, replay_engine, "servers"], ids=["jax", "replay", "servers"])
def served(request, tmp_path):
    if request.param != "servers":
        yield request.param()
        return
    servers = [FakeServer(), FakeServer()]
    engine = fake_engine(servers, tmp_path)
    engine.load(3, 4)
    yield engine, 3
    engine.close()
    for server in servers:
        server.close()


def ask(session, prompt, temperature=1.0, max_tokens=12, stop_ids=(STOP,)):
    ids = np.asarray(prompt, np.int32)
    return Request(session, ids, words(0, "contract", session), Sampling(max_tokens, temperature, stop_ids))


def batch(**changes):
    return [ask(f"s{index}", range(1, 6 + index), **changes) for index in range(5)]  # more than slots


def test_completions_are_well_formed_and_in_order(served):
    engine, _ = served
    for request, completion in zip(batch(), engine.generate(batch()), strict=True):
        assert completion.ids.dtype == np.int32 and completion.logprobs.dtype == np.float32
        assert len(completion.ids) == len(completion.logprobs) >= 1
        assert (completion.logprobs <= 0).all() and (completion.ids >= 0).all() and (completion.ids < VOCAB).all()
        assert completion.stopped == (completion.ids[-1] == STOP)
        assert STOP not in completion.ids[:-1]
        assert completion.stopped or len(completion.ids) == 12
        assert 0 <= completion.cached_tokens < len(request.prompt_ids)
        assert completion.policy_version == 4


def test_greedy_is_repeatable_and_independent_of_the_batch(served):
    engine, _ = served
    together = engine.generate(batch(temperature=0.0))
    for request, first in zip(batch(temperature=0.0), together, strict=True):
        np.testing.assert_array_equal(engine.generate([request])[0].ids, first.ids)


def test_the_prefix_of_a_session_is_cached_until_release_and_load(served):
    engine, params = served
    engine.generate([ask("a", range(10))])
    assert engine.generate([ask("a", [*range(8), 1, 1, 1])])[0].cached_tokens == 8
    engine.release("a")
    engine.release("unknown")
    if not isinstance(engine, SglangEngine):  # a server keeps prefixes for whoever comes next
        assert engine.generate([ask("a", range(10))])[0].cached_tokens == 0
    engine.load(params, 5)
    completion = engine.generate([ask("a", range(10))])[0]
    assert (engine.policy_version, completion.policy_version, completion.cached_tokens) == (5, 5, 0)


def test_memory_that_was_given_back_returns_with_the_next_load(served):
    engine, params = served
    before = engine.generate(batch(temperature=0.0))
    for request in batch():
        engine.release(request.session)
    engine.release_memory()
    engine.load(params, 5)
    for first, again in zip(before, engine.generate(batch(temperature=0.0)), strict=True):
        np.testing.assert_array_equal(again.ids, first.ids)
        np.testing.assert_array_equal(again.logprobs, first.logprobs)
        assert again.policy_version == 5


def test_generation_ends_at_the_context(served):
    engine, _ = served
    completion = engine.generate([ask("a", [1] * (MAX_LENGTH - 3), max_tokens=50, stop_ids=())])[0]
    assert len(completion.ids) == 3 and not completion.stopped


def test_what_cannot_be_served_is_refused(served):
    engine, _ = served
    with pytest.raises(EngineError, match="prompt of 48 tokens; 1 to 47 are allowed"):
        engine.generate([ask("a", [1] * MAX_LENGTH)])
    with pytest.raises(EngineError, match="prompt of 0 tokens"):
        engine.generate([ask("a", [])])
    with pytest.raises(EngineError, match="occurs twice"):
        engine.generate([ask("a", [1]), ask("a", [2])])
    assert engine.generate([]) == []
