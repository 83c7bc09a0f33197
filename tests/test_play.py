"""`empo2 play` in the terminal, by replay, and its mistakes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from empo2_jax.cli import main
from empo2_jax.config import Config
from empo2_jax.config_file import dump_toml
from empo2_jax.envs import toy
from empo2_jax.errors import ConfigError, DataError
from empo2_jax.metrics import EpisodeLog
from empo2_jax.play import config_beside, play, replay
from empo2_jax.rollout.collect import Assignment
from empo2_jax.rollout.replay import ReplayEngine
from tests.fixtures.worlds import make_collector, spoken, word_chat

PLACE, ROOM = toy.SECRETS[2]


def by_hand(*typed: str, limit: int = 30) -> tuple[float, list[str]]:
    said: list[str] = []
    answers = iter(typed)

    def ask(prompt: str) -> str:
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    family = toy.family()
    return play(family, family.task("bulb", 2), 0, limit, ask, said.append), said


def test_a_person_lists_actions_and_solves_the_house() -> None:
    score, said = by_hand("", "?", "? oven", "sing", f"Look in the {PLACE}!", f"try the {ROOM}")
    assert score == 100.0
    assert len(said[1].splitlines()) == 16 and said[2] == "look in the oven"
    assert said[3] == "[invalid] nothing happens ."
    assert said[4].startswith(f"[exact, sent as 'look in the {PLACE}']") and "+30 points, 30 in all" in said[4]
    assert said[-1] == "solved after 3 actions with 100 of 100 points"


def test_the_end_of_input_and_the_step_limit_end_the_game() -> None:
    assert by_hand("sing")[1][-1] == "stopped after 1 actions with 0 of 100 points"
    assert by_hand(*["sing"] * 9, limit=2)[1][-1] == "stopped after 2 actions with 0 of 100 points"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    family = toy.family()
    said = spoken(word_chat(), lambda request: f"look in the {PLACE}")
    collector = make_collector(ReplayEngine(said), family, step_limit=2)
    episodes = collector.collect(
        [Assignment(f"i3/g0/e{n}", family.task("bulb", 1 + n)) for n in (0, 1)], temperature=1.0
    )
    collector.close()
    (tmp_path / "config.toml").write_text(dump_toml(Config()))
    path = EpisodeLog(tmp_path).write(3, episodes, 9)
    assert path is not None
    return path


def test_a_recorded_episode_agrees_with_the_real_world_or_says_where_it_does_not(recorded: Path) -> None:
    said: list[str] = []
    assert config_beside(recorded).env.name == "toy"
    assert replay(toy.family(), recorded, "i3/g0/e1", 0, said.append)
    assert said[0] == "i3/g0/e1 of toy/bulb/2, 2 steps, score 30" and said[-1] == "observations and rewards agree"
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    lines[1]["steps"][1]["observation"] = "it is bright ."
    recorded.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay(toy.family(), recorded, "i3/g0/e0", 0, said.append)
    assert not replay(toy.family(), recorded, "i3/g0/e1", 0, said.append)
    assert said[-1] == "they differ, first in step 2" and "  recorded: it is bright ." in said


def test_replay_by_command_line(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", "--replay", str(recorded), "--id", "i3/g0/e1"]) == 0
    assert "observations and rewards agree" in capsys.readouterr().out
    recorded.write_text(recorded.read_text().replace('"reward": 30.0', '"reward": 31.0'))
    assert main(["play", "--replay", str(recorded), "--id", "i3/g0/e1"]) == 1
    assert main(["play", "--replay", str(recorded), "--id", "i9"]) == 2
    assert "no episode 'i9'; there are i3/g0/e0, i3/g0/e1" in capsys.readouterr().err


def test_what_is_no_record_is_one_clear_error(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no episode"):
        replay(toy.family(), recorded, "i9", 0, print)
    recorded.write_text('{"id": "x", "task": "toy", "steps": []}\n')
    with pytest.raises(DataError, match="not an episode record"):
        replay(toy.family(), recorded, "", 0, print)
    with pytest.raises(DataError, match="not in RUN/episodes"):
        config_beside(tmp_path / "a" / "b" / "3.jsonl")


def test_mistakes_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["play"], "NAME, --config or --replay"),
        (["play", "toys"], "no such environment"),
        (["play", "toy", "--variation", "99"], "variations 0 to 7"),
        (["play", "toy", "--env.step_limit", "many"], "--env.step_limit many"),
        (["envs", "check", "toy", "--tasks", "lamp"], "the nearest is 'bulb'"),
        (["envs", "check", "toy", "--processes", "0"], "at least 1"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_in_a_real_terminal_session() -> None:
    command = [sys.executable, "-m", "empo2_jax", "play", "toy", "--variation", "2", "--env.step_limit", "1"]
    done = subprocess.run(
        command, input=f"look in the {PLACE}\n", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "stopped after 1 actions with 30 of 100 points" in done.stdout
