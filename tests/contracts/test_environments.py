"""What every module of `envs/` that offers `family` must keep; modules are found, not listed."""

import gc
import importlib
import itertools
import math
import os
import pkgutil
import random
import threading
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

import empo2_jax.envs
from empo2_jax.bench.processes import children, descriptors
from empo2_jax.envs.base import Environment, EnvironmentFamily
from empo2_jax.envs.gymnasium import GymnasiumFamily
from empo2_jax.errors import ConfigError, EnvError
from tests.fixtures import kitchen

# Arguments with which a family is small; modules not named here must work without any.
ARGUMENTS = {
    "scienceworld": {
        "tasks": ["find-non-living-thing"],
        "variations": {"train": 3, "dev": 1, "test": 1},
        "simplification": "easy",
        "deterministic": True,
        "workers": 1,
    },
    "textworld": {"train": 2, "dev": 1, "test": 1},
}
STEPS = 6


class Doors:
    """A world of Gymnasium's form: three doors, the one of the seed leads out."""

    def reset(self, *, seed=None):
        self.right = f"door {seed % 3}"
        return "Three doors.", {"goal": "leave", "admissible_actions": ["door 2", "door 0", "door 1"]}

    def step(self, action):
        known = {"admissible_actions": ["door 2", "door 0", "door 1"]}
        out = action == self.right
        return ("Outside." if out else "Three doors, still."), float(out), out, False, known

    def close(self):
        pass


def doors(folder: Path) -> EnvironmentFamily:
    return GymnasiumFamily("doors", {"three": Doors}, splits={"train": 3, "dev": 1, "test": 1})


def families() -> list:
    """Modules with `family`; those that need an extra are skipped where it is missing."""
    found = [pytest.param(doors, id="gymnasium")]
    for name in [module.name for module in pkgutil.iter_modules(empo2_jax.envs.__path__)]:
        module = importlib.import_module(f"empo2_jax.envs.{name}")
        if "family" in vars(module):
            found.append(pytest.param(partial(made, module), id=name))
    return found


def made(module: ModuleType, folder: Path) -> EnvironmentFamily:
    name = module.__name__.rpartition(".")[2]
    arguments = {"data": str(kitchen.write(folder))} if name == "alfworld" else ARGUMENTS.get(name, {})
    return module.family(**arguments)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMPO2_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=families())
def make(request):
    """A function that makes the family with its data in a folder."""
    return request.param


@pytest.fixture(scope="module")
def family(make, tmp_path_factory):
    try:
        family = make(tmp_path_factory.mktemp("data"))
    except EnvError as error:
        if "textworld" not in str(error):  # the worlds outside the default extras
            raise
        pytest.skip(str(error))
    yield family
    family.close()
    family.close()


@pytest.fixture
def environment(family):
    environment = family.make()
    yield environment
    environment.close()
    environment.close()


def play(family, environment, count: int = STEPS):
    """An episode of admissible actions, spread over the sorted list."""
    seen = [environment.reset(family.tasks("train")[0], 7)]
    for number in range(count):
        if seen[-1].done:
            break
        admissible = environment.admissible_actions()
        seen.append(environment.step(admissible[(number * 37) % len(admissible)]))
    return seen


def test_splits_are_named_and_stable(family):
    splits = {split: family.tasks(split) for split in ("train", "dev", "test")}
    assert splits["train"]
    assert splits["train"] == family.tasks("train")
    everything = [task for tasks in splits.values() for task in tasks]
    assert {task.env for task in everything} == {family.name}
    assert all(len(set(tasks)) == len(tasks) for tasks in splits.values())


def test_it_is_what_the_protocols_say(family, environment):
    assert isinstance(family, EnvironmentFamily)
    assert isinstance(environment, Environment)


def test_a_problem_is_found_by_name_and_number(family):
    for split in ("train", "dev", "test"):
        for task in family.tasks(split):
            assert family.task(task.name, task.variation) == task
    for name, number in ((family.tasks("train")[0].name, 10**6), (family.tasks("train")[0].name, -1), ("nothing", 0)):
        with pytest.raises(ConfigError):
            family.task(name, number)


def test_a_known_solution_reaches_the_full_score(family, environment):
    task = family.tasks("train")[0]
    path = family.solution(task)
    seen = [environment.reset(task, 0)]
    for action in path:
        if not seen[-1].done:
            seen.append(environment.step(action))
    assert not path or (seen[-1].score, seen[-1].success, seen[-1].done) == (family.max_score, True, True)


def test_same_seed_same_transcript(family, environment):
    first = play(family, environment)
    assert environment.goal
    assert play(family, environment) == first


def test_rewards_are_finite_differences_of_a_bounded_score(family, environment):
    seen = play(family, environment)
    assert seen[0].reward == 0.0
    assert not seen[0].done
    for before, after in itertools.pairwise(seen):
        assert math.isfinite(after.reward)
        assert after.reward == pytest.approx(after.score - before.score)
        assert after.score <= family.max_score
        assert after.text and after.state


def test_admissible_actions_are_sorted_and_accepted(family, environment):
    environment.reset(family.tasks("train")[0], 0)
    admissible = list(environment.admissible_actions())
    assert admissible == sorted(admissible)
    for action in admissible[:: max(1, len(admissible) // 5)]:
        environment.reset(family.tasks("train")[0], 0)
        assert environment.step(action).resolution != "invalid"


def test_nonsense_is_an_ordinary_observation(family, environment):
    environment.reset(family.tasks("train")[0], 0)
    for text in ("", "fly to the moon", "\x00", "x" * 10_000, "two\nlines"):
        observation = environment.step(text)
        assert observation.resolution == "invalid"
        assert math.isfinite(observation.reward)


def ending(family, environment):
    """The last observation of an episode that ended: by a demonstration, else by admissible actions drawn at random."""
    task = family.tasks("train")[0]
    for chat in family.demonstrations("train", 1, 0):
        for task in family.tasks("train"):
            environment.reset(task, 0)
            for message in chat:
                if message.role == "assistant" and (seen := environment.step(message.content)).done:
                    return seen
    rng = random.Random(0)
    for _ in range(1000):
        environment.reset(task, 0)
        for _ in range(30):
            if (seen := environment.step(rng.choice(environment.admissible_actions()))).done:
                return seen
    pytest.fail("no episode ended")


def test_done_is_final(family, environment):
    last = ending(family, environment)
    try:
        after = environment.step("look around")
    except EnvError:
        return  # refusing is as final
    assert (after.done, after.reward, after.score, after.success) == (True, 0.0, last.score, last.success)


def test_prompts_are_text_and_keys_differ_by_state(family, environment):
    observation = environment.reset(family.tasks("train")[0], 0)
    assert environment.goal in family.first_turn(environment.goal, observation.text)
    assert family.next_turn(observation.text)
    assert "over and out" in family.tip_request("over and out", 0.0)
    assert family.memory_key("goal", "here") != family.memory_key("goal", "there")
    assert isinstance(family.system_prompt(), str)


def test_demonstrations_alternate_and_are_repeatable(family):
    chats = family.demonstrations("train", 3, 1)
    assert chats == family.demonstrations("train", 3, 1)
    for chat in chats:
        roles = [message.role for message in chat if message.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_demonstrations_can_be_limited_to_each_of_their_kinds(family):
    made = {kind: family.demonstrations("train", 2, 1, (kind,)) for kind in family.demonstration_kinds}
    assert all(len(chats) == 2 for chats in made.values())
    assert len({str(chats) for chats in made.values()}) == len(family.demonstration_kinds)


def test_close_at_any_time_is_safe_and_the_next_episode_is_whole(family):
    expected = None
    for wait in (0.0, 0.005, 0.03):
        environment, stopped = family.make(), []
        environment.reset(family.tasks("train")[0], 0)

        def step_on(environment=environment, stopped=stopped) -> None:
            try:
                for _ in range(400):
                    if environment.step("look around").done:
                        break
            except EnvError as error:
                stopped.append(error)

        thread = threading.Thread(target=step_on)
        thread.start()
        time.sleep(wait)
        environment.close()
        thread.join(timeout=60.0)
        assert not thread.is_alive()
        fresh = family.make()
        transcript = play(family, fresh)
        fresh.close()
        expected = expected or transcript
        assert transcript == expected


def held() -> tuple[set[int], int, int]:
    """Child processes, open files and threads of this process."""
    return set(children(os.getpid())), descriptors(os.getpid()), threading.active_count()


def test_close_releases_processes_files_and_threads(make, family, environment, tmp_path):
    task = family.tasks("train")[0]
    environment.reset(task, 7)  # what the world loads once for all is there
    before = held()
    other = make(tmp_path)
    busy, idle = other.make(), other.make()
    for one in (busy, idle):
        one.reset(task, 7)
    idle.close()
    other.close()  # with an episode open
    busy.close()
    del other, busy, idle, one  # mapped files last as long as what reads them
    gc.collect()
    deadline = time.monotonic() + 20.0
    while (after := held()) and (not after[0] <= before[0] or after[1] > before[1] or after[2] > before[2]):
        assert time.monotonic() < deadline, (before, after)
        time.sleep(0.05)
