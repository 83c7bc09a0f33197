"""One JAX device, strict rank promotion, a compilation cache that outlives the run, and quiet hypothesis."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

CACHE = Path(os.environ.setdefault("EMPO2_CACHE", str(Path.home() / ".cache" / "empo2_jax")))
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Also read by the processes that tests start.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / "test_compilations"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

if sys.platform == "linux" and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
    # Workers and what they start have cores of their own: XLA, BLAS and simulators start a thread per core they see.
    cores, workers = sorted(os.sched_getaffinity(0)), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, cores[int(worker.removeprefix("gw")) % len(cores) :: workers])

import jax  # noqa: E402  (the platform is chosen above)
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

# A shell starts background jobs with Ctrl-C ignored, and children inherit that; the tests send it to their processes.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("empo2", deadline=None, max_examples=25, derandomize=bool(os.environ.get("CI")))
settings.load_profile("empo2")


@pytest.fixture
def run_on_devices() -> Callable[[int, str], str]:
    """Run Python source in a process with so many virtual CPU devices; returns its output, fails with its errors."""

    def run(devices: int, source: str) -> str:
        # A collective blocks a thread of XLA's pool and several run at once: too few threads wait for each other.
        threads = {"PJRT_NPROC": str(16 * devices), "NPROC": str(16 * devices)}
        environment = os.environ | threads | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        command = [sys.executable, "-W", "error::DeprecationWarning:empo2_jax", "-c", source]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0, result.stderr[-4000:]
        return result.stdout

    return run
