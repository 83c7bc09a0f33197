"""`empo2 plan`: whether a run fits and what an update costs, before any accelerator or weight is at hand.

Weights, moments, gradients and batch are exact: they come from the abstract model and the table of
`models/sharding.py`. Temporaries are the compiler's: the learner's own program is lowered and compiled for virtual CPU
devices, with abstract arrays. Where that takes too long (the search for a mesh, the table) a formula is used that was
fitted to bound the compiler's figures. Both are upper estimates, since that compiler widens bf16. FLOPs, traffic and
times are arithmetic; this is not a profiler, and rollouts are not timed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from empo2_jax.assembly import TIP_ROOM
from empo2_jax.config import Config, LoraConfig
from empo2_jax.errors import ConfigError
from empo2_jax.hardware import Hardware, find_hardware
from empo2_jax.learner.optim import policy_optimizer
from empo2_jax.learner.step import Learner
from empo2_jax.models.hf_folder import read_json
from empo2_jax.models.lora import adapt, split
from empo2_jax.models.qwen2 import Qwen2
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.models.qwen2_sizes import QWEN2_5, size_in
from empo2_jax.models.sharding import MESH_AXES, check_divides, make_mesh, shardings, spec
from empo2_jax.ops.attention import QUERY_CHUNK
from empo2_jax.ops.logprobs import CHUNK
from empo2_jax.ops.losses import policy_loss
from empo2_jax.types import TrainBatch

GIB = 2**30
ALL_WEIGHTS = LoraConfig()
SHARE = 0.4  # of the bf16 peak, recomputation not counted: what a well-tuned update reaches
MOST_DEVICES = 1024  # tried when looking for a number that fits
COPIES = 2  # of the f32 weights beside the learner's: the engine's and the start's; the start of adapters is their base
_COMPILED_LAYERS = 3
_DTYPES = {"token_ids": "i4", "segment_ids": "i4", "positions": "i4", "loss_mask": "?", "mode": "i1"}  # others: f4
_FIELDS = {name: np.dtype(_DTYPES.get(name, "f4")) for name in TrainBatch._fields if name != "branches"}
Mesh3 = tuple[int, int, int]


@dataclass(frozen=True)
class Plan:
    """One run on one mesh; memory in bytes per device, work per iteration of the whole machine."""

    name: str
    shape: Qwen2Config
    chip: Hardware
    mesh: Mesh3
    rows: int  # of a micro-batch
    length: int  # tokens of a row
    actions: int  # tokens of a shard that go to the head
    weights: int
    trained: int  # part of them that has gradients and moments
    moments: int
    copies: int  # of all weights
    batch: int
    temporaries: int
    compiled: bool  # temporaries are the compiler's, not the formula's
    offload: bool
    kv_token: float  # bytes of one cached token
    kv_tokens: int  # that the configured slots hold
    episodes: int
    updates: int  # optimizer steps
    micro_batches: int  # of one optimizer step
    model_flops: float  # ledger and updates, useful tokens only, no recomputation
    padded_flops: float  # the same with padding
    traffic: dict[str, float]  # bytes that one device sends for one micro-batch, by what and why
    share: float

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh)

    @property
    def peak(self) -> int:
        """Most memory at once, without the cache: while a gradient is added or applied, or the engine is loaded."""
        resident = (1 + self.copies) * self.weights + self.trained  # weights, copies, gradients
        adding = self.batch + self.temporaries + (0 if self.offload else self.moments)
        loading = self.weights - self.trained
        return resident + max(adding, self.moments + self.trained * 3 // 2, self.moments + loading)

    @property
    def kv_room(self) -> int:
        """Left for the cache of an engine in the same process."""
        return int(self.chip.memory) - self.peak

    @property
    def fits(self) -> bool:
        """Whether the update and the cache of the configured slots fit."""
        return self.kv_tokens * self.kv_token <= self.kv_room

    @property
    def seconds(self) -> float:
        """Ledger and updates of one iteration, traffic not hidden behind the computation."""
        compute = self.padded_flops / (self.share * self.chip.flops * self.devices)
        return compute + self.updates * self.micro_batches * sum(self.traffic.values()) / self.chip.link


def shape_of(path: str) -> tuple[str, Qwen2Config]:
    """Name and shape of the model that `model.path` names, from the table of sizes or a local `config.json`.

    Raises:
        ConfigError: neither.
    """
    if (Path(path) / "config.json").is_file():
        return Path(path).name, Qwen2Config.from_hf(read_json(Path(path) / "config.json"))
    size = size_in(path)
    if size is None:
        raise ConfigError(
            f"model.path = {path!r}: plan needs no weights but a shape: a local folder with config.json or "
            f"Qwen2.5-{{{', '.join(QWEN2_5)}}} is allowed"
        )
    return f"Qwen2.5-{size}", QWEN2_5[size]


@cache
def _abstract(
    shape: Qwen2Config, dtype: str = "float32", lora: LoraConfig = ALL_WEIGHTS
) -> tuple[nnx.GraphDef, Any, Any]:
    """Structure, trained and frozen parameters."""
    return split(nnx.eval_shape(lambda: adapt(Qwen2(shape, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype)), lora, 0)))


@cache
def weight_bytes(shape: Qwen2Config, fsdp: int, tensor: int, lora: LoraConfig = ALL_WEIGHTS) -> int:
    """Bytes on one device of the f32 parameters that are trained, exact: of all of them, or of the adapters.

    Raises:
        ConfigError: the mesh does not divide the model.
    """
    check_divides(shape, fsdp, tensor)
    mesh = AbstractMesh((1, fsdp, tensor), MESH_AXES)

    def of_layers(count: int) -> int:
        params = _abstract(replace(shape, num_layers=count), lora=lora)[1]
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(shardings(params, mesh)), strict=True)
        return sum(math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, place in pairs)

    one, two = of_layers(1), of_layers(2)  # all layers are alike, and 80 of them take seconds to make
    return one + (shape.num_layers - 1) * (two - one)


def temporary_bytes(
    shape: Qwen2Config,
    mesh: Mesh3,
    rows: int,
    length: int,
    remat: str = "full",
    lora: LoraConfig = ALL_WEIGHTS,
) -> int:
    """Upper estimate of what adding one gradient needs on one device beyond its arguments and its result.

    All in f32, which the CPU compiler widens to: the layers' weights stacked, the gradients of those that are trained,
    what is kept of each layer, the larger of one layer's and the head's working set, and the vocabulary's two ends.
    """
    data, fsdp, tensor = mesh
    tokens, shards = rows // (data * fsdp) * length, fsdp * tensor
    d, heads, mlp = shape.hidden_size, shape.num_heads * shape.head_dim / tensor, shape.intermediate_size / tensor
    layer = _layer_matrices(shape)
    vocab = shape.vocab_size / shards
    dots = 2 * heads + 2 * mlp + 3 * d  # outputs of the linear layers, per token
    kept = {"full": d, "dots": d + dots, "none": 3 * d + 2 * dots}[remat] * tokens * shape.num_layers
    scores = 14 * rows // (data * fsdp) * min(QUERY_CHUNK, length) * heads / shape.head_dim * length
    working = 2 * layer / tensor + tokens * (4 * mlp + 4 * heads + (6 if tensor == 1 else 28) * d) + scores
    head = 3 * min(CHUNK, tokens * fsdp) * vocab + 3 * tokens * d
    ends = (
        1 if lora.enabled else 3
    ) * vocab * d + tokens * fsdp * d  # the vocabulary's gradients, and what is exchanged
    stacked = layer / shards * shape.num_layers
    gradients = weight_bytes(shape, fsdp, tensor, lora) / 2 if lora.enabled else stacked  # and the adapters stacked
    return int(4 * (stacked + gradients + kept + max(working, head) + ends))


def _layer_matrices(shape: Qwen2Config) -> int:
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return shape.hidden_size * (2 * q + 2 * kv + 3 * shape.intermediate_size)


def forward_flops(shape: Qwen2Config, tokens: int, context: int, actions: int) -> int:
    """Of one forward pass: matrices, causal attention in rows of `context` tokens, the head on action tokens only."""
    attention = 2 * context * shape.num_heads * shape.head_dim
    layers = shape.num_layers * (2 * _layer_matrices(shape) + attention)
    return tokens * layers + 2 * actions * shape.vocab_size * shape.hidden_size


def _traffic(
    shape: Qwen2Config, mesh: Mesh3, tokens: int, actions: int, width: int, remat: str, adapter: int
) -> dict[str, float]:
    """Bytes one device sends for a micro-batch of `tokens` per shard: ring algorithms, `width` bytes per activation.

    Gradients are those of an adapter of so many bytes on a device, or of all weights if it is 0.
    """
    _, fsdp, tensor = mesh
    passes = 1 if remat == "none" else 2  # a recomputed layer gathers and reduces again
    matrices = shape.num_layers * _layer_matrices(shape) / tensor
    ring = {name: (size - 1) / size for name, size in zip(MESH_AXES, mesh, strict=True)}
    sums = 2 * (passes + 1) * shape.num_layers * tokens * shape.hidden_size * width
    ends = 2 * (tokens + actions) * fsdp * shape.hidden_size * width
    found = {
        "all-gather of weights (fsdp)": (passes + (passes == 1)) * matrices * width * ring["fsdp"],
        "reduce-scatter of gradients (fsdp)": (adapter * fsdp or matrices * 4) * ring["fsdp"],
        "exchange at embedding and head (fsdp)": ends * ring["fsdp"],
        "all-reduce of activations (tensor)": (sums + ends) * 2 * ring["tensor"],
        "all-reduce of gradients (data)": (adapter or shape.num_parameters / (fsdp * tensor) * 4) * 2 * ring["data"],
    }
    return {what: size for what, size in found.items() if size}


def plan_on(config: Config, name: str, shape: Qwen2Config, chip: Hardware, mesh: Mesh3, share: float = SHARE) -> Plan:
    """The plan of a run on one mesh; every episode is taken as long as it may be.

    Raises:
        ConfigError: the mesh does not divide the model.
    """
    update, rollout, algorithm = config.update, config.rollout, config.algorithm
    data, fsdp, tensor = mesh
    length, shards = update.buckets[-1], data * fsdp
    rows = max(update.micro_batch_tokens // length // shards, 1) * shards
    per_shard = rows // shards * length
    actions = min(config.env.step_limit * rollout.max_action_tokens, rollout.max_length)
    episodes = rollout.tasks_per_iteration * rollout.group_size
    per_update = min(episodes, max(1, round(update.minibatch_steps / config.env.step_limit)))
    updates, micro = math.ceil(episodes / per_update), math.ceil(per_update / rows)
    ledgers = 1 + (algorithm.kl_coefficient > 0)
    if algorithm.off_policy_denominator == "behavior" or algorithm.rollout_correction == "on":
        ledgers += algorithm.p_memory * algorithm.q_off_policy
    ledger_rows = math.ceil(episodes / rows) * rows
    useful = forward_flops(shape, rollout.max_length, rollout.max_length, actions)
    padded = forward_flops(shape, length, length, actions)
    weights, lora = weight_bytes(shape, fsdp, tensor), config.lora.enabled
    adapter = weight_bytes(shape, fsdp, tensor, config.lora) if lora else 0
    trained = adapter or weights
    passes = 2 if lora else 3  # of an update; frozen weights have no gradient, and an adapter's own work is little
    width = np.dtype(np.float32).itemsize if config.model.compute_dtype == "float32" else 2
    return Plan(
        name=name,
        shape=shape,
        chip=chip,
        mesh=mesh,
        rows=rows,
        length=length,
        actions=rows // shards * actions,
        weights=weights + adapter,
        trained=trained,
        moments=2 * trained,
        copies=COPIES - 1 if lora else COPIES,
        batch=per_shard * sum(dtype.itemsize for dtype in _FIELDS.values()),
        temporaries=temporary_bytes(shape, mesh, rows, length, config.model.remat, config.lora),
        compiled=False,
        offload=update.offload_moments,
        kv_token=2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * width / math.prod(mesh),
        kv_tokens=rollout.slots * (rollout.max_length + config.memory.tip_max_tokens + TIP_ROOM),
        episodes=episodes,
        updates=updates * update.epochs,
        micro_batches=micro,
        model_flops=float(episodes * useful * (ledgers + passes * update.epochs)),
        padded_flops=float(padded * (ledger_rows * ledgers + passes * update.epochs * updates * micro * rows)),
        traffic=_traffic(shape, mesh, per_shard, rows // shards * actions, width, config.model.remat, adapter),
        share=share,
    )


def _meshes(shape: Qwen2Config, devices: int, island: int) -> Iterator[Mesh3]:
    for tensor in (size for size in range(1, min(devices, island, shape.num_kv_heads) + 1) if devices % size == 0):
        for fsdp in (size for size in range(1, devices // tensor + 1) if devices // tensor % size == 0):
            try:
                check_divides(shape, fsdp, tensor)
            except ConfigError:
                continue
            yield devices // tensor // fsdp, fsdp, tensor


def preset(
    config: Config, name: str, shape: Qwen2Config, chip: Hardware, devices: int, share: float = SHARE
) -> Plan | None:
    """The plan on the fastest mesh that fits, else on the one that needs least; None if no mesh divides the model."""
    plans = [plan_on(config, name, shape, chip, mesh, share) for mesh in _meshes(shape, devices, chip.island)]
    return min(plans, key=lambda plan: (not plan.fits, plan.seconds if plan.fits else plan.peak), default=None)


def smallest(config: Config, name: str, shape: Qwen2Config, chip: Hardware) -> Plan | None:
    """The plan with the fewest devices, a power of two up to `MOST_DEVICES`, that fits."""
    counts = (2**power for power in range(MOST_DEVICES.bit_length()))
    return next((plan for n in counts if (plan := preset(config, name, shape, chip, n)) and plan.fits), None)


def make_plan(config: Config, hardware: str, devices: int, share: float = SHARE) -> Plan:
    """The plan of a configuration: on `model.mesh` if that uses all devices, else on the preset.

    Raises:
        ConfigError: unknown hardware or model, too few devices, a mesh that does not divide the model.
    """
    chip, (name, shape) = find_hardware(hardware), shape_of(config.model.path)
    mesh, needed = config.model.mesh, math.prod(config.model.mesh)
    if devices < 1 or not 0 < share <= 1:
        raise ConfigError(f"--devices {devices} --share {share}: at least 1 device and a share in (0, 1] are allowed")
    if needed > devices:
        raise ConfigError(
            f"model.mesh = {list(mesh)} needs {needed} devices, --devices says {devices}; "
            "--model.mesh 1,1,1 plans on the best mesh instead"
        )
    if needed == devices:
        return plan_on(config, name, shape, chip, mesh, share)
    plan = preset(config, name, shape, chip, devices, share)
    if plan is None:
        raise ConfigError(f"--devices {devices}: no mesh of data × fsdp × tensor divides {name}")
    return plan


def virtual_devices(count: int) -> None:
    """Make this process one of `count` CPU devices; only before JAX is first used."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    jax.config.update("jax_enable_compilation_cache", False)  # keeping the program would need its size again


def lower_update(plan: Plan, config: Config) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
    """Both programs of an update (see `Learner.lower`) for as many devices as the mesh has; nothing is allocated."""
    mesh = make_mesh(jax.devices(), *plan.mesh)
    graphdef, *parts = _abstract(plan.shape, config.model.compute_dtype, config.lora)

    def place(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params, frozen = (jax.tree.map(place, part, shardings(part, mesh)) for part in parts)
    over_rows = NamedSharding(mesh, spec("batch", "length"))
    size = (plan.rows, plan.length)
    fields = [jax.ShapeDtypeStruct(size, dtype, sharding=over_rows) for dtype in _FIELDS.values()]
    batch = TrainBatch._make([*fields, None])  # without branches
    learner = Learner(
        graphdef,
        policy_optimizer(config.update),
        partial(policy_loss, clip_low=0.2, clip_high=0.3, dual_clip=10.0),
        frozen=frozen,
        temperature=config.rollout.temperature,
        remat=config.model.remat,
        mesh=mesh,
    )
    return learner.lower(params, batch)


def compiled(plan: Plan, config: Config) -> Plan:
    """The plan with the compiler's temporaries of adding a gradient instead of the formula's.

    A few layers are compiled and the rest is added by the formula: the layers are a loop, and each one more only adds
    its stacked weights, their gradients and what is kept of it.
    """
    short = replace(plan, shape=replace(plan.shape, num_layers=min(plan.shape.num_layers, _COMPILED_LAYERS)))
    adding, _ = lower_update(short, config)
    # Buffers are assigned before code is optimized, and this code will not run.
    memory = adding.compile(compiler_options={"xla_backend_optimization_level": "0"}).memory_analysis()
    assert memory is not None, "the CPU's compiler reports its buffers"
    sizes = (plan.mesh, plan.rows, plan.length, config.model.remat, config.lora)
    rest = temporary_bytes(plan.shape, *sizes) - temporary_bytes(short.shape, *sizes)
    return replace(plan, temporaries=memory.temp_size_in_bytes + rest, compiled=True)
