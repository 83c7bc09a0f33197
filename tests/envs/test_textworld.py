"""TextWorld's own games: generated once, solved by their walkthrough, scored as the game scores them."""

import pytest

pytest.importorskip("textworld")

from empo2_jax.config import EnvConfig
from empo2_jax.envs import textworld
from empo2_jax.envs.registry import make_family
from empo2_jax.errors import ConfigError, EnvError
from empo2_jax.types import Task


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMPO2_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def family():
    return make_family(EnvConfig(name="textworld", train_variations=2), panel=3)


def test_splits_are_disjoint_seeds(family):
    numbers = {split: [task.variation for task in family.tasks(split)] for split in ("train", "dev", "test")}
    assert numbers == {"train": [0, 1], "dev": [1000, 1001, 1002], "test": [1100, 1101, 1102]}
    assert family.task("large", 1199) == Task("textworld", "large", 1199)


def test_a_game_is_made_once_and_its_walkthrough_wins(family):
    task = family.tasks("train")[0]
    path = family.solution(task)
    made = textworld.game_file(task)
    stamp = made.stat().st_mtime_ns
    environment = family.make()
    seen = environment.reset(task, 0)
    assert environment.goal and "carrying" in seen.text
    assert path[0] in environment.admissible_actions()
    seen = [environment.step(action.upper()) for action in path]
    assert [item.resolution for item in seen] == ["exact"] * len(path)
    assert (seen[-1].score, seen[-1].success, sum(item.reward for item in seen)) == (100.0, True, 100.0)
    environment.close()
    assert textworld.game_file(task).stat().st_mtime_ns == stamp
    assert [item.name for item in made.parent.iterdir() if item.name.startswith("making-")] == []


def test_control_characters_do_not_hang_the_game_and_long_text_is_cut(family):
    environment = family.make()
    environment.reset(family.tasks("train")[0], 0)
    for text in ("\x00", "look\x00around", "\x1b[2J", "ü" * 5000, "restore", "quit", "save"):
        seen = environment.step(text)
        assert (seen.reward, seen.done, seen.score) == (0.0, False, 0.0), text
    environment.close()


def test_mistakes_name_what_is_there(family):
    with pytest.raises(ConfigError, match="small, medium, large"):
        textworld.family(tasks=["huge"])
    with pytest.raises(ConfigError, match="1 to 1000"):
        textworld.family(train=1001)
    with pytest.raises(ConfigError, match="0 to 1199"):
        family.task("small", 1200)
    with pytest.raises(ConfigError, match="train, dev, test"):
        family.tasks("valid")
    with pytest.raises(EnvError, match="small, medium, large"):
        family.make().reset(Task("textworld", "huge", 0), 0)
    with pytest.raises(EnvError, match="before a reset"):
        family.make().step("look")
