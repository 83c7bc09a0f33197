"""`empo2 plan`: whether a run fits and what an update costs, before any accelerator or weight is at hand.

Weights, moments, gradients, batch and cache are exact: they come from the abstract model and the table of
`models/sharding.py`. Temporaries are the compiler's (`plan_compile.py`), or a formula's where that takes too long (the
search for a mesh, the table); both are upper estimates. FLOPs, traffic and times are arithmetic (`plan_costs.py`); this
is not a profiler.
"""

import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from empo2_jax.assembly import session_length
from empo2_jax.config import Config
from empo2_jax.data.packing import branch_room
from empo2_jax.errors import ConfigError
from empo2_jax.hardware import Hardware, find_hardware
from empo2_jax.models.qwen2_config import Qwen2Config, read_config
from empo2_jax.models.qwen2_sizes import QWEN2_5, size_in
from empo2_jax.models.sharding import check_divides
from empo2_jax.plan_costs import Mesh3, forward_flops, kv_bytes, temporary_bytes, traffic, weight_bytes
from empo2_jax.types import TrainBatch

GIB = 2**30
SHARE = 0.4  # of the bf16 peak, recomputation not counted: what a well-tuned update reaches
DECODE_SHARE = 0.5  # of the memory and link bandwidth: an assumption; the rest are launches and latency of collectives
WORLD_S = {"scienceworld": 0.017}  # CPU of an action by `env.name`, where it was measured: docs/adr/0023
MOST_DEVICES = 1024  # tried when looking for a number that fits
UNSET: Mesh3 = (1, 1, 1)  # a mesh that leaves the choice to the plan
ENTRY_TOKENS = 16  # of a tip's entry in the block, beyond the tip and its action
_DTYPES = {"token_ids": "i4", "segment_ids": "i4", "positions": "i4", "loss_mask": "?", "mode": "i1"}  # others: f4
BATCH_FIELDS = {name: np.dtype(_DTYPES.get(name, "f4")) for name in TrainBatch._fields if name != "branches"}
_PRESETS = Path(__file__).with_name("sharding_presets.toml")


@dataclass(frozen=True)
class Plan:
    """One run on one mesh; memory in bytes on the fullest device, work per iteration of the whole machine."""

    name: str
    shape: Qwen2Config
    chip: Hardware
    mesh: Mesh3
    processes: int
    rows: int  # of the largest micro-batch
    length: int  # tokens of a row, those of branches apart
    branches: int  # tokens of branches beside a row
    actions: int  # tokens of a shard that go to the head, at most
    weights: int
    trained: int  # part of them that has gradients and moments
    moments: int
    reference: int  # weights at the start of RL, for the KL
    engine: int  # the engine's weights while it samples
    loading: int  # more while the engine takes new ones
    released: bool  # the engine's weights and cache are given back while updates run
    overlaps: bool  # the engine samples while updates run
    batch: int
    temporaries: int
    compiled: bool  # temporaries are the compiler's, not the formula's
    offload: bool
    published: int  # bytes of one version for servers; 0: the engine is in the process
    kv: int  # cache of the configured slots
    kv_tokens: int  # that it holds, on all devices
    episodes: int
    splits: int  # rows that an episode with tips takes, each with its branches; 0 without branches
    updates: int  # optimizer steps
    micro_batches: int  # of one optimizer step
    model_flops: float  # ledger and updates, useful tokens only, no recomputation
    padded_flops: float  # the same with padding
    traffic: dict[str, float]  # bytes that one device sends for one micro-batch, by what and why
    token_steps: int  # of sampling actions: tokens one after another, each for all slots
    tip_steps: int  # the same of writing tips
    prompt_flops: float  # of reading whole episodes of `max_length`, their actions too: once; tips at every step
    worlds: float | None  # seconds of simulators, all workers of all processes busy; None: not measured
    share: float

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh)

    @property
    def held(self) -> int:
        """On the device while the engine samples, without its cache."""
        return self.weights + self.reference + self.engine + (0 if self.offload else self.moments)

    @property
    def updating(self) -> int:
        """Most memory of an update, without the cache: a gradient is added or applied."""
        brought = self.moments if self.offload else 0
        adding, applying = self.batch + self.temporaries, self.trained * 3 // 2 + brought
        return self.held - (self.engine if self.released else 0) + self.trained + max(adding, applying)

    @property
    def peak(self) -> int:
        """Most memory at once, without the cache: of an update, or while the engine takes new weights."""
        return max(self.updating, self.held + self.loading)

    @property
    def kv_room(self) -> int:
        """Left for the cache of an engine in the same process, which sampling needs twice (what it reads is a copy).

        It lies there during updates unless it is given back; where the engine samples then, it needs it twice.
        """
        memory = int(self.chip.memory)
        beside = memory - self.held - self.loading
        sampling = (memory - (max(self.held, self.updating) if self.overlaps else self.held)) // 2
        return min(beside, sampling, memory if self.released else memory - self.updating)

    @property
    def fits(self) -> bool:
        """Whether the update and the cache of the configured slots fit."""
        return self.peak <= self.chip.memory and self.kv <= self.kv_room

    @property
    def seconds(self) -> float:
        """Ledger and updates of one iteration, traffic not hidden behind the computation."""
        compute = self.padded_flops / (self.share * self.chip.flops * self.devices)
        return compute + self.updates * self.micro_batches * sum(self.traffic.values()) / self.chip.link

    @property
    def iteration(self) -> float:
        """Seconds that meshes are compared by: update and sampling; worlds and prompts cost the same on all."""
        return self.seconds + self.sampling

    @property
    def sampling(self) -> float:
        """Least seconds of decoding: of every token the weights are gathered and read, and half of the cache."""
        return self.token_steps * self._token

    @property
    def rollout(self) -> float | None:
        """Expected seconds of a rollout: actions and tips at `DECODE_SHARE`, prompts at `share`, simulators.

        None where servers sample, whose hardware is not known here, or where no simulator's time was measured.
        """
        if self.published or self.worlds is None:
            return None
        decoding = (self.token_steps + self.tip_steps) * self._token / DECODE_SHARE
        samplers = self.processes if self.processes > 1 else self.devices
        return decoding + self.prompt_flops / (self.share * self.chip.flops * samplers) + self.worlds

    @property
    def _token(self) -> float:
        """Least seconds of one token in all slots."""
        if self.published:
            return 0.0
        fsdp = 1 if self.processes > 1 else self.mesh[1]
        read = self.engine * fsdp + self.kv / 2
        return read / self.chip.bandwidth + self.engine * (fsdp - 1) / self.chip.link


def shape_of(path: str) -> tuple[str, Qwen2Config]:
    """Name and shape of the model that `model.path` names, from the table of sizes or a local `config.json`.

    Raises:
        ConfigError: neither.
    """
    if (Path(path) / "config.json").is_file():
        return Path(path).name, read_config(Path(path))
    size = size_in(path)
    if size is None:
        raise ConfigError(
            f"model.path = {path!r}: plan needs no weights but a shape: a local folder with config.json or "
            f"Qwen2.5-{{{', '.join(QWEN2_5)}}} is allowed"
        )
    return f"Qwen2.5-{size}", QWEN2_5[size]


@dataclass(frozen=True)
class _Work:
    """Rows of an iteration's episodes: plain ones, and with branches where tips stand in the newest turn alone."""

    tipped: float  # share of the episodes that are trained with branches
    plain_passes: float  # of the ledgers, in passes over all episodes
    tipped_passes: float
    room: int  # tokens of branches beside a row
    side: int  # tokens of all branches of an episode
    splits: int  # rows of such an episode


def _work(config: Config, length: int, shards: int) -> _Work:
    algorithm, rollout, memory = config.algorithm, config.rollout, config.memory
    acting = algorithm.off_policy_denominator == "behavior" or algorithm.rollout_correction == "on"
    acting |= algorithm.rollout_correction == "auto" and (rollout.engine != "jax" or rollout.max_staleness > 0)
    seen = algorithm.p_memory * algorithm.q_off_policy * acting
    anchored = float(algorithm.kl_coefficient > 0)
    if memory.placement == "history" or algorithm.p_memory == 0:
        return _Work(0.0, 1 + anchored + seen, 0.0, 0, 0, 0)
    tipped = algorithm.p_memory * (1 - algorithm.q_off_policy)
    steps = config.env.step_limit
    block = memory.top_k * (memory.tip_max_tokens + rollout.max_action_tokens + ENTRY_TOKENS)
    # The prompt with tips ends at max_length too, and the trunk grows towards it.
    blocks = [min(block, rollout.max_length * (steps - step) // steps) for step in range(steps)]
    room = branch_room((length,), config.update.micro_batch_tokens, shards)
    side = sum(blocks) + steps * rollout.max_action_tokens
    splits = math.ceil(steps / max(1, room * steps // side))
    plain = (1 - tipped - seen) + anchored * (1 - tipped)
    return _Work(tipped, plain, tipped + seen + anchored * tipped, room, side, splits)


def _whole(count: float | int, part: int) -> int:
    return math.ceil(count / part) * part


def plan_on(
    config: Config,
    name: str,
    shape: Qwen2Config,
    chip: Hardware,
    mesh: Mesh3,
    share: float = SHARE,
    processes: int = 1,
) -> Plan:
    """The plan of a run on one mesh; every episode, answer and tip is taken as long as it may be.

    Raises:
        ConfigError: the mesh does not divide the model.
    """
    update, rollout, lora = config.update, config.rollout, config.lora
    data, fsdp, tensor = mesh
    length, shards = update.buckets[-1], data * fsdp
    work = _work(config, length, shards)
    rows = max(update.micro_batch_tokens // length // shards, 1) * shards  # without branches
    tokens = max(rows // shards * length, length + work.room)  # of a shard
    actions = min(config.env.step_limit * rollout.max_action_tokens, rollout.max_length)
    largest = (shards, length, work.room) if work.splits else (rows, length, 0)

    episodes = rollout.tasks_per_iteration * rollout.group_size
    per_update = min(episodes, max(1, round(update.minibatch_steps / config.env.step_limit)))
    updates = math.ceil(episodes / per_update) * update.epochs
    plain = math.ceil(per_update * (1 - work.tipped) / rows)
    sided = math.ceil(per_update * work.tipped * work.splits / shards)
    passes = 2 if lora.enabled else 3  # of an update; frozen weights have no gradient, an adapter's own work is little
    bare = forward_flops(shape, rollout.max_length, rollout.max_length, actions)
    both = forward_flops(shape, rollout.max_length + work.side, rollout.max_length, actions)
    useful = work.plain_passes * bare + work.tipped_passes * both
    useful += passes * update.epochs * ((1 - work.tipped) * bare + work.tipped * both)
    padded = forward_flops(shape, length, length, actions)
    padded_both = forward_flops(shape, length + work.room, length, actions)
    ledger = _whole(episodes, rows) * work.plain_passes * padded
    ledger += _whole(episodes * work.tipped_passes * work.splits, shards) * padded_both
    learning = passes * updates * (plain * rows * padded + sided * shards * padded_both)

    waves, p_memory = math.ceil(episodes / (rollout.slots * processes)), config.algorithm.p_memory
    world, workers = WORLD_S.get(config.env.name), config.env.workers * processes  # of each process its own
    whole = weight_bytes(shape, fsdp, tensor)
    adapter = weight_bytes(shape, fsdp, tensor, lora) if lora.enabled else 0
    trained = adapter or whole
    width = np.dtype(np.float32).itemsize if config.model.compute_dtype == "float32" else 2
    colocated, kv_tokens = rollout.engine == "jax", rollout.slots * session_length(config)
    # Of several processes each samples with a copy of its own, on its first device; servers get theirs from all.
    served = weight_bytes(shape, 1, 1) if processes > 1 and colocated else whole
    cache = kv_tokens * kv_bytes(shape, config.model.compute_dtype)
    return Plan(
        name=name,
        shape=shape,
        chip=chip,
        mesh=mesh,
        processes=processes,
        rows=largest[0],
        length=length,
        branches=work.room,
        actions=rows // shards * actions,
        weights=whole + adapter,
        trained=trained,
        moments=2 * trained,
        reference=trained if config.algorithm.kl_coefficient > 0 else 0,
        engine=served if colocated else 0,
        # Two generations, unless the old one was given back. Servers: what is handed over, and it rounded for the
        # canary or cast for the files.
        loading=(0 if rollout.release_memory else served) if colocated else 2 * served,
        released=colocated and rollout.release_memory,
        overlaps=colocated and rollout.max_staleness > 0,
        batch=tokens * sum(dtype.itemsize for dtype in BATCH_FIELDS.values()) + 2 * 4 * work.room,
        temporaries=temporary_bytes(shape, mesh, *largest, config.model.remat, lora),
        compiled=False,
        offload=update.offload_moments,
        published=0 if colocated else shape.num_parameters * np.dtype(config.served_dtype).itemsize,
        kv=cache // (1 if processes > 1 else math.prod(mesh)) if colocated else 0,
        kv_tokens=kv_tokens if colocated else 0,
        episodes=episodes,
        splits=work.splits,
        updates=updates,
        micro_batches=plain + sided,
        model_flops=float(episodes * useful),
        padded_flops=float(ledger + learning),
        traffic=traffic(shape, mesh, tokens, rows // shards * actions, width, config.model.remat, adapter),
        token_steps=waves * actions,
        tip_steps=waves * config.memory.tip_max_tokens if p_memory > 0 else 0,
        prompt_flops=float(episodes * ((1 - p_memory) * bare + p_memory * both)),
        worlds=None if world is None else episodes * config.env.step_limit * world / workers,
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
    config: Config,
    name: str,
    shape: Qwen2Config,
    chip: Hardware,
    devices: int,
    share: float = SHARE,
    processes: int = 1,
) -> Plan | None:
    """The plan on the fastest mesh that fits, else on the one that needs least; None if no mesh divides the model."""
    plans = [
        plan_on(config, name, shape, chip, mesh, share, processes) for mesh in _meshes(shape, devices, chip.island)
    ]
    return min(plans, key=lambda plan: (not plan.fits, plan.iteration if plan.fits else plan.peak), default=None)


def smallest(config: Config, name: str, shape: Qwen2Config, chip: Hardware) -> Plan | None:
    """The plan with the fewest devices, a power of two up to `MOST_DEVICES`, that fits."""
    counts = (2**power for power in range(MOST_DEVICES.bit_length()))
    return next((plan for n in counts if (plan := preset(config, name, shape, chip, n)) and plan.fits), None)


@cache
def shipped_presets() -> dict[str, dict[str, Mesh3]]:
    """Mesh by size of Qwen2.5 and name of the chip, as `sharding_presets.toml` has them; its product is the devices."""
    values = tomllib.loads(_PRESETS.read_text(encoding="utf-8"))
    return {
        size: {chip: (data, fsdp, tensor) for chip, (data, fsdp, tensor) in row.items()} for size, row in values.items()
    }


def make_plan(
    config: Config, hardware: str, devices: int | None = None, share: float = SHARE, processes: int = 1
) -> Plan:
    """The plan of a configuration on `model.mesh`, or, where that is 1 × 1 × 1, on the best mesh.

    Args:
        config: The experiment.
        hardware: Name of the chip.
        devices: How many; None: those of `model.mesh`, or where that is 1 × 1 × 1 the shipped preset's.
        share: Of the chip's peak that is reached.
        processes: Of the run, all with equally many devices.

    Raises:
        ConfigError: unknown hardware or model, another number of devices than the mesh has, a mesh that does not divide
            the model.
    """
    chip, (name, shape) = find_hardware(hardware), shape_of(config.model.path)
    mesh = config.model.mesh
    if devices is None and mesh == UNSET:
        mesh = shipped_presets().get(name.removeprefix("Qwen2.5-"), {}).get(chip.name, UNSET)
    devices = math.prod(mesh) if devices is None else devices
    if devices < 1 or not 0 < share <= 1:
        raise ConfigError(f"--devices {devices} --share {share}: at least 1 device and a share in (0, 1] are allowed")
    if processes < 1 or devices % processes:
        raise ConfigError(f"--processes {processes}: a divisor of the {devices} devices is allowed")
    if config.rollout.max_staleness and (processes > 1 or (devices > 1 and config.rollout.engine == "jax")):
        raise ConfigError(
            f"--devices {devices} --processes {processes} with rollout.max_staleness = {config.rollout.max_staleness}: "
            'one process is allowed, and one device unless rollout.engine = "sglang"'
        )
    if mesh != UNSET and math.prod(mesh) != devices:
        raise ConfigError(
            f"model.mesh = {list(mesh)} has {math.prod(mesh)} devices, --devices says {devices}; leave one of them out "
            "(--model.mesh 1,1,1 plans on the best mesh)"
        )
    if mesh != UNSET or devices == 1:
        return plan_on(config, name, shape, chip, mesh, share, processes)
    plan = preset(config, name, shape, chip, devices, share, processes)
    if plan is None:
        raise ConfigError(f"--devices {devices}: no mesh of data × fsdp × tensor divides {name}")
    return plan
