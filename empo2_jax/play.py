"""A person plays an environment in the terminal, or watches a recorded episode replayed against the real world.

The loop only asks and says: input and output are functions, so that a test, a terminal or another front end drives it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from empo2_jax.config import Config
from empo2_jax.config_file import load_config
from empo2_jax.envs.base import EnvironmentFamily
from empo2_jax.errors import ConfigError, DataError, EnvError
from empo2_jax.metrics import read_jsonl
from empo2_jax.randomness import words
from empo2_jax.types import Observation, Task

Ask = Callable[[str], str]
Say = Callable[[str], None]

HELP = "Type an action; ? lists what the world accepts now, ? WORD only what contains WORD; Ctrl-D ends."


def play(family: EnvironmentFamily, task: Task, seed: int, step_limit: int, ask: Ask, say: Say) -> float:
    """One episode by hand; returns its score. `ask` raises `EOFError` when the person has had enough."""
    environment = family.make()
    try:
        observation = environment.reset(task, seed)
        say(f"{task}, at most {step_limit} actions\n{environment.goal}\n\n{observation.text}\n\n{HELP}")
        step = 0
        while step < step_limit and not observation.done:
            try:
                text = ask(f"{step + 1}> ").strip()
            except EOFError:
                say("")
                break
            if text.startswith("?"):
                word = text[1:].strip()
                say("\n".join(action for action in environment.admissible_actions() if word in action))
            elif text:
                observation = environment.step(text)
                step += 1
                say(_told(text, observation))
        ending = "solved" if observation.success else "over" if observation.done else "stopped"
        say(f"{ending} after {step} actions with {observation.score:g} of {family.max_score:g} points")
        return observation.score
    finally:
        environment.close()


def _told(text: str, observation: Observation) -> str:
    sent = f", sent as {observation.resolved!r}" if observation.resolved not in ("", text) else ""
    note = f"[{observation.resolution}{sent}] " if observation.resolution != "exact" or sent else ""
    points = f"\n{observation.reward:+g} points, {observation.score:g} in all" if observation.reward else ""
    return f"{note}{observation.text}{points}"


def config_beside(file: Path) -> Config:
    """The configuration of the run that `file`, RUN/episodes/<iteration>.jsonl, belongs to."""
    path = file.parent.parent / "config.toml"
    if not path.is_file():
        raise DataError(f"{file}: not in RUN/episodes (no {path})")
    return load_config(path)


def replay(family: EnvironmentFamily, file: Path, episode: str, seed: int, say: Say) -> bool:
    """Send the actions of a recorded episode to the real environment again, and tell each step.

    Args:
        family: The environment of the run.
        file: `episodes/<iteration>.jsonl`.
        episode: Its id, or "" for the first of the file.
        seed: Seed of the run.
        say: Prints a line.

    Returns:
        Whether all observations and rewards agree.

    Raises:
        DataError: no such episode in the file, or a record that is none.
    """
    record = _find(file, episode)
    try:
        _, name, variation = str(record["task"]).split("/")
        task, steps = family.task(name, int(variation)), [dict(step) for step in record["steps"]]
        recorded = [(step["observation"], step["action"], float(step["reward"])) for step in steps]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file}: {record.get('id')}: not an episode record: {error!r}") from None
    say(f"{record['id']} of {task}, {len(recorded)} steps, score {record['score']:g}")
    differ, environment = [], family.make()
    try:
        observation = environment.reset(task, int(words(seed, "environment", str(record["id"]))[0]))
        for number, (text, action, reward) in enumerate(recorded):
            same_text = observation.text == text
            observation = environment.step(action)
            same = same_text and observation.reward == reward
            differ += [] if same else [number]
            mark = "=" if same else "≠"
            say(f"{mark} {number + 1}> {action}\n{_told(action, observation)}")
            if not same:
                say(f"  recorded: {text if not same_text else f'{reward:+g} points'}")
            if observation.done and number + 1 < len(recorded):
                differ.append(number + 1)
                say(f"  the episode is over here; recorded are {len(recorded) - number - 1} more steps")
                break
    except EnvError as error:
        say(f"the environment failed: {error}")
        return False
    finally:
        environment.close()
    agree = not differ and observation.score == record["score"]
    say(
        "observations and rewards agree"
        if agree
        else f"they differ, first in step {min(differ, default=len(recorded) - 1) + 1}"
    )
    return agree


def _find(file: Path, episode: str) -> dict[str, Any]:
    records = read_jsonl(file)
    found = [record for record in records if not episode or record.get("id") == episode]
    if not found:
        ids = ", ".join(str(record.get("id")) for record in records[:4])
        raise ConfigError(
            f"{file}: no episode {episode!r}; there are {ids or 'none'}{', …' if len(records) > 4 else ''}"
        )
    return found[0]
