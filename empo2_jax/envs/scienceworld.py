"""ScienceWorld: thirty elementary-science tasks in a simulated house (the paper's main environment, section 5).

`family` is the entry: tasks, prompts and environments (`scienceworld_env`) that share a pool of Java processes.
"""

from collections.abc import Iterator, Mapping, Sequence

from empo2_jax.config import EnvConfig
from empo2_jax.envs import scienceworld_text
from empo2_jax.envs.pool import Pool
from empo2_jax.envs.scienceworld_demos import KINDS, Demonstrator, GoldPaths, worked_example
from empo2_jax.envs.scienceworld_env import NAME, Resolver, ScienceWorldEnvironment
from empo2_jax.envs.scienceworld_jvm import DETERMINISTIC_FLAGS, LEAN_FLAGS, Jvm
from empo2_jax.envs.scienceworld_package import PackageWorld
from empo2_jax.envs.scienceworld_tasks import PAPER_TASKS, SPLITS, lookup
from empo2_jax.errors import ConfigError
from empo2_jax.types import Message, Task

SIMPLIFICATIONS = (
    "easy",
    "teleportAction",
    "selfWateringFlowerPots",
    "openContainers",
    "openDoors",
    "noElectricalAction",
)


class ScienceWorldFamily:
    """Tasks, prompts and pooled environments; made by `family`."""

    name = NAME
    max_score = scienceworld_text.MAX_SCORE
    demonstration_kinds: tuple[str, ...] = KINDS

    def __init__(
        self,
        tasks: dict[str, list[Task]],
        simplification: str,
        pool: Pool[Jvm],
        resolution: Resolver,
        examples: int = 0,
    ) -> None:
        self.pool = pool
        self._tasks = tasks
        self._examples = examples
        self._gold = GoldPaths(simplification)
        self._examples_of: dict[str, str] = {}  # text by task name
        self._task_of: dict[str, str] = {}  # task name by goal, as environments meet them
        self._simplification = simplification
        self._resolution: Resolver = resolution

    def tasks(self, split: str) -> list[Task]:
        """Configured tasks of "train", "dev" or "test", by task, then variation."""
        if split not in self._tasks:
            raise ConfigError(f"scienceworld: unknown split {split!r}; allowed: {', '.join(SPLITS)}")
        return list(self._tasks[split])

    def task(self, name: str, variation: int) -> Task:
        """A variation of any split; `name` is a name, a package id or an alphabetical index."""
        info = lookup(name)
        if not 0 <= variation < info.variations:
            raise ConfigError(f"scienceworld/{info.name} has no variation {variation}; 0 to {info.variations - 1}")
        return Task(NAME, info.name, variation)

    def solution(self, task: Task) -> list[str]:
        """The gold path: always solves the task, often longer than a step limit. Its Java process lives to `close`."""
        return self._gold.actions(task)

    def vocabulary(self) -> list[str]:
        """None: the language is open."""
        return []

    def make(self) -> ScienceWorldEnvironment:
        """An environment; its simulator starts or is reused at the first reset."""
        return ScienceWorldEnvironment(self.pool, self._simplification, self._resolution, self._task_of)

    def system_prompt(self) -> str:
        """The model's own default."""
        return ""

    def first_turn(self, goal: str, observation: str) -> str:
        """Instruction, worked examples of the same task if configured, goal, room and inventory."""
        teleport = "teleportAction" in self._simplification or "easy" in self._simplification
        return scienceworld_text.first_turn(goal, observation, teleport, self._worked_examples(goal))

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

    def demonstrations(self, split: str, count: int, seed: int, kinds: Sequence[str] = ()) -> list[list[Message]]:
        """`count` chats made from gold paths of `split`, see `Demonstrator`; repeatable if deterministic."""
        return Demonstrator(self, self._simplification).chats(self.tasks(split), count, seed, kinds or KINDS)

    def close(self) -> None:
        """Kill every simulator; safe to call twice."""
        self.pool.close()
        self._gold.close()

    def _worked_examples(self, goal: str) -> str:
        name = self._task_of.get(goal, "")
        if not self._examples or not name:
            return ""
        if name not in self._examples_of:
            # From the end of the split: training uses its first variations.
            numbers = list(lookup(name).split("train"))[-self._examples :]
            tasks = [Task(NAME, name, number) for number in numbers]
            self._examples_of[name] = "".join(worked_example(self, task) for task in tasks)
            self._gold.close()
        return self._examples_of[name]


def family(
    *,
    tasks: Sequence[str],
    variations: Mapping[str, int | Sequence[int]] | None = None,
    simplification: str = "",
    deterministic: bool = False,
    workers: int = 2,
    step_timeout_s: float = 60.0,
    resolution: Resolver = "ours",
    examples: int = 0,
) -> ScienceWorldFamily:
    """ScienceWorld with some of its tasks. Raises `ConfigError` for values that cannot work; starts no simulator.

    Args:
        tasks: names ("melt"), package ids ("1-2") or alphabetical indices ("22").
        variations: by split, how many from its start (at most as many as it has) or which variation numbers;
            a split that is not named has all of its variations.
        simplification: "" or names of `SIMPLIFICATIONS` joined by commas.
        deterministic: fix the order of the simulator's sets, so that equal actions give equal transcripts.
        workers: simulators kept warm (up to 130 MB each); every open environment has its own.
        step_timeout_s: deadline of a call to the simulator; a later answer is an `EnvError`.
        resolution: "released-code" sends the most similar valid action whatever its verb, for comparisons only.
        examples: worked examples in the first turn, from the last training variations of the same task.

    """
    _check(tasks, variations, simplification, workers, step_timeout_s, resolution)
    flags = LEAN_FLAGS + (DETERMINISTIC_FLAGS if deterministic else ())
    names = list(dict.fromkeys(lookup(task).name for task in tasks))
    by_split = {
        split: [Task(NAME, name, number) for name in names for number in _numbers(name, split, (variations or {}))]
        for split in SPLITS
    }
    pool = Pool(lambda: Jvm(flags, step_timeout_s), workers)
    return ScienceWorldFamily(by_split, simplification, pool, resolution, examples)


def from_config(config: EnvConfig, *, panel: int, workers: int) -> ScienceWorldFamily:
    """The family that `[env]` describes; without `tasks` the paper's 18.

    Args:
        config: The section.
        panel: Variations of an evaluation.
        workers: Episodes that run at once.
    """
    return family(
        tasks=config.tasks or PAPER_TASKS,
        variations={"train": config.train_variations, "dev": panel, "test": panel},
        simplification=config.simplification,
        deterministic=config.deterministic,
        workers=workers,
        step_timeout_s=config.step_timeout_s,
        resolution=config.resolution,
        examples=config.examples,
    )


def package_scores(config: EnvConfig, problems: Sequence[tuple[Task, Sequence[str]]]) -> Iterator[list[float]]:
    """Per problem the score after each action as the package's own client tells it, for `empo2 envs check --package`.

    It chooses between readings that look the same as ours does. Where `env.deterministic` is set its Java is too, else
    the same number may stand for another reading. Its lists of valid actions change its world (`Jvm.valid_actions`), so
    it makes none.
    """
    world = PackageWorld(DETERMINISTIC_FLAGS if config.deterministic else (), lists=False)
    try:
        for task, actions in problems:
            yield [score for _, score in world.play(task, config.simplification, actions, settle=True)]
    finally:
        world.close()


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
