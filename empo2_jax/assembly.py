"""From a configuration to its parts: the one place where names in TOML become objects.

Nothing imports an implementation until it is named. Shared by training, evaluation and the warm start.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from empo2_jax import assets, distributed
from empo2_jax.config import Config, IntrinsicConfig, MemoryConfig, ModelConfig
from empo2_jax.envs import registry
from empo2_jax.envs.base import EnvironmentFamily
from empo2_jax.envs.problems import panel_tasks, shortfall
from empo2_jax.errors import ConfigError, DataError
from empo2_jax.hardware import host_memory
from empo2_jax.learner.optim import policy_optimizer
from empo2_jax.learner.step import Learner
from empo2_jax.memory.base import Embedder, Novelty, VectorIndex
from empo2_jax.memory.novelty import NoveltyStore
from empo2_jax.memory.tips import TipMemory
from empo2_jax.models.hf_weights import load_model, weights_hash
from empo2_jax.models.lora import adapt, merged, split
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.models.sharding import make_mesh, visible_devices
from empo2_jax.models.tokenizer import Tokenizer
from empo2_jax.ops.losses import policy_loss
from empo2_jax.plan_costs import kv_bytes
from empo2_jax.progress import note
from empo2_jax.rollout.base import Engine
from empo2_jax.rollout.chat import Chat
from empo2_jax.rollout.collect import Collector
from empo2_jax.rollout.jax_engine import JaxEngine
from empo2_jax.rollout.openings import check_openings
from empo2_jax.rollout.reflect import PolicyTipWriter, ScriptedTipWriter, TipWriter
from empo2_jax.rollout.rescore import Chooser, ChoosingCollector
from empo2_jax.rollout.spread import SpreadCollector

TIP_ROOM = 256  # tokens that the request for a tip may take beyond rollout.max_length


@dataclass(frozen=True)
class Policy:
    """A model with the tokenizer that belongs to it."""

    model: Qwen2
    tokenizer: Tokenizer
    folder: Path
    mesh: Mesh

    @property
    def params(self) -> Any:
        """The model's parameters, f32."""
        return nnx.split(self.model)[1]


def model_folder(path: str) -> Path:
    """The Hugging Face folder that `model.path` names: shipped, installable, local or from the hub."""
    if path == "toy":
        return assets.toy_start()
    if path == "smollm2-135m-instruct":
        return assets.smollm2()
    if Path(path).is_dir():
        return Path(path)
    if is_hub_id(path):
        return assets.from_hub(path)
    raise DataError(f"model.path = {path!r}: no such folder, and neither `toy`, `smollm2-135m-instruct` nor a hub id")


def is_hub_id(path: str) -> bool:
    """Whether `model.path` names a model of the hub rather than a folder."""
    return path.count("/") == 1 and not path.startswith((".", "/")) and not Path(path).is_dir()


def load_policy(config: ModelConfig, folder: Path | None = None) -> Policy:
    """Weights and tokenizer of `model.path`, or of `folder` if given, placed on the configured mesh."""
    folder = folder or model_folder(config.path)
    tokenizer = Tokenizer.load(folder)
    mesh = make_mesh(visible_devices(), *config.mesh)
    distributed.check_covers(mesh)
    model = load_model(folder, dtype=config.compute_dtype, mesh=mesh, attention=config.attention)
    tokenizer.check_fits(model.config.vocab_size, folder)
    return Policy(model, tokenizer, folder, mesh)


class Parts(NamedTuple):
    """A policy as the learner takes it."""

    graphdef: nnx.GraphDef
    trainable: Any
    frozen: Any
    base: str  # hash of the weights that adapters belong to; empty without adapters


def learner_parts(config: Config, policy: Policy) -> Parts:
    """What is trained of a policy and what stays: everything and nothing, or new adapters and the policy's arrays."""
    parts = split(adapt(policy.model, config.lora, config.run.seed, policy.mesh))
    return Parts(*parts, weights_hash(policy.folder) if config.lora.enabled else "")


def make_learner(config: Config, graphdef: nnx.GraphDef, frozen: Any, mesh: Mesh) -> Learner:
    """The learner of the policy loss, of a model's structure and the parameters that are not trained."""
    algorithm = config.algorithm
    objective = partial(
        policy_loss,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        kl_coefficient=algorithm.kl_coefficient,
        entropy_coefficient=algorithm.entropy_coefficient,
        mask_sign=algorithm.mask_sign,
    )
    return Learner(
        graphdef,
        policy_optimizer(config.update),
        objective,
        frozen=frozen,
        temperature=config.rollout.temperature,
        remat=config.model.remat,
        mesh=mesh,
        offload_moments=config.update.offload_moments,
    )


def make_family(experiment: Config) -> EnvironmentFamily:
    """The family that `[env]` describes, with as many simulators as episodes at once."""
    variations = experiment.evaluation.variations
    return registry.make_family(experiment.env, panel=variations, workers=experiment.rollout.slots)


def make_embedder(experiment: Config, tips: bool | None = None) -> Embedder:
    """The embedder that `memory.embedder` names; nothing is loaded where neither tips nor novelty need it.

    `tips` tells whether there are tips (None: as the algorithm says).
    """
    with_tips = experiment.algorithm.p_memory > 0 if tips is None else tips
    unused = not with_tips and experiment.intrinsic.kind == "none"
    if unused or experiment.memory.embedder == "hashing":
        return importlib.import_module("empo2_jax.memory.hashing_embedder").HashingEmbedder(384)
    return importlib.import_module("empo2_jax.memory.minilm_embedder").MiniLMEmbedder(assets.minilm())


def make_index(config: MemoryConfig) -> Callable[[int], VectorIndex]:
    """Factory of the index that `memory.index` names."""
    if config.index == "scann":
        return importlib.import_module("empo2_jax.memory.scann_index").ScannIndex
    return importlib.import_module("empo2_jax.memory.exact_index").ExactIndex


def make_memory(config: MemoryConfig, embedder: Embedder) -> TipMemory:
    """An empty tip memory."""
    return TipMemory(
        embedder,
        make_index(config),
        capacity=config.capacity,
        threshold=config.threshold,
        top_k=config.top_k,
        distinct_episodes=config.distinct_episodes,
        eviction=config.eviction,
        duplicates=config.duplicates,
    )


def make_novelty(config: IntrinsicConfig, memory: MemoryConfig, embedder: Embedder, seed: int = 0) -> Novelty:
    """Novelty of a world of which nothing has been seen; `seed` is that of random networks."""
    if config.kind == "rnd":
        rnd = importlib.import_module("empo2_jax.memory.rnd")
        return rnd.RandomDistillation(
            embedder.dimension, coefficient=config.coefficient, learning_rate=config.rnd_learning_rate, seed=seed
        )
    return NoveltyStore(
        embedder.dimension,
        make_index(memory),
        threshold=config.threshold,
        coefficient=config.coefficient,
        revisits=config.revisits,
        kind=config.kind,
    )


def session_length(config: Config) -> int:
    """Tokens of an episode and its tip, for which the engine has room."""
    return config.rollout.max_length + config.memory.tip_max_tokens + TIP_ROOM


def check_engine(config: Config, shape: Qwen2Config, processes: int) -> None:
    """Raise `ConfigError` where the configured engine cannot serve a model of that shape to so many processes."""
    length, limit = session_length(config), shape.max_position_embeddings
    if length > limit:
        raise ConfigError(
            f"rollout.max_length + memory.tip_max_tokens + {TIP_ROOM} = {length} exceeds the {limit} positions of "
            f"{config.model.path}"
        )
    if processes > 1 and config.rollout.max_staleness:
        raise ConfigError(
            f"rollout.max_staleness = {config.rollout.max_staleness} with several processes: 0 is allowed"
        )
    shards = config.model.mesh[0] * config.model.mesh[1]
    if config.rollout.engine == "jax" and processes == 1 and config.rollout.slots % shards:
        raise ConfigError(
            f"rollout.slots = {config.rollout.slots} do not divide over data × fsdp = {shards} devices of model.mesh; "
            f"a multiple of {shards} is allowed"
        )
    check_room(config, shape, processes)


def check_room(config: Config, shape: Qwen2Config, processes: int) -> None:
    """Raise `ConfigError` where the engine's cache, or the episodes of an iteration, are larger than the whole memory.

    What is a little too large is found by `empo2 plan`, or when it does not fit.
    """
    rollout = config.rollout
    if rollout.engine == "jax" and processes:
        device = jax.local_devices()[0]
        memory = (device.memory_stats() or {}).get("bytes_limit") or host_memory()
        shares = 1 if processes > 1 else math.prod(config.model.mesh)
        slot = session_length(config) * kv_bytes(shape, config.model.compute_dtype) / shares
        if rollout.slots * slot > memory:
            fit = int(memory / (2 * slot))  # sampling needs it twice
            raise ConfigError(
                f"rollout.slots = {rollout.slots}: their cache takes {_gib(rollout.slots * slot)} of {_gib(memory)} of "
                f"memory; " + (f"{fit} may fit, `empo2 plan` counts the rest" if fit else "lower rollout.max_length")
            )
    # An episode keeps its prompts, with tips and without; both grow up to their end.
    episode = 2 * np.dtype(np.int32).itemsize * config.env.step_limit * rollout.max_length // 2
    group = rollout.tasks_per_iteration * episode * (1 + rollout.max_staleness)
    if (needed := group * rollout.group_size) > (memory := host_memory()):
        fit = memory // group
        raise ConfigError(
            f"rollout.tasks_per_iteration = {rollout.tasks_per_iteration}, rollout.group_size = {rollout.group_size}: "
            f"their episodes take up to {_gib(needed)} of {_gib(memory)} of memory; "
            + (f"groups of {fit} fit" if fit else "lower rollout.tasks_per_iteration")
        )


def _gib(size: float | int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def make_engine(config: Config, policy: Policy) -> Engine:
    """The engine that `rollout.engine` names, with room for an episode and its tip; weights come with `load`."""
    length, processes = session_length(config), distributed.current().size
    check_engine(config.model_copy(update={"model": _on(policy.mesh, config.model)}), policy.model.config, processes)
    if config.rollout.engine == "sglang":
        remote = importlib.import_module("empo2_jax.remote_engine")
        return remote.make_remote_engine(config, policy.model, policy.tokenizer, policy.folder, policy.mesh, length)
    model, mesh = policy.model, policy.mesh if policy.mesh.size > 1 else None
    if processes > 1:
        graphdef, params = nnx.split(model)
        model, mesh = nnx.merge(graphdef, distributed.own_copy(params)), None
    return JaxEngine(model, slots=config.rollout.slots, max_length=length, mesh=mesh)


def _on(mesh: Mesh, config: ModelConfig) -> ModelConfig:
    """The section with the mesh that the policy really lies on; a run may be opened on fewer devices."""
    return config.model_copy(update={"mesh": tuple(mesh.shape.values())})


def served_params(config: Config, trainable: Any, frozen: Any) -> Any:
    """Weights for the engine, of which no array will be donated: as placed for servers, which all processes publish
    together, else whole in every process.
    """
    own = distributed.own_copy if config.rollout.engine == "jax" else distributed.copy
    whole = frozen if own is distributed.copy or distributed.current().size == 1 else own(frozen)
    return merged(own(trainable), whole, config.lora.scale)


def make_collector(
    config: Config,
    policy: Policy,
    engine: Engine,
    family: EnvironmentFamily,
    one: Callable[..., Collector] = Collector,
) -> Collector:
    """The collector of a run; of several processes, each does its share. `one` makes that of a single process.

    Raises:
        ConfigError: a first turn leaves no room for an answer, or the panel names a problem that does not exist.
    """
    rollout, chat = config.rollout, Chat(policy.tokenizer, family.system_prompt())
    lengths = {"max_length": rollout.max_length, "max_action_tokens": rollout.max_action_tokens}
    check_openings(family, chat, [*family.tasks("train"), *panel_tasks(family, config.evaluation)], **lengths)
    if fewer := shortfall(family, config.evaluation):
        note(fewer)
    gang = distributed.current()
    kind = one if gang.size == 1 else partial(SpreadCollector, gang)
    return kind(
        engine,
        chat,
        family,
        config.rollout,
        step_limit=config.env.step_limit,
        memory=config.memory,
        seed=config.run.seed,
        workers=config.env.workers,
        banned_from=policy.tokenizer.size,
    )


def make_choosing_collector(
    config: Config, policy: Policy, engine: Engine, family: EnvironmentFamily, chooser: Chooser
) -> Collector:
    """A collector whose actions `chooser` takes among `retrospex.candidates` proposals."""
    return make_collector(
        config, policy, engine, family, partial(ChoosingCollector, chooser, config.retrospex.candidates)
    )


def make_writer(config: Config, policy: Policy, family: EnvironmentFamily) -> TipWriter:
    """Who writes tips."""
    if config.memory.writer == "scripted":
        return ScriptedTipWriter(family)
    return PolicyTipWriter(
        Chat(policy.tokenizer, family.system_prompt()),
        family,
        config.memory,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        banned_from=policy.tokenizer.size,
    )
