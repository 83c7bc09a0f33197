"""Which games a data folder has, what they are called, and what is said about one that is missing or broken."""

import json

import pytest

from empo2_jax.envs.alfworld_data import FIRST, KINDS, PUBLISHED, Games, counted, find_data, read_game
from empo2_jax.errors import ConfigError, DataError
from tests.fixtures import kitchen

CUP, EGG = "pick_and_place_simple", "pick_heat_then_place_in_recep"


@pytest.fixture
def data(tmp_path):
    return kitchen.write(tmp_path / "data")


def broken(data, name: str = "train/pick_and_place_simple-Cup-None-Shelf-1/trial_a"):
    return data / "json_2.1.1" / name / "game.tw-pddl"


def test_games_are_numbered_by_split_and_kind_and_only_what_can_be_solved_is_played(data):
    games = Games(find_data(str(data)))
    assert games.numbers("train", CUP) == range(3)  # sliced things are left out
    assert games.first("train", CUP, 5) == [0, 2]
    assert games.first("train", CUP, 1) == [0]
    assert games.first("dev", EGG, 5) == []
    assert (games.first("dev", CUP, 5), games.first("test", EGG, 5)) == ([10_000], [20_000])
    assert games.path(CUP, 20_000).parts[-3:-1] == ("pick_and_place_simple-Cup-None-Shelf-9", "trial_a")
    with pytest.raises(ConfigError, match=r"no such game in .*; there are 0 to 2, 10000 to 10000, 20000 to 20000"):
        games.path(CUP, 3)


def test_the_published_numbers_add_up_and_fit_between_the_splits():
    assert [sum(PUBLISHED[split]) for split in ("train", "dev", "test")] == [3553, 140, 134]
    assert all(len(counts) == len(KINDS) for counts in PUBLISHED.values())
    assert max(PUBLISHED["train"]) < FIRST["dev"] and max(PUBLISHED["dev"]) < FIRST["test"] - FIRST["dev"]


def test_a_folder_is_found_by_name_by_variable_or_where_the_download_puts_it(data, tmp_path, monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_data(str(data)) == find_data(str(data / "json_2.1.1")) == data / "json_2.1.1"
    with pytest.raises(ConfigError, match=r"\.cache/alfworld has no games .* in train, valid_seen, valid_unseen"):
        find_data("")
    monkeypatch.setenv("ALFWORLD_DATA", str(data))
    assert find_data("") == data / "json_2.1.1"


def test_an_incomplete_folder_names_what_is_missing(data):
    (data / "json_2.1.1" / "valid_unseen").rename(data / "elsewhere")
    with pytest.raises(ConfigError, match=r"in valid_unseen; get them with alfworld-download"):
        find_data(str(data))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not a game: Expecting"),
        ("[]", "an object with pddl_domain, grammar, pddl_problem is expected"),
        (json.dumps(kitchen.game(kitchen.CUP, grammar=None)), "grammar must be text, found NoneType"),
        (json.dumps(kitchen.game(kitchen.CUP, pddl_problem=1)), "pddl_problem must be text, found int"),
        (json.dumps(kitchen.game(kitchen.CUP, walkthrough=[1])), "walkthrough must be a list of actions"),
    ],
)
def test_a_broken_game_is_one_clear_error_and_is_counted(data, content, problem):
    path = broken(data)
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=problem) as error:
        read_game(path)
    assert str(path) in str(error.value)
    train, seen, unseen = counted(Games(find_data(str(data))))
    assert train.startswith("train: 2 games can be solved (the published set has 3,553), 1 are said not to be, ")
    assert "1 cannot be read, the first: " in train
    assert seen == "valid_seen: 1 games can be solved (the published set has 140)"
    assert unseen == "valid_unseen: 2 games can be solved (the published set has 134)"


def test_a_game_that_nobody_tried_to_solve_is_not_played(data):
    path = broken(data)
    path.write_text(json.dumps(kitchen.game(kitchen.CUP, solvable=None)), encoding="utf-8")
    assert not read_game(path).solvable
