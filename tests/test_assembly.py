"""Names in the configuration become objects, or one clear error."""

from pathlib import Path

import pytest

from empo2_jax.assembly import check_engine, load_policy, make_family, make_index, model_folder, session_length
from empo2_jax.config import Config, parse_config
from empo2_jax.errors import ConfigError, DataError
from empo2_jax.hardware import host_memory
from empo2_jax.memory.exact_index import ExactIndex
from empo2_jax.memory.scann_index import ScannIndex
from empo2_jax.models.qwen2_sizes import QWEN2_5
from empo2_jax.plan_costs import kv_bytes


def test_unknown_environment_is_named() -> None:
    config = parse_config({"env": {"name": "toys"}})
    with pytest.raises(ConfigError, match=r"toys.*no such environment"):
        make_family(config)


def test_a_family_that_lacks_something_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lackings").mkdir()
    (tmp_path / "lackings" / "world.py").write_text(
        "class Family:\n    name = ''\n\n\ndef from_config(config, panel, workers):\n    return Family()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"its family lacks max_score, demonstration_kinds, tasks, .*, close; see docs"
    ):
        make_family(parse_config({"env": {"name": "lackings.world"}}))


def test_unknown_task_names_the_nearest() -> None:
    config = parse_config({"env": {"name": "toy", "tasks": ["bulbs"]}})
    with pytest.raises(ConfigError, match="'bulb'"):
        make_family(config)


def test_indexes_by_name() -> None:
    assert make_index(parse_config({"memory": {"index": "scann"}}).memory) is ScannIndex
    assert make_index(parse_config({"memory": {"index": "exact"}}).memory) is ExactIndex


def test_missing_model_folder_is_an_error() -> None:
    with pytest.raises(DataError, match="no such folder"):
        model_folder("./nowhere")


def test_a_mesh_needs_its_devices() -> None:
    config = parse_config({"model": {"path": "toy", "mesh": [1, 1, 64]}})
    with pytest.raises(ConfigError, match="needs 64 devices"):
        load_policy(config.model)


def test_rollouts_run_ahead_in_one_process_alone() -> None:
    config = parse_config({"rollout": {"max_staleness": 2}, "update": {"micro_batch_tokens": 9216}})
    with pytest.raises(ConfigError, match=r"max_staleness = 2 with several processes: 0 is allowed"):
        check_engine(config, QWEN2_5["0.5B"], processes=2)
    check_engine(config, QWEN2_5["0.5B"], processes=1)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_larger_than_the_memory_is_refused_with_what_fits(processes: int) -> None:
    shape, memory = QWEN2_5["0.5B"], host_memory()
    config = parse_config({"rollout": {"slots": 10**7}})
    slot = session_length(config) * 2 * 24 * 2 * 64 * 4  # keys and values, layers, heads, their size, f32
    assert kv_bytes(shape, "bfloat16") * 2 == kv_bytes(shape, "float32") == slot // session_length(config)
    with pytest.raises(ConfigError, match=rf"rollout\.slots = 10000000: .*GiB of memory; {int(memory / slot / 2)} may"):
        check_engine(config, shape, processes)
    served = {"engine": "sglang", "servers": ["http://a"], "slots": 10**7}
    check_engine(parse_config({"rollout": served}), shape, processes)  # the cache is theirs
    most = memory // (16 * 4500 * 30 * 4)
    check_engine(parse_config({"rollout": {"group_size": most}}), shape, processes)
    with pytest.raises(ConfigError, match=rf"rollout\.group_size = {most + 1}: .* groups of {most} fit"):
        check_engine(parse_config({"rollout": {"group_size": most + 1}}), shape, processes)


def test_slots_divide_over_the_mesh_of_one_process() -> None:
    config = parse_config(
        {"model": {"mesh": [1, 2, 1]}, "rollout": {"slots": 5}, "update": {"micro_batch_tokens": 9216}}
    )
    shape = QWEN2_5["0.5B"]
    with pytest.raises(ConfigError, match=r"rollout\.slots = 5 .* data × fsdp = 2 .* multiple of 2 is allowed"):
        check_engine(config, shape, processes=1)
    check_engine(config, shape, processes=2)  # each with an engine of its own


def test_defaults_are_a_valid_configuration() -> None:
    assert Config().algorithm.off_policy_denominator == "student"
