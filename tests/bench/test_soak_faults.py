"""The plan of a soak, and that its count sees what is lost or told twice."""

import json
from collections import Counter
from pathlib import Path

import pytest

from empo2_jax.bench.soak_faults import Count, calm_from, count_episodes, episode_ids, growth, plan, slope


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("iterations", [6, 8, 30])
def test_plan_spares_the_first_iteration_kills_alike_then_simulators_alone(seed: int, iterations: int) -> None:
    faults, calm = plan(seed, iterations), calm_from(iterations)
    places = [fault.iteration + fault.share for fault in faults]
    assert places == sorted(places) and places[0] >= 1 and places[-1] < iterations
    before = Counter(fault.kind for fault in faults if fault.iteration < calm)
    assert len(set(before.values())) == 1 and set(before) == {"JVM", "server", "trainer"}
    assert sum(before.values()) == 3 * round((calm - 1) / 2)
    after = [fault.kind for fault in faults if fault.iteration >= calm]
    assert after == ["JVM"] * ((iterations - calm) // 2)
    assert faults == plan(seed, iterations) != plan(seed + 1, iterations)


def write_run(folder: Path, iterations: int = 3) -> None:
    """A run of two groups of two episodes of three steps each."""
    (folder / "episodes").mkdir()
    for iteration in range(1, iterations + 1):
        write(folder, iteration, [episode(name) for name in sorted(episode_ids(iteration, 2, 2))])
    lines = [
        {"iteration": iteration, "total/environment_steps": 12 * iteration} for iteration in range(1, iterations + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def episode(name: str, stop_reason: str = "done") -> dict:
    return {"id": name, "stop_reason": stop_reason, "steps": [{}, {}, {}]}


def write(folder: Path, iteration: int, episodes: list[dict]) -> None:
    text = "".join(json.dumps(item) + "\n" for item in episodes)
    (folder / f"episodes/{iteration}.jsonl").write_text(text)


def test_a_whole_run_has_lost_nothing(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert count_episodes(tmp_path, 3, 2, 2) == Count(12, 0, 0, 0, frozenset())


def test_lost_given_up_and_duplicate_episodes_are_seen(tmp_path: Path) -> None:
    write_run(tmp_path)
    write(tmp_path, 1, [episode("i0/g0/e0"), episode("i0/g0/e1"), episode("i0/g1/e0", "engine_error")])
    names = sorted(episode_ids(3, 2, 2))
    write(tmp_path, 3, [*map(episode, names), episode(names[0]), episode("i0/g0/e0")])
    # Steps: 12 told of iteration 1 where 9 are left, 6 more in iteration 3.
    assert count_episodes(tmp_path, 3, 2, 2) == Count(12, 2, 2, 3, frozenset({1, 3}))


def test_iterations_that_are_not_there_or_told_twice_are_seen(tmp_path: Path) -> None:
    write_run(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join([lines[0], lines[2], lines[2]]))
    count = count_episodes(tmp_path, 4, 2, 2)
    assert (count.expected, count.lost, count.duplicate) == (16, 8, 4)  # 2 and 4 are missing
    assert count.incomplete == {2, 3, 4}
    assert count.miscounted_steps == 12  # 36 in all, 24 of them in iterations that were told


def test_slope_forgets_a_jump_and_growth_what_comes_and_goes() -> None:
    steady = [(float(x), 5.0 + 2.0 * x) for x in range(20)]
    assert slope(steady) == pytest.approx(2.0)
    assert slope([(x, y + 100.0 * (x > 15)) for x, y in steady]) == pytest.approx(2.0)
    assert slope([(3.0, 1.0), (3.0, 9.0)]) == slope([]) == 0.0
    assert growth([5.0, 9.0] * 4) == 0
    assert growth([float(x) for x in range(5, 13)]) == 6
    assert growth([7.0]) == growth([]) == 0
