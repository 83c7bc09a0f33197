"""The nouns of a study, and the TOML file that defines one.

A study file has `base` (a configuration), `seeds`, `reference` (an arm) and `[arms.NAME]` tables of overrides; the
first arm is the one that is compared with the others. `[common]` holds overrides of all arms, and an arm may name
another `base`. `adaptation_trials` and `adaptation_arms` ask for test-time adaptation of these arms' trained policies,
on the problems of `adaptation_panel` where they are to be others. A file may extend another one key by key.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from empo2_jax.config import Config
from empo2_jax.config_file import load_config, merge
from empo2_jax.errors import ConfigError, wrong_value
from empo2_jax.panels import load_panel
from empo2_jax.readers import read_toml
from empo2_jax.run_record import identity

MAX_SEEDS = 1000
STARTS = "starts"  # folder of the warm starts that the runs of a study share
_PATHS = ("base", "adaptation_panel")  # keys
_NAME = re.compile(r"\w[\w+.-]*")


class StudyFile(BaseModel):
    """The keys of a study file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    base: str = Field(description="configuration of all arms, relative to the file")
    seeds: int = Field(ge=1, le=MAX_SEEDS, description="seeds 0 to seeds − 1 of every arm")
    reference: str = Field(description="the arm that the first arm is measured against")
    arms: dict[str, dict[str, Any]] = Field(min_length=1, description="by name: overrides, and maybe another `base`")
    common: dict[str, Any] = Field({}, description="overrides of all arms")
    adaptation_trials: int = Field(0, ge=0, description="of test-time adaptation after training")
    adaptation_arms: tuple[str, ...] = Field((), strict=False, description="whose policies are adapted")
    adaptation_panel: str = Field("", description="panel file to adapt on, relative to the file; empty = as evaluated")


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
    adaptation_panel: Path | None = None

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
    panel: Path | None = None  # of the adaptation; None as evaluated

    def __str__(self) -> str:
        """As in messages."""
        return f"arm {self.arm.name}, seed {self.seed}"

    def fingerprint(self) -> str:
        """Hash of everything that reaches its numbers."""
        panel = [load_panel(self.panel).model_dump_json()] if self.panel else []
        return fingerprint(settings(self.arm.config(self.seed)), self.trials, *panel)


def fingerprint(values: Mapping[str, Any], trials: int, *panel: str) -> str:
    """Hash of a run's `settings`, its trials of adaptation, and the panel of these where it is another."""
    return hashlib.sha256(json.dumps([values, trials, *panel], sort_keys=True).encode()).hexdigest()[:16]


def settings(config: Config) -> dict[str, Any]:
    """`section.key` to value of all that reaches the numbers of a finished run: its identity, and its length."""
    return identity(config) | {"run.iterations": config.run.iterations, "reflexion.trials": config.reflexion.trials}


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` as they were recorded, with the defaults of keys that there were not yet."""
    return json.loads(json.dumps(settings(Config()) | dict(values)))


def load_study(path: Path) -> Study:
    """Read and check a study; every arm's configuration is validated."""
    try:
        file = StudyFile.model_validate(_read(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: not a study: {wrong_value(error.errors()[0])}") from None
    for name in file.arms:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{path}: arm {name!r}: letters, digits, `_`, `-`, `+` and `.` are allowed, as it is a folder's name"
            )
    common = _flat(file.common)
    arms = {name: _arm(name, Path(file.base), common, arm) for name, arm in file.arms.items()}
    if STARTS in arms:
        raise ConfigError(f"{path}: an arm cannot be called {STARTS}: the folder of the warm starts is")
    for key, names in (("reference", (file.reference,)), ("adaptation_arms", file.adaptation_arms)):
        for name in names:
            if name not in arms:
                raise ConfigError(f"{path}: {key} = {name!r} is not one of the arms {', '.join(arms)}")
    if bool(file.adaptation_trials) != bool(file.adaptation_arms):
        raise ConfigError(
            f"{path}: adaptation_trials = {file.adaptation_trials}, adaptation_arms = {list(file.adaptation_arms)}: "
            "both or none is allowed"
        )
    if file.adaptation_panel and not file.adaptation_trials:
        raise ConfigError(f"{path}: adaptation_panel = {file.adaptation_panel!r} without adaptation_trials")
    panel = Path(file.adaptation_panel) if file.adaptation_panel else None
    if panel:
        load_panel(panel)
    configs = {name: arm.config(0) for name, arm in arms.items()}
    for name, config in configs.items():
        if config.run.mirror:
            raise ConfigError(f'{path}: arm {name}: run.mirror = {config.run.mirror!r} is one run\'s; "" is allowed')
    check_same_panel({name: identity(config) for name, config in configs.items()}, file.reference, str(path))
    adaptation = (file.adaptation_trials, file.adaptation_arms, panel)
    return Study(path.stem, path, file.seeds, file.reference, arms, *adaptation)


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a file on those of the file that it extends; paths in them are from here then."""
    if path.resolve() in seen:
        raise ConfigError(f"{path}: `extends` runs in a circle")
    values = read_toml(path)
    parent = values.pop("extends", "")
    if not isinstance(parent, str):
        raise ConfigError(f"{path}: extends = {parent!r}: the name of one file is allowed")
    arms = values.get("arms")
    for table in (values, *(arms.values() if isinstance(arms, dict) else ())):
        for key in _PATHS:
            if isinstance(table, dict) and isinstance(table.get(key), str):
                table[key] = str(path.parent / table[key])
    return merge(_read(path.parent / parent, (*seen, path.resolve())), values) if parent else values


def _arm(name: str, base: Path, common: list[tuple[str, Any]], values: dict[str, Any]) -> Arm:
    changes = dict(common) | dict(_flat({key: value for key, value in values.items() if key != "base"}))
    return Arm(
        name,
        Path(str(values.get("base", base))),
        tuple(f"{key}={json.dumps(value, ensure_ascii=False, default=str)}" for key, value in changes.items()),
    )


def check_same_panel(arms: Mapping[str, Mapping[str, Any]], reference: str, where: str) -> None:
    """Refuse configurations that are not evaluated as that named `reference`: their scores do not compare.

    Args:
        arms: By name: `section.key` to value, as `run_record.identity` has it.
        reference: One of the names.
        where: Begins the message.

    Raises:
        ConfigError: names the first key that differs.
    """
    panels = {name: _panel(values) for name, values in arms.items()}
    for name, panel in panels.items():
        for key in panel | panels[reference]:
            if panel.get(key) != panels[reference].get(key):
                raise ConfigError(
                    f"{where}: {name} and {reference} are evaluated on different panels: {key} = {panel.get(key)!r} "
                    f"and {panels[reference].get(key)!r}; equal ones are allowed"
                )


def _panel(values: Mapping[str, Any]) -> dict[str, Any]:
    """What scores must share to be compared; a panel file counts by what it says, not by where it lies."""
    of_env = {f"env.{key}" for key in ("name", "tasks", "step_limit", "simplification", "data", "products", "nouns")}
    return {key: value for key, value in values.items() if key.startswith("evaluation.") or key in of_env}


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
    adapted = {name: (study.adaptation_trials, study.adaptation_panel) for name in study.adaptation_arms}
    return [Cell(arm, seed, *adapted.get(arm.name, (0, None))) for seed in range(count) for arm in chosen]
