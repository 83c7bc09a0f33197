"""Shapes of what runs leave: good records pass unchanged, an odd value is named with its key."""

from typing import Any

import pytest

from empo2_jax.errors import DataError
from empo2_jax.readers import shaped
from empo2_jax.records import Adapted, Evaluated, Facts, Fork, Metrics, RecordedEpisode
from tests.fixtures.recorded import adaptation, episode, evaluation, step

METRICS = {"iteration": 1, "episode/score": 2.5, "actor/entropy": "nan", "total/tip_calls": 3}
FORK = {"run": "/runs/a", "step": 3, "hash": "ab", "changed": {"run.seed": [0, 1]}}
GOOD: dict[str, tuple[Any, dict[str, Any]]] = {
    "metrics": (Metrics, METRICS),
    "facts": (Facts, {"commit": "abc"}),
    "fork": (Fork, FORK),
    "episode": (RecordedEpisode, episode(steps=[step(tips=[("go left", 3.0)])])),
    "evaluation": (Evaluated, evaluation("end", 2, 10.0)),
    "adaptation": (Adapted, adaptation([1.0, 2.0])),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_a_run_writes_is_of_its_shape(name: str) -> None:
    shape, record = GOOD[name]
    assert shaped(record, shape, "here") == record


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("metrics", {"iteration": True}, "no integer `iteration`, at least 0"),
        ("metrics", {"iteration": None}, "no integer `iteration`, at least 0"),
        ("metrics", {"iteration": 10**400}, "no integer `iteration`, at least 0"),
        ("metrics", {"episode/score": None}, "episode/score = None: a finite number or a text is allowed"),
        ("metrics", {"episode/score": [1]}, "episode/score = [1]: a finite number or a text is allowed"),
        ("metrics", {"a": float("nan")}, "a = nan: a finite number or a text is allowed"),
        ("metrics", {"a": 10**400}, f"a = 1{'0' * 56}...: a finite number or a text is allowed"),
        ("facts", {"commit": ["a"]}, "commit = ['a']: text is allowed"),
        ("fork", {"changed": {"run.seed": 5}}, "changed.run.seed = 5: a list is allowed"),
        ("fork", {"changed": {"run.seed": [1]}}, "changed.run.seed = [1]: a length of at least 2 is allowed"),
        ("fork", {"run": 5}, "run = 5: text is allowed"),
        ("episode", {"steps": [5]}, "steps[0] = 5: a table of keys and values is allowed"),
        ("episode", {"stop_reason": "bored"}, "stop_reason = 'bored': 'done', 'step_limit', 'length', "),
        ("episode", {"steps": [step() | {"tips": [{"content": 5, "score": 1.0}]}]}, "steps[0].tips[0].content = 5: te"),
        ("evaluation", {"score": None}, "score = None: a number is allowed"),
        ("evaluation", {"rows": []}, "rows = []: a length of at least 1 is allowed"),
        ("evaluation", {"rows": [{"task": "a", "variation": 0, "scores": [None]}]}, "rows[0].scores[0] = None: a num"),
        ("adaptation", {"best_score": [1.0]}, "curves of 1 and 2 trials; one length is allowed"),
        ("adaptation", {"score": ["x"]}, "score[0] = 'x': a number is allowed"),
    ],
)
def test_an_odd_value_is_named(name: str, changes: dict[str, Any], said: str) -> None:
    shape, record = GOOD[name]
    with pytest.raises(DataError) as caught:
        shaped(record | changes, shape, "here")
    assert str(caught.value).startswith(f"here: {said}")
