"""Suite `soak`: hundreds of episodes while simulators, rollout servers and the trainer are killed at random moments.

Real processes throughout: ScienceWorld's Java processes, two `empo2 serve`, `empo2 train` with SGLang's protocol
between them, and a policy just able to act. It measures no speed and has no peer: it counts what is lost, told twice,
left over or growing. Not among the suites that run unasked, as it takes minutes: `empo2 bench --suite soak`.
"""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from empo2_jax.bench.base import Case, Side
from empo2_jax.bench.processes import children_cpu
from empo2_jax.bench.soak_faults import KINDS, Count, calm_from, count_episodes, growth, plan, slope
from empo2_jax.bench.soak_processes import Program, Sample, Soak, SoakError, empo2, free_port
from empo2_jax.config import Config, parse_config
from empo2_jax.config_file import dump_toml
from empo2_jax.randomness import generator

EPISODES, QUICK_EPISODES = 480, 128
GROUPS, SIZE = 4, 4
AT_ONCE = 4  # episodes, and so simulators
SERVERS = 2
WARM_UP = 4  # iterations of a life before its memory counts
LEAST = 8  # iterations
_LENGTH, _TIP = 1024, 24  # tokens
_PATIENCE_S = 120.0  # without any server


def cases(quick: bool) -> list[Case]:
    """480 episodes (quick: 128) under 1.5 kills an iteration of 16; minutes rather than samples, hence once.

    Quick is too short for lives to settle: its growth is always 0 and says nothing.
    """
    arguments = {"episodes": QUICK_EPISODES if quick else EPISODES, "seed": 0}
    return [Case("soak/kills", "empo2_jax.bench.soak:ours", arguments=arguments, unit="episode", pairs=1)]


def ours(episodes: int, seed: int, folder: str = "") -> Side:
    """A side whose run is the soak; the policy is made before.

    Args:
        episodes: To play, rounded up to whole iterations.
        seed: Of the run and of the faults.
        folder: Where all of it is kept; empty: nowhere.
    """
    place = tempfile.TemporaryDirectory(prefix="empo2-soak-")
    root = Path(folder or place.name).resolve()
    iterations = max(LEAST, -(-episodes // (GROUPS * SIZE)))
    start = _make_policy(root, seed)
    ports = [free_port() for _ in range(SERVERS)]
    config = _config(root / "run", seed, iterations, str(start), ports)
    (root / "soak.toml").write_text(dump_toml(config), encoding="utf-8")
    limits = ("--slots", str(AT_ONCE), "--max-length", str(_LENGTH + _TIP + 512))
    soak = Soak(
        empo2("train", str(root / "soak.toml")),
        [empo2("serve", str(start), "--port", str(port), *limits) for port in ports],
        config.run_dir,
        plan(seed, iterations),
        GROUPS * SIZE,
        generator(seed, "soak", "victims"),
    )

    def run() -> None:
        with soak:
            soak.run()

    def figures() -> dict[str, float]:
        found = result(soak, count_episodes(config.run_dir, iterations, GROUPS, SIZE), iterations)
        place.cleanup()
        return found

    return Side(run, figures=figures, work=iterations * GROUPS * SIZE, helpers_cpu=children_cpu)


def result(soak: Soak, count: Count, iterations: int) -> dict[str, float]:
    """The figures of a finished soak; those with a `/` are a table of faults.

    `*_bytes_per_episode` and `*_descriptors` are the growth in the calm second half, in lives that lasted to the end.
    A kill is lost if a program then ended on its own account, or if its iteration lacks an episode or has one twice.
    """
    figures = {
        "episodes": float(count.expected),
        "lost_episodes": float(count.lost),
        "duplicate_episodes": float(count.duplicate),
        "miscounted_steps": float(count.miscounted_steps),
        "own_exits": float(len(soak.watched.exits)),
        "zombies": float(len(soak.watched.stayed)),
        "left_processes": float(len(soak.watched.left)),
        "simulator_bytes": soak.watched.simulator_bytes,
    }
    calm = calm_from(iterations) * GROUPS * SIZE
    for name, lives in (("trainer", [soak.trainer]), ("server", soak.servers)):
        samples = [_settled(soak, life, calm) for life in lives]
        figures[f"{name}_bytes_per_episode"] = max(
            slope([(float(s.episodes), s.memory) for s in part]) for part in samples
        )
        figures[f"{name}_descriptors"] = max(growth([float(s.descriptors) for s in part]) for part in samples)
    for kind in KINDS:
        kills = [kill for kill in soak.kills if kill.fault.kind == kind]
        lost = sum(kill.lost or kill.iteration + 1 in count.incomplete for kill in kills)
        row = {"injected": len(kills), "survived": len(kills) - lost, "lost": lost}
        figures |= {f"{kind} killed/{column}": float(value) for column, value in row.items()}
    return figures


def _settled(soak: Soak, life: Program, calm: int) -> list[Sample]:
    """The samples of the newest process after its warm-up, from the calm on."""
    samples = soak.watched.samples[life.pid]
    first = max(calm, samples[0].episodes if samples else 0) + WARM_UP * GROUPS * SIZE
    return [sample for sample in samples if sample.episodes >= first]


def _make_policy(root: Path, seed: int) -> Path:
    """A random policy that knows the words of the task and a little more; a Hugging Face folder."""
    config = _config(root / "warm", seed, 1)
    (root / "warm.toml").write_text(dump_toml(config), encoding="utf-8")
    done = subprocess.run(empo2("warmstart", str(root / "warm.toml")), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SoakError(f"warm start: {done.stderr.splitlines()[-1] if done.stderr else done.returncode}")
    return config.run_dir / "start"


def _config(run_dir: Path, seed: int, iterations: int, start: str = "", ports: list[int] | None = None) -> Config:
    """The run over these servers from the policy in `start`; without both, the warm start that makes it."""
    values: dict[str, Any] = {
        "run": {"dir": str(run_dir), "seed": seed, "iterations": iterations, "tensorboard": False, "updates_kept": 0},
        "model": {"remat": "none"},
        "env": {
            "name": "scienceworld",
            "tasks": ["find-non-living-thing"],
            "train_variations": 8,
            "simplification": "easy",
            "step_limit": 4,
            "deterministic": True,
            "workers": AT_ONCE,
        },
        "rollout": {
            "tasks_per_iteration": GROUPS,
            "group_size": SIZE,
            "max_action_tokens": 8,
            "max_length": _LENGTH,
            "slots": AT_ONCE,
            "recovery_timeout_s": _PATIENCE_S,
        },
        "memory": {
            "scope": "task",
            "top_k": 2,
            "placement": "history",
            "tip_max_tokens": _TIP,
            "embedder": "hashing",
            "index": "exact",
            "threshold": 0.0,
        },
        "algorithm": {"p_memory": 0.5},
        "update": {
            "learning_rate": 1e-4,
            "minibatch_steps": 32,
            "buckets": [512, 1024],
            "micro_batch_tokens": 1024,
        },
        "evaluation": {"every": 0, "variations": 1, "repeats": 1},
        "checkpoint": {"every": 1, "keep": 2},
    }
    if start:
        values["model"]["path"] = start
        servers = [f"http://127.0.0.1:{port}" for port in ports or ()]
        values["rollout"] = {**values["rollout"], "engine": "sglang", "servers": servers}
    else:
        values["warmstart"] = {
            "init": "random",
            "updates": 20,
            "demonstrations": 8,
            "batch_episodes": 2,
            "learning_rate": 3e-3,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 2,
            "num_kv_heads": 1,
            "intermediate_size": 128,
        }
    return parse_config(values)
