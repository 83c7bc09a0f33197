"""Reflexion and Retrospex as runs: what is seen, where it ends, how it goes on after a kill; no weight changes."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from empo2_jax import assembly, baselines
from empo2_jax.checkpoint import state_hash
from empo2_jax.cli import main
from empo2_jax.config import Config
from empo2_jax.config_file import load_config
from empo2_jax.envs import toy
from empo2_jax.errors import DataError, EngineError
from empo2_jax.memory.hashing_embedder import HashingEmbedder
from empo2_jax.metrics import read_jsonl, read_metrics
from empo2_jax.rollout.base import Request
from empo2_jax.rollout.collect import Collector
from empo2_jax.rollout.reflect import AfterFailure, ScriptedTipWriter
from empo2_jax.rollout.replay import ReplayEngine
from empo2_jax.rollout.rescore import Chooser, ChoosingCollector
from empo2_jax.trained import evaluate_run
from tests.fixtures.worlds import make_collector, spoken, word_chat

ROOT = Path(__file__).parents[1]
REFLEXION = ROOT / "configs/baselines/toy_reflexion.toml"
NEEDED = {"red": 1, "green": 2}  # reflections until the scripted player knows the solution


def player(request: Request) -> str:
    """Looks into the oven until its prompt has as many reflections as its house needs."""
    text = word_chat().text(request.prompt_ids)
    house = next(name for name in NEEDED if f"{name} house" in text)
    place, room = toy.SECRETS[toy.HOUSES.index(house)]
    if text.count("score :") < NEEDED[house]:
        return "look in the oven"
    return f"try the {room}" if "the bulb was in" in text else f"look in the {place}"


def config(run_dir: Path, trials: int, repeats: int) -> Config:
    options = [f"run.dir={run_dir}", f"reflexion.trials={trials}", "env.train_variations=2", "run.tensorboard=false"]
    return load_config(REFLEXION, [*options, "evaluation.variations=2", f"evaluation.repeats={repeats}"])


def played(run_dir: Path, trials: int, repeats: int = 1, failing: str = "") -> tuple[dict[str, Any], list[str]]:
    """The record of the trials, and every prompt that was answered in this process; `failing` ids get no answer."""
    prompts: list[str] = []

    def words(request: Request) -> str:
        if failing and request.session == failing:
            raise EngineError("the server is gone")
        prompts.append(word_chat().text(request.prompt_ids))
        return player(request)

    family = toy.family(variations=2)
    collector = make_collector(ReplayEngine(spoken(word_chat(), words)), family, step_limit=3, retries=0, slots=1)
    writer = AfterFailure(ScriptedTipWriter(family))
    baselines.reflexion(config(run_dir, trials, repeats), family, collector, writer, word_chat().text)
    collector.close()
    return json.loads((run_dir / "adaptations.jsonl").read_text()), prompts


def test_a_problem_is_tried_with_its_reflections_until_it_is_solved(tmp_path: Path) -> None:
    record, prompts = played(tmp_path, trials=10)
    assert [row["scores"] for row in record["rows"]] == [[0.0, 100.0, 100.0], [0.0, 0.0, 100.0]]
    assert (record["score"], record["best_success"]) == ([0.0, 50.0, 100.0], [0.0, 0.5, 1.0])
    assert record["label"] == "test-time adaptation (sees test rewards)"
    assert len(prompts) == 2 * 3 + (2 + 3) + 2  # the red house is not tried a third time
    entry = "- the bulb is not in the oven . ( action : look in the oven ; score : 0 )"
    assert [prompt.count(entry) for prompt in prompts[6:8]] == [1, 1]
    assert all(prompt.count(entry) == 2 and "green" in prompt for prompt in prompts[-2:])


def test_a_success_writes_no_reflection(tmp_path: Path) -> None:
    played(tmp_path, trials=10)
    written = [[line["tip_written"] != "" for line in read_jsonl(tmp_path / f"episodes/{n}.jsonl")] for n in (1, 2, 3)]
    assert written == [[True, True], [False, True], [False]]


def test_an_interrupted_run_goes_on_after_its_last_trial(tmp_path: Path) -> None:
    whole, all_prompts = played(tmp_path / "whole", trials=3)
    _, first = played(tmp_path / "cut", trials=2)
    with (tmp_path / "cut/metrics.jsonl").open("a") as file:  # killed in the third one, before its end
        file.write('{"iteration": 3, "episode/score": 5.0}\n')
    rest, last = played(tmp_path / "cut", trials=3)
    assert rest == whole
    assert first + last == all_prompts
    lines = read_metrics(tmp_path / "cut")
    assert [line["episode/score"] for line in lines] == [0.0, 50.0, 100.0]
    assert [line["reflexion/tried"] for line in lines] == [2.0, 2.0, 1.0]
    assert [line["total/environment_steps"] for line in lines] == [6.0, 11.0, 13.0]


def test_repeats_are_chains_of_their_own(tmp_path: Path) -> None:
    record, prompts = played(tmp_path, trials=3, repeats=2)
    assert [row["scores"] for row in record["rows"]] == [[0.0, 100.0, 100.0], [0.0, 0.0, 100.0]]
    assert len(prompts) == 2 * (2 * 3 + (2 + 3) + 2)
    entry = "- the bulb is not in the oven . ( action : look in the oven ; score : 0 )"
    assert max(prompt.count(entry) for prompt in prompts) == 2  # none of the other repeat's reflections
    ids = [line["id"] for line in read_jsonl(tmp_path / "episodes/3.jsonl")]
    assert ids == [f"reflexion/toy/bulb/1/r{repeat}/t3" for repeat in (0, 1)]


def test_what_failed_in_the_last_trial_is_played_again(tmp_path: Path) -> None:
    whole, _ = played(tmp_path / "whole", trials=2)
    cut, _ = played(tmp_path / "cut", trials=2, failing="reflexion/toy/bulb/1/r0/t2")
    assert [row["scores"] for row in cut["rows"]] == [[0.0, 100.0], [0.0, None]] and not cut["complete"]
    rest, last = played(tmp_path / "cut", trials=2)
    assert rest == whole and rest["complete"]
    assert len(last) == 3 and all("green" in prompt for prompt in last)
    assert played(tmp_path / "cut", trials=2) == (whole, [])
    assert [line["episode/invalid"] for line in read_metrics(tmp_path / "cut")] == [0.0, 0.0]


def test_a_damaged_trial_is_named(tmp_path: Path) -> None:
    played(tmp_path, trials=1)
    (tmp_path / "trials/1.episodes").write_bytes(b"x")
    with pytest.raises(DataError, match=r"1\.episodes: no finished trial"):
        played(tmp_path, trials=1)
    played(tmp_path / "two", trials=1, repeats=2)
    with pytest.raises(DataError, match=r"1\.episodes: .*reflexion/toy/bulb/0/r1/t1 is of no problem of this run"):
        played(tmp_path / "two", trials=1)


def guesser(request: Request) -> str:
    """Looks anywhere, then tries any room, as the request's key has it."""
    rng = np.random.default_rng(request.key.astype(np.uint64))
    if "the bulb was in" in word_chat().text(request.prompt_ids):
        return f"try the {rng.choice(toy.ROOMS)}"
    return f"look in the {rng.choice(toy.PLACES)}"


def test_the_critic_finds_what_the_policy_only_guesses(tmp_path: Path) -> None:
    options = [f"run.dir={tmp_path}", "run.tensorboard=false", "env.train_variations=2", "run.iterations=2"]
    options += ["rollout.tasks_per_iteration=2", "rollout.group_size=4", "retrospex.gold=2", "retrospex.updates=400"]
    options += [
        "retrospex.learning_rate=3e-3",
        "retrospex.hidden_size=32",
        "retrospex.limit=0.0",
        "retrospex.decay=0.0",
    ]
    settings = load_config(ROOT / "configs/baselines/toy_retrospex.toml", [*options, "evaluation.repeats=2"])
    asked: list[Request] = []

    def words(request: Request) -> str:
        asked.append(request)
        return guesser(request)

    family, engine = toy.family(variations=2), ReplayEngine(spoken(word_chat(), words))

    def run() -> tuple[float, float]:
        plain = make_collector(engine, family, step_limit=3)
        embed = HashingEmbedder(64).embed
        found = baselines.retrospex(settings, family, plain, choosing, embed, word_chat().text)
        plain.close()
        return found[0].score, found[1].score

    def choosing(chooser: Chooser) -> Collector:
        return make_collector(engine, family, step_limit=3, one=partial(ChoosingCollector, chooser, 30))

    guessed, chosen = run()
    assert guessed < 40 < 60 < chosen  # the first action is the policy's alone: λ = 1
    facts = json.loads((tmp_path / "critic.json").read_text())
    rounds = [record for number in (1, 2) for record in read_jsonl(tmp_path / f"episodes/{number}.jsonl")]
    assert (facts["episodes"], len(facts["losses"])) == (2 * 2 * 4 + 2, 400)
    assert facts["transitions"] == sum(len(record["steps"]) for record in rounds) + 2 * 2
    before, lines = len(asked), read_metrics(tmp_path)
    assert run() == (guessed, chosen)  # rounds that are there are not played again
    assert len(asked) - before < before
    assert read_metrics(tmp_path) == lines
    assert [line["label"] for line in read_jsonl(tmp_path / "evaluations.jsonl")] == ["start", "end"]


@pytest.mark.medium
def test_no_weight_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    hashes: list[str] = []
    policies: list[assembly.Policy] = []
    load = assembly.load_policy

    def watched(*arguments: Any) -> assembly.Policy:
        policies.append(load(*arguments))
        hashes.append(state_hash(policies[-1].params))
        return policies[-1]

    monkeypatch.setattr(assembly, "load_policy", watched)
    arguments = ["train", str(REFLEXION), "--run.dir", str(tmp_path / "run"), "--run.tensorboard", "false"]
    small = ["--reflexion.trials", "2", "--env.train_variations", "2", "--evaluation.repeats", "1"]
    assert main([*arguments, *small]) == 0
    assert [state_hash(policy.params) for policy in policies] == hashes
    assert len(hashes) == 1
    lines = read_metrics(tmp_path / "run")
    assert [line["actor/updates"] for line in lines] == [0.0, 0.0]
    assert all(line["total/tip_calls"] > 0 for line in lines)
    assert (tmp_path / "run/report.html").is_file()
    assert not (tmp_path / "run/evaluations.jsonl").read_text()  # adaptation is no evaluation
    refused(capsys, [*arguments, *small, "--resume", "never"], "has results; use --resume auto or another run.dir")
    refused(capsys, [*arguments, *small, "--reflexion.kept", "1"], "reflexion.kept = 3, now it is 1")
    refused(capsys, [*arguments, *small, "--resume", "x/1"], "--resume x/1: auto or never is allowed for reflexion")


@pytest.mark.medium
def test_a_run_of_retrospex_is_evaluated_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    arguments = ["train", str(ROOT / "configs/baselines/toy_retrospex.toml"), "--run.dir", str(run)]
    arguments += ["--run.iterations", "0", "--retrospex.gold", "4", "--retrospex.updates", "50"]
    arguments += ["--evaluation.repeats", "1", "--evaluation.temperature", "1.0", "--run.tensorboard", "false"]
    assert main(arguments) == 0
    _, ended = read_jsonl(run / "evaluations.jsonl")
    moved = run.rename(tmp_path / "moved")
    record = evaluate_run(moved)
    assert (record["rows"], record["score"]) == (ended["rows"], ended["score"])
    refused(capsys, ["evaluate", str(moved), "--step", "1"], "--step 1: a run of retrospex has one critic and no")
    refused(capsys, ["checkpoint", "hash", str(moved)], "a run of retrospex trains no policy and has no checkpoints")
    (moved / "critic.npz").write_bytes(b"PK")
    refused(capsys, ["evaluate", str(moved)], "critic.npz: not a critic")


def refused(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], message: str) -> None:
    capsys.readouterr()
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
