"""What a run would do, in a few lines, without running it. Memory and time are `planning`'s.

What the run would refuse is refused here, by the same functions: a run directory that cannot be written, the policy's
files, the mesh, the engine's room, the list of servers, the tasks. Nothing is downloaded and no weight is read; a model
of the hub is known by its name alone.
"""

import math
from pathlib import Path

import jax

from empo2_jax import assembly, assets
from empo2_jax.checkpoint_files import check_writable
from empo2_jax.config import Config
from empo2_jax.envs.problems import panel_tasks, shortfall
from empo2_jax.errors import ConfigError
from empo2_jax.models.hf_weights import check_tensors
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.models.qwen2_sizes import QWEN2_5, size_in
from empo2_jax.models.sharding import check_divides, make_mesh, visible_devices
from empo2_jax.models.tokenizer import Tokenizer
from empo2_jax.ops.attention_kernels import platform_of, resolve
from empo2_jax.remote_engine import server_urls
from empo2_jax.snapshots import check_url


def refuse(config: Config, processes: int = 1) -> None:
    """Raise what the run would before its first episode: an `Empo2Error`.

    Args:
        config: The experiment.
        processes: Of the run; each is taken to have as many devices as this one. 0: not known.
    """
    mesh, devices = config.model.mesh, visible_devices()
    if processes == 1:
        make_mesh(devices, *mesh)
    elif processes and math.prod(mesh) != (count := jax.local_device_count() * processes):
        raise ConfigError(
            f"model.mesh = {list(mesh)} has {math.prod(mesh)} devices; {processes} processes of "
            f"{jax.local_device_count()} devices have {count}, and all must take part"
        )
    check_writable(config.run_dir)
    if config.run.mirror:
        check_url(config.run.mirror)
    if config.rollout.engine == "sglang":
        server_urls(config.rollout.servers)
    if (shape := _shape(config)) is None:
        return
    check_divides(shape, *mesh[1:])
    assembly.check_engine(config, shape, processes)
    resolve(config.model.attention, platform_of(devices[0]), config.model.compute_dtype, shape.head_dim)


def _shape(config: Config) -> Qwen2Config | None:
    """Of the policy whose files are here, after a look at them, or of a known name; None: only loading will tell."""
    path = config.model.path
    started = config.warmstart.updates > 0 and (config.run_dir / "start").is_dir()
    if config.warmstart.init == "random" and not started:
        return None
    if not started and (size := size_in(path)) and assembly.is_hub_id(path):
        return QWEN2_5[size]
    if not started and (
        assembly.is_hub_id(path) or (path == "smollm2-135m-instruct" and not assets.smollm2_folder().exists())
    ):
        return None
    folder: Path = config.run_dir / "start" if started else assembly.model_folder(path)
    shape = check_tensors(folder)
    Tokenizer.load(folder).check_fits(shape.vocab_size, folder)
    return shape


def lines(config: Config) -> list[str]:
    """Iterations, tasks, episodes, steps, modes, evaluation; checks that the environment knows the tasks."""
    family = assembly.make_family(config)
    try:
        train, panel = family.tasks("train"), panel_tasks(family, config.evaluation)
        fewer = shortfall(family, config.evaluation)
    finally:
        family.close()
    if config.algorithm.name == "reflexion":
        return [
            f"# plan: {config.reflexion.trials} trials at most of {len(panel)} problems × "
            f"{config.evaluation.repeats} repeats of {family.name} ({config.evaluation.split}) in {config.run_dir}",
            f"# steps: at most {config.env.step_limit} per episode; no update of the policy",
            *([f"# {fewer}"] if fewer else []),
            f"# warm start: {config.warmstart.updates} updates",
        ]
    rollout, algorithm = config.rollout, config.algorithm
    episodes = rollout.tasks_per_iteration * rollout.group_size
    off = algorithm.p_memory * algorithm.q_off_policy
    evaluations = f"# evaluation: {config.evaluation.repeats * len(panel)} episodes on {config.evaluation.split}"
    learning = [
        f"# modes: {1 - algorithm.p_memory:.3f} on-policy, {algorithm.p_memory - off:.3f} on-policy with memory, "
        f"{off:.3f} off-policy",
        f"{evaluations} every {config.evaluation.every} iterations",
    ]
    return [
        f"# plan: {config.run.iterations} iterations in {config.run_dir}",
        f"# tasks: {len({task.name for task in train})} ({len(train)} training variations) of {family.name}",
        f"# episodes: {rollout.tasks_per_iteration} tasks × {rollout.group_size} = {episodes} per iteration, "
        f"{episodes * config.run.iterations} in all",
        f"# steps: at most {config.env.step_limit} per episode, {episodes * config.env.step_limit} per iteration, "
        f"{episodes * config.env.step_limit * config.run.iterations} in all",
        *(learning if algorithm.learns else [f"{evaluations} at the end, without the critic and with it"]),
        *([f"# {fewer}"] if fewer else []),
        f"# warm start: {config.warmstart.updates} updates",
        *([] if algorithm.learns else [f"# {algorithm.name}: no update of the policy after its warm start"]),
    ]
