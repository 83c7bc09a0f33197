"""The shapes of what a study reads back: the row that is left of a run, and results files (logs: `records.py`).

A run may be of another version or damaged, and results may have been edited: what is read is checked before any table
is made of it, and a mistake is named with its place. What stands in a row is said where it is made (`runs.py`).
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from empo2_jax.metrics import Record
from empo2_jax.readers import shaped
from empo2_jax.records import Curve

EVALUATED, TRIED = "evaluation", "trials"  # without memory; or with reflections of earlier trials
SPENT = ("environment_steps", "prompt_tokens", "sampled_tokens", "tip_calls")
Score = Annotated[float, Field(ge=-1e6, le=1e6)]  # points; sums of many are numbers, too
Point = Annotated[tuple[int, float, float], Field(strict=False)]
TrainingPoint = Annotated[tuple[int, float, float | None, float], Field(strict=False)]


class _Shape(BaseModel):
    """Keys that are needed; others are allowed."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Adapted(_Shape):
    score: Curve
    best: Curve
    panel: str = ""


class Row(_Shape):
    """What a finished run says."""

    commit: str
    earlier_commits: str = ""
    protocol: Literal["evaluation", "trials"]
    score: Score
    success: float
    tasks: dict[str, Score] = Field(min_length=1)
    panel: list[Point]
    training: list[TrainingPoint]
    updates: float
    seconds: float
    memory_share: float | None
    environment_steps: float
    prompt_tokens: float
    sampled_tokens: float
    tip_calls: float
    adaptation: Annotated[_Adapted, Field(default=None)]  # may be missing, not null
    problems: str = ""


class NamedRow(Row):
    """The row of a cell."""

    arm: str
    seed: int = Field(ge=0)
    fingerprint: str = ""  # of its configuration; earlier results had none


class KeptRow(NamedRow):
    """A line of a study's `rows.jsonl`."""

    fingerprint: str


class _Arm(_Shape):
    base: str
    overrides: list[str]
    config: dict[str, Any]
    adaptation_panel: Annotated[str, Field(default="")]  # as JSON, where it is not the one of the evaluations


class ResultsFile(_Shape):
    """A results file without its `format`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    study: str
    tested: str
    reference: str
    command: str
    facts: dict[str, str]
    arms: dict[str, _Arm]
    rows: list[NamedRow]
    failed: list[str]


def checked(shape: type[BaseModel], record: Record, where: str) -> Record:
    """`record` as it is; raises `DataError` that begins with `where` and names the key if it lacks the shape."""
    shaped(record, shape, where)
    return record


def problems_key(*protocol: str, problems: Iterable[tuple[str, int]]) -> str:
    """A short name of problems (task, variation) and how they are played: equal for equal ones, in whatever order."""
    text = json.dumps([*protocol, sorted(problems)], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
