"""The shapes of what runs and studies leave to read, for `readers.py`: what a line or file must hold to be used.

Keys that a shape does not name stay as they are. Who writes them says what they mean: `metrics.py` (metrics, episodes),
`evaluation.py`, `adaptation.py`, `run_record.py`, `fork.py` and `study/runs.py` (rows).
"""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, with_config
from typing_extensions import TypedDict

from empo2_jax.errors import short
from empo2_jax.readers import RECORD, Whole
from empo2_jax.types import StopReason

LARGEST = 1e300  # of a number


def _scalars(record: dict[str, Any]) -> dict[str, Any]:
    """Metrics: the iteration, numbers, and texts where a number was not finite."""
    iteration = record.get("iteration")
    if not isinstance(iteration, int) or isinstance(iteration, bool) or not 0 <= iteration <= LARGEST:
        raise ValueError("no integer `iteration`, at least 0")
    for key, value in record.items():
        if not isinstance(value, str) and not (isinstance(value, int | float) and abs(value) <= LARGEST):
            raise ValueError(f"{key} = {short(value)}: a finite number or a text is allowed")
    return record


Metrics = Annotated[dict[str, Any], AfterValidator(_scalars)]
Facts = dict[str, str]  # run.json


@with_config(RECORD)
class Fork(TypedDict):
    """`fork.json`."""

    run: str
    step: Whole
    changed: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]]  # old, new


@with_config(RECORD)
class ShownTip(TypedDict):
    """A tip in a recorded step."""

    content: str
    score: float


@with_config(RECORD)
class RecordedStep(TypedDict):
    """A step of a recorded episode."""

    observation: str
    state_before: str
    action: str
    resolved: str
    resolution: str
    intrinsic_reward: float
    action_tokens: Whole
    tips: list[ShownTip]


@with_config(RECORD)
class RecordedEpisode(TypedDict):
    """A line of `episodes/<iteration>.jsonl`."""

    id: str
    task: str
    mode: str
    score: float
    success: bool
    stop_reason: Annotated[StopReason, Field(strict=False)]
    extrinsic_return: float
    intrinsic_return: float
    tip_written: str
    steps: list[RecordedStep]


Curve = Annotated[list[float], Field(min_length=1)]  # a value per repeat or trial


@with_config(RECORD)
class PlayedVariation(TypedDict):
    """A row of an evaluation."""

    task: str
    variation: Whole
    scores: Curve


@with_config(RECORD)
class Evaluated(TypedDict):
    """A line of `evaluations.jsonl`."""

    label: str
    iteration: Whole
    split: str
    complete: bool
    score: float
    success: float
    valid_actions: float
    rows: Annotated[list[PlayedVariation], Field(min_length=1)]


@with_config(RECORD)
class TriedVariation(TypedDict):
    """A row of an adaptation: None where an episode failed."""

    task: str
    variation: Whole
    scores: Annotated[list[float | None], Field(min_length=1)]


@with_config(RECORD)
class Tried(TypedDict):
    """A line of `adaptations.jsonl`, with a value per trial."""

    label: str
    iteration: Whole
    split: str
    memory: str
    complete: bool
    score: Curve
    success: Curve
    best_score: Curve
    rows: Annotated[list[TriedVariation], Field(min_length=1)]


def _one_per_trial(record: Tried) -> Tried:
    curves = (record["score"], record["best_score"], record["success"], *(row["scores"] for row in record["rows"]))
    if len(lengths := sorted({len(curve) for curve in curves})) > 1:
        raise ValueError(f"curves of {lengths[0]} and {lengths[-1]} trials; one length is allowed")
    return record


Adapted = Annotated[Tried, AfterValidator(_one_per_trial)]
