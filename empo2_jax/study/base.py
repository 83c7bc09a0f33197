"""The nouns of a study, and the TOML file that defines one.

A study file has `base` (a configuration), `seeds`, `reference` (an arm) and `[arms.NAME]` tables of overrides; the
first arm is the one that is compared with the others. `[common]` holds overrides of all arms, and an arm may name
another `base`. `adaptation_trials` and `adaptation_arms` ask for test-time adaptation of these arms' trained policies.
"""

import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from empo2_jax.config import Config
from empo2_jax.config_file import load_config
from empo2_jax.errors import ConfigError
from empo2_jax.run_record import identity

MAX_SEEDS = 1000
_KEYS = {"base", "seeds", "reference", "arms", "common", "adaptation_trials", "adaptation_arms"}
_NEEDED = "base, seeds, reference and [arms.*] are needed"


@dataclass(frozen=True)
class Arm:
    """One column of the tables: a configuration and what it changes."""

    name: str
    base: Path
    overrides: tuple[str, ...]  # section.key=value, the value in JSON, which is TOML too

    def config(self, seed: int) -> Config:
        """The resolved configuration of one of its runs."""
        return load_config(self.base, [*self.overrides, f"run.seed={seed}"])


@dataclass(frozen=True)
class Study:
    """One study file."""

    name: str
    path: Path
    seeds: int
    reference: str
    arms: dict[str, Arm]
    adaptation_trials: int = 0
    adaptation_arms: tuple[str, ...] = ()

    @property
    def tested(self) -> str:
        """The arm that is compared with the others."""
        return next(iter(self.arms))


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    arm: Arm
    seed: int
    trials: int  # of adaptation after it; 0 = none

    def __str__(self) -> str:
        """As in messages."""
        return f"arm {self.arm.name}, seed {self.seed}"

    def fingerprint(self) -> str:
        """Hash of everything that reaches its numbers."""
        values = [settings(self.arm.config(self.seed)), self.trials]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def settings(config: Config) -> dict[str, Any]:
    """`section.key` to value of all that reaches the numbers of a finished run: its identity, and its length."""
    return identity(config) | {"run.iterations": config.run.iterations, "reflexion.trials": config.reflexion.trials}


def load_study(path: Path) -> Study:
    """Read and check a study; every arm's configuration is validated."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        base, seeds, reference = path.parent / values["base"], int(values["seeds"]), str(values["reference"])
        common = _flat(values.get("common", {}))
        arms = {name: _arm(name, base, path.parent, common, arm) for name, arm in values["arms"].items()}
        trials, adapted = int(values.get("adaptation_trials", 0)), tuple(values.get("adaptation_arms", ()))
    except OSError as error:
        raise ConfigError(f"{path}: not a study: {error.strerror}; {_NEEDED}") from None
    except KeyError as error:
        raise ConfigError(f"{path}: not a study: no {error.args[0]}; {_NEEDED}") from None
    except (tomllib.TOMLDecodeError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: not a study: {error}; {_NEEDED}") from None
    if unknown := sorted(values.keys() - _KEYS):
        raise ConfigError(f"{path}: unknown key `{unknown[0]}`; {', '.join(sorted(_KEYS))} are allowed")
    for key, names in (("reference", (reference,)), ("adaptation_arms", adapted)):
        for name in names:
            if name not in arms:
                raise ConfigError(f"{path}: {key} = {name!r} is not one of the arms {', '.join(arms)}")
    if not 1 <= seeds <= MAX_SEEDS or trials < 0 or bool(trials) != bool(adapted):
        raise ConfigError(
            f"{path}: seeds = {seeds}, adaptation_trials = {trials}, adaptation_arms = {list(adapted)}: "
            f"1 to {MAX_SEEDS} seeds are allowed, and adaptation needs both of its keys"
        )
    configs = {name: arm.config(0) for name, arm in arms.items()}
    for name, config in configs.items():
        if config.run.mirror:
            raise ConfigError(f'{path}: arm {name}: run.mirror = {config.run.mirror!r} is one run\'s; "" is allowed')
    check_same_panel(configs, reference, str(path))
    return Study(path.stem, path, seeds, reference, arms, trials, adapted)


def _arm(name: str, base: Path, folder: Path, common: list[tuple[str, Any]], values: dict[str, Any]) -> Arm:
    changes = dict(common) | dict(_flat({key: value for key, value in values.items() if key != "base"}))
    own = folder / str(values["base"]) if "base" in values else base
    return Arm(name, own, tuple(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in changes.items()))


def check_same_panel(configs: dict[str, Config], reference: str, where: str) -> None:
    """Raise `ConfigError` where a configuration is not evaluated as that named `reference`: scores do not compare."""
    panels = {name: _panel(config) for name, config in configs.items()}
    for name, panel in panels.items():
        for key, value in panel.items():
            if panels[reference][key] != value:
                raise ConfigError(
                    f"{where}: {name} and {reference} are evaluated on different panels: {key} = {value!r} and "
                    f"{panels[reference][key]!r}; equal ones are allowed"
                )


def _panel(config: Config) -> dict[str, Any]:
    """What scores must share to be compared; a panel file counts by what it says, not by where it lies."""
    of_env = {f"env.{key}" for key in ("name", "tasks", "step_limit", "simplification", "data")}
    values = identity(config).items()
    return {key: value for key, value in values if key.startswith("evaluation.") or key in of_env}


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for key, value in values.items():
        items += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return items


def cells_of(study: Study, seeds: int | None = None, arms: tuple[str, ...] = ()) -> list[Cell]:
    """The runs of a study, or of its first `seeds` seeds and some of its arms; seed by seed.

    Raises:
        ConfigError: more or fewer seeds than allowed, or an arm that the study lacks.
    """
    count = study.seeds if seeds is None else seeds
    if not 1 <= count <= MAX_SEEDS:
        raise ConfigError(f"--seeds {count}: 1 to {MAX_SEEDS} are allowed ({study.path} has {study.seeds})")
    if unknown := [name for name in arms if name not in study.arms]:
        raise ConfigError(f"{study.path}: no arm {unknown[0]!r}; the arms are {', '.join(study.arms)}")
    chosen = [arm for name, arm in study.arms.items() if not arms or name in arms]
    trials = {name: study.adaptation_trials for name in study.adaptation_arms}
    return [Cell(arm, seed, trials.get(arm.name, 0)) for seed in range(count) for arm in chosen]
