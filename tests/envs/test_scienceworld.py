import os
import signal
import threading
import time
from pathlib import Path

import pytest

from empo2_jax.config_file import load_config
from empo2_jax.envs import actions, scienceworld, scienceworld_text
from empo2_jax.envs.pool import Pool
from empo2_jax.envs.scienceworld_demos import KINDS, GoldPaths
from empo2_jax.envs.scienceworld_jvm import DETERMINISTIC_FLAGS, LEAN_FLAGS, Jvm
from empo2_jax.envs.scienceworld_tasks import PAPER_TASKS, TASKS, lookup
from empo2_jax.errors import ConfigError, EnvError
from empo2_jax.rollout.collect import Assignment
from empo2_jax.rollout.openings import check_openings
from empo2_jax.rollout.replay import ReplayEngine
from empo2_jax.types import Task
from tests.fixtures.processes import alive
from tests.fixtures.worlds import make_collector, spoken, word_chat

ROOT = Path(__file__).parents[2]

FIND = Task("scienceworld", "find-non-living-thing", 3)
POWER = Task("scienceworld", "power-component", 1)
MELT = Task("scienceworld", "melt", 0)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMPO2_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def family():
    tasks = ["4-2", "power-component"]
    family = scienceworld.family(tasks=tasks, variations={"train": 5}, simplification="easy", deterministic=True)
    yield family
    family.close()


@pytest.fixture(scope="session")
def demonstrations(family):
    return family.demonstrations("train", 8, seed=0)


@pytest.fixture
def environment(family):
    environment = family.make()
    yield environment
    environment.close()


def own_pool(timeout_s: float = 60.0) -> tuple[Pool, list[Jvm]]:
    """A pool whose simulators are known to the test."""
    started: list[Jvm] = []

    def start() -> Jvm:
        started.append(Jvm(LEAN_FLAGS, timeout_s))
        return started[-1]

    return Pool(start, size=1), started


def test_tasks_by_three_names():
    assert lookup("1-2") is lookup("melt") is lookup("22")
    assert len({task.index for task in TASKS}) == 30
    assert sorted(task.name for task in TASKS) == [task.name for task in sorted(TASKS, key=lambda task: task.index)]
    assert list(lookup("melt").split("test")) == list(range(21, 30))
    with pytest.raises(ConfigError, match="find-non-living-thing"):
        lookup("find-nonliving-thing")


def test_family_validates_its_arguments():
    family = scienceworld.family(tasks=["melt"], variations={"train": 5, "test": [21, 22]})
    assert [task.variation for task in family.tasks("train")] == [0, 1, 2, 3, 4]
    assert [task.variation for task in family.tasks("test")] == [21, 22]
    assert len(family.tasks("dev")) == 7
    every = [task for split in ("train", "dev", "test") for task in scienceworld.family(tasks=["9-2"]).tasks(split)]
    assert len(set(every)) == len(every) == 1386
    for wrong in (
        {"tasks": []},
        {"tasks": ["melt"], "variations": {"valid": 1}},
        {"tasks": ["melt"], "simplification": "harder"},
        {"tasks": ["power-component"], "simplification": "noElectricalAction"},
        {"tasks": ["melt"], "workers": 0},
    ):
        with pytest.raises(ConfigError):
            scienceworld.family(**wrong)
    with pytest.raises(ConfigError, match="21 to 29"):
        scienceworld.family(tasks=["melt"], variations={"test": [3]})
    with pytest.raises(ConfigError, match="train, dev, test"):
        family.tasks("valid")


def test_compact_keeps_the_words():
    text = "In it, you see: \n\tthe agent\n\tan axe\nYou also see:\n\tA door to the hall (that is open)\n"
    assert scienceworld_text.compact(text) == (
        "In it, you see: the agent; an axe\nYou also see: A door to the hall (that is open)"
    )


def test_java_exceptions_are_told_from_replies():
    assert scienceworld_text.crashed("java.lang.NullPointerException: null\n\tat scala.Option.get")
    assert not scienceworld_text.crashed("An error: the exception proves the rule.")


def test_tips_by_rule_are_true():
    steps = [("look around", "A room."), ("open dragon", "No known action matches that input."), ("go to hall", "You")]
    assert scienceworld_text.scripted_tip([], 0.0) == ""
    tip = scienceworld_text.scripted_tip(steps, 13.0)
    assert '"go to hall"' in tip and '"open dragon"' in tip and "score 13" in tip and "\n" not in tip
    assert "focus on something else" in scienceworld_text.scripted_tip([("focus on air", "You focus")], -100.0)


def test_gold_paths_reach_100_and_demonstrations_tell_it(demonstrations):
    assert len(demonstrations) == 8
    for number, chat in enumerate(demonstrations):
        assert [message.role for message in chat] == ["user", "assistant"] * (len(chat) // 2)
        kind = KINDS[number % len(KINDS)]
        assert ("score of 100 out of 100" in chat[-2].content) == (kind != "exploration")
        turns = [message.content for message in chat[:-2:2]]
        assert [turn.count("do the same again") for turn in turns] == [kind == "tips"] * len(turns)
        assert "Tips from earlier episodes" not in chat[-2].content
        assert len(chat[-1].content.split()) < 100
        assert "\n" not in chat[-1].content


def test_tips_of_demonstrations_are_the_last_entry_of_an_earlier_success(demonstrations):
    for chat in demonstrations[2::4]:
        *actions, tip = [message.content for message in chat if message.role == "assistant"]
        assert all(turn.content.endswith(f"- {tip} (action : {actions[-1]} ; score : 100 )") for turn in chat[:-2:2])


def test_kinds_of_demonstrations_take_turns_and_shift_with_every_round(family):
    """Ten problems: the eleventh chat is of the first problem again, in the other kind."""
    chats = family.demonstrations("train", 12, 0, ("tips", "exploration"))
    with_tips = ["do the same again" in chat[0].content for chat in chats]
    assert with_tips == [True, False] * 5 + [False, True]
    goals = [chat[0].content.partition("Tips from")[0].strip() for chat in chats]
    assert goals[10:] == goals[:2] and len(set(goals)) == 10


def test_demonstrations_are_repeatable(family, demonstrations):
    again = family.demonstrations("train", 3, seed=0)
    assert [[message.content for message in chat if message.role == "assistant"] for chat in again] == [
        [message.content for message in chat if message.role == "assistant"] for chat in demonstrations[:3]
    ]


def test_rewards_are_score_differences_and_done_is_final(environment, demonstrations):
    environment.reset(FIND, 0)
    path = GoldPaths("easy")
    seen = [environment.step(action) for action in path.actions(FIND)]
    path.close()
    last = next(observation for observation in seen if observation.done)
    assert last.score == 100.0 and last.success
    assert sum(observation.reward for observation in seen) == 100.0
    after = environment.step("focus on air")
    assert (after.done, after.reward, after.score) == (True, 0.0, 100.0)


def test_an_impossible_focus_gives_0(environment):
    environment.reset(POWER, 0)
    observation = environment.step("focus on dragon")
    assert (observation.reward, observation.done, observation.resolution) == (0.0, False, "invalid")


def test_reset_task_does_not_reach_the_simulator(environment):
    environment.reset(FIND, 0)
    observation = environment.step("Reset task.")
    assert (observation.resolved, observation.resolution) == ("", "invalid")
    assert "reset" not in observation.text
    assert "reset task" not in environment.admissible_actions()


def test_resolutions_are_recorded(environment):
    environment.reset(FIND, 0)
    assert environment.step("Look around").resolution == "exact"
    assert environment.step("examine the agent").resolution == "engine"
    assert environment.step("sing a song").resolution == "invalid"


def test_a_variation_out_of_range_names_the_range(environment):
    with pytest.raises(EnvError, match="0 to 299"):
        environment.reset(Task("scienceworld", "find-non-living-thing", 300), 0)
    with pytest.raises(EnvError, match="0 to 299"):
        environment.reset(Task("scienceworld", "find-non-living-thing", -1), 0)
    with pytest.raises(EnvError, match="before a reset"):
        environment.step("look around")


def test_odd_input_is_refused_politely(environment):
    environment.reset(FIND, 0)
    for text in ("", "\x00\x01", "x" * 100_000, "öffne die Tür", "100 % {curly} $dollar"):
        assert environment.step(text).resolution == "invalid"


def stepped(environment, actions: list[str]):
    return [environment.step(action) for action in actions]


WALK = ["go to hallway", "look around", "go to kitchen"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_episode_of_a_dead_or_hung_simulator_goes_on_in_a_new_one(how):
    pool, started = own_pool(timeout_s=8.0)
    environment = scienceworld.ScienceWorldEnvironment(pool, "easy")
    environment.reset(FIND, 0)
    undisturbed = stepped(environment, [*WALK, "inventory"])
    environment.reset(FIND, 0)
    stepped(environment, WALK)
    os.kill(started[0].pid, how)
    time.sleep(0.5)  # a busy machine stops its threads one by one: an answer may still slip out
    before = time.monotonic()
    assert environment.step("inventory") == undisturbed[-1]
    assert time.monotonic() - before < 40.0
    assert len(started) == 2
    assert pool.events["episodes recovered"] == 1
    pids = [jvm.pid for jvm in started]
    pool.close()
    assert not any(map(alive, pids))


def test_a_replay_that_differs_is_a_typed_failure_and_the_next_episode_starts():
    pool, started = own_pool()
    environment = scienceworld.ScienceWorldEnvironment(pool, "easy")
    environment.reset(FIND, 0)
    environment.step("look around")
    environment._sent[0] = environment._sent[0]._replace(reply="another room")
    os.kill(started[0].pid, signal.SIGKILL)
    with pytest.raises(EnvError, match=r"find-non-living-thing/3: .*not recovered: .*'look around'"):
        environment.step("inventory")
    assert pool.events["episodes lost"] == 1
    assert environment.reset(FIND, 0).score == 0.0
    assert all(not jvm.usable for jvm in started[:-1])
    pool.close()


def test_close_during_a_call_kills_the_simulator_whose_answer_would_reach_another_episode():
    pool, started = own_pool()
    environment = scienceworld.ScienceWorldEnvironment(pool, "easy")
    environment.reset(FIND, 0)
    os.kill(started[0].pid, signal.SIGSTOP)
    failures = []

    def step() -> None:
        try:
            environment.step("look around")
        except EnvError as error:
            failures.append(str(error))

    thread = threading.Thread(target=step)
    thread.start()
    time.sleep(0.3)
    environment.close()
    thread.join(timeout=20.0)
    assert not thread.is_alive()
    assert failures and "closed" in failures[0]
    assert len(started) == 1 and not started[0].usable
    pool.close()


def test_the_two_causes_of_minus_100_are_told_apart(environment, family):
    environment.reset(POWER, 0)
    seen = environment.step("focus on agent")
    assert (seen.score, seen.done) == (-100.0, True)
    assert family.pool.events["wrong focus"] >= 1
    environment.reset(POWER, 0)
    environment._jvm.step = lambda action: ("java.lang.NullPointerException: null", -100, True)
    with pytest.raises(EnvError, match="exception in the simulator after 'wait'"):
        environment.step("wait")
    assert family.pool.events["exceptions in the simulator"] == 1


def test_what_the_correction_of_the_released_code_costs():
    family = scienceworld.family(tasks=["power-component"], simplification="easy", resolution="released-code")
    environment = family.make()
    environment.reset(POWER, 0)
    seen = environment.step("focus on dragon")  # our rule: 0 points, see test_an_impossible_focus_gives_0
    assert seen.resolution == "similar" and seen.resolved.startswith("focus on ") and seen.resolved != "focus on dragon"
    assert (seen.score, seen.done) == (-100.0, True)
    family.close()


def test_a_misspelled_harmless_action_is_corrected_and_a_misspelled_focus_is_not(environment):
    environment.reset(POWER, 0)
    seen = environment.step("look arround")
    assert (seen.resolved, seen.resolution) == ("look around", "similar")
    focus = max((a for a in environment.admissible_actions() if a.startswith("focus on ")), key=len)
    seen = environment.step(focus + "s")
    assert (seen.resolution, seen.score, seen.done) == ("invalid", 0.0, False)


def test_a_choice_is_understood_by_number_or_by_text(environment):
    for answer in ("0", None):
        environment.reset(FIND, 0)
        asked = environment.step("open door")
        offered = actions.options(asked.text)
        assert offered and asked.resolution in ("exact", "engine")
        seen = environment.step(answer or offered["0"])
        assert (seen.resolved, seen.resolution) == ("0", "choice")
        assert seen.text == "The door is already open."


def test_a_score_before_the_first_step_is_never_read(environment):
    environment.reset(POWER, 0)
    environment.step("focus on agent")
    assert environment.reset(FIND, 0).score == 0.0
    assert environment.step("look around").score >= 0.0


def test_points_for_where_the_agent_begins_come_with_the_first_step_as_in_the_package(environment):
    environment.reset(Task("scienceworld", "power-component", 0), 0)
    seen = environment.step("go to workshop")
    assert (seen.text.strip(), seen.score, seen.reward) == ("You move to the workshop.", 13.0, 13.0)


def test_an_episode_has_exactly_the_configured_steps(family):
    said = spoken(word_chat(), lambda request: "look in the drawer")
    collector = make_collector(ReplayEngine(said), family, step_limit=7, max_length=100_000)
    (episode,) = collector.collect([Assignment("one", FIND)], temperature=1.0)
    collector.close()
    assert (len(episode.steps), str(episode.stop_reason)) == (7, "step_limit")


def test_worked_examples_are_in_the_first_turn_and_their_length_is_checked_against_the_budget():
    family = scienceworld.family(tasks=["4-2"], variations={"train": 2}, simplification="easy", examples=1)
    environment = family.make()
    observation = environment.reset(FIND, 0)
    turn = family.first_turn(environment.goal, observation.text)
    assert turn.count("Solved before: Your task is to find") == 1 and "focus on" in turn.split("Task:")[0]
    tasks = family.tasks("train")
    check_openings(family, word_chat(), tasks, max_length=100_000, max_action_tokens=32)
    with pytest.raises(ConfigError, match=r"first turn of scienceworld/find-non-living-thing/0 has \d+ tokens.* = 300"):
        check_openings(family, word_chat(), tasks, max_length=300, max_action_tokens=32)
    family.close()


def test_presets_name_the_tasks_of_the_paper_and_of_the_released_code():
    paper = load_config(ROOT / "configs/presets/scienceworld_paper18.toml")
    assert paper.env.tasks == PAPER_TASKS and len(PAPER_TASKS) == 18 and paper.env.step_limit == 30
    assert paper.env.resolution == "ours"
    released = load_config(ROOT / "configs/presets/scienceworld_released.toml")
    assert released.env.tasks == tuple(task.name for task in TASKS if task.step_limit)
    assert (released.env.step_limit, released.env.resolution) == (31, "released-code")


def transcripts(episodes: int, path: list[str]) -> list[list[str]]:
    """What melt says in each of some episodes of one deterministic simulator."""
    pool = Pool(lambda: Jvm(LEAN_FLAGS + DETERMINISTIC_FLAGS), size=1)
    environment = scienceworld.ScienceWorldEnvironment(pool, "easy")
    said = []
    for _ in range(episodes):
        environment.reset(MELT, 0)
        said.append([f"{seen.text}{seen.score}{seen.state}" for seen in map(environment.step, path)])
    pool.close()
    return said


@pytest.mark.slow
def test_deterministic_simulators_agree_across_processes_and_episodes():
    gold = GoldPaths("easy")
    path = gold.actions(MELT)
    gold.close()
    first, *others = transcripts(3, path) + transcripts(2, path)
    assert all(other == first for other in others)


def test_gold_paths_keep_their_time_where_things_grow():
    family = scienceworld.family(tasks=["8-2"], simplification="easy", deterministic=True)
    task = family.task("8-2", 0)
    environment = family.make()
    environment.reset(task, 0)
    path = family.solution(task)
    assert any(action.startswith("open door") for action in path)
    seen = next((seen for seen in map(environment.step, path) if seen.done), None)
    assert seen is not None and seen.score == 100.0
    family.close()


@pytest.mark.slow
def test_a_simulator_keeps_its_memory_over_1000_episodes():
    pool, started = own_pool()
    environment = scienceworld.ScienceWorldEnvironment(pool, "easy")
    resident = []
    for number in range(1000):
        environment.reset(Task("scienceworld", "find-non-living-thing", number % 300), 0)
        stepped(environment, ["look around", "go to hallway", "focus on agent"])
        resident.append(started[-1].resident_mb)
    environment.close()
    assert len(started) <= 2
    assert max(resident[50:]) <= 130.0
    assert sum(resident[-100:]) <= 1.1 * sum(resident[100:200])
    pool.close()
