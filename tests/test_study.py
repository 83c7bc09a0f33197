"""The study runner: validated arms, paired intervals. Whole runs are in e2e/."""

from pathlib import Path

import numpy as np
import pytest

from empo2_jax.errors import ConfigError
from empo2_jax.study import load_study, paired_interval

ROOT = Path(__file__).parents[1]


def test_shipped_study_has_valid_arms() -> None:
    study = load_study(ROOT / "configs/studies/toy.toml")
    assert study.seeds >= 10
    assert set(study.arms) == {"empo2", "grpo", "grpo_novelty", "behavior", "mode_iteration", "mode_group"}
    assert 'algorithm.off_policy_denominator="behavior"' in study.arms["behavior"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "x.toml"', "not a study"),
        ('base = "x.toml"\nseeds = 2\nreference = "b"\n[arms.a]', "not one of the arms a"),
        ('base = "x.toml"\nseeds = 2\nreference = "a"\n[arms.a]\nalgorithm.p_memori = 0.1', "p_memory"),
    ],
)
def test_bad_studies_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.toml").write_text("[run]\nseed = 1\n")
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_study(path)


def test_paired_interval_of_a_constant_difference_is_a_point() -> None:
    assert paired_interval([5.0, 7.0, 9.0], [2.0, 4.0, 6.0]) == (3.0, 3.0, 3.0)


def test_paired_interval_covers_the_mean_and_shrinks_with_pairs() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 1, 400).tolist()
    few, many = paired_interval(noise[:10], [0.0] * 10), paired_interval(noise, [0.0] * 400)
    for mean, low, high in (few, many):
        assert low < mean < high
    assert many[2] - many[1] < 0.4 * (few[2] - few[1])
    assert abs((many[2] - many[1]) - 2 * 1.96 / 20) < 0.05
