"""A plan as lines for the terminal, and the table of all sizes and chips for docs/plan.md."""

import math
from collections.abc import Iterator

from empo2_jax.config import Config, parse_config
from empo2_jax.hardware import HARDWARE, Hardware
from empo2_jax.models.qwen2_sizes import QWEN2_5
from empo2_jax.planning import (
    DECODE_SHARE,
    GIB,
    MOST_DEVICES,
    SHARE,
    WORLD_S,
    Plan,
    plan_on,
    preset,
    shape_of,
    shipped_presets,
    smallest,
)
from empo2_jax.sync.manifest import VERSIONS_KEPT

TABLE_COMMAND = "empo2 plan --table > docs/plan.md"
PRESET_COMMAND = "empo2 plan --presets > empo2_jax/sharding_presets.toml"


def lines(plan: Plan, config: Config) -> list[str]:
    """What `empo2 plan` prints: memory, traffic, work, and what to change if it does not fit."""
    chip, update = plan.chip, config.update
    seconds = sum(plan.traffic.values()) / chip.link
    rate = chip.flops * plan.devices * plan.share
    beside = f", {plan.branches} of branches beside them" if plan.branches else ""
    text = [
        f"{plan.name}, {plan.shape.num_parameters:,} parameters, on {plan.devices} × {chip.name} "
        f"({chip.memory_gib:.2f} GiB, {chip.flops / 1e12:.0f} TFLOP/s in bf16, link {chip.link / 1e9:.0f} GB/s)",
        f"mesh data × fsdp × tensor = {' × '.join(map(str, plan.mesh))}; micro-batches of {plan.rows} rows × "
        f"{plan.length} tokens{beside}",
        "",
        "per device, GiB" if plan.processes == 1 else "on the first device of each process, GiB",
        *(f"  {name:<12}{size / GIB:>9.3f}  {note}" for name, size, note in _memory(plan, config)),
        *_published(plan, config),
        "",
        "sent by each device per micro-batch, GiB",
        *(f"  {size / GIB:>9.3f}  {what}" for what, size in plan.traffic.items()),
        f"  {sum(plan.traffic.values()) / GIB:>9.3f}  together, {seconds:.2f} s if nothing hides it",
        "",
        f"one iteration: {plan.episodes} episodes of at most {config.rollout.max_length} tokens, "
        f"{plan.updates} optimizer steps × {plan.micro_batches} micro-batches",
        *([f"  an episode trained with tips takes up to {plan.splits} rows with branches"] if plan.splits else []),
        f"  {plan.model_flops:.3g} FLOPs, with padding {plan.padded_flops:.3g}",
        f"  update {plan.model_flops / rate:.1f} s at {plan.share:.0%} of the peak; with padding and traffic "
        f"{plan.seconds:.1f} s",
        f"  sampling {plan.sampling:.1f} s or more, if weights are gathered and read once a token"
        if plan.kv
        else "  sampling: the servers' affair",
        *_expected(plan, config),
    ]
    if plan.devices > chip.host * plan.processes:
        text.append(
            f"  one machine has {chip.host} devices: a run of {plan.devices} is one of several processes, each "
            f"of which samples with a whole copy of the model unless servers do (see --processes "
            f"{math.ceil(plan.devices / chip.host)})"
        )
    if plan.devices > chip.island:
        text.append(f"  more than {chip.island} devices: the slower network between machines is not counted")
    text += ["", "fits" if plan.fits else "DOES NOT FIT"]
    if tuple(config.model.mesh) != plan.mesh:
        text.append(f"  set model.mesh = {list(plan.mesh)}")
    least = (plan.length + (plan.length if plan.branches else 0)) * plan.mesh[0] * plan.mesh[1]
    if least > update.micro_batch_tokens:
        text.append(f"  set update.micro_batch_tokens = {least}")
    return text if plan.fits else [*text, *(f"  {hint}" for hint in _hints(plan, config))]


def _expected(plan: Plan, config: Config) -> Iterator[str]:
    """One figure for an iteration, and what it assumes; none without updates or a known rollout."""
    if not (config.run.iterations and config.algorithm.learns):
        yield "  this run has no iteration with updates: what they take is counted all the same"
    elif plan.rollout is not None:
        sampled = "actions and tips" if plan.tip_steps else "actions"
        yield (
            f"  expected {plan.seconds + plan.rollout:.0f} s: update {plan.seconds:.0f}, rollout {plan.rollout:.0f} "
            f"({sampled} at {DECODE_SHARE:.0%} of the bandwidth, prompts at {plan.share:.0%} of the peak, simulators "
            f"at {1000 * WORLD_S[config.env.name]:.0f} ms an action); not measured"
        )


def _memory(plan: Plan, config: Config) -> Iterator[tuple[str, int, str]]:
    source = "the compiler's" if plan.compiled else "a formula's"
    held = "weights {:.2f}, moments {:.2f} on the host" if plan.offload else "weights {:.2f}, moments {:.2f}"
    arguments = plan.weights + plan.batch + (0 if plan.offload else plan.moments)
    yield "arguments", arguments, f"f32 {held.format(plan.weights / GIB, plan.moments / GIB)}, batch"
    yield "gradients", plan.trained, "f32, summed in place over micro-batches"
    if plan.reference:
        yield "reference", plan.reference, "f32 weights of the start, for the KL"
    if plan.engine:
        whole = ", all of them: a process samples on its first device" if plan.processes > 1 else ""
        yield "engine", plan.engine, f"f32 weights{whole}{', given back during updates' if plan.released else ''}"
    if plan.loading:
        yield "new weights", plan.loading, "while the engine takes them, when gradients are gone"
    yield "temporaries", plan.temporaries, f"upper estimate ({source})"
    yield "peak", plan.peak, f"of {plan.chip.memory_gib:.2f}"
    if plan.kv:
        slots = f"{config.rollout.slots} slots, {plan.kv_tokens:,} tokens"
        when = ", during updates too" if plan.overlaps else ", nothing during updates" if plan.released else ""
        yield "KV room", plan.kv_room, f"{slots}, need {plan.kv / GIB:.2f} (sampling twice that{when})"


def _published(plan: Plan, config: Config) -> Iterator[str]:
    """What weights for servers take beside the devices."""
    if plan.published:
        size = plan.published / GIB
        yield ""
        yield f"published for servers, {config.served_dtype}, GiB"
        yield f"  {size:>9.3f}  a version; half of it in the host's memory while it is written"
        yield f"  {size * (VERSIONS_KEPT + 1):>9.3f}  on the disk: {VERSIONS_KEPT} versions and the one being written"


def _hints(plan: Plan, config: Config) -> Iterator[str]:
    """Changes that make it fit, each alone; by the formula."""
    found, model = 0, (plan.name, plan.shape)
    if not plan.offload:
        changed = config.model_copy(update={"update": config.update.model_copy(update={"offload_moments": True})})
        other = preset(changed, *model, plan.chip, plan.devices, processes=plan.processes)
        if other and other.fits:
            yield f"or: update.offload_moments = true with model.mesh = {list(other.mesh)}"
            found += 1
    if plan.engine and not (plan.released or plan.overlaps):
        changed = config.model_copy(update={"rollout": config.rollout.model_copy(update={"release_memory": True})})
        if plan_on(changed, *model, plan.chip, plan.mesh, processes=plan.processes).fits:
            yield "or: rollout.release_memory = true"
            found += 1
    same = preset(config, *model, plan.chip, plan.devices, processes=plan.processes)
    if same and same.fits:
        yield f"or: model.mesh = {list(same.mesh)}"
        found += 1
    more = smallest(config, *model, plan.chip)
    if more and more.devices > plan.devices:
        yield f"or: {more.devices} devices with model.mesh = {list(more.mesh)}, in one process"
        found += 1
    for chip in HARDWARE.values():
        larger = chip.memory > plan.chip.memory
        other = preset(config, *model, chip, plan.devices, processes=plan.processes) if larger else None
        if other and other.fits:
            yield f"or: {plan.devices} × {chip.name} with model.mesh = {list(other.mesh)}"
            found += 1
    if not found:
        yield "nothing alone helps: a smaller model, fewer rollout.slots or a shorter rollout.max_length"


def preset_lines() -> list[str]:
    """sharding_presets.toml: for every size and chip the mesh of the fewest devices that fit."""
    text = [
        f"# Made by `{PRESET_COMMAND}`; do not edit. Devices along data, fsdp and tensor for",
        "# ScienceWorld with the paper's numbers (docs/plan.md): the fewest, a power of two, that hold the run, and",
        f"# the fastest mesh of so many. A chip that is not there would take more than {MOST_DEVICES}.",
    ]
    for size in QWEN2_5:
        config = table_config(size)
        text += ["", f'["{size}"]']
        for chip in HARDWARE.values():
            if plan := smallest(config, *shape_of(config.model.path), chip):
                text.append(f"{chip.name} = {list(plan.mesh)}")
    return text


def table() -> str:
    """docs/plan.md: for every size and chip the least devices that fit, their mesh, memory and seconds."""
    text = [
        "# What fits where",
        "",
        f"Made by `{TABLE_COMMAND}`; do not edit. ScienceWorld with the paper's numbers (128 episodes of at most",
        "4,500 tokens, 30 actions of at most 32, 128 actions per optimizer step), tips in the newest turn alone, bf16",
        "compute, f32 weights and moments, one process. Each cell: the least number of devices, a power of two, that",
        "holds an update and the cache of 64 slots; the mesh data × fsdp × tensor that is fastest there (both are the",
        "presets of `empo2_jax/sharding_presets.toml`); GiB per device at the peak and for the cache; seconds for",
        f"ledger and updates of an iteration at {SHARE:.0%} of the bf16 peak, with padding, traffic that nothing hides",
        "and tips as long as they may be, plus the seconds in which the weights are gathered and read for every",
        "sampled token.",
        "† More than one machine: such a run has several processes, each of which samples with a whole copy of the",
        "model on its first device, unless servers sample; `empo2 plan --processes N` counts it, these cells do not.",
        "Temporaries by the formula, an upper estimate. Nothing here was measured on the chips.",
        "",
        f"| Qwen2.5 | {' | '.join(HARDWARE)} |",
        f"|---|{'---|' * len(HARDWARE)}",
    ]
    for size in QWEN2_5:
        cells = [_cell(table_config(size), size, chip) for chip in HARDWARE.values()]
        text.append(f"| {size} | {' | '.join(cells)} |")
    text += ["", "Chips, per device:", "", "| | GiB | bf16 TFLOP/s | memory GB/s | link GB/s, one way | source |"]
    text.append("|---|---|---|---|---|---|")
    text += [
        f"| {chip.name} | {chip.memory_gib:.1f} | {chip.flops / 1e12:.0f} | {chip.bandwidth / 1e9:.0f} | "
        f"{chip.link / 1e9:.0f} | <{chip.source}> |"
        for chip in HARDWARE.values()
    ]
    return "\n".join(text)


def table_config(size: str) -> Config:
    """The configuration behind a row of the table: configs/scienceworld_qwen2.5_7b.toml at another size."""
    return parse_config(
        {
            "model": {"path": f"Qwen/Qwen2.5-{size}-Instruct", "compute_dtype": "bfloat16"},
            "rollout": {"slots": 64},
            "memory": {"placement": "latest"},
            "update": {"micro_batch_tokens": 9_216},
        }
    )


def _cell(config: Config, size: str, chip: Hardware) -> str:
    mesh = shipped_presets()[size].get(chip.name)
    if mesh is None:
        return f"over {MOST_DEVICES}"
    plan = plan_on(config, *shape_of(config.model.path), chip, mesh)
    memory, seconds = f"{plan.peak / GIB:.1f} + {plan.kv / GIB:.1f} GiB", f"{plan.seconds:.0f} + {plan.sampling:.0f} s"
    several = "†" if plan.devices > chip.host else ""
    return f"**{plan.devices}**{several} ({'×'.join(map(str, mesh))}), {memory}, {seconds}"
