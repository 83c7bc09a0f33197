"""Plans against hand-computed numbers and against the compiler's own account of the real update."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from empo2_jax.config import Config, parse_config
from empo2_jax.config_file import load_config
from empo2_jax.errors import ConfigError
from empo2_jax.hardware import HARDWARE
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.models.qwen2_sizes import QWEN2_5
from empo2_jax.plan_costs import forward_flops, weight_bytes
from empo2_jax.planning import make_plan, plan_on, preset, shape_of, shipped_presets, smallest

CONFIGS = Path(__file__).parents[1] / "configs"
SEVEN = CONFIGS / "scienceworld_qwen2.5_7b.toml"
SMALL = Qwen2Config(
    vocab_size=32, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, intermediate_size=24
)
PLACE = ("Qwen2.5-7B", QWEN2_5["7B"], HARDWARE["a100-40"], (1, 2, 4))
SMALL_RUN = {
    "rollout": {"max_length": 8, "max_action_tokens": 1, "tasks_per_iteration": 2, "group_size": 4, "slots": 4},
    "env": {"name": "scienceworld", "step_limit": 2},
    "update": {"buckets": [8], "micro_batch_tokens": 32, "minibatch_steps": 8},
    "memory": {"tip_max_tokens": 4},
}

COMPARE = """
import dataclasses, json
from empo2_jax.config import parse_config
from empo2_jax.hardware import HARDWARE
from empo2_jax.models.qwen2_config import Qwen2Config
from empo2_jax.plan_compile import compiled, lower_update
from empo2_jax.planning import plan_on

shape = Qwen2Config(vocab_size=2048, hidden_size=128, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=32,
                    intermediate_size=256)
config = parse_config({
    "model": {"compute_dtype": "bfloat16"},
    "rollout": {"max_length": 128}, "env": {"step_limit": 1},
    "update": {"buckets": [128], "micro_batch_tokens": 1024 if BRANCHES else 512},
    "memory": {"placement": "latest" if BRANCHES else "history"},
    "lora": {"enabled": LORA, "rank": 4},
})
for mesh in MESHES:
    plan = plan_on(config, "small", shape, HARDWARE["h200"], mesh)
    adding, applying = (program.compile().memory_analysis() for program in lower_update(plan, config))
    print(json.dumps({
        "adding": adding.argument_size_in_bytes,
        "applying": applying.argument_size_in_bytes,
        "compiler": adding.temp_size_in_bytes,
        "applying_compiler": applying.temp_size_in_bytes,
        "shortened": compiled(plan, config).temporaries,
        **{key: getattr(plan, key) for key in ("weights", "trained", "moments", "batch", "temporaries")},
    }))
"""


def small(**changes: dict) -> Config:
    return parse_config({**SMALL_RUN, **{key: {**SMALL_RUN.get(key, {}), **value} for key, value in changes.items()}})


def test_weights_on_a_device_by_hand() -> None:
    whole = 57 * 3584 + 28 * (3584 + 2 * 512)  # norms and biases: not split over fsdp
    assert weight_bytes(QWEN2_5["7B"], 1, 1) == 4 * 7_615_616_512
    assert weight_bytes(QWEN2_5["7B"], 8, 1) == 4 * ((7_615_616_512 - whole) // 8 + whole)
    assert weight_bytes(QWEN2_5["7B"], 1, 4) == 4 * ((7_615_616_512 - 57 * 3584) // 4 + 57 * 3584)
    assert 3 * weight_bytes(QWEN2_5["72B"], 8, 8) == pytest.approx(12 * 72_706_203_648 / 64, rel=2e-3)


@pytest.mark.parametrize("branches", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_arguments_and_temporaries_against_the_compiled_update(
    branches: bool, run_on_devices: Callable[[int, str], str]
) -> None:
    source = COMPARE.replace("MESHES", "[(2, 2, 2)]").replace("LORA", "False").replace("BRANCHES", str(branches))
    found = json.loads(run_on_devices(8, source))
    arguments = found["weights"] + found["moments"] + found["batch"]
    batch = found["adding"] - 2 * found["weights"]
    assert batch == found["batch"]
    assert batch + found["applying"] - found["weights"] == pytest.approx(arguments, rel=1e-3)
    assert 0 <= found["applying"] - 2 * found["weights"] - found["moments"] <= 16, "three scalars"
    assert found["compiler"] <= found["temporaries"] <= 2.25 * found["compiler"]
    assert found["applying_compiler"] <= 1.5 * found["weights"]
    assert found["shortened"] == pytest.approx(found["compiler"], rel=0.02)


@pytest.mark.medium
def test_an_adapters_arguments_and_temporaries_against_the_compiled_update(
    run_on_devices: Callable[[int, str], str],
) -> None:
    source = COMPARE.replace("MESHES", "[(2, 2, 1)]").replace("LORA", "True").replace("BRANCHES", "False")
    found = json.loads(run_on_devices(4, source))
    assert found["trained"] < 0.1 * found["weights"]
    batch = found["adding"] - found["weights"] - found["trained"]
    assert batch == found["batch"]
    assert 0 <= found["applying"] - 2 * found["trained"] - found["moments"] <= 16, "three scalars"
    assert found["compiler"] <= found["temporaries"] <= 2.25 * found["compiler"]
    assert found["applying_compiler"] <= 1.5 * found["trained"]
    assert found["shortened"] == pytest.approx(found["compiler"], rel=0.02)


def test_flops_of_a_forward_pass_by_hand() -> None:
    layer = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24)  # q, o; k, v; gate, up, down
    causal = 2 * 10 * 16  # scores and weighted sum over 10 / 2 keys on average
    assert forward_flops(SMALL, 100, 10, 7) == 100 * 2 * (layer + causal) + 7 * 2 * 32 * 16


def test_a_plan_by_hand() -> None:
    plan = plan_on(small(), "small", SMALL, HARDWARE["h100"], (1, 2, 2))
    assert (plan.rows, plan.length, plan.actions) == (4, 8, 4)  # two rows, 16 tokens and 4 actions a shard
    assert (plan.episodes, plan.updates, plan.micro_batches) == (8, 2, 1)
    norms, biases = 5 * 16, 2 * (16 + 2 * 8)  # biases are split over tensor alone
    assert plan.weights == 4 * (norms + biases // 2 + (SMALL.num_parameters - norms - biases) // 4)
    assert plan.moments == 2 * plan.weights
    assert plan.batch == 16 * (3 * 4 + 1 + 6 * 4 + 1)
    assert plan.kv_tokens == 4 * (8 + 4 + 256)
    assert plan.kv == plan.kv_tokens * 2 * 2 * 2 * 4 * 4 // 4  # keys and values, layers, heads, elements, f32, devices
    matrices = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) / 2
    ends = 2 * (16 + 4) * 2 * 16 * 4
    assert plan.traffic == {
        "all-gather of weights (fsdp)": 2 * matrices * 4 / 2,
        "reduce-scatter of gradients (fsdp)": matrices * 4 / 2,
        "exchange at embedding and head (fsdp)": ends / 2,
        "all-reduce of activations (tensor)": 6 * 2 * 16 * 16 * 4 + ends,
    }
    episode = forward_flops(SMALL, 8, 8, 2)
    assert plan.model_flops == plan.padded_flops == 8 * episode * 4  # one ledger and an update, nothing is padding
    compute = plan.padded_flops / (0.4 * 989e12 * 4)
    assert plan.seconds == pytest.approx(compute + 2 * sum(plan.traffic.values()) / 450e9)
    assert plan.peak == 3 * plan.weights + plan.moments + plan.batch + plan.temporaries  # theirs, engine's, gradients
    assert plan.kv_room == (80_000_000_000 - 2 * plan.weights - plan.moments) // 2, "sampling reads a copy of the cache"
    token = (2 * plan.weights + plan.kv / 2) / 3.35e12 + plan.weights / 450e9
    assert plan.sampling == pytest.approx(2 * 2 * token)
    prompts = 8 * episode / (0.4 * 989e12 * 4)
    actions_and_tips = 2 * (2 + 4) * token / 0.5  # two waves
    assert plan.worlds == pytest.approx(8 * 2 * 0.017 / small().env.workers)
    assert plan.rollout == pytest.approx(actions_and_tips + prompts + plan.worlds)
    unmeasured = plan_on(small(env={"name": "toy"}), "small", SMALL, HARDWARE["h100"], (1, 2, 2))
    assert unmeasured.worlds is unmeasured.rollout is None


def test_prompts_with_tips_are_read_at_every_step_and_only_where_there_are_tips() -> None:
    config = load_config(SEVEN)
    bare, tips = (
        plan_on(config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"p_memory": p})}), *PLACE)
        for p in (0.0, 0.25)
    )
    assert (bare.tip_steps, tips.tip_steps) == (0, 2 * config.memory.tip_max_tokens)
    block = 10 * (128 + 32 + 16)
    side = sum(min(block, 4500 * (30 - step) // 30) for step in range(30)) + 30 * 32
    one, both = (forward_flops(QWEN2_5["7B"], tokens, 4500, 30 * 32) for tokens in (4500, 4500 + side))
    assert bare.prompt_flops == 128 * one
    assert tips.prompt_flops == 128 * (0.75 * one + 0.25 * both)


def test_what_is_given_back_during_updates_is_not_there_then() -> None:
    config = small(rollout={**SMALL_RUN["rollout"], "release_memory": True})
    plain, plan = (plan_on(one, "small", SMALL, HARDWARE["h100"], (1, 1, 1)) for one in (small(), config))
    weights, moments, memory = plan.weights, plan.moments, 80_000_000_000
    assert plan.updating == plan.peak == 2 * weights + moments + plan.batch + plan.temporaries  # theirs and gradients
    assert plain.updating - plan.updating == weights
    light = dataclasses.replace(plan, temporaries=0, batch=0, trained=0, moments=0)
    assert light.peak == 2 * weights, "the engine takes new weights and has no old ones"
    assert plan.kv_room == plain.kv_room == (memory - 2 * weights - moments) // 2
    tight = dataclasses.replace(plan, temporaries=memory - 3 * weights - moments - plan.batch)
    assert tight.fits and tight.kv_room == plan.kv_room, "the cache is not there during updates"
    assert dataclasses.replace(tight, released=False).kv_room == 0
    assert not dataclasses.replace(tight, temporaries=tight.temporaries + weights + 1).fits


def test_an_engine_that_samples_during_updates_needs_its_room_then() -> None:
    config = small(rollout={**SMALL_RUN["rollout"], "max_staleness": 1})
    plan = plan_on(config, "small", SMALL, HARDWARE["h100"], (1, 1, 1))
    assert plan.updating == 3 * plan.weights + plan.moments + plan.batch + plan.temporaries
    assert plan.kv_room == (80_000_000_000 - plan.updating) // 2
    room = 80_000_000_000 - plan.updating + plan.temporaries - plan.kv
    tight = dataclasses.replace(plan, temporaries=room)  # the cache fits once beside an update, and not twice
    assert not tight.fits and dataclasses.replace(tight, overlaps=False).fits
    seven = load_config(SEVEN, ["model.mesh=[1,1,1]", "rollout.max_staleness=1"])
    with pytest.raises(ConfigError, match=r"--devices 8 --processes 1 with rollout.max_staleness = 1: one process is"):
        make_plan(seven, "h100", 8)


def test_a_plan_with_adapters_by_hand() -> None:
    full, mesh = small(), (1, 2, 1)
    lora = small(lora={"enabled": True, "rank": 2, "targets": ["q_proj", "down_proj"]})
    one, other = (plan_on(config, "small", SMALL, HARDWARE["h100"], mesh) for config in (full, lora))
    # Per layer and in halves over fsdp where the axis is embed: A of q [2, 16 / 2], B [16, 2]; A of down [2, 24], B.
    adapter = 4 * 2 * (2 * 8 + 16 * 2 + 2 * 24 + 8 * 2)
    assert (other.trained, other.weights, other.moments) == (adapter, one.weights + adapter, 2 * adapter)
    assert one.trained == one.weights
    assert other.model_flops == one.model_flops * 3 / 4  # a ledger, forward and half of backward
    assert other.traffic["reduce-scatter of gradients (fsdp)"] == adapter * 2 / 2
    assert other.peak == 2 * one.weights + 4 * adapter + other.batch + other.temporaries
    light = dataclasses.replace(other, temporaries=0, batch=0)
    assert light.peak == 3 * one.weights + 3 * adapter, "base and two generations of the engine's weights"


def test_more_shards_than_rows_are_padding_and_a_reference_is_one_more_pass() -> None:
    one = plan_on(small(), "small", SMALL, HARDWARE["h100"], (1, 1, 1))
    wide = plan_on(small(), "small", SMALL, HARDWARE["h100"], (8, 1, 1))
    assert wide.rows == 8 and wide.micro_batches == 1
    assert wide.padded_flops == pytest.approx(one.padded_flops * 7 / 4)  # 3 parts of 4 are updates, twice the rows
    kl = plan_on(small(algorithm={"kl_coefficient": 0.1}), "small", SMALL, HARDWARE["h100"], (1, 1, 1))
    assert kl.model_flops == pytest.approx(one.model_flops * 5 / 4)
    assert kl.peak == one.peak + one.weights


def test_branches_by_hand() -> None:
    latest = small(memory={"placement": "latest"})
    plan = plan_on(latest, "small", SMALL, HARDWARE["h100"], (1, 2, 1))
    assert (plan.rows, plan.length, plan.branches) == (2, 8, 8)  # one trunk a shard, and as much beside it
    # Tips are long: a prompt with them ends at 8 tokens, or at the 4 that the trunk leaves; two actions of one.
    side, tipped = 8 + 4 + 2, 0.25 / 3
    assert plan.splits == 2  # of 14 tokens, one step in each row of 8
    assert (plan.updates, plan.micro_batches) == (2, 2)  # four plain rows; two with branches
    plain, both = forward_flops(SMALL, 8, 8, 2), forward_flops(SMALL, 16, 8, 2)
    ledger = 8 * (1 - tipped) * plain + 2 * both
    assert plan.padded_flops == pytest.approx(ledger + 3 * 2 * (4 * plain + 2 * both))
    mean = (1 - tipped) * plain + tipped * forward_flops(SMALL, 8 + side, 8, 2)
    assert plan.model_flops == pytest.approx(8 * 4 * mean)
    assert plan.batch == 16 * (3 * 4 + 1 + 6 * 4 + 1) + 8 * 2 * 4
    plain_run = plan_on(small(), "small", SMALL, HARDWARE["h100"], (1, 2, 1))
    assert plain_run.splits == plain_run.branches == 0


def test_each_process_samples_with_a_whole_copy() -> None:
    one, two = (plan_on(small(), "small", SMALL, HARDWARE["h100"], (1, 2, 2), processes=count) for count in (1, 2))
    assert (one.engine, two.engine) == (one.weights, 4 * SMALL.num_parameters)
    assert (two.loading, two.kv) == (two.engine, 4 * one.kv)
    assert two.peak - one.peak == two.engine - one.engine
    assert two.token_steps * 2 == one.token_steps, "twice the slots"
    assert one.worlds and two.worlds == one.worlds / 2, "and twice the workers"


def test_servers_have_the_cache_and_files_have_the_weights() -> None:
    servers = small(
        rollout={"engine": "sglang", "servers": ["http://a"]}, model={"compute_dtype": "bfloat16"}, algorithm={}
    )
    plan = plan_on(servers, "small", SMALL, HARDWARE["h100"], (1, 1, 1))
    assert (plan.engine, plan.kv, plan.kv_tokens, plan.sampling, plan.rollout) == (0, 0, 0, 0.0, None)
    assert plan.published == 2 * SMALL.num_parameters
    assert plan.loading == 2 * plan.weights  # handed over, and rounded as servers have it
    own = plan_on(small(model={"compute_dtype": "bfloat16"}), "small", SMALL, HARDWARE["h100"], (1, 1, 1))
    assert plan.model_flops == pytest.approx(own.model_flops * (4 + 1 / 6) / 4), (
        "the correction scores prompts with tips"
    )
    ahead = plan_on(small(rollout={"max_staleness": 1}), "small", SMALL, HARDWARE["h100"], (1, 1, 1))
    assert ahead.model_flops == pytest.approx(plan.model_flops), "so does that of rollouts that run ahead"


def test_offloaded_moments_are_only_on_the_device_while_they_are_applied() -> None:
    kept = make_plan(load_config(SEVEN), "a100-40", 8)
    offloaded = make_plan(load_config(SEVEN, ["update.offload_moments=true"]), "a100-40", 8)
    assert kept.peak - offloaded.peak == kept.moments
    light = dataclasses.replace(offloaded, temporaries=0)
    assert light.peak == 3 * light.weights + light.moments + light.weights * 3 // 2


def test_the_shipped_7b_run_fits_the_papers_machine_on_the_mesh_of_the_preset() -> None:
    config = load_config(SEVEN)
    plan = make_plan(config, "a100-40", 8)
    best = preset(config, *shape_of(config.model.path), plan.chip, 8)
    assert plan.fits and best is not None and best.mesh == plan.mesh == (1, 2, 4)
    assert plan.weights + plan.moments == pytest.approx(12 * 7_615_616_512 / 8, rel=1e-3)


@pytest.mark.parametrize("size", list(QWEN2_5))
def test_shipped_presets_divide_heads_and_vocabulary_and_fit(size: str) -> None:
    changes = ["model.mesh=[1,1,1]", "update.micro_batch_tokens=9216", f"model.path='Qwen/Qwen2.5-{size}'"]
    config = load_config(SEVEN, changes)
    assert shipped_presets().keys() == QWEN2_5.keys()
    for chip, mesh in shipped_presets()[size].items():
        plan = make_plan(config, chip)
        assert plan.fits and plan.mesh == mesh
        assert QWEN2_5[size].num_kv_heads % mesh[2] == 0 and QWEN2_5[size].vocab_size % (mesh[1] * mesh[2]) == 0


def test_a_preset_has_the_fewest_devices() -> None:
    config = load_config(SEVEN, ["model.mesh=[1,1,1]"])
    plan = smallest(config, "7B", QWEN2_5["7B"], HARDWARE["a100-80"])
    half = preset(config, "7B", QWEN2_5["7B"], HARDWARE["a100-80"], 2)
    assert plan is not None and plan.devices == 4 and half is not None and not half.fits


@pytest.mark.parametrize("size", list(QWEN2_5))
def test_every_size_has_a_configuration_on_its_preset(size: str) -> None:
    config = load_config(CONFIGS / f"scienceworld_qwen2.5_{size.lower()}.toml")
    chip = "a100-40" if size == "7B" else "h100"
    assert shape_of(config.model.path)[0] == f"Qwen2.5-{size}"
    assert config.model.mesh == shipped_presets()[size][chip]
    assert make_plan(config, chip).fits


@pytest.mark.parametrize(("name", "chip"), [("7b", "a100-40"), ("7b_h100", "h100"), ("7b_v5p", "v5p")])
def test_full_scale_configurations_fit_their_machines(name: str, chip: str) -> None:
    config = load_config(CONFIGS / f"scienceworld_qwen2.5_{name}.toml")
    plan = make_plan(config, chip)
    assert plan.fits and plan.devices == (4 if chip == "v5p" else 8) <= HARDWARE[chip].host
    assert config.memory.placement == "latest" and plan.branches >= plan.length


def test_a_local_folder_gives_the_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL.to_hf()))
    assert shape_of(str(tmp_path)) == (tmp_path.name, SMALL)


@pytest.mark.parametrize(
    ("override", "hardware", "devices", "message"),
    [
        ("model.mesh=[1,2,4]", "a100", 8, "hardware 'a100' is not known; the nearest known one is `a100-40`"),
        ("model.mesh=[1,2,4]", "a100-40", 4, r"model.mesh = \[1, 2, 4\] has 8 devices, --devices says 4"),
        ("model.mesh=[2,1,1]", "a100-40", 3, r"model.mesh = \[2, 1, 1\] has 2 devices, --devices says 3"),
        ("model.mesh=[1,1,8]", "a100-40", 8, "4 key/value heads do not divide over tensor = 8|28 attention heads"),
        ("model.path='toy'", "a100-40", 8, "model.path = 'toy': plan needs no weights but a shape"),
        ("model.mesh=[1,2,4]", "a100-40", 0, "--devices 0 --share 0.4: at least 1 device"),
    ],
)
def test_each_mistake_is_one_clear_error(override: str, hardware: str, devices: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(load_config(SEVEN, [override]), hardware, devices)


def test_processes_share_the_devices_evenly() -> None:
    with pytest.raises(ConfigError, match="--processes 3: a divisor of the 8 devices is allowed"):
        make_plan(load_config(SEVEN), "a100-40", processes=3)
