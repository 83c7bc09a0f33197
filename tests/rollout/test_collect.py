"""The collector against a scripted engine: prompts, limits, failures, order, and what memory sees of it."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from empo2_jax.envs import toy
from empo2_jax.errors import EngineError
from empo2_jax.memory.hashing_embedder import HashingEmbedder
from empo2_jax.randomness import words
from empo2_jax.rollout import collect
from empo2_jax.rollout.collect import Assignment
from empo2_jax.rollout.reflect import ScriptedTipWriter
from empo2_jax.rollout.replay import ReplayEngine
from empo2_jax.types import Episode, Message, Mode, StopReason
from tests.fixtures.worlds import (
    CorridorFamily,
    babble,
    corridor,
    empty_memory,
    make_collector,
    remember,
    spoken,
    word_chat,
    word_tokenizer,
)

TIPS_WORD = "earlier"  # stands in every block of tips and nowhere else


def run(
    family: Any,
    assignments: list[Assignment],
    *,
    script: Any = None,
    memory: Any = None,
    writer: Any = None,
    **how: Any,
) -> list[Episode]:
    engine = ReplayEngine(script or babble(word_chat()))
    collector = make_collector(engine, family, **how)
    try:
        return collector.collect(assignments, temperature=1.0, memory=memory, writer=writer)
    finally:
        collector.close()


def taught(steps: int) -> Any:
    """A memory with tips for every view of the corridor."""
    memory = empty_memory()
    first = run(CorridorFamily(steps), [Assignment("teacher", corridor())], step_limit=steps)
    remember(memory, [dataclasses.replace(first[0], tip="the bulb is in the vase .")])
    return memory


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 30])
def test_bare_ids_of_an_off_policy_episode_are_those_of_the_episode_without_memory(steps: int):
    memory = taught(steps)
    # the same id draws the same answers, whatever the prompt says
    tipped, plain = (
        run(CorridorFamily(steps), [Assignment("i0/g0/e0", corridor(), mode)], memory=memory)[0]
        for mode in (Mode.OFF_POLICY, Mode.ON_POLICY)
    )
    assert len(tipped.steps) == len(plain.steps) == steps
    (tip_id,) = word_tokenizer().encode(TIPS_WORD)
    for number, (off, on) in enumerate(zip(tipped.steps, plain.steps, strict=True)):
        assert off.action_ids.tolist() == on.action_ids.tolist()
        assert off.bare_prompt_ids.tolist() == on.bare_prompt_ids.tolist() == on.prompt_ids.tolist()
        assert off.tips and not on.tips
        assert off.prompt_ids.tolist().count(tip_id) == number + 1  # one block per turn, all of them stay
        assert tip_id not in off.bare_prompt_ids


def test_bare_ids_are_the_templates_rendering_of_the_messages_without_tips():
    steps = 30
    said = spoken(word_chat(), lambda request: f"look in the {toy.PLACES[int(request.key[0]) % 16]}")
    memory = taught(steps)
    (episode,) = run(CorridorFamily(steps), [Assignment("a", corridor(), Mode.OFF_POLICY)], memory=memory, script=said)
    messages: list[Message] = []
    for number, step in enumerate(episode.steps):
        text = f"{episode.goal} {step.observation}" if number == 0 else step.observation
        messages.append(Message("user", text))
        rendered = word_tokenizer().encode(word_tokenizer().chat_text(messages, True))
        assert step.bare_prompt_ids.tolist() == rendered
        messages.append(Message("assistant", step.action))
    assert episode.steps[0].prompt_ids.tolist() != episode.steps[0].bare_prompt_ids.tolist()


@pytest.mark.parametrize("mode", list(Mode))
def test_both_prompts_are_append_only(mode: Mode):
    (episode,) = run(CorridorFamily(6), [Assignment("a", corridor(), mode)], memory=taught(6))
    for before, after in zip(episode.steps, episode.steps[1:], strict=False):
        for name in ("prompt_ids", "bare_prompt_ids"):
            past = np.concatenate([getattr(before, name), before.action_ids])
            assert getattr(after, name)[: len(past)].tolist() == past.tolist()


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_tips_in_the_newest_turn_leave_the_bare_prompt_alone_and_branch_off_it(steps: int):
    memory = taught(steps)
    tipped, plain = (
        run(CorridorFamily(steps), [Assignment("i0/g0/e0", corridor(), mode)], memory=memory, placement="latest")[0]
        for mode in (Mode.OFF_POLICY, Mode.ON_POLICY)
    )
    assert len(tipped.steps) == len(plain.steps) == steps
    (tip_id,) = word_tokenizer().encode(TIPS_WORD)
    past, cut = 0, 0
    for off, on in zip(tipped.steps, plain.steps, strict=True):
        assert off.action_ids.tolist() == on.action_ids.tolist()
        assert off.bare_prompt_ids.tolist() == on.bare_prompt_ids.tolist() == on.prompt_ids.tolist()
        assert off.tips
        assert off.prompt_ids.tolist().count(tip_id) == 1
        assert tip_id not in off.bare_prompt_ids
        assert off.cached_tokens == cut  # rolled back to where the tips of the turn before began
        cut = int(np.argmin(off.bare_prompt_ids == off.prompt_ids[: len(off.bare_prompt_ids)]))
        assert cut > past  # the observation of the turn comes before its tips
        past = len(off.bare_prompt_ids) + len(off.action_ids)


def test_placements_differ_in_nothing_but_the_tips_of_earlier_turns():
    memory = taught(3)
    history, latest = (
        run(CorridorFamily(3), [Assignment("a", corridor(), Mode.OFF_POLICY)], memory=memory, placement=placement)[0]
        for placement in ("history", "latest")
    )
    assert history.steps[0].prompt_ids.tolist() == latest.steps[0].prompt_ids.tolist()
    for old, new in zip(history.steps, latest.steps, strict=True):
        assert old.bare_prompt_ids.tolist() == new.bare_prompt_ids.tolist()
        assert old.tips == new.tips
    empty = [
        run(
            CorridorFamily(3),
            [Assignment("a", corridor(), Mode.OFF_POLICY)],
            memory=empty_memory(),
            placement=placement,
        )
        for placement in ("history", "latest")
    ]
    for (one,), (other,) in [empty]:
        assert [s.prompt_ids.tolist() for s in one.steps] == [s.prompt_ids.tolist() for s in other.steps]


@pytest.mark.parametrize(("limit", "reason"), [(1, "step_limit"), (4, "step_limit"), (5, "done"), (9, "done")])
def test_an_episode_has_exactly_the_allowed_steps(limit: int, reason: str):
    (episode,) = run(CorridorFamily(5), [Assignment("a", corridor())], step_limit=limit)
    assert (len(episode.steps), episode.stop_reason) == (min(limit, 5), reason)
    assert episode.score == episode.extrinsic_return == min(limit, 5)
    assert episode.success == (limit >= 5)


def test_steps_record_what_was_seen_sampled_and_reached():
    said = spoken(word_chat(), lambda request: "look in the vase")
    (episode,) = run(CorridorFamily(2), [Assignment("a", corridor())], script=said)
    first, second = episode.steps
    assert (first.observation, first.state, first.action) == (
        f"the {toy.PLACES[0]} is empty .",
        f"the {toy.PLACES[1]} is empty .",
        "look in the vase",
    )
    assert second.observation == first.state
    assert first.action_ids.tolist() == word_chat().answer("look in the vase").tolist()
    assert first.behavior_logprobs.tolist() == [-0.5] * 5
    assert not first.truncated
    assert first.memory_key == f"{episode.goal} {first.observation}"
    assert second.cached_tokens == len(first.prompt_ids) + len(first.action_ids)


def test_episodes_come_in_the_order_of_the_assignments_and_do_not_depend_on_the_wave():
    assignments = [Assignment(f"i0/g{n % 2}/e{n // 2}", corridor(n % 4)) for n in range(7)]
    narrow, wide = (run(CorridorFamily(3), assignments, slots=slots) for slots in (2, 7))
    assert [episode.id for episode in narrow] == [item.id for item in assignments]
    assert [episode.task for episode in narrow] == [item.task for item in assignments]
    assert len({tuple(step.action_ids.tolist()) for episode in narrow for step in episode.steps}) > 10
    for one, other in zip(narrow, wide, strict=True):
        for left, right in zip(one.steps, other.steps, strict=True):
            assert left.prompt_ids.tolist() == right.prompt_ids.tolist()
            assert left.action_ids.tolist() == right.action_ids.tolist()


@pytest.mark.parametrize("step", [0, 2])
def test_a_failure_is_retried_with_the_same_draws(step: int):
    assignments = [Assignment("a", corridor(0)), Assignment("b", corridor(1))]
    calm, shaken = CorridorFamily(4), CorridorFamily(4, {(1, step): 1})
    expected, found = run(calm, assignments), run(shaken, assignments)
    assert [episode.stop_reason for episode in found] == [StopReason.DONE] * 2
    for one, other in zip(expected, found, strict=True):
        assert [s.action_ids.tolist() for s in one.steps] == [s.action_ids.tolist() for s in other.steps]
    assert [seed for variation, seed in shaken.seeds if variation == 1] == [dict(calm.seeds)[1]] * 2
    assert dict(calm.seeds)[1] == words(0, "environment", "b")[0]
    assert (calm.closed, shaken.closed) == (2, 3)


def test_a_long_rollout_tells_how_many_episodes_have_ended_for_good(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(collect.Seldom, "note", lambda self, text: said.append(text))
    assignments = [Assignment(name, corridor(number)) for number, name in enumerate("abc")]
    run(CorridorFamily(2, {(1, 1): 1}), assignments, slots=2, retries=1)
    assert said == [
        "acting: 1 of 3 episodes have ended; step 1",  # b, by an error
        "acting: 2 of 3 episodes have ended; step 2",
        "acting: 2 of 3 episodes have ended; step 1",  # c
        "acting: 3 of 3 episodes have ended; step 2",
        "acting: 2 of 3 episodes have ended; step 1",  # b again
        "acting: 3 of 3 episodes have ended; step 2",
    ]


@pytest.mark.parametrize("retries", [0, 2])
def test_a_lasting_failure_is_an_invalid_episode_and_no_reward_of_zero(retries: int):
    family = CorridorFamily(4, {(1, 2): 9})
    good, bad = run(family, [Assignment("a", corridor(0)), Assignment("b", corridor(1))], retries=retries)
    assert good.stop_reason == StopReason.DONE
    assert bad.stop_reason == StopReason.ENV_ERROR and not bad.stop_reason.valid
    assert bad.error == "died at step 2"
    assert len(bad.steps) == 1 and bad.extrinsic_return == 1.0  # what happened before stays readable
    assert len([None for variation, _ in family.seeds if variation == 1]) == retries + 1


def test_an_engine_failure_is_named_and_releases_environments():
    def refuse(request: Any) -> list[int]:
        raise EngineError("out of slots")

    family = CorridorFamily(4)
    (episode,) = run(family, [Assignment("a", corridor())], script=refuse)
    assert (episode.stop_reason, episode.error, episode.steps) == (StopReason.ENGINE_ERROR, "out of slots", ())
    assert family.closed == len(family.seeds) == 2


class Partial(ReplayEngine):
    """Fails some requests of a call, each `times` times, and serves the others."""

    def __init__(self, script: Any, session: str, times: int):
        super().__init__(script)
        self.session, self.times = session, times

    def generate(self, requests: Any) -> Any:
        answers: list[Any] = list(super().generate(requests))
        for index, request in enumerate(requests):
            if request.session == self.session and self.times:
                self.times -= 1
                answers[index] = EngineError("this one was lost")
        return answers


@pytest.mark.parametrize("times", [1, 9])
def test_a_request_that_failed_alone_costs_its_own_episode_a_retry(times: int):
    family = CorridorFamily(4)
    collector = make_collector(Partial(babble(word_chat()), "b", times), family, retries=1)
    good, bad = collector.collect([Assignment("a", corridor()), Assignment("b", corridor(1))], temperature=1.0)
    collector.close()
    assert good.stop_reason == StopReason.DONE
    assert bad.stop_reason == (StopReason.DONE if times == 1 else StopReason.ENGINE_ERROR)
    assert bad.error == ("" if times == 1 else "this one was lost")
    assert [variation for variation, _ in family.seeds].count(0) == 1  # the other one ran once


def test_steps_say_which_version_sampled_them():
    family = CorridorFamily(2)
    engine = ReplayEngine(babble(word_chat()), policy_version=5)
    collector = make_collector(engine, family)
    (episode,) = collector.collect([Assignment("a", corridor())], temperature=1.0)
    collector.close()
    assert [step.policy_version for step in episode.steps] == [5, 5] and episode.steps[0].version_spans == ()


def test_length_ends_an_episode_validly_with_its_return():
    said = spoken(word_chat(), lambda request: "look in the vase")
    (episode,) = run(CorridorFamily(30), [Assignment("a", corridor())], script=said, max_length=60)
    assert episode.stop_reason == StopReason.LENGTH and episode.stop_reason.valid
    assert 0 < len(episode.steps) < 30
    assert episode.score == episode.extrinsic_return == len(episode.steps)
    last = episode.steps[-1]
    assert len(last.prompt_ids) < 60 and len(last.prompt_ids) + len(last.action_ids) <= 60


@pytest.mark.parametrize("room", [1, 3])
def test_an_answer_at_the_length_limit_is_cut_and_trained(room: int):
    said = spoken(word_chat(), lambda request: "look in the vase")
    opening = len(word_chat().opening(f"light the lamp of the red house . the {toy.PLACES[0]} is empty ."))
    (episode,) = run(CorridorFamily(30), [Assignment("a", corridor())], script=said, max_length=opening + room)
    assert episode.stop_reason == StopReason.LENGTH
    (step,) = episode.steps
    assert step.truncated
    assert step.action_ids.tolist() == word_chat().answer("look in the vase").tolist()[:room]


def test_memory_is_asked_in_training_with_tips_alone():
    memory = taught(3)
    before = (memory.content_hash(), memory.metrics()["queries"])
    assignments = [Assignment(mode.label, corridor(), mode) for mode in Mode]
    run(CorridorFamily(3), assignments)  # evaluation passes no memory
    assert (memory.content_hash(), memory.metrics()["queries"]) == before
    run(CorridorFamily(3), assignments, memory=memory)
    assert memory.metrics()["queries"] == before[1] + 2 * 3  # every step of the two modes with memory, step 0 too


def test_with_an_empty_memory_both_prompts_are_equal_and_the_mode_stays():
    (episode,) = run(CorridorFamily(3), [Assignment("a", corridor(), Mode.OFF_POLICY)], memory=empty_memory())
    assert episode.mode == Mode.OFF_POLICY
    assert all(step.prompt_ids.tolist() == step.bare_prompt_ids.tolist() for step in episode.steps)


def test_tips_are_written_for_valid_training_episodes_alone():
    class Writer(ScriptedTipWriter):
        def write(self, engine: Any, lives: Any) -> None:
            for live in lives:
                live.tip = f"tip of {live.assignment.id}"

    family = CorridorFamily(3, {(1, 1): 9})
    assignments = [Assignment("a", corridor(0)), Assignment("b", corridor(1))]
    assert [episode.tip for episode in run(family, assignments, writer=Writer(family))] == ["tip of a", ""]
    assert [episode.tip for episode in run(CorridorFamily(3), assignments)] == ["", ""]


def test_toy_episode_with_a_tip_is_solved_in_two_steps():
    place, room = toy.SECRETS[0]
    family = toy.family(variations=1)
    memory = empty_memory(0.1)
    close = word_chat().close_id  # closes the user's turn, then the first answer
    acts = spoken(
        word_chat(),
        lambda request: f"try the {room}" if request.prompt_ids.tolist().count(close) > 1 else f"look in the {place}",
    )
    (episode,) = run(
        family, family_assignments(family), script=acts, memory=memory, writer=ScriptedTipWriter(family), step_limit=3
    )
    assert (episode.score, episode.success, len(episode.steps)) == (100.0, True, 2)
    assert episode.tip == f"the bulb is in the {place} . the lamp is in the {room} ."
    remember(memory, [episode])
    (again,) = run(family, family_assignments(family), script=acts, memory=memory, step_limit=3)
    assert again.steps[0].tips[0].startswith(episode.tip)
    assert again.steps[0].tip_scores == (100.0,)


def family_assignments(family: toy.ToyFamily) -> list[Assignment]:
    return [Assignment("a", family.tasks("train")[0], Mode.ON_POLICY_WITH_MEMORY)]


def test_the_keys_of_a_round_are_embedded_together_and_nothing_is_left_for_the_commit(monkeypatch: pytest.MonkeyPatch):
    calls: list[list[str]] = []
    embed = HashingEmbedder.embed
    monkeypatch.setattr(
        HashingEmbedder, "embed", lambda self, texts: (calls.append(list(texts)), embed(self, texts))[1]
    )
    family, memory = toy.family(variations=3), empty_memory()
    modes = (Mode.ON_POLICY, Mode.OFF_POLICY, Mode.ON_POLICY)
    tasks = family.tasks("train")
    assignments = [Assignment(f"e{number}", tasks[number], mode) for number, mode in enumerate(modes)]
    looked = spoken(word_chat(), lambda request: f"look in the {toy.PLACES[int(request.key[0]) % 16]}")
    episodes = run(family, assignments, memory=memory, script=looked, step_limit=3)
    keys = {step.memory_key for episode in episodes for step in episode.steps}
    assert len(keys) > 3 and {text for call in calls for text in call} == keys
    assert 1 <= len(calls) <= 3, "one call a round"
