"""The critic on a world small enough to solve by hand, and the same numbers whatever the batch."""

from pathlib import Path

import numpy as np
import pytest

from empo2_jax.config_offline import RetrospexConfig
from empo2_jax.errors import DataError
from empo2_jax.learner.critic import Critic, train_critic
from empo2_jax.types import Transitions

SETTINGS = RetrospexConfig(updates=4000, batch=256, hidden_size=32, learning_rate=3e-4, target_rate=0.1)
ONE_HOT = np.eye(4, dtype=np.float32)  # states 0, 1; actions 2, 3


def two_rooms() -> Transitions:
    """Room 0: action 2 leads to room 1 for nothing. Room 1: action 2 pays 0 and action 3 pays 1, equally often."""
    steps = [(0, 2, 0.0, 1, False), (0, 2, 0.0, 1, False), (1, 2, 0.0, 1, True), (1, 3, 1.0, 1, True)]
    state, action, reward, following, ended = zip(*steps, strict=True)
    rewards = np.array(reward, np.float32)
    return Transitions(ONE_HOT[[*state]], ONE_HOT[[*action]], rewards, ONE_HOT[[*following]], np.array(ended))


@pytest.fixture(scope="module")
def critic():
    return train_critic(two_rooms(), SETTINGS, seed=0)


def test_values_are_those_of_the_tables_solution(critic) -> None:
    """Q of room 1 is its rewards; V there is their 0.7-expectile 0.7, so Q of room 0 is 0.99 · 0.7."""
    found, losses = critic
    asked = found.values(ONE_HOT[[1, 1, 0]], ONE_HOT[[2, 3, 2]])
    np.testing.assert_allclose(asked, [0.0, 1.0, 0.693], atol=0.03)
    assert len(losses) == SETTINGS.updates
    # What stays is the expectile's: (1/4)(0.3 · 0.49 + 0.7 · 0.09) in room 1, 0 in room 0.
    assert abs(np.mean(losses[-200:]) - 0.25 * (0.3 * 0.49 + 0.7 * 0.09)) < 0.002


def test_values_do_not_depend_on_the_company(critic) -> None:
    found, _ = critic
    together = found.values(ONE_HOT[[1] * 9 + [0]], ONE_HOT[[2] * 9 + [2]])
    np.testing.assert_allclose(together[-1:], found.values(ONE_HOT[[0]], ONE_HOT[[2]]), rtol=1e-5)
    assert found.values(ONE_HOT[[]], ONE_HOT[[]]).shape == (0,)


def test_a_critic_comes_back_from_its_file(critic, tmp_path: Path) -> None:
    path = tmp_path / "critic.npz"
    critic[0].save(path)
    asked = (ONE_HOT[[1, 1, 0]], ONE_HOT[[2, 3, 2]])
    np.testing.assert_array_equal(Critic.load(path).values(*asked), critic[0].values(*asked))
    path.write_bytes(path.read_bytes()[:-40])
    plain, empty = tmp_path / "plain.npz", tmp_path / "empty.npz"
    with plain.open("wb") as file:
        np.save(file, np.zeros(2))
    np.savez(empty)
    for missing in (path, plain, empty, tmp_path / "none.npz"):
        with pytest.raises(DataError, match="not a critic"):
            Critic.load(missing)


def test_a_shorter_training_is_the_beginning_of_a_longer_one(critic) -> None:
    few = SETTINGS.model_copy(update={"updates": 3})
    np.testing.assert_allclose(train_critic(two_rooms(), few, seed=0)[1], critic[1][:3], rtol=1e-5)
