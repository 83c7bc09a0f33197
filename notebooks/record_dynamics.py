"""Make the runs of notebook 04 and write what it reads: `python notebooks/record_dynamics.py` in the root.

EMPO² and GRPO train on the toy world from the same start, once per seed (50 to 100 s each on one core; a run that is
there is continued). `toy_dynamics.jsonl` begins with a line that says what made it (command, configuration and
commit); one line per seed, arm and iteration follows, with few digits.
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

from empo2_jax.metrics import read_jsonl, read_metrics, write_atomically
from empo2_jax.run_record import read_facts

ARMS = {"empo2": [], "grpo": ["--algorithm.name", "grpo", "--algorithm.p_memory", "0"]}
NAMES = {
    "val/score",
    "episode/score",
    "group/all_equal",
    "actor/entropy",
    "total/prompt_tokens",
    "total/sampled_tokens",
}
PER_MODE = {"reward", "ess", "masked_negative", "kl_tips_vs_bare"}  # of empo2/<mode>/<name>
CONFIG, EVERY = "configs/toy.toml", 5  # iterations between evaluations
RECORDED = Path(__file__).with_name("toy_dynamics.jsonl")


def train(arm: str, seed: int, run_dir: Path) -> None:
    """One run of `CONFIG`, evaluated every `EVERY` iterations."""
    options = {"run.seed": seed, "run.dir": run_dir, "run.tensorboard": "false", "evaluation.every": EVERY}
    command = [sys.executable, "-m", "empo2_jax", "train", CONFIG, *ARMS[arm]]
    for key, value in options.items():
        command += [f"--{key}", str(value)]
    subprocess.run(command, check=True)


def head(command: list[str], run_dirs: list[Path]) -> str:
    """The first line: what made the file, and the commits of its runs, each once."""
    commits = dict.fromkeys(read_facts(run_dir)["commit"] for run_dir in run_dirs)
    made = {"command": shlex.join(command), "config": CONFIG, "evaluation.every": EVERY, "commit": ", ".join(commits)}
    return json.dumps(made) + "\n"


def lines(arm: str, seed: int, run_dir: Path) -> list[str]:
    """The recorded lines of one run; iteration 0 is the evaluation of the start."""
    run = {"arm": arm, "seed": seed}
    start = read_jsonl(run_dir / "evaluations.jsonl")[0]
    records = [{**run, "iteration": 0, "val/score": start["score"]}]
    for metrics in read_metrics(run_dir):
        kept = {name: round(value, 4) for name, value in metrics.items() if _wanted(name) and math.isfinite(value)}
        records.append({**run, "iteration": metrics["iteration"], **kept})
    return [json.dumps(record) + "\n" for record in records]


def _wanted(name: str) -> bool:
    return name in NAMES or (name.startswith("empo2/") and name.split("/")[-1] in PER_MODE)


def main() -> None:
    """Train what is missing and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs per arm (default: 3)")
    parser.add_argument("--out", type=Path, default=Path("runs/dynamics"), help="folder of the runs")
    arguments = parser.parse_args()
    text, run_dirs = [], []
    for seed in range(arguments.seeds):
        for arm in ARMS:
            run_dir = arguments.out / f"{arm}-{seed}"
            train(arm, seed, run_dir)
            text += lines(arm, seed, run_dir)
            run_dirs.append(run_dir)
    command = ["python", "notebooks/record_dynamics.py", "--seeds", str(arguments.seeds)]
    write_atomically(RECORDED, head(command, run_dirs) + "".join(text))


if __name__ == "__main__":
    main()
