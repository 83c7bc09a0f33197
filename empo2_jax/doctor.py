"""`empo2 doctor`: what this machine has of what a run needs, as a table. It changes nothing and downloads nothing."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from empo2_jax.cache import cache_folder
from empo2_jax.config import Config, ModelConfig
from empo2_jax.errors import Empo2Error
from empo2_jax.hardware import host_memory
from empo2_jax.models.qwen2_config import read_config
from empo2_jax.models.sharding import check_divides, make_mesh, visible_devices
from empo2_jax.ops.attention_kernels import PREFERRED, obstacle, platform_of, resolve

DISK_NEEDED, MEMORY_NEEDED = 6.0, 8.0  # GiB: the installable model with its checkpoints; the quickstart's peak


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    found: str
    ok: bool
    needed: bool = True  # a run cannot do without


def diagnose(config: Config | None = None) -> list[Check]:
    """All checks; with a configuration also those that it needs."""
    scienceworld = config is None or config.env.name == "scienceworld"
    checks = [
        Check("Python", sys.version.split()[0], sys.version_info >= (3, 11)),
        _guarded("JAX devices", _devices),
        _guarded("attention", lambda: attention_kernel((config or Config()).model)),
        _package("flax"),
        _package("orbax-checkpoint"),
        _package("scann", needed=config is not None and config.memory.index == "scann"),
        _package("scienceworld", needed=config is not None and scienceworld),
        _guarded("Java", _java, needed=config is not None and scienceworld),
        _package("tantivy", needed=config is not None and config.env.name == "webshop"),
        _disk(config.run_dir if config else Path.cwd()),
        _memory(),
        _writable("run directory", config.run_dir if config else Path.cwd()),
        _writable("cache", cache_folder()),
    ]
    if config is not None:
        checks += [_guarded("mesh", lambda: mesh_fits(config))]
    return checks


def mesh_fits(config: Config) -> str:
    """What the mesh uses; raises `ConfigError` when it does not fit the devices or the model's sizes."""
    data, fsdp, tensor = config.model.mesh
    folder = Path(config.model.path)
    if folder.is_dir():
        check_divides(read_config(folder), fsdp, tensor)
    devices = visible_devices()
    make_mesh(devices, data, fsdp, tensor)
    return f"data {data} × fsdp {fsdp} × tensor {tensor} of {len(devices)} devices"


def attention_kernel(model: ModelConfig) -> str:
    """The kernel that trains, and why `auto` passed over others; raises `ConfigError` if the named one cannot run."""
    platform, folder = platform_of(visible_devices()[0]), Path(model.path)
    head_dim = read_config(folder).head_dim if folder.is_dir() else None
    chosen = resolve(model.attention, platform, model.compute_dtype, head_dim)
    if model.attention != "auto":
        return chosen
    passed = PREFERRED[: PREFERRED.index(chosen)]
    return "; ".join(
        [
            f"{chosen} (auto)",
            *(f"{name} needs {obstacle(name, platform, model.compute_dtype, head_dim)}" for name in passed),
        ]
    )


def _guarded(name: str, find: Callable[[], str], needed: bool = True) -> Check:
    try:
        return Check(name, find(), True, needed)
    except (Empo2Error, OSError) as error:
        return Check(name, str(error).splitlines()[0], False, needed)


def _devices() -> str:
    devices = visible_devices()
    return f"{len(devices)} × {devices[0].device_kind} ({devices[0].platform}), jax {jax.__version__}"


def _package(name: str, needed: bool = True) -> Check:
    try:
        return Check(name, version(name), True, needed)
    except PackageNotFoundError:
        return Check(name, "not installed", False, needed)


def _java() -> str:
    if importlib.util.find_spec("scienceworld") is None:
        raise Empo2Error("not looked for: scienceworld is not installed")
    from empo2_jax.envs.scienceworld_jvm import java_path

    path = java_path()
    done = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise Empo2Error(f"{path} does not run")
    return f"{done.stderr.splitlines()[0]} ({path})"


def _disk(place: Path) -> Check:
    free = shutil.disk_usage(_existing(place)).free / 2**30
    return Check("disk", f"{free:.1f} GiB free, {DISK_NEEDED:.0f} advised", free >= DISK_NEEDED, needed=False)


def _memory() -> Check:
    total = host_memory() / 2**30
    return Check("memory", f"{total:.1f} GiB, {MEMORY_NEEDED:.0f} advised", total >= MEMORY_NEEDED, needed=False)


def _writable(name: str, place: Path) -> Check:
    parent = _existing(place)
    ok = parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
    return Check(name, f"{place}: {'can be written' if ok else 'cannot be written'}", ok)


def _existing(place: Path) -> Path:
    """The nearest ancestor that exists."""
    return next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
