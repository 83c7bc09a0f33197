"""A grid of arms × seeds: each run in its own process, finished runs are kept, one row per seed.

A study is a TOML file: `base` (a configuration), `seeds`, `reference` (an arm) and `[arms.NAME]` tables of overrides.
A run's result is its last evaluation without memory. The first arm is compared with every other one: mean paired
difference over seeds with its 95 % interval.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from empo2_jax.config_file import load_config
from empo2_jax.errors import ConfigError, DataError
from empo2_jax.metrics import read_jsonl, write_atomically

_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


@dataclass(frozen=True)
class Study:
    """One study file."""

    name: str
    base: Path
    seeds: int
    reference: str
    arms: dict[str, list[str]]  # overrides, section.key=value


def load_study(path: Path) -> Study:
    """Read and check a study; every arm's configuration is validated."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        base, seeds, reference = path.parent / values["base"], int(values["seeds"]), str(values["reference"])
        arms = {name: [f"{key}={_toml(value)}" for key, value in _flat(arm)] for name, arm in values["arms"].items()}
    except (OSError, tomllib.TOMLDecodeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: not a study (base, seeds, reference and [arms.*] are needed): {error}") from None
    if reference not in arms:
        raise ConfigError(f"{path}: reference = {reference!r} is not one of the arms {', '.join(arms)}")
    for overrides in arms.values():
        load_config(base, overrides)
    return Study(path.stem, base, seeds, reference, arms)


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for key, value in values.items():
        items += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return items


def _toml(value: Any) -> str:
    return json.dumps(value)


def run_study(path: Path, out: Path, seeds: int | None = None, jobs: int = 2, arms: Sequence[str] = ()) -> bool:
    """Run what is missing, print the tables, write `out/results.json`.

    Returns whether the interval of the first arm's paired difference from the reference lies above 0.
    """
    study = load_study(path)
    count = study.seeds if seeds is None else seeds
    if count < 1 or jobs < 1:
        raise ConfigError(f"study: {count} seeds and {jobs} jobs; at least 1 of each is needed")
    if unknown := [name for name in arms if name not in study.arms]:
        raise ConfigError(f"{path}: no arm {unknown[0]!r}; the arms are {', '.join(study.arms)}")
    chosen = {name: study.arms[name] for name in (arms or study.arms)}
    cells = [(name, seed) for seed in range(count) for name in chosen]
    with ThreadPoolExecutor(max_workers=jobs) as threads:
        rows = list(threads.map(lambda cell: _cell(study, out, *cell), cells))
    scores = {name: [row["score"] for row in rows if row["arm"] == name] for name in chosen}
    write_atomically(out / "results.json", json.dumps({"study": study.name, "seeds": count, "runs": rows}, indent=1))
    return _print(study, scores, rows)


def _cell(study: Study, out: Path, arm: str, seed: int) -> dict[str, Any]:
    folder = out / arm / f"seed{seed}"
    overrides = [*study.arms[arm], f"run.seed={seed}", f'run.dir="{folder}"', "run.tensorboard=false"]
    command = [sys.executable, "-m", "empo2_jax", "train", str(study.base)]
    for override in overrides:
        key, _, value = override.partition("=")
        command += [f"--{key}", value.strip('"')]
    environment = os.environ | {"XLA_FLAGS": _ONE_THREAD, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise DataError(f"study {study.name}: arm {arm}, seed {seed} failed: {reason}")
    last = read_jsonl(folder / "evaluations.jsonl")[-1]
    metrics = read_jsonl(folder / "metrics.jsonl")
    spent = {key.removeprefix("total/"): value for key, value in metrics[-1].items() if key.startswith("total/")}
    seconds = sum(record["timing_s/iteration"] for record in metrics)
    return {
        "arm": arm,
        "seed": seed,
        "score": last["score"],
        "success": last["success"],
        "updates": sum(record["actor/updates"] for record in metrics),
        "seconds": round(seconds, 1),
        **spent,
    }


def paired_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Mean of first − second over pairs with its 95 % interval by Student's t; one pair has an infinite one."""
    difference = np.asarray(first) - np.asarray(second)
    mean, count = float(difference.mean()), len(difference)
    if count < 2:
        return mean, -np.inf, np.inf
    reach = float(stats.t.ppf(0.975, count - 1) * difference.std(ddof=1) / np.sqrt(count))
    return mean, mean - reach, mean + reach


def _print(study: Study, scores: dict[str, list[float]], rows: Sequence[dict[str, Any]]) -> bool:
    console = Console()
    table = Table("seed", *scores, title=f"study {study.name}: score without memory, last evaluation")
    for seed, values in enumerate(zip(*scores.values(), strict=True)):
        table.add_row(str(seed), *(f"{value:.1f}" for value in values))
    table.add_row("mean", *(f"{np.mean(values):.1f}" for values in scores.values()))
    console.print(table)
    budget = Table("arm", "environment steps", "updates", "prompt tokens", "sampled tokens", "tip calls", "seconds")
    for name in scores:
        mine = [row for row in rows if row["arm"] == name]
        keys = ("environment_steps", "updates", "prompt_tokens", "sampled_tokens", "tip_calls", "seconds")
        budget.add_row(name, *(f"{np.mean([row[key] for row in mine]):.0f}" for key in keys))
    console.print(budget)
    better = False  # unless both were run and compared
    tested = next(iter(study.arms))
    for name in scores:
        if name != tested and tested in scores:
            mean, low, high = paired_interval(scores[tested], scores[name])
            console.print(f"{tested} − {name}: {mean:+.1f} points, 95 % interval [{low:+.1f}, {high:+.1f}]")
            if name == study.reference:
                better = low > 0
    return better
