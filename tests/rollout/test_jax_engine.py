"""The engine in this process: log-probs, what it keeps of a session, sampling, limits, what it compiles and refuses."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from empo2_jax.errors import EngineError
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.randomness import words
from empo2_jax.rollout import jax_engine, jax_kernels
from empo2_jax.rollout.jax_engine import JaxEngine
from empo2_jax.rollout.jax_kernels import SlotSampling, draw_tokens
from tests.fixtures.small_engine import (
    SLOTS,
    VOCAB,
    ask,
    assert_logprobs,
    logits_of,
    programs,
    prompt,
    small_engine,
    small_model,
)


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture
def engine():
    """An engine with empty slots."""
    return small_engine()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 70, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_logprobs_equal_the_training_forward(model, engine, length, temperature):
    completion = engine.generate([ask("a", prompt(length), temperature=temperature)])[0]
    assert_logprobs(model, prompt(length), completion, temperature)


def test_a_session_of_several_turns_recomputes_only_what_is_new(model, engine):
    ids = prompt(40)
    for turn in range(3):
        completion = engine.generate([ask("a", ids, draw=turn)])[0]
        assert completion.cached_tokens == (0 if turn == 0 else len(ids) - 6)  # 5 new ids and the last sampled one
        assert_logprobs(model, ids, completion)
        ids = np.concatenate([ids, completion.ids, prompt(5, seed=turn)])


def test_roll_back_of_a_tip_block_and_a_tip_after_the_episode(model, engine):
    trunk, block = prompt(40), prompt(20, seed=1)
    engine.generate([ask("a", np.concatenate([trunk, block]))])
    bare = np.concatenate([trunk, prompt(3, seed=2)])
    completion = engine.generate([ask("a", bare)])[0]
    assert completion.cached_tokens == 40
    assert_logprobs(model, bare, completion)
    episode = np.concatenate([bare, completion.ids])
    tip_prompt = np.concatenate([episode, prompt(12, seed=3)])
    tip = engine.generate([ask("a", tip_prompt)])[0]
    assert tip.cached_tokens == len(episode) - 1
    assert_logprobs(model, tip_prompt, tip)


def test_shared_prompts_are_copied(model, engine):
    shared_ids = prompt(50)
    engine.generate([ask("a", shared_ids)])
    prompts = [np.concatenate([shared_ids, prompt(4 + 20 * index, seed=index)]) for index in range(3)]
    completions = engine.generate([ask(f"b{index}", ids, draw=index) for index, ids in enumerate(prompts)])
    assert [completion.cached_tokens for completion in completions] == [50, 50, 50]
    for ids, completion in zip(prompts, completions, strict=True):
        assert_logprobs(model, ids, completion)


def test_a_group_in_one_call_computes_its_prompt_once(model, engine):
    completions = engine.generate([ask(f"g{index}", prompt(50), draw=index) for index in range(SLOTS)])
    assert [completion.cached_tokens for completion in completions] == [0, 49, 49, 49]
    for completion in completions:
        assert_logprobs(model, prompt(50), completion)


def test_greedy_equals_a_naive_argmax_loop(model, engine):
    ids = prompt(10)
    completion = engine.generate([ask("a", ids, temperature=0.0)])[0]
    assert_logprobs(model, ids, completion)  # reported at temperature 1
    for token in completion.ids:
        assert token == logits_of(model, ids)[-1].argmax()
        ids = np.append(ids, token)


def test_a_request_does_not_depend_on_slot_or_batch(model, engine):
    requests = [ask(f"s{index}", prompt(66 + 10 * index, seed=index), 12, draw=index) for index in range(SLOTS)]
    together = engine.generate(requests)
    engine.load(nnx.split(model)[1], 0)
    reversed_slots = engine.generate(requests[::-1])[::-1]
    for request, first, second in zip(requests, together, reversed_slots, strict=True):
        engine.load(nnx.split(model)[1], 0)
        alone = engine.generate([request])[0]
        for other in (second, alone):
            np.testing.assert_array_equal(first.ids, other.ids)
            np.testing.assert_array_equal(first.logprobs, other.logprobs)


def test_the_key_decides_the_sample(engine):
    sample = lambda session, draw: engine.generate([ask(session, prompt(9), 20, draw=draw)])[0].ids.tolist()  # noqa: E731
    assert sample("a", 1) == sample("b", 1)
    assert sample("a", 1) != sample("a", 2)


def frequencies(engine, calls, **sampling):
    """Counts of the first token over `calls` × slots draws of one prompt."""
    counts = np.zeros(VOCAB)
    for call in range(calls):
        draws = [ask(f"s{index}", prompt(9), 1, draw=SLOTS * call + index, **sampling) for index in range(SLOTS)]
        for completion in engine.generate(draws):
            counts[completion.ids[0]] += 1
    return counts


def test_samples_follow_the_distribution(model, engine):
    counts = frequencies(engine, 250, temperature=1.5)
    expected = counts.sum() * np.asarray(jax.nn.softmax(logits_of(model, prompt(9))[-1] / 1.5))
    rare = expected < 5  # pooled, as the chi-square approximation asks
    observed, pooled = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    statistic, freedom = float(((observed - pooled) ** 2 / pooled).sum()), len(pooled) - 1
    assert freedom >= 5
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_samples_follow_the_distribution_over_several_blocks_of_tokens():
    vocab, rows = 300, 8192
    logits = np.random.default_rng(0).normal(size=vocab).astype(np.float32)
    keys = np.stack([words(row, "blocks") for row in range(rows)])
    ones, stops = np.ones(rows, np.float32), np.full((rows, 1), -1, np.int32)
    banned = np.full(rows, 280, np.int32)
    sampling = SlotSampling(keys, ones, ones, banned, stops, np.ones(rows, np.int32))
    ids, logprobs = map(np.asarray, draw_tokens(jnp.tile(logits, (rows, 1)), jnp.full(rows, 7, jnp.int32), sampling))
    np.testing.assert_allclose(logprobs, np.asarray(jax.nn.log_softmax(logits))[ids], atol=1e-5)
    expected = rows * np.asarray(jax.nn.softmax(logits[:280]))
    observed = np.bincount(ids, minlength=vocab)
    assert observed[280:].sum() == 0
    kept = expected >= 5
    statistic, freedom = float(((observed[:280] - expected)[kept] ** 2 / expected[kept]).sum()), int(kept.sum())
    assert freedom > 200
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_top_p_stays_inside_the_nucleus_and_reports_the_full_distribution(model, engine):
    likely = np.asarray(jax.nn.softmax(logits_of(model, prompt(9))[-1]))
    order = np.argsort(-likely)
    size = int(np.searchsorted(np.cumsum(likely[order]), 0.6) + 1)
    counts = frequencies(engine, 60, top_p=0.6)
    assert 1 < size < VOCAB
    assert counts[order[size:]].sum() == 0
    assert (counts[order[:size]] > 0).all()
    completion = engine.generate([ask("a", prompt(9), top_p=0.6)])[0]
    assert_logprobs(model, prompt(9), completion)
    tiny = engine.generate([ask("a", prompt(9), top_p=1e-6)])[0]
    np.testing.assert_array_equal(tiny.ids, engine.generate([ask("a", prompt(9), temperature=0.0)])[0].ids)


def test_banned_ids_are_never_sampled_but_keep_their_probability(model, engine):
    completion = engine.generate([ask("a", prompt(9), 60, temperature=3.0, banned_from=7)])[0]
    assert completion.ids.max() < 7
    assert_logprobs(model, prompt(9), completion, temperature=3.0)


def test_stop_ids_and_limits_differ_per_request(engine):
    free = engine.generate([ask("a", prompt(9), 12)])[0].ids
    stop = int(free[4])
    cut = free[: free.tolist().index(stop) + 1]
    requests = [ask("a", prompt(9), 12, stop_ids=(stop, 30)), ask("b", prompt(9), 3), ask("c", prompt(9), 12)]
    stopped, short, long = engine.generate(requests)
    np.testing.assert_array_equal(stopped.ids, cut)
    assert stopped.stopped and not short.stopped and not long.stopped
    np.testing.assert_array_equal(short.ids, free[:3])
    np.testing.assert_array_equal(long.ids, free)


def test_more_sessions_than_slots_run_in_waves_and_evict_the_oldest(model, engine):
    requests = [ask(f"s{index}", prompt(20, seed=index), draw=index) for index in range(2 * SLOTS + 1)]
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        assert_logprobs(model, request.prompt_ids, completion)
    again = [completion.cached_tokens for completion in engine.generate(requests)]
    assert sum(cached == 19 for cached in again) == SLOTS  # those still resident
    assert again[0] == 0 and again[-1] == 19


def test_new_weights_and_new_sampling_change_the_answer_without_compiling(model, engine):
    other = Qwen2(model.config, rngs=nnx.Rngs(1))
    request = ask("a", prompt(30))
    before = engine.generate([request])[0]
    compiled = programs()
    engine.load(nnx.split(other)[1], 7)
    after = engine.generate([request])[0]
    assert (before.policy_version, after.policy_version, after.cached_tokens) == (0, 7, 0)
    assert_logprobs(other, request.prompt_ids, after)
    for draw, (temperature, top_p, limit) in enumerate([(0.0, 1.0, 1), (0.4, 0.9, 7), (1.7, 0.3, 20)]):
        sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": limit, "draw": draw}
        engine.generate([ask(f"b{draw}", prompt(30, seed=draw + 1), stop_ids=(draw,), banned_from=20, **sampling)])
    assert programs() == compiled


@pytest.mark.parametrize("part", ["_extend_rows", "_slot_arrays"])
def test_a_call_that_failed_leaves_no_slot_taken_and_nothing_to_reuse(engine, monkeypatch, part):
    def fail(*arguments):
        raise RuntimeError("the device is gone")

    requests = [ask(f"s{n}", prompt(20, seed=n)) for n in range(SLOTS)]
    with monkeypatch.context() as broken:
        broken.setattr(engine, part, fail)
        with pytest.raises(RuntimeError, match="gone"):
            engine.generate(requests)
    assert engine.free_slots == SLOTS
    assert [completion.cached_tokens for completion in engine.generate(requests)] == [0] * SLOTS


@pytest.mark.medium
def test_an_engine_over_a_mesh_equals_one_device(run_on_devices):
    assert run_on_devices(4, "from tests.fixtures.serving import main; main()").strip() == "equal"


def test_few_shapes_are_compiled(model):
    engine = JaxEngine(model, slots=3, max_length=100)  # shapes that no other test has
    before = programs()
    for length in (1, 20, 50, 90):
        sampling = {"temperature": length / 50, "top_p": 1 - length / 200, "max_tokens": 1 + length % 5}
        engine.generate([ask(f"s{length}", prompt(length, seed=length % 2), **sampling)])
        engine.generate([ask(f"t{length}", prompt(length, seed=length % 2), **sampling), ask("u", [1])])
    extend, decode, copy = np.subtract(programs(), before)
    assert extend <= 4 and decode <= 2 and copy <= 1  # (16, 64) tokens × (64, 100) columns; 2 widths


@pytest.mark.parametrize("slots", [1, 3])
def test_decoding_copies_no_cache(model, slots, monkeypatch):
    texts = []

    def spy(*arguments):
        texts.append(jax_kernels.decode.lower(*arguments).compile().as_text())
        return jax_kernels.decode(*arguments)

    monkeypatch.setattr(jax_engine, "decode", spy)
    JaxEngine(model, slots=slots, max_length=70).generate([ask("s", prompt(20))])
    (text,) = texts
    assert f"f32[{slots},1,70,8]" in text
    assert not re.findall(rf"f32\[{slots},1,(?:70,8|8,70)\]\S* (?:copy|transpose)\(", text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": [0, 31]}, r"token ids 0 to 31; 0 to 30 are allowed"),
        ({"ids": [-1, 3]}, r"token ids -1 to 3; 0 to 30 are allowed"),
        ({"ids": [1] * 160}, r"prompt of 160 tokens; 1 to 159 are allowed"),
        ({"max_tokens": 0}, "max_tokens ≥ 1"),
        ({"temperature": -1.0}, "temperature ≥ 0"),
        ({"top_p": 0.0}, "0 < top_p ≤ 1"),
        ({"banned_from": 0}, "bans every token"),
        ({"stop_ids": tuple(range(9))}, "9 stop ids; at most 8"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(engine, changes, message):
    good = ask("good", prompt(30))
    with pytest.raises(EngineError, match=message):
        engine.generate([good, ask("bad", **{"ids": [1, 2], **changes})])
    assert engine.generate([replace(good)])[0].cached_tokens == 0


def test_weights_of_another_model_are_refused(model, engine):
    wider = Qwen2(replace(model.config, intermediate_size=48), rngs=nnx.Rngs(0))
    with pytest.raises(EngineError, match=r"first difference at .*mlp.*"):
        engine.load(nnx.split(wider)[1], 1)
    with pytest.raises(EngineError, match="at least 1 slot"):
        JaxEngine(model, slots=0, max_length=10)
