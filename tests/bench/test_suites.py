"""Every suite at a tiny size: both sides run, agree, and would be refused if they did not."""

import gc
import importlib
import warnings

import numpy as np
import pytest

from empo2_jax.bench import logp, machine, memory, plan, runner, tree
from empo2_jax.bench.base import Side, differences
from empo2_jax.data.rows import build_rows
from empo2_jax.models.qwen2_sizes import QWEN2_5
from empo2_jax.planning import forward_flops

TREE = {"shape": "tiny", "turns": 4, "prompt": 40, "growth": 20, "response": 6, "tips": 0}
TURNS = {"shape": "tiny", "turns": 3, "prompt": 20, "growth": 12, "response": 4}
TINY = {
    "train": {"shape": "tiny", "rows": 2, "length": 64},
    "logp": {"tokens": 1100, "vocabulary": 1000, "width": 32, "timed": True},
    "tree/8 turns": TREE,
    "tree/8 turns, tips": TREE | {"tips": 9},
    "memory": {"entries": 500, "clusters": 8, "queries": 2},
    "envs": {"problems": [("find-non-living-thing", 0)], "unit": "step"},
    "decode": {"shape": "tiny", "batch": 3, "prompt": 16, "count": 8},
    "turns": TURNS,
    "publish": {"shape": "tiny"},
}
CASES = {case.name: case for case in runner.find_cases((), True) if case.peer and case.timed}


def make(function: str, arguments: dict) -> Side:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(**arguments)


@pytest.mark.medium
@pytest.mark.parametrize("name", CASES)
def test_both_sides_agree(name):
    case = CASES[name]
    arguments = TINY.get(name) or TINY[name.partition("/")[0]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the peer's library deprecates its own documented calls
        ours, peer = (make(function, arguments) for function in (case.ours, case.peer))
        for side in (ours, peer):
            side.run()
        answers = ours.answer(), peer.answer()
        figures = ours.figures(), peer.figures()
        del ours, peer, side
        gc.collect()  # a peer's package leaves files to the collector
    found = differences(*answers, list(case.tolerances))
    assert all(found[answer] <= most for answer, most in case.tolerances.items()), found
    assert all(np.ptp(values) > 0 for values in answers[0].values() if values.size > 1)
    assert figures[0].keys() == figures[1].keys()


def test_trunk_against_steps_saves_what_the_lengths_say():
    arguments = CASES["tree/8 turns"].arguments | {"turns": 30}
    episode = tree.make_episode(**arguments)
    assert [len(step.prompt_ids) for step in episode.steps] == [1000 + 112 * turn for turn in range(30)]
    lengths = [len(step.prompt_ids) + 32 for step in episode.steps]
    steps = sum(forward_flops(QWEN2_5["7B"], length, length, 32) for length in lengths)
    trunk = forward_flops(QWEN2_5["7B"], lengths[-1], lengths[-1], 960)
    assert steps / trunk == pytest.approx(17.98, abs=0.01)


def test_tips_on_branches_save_what_the_lengths_say():
    sizes = CASES["tree/8 turns, tips"].arguments | {"turns": 30}
    (row,) = build_rows([tree.make_episode(**sizes)], [1.0], branch_room=1 << 30)
    assert row.trunk == 1000 + 29 * 112 + 32
    assert row.branches == tuple((996 + 112 * turn, 300 + 4 + 32) for turn in range(30))
    lengths = [1000 + 112 * turn + 300 + 32 for turn in range(30)]
    steps = sum(forward_flops(QWEN2_5["7B"], length, length, 32) for length in lengths)
    branches = sum(forward_flops(QWEN2_5["7B"], length, 2 * cut + length, 0) for cut, length in row.branches)
    assert steps / (forward_flops(QWEN2_5["7B"], row.trunk, row.trunk, 960) + branches) == pytest.approx(5.98, abs=0.01)


def test_the_compiler_counts_fewer_temporaries_for_chunks():
    sizes = {"tokens": 4096, "vocabulary": 2000, "width": 16, "timed": False}
    ours, naive = (side(**sizes).figures()["temporary_bytes"] for side in (logp.ours, logp.naive))
    assert naive >= 4096 * 2000 * 4
    assert naive / ours > 3


def test_worlds_have_clear_hits():
    world = memory.make_world(2000, 16)
    cosines = world.queries[:20] @ world.keys.T
    assert not ((cosines > 0.4) & (cosines < 0.55)).any()
    assert 0.03 < (cosines > memory.THRESHOLD).mean() < 0.1
    ranked = memory.best_of(world, range(2000))
    assert len(ranked) == memory.TOP_K
    assert len({world.episode(entry) for entry in ranked}) == memory.TOP_K
    assert world.scores[ranked].tolist() == sorted(world.scores[ranked].tolist(), reverse=True)


@pytest.mark.medium
def test_gap_is_small_in_both_types():
    side = make("empo2_jax.bench.gap:ours", {"shape": "tiny", "rows": 3, "prompt": 20, "count": 8})
    assert 0 < side.figures()["gap_f32"] < 1e-5
    assert 1e-5 < side.figures()["gap_bf16"] < 2e-2


def test_peaks_are_positive(monkeypatch):
    monkeypatch.setattr(machine, "_SIZE", 64)
    monkeypatch.setattr(machine, "_FLOATS", 1 << 16)
    figures = machine.peaks().figures()
    assert figures["flops"] > 1e6
    assert figures["bandwidth"] > 1e6


@pytest.mark.medium
def test_plan_is_right_about_its_arguments():
    (case,) = plan.cases(True)
    with runner.pinned():
        result = runner.run_case(case, quick=True)
    assert result.problem == ""
    figures = result.figures()
    assert figures["argument_error"] < 1e-3
    assert figures["compiled_argument_error"] < 1e-3
    assert 1 << 26 < figures["peak_bytes"] < 1 << 30
