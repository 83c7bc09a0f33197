"""The published reward against values computed by hand, part by part and in its corner cases."""

import pytest

from empo2_jax.envs.webshop import reward as module
from empo2_jax.envs.webshop.nouns import rules
from empo2_jax.envs.webshop.reward import Reward, alike, first_color, matched_attributes, matched_options, reward
from tests.fixtures.shop import goal, product

ALL = ("9.5", "navy blue")


def worth(chosen=ALL, bought=None, wanted=None, **changes) -> Reward:
    wanted = wanted or product()
    return reward(bought or wanted, chosen, goal(**changes), wanted, rules)


def test_everything_right_is_one() -> None:
    made = worth()
    assert made == Reward(type=1.0, attributes=1, options=2, price=True, parts=4)
    assert made.total == 1.0


@pytest.mark.parametrize(
    ("made", "total"),
    [
        (lambda: worth(chosen=("9.5",)), 3 / 4),
        (lambda: worth(chosen=()), 2 / 4),
        (lambda: worth(limit=10.0), 3 / 4),
        (lambda: worth(limit=20.0), 1.0),  # the limit itself is within it
        (lambda: worth(limit=None), 1.0),
        (lambda: worth(attributes=("arch support", "made of gold")), 4 / 5),
        (lambda: worth(chosen=(), options=(), attributes=()), 1.0),  # price alone: 1 / 1
        (lambda: worth(chosen=(), options=(), attributes=(), limit=5.0), 0.0),
        (lambda: worth(chosen=(), options=()), 1.0),  # no options: |A| + 1
        (lambda: worth(chosen=(), options=(), limit=5.0), 1 / 2),
    ],
)
def test_totals(made, total: float) -> None:
    assert made().total == pytest.approx(total)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"title": "Alderwick Trail Shoes"}, 1.0),
        # Nouns of the wanted title: alderwick, trail, shoes. Same query, whatever else is shared:
        ({"title": "Brontel Shoes", "product_category": "Toys"}, 1.0),
        # Other query, two parts of the category path in common, in any order:
        ({"title": "Brontel Shoes", "query": "boots", "product_category": "Shoes › Men › Boots"}, 1.0),
        # Other query and category, a third of the nouns: 1/3 > 0.2.
        ({"title": "Brontel Shoes", "query": "boots", "product_category": "Toys"}, 1.0),
        # No noun in common: nothing, even with the same query.
        ({"title": "Brontel Lamp"}, 0.0),
    ],
)
def test_type_by_query_category_and_title(changes, factor: float) -> None:
    assert module.type_factor(product(**changes), product(), rules) == factor


def title(count: int) -> str:
    """A title of so many different nouns; the first is always the same."""
    return " ".join(f"thing{chr(97 + number)}" for number in range(count))


@pytest.mark.parametrize(
    ("nouns_wanted", "same_query", "factor"),
    [
        (4, False, 1.0),  # 1/4 > 0.2
        (5, False, 0.5),  # 1/5 is not above 0.2
        (5, True, 1.0),
        (10, False, 0.5),  # 1/10 is not below 0.1
        (11, False, 0.1),  # 1/11 < 0.1
        (11, True, 0.1),  # a common query does not help
    ],
)
def test_type_thresholds(nouns_wanted: int, same_query: bool, factor: float) -> None:
    wanted = product(title=title(nouns_wanted), product_category="A › B")
    bought = product(title="thinga", query=wanted.query if same_query else "other", product_category="B › C")
    assert module.type_factor(bought, wanted, rules) == factor


@pytest.mark.parametrize(("same_query", "factor"), [(True, 1.0), (False, 0.5)])
def test_a_title_without_nouns_counts_as_a_fifth(same_query: bool, factor: float) -> None:
    bought = product(query="trail shoes" if same_query else "other", product_category="Toys")
    assert module.type_factor(bought, product(title="12 of the"), rules) == factor


def test_repeated_nouns_of_the_wanted_title_count_in_its_length_only() -> None:
    wanted = product(title="lamp lamp lamp lamp lamp", product_category="A")
    bought = product(title="lamp", query="other", product_category="B")
    assert module.type_factor(bought, wanted, rules) == 0.5  # 1 / 5


def test_one_part_of_the_category_twice_is_one() -> None:
    wanted = product(title=title(5), product_category="A › A › C")
    bought = product(title="thinga", query="other", product_category="A › A › B")
    assert module.type_factor(bought, wanted, rules) == 0.5


@pytest.mark.parametrize(
    ("attribute", "found"),
    [
        ("arch support", 1),
        ("arch supports", 1),  # alike
        ("support", 1),  # a subset of the words of one attribute: 100
        ("trail shoes", 1),  # in the title
        ("machine wash", 1),  # inside a bullet point
        ("sole machine", 1),  # across bullet points, joined by a space
        ("for every", 1),  # in the description
        ("Rubber Sole", 0),  # the goal's side of the word-for-word search is not lower-cased
        ("steel toe", 0),
    ],
)
def test_attributes(attribute: str, found: int) -> None:
    assert matched_attributes(product(), [attribute]) == found


def test_facts_of_the_original_tests() -> None:
    assert alike("essential oils", "essential oil")
    assert matched_options(["powder snow"], ["cool powder snow"]) == 1
    assert matched_options(["pack of 12", "grey", "XL"], ["grey", "XL", "pack of 12"]) == 3
    assert matched_options(["pack of 12", "blue", "XL"], ["grey", "XL", "pack of 12"]) == 2


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("5", "5.5", True),  # punctuation is space: {5} is a subset of {5, 5}
        ("X-Large", "x large", True),
        ("small", "medium", False),
        ("small", "x-small", True),  # a subset of the words
        ("", "", False),
        ("!!", "!!", False),
    ],
)
def test_likeness(one: str, other: str, same: bool) -> None:
    assert alike(one, other) is same


@pytest.mark.parametrize(
    ("text", "color"),
    [
        ("", ""),
        ("black forest", "black"),
        ("violet lavender", "lavender"),  # first in the list, not in the text
        ("steelivy fuchsia", "fuchsia"),
        ("123alabaster", "alabaster"),
        ("washed", "ash"),  # inside a word
        ("webshop", "webshop"),
    ],
)
def test_first_color(text: str, color: str) -> None:
    assert first_color(text) == color


def test_colors_match_by_their_first_color_word() -> None:
    assert matched_options(["royal blue"], ["navy blue"]) == 1
    assert matched_options(["black | white"], ["white"]) == 0  # black comes first in the list
    assert matched_options([], ["white"]) == 0
    assert matched_options(["white"], ["white", "white shirt"]) == 2  # one choice may match several wishes


def test_there_are_102_colors_each_once() -> None:
    assert len(module.COLORS) == len(set(module.COLORS)) == 102


def test_the_price_of_a_range_decides() -> None:
    bought = product(prices=(10.0, 20.0))
    assert worth(bought=bought, limit=bought.price).price
    assert not worth(bought=bought, limit=bought.price - 0.01).price
