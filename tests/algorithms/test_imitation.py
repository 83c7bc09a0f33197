"""Recordings as transcripts: what is read of a run's episodes, which pass the filters, and the chat they become."""

from pathlib import Path

import pytest

from empo2_jax.algorithms.imitation import Trajectory, Turn, recorded, select, solved, transcript
from empo2_jax.envs import toy
from empo2_jax.errors import ConfigError, DataError
from empo2_jax.metrics import EpisodeLog
from empo2_jax.rollout.collect import Assignment
from empo2_jax.rollout.replay import ReplayEngine
from empo2_jax.types import Task
from tests.fixtures.worlds import CorridorFamily, corridor, make_collector, spoken, word_chat


def played(run_dir: Path, length: int = 2, failures: dict[tuple[int, int], int] | None = None) -> Path:
    """A run directory with the record of two episodes of the corridor."""
    family = CorridorFamily(length, failures)
    engine = ReplayEngine(spoken(word_chat(), lambda request: "look in the vase"))
    collector = make_collector(engine, family, step_limit=9, retries=0)
    episodes = collector.collect([Assignment(f"e{number}", corridor(number)) for number in range(2)], temperature=1.0)
    collector.close()
    EpisodeLog(run_dir).write(1, episodes, limit=9)
    return run_dir


def test_a_recording_is_what_happened(tmp_path: Path) -> None:
    first, second = recorded(played(tmp_path), "corridor")
    assert (first.task, second.task) == (corridor(0), corridor(1))
    assert (first.score, first.success, first.goal) == (2.0, True, "light the lamp of the red house .")
    views = [f"the {place} is empty ." for place in toy.PLACES[:2]]
    assert [turn.observation for turn in first.turns] == [turn.state for turn in first.turns] == views
    assert {(turn.action, turn.reward) for turn in first.turns} == {("look in the vase", 1.0)}


def test_episodes_that_failed_are_left_out(tmp_path: Path) -> None:
    assert [item.task for item in recorded(played(tmp_path, failures={(0, 1): 1}), "corridor")] == [corridor(1)]


def test_a_transcript_is_the_episode_without_tips() -> None:
    family = toy.family()
    (gold,) = solved(family, family.tasks("train")[:1], 5)
    place, room = toy.SECRETS[0]
    assert [(message.role, message.content) for message in transcript(family, gold)] == [
        ("user", "light the lamp of the red house . it is dark . the bulb is hidden ."),
        ("assistant", f"look in the {place}"),
        ("user", f"the bulb was in the {place} ."),
        ("assistant", f"try the {room}"),
    ]
    assert (gold.score, gold.success, [turn.reward for turn in gold.turns]) == (100.0, True, [30.0, 70.0])


def test_what_the_world_refuses_is_no_part_of_a_solution() -> None:
    class Stammering(toy.ToyFamily):
        def solution(self, task: Task) -> list[str]:
            look, fit = super().solution(task)
            return [look, "7", fit, "never reached"]

    family = Stammering(range(8))
    (gold,) = solved(family, family.tasks("train"), 1)
    assert [turn.action for turn in gold.turns] == family.solution(gold.task)[::2]
    assert gold.turns[1].observation.startswith("the bulb was in")


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, ["low", "short", "solved"]),
        ({"min_score": 30.0}, ["short", "solved"]),
        ({"max_steps": 2}, ["short", "solved"]),
        ({"only_success": True}, ["solved"]),
        ({"min_score": 30.0, "max_steps": 1}, ["short"]),
    ],
)
def test_filters(limits: dict[str, float], kept: list[str]) -> None:
    turn = Turn("", "", "", 0.0)
    items = [
        Trajectory(Task("e", name, 0), "", (turn,) * steps, score, success)
        for name, steps, score, success in [
            ("low", 3, 0.0, False),
            ("short", 1, 30.0, False),
            ("solved", 2, 100.0, True),
        ]
    ]
    chosen = select(items, **{"min_score": -100.0, "max_steps": 0, "only_success": False, **limits})
    assert [item.task.name for item in chosen] == kept


def test_unusable_runs_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no recorded episodes"):
        recorded(tmp_path, "toy")
    with pytest.raises(ConfigError, match=r"1\.jsonl: episodes of corridor, but the environment is toy"):
        recorded(played(tmp_path / "run"), "toy")
    (tmp_path / "run/episodes/2.jsonl").write_text('{"task": "corridor/walk/0", "stop_reason": "done"}\n')
    with pytest.raises(DataError, match=r"2\.jsonl: line 1 is no episode: KeyError\('steps'\)"):
        recorded(tmp_path / "run", "corridor")
