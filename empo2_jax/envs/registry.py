"""From `env.name` to an environment family. Nothing is imported until it is named."""

import importlib
from types import ModuleType

from empo2_jax.config import EnvConfig
from empo2_jax.envs.base import EnvironmentFamily
from empo2_jax.errors import ConfigError

BUILT_IN = ("toy", "scienceworld", "webshop", "textworld", "alfworld")


def make_family(config: EnvConfig, *, panel: int = 20, workers: int = 1) -> EnvironmentFamily:
    """What `from_config` of the module that `env.name` names gives.

    Args:
        config: The section `[env]`.
        panel: Variations per task of an evaluation without a panel file.
        workers: Simulators kept for episodes that run at once.

    Raises:
        ConfigError: no such environment, its package is not installed, or what it gives is no family.
    """
    family = environment_module(config).from_config(config, panel=panel, workers=workers)
    if not isinstance(family, EnvironmentFamily):
        wanted = [name for name in (*EnvironmentFamily.__annotations__, *vars(EnvironmentFamily)) if name[0] != "_"]
        missing = ", ".join(name for name in wanted if name not in dir(family))
        raise ConfigError(f"env.name = {config.name!r}: its family lacks {missing}; see docs/extending.md")
    return family


def environment_module(config: EnvConfig) -> ModuleType:
    """The module that `env.name` names, which has a `from_config`; raises `ConfigError` as `make_family` does."""
    name = config.name if "." in config.name else f"empo2_jax.envs.{config.name}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # the module is there, something it imports is not
            raise ConfigError(
                f"env.name = {config.name!r} needs the package {error.name!r}: install the extra envs or textworld"
            ) from None
        there = ", ".join(BUILT_IN)
        raise ConfigError(f"env.name = {config.name!r}: no such environment; {there} are there") from None
    if "from_config" not in vars(module):
        raise ConfigError(f"env.name = {config.name!r}: the module has no from_config; see docs/extending.md")
    return module
