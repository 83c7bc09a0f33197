"""Suite `plan`: the real `empo2 plan` for a 7B model on eight devices, in time and memory, and whether it is right.

Its arguments must be the f32 weights and moments shared evenly, N · 12 bytes / 8 devices, and those of the compiled
program must be what the arithmetic says.
"""

import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from empo2_jax.bench.base import Case, Side
from empo2_jax.config import parse_config
from empo2_jax.config_file import dump_toml
from empo2_jax.plan_compile import lower_update, virtual_devices
from empo2_jax.plan_costs import weight_bytes
from empo2_jax.planning import make_plan

_MESH = [1, 4, 2]
_LAYERS = 3  # of the program whose arguments the compiler is asked for


def cases(quick: bool) -> list[Case]:
    """One command; it is compared with no one."""
    return [Case("plan/7B", "empo2_jax.bench.plan:ours", arguments={"size": "7B"}, unit="plan", pairs=1)]


def ours(size: str) -> Side:
    """The command in a process of its own; figures: its `peak_bytes` and the relative errors of its arguments."""
    config = parse_config(
        {
            "model": {"path": f"Qwen/Qwen2.5-{size}", "compute_dtype": "bfloat16", "mesh": _MESH},
            "rollout": {"slots": 64},
            "update": {"micro_batch_tokens": 18_432},
        }
    )
    folder = tempfile.TemporaryDirectory(prefix="empo2-bench-plan-")
    path = Path(folder.name) / "plan.toml"
    path.write_text(dump_toml(config), encoding="utf-8")

    def run() -> None:
        command = [sys.executable, "-m", "empo2_jax", "plan", str(path), "--hardware", "a100-40"]
        # 1 says that the run would not fit.
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise RuntimeError(done.stderr)

    def figures() -> dict[str, float]:
        folder.cleanup()
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        plan = make_plan(config, "a100-40", 8)
        even = plan.shape.num_parameters * 12 / plan.devices
        virtual_devices(plan.devices)
        short = replace(plan, shape=replace(plan.shape, num_layers=_LAYERS))
        memory = lower_update(short, config)[1].compile().memory_analysis()
        assert memory is not None, "the CPU's compiler reports its buffers"
        expected = 4 * weight_bytes(short.shape, *plan.mesh[1:])  # weights, two moments, gradients
        return {
            "peak_bytes": float(peak),
            "argument_error": abs(plan.weights + plan.moments - even) / even,
            "compiled_argument_error": abs(memory.argument_size_in_bytes - expected) / expected,
        }

    return Side(run, figures=figures, helpers_cpu=_children_cpu)


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
