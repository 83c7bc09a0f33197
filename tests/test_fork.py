"""Forks: what is copied, what is recorded, what is refused. That a fork trains on is in e2e/test_toy_run.py."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from empo2_jax.checkpoint import CheckpointStore
from empo2_jax.cli import main
from empo2_jax.config import Config
from empo2_jax.config_file import dump_toml, load_config
from empo2_jax.errors import CheckpointError, ConfigError, DataError
from empo2_jax.fork import changed_keys, fork, parse_source
from empo2_jax.metrics import read_jsonl, read_metrics
from empo2_jax.run_record import origin
from tests.fixtures.studies import make_run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A run of two iterations with a checkpoint after each."""
    folder = make_run(tmp_path / "source", 40.0)
    store = CheckpointStore(folder, keep=9)
    for step in (1, 2):
        store.save(
            step,
            state={"w": jnp.full(3, float(step))},
            dumps={"memory": lambda place: (place / "tips.jsonl").write_text("tips") and None},
            cursor={"iteration": step, "metrics_lines": step, "evaluation_lines": step},
        )
        (folder / "episodes").mkdir(exist_ok=True)
        (folder / f"episodes/{step}.jsonl").write_text("{}\n")
    (folder / "start").mkdir()
    (folder / "start/config.json").write_text("{}")
    return folder


def config_of(source: Path, target: Path, *overrides: str) -> Config:
    return load_config(source / "config.toml", [f'run.dir="{target}"', *overrides])


def test_a_fork_is_the_run_up_to_its_checkpoint(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "fork"
    config = config_of(source, target, "update.learning_rate=2e-6", "algorithm.p_memory=0.5", "run.iterations=9")
    assert fork(source, 1, config) == target
    store = CheckpointStore(target, keep=1)
    assert store.verify() == [(1, None)]
    state, folder, cursor = store.restore(1, {"w": jnp.zeros(3)})
    assert state["w"].tolist() == [1.0] * 3 and (folder / "memory/tips.jsonl").read_text() == "tips"
    assert cursor["iteration"] == 1
    assert store.content_hash(1) == CheckpointStore(source, keep=1).content_hash(1)
    assert [record["iteration"] for record in read_metrics(target)] == [1]
    assert len(read_jsonl(target / "evaluations.jsonl")) == 1
    assert [path.name for path in (target / "episodes").iterdir()] == ["1.jsonl"]
    assert (target / "start/config.json").read_text() == "{}"
    assert (target / "config.toml").read_text() == dump_toml(config)
    record = json.loads((target / "fork.json").read_text())
    assert record["run"] == str(source) and record["step"] == 1 and record["hash"] == store.content_hash(1)
    assert record["changed"] == {"algorithm.p_memory": [0.25, 0.5], "update.learning_rate": [1e-6, 2e-6]}
    assert origin(target) == "source@1: algorithm.p_memory 0.25 → 0.5; update.learning_rate 1e-06 → 2e-06"
    assert origin(source) == ""
    assert CheckpointStore(source, keep=1).verify() == [(1, None), (2, None)]
    assert not list(tmp_path.glob(".*"))


def test_the_newest_checkpoint_is_taken_and_the_same_command_goes_on(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "fork"
    config = config_of(source, target)
    fork(source, None, config)
    (target / "mark").touch()
    assert fork(source, None, config) == fork(source, 2, config) == target
    assert (target / "mark").exists()
    with pytest.raises(CheckpointError, match=r"fork: a fork of .*source@2; use another run.dir"):
        fork(source, 1, config)


def test_a_fork_that_is_there_is_refused_where_nothing_may_be_resumed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "fork"
    config = config_of(source, target)
    assert fork(source, 1, config, "never") == target
    message = f"{target}: is this fork already; use --resume auto or another run.dir"
    with pytest.raises(CheckpointError, match=message):
        fork(source, 1, config, "never")
    arguments = ["train", str(source / "config.toml"), "--run.dir", str(target), "--from", f"{source}@1"]
    assert main([*arguments, "--dry-run", "--resume", "never"]) == 2
    assert message in capsys.readouterr().err


def test_a_dry_run_names_the_changes_and_refuses_what_the_run_refuses(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", str(source / "config.toml"), "--run.dir", str(tmp_path / "fork"), "--dry-run", "--from"]
    assert main([*arguments, f"{source}@1", "--algorithm.p_memory", "0.5"]) == 0
    assert capsys.readouterr().out.endswith("changed by the fork: algorithm.p_memory 0.25 → 0.5\n")
    assert main([*arguments, f"{source}@7"]) == 2
    assert "7: no such checkpoint; there are [1, 2]" in capsys.readouterr().err
    assert not (tmp_path / "fork").exists()


def test_what_is_in_the_way_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(CheckpointError, match=r"full: not empty; use another run.dir for the fork"):
        fork(source, 1, config_of(source, tmp_path / "full"))
    with pytest.raises(ConfigError, match=r"a fork needs a directory of its own; set --run.dir"):
        fork(source, 1, config_of(source, source))
    with pytest.raises(CheckpointError, match=r"7: no such checkpoint; there are \[1, 2\]"):
        fork(source, 7, config_of(source, tmp_path / "fork"))
    (source / "checkpoints/1/memory/tips.jsonl").write_text("other")
    with pytest.raises(CheckpointError, match=r"1: corrupt: memory/tips.jsonl: checksum does not match"):
        fork(source, 1, config_of(source, tmp_path / "fork"))
    assert not (tmp_path / "fork").exists()
    with pytest.raises(DataError, match="not a run directory"):
        fork(tmp_path / "full", 1, config_of(source, tmp_path / "fork"))


@pytest.mark.parametrize(
    "override", ['model.path="other"', "warmstart.updates=3", "lora.enabled=true", 'memory.embedder="hashing"']
)
def test_keys_that_the_state_is_made_for_are_kept(source: Path, tmp_path: Path, override: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{override.partition('=')[0]} = .* there, now it is .*; a fork has to keep"
    ):
        changed_keys(source, config_of(source, tmp_path / "fork", override))


def test_random_networks_and_counts_are_no_novelty_of_each_other(source: Path, tmp_path: Path) -> None:
    assert changed_keys(source, config_of(source, tmp_path / "fork", "intrinsic.kind=none"))
    with pytest.raises(ConfigError, match=r"intrinsic\.kind = 'count' there, now it is 'rnd'; a fork has to"):
        changed_keys(source, config_of(source, tmp_path / "fork", "intrinsic.kind=rnd"))


def test_the_source_is_a_run_and_a_step() -> None:
    assert parse_source("runs/a@12") == (Path("runs/a"), 12)
    assert parse_source("runs/a") == (Path("runs/a"), None)
    for text in ("runs/a@", "runs/a@new", "@3"):
        with pytest.raises(ConfigError, match="RUN@STEP is allowed"):
            parse_source(text)


def test_what_trains_nothing_cannot_go_on(source: Path, tmp_path: Path) -> None:
    preset = ("algorithm.name=reflexion", "algorithm.p_memory=0.0", "intrinsic.kind=none")
    with pytest.raises(ConfigError, match="reflexion trains nothing that could go on"):
        fork(source, 1, config_of(source, tmp_path / "fork", *preset))
