"""The configuration: what is read, what is refused and how it is said."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from empo2_jax.config import Config, parse_config
from empo2_jax.config_file import dump_toml, load_config, parse_override
from empo2_jax.errors import ConfigError


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_defaults_are_the_papers_values() -> None:
    config = parse_config({})
    algorithm = config.algorithm
    assert (algorithm.p_memory, algorithm.q_off_policy) == (0.25, 2 / 3)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl_coefficient) == (0.2, 0.3, 0.0)
    assert (config.rollout.tasks_per_iteration, config.rollout.group_size) == (16, 8)
    assert (config.memory.capacity, config.memory.threshold, config.memory.top_k) == (1000, 0.5, 10)


def test_every_key_has_a_description() -> None:
    for _, section in Config():
        for key, field in type(section).model_fields.items():
            assert field.description, key


@pytest.mark.parametrize(
    ("values", "unknown", "nearest"),
    [
        ({"memory": {"capasity": 3}}, "memory.capasity", "memory.capacity"),
        ({"memry": {}}, "memry", "memory"),
        ({"algorithm": {"p_mem": 0.5}}, "algorithm.p_mem", "algorithm.p_memory"),
    ],
)
def test_an_unknown_key_names_the_nearest(values: dict[str, Any], unknown: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"my.toml: unknown key `{unknown}`; the nearest known key is `{nearest}`"):
        parse_config(values, "my.toml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"run": {"seed": "1"}}, r"run\.seed = '1': a whole number is allowed"),
        ({"run": {"seed": True}}, r"run\.seed = True"),
        ({"algorithm": {"p_memory": 1.5}}, r"algorithm\.p_memory = 1\.5: at most 1.0 is allowed"),
        ({"memory": {"eviction": "random"}}, "'fifo' or 'lowest_score'"),
        ({"rollout": {"top_p": 0.9}}, "training needs top_p = 1"),
        ({"rollout": {"max_length": 9000}}, r"rollout\.max_length = 9000 exceeds the largest bucket 4608"),
        ({"algorithm": {"name": "grpo"}}, r"\"grpo\" needs algorithm\.p_memory = 0"),
        ({"algorithm": {"name": "gigpo", "p_memory": 0.0}}, r"\"gigpo\" needs .* intrinsic\.kind = \"none\""),
        ({"update": {"buckets": [1024, 512]}}, "1 to 4 increasing lengths"),
        ({"update": {"buckets": [1, 2, 3, 4, 5]}}, "1 to 4 increasing lengths"),
        ({"update": {"micro_batch_tokens": 100}}, "below the largest bucket 4608"),
        ({"memory": {"placement": "latest"}}, "no room for branches beside a row of the largest bucket; at least 9216"),
        ({"model": {"mesh": [1, 1]}}, r"model\.mesh = \[1, 1\]: more than 2 values are needed"),
        ({"model": {"mesh": [1, 1, 1, 1]}}, r"model\.mesh = \[1, 1, 1, 1\]: a length of at most 3 is allowed"),
        ({"model": {"mesh": [1, 0, 1]}}, r"model\.mesh\[1\] = 0: at least 1 is allowed"),
        ({"model": {"mesh": 3}}, r"model\.mesh = 3: a list is allowed"),
        ({"run": 3}, r"run = 3: a table of keys and values is allowed"),
        ({"run": {"tensorboard": 1}}, r"run\.tensorboard = 1: true or false is allowed"),
        ({"model": {"master_dtype": "bfloat16"}}, r"below the resolution of bfloat16, .* float32 is allowed"),
        ({"model": {"attention": "flash"}}, r"model\.attention = 'flash': .*'auto', 'xla', 'cudnn' or 'splash'"),
        ({"model": {"remat": True}}, "'none', 'dots' or 'full'"),
        (
            {"model": {"mesh": [1, 1, 2]}, "rollout": {"max_staleness": 1}},
            r"max_staleness = 1: an engine in this process cannot sample while 2 devices update; 0, or .*sglang",
        ),
        ({"rollout": {"max_staleness": 1, "release_memory": True}}, "servers sample during updates; one is allowed"),
        ({"model": {"mesh": [2, 2, 1]}}, r"data × fsdp = 4 shards; at least 18432 is allowed"),
        (
            {"run": {"mirror": "s3://bucket/run"}, "algorithm": {"name": "reflexion"}},
            'run.mirror with algorithm.name = "reflexion", which has no checkpoints to send',
        ),
        ({"run": {"dir": "a\\b"}}, r"run\.dir"),
        ({"update": {"learning_rate": 1e300}}, r"update\.learning_rate = 1e\+300: at most 100\.0 is allowed"),
        ({"run": {"dir": "s3://bucket/run"}}, r"run\.dir = 's3://bucket/run': a folder on this machine is allowed"),
        ({"rollout": {"weights_dir": "gs://b/w"}}, r"rollout\.weights_dir = 'gs://b/w': a folder on this machine"),
        ({"run": {"mirror": "bogus"}}, r"run\.mirror = 'bogus': a URL with its scheme is allowed: s3://…, gs://…"),
        ({"run": {"mirror": "/a/folder"}}, r"run\.mirror = '/a/folder': a URL with its scheme is allowed"),
        (
            {"env": {"name": "webshop", "data": "shop", "products": 80}},
            r"env\.data = 'shop' with env\.products = 80, the size of the synthetic catalogue .*400 \(the default\) is",
        ),
    ],
)
def test_values_that_cannot_work_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(values)


def test_a_resolved_configuration_with_data_is_read_again(tmp_path: Path) -> None:
    config = parse_config({"env": {"name": "webshop", "data": "shop"}})
    assert load_config(write(tmp_path, "all.toml", dump_toml(config))) == config  # it spells out env.products too


def test_grpo_without_memory_is_allowed() -> None:
    assert (
        parse_config({"algorithm": {"name": "grpo", "p_memory": 0.0}, "intrinsic": {"kind": "none"}}).algorithm.name
        == "grpo"
    )


def test_presets_stack_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, "base.toml", "[run]\nseed = 1\nname = 'base'\n[memory]\ntop_k = 3\n")
    write(tmp_path, "middle.toml", "extends = 'base.toml'\n[run]\nname = 'middle'\n")
    leaf = write(tmp_path / "sub", "leaf.toml", "extends = '../middle.toml'\n[memory]\ncapacity = 9\n")
    config = load_config(leaf)
    assert (config.run.seed, config.run.name, config.memory.top_k, config.memory.capacity) == (1, "middle", 3, 9)


def test_a_circle_of_presets_is_an_error(tmp_path: Path) -> None:
    first = write(tmp_path, "a.toml", "extends = 'b.toml'\n")
    write(tmp_path, "b.toml", "extends = 'a.toml'\n")
    with pytest.raises(ConfigError, match=r"a\.toml: `extends` runs in a circle"):
        load_config(first)


def test_the_later_of_several_parents_wins(tmp_path: Path) -> None:
    write(tmp_path, "world.toml", "[memory]\ncapacity = 7\ntop_k = 3\n")
    write(tmp_path, "preset.toml", "[memory]\ntop_k = 4\nthreshold = 0.1\n")
    leaf = write(tmp_path, "leaf.toml", "extends = ['world.toml', 'preset.toml']\n[memory]\nthreshold = 0.2\n")
    memory = load_config(leaf).memory
    assert (memory.capacity, memory.top_k, memory.threshold) == (7, 4, 0.2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends = ['c.toml']", "`extends` runs in a circle"),
        ("extends = 'none.toml'", r"none\.toml: no such configuration file"),
        ("extends = 3", "extends = 3: a file name or a list of them is allowed"),
        ("[run", "not valid TOML"),
        ("run = " + 9_000 * "[", "not valid TOML: maximum recursion depth exceeded"),
        ("[run]\nseed = " + 5_000 * "9", "not valid TOML: Exceeds the limit"),
        ("run = 3", "run = 3"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, "c.toml", text))
    with pytest.raises(ConfigError, match=r"missing\.toml: no such configuration file"):
        load_config(tmp_path / "missing.toml")


def test_overrides_win_and_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path, "c.toml", "[run]\nseed = 1\n")
    config = load_config(path, ["run.seed=4", "run.name=my run", "update.buckets=[8, 4608]"])
    assert (config.run.seed, config.run.name, config.update.buckets) == (4, "my run", (8, 4608))
    with pytest.raises(ConfigError, match=r"unknown key `run\.sed`"):
        load_config(path, ["run.sed=4"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1", 1),
        ("a.b=1e-6", 1e-6),
        ("a.b=true", True),
        ("a.b=word", "word"),
        ('a.b="1"', "1"),
        ("a.b=[1, 2]", [1, 2]),
    ],
)
def test_override_values_are_toml_or_bare_words(text: str, value: Any) -> None:
    assert parse_override(text) == (["a", "b"], value)
    assert type(parse_override(text)[1]) is type(value)


def test_override_without_value_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"override `run\.seed`"):
        parse_override("run.seed")


@given(
    name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    rate=st.floats(1e-12, 1.0),
    tasks=st.lists(st.text("ab\"\\' é", max_size=5), max_size=3),
    seed=st.integers(0, 2**62),
    remat=st.sampled_from(["none", "dots", "full"]),
)
def test_what_is_dumped_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, name: str, rate: float, tasks: list[str], seed: int, remat: str
) -> None:
    config = parse_config(
        {
            "run": {"name": name, "seed": seed},
            "update": {"learning_rate": rate},
            "env": {"tasks": tasks},
            "model": {"remat": remat},
        }
    )
    path = tmp_path_factory.getbasetemp() / "round_trip.toml"
    path.write_text(dump_toml(config), encoding="utf-8")
    assert load_config(path) == config


def test_run_directory_follows_the_name() -> None:
    assert parse_config({"run": {"name": "x"}}).run_dir == Path("runs/x")
    assert parse_config({"run": {"name": "x", "dir": "/somewhere"}}).run_dir == Path("/somewhere")


def test_sections_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().run.seed = 3


def test_servers_are_urls_or_a_file_and_needed_by_their_engine() -> None:
    one = parse_config({"rollout": {"engine": "sglang", "servers": "servers.txt"}})
    many = parse_config({"rollout": {"engine": "sglang", "servers": ["http://a:1", "http://b:1"]}})
    assert one.rollout.servers == ("servers.txt",) and many.rollout.servers == ("http://a:1", "http://b:1")
    with pytest.raises(ConfigError, match=r"needs rollout\.servers: URLs, or a file"):
        parse_config({"rollout": {"engine": "sglang"}})


@pytest.mark.parametrize(
    ("compute", "weights", "tolerance", "expected"),
    [
        ("float32", "auto", 0.0, 1e-4),
        ("bfloat16", "auto", 0.0, 5e-2),
        ("float32", "bfloat16", 0.0, 5e-2),
        ("bfloat16", "float32", 0.0, 5e-2),
        ("float32", "auto", 0.3, 0.3),
    ],
)
def test_the_canarys_tolerance_follows_the_types(compute: str, weights: str, tolerance: float, expected: float) -> None:
    rollout = {"weights_dtype": weights, "canary_tolerance": tolerance}
    config = parse_config({"model": {"compute_dtype": compute}, "rollout": rollout})
    assert config.canary_tolerance == expected
    assert config.served_dtype == (compute if weights == "auto" else weights)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("rollout", "servers", ["http://host:1", "http://me:s3cret@host:1"]),
        ("rollout", "router", "https://s3cret@host/path"),
        ("run", "mirror", "s3://me:s3cret@bucket/run"),
    ],
)
def test_a_key_in_a_url_is_refused_without_saying_it(section: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="no user and key in a URL") as refusal:
        parse_config({section: {key: value}})
    assert "s3cret" not in str(refusal.value)
    parse_config({"run": {"mirror": "s3://bucket/runs/a@b"}, "rollout": {"router": "http://host/a@b"}})
