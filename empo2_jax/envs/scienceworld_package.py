"""ScienceWorld through its package's own client, used as its documentation shows: what ours is compared with.

Slow on purpose: every step lists all valid actions, unless asked not to. Nothing here is used in training.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from scienceworld import ScienceWorldEnv

from empo2_jax.envs.actions import options, settled
from empo2_jax.envs.scienceworld_jvm import java_path
from empo2_jax.envs.scienceworld_text import asks
from empo2_jax.types import Task

_OPTIONS = "JAVA_TOOL_OPTIONS"


class _WithoutLists(ScienceWorldEnv):
    """Lists no valid actions: a list draws the simulator's random numbers, so that bees fly elsewhere after it."""

    def get_valid_action_object_combinations(self) -> list[str]:
        return []


class PackageWorld:
    """One simulator on the Java options that the package chooses, and on the Java that ours uses."""

    def __init__(self, flags: Sequence[str] = (), *, lists: bool = True) -> None:
        """The package calls `java`: the runtime of ours comes first on the path.

        `flags` are further options of Java, which come through its environment: the package has no room for them.
        `lists` is whether every step lists all valid actions, as the package does.
        """
        folder = str(Path(java_path()).parent)
        if not os.environ["PATH"].startswith(folder):
            os.environ["PATH"] = os.pathsep.join((folder, os.environ["PATH"]))
        before = os.environ.pop(_OPTIONS, "")
        os.environ[_OPTIONS] = " ".join((before, *flags))
        try:
            self._world = (ScienceWorldEnv if lists else _WithoutLists)("")
        finally:
            os.environ.pop(_OPTIONS)
            os.environ |= {_OPTIONS: before} if before else {}

    def play(
        self, task: Task, simplification: str, actions: Sequence[str], *, settle: bool = False
    ) -> Iterator[tuple[str, float]]:
        """Reply and score (points) after each action; the end of an episode is not minded.

        With `settle`, questions between readings that look the same are answered as our environment does.
        """
        self._world.load(task.name, task.variation, simplification)
        self._world.reset()
        for action in actions:
            reply, _, _, information = self._world.step(action)
            if settle and asks(reply) and (number := settled(action, options(reply))):
                reply, _, _, information = self._world.step(number)
            yield reply, float(information["score"])

    def close(self) -> None:
        """End the Java process and wait for it, so that its CPU seconds are counted."""
        process = self._world._gateway.java_process
        self._world.close()
        assert process is not None  # the package has started it
        process.wait()
        self._world._obj_tree_tempdir.cleanup()
        for pipe in filter(None, (process.stdin, process.stdout)):
            pipe.close()
