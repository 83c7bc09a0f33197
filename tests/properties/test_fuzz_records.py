"""Files of models, runs and studies that are well-formed and odd: a result, or one error of the project."""

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2_jax.errors import Empo2Error
from empo2_jax.models.hf_config import HfConfig, Rope
from empo2_jax.models.qwen2_config import Qwen2Config, rope_frequencies
from empo2_jax.report import write_report
from empo2_jax.study.comparison import compare_runs
from empo2_jax.study.results import read_results, write_results
from empo2_jax.study.tables import tables
from tests.fixtures import studies
from tests.fixtures.fuzz import JSON, odd
from tests.fixtures.recorded import adaptation, episode, evaluation, step
from tests.fixtures.studies import make_results

CONFIG = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
MODEL = CONFIG | {"model_type": "qwen2", "vocab_size": 40, "max_position_embeddings": 64}
STEPS = [step(tips=[("go left", 3.0)]), step("cellar", novelty=1.0)]
FORK = {"run": "/runs/a", "step": 3, "hash": "ab", "changed": {"run.seed": [0, 1]}}
FILES: dict[str, Any] = {  # a good record of every file, which is a line where the name says so
    "metrics.jsonl": {"iteration": 1, "episode/score": 2.5, "timing_s/iteration": 1.0, "actor/entropy": 0.5},
    "evaluations.jsonl": evaluation("end", 1, 10.0),
    "adaptations.jsonl": adaptation([1.0, 2.0]),
    "episodes/1.jsonl": episode(mode="ON_POLICY_WITH_MEMORY", steps=STEPS),
    "start/losses.json": [1.0, 0.5],
    "run.json": {"commit": "abc", "command": "empo2 train a.toml", "earlier_commits": "dead"},
    "fork.json": FORK,
}


def ends_well(act: Callable[[], Any]) -> None:
    try:
        act()
    except Empo2Error as error:
        assert 0 < len(" ".join(str(error).split())) < 2000


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A new folder at every call."""
    root, numbers = tmp_path_factory.mktemp("records"), count()
    return lambda: root / str(next(numbers))


@given(
    values=st.dictionaries(
        st.sampled_from(sorted(HfConfig.model_fields)),
        JSON | st.integers(-2, 9) | st.dictionaries(st.sampled_from(sorted(Rope.model_fields)), JSON | st.just("yarn")),
        max_size=3,
    )
)
def test_a_model_has_usable_numbers_or_is_refused(values: dict[str, Any]) -> None:
    def read() -> None:
        config = Qwen2Config.from_hf(MODEL | values)
        with np.errstate(over="ignore", under="ignore"):
            frequencies, stretch = rope_frequencies(config)
        assert len(frequencies) == config.head_dim / 2 and np.isfinite(stretch)
        assert config.num_parameters > 0

    ends_well(read)


@settings(max_examples=25)
@given(data=st.data())
def test_a_run_has_a_page_or_is_refused(places: Any, data: st.DataObject) -> None:
    run = studies.make_run(places() / "run", 10.0)
    name = data.draw(st.sampled_from(sorted(FILES)))
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data.draw(odd(FILES[name]))) + "\n", encoding="utf-8")
    ends_well(lambda: write_report(run))
    ends_well(lambda: compare_runs([run, studies.make_run(places() / "other", 20.0)], run / "runs.html"))


@settings(max_examples=30)
@given(data=st.data())
def test_results_have_tables_or_are_refused(places: Any, data: st.DataObject) -> None:
    path = places() / "results.json"
    made = make_results({"new": [50.0, 60.0], "old": [1.0, 2.0]})
    write_results(path, made)
    path.write_text(json.dumps(data.draw(odd(json.loads(path.read_text())))), encoding="utf-8")
    ends_well(lambda: tables(read_results(path)))
