"""Rewards computed by hand; vectors on the axes are different states, equal ones the same state.

`test_11_*` are the pinned semantics of the store.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2_jax.errors import CheckpointError
from empo2_jax.memory.exact_index import ExactIndex
from empo2_jax.memory.novelty import NoveltyStore, novelty_key
from empo2_jax.types import Task

A, B, C = np.eye(3, dtype=np.float32)


def states(*rows):
    return np.stack(rows)


def store(**settings):
    return NoveltyStore(3, ExactIndex, **{"threshold": 0.9, "coefficient": 6.0, **settings})


def test_11_reward_is_the_coefficient_over_visits_so_far():
    novelty = store()
    rewards, pending = novelty.episode_rewards("k", states(A, B, A, A))
    np.testing.assert_array_equal(rewards, np.array([6, 6, 3, 2], np.float32))
    assert len(novelty) == 0  # nothing changes before the commit
    novelty.commit([pending])
    assert novelty.visits("k") == (3, 1)
    rewards, _ = novelty.episode_rewards("k", states(B, C, A, B))
    np.testing.assert_array_equal(rewards, np.array([6 / 2, 6, 6 / 4, 6 / 3], np.float32))


def test_11_episodes_of_one_iteration_do_not_see_each_other_and_merge_at_the_commit():
    novelty = store()
    near_a = np.array([0.96, 0.28, 0], np.float32)  # cosine 0.96 with A
    first, pending_first = novelty.episode_rewards("k", states(A, A))
    second, pending_second = novelty.episode_rewards("k", states(near_a, C))
    np.testing.assert_array_equal(first, [6, 3])
    np.testing.assert_array_equal(second, [6, 6])
    novelty.commit([pending_first, pending_second])
    assert novelty.visits("k") == (3, 1)


def test_11_revisits_can_go_unpaid_but_are_still_counted():
    novelty = store(revisits=False)
    rewards, pending = novelty.episode_rewards("k", states(A, A, B))
    np.testing.assert_array_equal(rewards, [6, 0, 6])
    novelty.commit([pending])
    rewards, _ = novelty.episode_rewards("k", states(A, C))
    np.testing.assert_array_equal(rewards, [0, 6])
    assert novelty.visits("k") == (2, 1)


def test_11_threshold_is_reached_by_equality():
    half = np.array([0.5, np.sqrt(0.75), 0], np.float32)
    rewards, _ = store(threshold=0.5).episode_rewards("k", states(A, half))
    np.testing.assert_array_equal(rewards, [6, 3])
    rewards, _ = store(threshold=0.5001).episode_rewards("k", states(A, half))
    np.testing.assert_array_equal(rewards, [6, 6])


def test_11_a_state_visits_its_nearest_entry_of_store_and_episode():
    novelty = store(threshold=0.6)
    novelty.commit([novelty.episode_rewards("k", states(A, A))[1]])
    middle = np.array([0.55, np.sqrt(1 - 0.55**2), 0], np.float32)  # new, then nearest to `toward_b`
    toward_b = np.array([0.61, np.sqrt(1 - 0.61**2), 0], np.float32)  # cosine 0.61 with A, more with `middle`
    rewards, pending = novelty.episode_rewards("k", states(middle, toward_b))
    np.testing.assert_array_equal(rewards, [6, 3])
    assert pending.known == {}
    assert pending.new_visits == (2,)


def test_11_keys_hold_environment_task_and_variation_apart():
    keys = {novelty_key(Task(e, t, v)) for e in ("x", "y") for t in ("a", "b") for v in (0, 1)}
    assert len(keys) == 8
    novelty = store()
    novelty.commit([novelty.episode_rewards("k0", states(A))[1]])
    np.testing.assert_array_equal(novelty.episode_rewards("k1", states(A))[0], [6])


def test_kind_none_pays_and_stores_nothing():
    novelty = store(kind="none")
    rewards, pending = novelty.episode_rewards("k", states(A, B))
    np.testing.assert_array_equal(rewards, [0, 0])
    novelty.commit([pending])
    assert len(novelty) == 0


def test_empty_episode_gives_no_rewards():
    rewards, pending = store().episode_rewards("k", np.zeros((0, 3), np.float32))
    assert rewards.shape == (0,)
    assert pending.new_visits == ()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=5))
def test_every_visit_is_counted_once(episodes):
    novelty = store()
    pending = [novelty.episode_rewards("k", np.eye(3, dtype=np.float32)[steps])[1] for steps in episodes]
    novelty.commit(pending)
    metrics = novelty.metrics()
    assert metrics["visits"] == sum(map(len, episodes))
    assert metrics["distinct_states"] == len(novelty)
    assert len(novelty) == len({state for steps in episodes for state in steps})


def test_dump_and_load_restore_rewards_and_bytes(tmp_path):
    novelty = store()
    for key, rows in [("z", states(A, B)), ("b", states(C, C))]:
        novelty.commit([novelty.episode_rewards(key, rows)[1]])
    novelty.dump(tmp_path / "one")
    restored = store()
    restored.load(tmp_path / "one")
    assert restored.content_hash() == novelty.content_hash() != store().content_hash()
    np.testing.assert_array_equal(
        restored.episode_rewards("b", states(C, A))[0], novelty.episode_rewards("b", states(C, A))[0]
    )
    restored.dump(tmp_path / "two")
    for name in ("novelty.safetensors", "novelty.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_unreadable_dumps_are_checkpoint_errors(tmp_path):
    with pytest.raises(CheckpointError, match="no novelty store"):
        store().load(tmp_path)
    store().dump(tmp_path)
    with pytest.raises(CheckpointError, match="expected"):
        NoveltyStore(4, ExactIndex).load(tmp_path)
