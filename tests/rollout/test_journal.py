"""Ended episodes outlive the process that played them, and only where they are still what the run would play."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from empo2_jax.config import MemoryConfig
from empo2_jax.errors import EngineError
from empo2_jax.rollout.collect import Assignment
from empo2_jax.rollout.journal import Journals
from empo2_jax.rollout.reflect import PolicyTipWriter
from empo2_jax.rollout.replay import ReplayEngine
from empo2_jax.types import Episode, Mode
from tests.fixtures.worlds import (
    CorridorFamily,
    babble,
    corridor,
    empty_memory,
    make_collector,
    remember,
    word_chat,
)

MODES = (Mode.ON_POLICY, Mode.ON_POLICY_WITH_MEMORY, Mode.OFF_POLICY)
ASSIGNMENTS = [Assignment(f"i3/g0/e{n}", corridor(n), MODES[n % 3]) for n in range(4)]


class Killed(Exception):
    """The end of a process."""


class Counting(ReplayEngine):
    """Ends the process at its call number `last`; knows who asked."""

    def __init__(self, last: int) -> None:
        super().__init__(babble(word_chat()))
        self.left, self.asked = last, list[str]()

    def generate(self, requests: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise Killed
        self.asked += [request.session for request in requests]
        return super().generate(requests)


def play(
    run_dir: Path, memory: Any, last: int = 99, version: int = 3, family: Any = None, process: int = 0
) -> tuple[list[Episode], Counting]:
    """The rollout of iteration 3 in waves of two, each episode three steps long and then a tip."""
    engine, family = Counting(last), family or CorridorFamily(3)
    engine.load(None, version)
    writer = PolicyTipWriter(word_chat(), family, MemoryConfig(), temperature=1.0, seed=3, banned_from=99)
    collector = make_collector(engine, family, slots=2)
    try:
        with Journals(run_dir, process).open(3, version) as journal:
            return collector.collect(ASSIGNMENTS, temperature=1.0, memory=memory, writer=writer, keeper=journal), engine
    finally:
        collector.close()


def taught() -> Any:
    """A memory with tips for every view of the corridor."""
    memory = empty_memory()
    collector = make_collector(ReplayEngine(babble(word_chat())), CorridorFamily(3), step_limit=3)
    (first,) = collector.collect([Assignment("teacher", corridor(1))], temperature=1.0)
    collector.close()
    remember(memory, [dataclasses.replace(first, tip="the bulb is in the vase .")])
    return memory


def assert_same(found: list[Episode], wanted: list[Episode]) -> None:
    for one, other in zip(found, wanted, strict=True):
        for left, right in zip(one.steps, other.steps, strict=True):
            for field in dataclasses.fields(left):
                np.testing.assert_array_equal(getattr(left, field.name), getattr(right, field.name))
        # A tip that is asked for later finds no cache.
        same = {"steps": (), "tip_prompt_tokens": 0}
        assert dataclasses.replace(one, **same) == dataclasses.replace(other, **same)


# Three calls of the engine for the actions of a wave, one for its tips; a kill after so many calls keeps so many.
@pytest.mark.parametrize(("calls", "kept", "told"), [(2, 0, 0), (3, 2, 0), (4, 2, 2), (6, 2, 2), (7, 4, 2), (8, 4, 4)])
def test_a_killed_rollout_plays_the_rest_alone(calls: int, kept: int, told: int, tmp_path: Path) -> None:
    memory, undisturbed = taught(), taught()
    wanted, _ = play(tmp_path / "calm", undisturbed)
    before = memory.retrievals
    if calls < 8:
        with pytest.raises(Killed):
            play(tmp_path / "run", memory, calls)
    else:
        play(tmp_path / "run", memory)
    memory.retrievals = before  # the memory is that of the checkpoint
    family = CorridorFamily(3)
    found, engine = play(tmp_path / "run", memory, family=family)
    assert_same(found, wanted)
    assert len(family.seeds) == 4 - kept
    asked = {item.id: engine.asked.count(item.id) for item in ASSIGNMENTS}
    expected = [int(number >= told) if number < kept else 4 for number in range(4)]
    assert list(asked.values()) == expected
    assert memory.retrievals == undisturbed.retrievals != before


def test_what_other_weights_or_another_iteration_sampled_is_played_again(tmp_path: Path) -> None:
    play(tmp_path, taught())
    assert set(play(tmp_path, taught(), version=4)[1].asked) == {item.id for item in ASSIGNMENTS}
    with Journals(tmp_path).open(4, 3) as journal:
        assert journal.find(ASSIGNMENTS[0]) is None
    with Journals(tmp_path).open(3, 3) as journal:
        assert journal.find(ASSIGNMENTS[0]) is not None
        assert journal.find(dataclasses.replace(ASSIGNMENTS[0], mode=Mode.OFF_POLICY)) is None
        assert journal.find(dataclasses.replace(ASSIGNMENTS[0], task=corridor(2))) is None


def test_what_cannot_be_taken_up_is_removed(tmp_path: Path) -> None:
    journals = Journals(tmp_path)
    journals.drop(0, 0)  # there is no folder yet
    for iteration, version in ((4, 4), (5, 4), (5, 5), (6, 5)):
        journals.open(iteration, version).__exit__(None, None, None)
    journals.drop(5, 4)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["5-4-0.jsonl"]
    journals.drop(5, -1)
    assert list((tmp_path / "rollouts").iterdir()) == []


def test_every_process_has_a_file_of_its_own_and_reads_all(tmp_path: Path) -> None:
    play(tmp_path, taught(), process=1)
    assert play(tmp_path, taught())[1].asked == []
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["3-3-0.jsonl", "3-3-1.jsonl"]


def test_a_tip_that_another_process_has_written_since_is_not_written_again(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        play(tmp_path, taught(), 3, process=1)
    assert set(play(tmp_path, taught())[1].asked) == {item.id for item in ASSIGNMENTS}
    assert play(tmp_path, taught())[1].asked == []


def test_a_failed_episode_is_not_kept(tmp_path: Path) -> None:
    episodes, _ = play(tmp_path, taught(), family=CorridorFamily(3, {(1, 2): 9}))
    assert [episode.stop_reason.valid for episode in episodes] == [True, False, True, True]
    assert set(play(tmp_path, taught())[1].asked) == {ASSIGNMENTS[1].id}


@pytest.mark.parametrize("damage", ["torn", "flipped", "rubbish", "zeros"])
def test_a_damaged_file_costs_its_rest(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted, _ = play(tmp_path, taught())
    path = tmp_path / "rollouts/3-3-0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 8
    last = lines[-1]
    flipped = last[:-40] + (b"A" if last[-40:-39] != b"A" else b"B") + last[-39:]
    lines[-1] = {"torn": last[:-9], "flipped": flipped, "rubbish": b"{}\n", "zeros": bytes(9) + b"\n"}[damage]
    path.write_bytes(b"".join(lines))
    with caplog.at_level(logging.WARNING):
        found, engine = play(tmp_path, taught())
    assert_same(found, wanted)
    assert engine.asked == [ASSIGNMENTS[3].id]  # its tip
    assert len(caplog.records) == (damage != "torn")
    assert play(tmp_path, taught())[1].asked == []  # what was written since lies before no damage
    assert len(caplog.records) == (damage != "torn")


def test_an_engine_that_gives_no_tip_is_not_asked_again(tmp_path: Path) -> None:
    class Dumb(Counting):
        def generate(self, requests: Any) -> Any:
            if self.left in (96, 92):  # of the tips
                self.left -= 1
                raise EngineError("down")
            return super().generate(requests)

    engine = Dumb(99)
    family = CorridorFamily(3)
    writer = PolicyTipWriter(word_chat(), family, MemoryConfig(), temperature=1.0, seed=3, banned_from=99)
    collector = make_collector(engine, family, slots=2)
    with Journals(tmp_path).open(3, 0) as journal:
        episodes = collector.collect(ASSIGNMENTS, temperature=1.0, writer=writer, keeper=journal)
    collector.close()
    assert [episode.tip for episode in episodes] == [""] * 4
    assert play(tmp_path, taught(), version=0)[1].asked == []
