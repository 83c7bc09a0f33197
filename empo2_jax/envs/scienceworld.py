"""ScienceWorld: thirty elementary-science tasks in a simulated house (the paper's main environment, section 5).

`family` is the entry. Environments step the simulator leanly and share a pool of Java processes. What goes wrong in
the simulator raises `EnvError`; what the policy does wrong is an ordinary observation. Steps are not counted here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

from empo2_jax.config import EnvConfig
from empo2_jax.envs import actions, scienceworld_text
from empo2_jax.envs.pool import Pool
from empo2_jax.envs.scienceworld_demos import Demonstrator
from empo2_jax.envs.scienceworld_jvm import DETERMINISTIC_FLAGS, LEAN_FLAGS, Jvm
from empo2_jax.envs.scienceworld_tasks import SPLITS, lookup
from empo2_jax.errors import ConfigError, EnvError
from empo2_jax.types import Message, Observation, Task

NAME = "scienceworld"
SIMPLIFICATIONS = (
    "easy",
    "teleportAction",
    "selfWateringFlowerPots",
    "openContainers",
    "openDoors",
    "noElectricalAction",
)

Resolver = Literal["ours", "released-code"]
T = TypeVar("T")


class ScienceWorldEnvironment:
    """One episode at a time on a leased simulator; leases at the first reset, replaces a dead one at the next.

    The score of an episode starts at 0; points that a task grants for where the agent begins come with the first
    step.
    """

    def __init__(
        self,
        pool: Pool[Jvm],
        simplification: str = "",
        resolution: Resolver = "ours",
    ) -> None:
        self.goal = ""
        self._pool = pool
        self._simplification = simplification
        self._resolution = resolution
        self._jvm: Jvm | None = None
        self._templates: tuple[str, ...] = ()
        self._last: Observation | None = None
        self._where = NAME

    def reset(self, task: Task, seed: int) -> Observation:
        """Start `task`; the variation fixes everything, so `seed` is not used. The text is the room and inventory."""
        info = lookup(task.name)
        if not 0 <= task.variation < info.variations:
            raise EnvError(f"{task}: no such variation; {info.name} has 0 to {info.variations - 1}")
        self._where = str(task)
        self._last = None
        jvm = self._fresh_lease()
        self._checked(lambda: jvm.load(info.name, task.variation, self._simplification))
        self.goal = self._checked(jvm.task_description)
        self._templates = self._templates or self._checked(jvm.templates)
        state = self._state(jvm)
        self._last = Observation(state, 0.0, 0.0, False, False, state)
        return self._last

    def step(self, action: str) -> Observation:
        """Resolve and apply `action`. After the end of an episode nothing happens any more and the reward is 0."""
        if self._last is None or self._jvm is None:
            raise EnvError(f"{self._where}: step before a reset, or after the simulator failed")
        last = self._last
        if last.done:
            return Observation(last.text, 0.0, last.score, True, last.success, last.state, "", "invalid")
        jvm = self._jvm
        sent, how, reply, score, done = self._checked(lambda: self._apply(jvm, action))
        if scienceworld_text.crashed(reply):
            self._drop()
            raise EnvError(f"{self._where}: exception in the simulator after {sent!r}: {reply.strip()[:200]}")
        state = self._state(jvm)
        success = score >= scienceworld_text.MAX_SCORE
        done = done or success or score < 0
        self._last = Observation(reply, score - last.score, score, done, success, state, sent, how)
        return self._last

    def admissible_actions(self) -> list[str]:
        """Every valid action except forbidden ones, sorted; up to thousands, about 50 ms."""
        if self._last is None or self._jvm is None:
            raise EnvError(f"{self._where}: no episode is running")
        valid = self._checked(self._jvm.valid_actions)
        return [action for action in valid if action not in actions.FORBIDDEN]

    def close(self) -> None:
        """Give the simulator back to the pool; safe to call twice."""
        self._drop()

    def _apply(self, jvm: Jvm, text: str) -> tuple[str, actions.How, str, float, bool]:
        sent, how = actions.resolve(text, self._templates)
        if how != "invalid" and self._resolution == "released-code":
            _, nearest = actions.most_similar(sent, self.admissible_actions())
            sent, how = nearest, "exact" if nearest == sent else "similar"
        if how == "invalid":
            score = self._last.score if self._last else 0.0
            return "", "invalid", "No known action matches that input.", score, False
        reply, score, done = jvm.step(sent)
        if not scienceworld_text.refused(reply):
            return sent, how, reply, float(score), done
        return sent, "invalid", reply, float(score), done

    def _state(self, jvm: Jvm) -> str:
        return self._checked(lambda: f"{jvm.look().strip()}\n{jvm.inventory().strip()}")

    def _fresh_lease(self) -> Jvm:
        if self._jvm is not None and not self._jvm.usable:
            self._drop()
        if self._jvm is None:
            self._jvm = self._pool.lease()
        return self._jvm

    def _checked(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except EnvError as error:
            self._drop()
            raise EnvError(f"{self._where}: {error}") from error

    def _drop(self) -> None:
        self._last = None
        if self._jvm is not None:
            self._pool.give_back(self._jvm)
            self._jvm = None


class ScienceWorldFamily:
    """Tasks, prompts and pooled environments; made by `family`."""

    name = NAME

    def __init__(
        self,
        tasks: dict[str, list[Task]],
        simplification: str,
        pool: Pool[Jvm],
        resolution: Resolver,
    ) -> None:
        self._tasks = tasks
        self._simplification = simplification
        self._pool = pool
        self._resolution: Resolver = resolution

    def tasks(self, split: str) -> list[Task]:
        """Configured tasks of "train", "dev" or "test", by task, then variation."""
        if split not in self._tasks:
            raise ConfigError(f"scienceworld: unknown split {split!r}; allowed: {', '.join(SPLITS)}")
        return list(self._tasks[split])

    def vocabulary(self) -> list[str]:
        """None: the language is open."""
        return []

    def make(self) -> ScienceWorldEnvironment:
        """An environment; its simulator starts or is reused at the first reset."""
        return ScienceWorldEnvironment(self._pool, self._simplification, self._resolution)

    def system_prompt(self) -> str:
        """The model's own default."""
        return ""

    def first_turn(self, goal: str, observation: str) -> str:
        """Instruction, goal, room and inventory."""
        teleport = "teleportAction" in self._simplification or "easy" in self._simplification
        return scienceworld_text.first_turn(goal, observation, teleport)

    def next_turn(self, observation: str) -> str:
        """The simulator's reply."""
        return scienceworld_text.next_turn(observation)

    def tip_request(self, observation: str, score: float) -> str:
        """The last reply and the request for one tip."""
        return scienceworld_text.tip_request(observation, score)

    def memory_key(self, goal: str, state: str) -> str:
        """Goal, then room and inventory: the same goal in another state has another key."""
        return f"{goal}\n{state}"

    def scripted_tip(self, goal: str, steps: Sequence[tuple[str, str]], score: float) -> str:
        """A truthful sentence by rule from (action, reply) pairs; "" without steps."""
        return scienceworld_text.scripted_tip(steps, score)

    def demonstrations(self, split: str, count: int, seed: int) -> list[list[Message]]:
        """`count` chats made from gold paths of `split`, see `Demonstrator`; repeatable if deterministic."""
        return Demonstrator(self, self._simplification).chats(self.tasks(split), count, seed)

    def close(self) -> None:
        """Kill every simulator; safe to call twice."""
        self._pool.close()


def family(
    *,
    tasks: Sequence[str],
    variations: Mapping[str, int | Sequence[int]] | None = None,
    simplification: str = "",
    deterministic: bool = False,
    workers: int = 2,
    step_timeout_s: float = 60.0,
    resolution: Resolver = "ours",
) -> ScienceWorldFamily:
    """ScienceWorld with some of its tasks. Raises `ConfigError` for values that cannot work; starts no simulator.

    Args:
        tasks: names ("melt"), package ids ("1-2") or alphabetical indices ("22").
        variations: by split, how many from its start (at most as many as it has) or which variation numbers;
            a split that is not named has all of its variations.
        simplification: "" or names of `SIMPLIFICATIONS` joined by commas.
        deterministic: fix the order of the simulator's sets, so that equal actions give equal transcripts.
        workers: simulators kept warm (110 MB each); every open environment has its own.
        step_timeout_s: deadline of a call to the simulator; a later answer is an `EnvError`.
        resolution: "released-code" sends the most similar valid action whatever its verb, for comparisons only.

    """
    _check(tasks, variations, simplification, workers, step_timeout_s, resolution)
    flags = LEAN_FLAGS + (DETERMINISTIC_FLAGS if deterministic else ())
    names = list(dict.fromkeys(lookup(task).name for task in tasks))
    by_split = {
        split: [Task(NAME, name, number) for name in names for number in _numbers(name, split, (variations or {}))]
        for split in SPLITS
    }
    pool = Pool(lambda: Jvm(flags, step_timeout_s), workers)
    return ScienceWorldFamily(by_split, simplification, pool, resolution)


def from_config(config: EnvConfig, *, panel: int, workers: int) -> ScienceWorldFamily:
    """The family that `[env]` describes.

    Args:
        config: The section.
        panel: Variations of an evaluation.
        workers: Episodes that run at once.
    """
    return family(
        tasks=config.tasks,
        variations={"train": config.train_variations, "dev": panel, "test": panel},
        simplification=config.simplification,
        deterministic=config.deterministic,
        workers=workers,
        step_timeout_s=config.step_timeout_s,
        resolution=config.resolution,
    )


def _numbers(name: str, split: str, variations: Mapping[str, int | Sequence[int]]) -> list[int]:
    allowed = lookup(name).split(split)
    chosen = variations.get(split)
    if chosen is None:
        return list(allowed)
    if isinstance(chosen, int):
        return list(allowed[:chosen])
    for number in chosen:
        if number not in allowed:
            raise ConfigError(
                f"scienceworld: variation {number} is not in the {split} split of {name}, "
                f"which has {allowed.start} to {allowed.stop - 1}"
            )
    return list(chosen)


def _check(
    tasks: Sequence[str],
    variations: Mapping[str, int | Sequence[int]] | None,
    simplification: str,
    workers: int,
    step_timeout_s: float,
    resolution: str,
) -> None:
    names = [lookup(task).name for task in tasks]
    parts = [part for part in simplification.split(",") if part]
    electrical = [name for name in names if "power-component" in name or "conductivity" in name]
    problems = {
        "tasks is empty": not names,
        f"variations has keys {sorted(variations or ())}; allowed: {', '.join(SPLITS)}": bool(
            set(variations or ()) - set(SPLITS)
        ),
        f"simplification {simplification!r}; allowed: {', '.join(SIMPLIFICATIONS)}": bool(
            set(parts) - set(SIMPLIFICATIONS)
        ),
        f"noElectricalAction makes {electrical} unsolvable": bool(electrical) and "noElectricalAction" in parts,
        f"workers = {workers}; at least 1": workers < 1,
        f"step_timeout_s = {step_timeout_s}; must be positive": step_timeout_s <= 0,
        f"resolution = {resolution!r}; ours or released-code": resolution not in ("ours", "released-code"),
    }
    for problem, present in problems.items():
        if present:
            raise ConfigError(f"scienceworld: {problem}")
