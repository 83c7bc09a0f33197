"""Evaluation panels as data: a TOML file fixes the problems, their repeats, the temperature and the seed.

`evaluation.panel` names one. Its figures become those of `[evaluation]` when a configuration is read, so training,
`empo2 evaluate` and studies use them alike. Whether a problem exists is the environment's knowledge and asked there.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from empo2_jax.errors import ConfigError
from empo2_jax.readers import read_toml, shaped

Numbers = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, strict=False)]


class PanelFile(BaseModel):
    """One panel."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    env: str = Field(description="name of the environment family")
    split: Literal["train", "dev", "test"] = Field(description="split that the problems are from")
    repeats: int = Field(ge=1, description="episodes per problem")
    temperature: float = Field(ge=0, description="sampling temperature")
    seed: int = Field(ge=0, description="seed of every draw")
    tasks: dict[str, Numbers] = Field(min_length=1, description="by task: numbers of its variations or goals")

    @field_validator("tasks")
    @classmethod
    def _no_problem_twice(cls, tasks: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        for name, numbers in tasks.items():
            if len(set(numbers)) < len(numbers):
                raise ValueError(f"{name} has a number twice")
        return tasks

    def figures(self) -> dict[str, str | int | float]:
        """What the keys of `[evaluation]` are under this panel; `variations` is that of its largest task."""
        largest = max(map(len, self.tasks.values()))
        figures: dict[str, str | int | float] = {"split": self.split, "variations": largest, "repeats": self.repeats}
        return figures | {"temperature": self.temperature, "seed": self.seed}


def load_panel(path: Path) -> PanelFile:
    """Read and check a panel file; raises `ConfigError` that names the file and the key."""
    if not path.is_file():
        raise ConfigError(f"evaluation.panel: {path}: no such file")
    return shaped(read_toml(path), PanelFile, str(path), ConfigError)
