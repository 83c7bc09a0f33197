"""Transitions of recordings, the critic's share, and scores of proposals, all by hand."""

import numpy as np
import pytest

from empo2_jax.algorithms.imitation import solved
from empo2_jax.algorithms.retrospex import Rescorer, bare_action, policy_share, scores, transitions
from empo2_jax.envs import toy
from empo2_jax.memory.hashing_embedder import HashingEmbedder
from empo2_jax.types import Proposals

EMBED = HashingEmbedder(16).embed


def test_transitions_are_the_steps_in_order() -> None:
    family = toy.family()
    data = transitions(solved(family, family.tasks("train"), 2), family, EMBED)
    assert data.ended.tolist() == [False, True, False, True]
    np.testing.assert_allclose(data.rewards, [0.3, 0.7, 0.3, 0.7], rtol=1e-6)
    np.testing.assert_array_equal(data.next_states[[0, 2]], data.states[[1, 3]])
    place, room = toy.SECRETS[1]
    goal = "light the lamp of the green house ."
    texts = [family.memory_key(goal, "it is dark . the bulb is hidden ."), f"look in the {place}"]
    np.testing.assert_array_equal(np.stack([data.states[2], data.actions[2]]), EMBED(texts))
    texts = [family.memory_key(goal, f"the bulb was in the {place} ."), f"try the {room}"]
    np.testing.assert_array_equal(np.stack([data.states[3], data.actions[3]]), EMBED(texts))


@pytest.mark.parametrize(
    ("answer", "action"), [("I look.\nlook around\n", "look around"), ("wait", "wait"), (" \n", "")]
)
def test_thoughts_are_no_part_of_an_action(answer: str, action: str) -> None:
    assert bare_action(answer) == action


def test_the_critic_is_heard_more_and_more_up_to_a_limit() -> None:
    shares = [policy_share(step, 0.97, 0.6) for step in (0, 1, 16, 17, 30)]
    np.testing.assert_allclose(shares, [1.0, 0.97, 0.97**16, 0.6, 0.6])


def test_scores_by_hand() -> None:
    found = scores(np.array([0.2, 0.6, 0.4]), np.array([5.0, 1.0, 4.0]), 0.6)
    np.testing.assert_allclose(found, [0.0 + 0.4, 0.6 + 0.0, 0.3 + 0.3])
    np.testing.assert_allclose(scores(np.array([0.3, 0.3]), np.array([1.0, 2.0]), 0.6), [0.0, 0.4])
    np.testing.assert_allclose(scores(np.array([0.3]), np.array([1.0]), 0.6), [0.0])


def test_a_choice_is_the_policys_first_and_the_critics_later() -> None:
    """The critic likes the word vase; λ = 1 at step 0, and 0.6 late, where p = (1, 0.5, 0) and q = (0, 1, 1)."""
    vase = EMBED(["look in the vase", "open the vase"])
    liked = {row.tobytes() for row in vase}

    def values(states: np.ndarray, actions: np.ndarray) -> np.ndarray:
        assert len(states) == len(actions)
        return np.array([float(row.tobytes() in liked) for row in actions], np.float32)

    def asked(step: int) -> Proposals:
        answers = ("look in the oven", "so I\nlook in the vase", "open the vase")
        return Proposals("goal", "state", step, answers, np.array([0.8, 0.5, 0.2]))

    rescorer = Rescorer(toy.family(), EMBED, values, decay=0.97, limit=0.6)
    assert rescorer.choose([asked(0), asked(30)]) == [0, 1]
