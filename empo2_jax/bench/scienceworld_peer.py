"""The peers of `envs`: the ScienceWorld package used as its documentation shows, on the Java options it comes with."""

import os
from collections.abc import Sequence
from pathlib import Path

from scienceworld import ScienceWorldEnv

from empo2_jax.bench.base import Side
from empo2_jax.bench.envs import SIMPLIFICATION, Problems, Seen, make_side
from empo2_jax.envs.scienceworld_jvm import java_path


def naive(problems: Problems, unit: str) -> Side:
    """One simulator for all episodes."""
    world = _start()
    return make_side(lambda *problem: _play(world, *problem), lambda: _end(world), problems, unit)


def jvm_per_episode(problems: Problems, unit: str) -> Side:
    """A new one for each; it ends when the next begins."""
    running: list[ScienceWorldEnv] = []

    def end() -> None:
        while running:
            _end(running.pop())

    def play(name: str, number: int, actions: Sequence[str]) -> list[Seen]:
        end()
        running.append(_start())
        return _play(running[0], name, number, actions)

    return make_side(play, end, problems, unit)


def _start() -> ScienceWorldEnv:
    """The package calls `java`: the same runtime as ours comes first."""
    folder = str(Path(java_path()).parent)
    if not os.environ["PATH"].startswith(folder):
        os.environ["PATH"] = os.pathsep.join((folder, os.environ["PATH"]))
    return ScienceWorldEnv("")


def _play(world: ScienceWorldEnv, name: str, number: int, actions: Sequence[str]) -> list[Seen]:
    world.load(name, number, SIMPLIFICATION)
    world.reset()
    steps = (world.step(action) for action in actions)
    return [Seen(reply, float(information["score"])) for reply, _, _, information in steps]


def _end(world: ScienceWorldEnv) -> None:
    process = world._gateway.java_process
    world.close()
    assert process is not None  # the package has started it
    process.wait()  # so that its CPU seconds are counted
    for pipe in filter(None, (process.stdin, process.stdout)):
        pipe.close()
