"""Kill -9 at every phase boundary and at random moments: toy run and ScienceWorld end as if nobody had touched them.

56 kills: 20 boundaries and 12 moments of the toy run; 20 boundaries, one in the warm start and 3 moments of
`configs/scienceworld_tiny.toml`. Every hash (parameters, optimizer, memory, novelty, metrics) is that of the run that
was never interrupted, and no process outlives the one that was killed.
"""

import random
import resource
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from empo2_jax.bench.processes import cpu_seconds, marked
from tests.fixtures.processes import LIMIT_S, ROOT, SUICIDE, assert_same, empo2, finish, start, train_arguments

pytestmark = pytest.mark.slow

BOUNDARIES = (  # in the order of a run; the count is that of the process, which starts at the last checkpoint
    ("trainer:Trainer:evaluate", "after", 1),  # of the start policy, before checkpoint 0
    ("checkpoint:CheckpointStore:_write_manifest", "before", 1),  # checkpoint 0 half written
    ("checkpoint:CheckpointStore:_publish", "before", 1),  # checkpoint 0 written, not yet there
    ("trainer:Trainer:save", "after", 1),
    ("rollout.jax_engine:JaxEngine:generate", "after", 3),  # in mid-rollout
    ("rollout.reflect:PolicyTipWriter:write", "after", 1),
    ("experience:Experience:collect", "after", 1),
    ("experience:Experience:reward_novelty", "after", 1),
    ("learner.step:Learner:update", "before", 1),
    ("trainer:Trainer:update", "after", 1),
    ("memory.tips:TipMemory:commit", "after", 1),
    ("memory.novelty:NoveltyStore:commit", "after", 1),
    ("metrics:EpisodeLog:write", "before", 1),
    ("metrics:EpisodeLog:write", "after", 1),
    ("rollout.jax_engine:JaxEngine:load", "after", 2),  # the new weights; the first load is that of the start
    ("metrics:MetricsLog:write", "after", 1),
    ("checkpoint:CheckpointStore:_publish", "before", 1),
    ("checkpoint:CheckpointStore:_drop_others", "before", 1),  # checkpoint 1 is there
    ("trainer:Trainer:evaluate", "after", 1),  # of the end
    ("trainer:Trainer:save", "after", 1),
)
IN_WARM_START = ("learner.step:Learner:update", "after", 25)  # of 40, five after its checkpoint
MARK = "EMPO2_TEST_MARK"  # inherited by all that a run starts
Arguments = Callable[[Path], list[str]]


def science_arguments(run_dir: Path) -> list[str]:
    return ["train", str(ROOT / "configs/scienceworld_tiny.toml"), "--run.dir", str(run_dir)]


class World(NamedTuple):
    arguments: Arguments
    boundaries: tuple[tuple[str, str, int], ...]
    moments: int
    reference: Path
    cpu_s: float  # of an undisturbed life after the warm start


@pytest.fixture(scope="module", params=["toy", "scienceworld"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    arguments, boundaries, moments = train_arguments, BOUNDARIES, 12
    if request.param == "scienceworld":
        pytest.importorskip("scienceworld")
        arguments, boundaries, moments = science_arguments, (IN_WARM_START, *BOUNDARIES), 3
        started = empo2("warmstart", *arguments(run_dir)[1:])
        assert started.returncode == 0, started.stderr[-2000:]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    finish(run_dir, arguments)
    return World(
        arguments, boundaries, moments, run_dir, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    )


def assert_nobody_left(mark: str) -> None:
    """No process of a killed run is alive ten seconds later."""
    deadline = time.monotonic() + 10
    while left := marked(MARK, mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_killed_at_every_phase_boundary(world: World, tmp_path: Path) -> None:
    run_dir, mark = tmp_path / "run", uuid.uuid4().hex
    for place, when, count in world.boundaries:
        arguments = (place, when, str(count), *world.arguments(run_dir))
        process = start(*arguments, program=(sys.executable, "-c", SUICIDE), **{MARK: mark})
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == -signal.SIGKILL, (place, when, errors[-2000:])
    assert_nobody_left(mark)
    finish(run_dir, world.arguments)
    assert_same(run_dir, world.reference)


def test_killed_at_random_moments(world: World, tmp_path: Path) -> None:
    draw, mark, kills, life = random.Random(0), uuid.uuid4().hex, 0, world.cpu_s
    runs: list[Path] = []

    def begin() -> None:
        runs.append(tmp_path / f"run{len(runs)}")
        if (world.reference / "start").is_dir():
            shutil.copytree(world.reference / "start", runs[-1] / "start")

    begin()
    while kills < world.moments:
        process = start(*world.arguments(runs[-1]), **{MARK: mark})
        moment = draw.uniform(0.15, 0.7) * life
        while process.poll() is None and cpu_seconds(process.pid) < moment:
            time.sleep(0.01)
        if process.poll() is None:
            process.kill()
            kills += 1
            process.communicate()
        else:  # it ended before: another one begins
            _, errors = process.communicate()
            assert process.returncode == 0, errors[-2000:]
            life *= 0.7  # simulators' seconds were counted too, or programs were compiled
            begin()
    assert_nobody_left(mark)
    finish(runs[-1], world.arguments)
    for run_dir in runs:
        assert_same(run_dir, world.reference)
