"""Panel files: what they fix, what contradicts them, and that the shipped ones name problems that exist."""

from pathlib import Path

import pytest

from empo2_jax.config import EvaluationConfig
from empo2_jax.config_file import dump_toml, load_config, use_panel
from empo2_jax.envs import scienceworld, toy
from empo2_jax.envs.problems import panel_tasks, shortfall
from empo2_jax.envs.scienceworld_tasks import PAPER_TASKS, TASKS, lookup
from empo2_jax.envs.webshop.goals import Goals
from empo2_jax.errors import ConfigError
from empo2_jax.evaluation import evaluate
from empo2_jax.panels import load_panel
from empo2_jax.rollout.replay import ReplayEngine
from empo2_jax.study.base import load_study
from tests.fixtures.worlds import babble, make_collector, word_chat

ROOT = Path(__file__).parents[1]
PANELS = sorted((ROOT / "configs/panels").glob("*.toml"))
SMALL = 'env = "toy"\nsplit = "dev"\nrepeats = 3\ntemperature = 0.5\nseed = 9\n[tasks]\nbulb = [4, 1]\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "base.toml").write_text("[evaluation]\nvariations = 20\nrepeats = 4\ntemperature = 0.4\n")
    (tmp_path / "run.toml").write_text('extends = "base.toml"\n[evaluation]\npanel = "small.toml"\n')
    return tmp_path


def test_a_panel_replaces_the_keys_of_what_it_extends_and_survives_the_copy_of_a_run(folder: Path) -> None:
    config = load_config(folder / "run.toml")
    found = config.evaluation
    assert (found.split, found.variations, found.repeats, found.temperature, found.seed) == ("dev", 2, 3, 0.5, 9)
    copy = folder / "elsewhere" / "config.toml"
    copy.parent.mkdir()
    copy.write_text(dump_toml(config))
    assert load_config(copy) == config
    on_base = load_config(folder / "base.toml", [f'evaluation.panel="{folder}/small.toml"'])
    assert on_base.evaluation == found


@pytest.mark.parametrize("key", ["split=test", "variations=5", "repeats=4", "temperature=0.4", "seed=0"])
def test_a_key_that_contradicts_the_panel_is_an_error(folder: Path, key: str) -> None:
    name = key.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"evaluation\.{name} = .* contradicts the panel small\.toml"):
        load_config(folder / "run.toml", [f"evaluation.{key}"])
    same = {"split": "dev", "variations": 2, "repeats": 3, "temperature": 0.5, "seed": 9}[name]
    assert load_config(folder / "run.toml", [f"evaluation.{name}={same}"]).evaluation.repeats == 3


def test_the_panel_is_what_is_played(folder: Path) -> None:
    config = load_config(folder / "run.toml").evaluation
    family = toy.family()
    collector = make_collector(ReplayEngine(babble(word_chat())), family, step_limit=3)
    panel = evaluate(collector, family, config)
    other = evaluate(collector, family, EvaluationConfig(split="dev", variations=8, repeats=3, temperature=0.5, seed=9))
    collector.close()
    assert [row["variation"] for row in panel.rows] == [1, 4]
    assert [episode.task.variation for episode in panel.episodes] == [4] * 3 + [1] * 3
    of_all = {(row["variation"]): row["scores"] for row in other.rows}
    assert all(row["scores"] == of_all[row["variation"]] for row in panel.rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("repeats = 3\n", ""), r"repeats is missing"),
        (("[4, 1]", "[4, 4]"), "bulb has a number twice"),
        (("[4, 1]", "[-1]"), r"tasks\.bulb\[0\] = -1: at least 0 is allowed"),
        (("[4, 1]", "[]"), r"tasks\.bulb = \[\]: a length of at least 1 is allowed"),
        (('"dev"', '"valid"'), "split"),
        (("seed", "sed"), "seed is missing|unknown key `sed`"),
        (("[tasks]", "[tasks"), "not valid TOML"),
    ],
)
def test_a_mistake_in_a_panel_is_one_clear_line(folder: Path, change: tuple[str, str], message: str) -> None:
    (folder / "small.toml").write_text(SMALL.replace(*change))
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(folder / "run.toml")
    assert "small.toml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_panel_of_another_world_or_with_a_problem_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(folder / "base.toml", ['evaluation.panel="none.toml"'])
    config = load_config(folder / "run.toml").evaluation
    with pytest.raises(ConfigError, match="a panel of toy"):
        panel_tasks(scienceworld.family(tasks=["melt"]), config)
    (folder / "small.toml").write_text(SMALL.replace("[4, 1]", "[8]"))
    with pytest.raises(ConfigError, match="toy/bulb/8"):
        panel_tasks(toy.family(), config)


def test_fewer_variations_than_asked_for_are_told() -> None:
    family = scienceworld.family(tasks=["melt", "boil", "9-2"], variations={"test": 20})
    asked = EvaluationConfig(variations=20)
    assert [len([task for task in panel_tasks(family, asked) if task.name == name]) for name in ("melt", "boil")] == [
        9,
        9,
    ]
    told = "evaluation.variations = 20: fewer in the test split of melt (9), boil (9)"
    assert shortfall(family, asked) == told
    assert shortfall(family, EvaluationConfig(variations=9)) == ""
    assert shortfall(family, EvaluationConfig(panel="some.toml")) == ""
    family = scienceworld.family(tasks=[task.name for task in TASKS], variations={"test": 1})
    assert shortfall(family, EvaluationConfig(variations=2)).endswith(" and 27 more")


@pytest.mark.parametrize("path", PANELS, ids=lambda path: path.stem)
def test_shipped_panels_name_problems_of_their_split(path: Path) -> None:
    panel = load_panel(path)
    if panel.env == "toy":
        first = {"toy": 0, "toy_unseen": 4}[path.stem]
        assert panel_tasks(toy.family(), EvaluationConfig(panel=str(path))) == toy.family().tasks("test")[first:]
        return
    if panel.env == "webshop":
        wishes = [{"product": number, "instruction": "", "options": []} for number in range(12_087)]
        assert panel.tasks == {"human": tuple(Goals("human", wishes, None, lambda number: None, False).split("test"))}
        return
    tasks = panel_tasks(scienceworld.family(tasks=["melt"]), EvaluationConfig(panel=str(path)))
    by_name = {name: [task.variation for task in tasks if task.name == name] for name in panel.tasks}
    for name, numbers in by_name.items():
        assert numbers == list(lookup(name).split("test"))[:20]
    expected = {
        "scienceworld_paper18": PAPER_TASKS,
        "scienceworld_all30": [task.name for task in TASKS],
        "scienceworld_released": [task.name for task in TASKS if task.step_limit],
        "scienceworld_ood_conductivity": ["test-conductivity"],
        "scienceworld_ood_lifespan": ["lifespan-shortest-lived"],
        "scienceworld_ood_paint": ["chemistry-mix-paint-secondary-color"],
    }
    assert sorted(by_name) == sorted(expected[path.stem])


def test_the_docs_have_the_real_numbers_of_test_variations() -> None:
    page = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
    few = {name: lookup(name).test for name in PAPER_TASKS if lookup(name).test < 20}
    assert len(few) == 7 and "7 of the 18" in page
    assert [line for line in page.splitlines() if line.startswith("| ") and line.split("|")[1].strip() in few] == [
        f"| {name} | {count} |" for name, count in few.items()
    ]
    total = sum(min(20, lookup(name).test) for name in PAPER_TASKS)
    assert f"{total} problems, not {20 * len(PAPER_TASKS)}" in page
    assert f"{sum(task.test < 20 for task in TASKS)} have fewer than 20" in page


def test_studies_and_evaluations_of_a_run_use_panels(folder: Path) -> None:
    (folder / "study.toml").write_text('base = "run.toml"\nseeds = 1\nreference = "a"\n[arms.a]\n')
    assert load_study(folder / "study.toml").arms["a"].base == folder / "run.toml"
    (folder / "study.toml").write_text(
        'base = "run.toml"\nseeds = 1\nreference = "a"\n[arms.a]\nevaluation.repeats = 1\n'
    )
    with pytest.raises(ConfigError, match="contradicts the panel"):
        load_study(folder / "study.toml")
    config = use_panel(load_config(folder / "base.toml"), folder / "small.toml")
    assert config == load_config(folder / "run.toml").model_copy(update={"evaluation": config.evaluation})
    assert config.evaluation == load_config(folder / "run.toml").evaluation
