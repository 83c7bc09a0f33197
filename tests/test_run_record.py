"""Which configurations may go on in a run directory."""

from pathlib import Path

import pytest

from empo2_jax import run_record
from empo2_jax.config import Config, parse_config
from empo2_jax.config_file import load_config
from empo2_jax.errors import CheckpointError, DataError
from empo2_jax.run_record import check_same_run, moved, origin, read_facts, record_command, record_config


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


def test_another_mesh_or_number_of_processes_is_said() -> None:
    here = {"mesh": [2, 2, 1], "processes": 2}
    assert moved({}, here) == moved(dict(here), here) == ""
    assert moved(here, here | {"processes": 1}) == (
        "the checkpoint is of mesh [2, 2, 1] in 2 process(es), this is mesh [2, 2, 1] in 1 process(es): "
        "numbers go on as they would have to rounding, not bit for bit"
    )
    assert "this is mesh [1, 1, 1] in 2 process(es)" in moved(here, here | {"mesh": [1, 1, 1]})


def test_the_code_that_a_run_went_through_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = []
    for commit in ("a1", "a1", "b2", "", "c3-dirty"):
        monkeypatch.setattr(run_record, "source_commit", lambda commit=commit: commit)
        record_command(tmp_path, ["empo2", "train"])
        facts.append({key: value for key, value in read_facts(tmp_path).items() if "commit" in key})
    assert facts == [
        {"commit": "a1"},
        {"commit": "a1"},
        {"commit": "b2", "earlier_commits": "a1"},
        {"commit": "", "earlier_commits": "a1, b2"},
        {"commit": "c3-dirty", "earlier_commits": "a1, b2, unknown"},
    ]


def test_a_fork_that_does_not_say_what_it_is_of_is_named(tmp_path: Path) -> None:
    assert origin(tmp_path) == ""
    (tmp_path / "fork.json").write_text('{"step": 2}')
    with pytest.raises(DataError, match=r"fork.json: run is missing"):
        origin(tmp_path)


PANEL = 'env = "toy"\nsplit = "dev"\nrepeats = 3\ntemperature = 0.5\nseed = 9\n[tasks]\nbulb = [4, 1]\n'


def test_a_run_directory_holds_its_panel_and_can_be_moved(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(PANEL)
    (tmp_path / "given.toml").write_text('[run]\ndir = "RUN"\n[evaluation]\npanel = "small.toml"\n')
    config = load_config(tmp_path / "given.toml", [f"run.dir={tmp_path / 'run'}"])
    config.run_dir.mkdir()
    record_config(config)
    check_same_run(load_config(config.run_dir / "config.toml"), config)
    moved = config.run_dir.rename(tmp_path / "moved")
    assert 'panel = "panel.toml"' in (moved / "config.toml").read_text()
    assert str(tmp_path / "small") not in (moved / "config.toml").read_text()
    (tmp_path / "small.toml").write_text(PANEL.replace("[4, 1]", "[4, 2]"))
    saved = load_config(moved / "config.toml")
    assert (moved / "panel.toml").read_text() == PANEL
    assert (saved.evaluation.panel, saved.evaluation.repeats) == (str(moved / "panel.toml"), 3)
    with pytest.raises(CheckpointError, match=r"evaluation\.panel = 'panel \w{12}', now it is 'panel \w{12}'"):
        check_same_run(saved, config)
