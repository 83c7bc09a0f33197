import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2_jax.errors import CheckpointError
from empo2_jax.memory.exact_index import ExactIndex
from empo2_jax.memory.hashing_embedder import HashingEmbedder
from empo2_jax.memory.scann_index import ScannIndex
from empo2_jax.memory.tips import TipMemory, buffer_key, make_tip_entries
from empo2_jax.types import Episode, Mode, Step, StopReason, Task, Tip

A, B, C, D = np.eye(4, dtype=np.float32)
HALF = np.full(4, 0.5, np.float32)  # cosine exactly 0.5 with every axis


def memory(index=ExactIndex, **settings):
    return TipMemory(HashingEmbedder(4), index, **settings)


def tip(content, score=0.0, *, key=A, buffer="b", episode=None, step=0):
    return Tip(-1, buffer, content, float(score), key, episode or content, step, policy_version=3, iteration=2)


def contents(tips):
    return [each.content for each in tips]


def episode(actions, rewards, stop_reason=StopReason.DONE):
    none = np.zeros(0, np.int32)
    steps = tuple(
        Step("seen", none, none, none, np.zeros(0, np.float32), action, action, "exact", reward, "state")
        for action, reward in zip(actions, rewards, strict=True)
    )
    task = Task("science", "boil", 4)
    return Episode("i0/g0/e1", task, "boil water", Mode.ON_POLICY, steps, stop_reason, sum(rewards), False, 7)


def test_retrieval_is_strictly_above_the_threshold_and_ranked_by_score():
    tips = memory()
    tips.commit([tip("low", -100), tip("tie, older", 8), tip("best", 25), tip("at 0.5", 99, key=HALF)])
    tips.commit([tip("tie, newer", 8), tip("elsewhere", 100, key=B)])
    assert contents(tips.retrieve("b", A)) == ["best", "tie, newer", "tie, older", "low"]


def test_at_most_top_k():
    tips = memory(top_k=2)
    tips.commit([tip(f"{score}", score) for score in (1, 5, 3, 4)])
    assert contents(tips.retrieve("b", A)) == ["5", "4"]


def test_one_entry_per_episode_unless_the_paper_is_followed():
    entries = [tip(f"one/{step}", 50, episode="one", step=step) for step in range(10)] + [tip("two", 10, episode="two")]
    distinct, repeated = memory(top_k=10), memory(top_k=10, distinct_episodes=False)
    for each in (distinct, repeated):
        each.commit(entries)
    assert contents(distinct.retrieve("b", A)) == ["one/9", "two"]
    assert contents(repeated.retrieve("b", A)) == [f"one/{step}" for step in reversed(range(10))]


def test_fifo_eviction_and_an_evicted_content_may_come_again():
    tips = memory(capacity=2)
    assert tips.commit([tip("1", 9), tip("2", 1), tip("2", 1), tip("3", 5)]) == 3
    assert contents(tips.retrieve("b", A)) == ["3", "2"]
    assert tips.commit([tip("1", 9)]) == 1
    assert contents(tips.retrieve("b", A)) == ["1", "3"]
    assert tips.metrics() == {
        "size": 2, "buffers": 1, "queries": 2, "hits": 2, "retrieved": 4, "duplicates": 1, "evictions": 2
    }  # fmt: skip


def test_lowest_score_eviction_takes_the_older_of_equals():
    tips = memory(capacity=2, eviction="lowest_score")
    tips.commit([tip("a", 1), tip("b", 1), tip("c", 7), tip("d", 0)])
    assert contents(tips.retrieve("b", A)) == ["c", "b"]


def test_a_content_written_again_counts_as_newest_unless_dropped():
    between = np.float32(0.5**0.5) * (A + B)
    renewing, dropping = memory(capacity=2, duplicates="renew"), memory(capacity=2, duplicates="drop")
    for tips in (renewing, dropping):
        assert tips.commit([tip("right", 9), tip("wrong", 9)]) == 2
        assert tips.commit([tip("right", 9, key=B)]) == 0
        assert tips.metrics()["duplicates"] == 1
    assert contents(dropping.retrieve("b", A)) == ["wrong", "right"]
    assert contents(renewing.retrieve("b", A)) == ["wrong"]  # "right" is now found where it was written last
    assert contents(renewing.retrieve("b", between)) == ["right", "wrong"]
    renewing.commit([tip("third", 9)])  # first in, first out goes by the renewed order
    assert contents(renewing.retrieve("b", between)) == ["third", "right"]


def test_capacity_and_duplicates_are_per_buffer():
    tips = memory(capacity=1)
    tips.commit([tip("same", buffer="x"), tip("same", buffer="y")])
    assert [contents(tips.retrieve(name, A)) for name in ("x", "y", "z")] == [["same"], ["same"], []]


def test_buffers_know_environment_task_and_variation():
    tasks = [Task(env, name, variation) for env in "ab" for name in ("boil", "melt") for variation in (0, 1)]
    counts = {scope: len({buffer_key(task, scope) for task in tasks}) for scope in ("variation", "task", "global")}
    assert counts == {"variation": 8, "task": 4, "global": 1}


def test_entries_carry_tip_action_and_rounded_score():
    embeddings = np.stack([A, B])
    entries = make_tip_entries(
        episode(["go north", "boil"], [3.0, 5.26]), "Heat\nit. ", embeddings, buffer="b", iteration=5
    )
    assert contents(entries) == [
        "Heat it. (action : go north ; score : 8 )",
        "Heat it. (action : boil ; score : 8 )",
    ]
    assert [(e.score, e.episode, e.step, e.policy_version, e.iteration) for e in entries] == [
        (8.3, "i0/g0/e1", 0, 7, 5),
        (8.3, "i0/g0/e1", 1, 7, 5),
    ]
    np.testing.assert_array_equal([e.embedding for e in entries], embeddings)


def test_no_entries_from_invalid_episodes_or_empty_tips():
    broken = episode(["wait"], [0.0], StopReason.ENV_ERROR)
    assert make_tip_entries(broken, "tip", A[None], buffer="b", iteration=0) == []
    assert make_tip_entries(episode(["wait"], [0.0]), " \n", A[None], buffer="b", iteration=0) == []


class CountingEmbedder(HashingEmbedder):
    def __init__(self):
        super().__init__(64)
        self.calls = []

    def embed(self, texts):
        self.calls.append(list(texts))
        return super().embed(texts)


def test_batched_retrieval_embeds_each_text_once():
    embedder = CountingEmbedder()
    tips = TipMemory(embedder, ExactIndex, cache_size=2)
    lamp = HashingEmbedder(64).embed(["lamp"])[0]
    tips.commit([tip("on x", key=lamp, buffer="x"), tip("on y", key=lamp, buffer="y")])
    found = tips.retrieve_many([("x", "lamp"), ("y", "lamp"), ("x", "stove")])
    assert [contents(each) for each in found] == [["on x"], ["on y"], []]
    tips.retrieve_many([("x", "stove"), ("x", "sink")])  # "lamp" leaves the cache
    tips.retrieve_many([("x", "lamp")])
    assert embedder.calls == [["lamp", "stove"], ["sink"], ["lamp"]]
    assert tips.retrieve_many([]) == []


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3), st.integers(0, 2)), max_size=40), st.data())
def test_never_over_capacity_and_equal_for_both_indexes(draws, data):
    capacity, eviction = data.draw(st.integers(1, 6)), data.draw(st.sampled_from(["fifo", "lowest_score"]))
    duplicates = data.draw(st.sampled_from(["renew", "drop"]))
    keys = np.stack([A, B, HALF])
    new = [tip(f"tip {content}", float(score), key=keys[axis]) for content, score, axis in draws]
    options = {"capacity": capacity, "eviction": eviction, "duplicates": duplicates, "top_k": 3}
    exact, scann = memory(**options), memory(lambda size: ScannIndex(size, exact_below=1), **options)
    cut = data.draw(st.integers(0, len(new)))
    for part in (new[:cut], new[cut:]):
        exact.commit(part)
        scann.commit(part)
        assert len(exact) <= capacity
        for query in (A, B, C, HALF):
            assert contents(exact.retrieve("b", query)) == contents(scann.retrieve("b", query))
    assert exact.content_hash() == scann.content_hash()


def test_memory_survives_a_restart_with_equal_bytes(tmp_path):
    tips = memory(capacity=3)
    tips.commit([tip(f"tip {n}\u2028é", n, key=[A, B][n % 2], buffer=f"buffer {n % 2}") for n in range(9)])
    tips.dump(tmp_path / "one")
    restored = memory(capacity=3)
    restored.load(tmp_path / "one")
    assert restored.content_hash() == tips.content_hash()
    restored.dump(tmp_path / "two")
    for name in ("tips.safetensors", "tips.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    for each in (tips, restored):  # the run goes on alike: eviction, duplicates, counters
        each.commit([tip("tip 8\u2028é", 8, buffer="buffer 0"), tip("new", 4, buffer="buffer 0")])
    assert restored.retrieve("buffer 0", A)[0].counter == tips.retrieve("buffer 0", A)[0].counter
    assert restored.content_hash() == tips.content_hash()


def test_unreadable_dumps_are_checkpoint_errors(tmp_path):
    with pytest.raises(CheckpointError, match="no tips can be read"):
        memory().load(tmp_path)
    memory().dump(tmp_path)
    with pytest.raises(CheckpointError, match="4 dimensions"):
        TipMemory(HashingEmbedder(8), ExactIndex).load(tmp_path)
    (tmp_path / "tips.jsonl").write_text("")
    with pytest.raises(CheckpointError):
        memory().load(tmp_path)


def test_keys_to_come_are_embedded_in_the_same_call():
    embedder = CountingEmbedder()
    tips = TipMemory(embedder, ExactIndex)
    assert tips.retrieve_many([("x", "lamp")], ["stove", "lamp"]) == [[]]
    tips.embed(["stove", "lamp"])
    assert embedder.calls == [["lamp", "stove"]]
    assert tips.metrics()["queries"] == 1
