"""Which configurations may go on in a run directory."""

import pytest

from empo2_jax.config import Config, parse_config
from empo2_jax.errors import CheckpointError
from empo2_jax.run_record import check_same_run


def test_another_configuration_is_refused_by_its_first_differing_keys() -> None:
    saved = Config()
    changed = parse_config({"run": {"seed": 1}, "memory": {"capacity": 7}})
    with pytest.raises(CheckpointError, match=r"run.seed = 0, now it is 1; with memory.capacity = 1000, now it is 7; "):
        check_same_run(saved, changed)
    other = parse_config({"update": {"epochs": 2, "beta1": 0.5, "beta2": 0.5, "weight_decay": 0.5, "max_grad_norm": 2}})
    with pytest.raises(CheckpointError, match=r"weight_decay = 0.01, .*; with .*; with .*; and 2 more; use another"):
        check_same_run(saved, other)


def test_keys_that_do_not_reach_the_numbers_may_differ() -> None:
    longer = parse_config(
        {
            "run": {"iterations": 7, "dir": "elsewhere"},
            "model": {"attention": "xla"},
            "env": {"workers": 5},
            "checkpoint": {"keep": 9, "every": 2},
        }
    )
    check_same_run(Config(), longer)
