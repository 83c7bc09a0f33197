"""A plan as lines for the terminal, and the table of all sizes and chips for docs/plan.md."""

from collections.abc import Iterator

from empo2_jax.config import Config, parse_config
from empo2_jax.hardware import HARDWARE, Hardware
from empo2_jax.models.qwen2_sizes import QWEN2_5
from empo2_jax.planning import GIB, MOST_DEVICES, SHARE, Plan, preset, shape_of, smallest

TABLE_COMMAND = "empo2 plan --table > docs/plan.md"


def lines(plan: Plan, config: Config) -> list[str]:
    """What `empo2 plan` prints: memory, traffic, work, and what to change if it does not fit."""
    chip, update, needed = plan.chip, config.update, plan.kv_tokens * plan.kv_token
    source = "the compiler's" if plan.compiled else "a formula's"
    held = "weights {:.2f}, moments {:.2f} on the host" if plan.offload else "weights {:.2f}, moments {:.2f}"
    start = " and of the start" if plan.copies > 1 else ""
    arguments = plan.weights + plan.batch + (0 if plan.offload else plan.moments)
    memory = [
        ("arguments", arguments, f"f32 {held.format(plan.weights / GIB, plan.moments / GIB)}, batch"),
        ("gradients", plan.trained, "f32, summed in place over micro-batches"),
        ("copies", plan.copies * plan.weights, f"f32 weights of the engine{start}"),
        ("temporaries", plan.temporaries, f"upper estimate ({source})"),
        ("peak", plan.peak, f"of {chip.memory_gib:.2f}"),
        ("KV room", plan.kv_room, f"{config.rollout.slots} slots, {plan.kv_tokens:,} tokens, need {needed / GIB:.2f}"),
    ]
    seconds = sum(plan.traffic.values()) / chip.link
    rate = chip.flops * plan.devices * plan.share
    text = [
        f"{plan.name}, {plan.shape.num_parameters:,} parameters, on {plan.devices} × {chip.name} "
        f"({chip.memory_gib:.2f} GiB, {chip.flops / 1e12:.0f} TFLOP/s in bf16, link {chip.link / 1e9:.0f} GB/s)",
        f"mesh data × fsdp × tensor = {' × '.join(map(str, plan.mesh))}; micro-batches of {plan.rows} rows × "
        f"{plan.length} tokens",
        "",
        "per device, GiB",
        *(f"  {name:<12}{size / GIB:>9.3f}  {note}" for name, size, note in memory),
        "",
        "sent by each device per micro-batch, GiB",
        *(f"  {size / GIB:>9.3f}  {what}" for what, size in plan.traffic.items()),
        f"  {sum(plan.traffic.values()) / GIB:>9.3f}  together, {seconds:.2f} s if nothing hides it",
        "",
        f"one iteration, without the rollout: {plan.episodes} episodes of at most {config.rollout.max_length} tokens, "
        f"{plan.updates} optimizer steps × {plan.micro_batches} micro-batches",
        f"  {plan.model_flops:.3g} FLOPs, with padding {plan.padded_flops:.3g}",
        f"  {plan.model_flops / rate:.1f} s at {plan.share:.0%} of the peak; with padding and traffic "
        f"{plan.seconds:.1f} s",
        "",
        "fits" if plan.fits else "DOES NOT FIT",
    ]
    if plan.devices > chip.island:
        text.insert(-2, f"  more than {chip.island} devices: the slower network between machines is not counted")
    text[-2:-2] = [f"  {part}" for part in _uncounted(config)]
    if tuple(config.model.mesh) != plan.mesh:
        text.append(f"  set model.mesh = {list(plan.mesh)}")
    if (least := plan.length * plan.mesh[0] * plan.mesh[1]) > update.micro_batch_tokens:
        text.append(f"  set update.micro_batch_tokens = {least}")
    return text if plan.fits else [*text, *(f"  {hint}" for hint in _hints(plan, config))]


def _uncounted(config: Config) -> Iterator[str]:
    """What of a configuration the figures leave out."""
    if config.memory.placement == "latest" and config.algorithm.p_memory > 0:
        yield 'branches of memory.placement = "latest" are not counted'
    if config.rollout.engine != "jax":
        yield f'with rollout.engine = "{config.rollout.engine}" KV room and one copy of the weights lie elsewhere'


def _hints(plan: Plan, config: Config) -> Iterator[str]:
    """Changes that make it fit, each alone; by the formula."""
    found = 0
    if not plan.offload:
        changed = config.model_copy(update={"update": config.update.model_copy(update={"offload_moments": True})})
        if (other := preset(changed, plan.name, plan.shape, plan.chip, plan.devices)) and other.fits:
            yield f"or: update.offload_moments = true with model.mesh = {list(other.mesh)}"
            found += 1
    same = preset(config, plan.name, plan.shape, plan.chip, plan.devices)
    if same and same.fits:
        yield f"or: model.mesh = {list(same.mesh)}"
        found += 1
    more = smallest(config, plan.name, plan.shape, plan.chip)
    if more and more.devices > plan.devices:
        yield f"or: {more.devices} devices with model.mesh = {list(more.mesh)}"
        found += 1
    for chip in HARDWARE.values():
        other = preset(config, plan.name, plan.shape, chip, plan.devices) if chip.memory > plan.chip.memory else None
        if other and other.fits:
            yield f"or: {plan.devices} × {chip.name} with model.mesh = {list(other.mesh)}"
            found += 1
    if not found:
        yield "nothing alone helps: a smaller model, fewer rollout.slots or a shorter rollout.max_length"


def table() -> str:
    """docs/plan.md: for every size and chip the least devices that fit, their mesh, memory and seconds."""
    text = [
        "# What fits where",
        "",
        f"Made by `{TABLE_COMMAND}`; do not edit. ScienceWorld with the paper's numbers (128 episodes of at most",
        "4,500 tokens, 30 actions of at most 32, 128 actions per optimizer step), bf16 compute, f32 weights and",
        "moments.",
        "Each cell: the least number of devices, a power of two, that holds an update and the cache of 64 slots;",
        "the mesh data × fsdp × tensor that is fastest there; GiB per device at the peak and for the cache; seconds",
        f"for ledger and updates of an iteration at {SHARE:.0%} of the bf16 peak, with padding and traffic that",
        "nothing hides. Temporaries by the formula, an upper estimate. Nothing here was measured on the chips.",
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
        }
    )


def _cell(config: Config, size: str, chip: Hardware) -> str:
    plan = smallest(config, *shape_of(config.model.path), chip)
    if plan is None:
        return f"over {MOST_DEVICES}"
    mesh = "×".join(map(str, plan.mesh))
    memory = f"{plan.peak / GIB:.1f} + {plan.kv_tokens * plan.kv_token / GIB:.1f} GiB"
    return f"**{plan.devices}** ({mesh}), {memory}, {plan.seconds:.0f} s"
