"""Make the runs of notebook 04 and write what it reads: `python notebooks/record_dynamics.py` in the root.

EMPO² and GRPO train on the toy world from the same start, once per seed (a few minutes each on one core; a run that
is there is continued). One JSON line per seed, arm and iteration, with few digits, goes to `toy_dynamics.jsonl`.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

from empo2_jax.metrics import read_jsonl, read_metrics, write_atomically

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
RECORDED = Path(__file__).with_name("toy_dynamics.jsonl")


def train(arm: str, seed: int, run_dir: Path) -> None:
    """One run of `configs/toy.toml`, evaluated every five iterations."""
    options = {"run.seed": seed, "run.dir": run_dir, "run.tensorboard": "false", "evaluation.every": 5}
    command = [sys.executable, "-m", "empo2_jax", "train", "configs/toy.toml", *ARMS[arm]]
    for key, value in options.items():
        command += [f"--{key}", str(value)]
    subprocess.run(command, check=True)


def lines(arm: str, seed: int, run_dir: Path) -> list[str]:
    """The recorded lines of one run; iteration 0 is the evaluation of the start."""
    head = {"arm": arm, "seed": seed}
    start = read_jsonl(run_dir / "evaluations.jsonl")[0]
    records = [{**head, "iteration": 0, "val/score": start["score"]}]
    for metrics in read_metrics(run_dir):
        kept = {name: round(value, 4) for name, value in metrics.items() if _wanted(name) and math.isfinite(value)}
        records.append({**head, "iteration": metrics["iteration"], **kept})
    return [json.dumps(record) + "\n" for record in records]


def _wanted(name: str) -> bool:
    return name in NAMES or (name.startswith("empo2/") and name.split("/")[-1] in PER_MODE)


def main() -> None:
    """Train what is missing and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs per arm (default: 3)")
    parser.add_argument("--out", type=Path, default=Path("runs/dynamics"), help="folder of the runs")
    arguments = parser.parse_args()
    text = []
    for seed in range(arguments.seeds):
        for arm in ARMS:
            run_dir = arguments.out / f"{arm}-{seed}"
            train(arm, seed, run_dir)
            text += lines(arm, seed, run_dir)
    write_atomically(RECORDED, "".join(text))


if __name__ == "__main__":
    main()
