"""The peers of `envs`: the ScienceWorld package used as its documentation shows, on the Java options it comes with."""

from collections.abc import Sequence

from empo2_jax.bench.base import Side
from empo2_jax.bench.envs import SIMPLIFICATION, Problems, Seen, make_side
from empo2_jax.envs.scienceworld_package import PackageWorld
from empo2_jax.types import Task


def naive(problems: Problems, unit: str) -> Side:
    """One simulator for all episodes."""
    world = PackageWorld()
    return make_side(lambda *problem: _play(world, *problem), world.close, problems, unit)


def jvm_per_episode(problems: Problems, unit: str) -> Side:
    """A new one for each; it ends when the next begins."""
    running: list[PackageWorld] = []

    def end() -> None:
        while running:
            running.pop().close()

    def play(name: str, number: int, actions: Sequence[str]) -> list[Seen]:
        end()
        running.append(PackageWorld())
        return _play(running[0], name, number, actions)

    return make_side(play, end, problems, unit)


def _play(world: PackageWorld, name: str, number: int, actions: Sequence[str]) -> list[Seen]:
    return [Seen(*seen) for seen in world.play(Task("scienceworld", name, number), SIMPLIFICATION, actions)]
