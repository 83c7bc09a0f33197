"""Study files: arms, seeds, what is refused, and what makes two runs the same."""

from pathlib import Path

import pytest

from empo2_jax.errors import ConfigError
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "base.toml"', "not a study: seeds is missing"),
        ("base = ", "not a study: Invalid value"),
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


def test_common_changes_reach_every_arm_and_give_way_to_its_own(tmp_path: Path) -> None:
    path = make_study(tmp_path)
    path.write_text(
        path.read_text().replace("[arms.new]", "[common]\nupdate.epochs = 4\nalgorithm.p_memory = 0.5\n[arms.new]")
    )
    study = load_study(path)
    found = [(config.update.epochs, config.algorithm.p_memory) for config in (a.config(0) for a in study.arms.values())]
    assert found == [(4, 0.5), (4, 0.0)]
