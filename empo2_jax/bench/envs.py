"""Suite `envs`: ScienceWorld through our pool against the package as it comes, episodes of 30 steps.

One peer keeps a simulator and takes the package's own step, which lists every valid action each time; the other starts
a Java process for every episode, as the released code does. CPU seconds include those of the Java processes.
"""

import os
import re
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from empo2_jax.bench.base import Answers, Case, Side
from empo2_jax.bench.processes import children, children_cpu, peak_bytes
from empo2_jax.envs import scienceworld
from empo2_jax.envs.base import Environment
from empo2_jax.randomness import generator
from empo2_jax.types import Task

SIMPLIFICATION = "easy"
TASKS = ("find-non-living-thing", "power-component", "lifespan-longest-lived", "identify-life-stages-1")
STEPS = 30  # of an episode, the paper's limit
# Nothing is heated or switched on, so that all simulators answer alike up to the order of what they list.
VERBS = ("look", "go", "open", "close", "pick", "put", "move", "read", "examine", "inventory")
Problems = Sequence[tuple[str, int]]  # task, variation


class Seen(NamedTuple):
    """What a step led to."""

    reply: str
    score: float


def cases(quick: bool) -> list[Case]:
    """One variation of four tasks (quick: of two)."""
    problems = [(task, 0) for task in TASKS[: 2 if quick else 4]]
    return [
        _case("valid actions every step", "naive", problems, "step"),
        _case("a JVM per episode", "jvm_per_episode", problems, "episode"),
    ]


def _case(name: str, peer: str, problems: Problems, unit: str) -> Case:
    return Case(
        name=f"envs/{name}",
        ours="empo2_jax.bench.envs:ours",
        peer=f"empo2_jax.bench.scienceworld_peer:{peer}",
        arguments={"problems": problems, "unit": unit},
        tolerances={"replies": 0.0, "scores": 0.0},
        unit=unit,
    )


def scripts(problems: Problems) -> list[tuple[str, int, list[str]]]:
    """Task, variation and `STEPS` actions: a verb, then one of its actions, drawn from what was valid then."""
    family = scienceworld.family(tasks=[name for name, _ in problems], simplification=SIMPLIFICATION, workers=1)
    environment = family.make()
    try:
        return [(name, number, _script(environment, Task(family.name, name, number))) for name, number in problems]
    finally:
        environment.close()
        family.close()


def _script(environment: Environment, task: Task) -> list[str]:
    environment.reset(task, 0)
    script: list[str] = []
    for step in range(STEPS):
        by_verb: dict[str, list[str]] = {}
        for action in environment.admissible_actions():
            by_verb.setdefault(action.split()[0], []).append(action)
        draws = generator(0, "bench", str(task), step)
        verbs = [verb for verb in VERBS if verb in by_verb]
        choices = by_verb[verbs[int(draws.integers(len(verbs)))]]
        script.append(choices[int(draws.integers(len(choices)))])
        environment.step(script[-1])
    return script


def ours(problems: Problems, unit: str) -> Side:
    """One environment on one pooled simulator."""
    family = scienceworld.family(tasks=[name for name, _ in problems], simplification=SIMPLIFICATION, workers=1)
    environment = family.make()

    def play(name: str, number: int, actions: Sequence[str]) -> list[Seen]:
        environment.reset(Task(family.name, name, number), 0)
        return [Seen(seen.text, seen.score) for seen in map(environment.step, actions)]

    def end() -> None:
        environment.close()
        family.close()

    return make_side(play, end, problems, unit)


def make_side(
    play: Callable[[str, int, Sequence[str]], list[Seen]], end: Callable[[], None], problems: Problems, unit: str
) -> Side:
    """A side that plays every problem in a run; it has played them once to be warm.

    Args:
        play: Plays a task's variation by these actions.
        end: Releases what it holds.
        problems: What to play.
        unit: What the seconds are of, `step` or `episode`.
    """
    wanted = scripts(problems)

    def run() -> list[Seen]:
        return [seen for problem in wanted for seen in play(*problem)]

    warm, peak = run(), 0.0

    def answer() -> Answers:
        nonlocal peak
        peak = max(map(peak_bytes, children(os.getpid())), default=0.0)
        end()
        return {
            "replies": np.array([_digest(seen.reply) for seen in warm]),
            "scores": np.array([seen.score for seen in warm]),
        }

    work = len(problems) if unit == "episode" else len(warm)
    return Side(run, answer=answer, figures=lambda: {"java_bytes": peak}, work=work, helpers_cpu=children_cpu)


def _digest(reply: str) -> int:
    """Of the words in any order: each simulator lists things in its own."""
    return zlib.crc32(" ".join(sorted(re.findall(r"\w+", reply))).encode())
