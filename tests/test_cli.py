"""The command line as a user meets it: one clear line for a mistake, help for every key, exit codes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from empo2_jax import cli_studies
from empo2_jax.cli import build_parser, main
from empo2_jax.config import Config
from empo2_jax.config_file import dump_toml, load_config
from empo2_jax.metrics import MetricsLog
from empo2_jax.trained import tips_of_run

TOY = """
[run]
name = "tiny"
[env]
name = "toy"
step_limit = 3
train_variations = 2
[rollout]
max_length = 512
[update]
buckets = [512]
[memory]
embedder = "hashing"
index = "exact"
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "toy.toml"
    path.write_text(TOY)
    return path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "empo2_jax", *arguments]
    wide = {**os.environ, "COLUMNS": "1000"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=wide)


def test_help_documents_every_key_and_its_default() -> None:
    shown = run("train", "--help")
    assert shown.returncode == 0
    text = " ".join(shown.stdout.split())
    for name, section in Config():
        for key, default in section:
            description = type(section).model_fields[key].description
            value = '""' if default == "" else list(default) if isinstance(default, tuple) else default
            assert f"--{name}.{key} " in text
            assert f"{description} (default: {value})" in text


def test_a_mistake_is_one_line_and_exit_code_2_in_a_real_process(config_file: Path) -> None:
    done = run("train", str(config_file), "--env.workes", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown option `--env.workes`; the nearest known option is `--env.workers`\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train nowhere.toml", "nowhere.toml: no such configuration file"),
        ("train {config} --env.workers many", "env.workers = 'many'"),
        ("train {config} --algorithm.name ppo", "'ppo': 'empo2', 'grpo', 'gigpo', 'reflexion' or 'retrospex'"),
        ("train {config} --run.seed", "expected one argument"),
        ("train {config} extra", "unexpected argument `extra`"),
        ("evaluate {folder}", "not a run directory"),
        ("evaluate {folder} --repeats 0", "at least 1 is allowed"),
        ("adapt {folder}", "not a run directory"),
        ("adapt {folder} --trials 0", "at least 1 is allowed"),
        ("adapt {folder} --tasks ,", "--tasks ',': names are allowed, A,B"),
        ("bench --suite ,", "--suite ',': names are allowed, A,B"),
        ("study {config} --arms , --dry-run", "--arms ',': names are allowed, A,B"),
        ("envs check toy --tasks ,", "--tasks ',': names are allowed, A,B"),
        ("train {config} --start-timeout nan", "--start-timeout nan: a number up to 2147483647 is allowed"),
        ("train {config} --start-timeout -1", "--start-timeout -1.0: at least 1 is allowed"),
        ("serve {folder} --port 0 --grace nan", "--grace nan: a number up to 2147483647 is allowed"),
        (
            "train {config} --update.epochs 99999999999999999999",
            "update.epochs = 99999999999999999999: at most 2147483",
        ),
        ("train {config} --run.seed 9223372036854775808", "run.seed = 9223372036854775808: at most 92233720368547758"),
        ("train {config} --model.path=", "model.path = '': text of at least 1 characters is allowed"),
        ("train {config} --run.name a\0b", "run.name = 'a\\x00b': text without the character 0 is allowed"),
        ("report {folder}/\udcff", "/\\xff': text in UTF-8 is allowed"),
        ("checkpoint hash {folder}", "not a run directory"),
        ("checkpoint verify {folder}", "no checkpoints"),
        ("memory inspect {folder}", "not a run directory"),
        ("memory inspect {folder} --limit -1", "--limit -1: at least 0 is allowed"),
        ("report {folder}", "no metrics.jsonl: not a run directory, or that of a run before its first iteration; try"),
        ("report {config}", "toy.toml: not a run directory; those, or one results.json of a study, are allowed"),
        ("report {folder} {folder}/b", "/b: not a run directory; those, or one results.json of a study, are allowed"),
        ("train {folder}", ": a folder, not a configuration; a TOML file is allowed, for example "),
        ("train {folder} --dry-run", ": a folder, not a configuration; a TOML file is allowed, for example "),
        ("debug {folder} --iteration 0", "--iteration 0: at least 1 is allowed"),
        ("debug {folder} --iteration -1", "--iteration -1: at least 1 is allowed"),
        ("webshop check {folder}/b", "/b: no such folder"),
        ("tarin", "invalid choice: 'tarin'"),
        ("warmstart {config} --out {folder}", "no warm start"),
        ("warmstart {config} --warmstart.updates 1 --out {config}", "toy.toml: cannot be written: Not a directory"),
        ("warmstart {config} --warmstart.updates 1 --out {config}/b", "/b: cannot be written: Not a directory"),
    ],
)
def test_mistakes_are_named(
    arguments: str, message: str, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([part.format(config=config_file, folder=tmp_path) for part in arguments.split()]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("error: ") and captured.err.count("\n") == 1


def test_a_run_of_all_weights_has_no_adapter_to_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text(dump_toml(Config()))
    assert main(["convert", "to-hf", str(tmp_path), str(tmp_path / "out"), "--adapter"]) == 2
    said = f"error: {tmp_path}: lora.enabled = false: the run has no adapter; --adapter is for runs with one\n"
    assert capsys.readouterr().err == said


def test_dry_run_prints_a_configuration_that_can_be_read_and_the_plan(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--run.iterations", "7", "--rollout.group_size=4", "--run.name", "5", "--model.mesh", "1,1,1"]
    assert main(["train", str(config_file), *options, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "printed.toml").write_text(printed)
    config = load_config(tmp_path / "printed.toml")
    assert (config.run.iterations, config.rollout.group_size, config.run.name) == (7, 4, "5")
    assert "# episodes: 16 tasks × 4 = 64 per iteration, 448 in all" in printed
    assert "# steps: at most 3 per episode, 192 per iteration, 1344 in all" in printed
    assert not (tmp_path / "runs").exists()


def test_lists_are_given_with_commas_or_as_toml() -> None:
    parser = build_parser()
    for text in ("a, b", '["a", "b"]'):
        known = parser.parse_args(["train", "x.toml", "--env.tasks", text])
        assert getattr(known, "env.tasks") == text


def test_report_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = MetricsLog(tmp_path)
    log.write(1, {"episode/score": 1.0})
    log.close()
    assert main(["report", str(tmp_path)]) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "stopped")]
)
def test_a_signal_is_one_line_and_its_exit_code(number: signal.Signals, code: int, said: str) -> None:
    script = (
        "import sys, time; from empo2_jax import cli, cli_studies\n"
        "def wait(options): print('started', flush=True); time.sleep(60); return 0\n"
        "cli_studies._report = wait; sys.exit(cli.main(['report', 'some run']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert errors == f"{said}; resume with: empo2 report 'some run'\n"


@pytest.mark.parametrize(
    ("allocate", "said"),
    [
        (
            "import jax.numpy as jnp; jnp.zeros(1 << 56)",
            "the device is out of memory in cli.py (main): RESOURCE_EXHAUSTED: ",
        ),
        ("bytearray(1 << 60)", "the host is out of memory in cli.py (main); "),
    ],
)
def test_memory_that_ran_out_is_one_line_and_exit_code_2(allocate: str, said: str) -> None:
    script = (
        f"import sys; from empo2_jax import cli, cli_studies\ndef allocate(options): {allocate}\n"
        "cli_studies._report = allocate; sys.exit(cli.main(['report', 'some run']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {said}")
    assert line.endswith("see docs/troubleshooting.md#out-of-memory")


def test_a_bug_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: object) -> int:
        raise RuntimeError("INTERNAL: a bug")

    monkeypatch.setattr(cli_studies, "_report", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["report", "some run"])


def test_ctrl_c_after_the_last_line_changes_nothing() -> None:
    script = (
        "import atexit, os, signal, sys\n"
        "atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), print('end')))\n"
        "from empo2_jax.__main__ import main\n"
        "sys.argv = ['empo2', 'report', 'nowhere']; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "end\n")
    assert done.stderr == "error: nowhere: not a run directory; those, or one results.json of a study, are allowed\n"


def test_tips_of_a_run_are_listed_best_first(tmp_path: Path) -> None:
    import jax.numpy as jnp

    from empo2_jax.checkpoint import CheckpointStore

    (tmp_path / "config.toml").write_text(dump_toml(Config()))
    lines = ['{"next_counter": 3}'] + [
        f'{{"buffer": "toy/{number % 2}", "score": {score}, "counter": {number}, "content": "tip {number}"}}'
        for number, score in enumerate((1.0, 9.0, 5.0))
    ]
    CheckpointStore(tmp_path, keep=1).save(
        1,
        state={"w": jnp.zeros(1)},
        dumps={"memory": lambda folder: (folder / "tips.jsonl").write_text("\n".join(lines) + "\n") and None},
        cursor={"metrics_lines": 0},
    )
    assert [tip["content"] for tip in tips_of_run(tmp_path)] == ["tip 1", "tip 2", "tip 0"]
    assert [tip["content"] for tip in tips_of_run(tmp_path, "toy/0")] == ["tip 2", "tip 0"]


def test_an_empty_memory_and_a_huge_one_are_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import jax.numpy as jnp

    from empo2_jax.checkpoint import CheckpointStore

    (tmp_path / "config.toml").write_text(dump_toml(Config()))
    entry = '{"buffer": "toy/%d", "score": %d, "counter": %d, "content": "tip", "episode": "e", "step": 0}'
    for step, count in ((1, 0), (2, 50_000)):
        lines = ['{"next_counter": 0}', *(entry % (n % 7, n % 100, n) for n in range(count))]
        CheckpointStore(tmp_path, keep=2).save(
            step,
            state={"w": jnp.zeros(1)},
            dumps={"memory": lambda folder, lines=lines: (folder / "tips.jsonl").write_text("\n".join(lines) + "\n")},
            cursor={"metrics_lines": 0},
        )
    assert main(["memory", "inspect", str(tmp_path), "--step", "1"]) == 0
    assert capsys.readouterr().out == "0 tips in 0 buffers\n"
    assert main(["memory", "inspect", str(tmp_path), "--limit", "1"]) == 0
    assert capsys.readouterr().out == "50000 tips in 7 buffers\n\ntoy/1 · score 99.0 · e step 0\ntip\n"


def test_verify_names_the_bad_checkpoint_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.err == f"error: {tmp_path}: checkpoint 3: manifest.json: No such file or directory\n"
    assert told.out == ""
