"""Goals are functions of the data: price limits, identities, combinations of options, orders, and disjoint splits."""

import itertools
import random

import numpy as np
import pytest

from empo2_jax.envs.webshop import goals
from empo2_jax.envs.webshop.goals import Goals, combination, count_combinations, goal_id, human_records, price_limit
from tests.fixtures.shop import product

SHOES = product()


def human(count: int, original_order: bool = False) -> Goals:
    records = [{"product": 0, "instruction": f"wish {n}.", "attributes": ["soft"], "options": []} for n in range(count)]
    return Goals("human", records, None, lambda number: SHOES, original_order)


@pytest.mark.parametrize(
    ("price", "possible"),
    [
        (12.99, {30.0, 40.0, 50.0}),  # of 20, 30, 40, 50 the larger of two
        (20.0, {40.0, 50.0, 60.0}),  # 20 is not above 20
        (5.0, {20.0, 30.0, 40.0}),
        (975.0, {990.0}),  # of 980 and 990
        (980.0, {None}),  # 990 alone is not two
        (5000.0, {None}),
    ],
)
def test_limits_are_the_larger_of_two_of_the_next_four_tens(price: float, possible: set) -> None:
    assert {price_limit(str(number), price) for number in range(60)} == possible


def test_a_limit_is_a_function_of_the_goal() -> None:
    assert price_limit("a", 12.0) == price_limit("a", 12.0)


def test_the_larger_of_two_is_drawn_with_its_probability() -> None:
    drawn = [price_limit(f"goal {number}", 12.99) for number in range(3000)]
    shares = [drawn.count(limit) / 3000 for limit in (30.0, 40.0, 50.0)]
    assert np.allclose(shares, [1 / 6, 2 / 6, 3 / 6], atol=0.03)


def test_identities_do_not_change_and_tell_apart() -> None:
    assert goal_id("B1", "buy", ["red"]) == "88de6a2961f9be0d"
    assert len({goal_id("B1", "buy", ["red"]), goal_id("B2", "buy", ["red"]), goal_id("B1", "buy", ["red", ""])}) == 3


def test_human_goals_are_those_with_attributes() -> None:
    raw = [
        {"instruction": "a", "instruction_attributes": ["soft"], "instruction_options": ["red"]},
        {"instruction": "b", "instruction_attributes": [], "instruction_options": []},
    ]
    assert [record["instruction"] for record in human_records(3, raw)] == ["a"]


def test_combinations_are_the_product_of_the_options_by_name() -> None:
    item = product(options={"size": ("s", "m"), "color": ("red", "blue", "grey"), "fit": ("wide",)})
    expected = list(itertools.product(item.options["color"], item.options["fit"], item.options["size"]))
    assert [combination(item, number) for number in range(count_combinations(item))] == expected
    assert count_combinations(product(options={})) == 1
    assert combination(product(options={}), 0) == ()


def test_synthetic_goals_are_one_per_combination() -> None:
    items = [product(asin="B1", prices=(985.0,)), product(asin="B2", options={}), product(asin="B3")]
    records = [{"product": n, "instruction": f"find {n}", "attributes": ["soft"]} for n in range(3)]
    made = Goals("synthetic", records, np.asarray([4, 5, 9]), items.__getitem__, False)
    everything = [made[position] for position in range(len(made))]
    assert len(everything) == len({goal.id for goal in everything}) == 9
    assert sorted(goal.product for goal in everything) == [0] * 4 + [1] + [2] * 4
    first = {goal.instruction: goal for goal in everything if goal.product == 0}
    assert set(first) == {
        f"find 0 with color: {color}, and size: {size}" for color in SHOES.options["color"] for size in ("9.5", "10")
    }
    assert first["find 0 with color: navy blue, and size: 10"].options == ("navy blue", "10")
    assert next(iter(first.values())).limit is None
    (bare,) = (goal for goal in everything if goal.product == 1)
    assert bare.instruction == f"find 1, and price lower than {bare.limit:.2f} dollars"


def test_an_instruction_loses_its_dot_and_gets_its_price() -> None:
    goal = human(3)[0]
    assert goal.limit in (40.0, 50.0, 60.0)
    assert goal.instruction.startswith("wish ") and goal.instruction.endswith(
        f", and price lower than {goal.limit:.2f} dollars"
    )
    assert "." not in goal.instruction.partition(",")[0]


@pytest.mark.parametrize(
    ("count", "test", "train", "dev"), [(6910, 500, 5910, 500), (1500, 500, 750, 250), (12, 4, 6, 2), (3, 1, 2, 0)]
)
@pytest.mark.parametrize("original_order", [False, True])
def test_splits_are_disjoint_and_complete(count: int, test: int, train: int, dev: int, original_order: bool) -> None:
    made = human(count, original_order)
    assert [len(made.split(name)) for name in ("test", "train", "dev")] == [test, train, dev]
    assert made.split("test") == range(test) and made.split("train").start == test
    ids = [{made[place].id for place in list(made.split(name))[:300]} for name in ("test", "train", "dev")]
    assert not ids[0] & ids[1] and not ids[1] & ids[2] and not ids[0] & ids[2]


def test_the_order_is_fixed_and_not_that_of_the_file() -> None:
    wishes = [human(50)[n].instruction for n in range(50)]
    assert wishes == [human(50)[n].instruction for n in range(50)]
    assert wishes != [human(50, original_order=True)[n].instruction for n in range(50)]
    assert sorted(wishes) != wishes


def test_the_original_order_is_its_seeded_shuffle() -> None:
    expected = [f"wish {n}" for n in range(50)]
    random.seed(233)
    random.shuffle(expected)
    made = human(50, original_order=True)
    assert [made[n].instruction.partition(",")[0] for n in range(50)] == expected


def test_the_same_words_for_the_same_product_are_one_goal() -> None:
    records = [{"product": 0, "instruction": f"wish {n % 20}.", "attributes": ["a"], "options": []} for n in range(40)]
    for original_order in (False, True):
        made = Goals("human", records, None, lambda number: SHOES, original_order)
        assert len(made) == len({made[place].id for place in range(len(made))}) == 20


def test_positions_outside_are_refused() -> None:
    for place in (-1, 12):
        with pytest.raises(IndexError):
            human(12)[place]
    assert goals.TEST == 500
