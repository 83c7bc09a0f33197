"""Study files: arms, seeds, what is refused, and what makes two runs the same."""

import re
from pathlib import Path

import pytest

from empo2_jax.errors import ConfigError
from empo2_jax.panels import load_panel
from empo2_jax.run_record import identity
from empo2_jax.study.base import cells_of, load_study
from tests.fixtures.studies import make_study

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "configs/studies").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_studies_have_valid_arms(path: Path) -> None:
    study = load_study(path)
    assert study.reference == "grpo" and study.tested == "empo2"
    assert study.seeds >= 3


def test_the_toy_study_compares_what_the_readme_says() -> None:
    study = load_study(ROOT / "configs/studies/toy.toml")
    assert study.seeds >= 10
    assert study.arms["naive"].config(0).run.iterations == 0
    assert {"grpo_novelty", "behavior", "mode_iteration", "mode_group"} <= study.arms.keys()
    assert 'algorithm.off_policy_denominator="behavior"' in study.arms["behavior"].overrides


@pytest.mark.parametrize("path", sorted((ROOT / "configs/studies").glob("ood_*.toml")), ids=lambda path: path.stem)
def test_policies_are_adapted_to_what_they_were_not_trained_on(path: Path) -> None:
    study = load_study(path)
    assert study.adaptation_panel is not None
    panel, env = load_panel(study.adaptation_panel), study.arms["empo2"].config(0).env
    assert (panel.env, study.adaptation_trials, study.adaptation_arms) == (env.name, 10, ("empo2", "grpo"))
    seen = {(task, number) for task in env.tasks or ("bulb",) for number in range(env.train_variations)}
    assert not {(task, number) for task, numbers in panel.tasks.items() for number in numbers} & seen
    assert env.name == "toy" or not panel.tasks.keys() & set(env.tasks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "base.toml"', "not a study: seeds is missing"),
        ("base = ", "not valid TOML: Invalid value"),
        ('base = "base.toml"\nseeds = 2\nreference = "b"\n[arms.a]', "not one of the arms a"),
        ('base = "base.toml"\nseeds = 2\nreference = "starts"\n[arms.starts]', "an arm cannot be called starts"),
        ('base = "base.toml"\nseeds = 2\nreference = "../a"\n[arms."../a"]', r"arm '\.\./a': letters, digits"),
        ('base = "base.toml"\nseeds = 2\nreference = "a"\nseed = 1\n[arms.a]', "unknown key `seed`"),
        ('base = "base.toml"\nseeds = 0\nreference = "a"\n[arms.a]', "seeds = 0: at least 1 is allowed"),
        ('base = "base.toml"\nseeds = 1001\nreference = "a"\n[arms.a]', "seeds = 1001: at most 1000 is allowed"),
        ('base = "base.toml"\nseeds = 2.5\nreference = "a"\n[arms.a]', "seeds = 2.5: a whole number is allowed"),
        ('base = "base.toml"\nseeds = "3"\nreference = "a"\n[arms.a]', "seeds = '3': a whole number is allowed"),
        ('base = "base.toml"\nseeds = 2\nreference = "a"\narms = 3', "arms = 3: a table of keys and values is allowed"),
        ('base = "base.toml"\nseeds = 2\nreference = "a"\n[arms]', "arms = {}: a length of at least 1 is allowed"),
        (
            'base = "base.toml"\nseeds = 1\nreference = "a"\nadaptation_trials = 1.5\n[arms.a]',
            "adaptation_trials = 1.5: a whole number is allowed",
        ),
        ('base = "base.toml"\nseeds = 1\nreference = "a"\nadaptation_trials = 3\n[arms.a]', "both or none is allowed"),
        (
            'base = "base.toml"\nseeds = 1\nreference = "a"\nadaptation_panel = "p"\n[arms.a]',
            "without adaptation_trials",
        ),
        (
            'base = "base.toml"\nseeds = 1\nreference = "a"\nadaptation_trials = 1\nadaptation_arms = ["a"]\n'
            'adaptation_panel = "none.toml"\n[arms.a]',
            "none.toml: no such file",
        ),
        ('base = "base.toml"\nseeds = 2\nreference = "a"\n[arms.a]\nalgorithm.p_memori = 0.1', "p_memory"),
        (
            'base = "base.toml"\nseeds = 2\nreference = "a"\n[common]\nrun.mirror = "s3://b/r"\n[arms.a]',
            "arm a: run.mirror = 's3://b/r' is one run's",
        ),
        (
            'base = "base.toml"\nseeds = 2\nreference = "a"\n[arms.a]\n[arms.b]\nevaluation.repeats = 9',
            r"b and a are evaluated on different panels: evaluation.repeats = 9 and 4",
        ),
    ],
)
def test_bad_studies_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = make_study(tmp_path)
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_study(path)


def test_cells_run_seed_by_seed_and_too_many_are_refused(tmp_path: Path) -> None:
    study = load_study(make_study(tmp_path, 'adaptation_trials = 2\nadaptation_arms = ["old"]\n'))
    assert [(cell.arm.name, cell.seed, cell.trials) for cell in cells_of(study, 2)] == [
        ("new", 0, 0),
        ("old", 0, 2),
        ("new", 1, 0),
        ("old", 1, 2),
    ]
    assert len(cells_of(study)) == 6
    assert [cell.arm.name for cell in cells_of(study, 1, ("old",))] == ["old"]
    for seeds in (0, 99999):
        with pytest.raises(ConfigError, match=f"--seeds {seeds}: 1 to 1000 are allowed"):
            cells_of(study, seeds)
    with pytest.raises(ConfigError, match="no arm 'odl'; the arms are new, old"):
        cells_of(study, 1, ("odl",))


def test_a_fingerprint_is_that_of_what_reaches_the_numbers(tmp_path: Path) -> None:
    path = make_study(tmp_path)
    first, second, *_ = cells_of(load_study(path))
    assert first.fingerprint() != second.fingerprint()
    before = first.fingerprint()
    (tmp_path / "base.toml").write_text('[run]\niterations = 2\nname = "other"\n[env]\nname = "toy"\nworkers = 9\n')
    assert first.fingerprint() == before
    (tmp_path / "base.toml").write_text('[run]\niterations = 2\n[env]\nname = "toy"\n[update]\nepochs = 2\n')
    assert first.fingerprint() != before


def test_an_arm_may_have_a_base_of_its_own(tmp_path: Path) -> None:
    path = make_study(tmp_path)
    (tmp_path / "other.toml").write_text('extends = "base.toml"\n[update]\nepochs = 3\n')
    path.write_text(path.read_text().replace("[arms.old]\n", '[arms.old]\nbase = "other.toml"\n'))
    study = load_study(path)
    assert [arm.config(0).update.epochs for arm in study.arms.values()] == [1, 3]
    assert study.arms["old"].config(5).run.seed == 5


def test_a_study_may_extend_another_key_by_key(tmp_path: Path) -> None:
    path = make_study(tmp_path)
    path.write_text(path.read_text().replace("seeds = 3", "seeds = 3\ncommon = { algorithm.clip_high = 0.4 }"))
    (tmp_path / "other").mkdir()
    child, grandchild = tmp_path / "other/child.toml", tmp_path / "grandchild.toml"
    child.write_text('extends = "../small.toml"\nseeds = 5\n[arms.old]\nupdate.epochs = 2\n[arms.third]\n')
    (tmp_path / "own.toml").write_text('extends = "base.toml"\n[run]\niterations = 7\n')
    grandchild.write_text('extends = "other/child.toml"\nbase = "own.toml"\n[arms.new]\nbase = "base.toml"\n')
    parent, study, last = load_study(path), load_study(child), load_study(grandchild)
    assert (study.name, study.seeds, study.reference, list(study.arms)) == ("child", 5, "old", ["new", "old", "third"])
    assert identity(study.arms["new"].config(1)) == identity(parent.arms["new"].config(1))
    old = study.arms["old"].config(0)
    assert (old.algorithm.p_memory, old.algorithm.clip_high, old.update.epochs) == (0.0, 0.4, 2)
    assert [arm.config(0).run.iterations for arm in last.arms.values()] == [2, 7, 7]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('extends = "bad.toml"', "bad.toml: `extends` runs in a circle"),
        ("extends = 3", "bad.toml: extends = 3: the name of one file is allowed"),
        ('extends = "none.toml"', "none.toml: cannot be read: No such file or directory"),
        ('extends = "base.toml"', "bad.toml: not a study: base is missing"),
        ('extends = "small.toml"\narms = 3', "bad.toml: not a study: arms = 3: a table of keys and values is allowed"),
    ],
)
def test_what_cannot_be_extended_is_named(tmp_path: Path, text: str, said: str) -> None:
    make_study(tmp_path)
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_study(path)


def test_common_changes_reach_every_arm_and_give_way_to_its_own(tmp_path: Path) -> None:
    path = make_study(tmp_path)
    path.write_text(
        path.read_text().replace("[arms.new]", "[common]\nupdate.epochs = 4\nalgorithm.p_memory = 0.5\n[arms.new]")
    )
    study = load_study(path)
    found = [(config.update.epochs, config.algorithm.p_memory) for config in (a.config(0) for a in study.arms.values())]
    assert found == [(4, 0.5), (4, 0.0)]
