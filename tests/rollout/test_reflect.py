"""Writing tips: the acting prompt plus one turn, one line, and rules that state the toy world's facts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from empo2_jax.config import MemoryConfig
from empo2_jax.envs import toy
from empo2_jax.errors import EngineError
from empo2_jax.randomness import words
from empo2_jax.rollout.base import Completion, Request
from empo2_jax.rollout.collect import Assignment
from empo2_jax.rollout.reflect import PolicyTipWriter, ScriptedTipWriter, one_line
from empo2_jax.rollout.replay import ReplayEngine
from empo2_jax.types import Mode
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


class Recorder(ReplayEngine):
    """Keeps the requests and completions of every call."""

    def __init__(self, script: Any, **settings: Any):
        super().__init__(script, **settings)
        self.calls: list[list[tuple[Request, Completion]]] = []

    def generate(self, requests: Any) -> list[Completion]:
        completions = super().generate(requests)
        self.calls.append(list(zip(requests, completions, strict=True)))
        return completions


def writer_for(family: Any, tip_max_tokens: int = 12) -> PolicyTipWriter:
    settings = MemoryConfig(tip_max_tokens=tip_max_tokens)
    return PolicyTipWriter(word_chat(), family, settings, temperature=0.7, seed=3, banned_from=99)


def collect(engine: ReplayEngine, family: Any, assignments: list[Assignment], writer: Any, **how: Any) -> list[Any]:
    collector = make_collector(engine, family, **how)
    try:
        return collector.collect(assignments, temperature=1.0, writer=writer)
    finally:
        collector.close()


@pytest.mark.parametrize("limit", [2, 5])
def test_tip_prompt_is_the_acting_prompt_plus_one_turn(limit: int):
    family, chat = CorridorFamily(5), word_chat()
    engine = Recorder(babble(chat))
    (episode,) = collect(engine, family, [Assignment("a", corridor())], writer_for(family), step_limit=limit)
    assert len(engine.calls) == limit + 1
    ((request, completion),) = engine.calls[-1]
    last = episode.steps[-1]
    turn = family.tip_request(last.state, float(limit))
    expected = np.concatenate([last.prompt_ids, last.action_ids, chat.following(last.action_ids, turn)])
    assert request.prompt_ids.tolist() == expected.tolist()
    assert request.session == episode.id
    assert completion.cached_tokens == len(last.prompt_ids) + len(last.action_ids)  # only the turn is new
    assert request.key.tolist() == words(3, "tip", "a").tolist()
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.banned_from) == (12, 0.7, 99)
    assert request.sampling.stop_ids == chat.stop_ids
    assert episode.tip == " ".join(chat.text(completion.ids).split())
    assert episode.tip_tokens == len(completion.ids)
    assert episode.tip_prompt_tokens == len(expected) - len(last.prompt_ids) - len(last.action_ids)


def test_tip_prompt_goes_on_without_tips_where_only_the_newest_turn_had_them():
    family, memory = CorridorFamily(3), empty_memory()
    engine = Recorder(spoken(word_chat(), lambda request: "look in the vase"))
    collector = make_collector(engine, family, placement="latest")
    (first,) = collector.collect([Assignment("a", corridor())], temperature=1.0)
    remember(memory, [replace(first, tip="the bulb is in the vase .")])
    settings = MemoryConfig(tip_max_tokens=12, placement="latest")
    writer = PolicyTipWriter(word_chat(), family, settings, temperature=0.7, seed=3, banned_from=99)
    tipped = Assignment("b", corridor(), Mode.ON_POLICY_WITH_MEMORY)
    (episode,) = collector.collect([tipped], temperature=1.0, memory=memory, writer=writer)
    collector.close()
    ((request, completion),) = engine.calls[-1]
    last = episode.steps[-1]
    assert last.tips
    trunk = np.concatenate([last.bare_prompt_ids, last.action_ids])
    assert request.prompt_ids[: len(trunk)].tolist() == trunk.tolist()
    cut = int(np.argmin(last.bare_prompt_ids == last.prompt_ids[: len(last.bare_prompt_ids)]))
    assert 0 < completion.cached_tokens == cut


def test_tip_prompt_of_an_episode_with_tips_shows_them():
    family, memory = CorridorFamily(3), empty_memory()
    engine = Recorder(spoken(word_chat(), lambda request: "look in the vase"))
    collector = make_collector(engine, family)
    for mode in (Mode.ON_POLICY, Mode.OFF_POLICY):
        (episode,) = collector.collect(
            [Assignment("a", corridor(), mode)], temperature=1.0, memory=memory, writer=writer_for(family)
        )
        remember(memory, [episode])
    collector.close()
    ((request, _),) = engine.calls[-1]
    (earlier,) = word_tokenizer().encode("earlier")
    assert request.prompt_ids.tolist().count(earlier) == 3


def test_all_tips_of_a_wave_are_sampled_in_one_call_and_invalid_episodes_get_none():
    family = CorridorFamily(2, {(1, 1): 9})
    engine = Recorder(babble(word_chat()))
    assignments = [Assignment(name, corridor(number)) for number, name in enumerate("abc")]
    episodes = collect(engine, family, assignments, writer_for(family), retries=0)
    assert [request.session for request, _ in engine.calls[-1]] == ["a", "c"]
    assert [bool(episode.tip_tokens) for episode in episodes] == [True, False, True]


def test_no_tip_without_room_or_with_a_failing_engine():
    family = CorridorFamily(2)
    (full,) = collect(
        ReplayEngine(babble(word_chat()), max_length=100), family, [Assignment("a", corridor())], writer_for(family, 90)
    )
    assert (full.tip, full.tip_tokens, len(full.steps)) == ("", 0, 2)

    def script(request: Request) -> list[int]:
        if request.sampling.max_tokens == 12:
            raise EngineError("lost")
        return babble(word_chat())(request)

    (lost,) = collect(ReplayEngine(script), family, [Assignment("a", corridor())], writer_for(family))
    assert (lost.tip, lost.stop_reason.valid) == ("", True)

    class Partial(ReplayEngine):
        def generate(self, requests: Any) -> Any:
            answers = super().generate(requests)
            tips = [request.sampling.max_tokens == 12 and request.session == "a" for request in requests]
            return [EngineError("lost") if tip else answer for tip, answer in zip(tips, answers, strict=True)]

    both = [Assignment("a", corridor()), Assignment("b", corridor())]
    lost, kept = collect(Partial(spoken(word_chat(), lambda _: "look")), family, both, writer_for(family))
    assert (lost.tip, kept.tip) == ("", "look")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("  \n\t\n", ""),
        ("a  tip\twith   gaps ", "a tip with gaps"),
        ("\n\n one \n two", "one"),
        ("x\r\ny", "x"),
    ],
)
def test_a_tip_is_one_line(text: str, line: str):
    assert one_line(text) == line


@pytest.mark.parametrize("house", range(8))
def test_scripted_tips_are_the_facts_of_the_house(house: int):
    family = toy.family()
    (place, room), ((empty, *_), (dark, _)) = toy.SECRETS[house], toy.usual(toy.HOUSES[house])
    plays = [
        [f"look in the {empty}", f"look in the {place}", f"try the {dark}"],
        [f"look in the {place}", f"try the {room}"],
    ]
    plays += [[f"look in the {empty}"] * 2 + ["nothing"], ["wait"] * 3]
    expected = [
        f"the bulb is not in the {empty} . the bulb is in the {place} . the lamp is not in the {dark} .",
        f"the bulb is in the {place} . the lamp is in the {room} .",
        f"the bulb is not in the {empty} .",
        "nothing .",
    ]
    for actions, tip in zip(plays, expected, strict=True):
        script = spoken(word_chat(), lambda r, acts=actions: acts[(r.prompt_ids.tolist().count(1) - 2) // 2])
        (episode,) = collect(
            ReplayEngine(script),
            family,
            [Assignment("a", family.tasks("train")[house])],
            ScriptedTipWriter(family),
            step_limit=3,
        )
        assert episode.tip == tip
        assert episode.tip_tokens == 0
