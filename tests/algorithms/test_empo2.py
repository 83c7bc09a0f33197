"""EMPO² against GRPO: the identity, the draws and the return."""

from collections import Counter

import pytest

from empo2_jax.algorithms import empo2, grpo
from empo2_jax.config import AlgorithmConfig
from empo2_jax.types import Mode
from tests.fixtures.episodes import make_episode, make_group, per_episode


def test_without_memory_and_novelty_it_is_grpo() -> None:
    config = AlgorithmConfig(p_memory=0.0)
    groups = [make_group(*(make_episode(rewards=[r]) for r in rewards)) for rewards in ([3.0, 1.0, -2.0], [0.0, 0.0])]
    assert per_episode(empo2.advantages(groups, config)) == per_episode(grpo.advantages(groups, config))
    for counters in [(0, 0, 0), (3, 1, 7), (99, 15, 2)]:
        assert empo2.draw_mode(config, 5, *counters) == grpo.draw_mode(config, 5, *counters)


def test_novelty_is_part_of_the_return() -> None:
    group = make_group(*(make_episode(rewards=[r], intrinsic=[n]) for r, n in [(0.0, 0.5), (1.0, 0.5), (1.0, 1.5)]))
    found = empo2.advantages([group], AlgorithmConfig(advantage_std_floor=0.0))
    assert per_episode(found) == pytest.approx([-1, 0, 1], rel=1e-5)


def test_shares_of_the_modes() -> None:
    config = AlgorithmConfig(p_memory=0.25, q_off_policy=2 / 3, mode_scope="episode")
    modes = Counter(empo2.draw_mode(config, 0, i, g, m) for i in range(100) for g in range(16) for m in range(8))
    assert modes[Mode.ON_POLICY] / 12800 == pytest.approx(0.75, abs=0.02)
    assert modes[Mode.ON_POLICY_WITH_MEMORY] / 12800 == pytest.approx(1 / 12, abs=0.01)
    assert modes[Mode.OFF_POLICY] / 12800 == pytest.approx(1 / 6, abs=0.015)


@pytest.mark.parametrize(("p", "q", "mode"), [(0.0, 1.0, 0), (1.0, 0.0, 1), (1.0, 1.0, 2)])
def test_extremes(p: float, q: float, mode: int) -> None:
    config = AlgorithmConfig(p_memory=p, q_off_policy=q)
    assert {empo2.draw_mode(config, s, 0, g, m) for s in range(5) for g in range(5) for m in range(5)} == {Mode(mode)}
