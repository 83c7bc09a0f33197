"""The doctor: it finds what is missing and does not look for what a run does not need."""

import json
from pathlib import Path
from typing import Any

import pytest

from empo2_jax.config import parse_config
from empo2_jax.doctor import attention_kernel, diagnose, mesh_fits
from empo2_jax.errors import Empo2Error


def toy(**model: Any) -> dict[str, Any]:
    return {"env": {"name": "toy"}, "memory": {"index": "exact"}, "model": model}


def test_a_run_directory_that_cannot_be_written_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = parse_config(toy() | {"run": {"dir": str(tmp_path / "file" / "run")}})
    checks = {check.name: check for check in diagnose(config)}
    assert not checks["run directory"].ok and checks["run directory"].needed
    assert checks["Python"].ok and checks["JAX devices"].ok and checks["mesh"].ok
    assert not checks["Java"].needed and not checks["scann"].needed


def test_mesh_must_fit_devices_and_heads(tmp_path: Path) -> None:
    with pytest.raises(Empo2Error, match="needs 64 devices; there are"):
        mesh_fits(parse_config(toy(mesh=[1, 1, 64])))
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes, **heads}))
    with pytest.raises(Empo2Error, match="4 attention heads do not divide over tensor = 3; allowed: 1, 2"):
        mesh_fits(parse_config(toy(mesh=[1, 1, 3], path=str(tmp_path))))
    assert mesh_fits(parse_config(toy(path=str(tmp_path)))).startswith("data 1 × fsdp 1 × tensor 1 of")


def test_the_attention_that_trains_is_named_with_the_reason() -> None:
    checks = {check.name: check for check in diagnose()}
    assert checks["attention"].ok
    assert checks["attention"].found == "xla (auto); cudnn needs an NVIDIA GPU, not cpu; splash needs a TPU, not cpu"
    assert attention_kernel(parse_config(toy(attention="xla")).model) == "xla"
    checks = {check.name: check for check in diagnose(parse_config(toy(attention="cudnn")))}
    assert not checks["attention"].ok and checks["attention"].needed
