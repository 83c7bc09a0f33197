"""A run opened again: its policy is evaluated, adapted by memory or exported, its tips listed. Nothing is trained."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from empo2_jax import adaptation, assembly
from empo2_jax.algorithms.retrospex import Rescorer
from empo2_jax.checkpoint import CheckpointStore, check_same_base
from empo2_jax.config import Config
from empo2_jax.config_file import load_config, use_panel
from empo2_jax.envs.base import EnvironmentFamily
from empo2_jax.envs.problems import panel_tasks
from empo2_jax.errors import CheckpointError, ConfigError, DataError
from empo2_jax.evaluation import Panel, evaluate
from empo2_jax.learner.critic import CRITIC_FILE, Critic
from empo2_jax.learner.step import LearnerState
from empo2_jax.metrics import ADAPTATIONS_FILE, JsonLines, read_jsonl
from empo2_jax.models.hf_weights import save_model
from empo2_jax.models.lora import merged, save_adapter
from empo2_jax.models.sharding import visible_devices
from empo2_jax.progress import note
from empo2_jax.report import write_report
from empo2_jax.rollout.base import Engine
from empo2_jax.rollout.collect import Collector

TIPS_FILE = "tips.jsonl"  # of the memory's dump: a header line, then one tip a line


def run_config(run_dir: Path) -> Config:
    """The configuration that a run directory was made with; raises `DataError` if it is none."""
    path = run_dir / "config.toml"
    if not path.is_file():
        raise DataError(f"{run_dir}: not a run directory (no config.toml)")
    return load_config(path)


def checkpoint_folder(run_dir: Path, step: int | None = None) -> tuple[CheckpointStore, int]:
    """The store of a run and the chosen step (None: the newest good one); raises `CheckpointError` without any."""
    config = run_config(run_dir)
    if not config.algorithm.learns:
        raise CheckpointError(f"{run_dir}: a run of {config.algorithm.name} trains no policy and has no checkpoints")
    store = CheckpointStore(run_dir, config.checkpoint.keep)
    chosen = store.latest() if step is None else step
    if chosen is None:
        raise CheckpointError(f"{run_dir}: no checkpoint")
    return store, chosen


def load_trained(run_dir: Path, step: int | None = None) -> tuple[assembly.Policy, int]:
    """The policy at a checkpoint, adapters merged in, and the checkpoint's step; the optimizer is not read."""
    policy, params, frozen, chosen = _restored(run_dir, step)
    nnx.update(policy.model, merged(params, frozen, run_config(run_dir).lora.scale))
    return policy, chosen


def _started(run_dir: Path, config: Config) -> assembly.Policy:
    """The policy at the start of the run, on the mesh of the run, or one device where this machine has fewer."""
    model = config.model
    if math.prod(model.mesh) > len(visible_devices()):
        model = model.model_copy(update={"mesh": (1, 1, 1)})
    return assembly.load_policy(model, run_dir / "start" if config.warmstart.updates else None)


def _restored(run_dir: Path, step: int | None) -> tuple[assembly.Policy, Any, Any, int]:
    """The policy at the start of the run; trained and frozen parameters of a checkpoint; its step."""
    config = run_config(run_dir)
    store, chosen = checkpoint_folder(run_dir, step)
    policy = _started(run_dir, config)
    parts = assembly.learner_parts(config, policy)
    wanted = LearnerState(parts.trainable, None, jnp.int32(0))  # None has no leaves: the moments are not read
    state, _, cursor = store.restore(chosen, wanted, partial=True)
    check_same_base(run_dir, cursor, parts.base, policy.folder)
    return policy, state.params, parts.frozen, chosen


def _panel_config(run_dir: Path, panel_file: Path | None) -> Config:
    return run_config(run_dir) if panel_file is None else use_panel(run_config(run_dir), panel_file)


def evaluate_run(
    run_dir: Path,
    split: str | None = None,
    repeats: int | None = None,
    step: int | None = None,
    panel_file: Path | None = None,
) -> dict[str, Any]:
    """Run the panel (no memory, fixed seeds) on a run's checkpoint; the record has the keys of evaluations.jsonl.

    A run of Retrospex has no checkpoint: its policy and its critic play, as at its end.

    Args:
        run_dir: The run.
        split: "train", "dev" or "test"; None as configured.
        repeats: Episodes per variation; None as configured.
        step: Checkpoint; None for the newest good one.
        panel_file: Panel file; None as configured.

    Raises:
        ConfigError: `split` or `repeats` together with a panel, which fixes both; `step` of a run of Retrospex.
    """
    config = _panel_config(run_dir, panel_file)
    if config.evaluation.panel and (split or repeats):
        raise ConfigError(
            f"the panel {config.evaluation.panel} fixes split and repeats: leave out --split and --repeats"
        )
    changes = {name: value for name, value in (("split", split), ("repeats", repeats)) if value is not None}
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update=changes)})
    if config.algorithm.name == "retrospex":
        if step is not None:
            raise ConfigError(f"--step {step}: a run of retrospex has one critic and no checkpoints; leave out --step")
        panel, chosen = _rescored_panel(run_dir, config), config.run.iterations
    else:
        policy, chosen = load_trained(run_dir, step)
        with _collector(config, policy, chosen) as (collector, family):
            panel = evaluate(collector, family, config.evaluation)
    return panel.record("evaluate", chosen, config.evaluation.split)


def _rescored_panel(run_dir: Path, config: Config) -> Panel:
    """The panel played by a Retrospex run's policy and critic; raises `DataError` where the critic is missing."""
    settings, critic = config.retrospex, Critic.load(run_dir / CRITIC_FILE)
    embed = assembly.make_embedder(config, tips=True).embed

    def rescoring(config: Config, policy: assembly.Policy, engine: Engine, family: EnvironmentFamily) -> Collector:
        chooser = Rescorer(family, embed, critic.values, settings.decay, settings.limit)
        return assembly.make_choosing_collector(config, policy, engine, family, chooser)

    with _collector(config, _started(run_dir, config), 0, rescoring) as (collector, family):
        return evaluate(collector, family, config.evaluation.model_copy(update={"temperature": settings.temperature}))


def adapt_run(
    run_dir: Path,
    trials: int,
    *,
    split: str | None = None,
    tasks: Sequence[str] = (),
    keep_memory: bool = False,
    step: int | None = None,
    panel_file: Path | None = None,
) -> dict[str, Any]:
    """Test-time adaptation of a run's checkpoint; appends the record to adaptations.jsonl and renews the report.

    Args:
        run_dir: The run; its checkpoints, its memory and its evaluations stay as they are.
        trials: Episodes per variation, one after another.
        split: "train", "dev" or "test"; None as configured.
        tasks: Names of tasks, other ones than those trained on if wanted; none: as configured.
        keep_memory: Begin with a copy of the checkpoint's tips instead of an empty memory.
        step: Checkpoint; None for the newest good one.
        panel_file: The problems, other ones than those trained on if wanted, each once a trial; None as configured.

    Raises:
        ConfigError: `split` or `tasks` together with a panel, which fixes both.
    """
    config = _panel_config(run_dir, panel_file)
    if config.evaluation.panel and (split or tasks):
        raise ConfigError(f"the panel {config.evaluation.panel} fixes split and tasks: leave out --split and --tasks")
    changes: dict[str, Any] = {"evaluation": config.evaluation.model_copy(update={"split": split})} if split else {}
    if tasks:
        changes["env"] = config.env.model_copy(update={"tasks": tuple(tasks)})
    config = config.model_copy(update=changes)
    policy, chosen = load_trained(run_dir, step)
    memory = assembly.make_memory(config.memory, assembly.make_embedder(config, tips=True))
    if keep_memory:
        memory.load(run_dir / "checkpoints" / str(chosen) / "memory")
    done = []
    with _collector(config, policy, chosen) as (collector, family):
        for trial in adaptation.adapt(
            collector,
            panel_tasks(family, config.evaluation),
            memory,
            assembly.make_writer(config, policy, family),
            trials=trials,
            temperature=config.evaluation.temperature,
            scope=config.memory.scope,
            seed=config.evaluation.seed,
        ):
            done.append(trial)
            note(f"trial {len(done)}/{trials} · score {trial.now.score:.1f} · best so far {trial.best.score:.1f}")
    began = "run" if keep_memory else "empty"
    record = adaptation.record(done, iteration=chosen, split=config.evaluation.split, memory=began)
    log = JsonLines(run_dir / ADAPTATIONS_FILE)
    log.append(record)
    log.close()
    write_report(run_dir)
    return record


@contextmanager
def _collector(
    config: Config, policy: assembly.Policy, version: int, make: Callable[..., Collector] = assembly.make_collector
) -> Generator[tuple[Collector, EnvironmentFamily], None, None]:
    with closing(assembly.make_family(config)) as family, closing(assembly.make_engine(config, policy)) as engine:
        engine.load(policy.params, version)
        with closing(make(config, policy, engine, family)) as collector:
            yield collector, family


def export_adapter(run_dir: Path, folder: Path, step: int | None = None) -> int:
    """Write a run's adapter alone as a new folder for PEFT; returns the step it is from.

    Raises:
        ConfigError: the run trained all weights.
    """
    config = run_config(run_dir)
    if not config.lora.enabled:
        raise ConfigError(f"{run_dir}: lora.enabled = false: the run has no adapter; --adapter is for runs with one")
    policy, adapters, _, chosen = _restored(run_dir, step)
    from_hub = assembly.is_hub_id(config.model.path) and not config.warmstart.updates
    save_adapter(folder, adapters, config.lora, config.model.path if from_hub else str(policy.folder.resolve()))
    return chosen


def export_run(run_dir: Path, folder: Path, step: int | None = None) -> int:
    """Write a run's policy as a new Hugging Face folder with its tokenizer; returns the step it is from.

    The tips of the checkpoint lie beside the weights in `memory/`, as `TipMemory.load` reads them.
    """
    policy, chosen = load_trained(run_dir, step)
    params = jax.block_until_ready(policy.params)
    memory = run_dir / "checkpoints" / str(chosen) / "memory"
    save_model(folder, params, policy.model.config, tokenizer_folder=policy.folder, beside={"memory": memory})
    return chosen


def tips_of_run(run_dir: Path, buffer: str = "", step: int | None = None) -> Sequence[dict[str, Any]]:
    """Tips of a checkpoint, best score first, those of buffers whose name contains `buffer`."""
    store, chosen = checkpoint_folder(run_dir, step)
    if chosen not in store.steps():
        raise CheckpointError(f"{run_dir}: no such checkpoint: {chosen}; there are {store.steps()}")
    problem = store.problem(chosen)
    if problem is not None:
        raise CheckpointError(f"{run_dir}: checkpoint {chosen} is corrupt: {problem}")
    _, *tips = read_jsonl(run_dir / "checkpoints" / str(chosen) / "memory" / TIPS_FILE)
    return sorted((tip for tip in tips if buffer in tip["buffer"]), key=lambda tip: (-tip["score"], tip["counter"]))
