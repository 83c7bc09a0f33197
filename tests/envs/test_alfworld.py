"""ALFWorld's games in the real engine: a kitchen of our own in its format, since its data cannot be shipped."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("textworld")
pytest.importorskip("fast_downward")

from empo2_jax.cli import main
from empo2_jax.config import EnvConfig
from empo2_jax.envs import alfworld
from empo2_jax.envs.alfworld_game import KEPT
from empo2_jax.envs.check import check
from empo2_jax.envs.registry import make_family
from empo2_jax.errors import ConfigError, EnvError
from empo2_jax.types import Task
from tests.fixtures import kitchen

CUP = Task("alfworld", "pick_and_place_simple", 0)
EGG = Task("alfworld", "pick_heat_then_place_in_recep", 0)


# The first game is broken; one world is closed, one is left in the middle of a game, one has none.
PLAY = """
import sys
from empo2_jax.envs import alfworld
from empo2_jax.errors import EnvError
from empo2_jax.types import Task

family = alfworld.family(data=sys.argv[1])
worlds = [family.make() for _ in range(3)]
try:
    worlds[0].reset(family.tasks("train")[0], 0)
except EnvError as error:
    print(error)
for world in worlds[:2]:
    print(world.reset(family.tasks("test")[0], 0).score, world.step("go to shelf 1").state.splitlines()[0])
worlds[0].close()
print(worlds[1].step("go to fridge 1").resolution)
"""


def resident_mb() -> float:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def loaded() -> int:
    """Copies of the planner's library in this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return len({line.split()[4] for line in maps.splitlines() if "libdownward" in line})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return kitchen.write(tmp_path_factory.mktemp("alfworld"))


@pytest.fixture(scope="module")
def family(data):
    family = make_family(EnvConfig(name="alfworld", data=str(data)), panel=2)
    yield family
    family.close()


@pytest.fixture
def environment(family):
    environment = family.make()
    yield environment
    environment.close()


def test_tasks_are_the_games_that_can_be_solved_by_kind(family):
    unseen = [Task("alfworld", task.name, 20_000) for task in (CUP, EGG)]
    assert family.tasks("train") == [CUP, Task("alfworld", CUP.name, 2), EGG]
    assert (family.tasks("dev"), family.tasks("test")) == ([Task("alfworld", CUP.name, 10_000)], unseen)
    assert family.task(EGG.name, 20_000) == unseen[1]


def test_an_episode_as_the_player_reads_it(environment):
    first = environment.reset(EGG, 0)
    assert environment.goal == "put a hot egg on the table"
    room, actions = first.text.splitlines()
    assert room == (
        "Around you there are a countertop 1, a diningtable 1, a fridge 1, a microwave 1, a shelf 1, a sinkbasin 1."
    )
    assert actions == (
        "Actions: close X, examine X, go to X, heat X with Y, inventory, move X to Y, open X, take X from Y."
    )
    assert first.state == "You are in the middle of the room.\nYou carry nothing."
    seen = environment.step("go to fridge 1")
    assert (seen.text, seen.state) == (
        "You walk to the fridge 1. The fridge 1 is shut.",
        "You are at fridge 1, which is closed.\nYou carry nothing.",
    )
    assert environment.step("Open fridge 1.").text == "You open the fridge 1. The fridge 1 is open and holds a egg 1."
    assert "take egg 1 from fridge 1" in environment.admissible_actions()
    assert environment.step("take egg 1 from fridge 1").state.endswith("You carry egg 1.")
    assert environment.step("go to microwave 1").reward == 0.0
    assert environment.step("heat egg 1 with microwave 1").state.endswith("You carry egg 1 (hot).")
    assert not environment.step("go to diningtable 1").done
    last = environment.step("move egg 1 to diningtable 1")
    assert (last.reward, last.score, last.done, last.success) == (100.0, 100.0, True, True)


def test_what_cannot_be_done_changes_nothing(environment):
    before = environment.reset(CUP, 0)
    for text in ("take cup 2 from countertop 1", "open shelf 1", "go to moon 1", "\x00", "x" * 100_000, "quit"):
        seen = environment.step(text)
        assert (seen.text, seen.resolution, seen.reward, seen.state) == (
            "Nothing happens.",
            "invalid",
            0.0,
            before.state,
        )


@pytest.mark.parametrize(("task", "path"), [(CUP, kitchen.CUP_PATH), (EGG, kitchen.EGG_PATH)])
def test_walkthroughs_reach_the_full_score(family, environment, task, path):
    assert family.solution(task) == list(path)
    environment.reset(task, 0)
    seen = [environment.step(action) for action in path]
    assert {item.resolution for item in seen} == {"exact"}
    assert [item.score for item in seen] == [0.0] * (len(path) - 1) + [100.0]


def test_games_side_by_side_do_not_mix_and_leave_the_process_alone(family):
    arguments, output = list(sys.argv), sys.stdout
    worlds = [family.make() for _ in range(3)]
    first = worlds[0].reset(CUP, 0)
    others = zip(worlds[1:], (EGG, CUP), strict=True)
    threads = [threading.Thread(target=world.reset, args=(task, 0)) for world, task in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sys.argv, sys.stdout) == (arguments, output)
    for action in kitchen.CUP_PATH[:-1]:
        worlds[0].step(action)
    assert worlds[1].step("examine shelf 1").state == first.state
    worlds[1].close()
    assert [world.step(kitchen.CUP_PATH[-1]).score for world in (worlds[0], worlds[2])] == [100.0, 0.0]
    worlds[0].close()
    worlds[2].close()


def test_engines_are_used_again_by_games_and_families(family, data):
    worlds = [family.make() for _ in range(2)]
    for world in worlds:
        world.reset(CUP, 0)
    before = loaded()
    assert before >= 2
    for world in worlds:
        world.close()
    for number in range(4):
        another = alfworld.family(data=str(data))
        world = another.make()
        assert world.reset((CUP, EGG)[number % 2], 0).text
        world.close()
        another.close()
    assert loaded() == before


def test_a_process_that_played_ends_well_and_its_arguments_are_its_own(tmp_path):
    data = kitchen.write(tmp_path)
    broken = data / "json_2.1.1" / "train" / "pick_and_place_simple-Cup-None-Shelf-1" / "trial_a" / "game.tw-pddl"
    broken.write_text(json.dumps(kitchen.game(kitchen.CUP, grammar="action")), encoding="utf-8")
    command = [sys.executable, "-c", PLAY, str(data), "--unknown"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    failed, *played = ended.stdout.splitlines()
    assert failed.startswith("alfworld/pick_and_place_simple/0: TextWorld's engine cannot play the game: ")
    assert played == ["0.0 You are at shelf 1 with nothing."] * 2 + ["exact"]


@pytest.mark.slow
def test_memory_does_not_grow_with_games(tmp_path):
    data = kitchen.write(tmp_path)
    path = data / "json_2.1.1" / "train" / "pick_and_place_simple-Cup-None-Shelf-1" / "trial_a" / "game.tw-pddl"
    environment, kept = alfworld.family(data=str(data)).make(), []
    for number in range(6 * KEPT):
        domain = f"{kitchen.DOMAIN}; game {number}"
        path.write_text(json.dumps(kitchen.game(kitchen.CUP, pddl_domain=domain)), encoding="utf-8")
        environment.reset(CUP, 0)
        assert [environment.step(action).score for action in kitchen.CUP_PATH][-1] == 100.0
        kept.append(resident_mb())
    environment.close()
    assert kept[-1] - kept[2 * KEPT] < 4.0, kept[::KEPT]


def test_a_game_that_the_engine_cannot_play_is_a_typed_failure_and_the_next_one_begins(tmp_path):
    data = kitchen.write(tmp_path)
    folder = data / "json_2.1.1" / "train" / "pick_and_place_simple-Cup-None-Shelf-1" / "trial_a"
    family = alfworld.family(data=str(data))
    environment = family.make()
    for change, problem in (
        ({"pddl_problem": "(define"}, "ParseError"),
        ({"pddl_domain": kitchen.DOMAIN.replace("(holdsAny ?a - agent)", "")}, "SystemExit: Undeclared predicate"),
        ({"grammar": "action"}, "cannot play the game"),
        ({"grammar": kitchen.GRAMMAR.replace("Your task is to:", "Do:")}, "does not say what the task is"),
        ({"grammar": kitchen.GRAMMAR.replace('"places"', '"rooms"')}, "CSGUnknownSymbolError"),
    ):
        (folder / "game.tw-pddl").write_text(json.dumps(kitchen.game(kitchen.CUP, **change)), encoding="utf-8")
        with pytest.raises(EnvError, match=rf"alfworld/pick_and_place_simple/0: .*{problem}"):
            environment.reset(CUP, 0)
        assert environment.reset(EGG, 0).text
    (folder / "game.tw-pddl").write_text("{", encoding="utf-8")
    with pytest.raises(EnvError, match="not a game"):
        environment.reset(CUP, 0)
    grammar = kitchen.GRAMMAR.replace("You shut the {r.name}.", "{r.nothing}")
    (folder / "game.tw-pddl").write_text(json.dumps(kitchen.game(kitchen.CUP, grammar=grammar)), encoding="utf-8")
    environment.reset(CUP, 0)
    environment.step("go to fridge 1")
    environment.step("open fridge 1")
    with pytest.raises(EnvError, match="cannot go on after 'close fridge 1': AttributeError"):
        environment.step("close fridge 1")
    environment.close()


def test_mistakes_name_what_is_there(family, data):
    with pytest.raises(ConfigError, match="the nearest is 'pick_and_place_simple'"):
        alfworld.family(data=str(data), tasks=["pick_and_place"])
    with pytest.raises(ConfigError, match="there are 0 to 0, 10000 to 9999, 20000 to 20000"):
        family.task(EGG.name, 7)
    with pytest.raises(ConfigError, match="says that it cannot be solved"):
        family.task(CUP.name, 1)
    with pytest.raises(ConfigError, match="train, dev, test"):
        family.tasks("valid_seen")
    with pytest.raises(EnvError, match="the nearest is"):
        family.make().reset(Task("alfworld", "nothing", 0), 0)


def test_the_check_replays_solutions_in_two_processes_and_counts_the_data(data):
    report = check(EnvConfig(name="alfworld", data=str(data)))
    assert report.good, report
    assert [(row.task, row.score, row.same) for row in report.rows] == [
        (str(CUP), 100.0, "yes"),
        (str(EGG), 100.0, "yes"),
    ]
    assert report.notes[-4:-2] == [
        f"data in {data}/json_2.1.1",
        "train: 3 games can be solved (the published set has 3,553), 1 are said not to be",
    ]


def test_the_check_says_what_is_missing(tmp_path, capsys):
    assert main(["envs", "check", "alfworld", "--env.data", str(tmp_path)]) == 2
    assert "has no games (*/*/game.tw-pddl) in train, valid_seen, valid_unseen" in capsys.readouterr().err
