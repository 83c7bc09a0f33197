"""GRPO never sees tips or novelty."""

import pytest

from empo2_jax.algorithms import grpo
from empo2_jax.config import AlgorithmConfig
from empo2_jax.types import Mode
from tests.fixtures.episodes import make_episode, make_group, per_episode


def test_always_on_policy() -> None:
    config = AlgorithmConfig(p_memory=1.0)
    assert {grpo.draw_mode(config, 0, i, 0, i) for i in range(50)} == {Mode.ON_POLICY}


def test_novelty_is_ignored() -> None:
    group = make_group(*(make_episode(rewards=[r], intrinsic=[n]) for r, n in [(0.0, 50.0), (1.0, 0.0), (2.0, 9.0)]))
    found = grpo.advantages([group], AlgorithmConfig(advantage_std_floor=0.0))
    assert per_episode(found) == pytest.approx([-1, 0, 1], rel=1e-5)
