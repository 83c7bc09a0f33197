"""The flow of pages, step by step on a shelf of known products."""

from dataclasses import replace

import pytest

from empo2_jax.envs.webshop import pages
from empo2_jax.envs.webshop.pages import Action, Session, act, clickables, parse, readable, text
from tests.fixtures.shop import INJECTION, Shelf, product

SHELF = Shelf([product(asin=f"B{number:09d}", title=f"Trail Shoes {number}") for number in range(60)])
START = Session("i need shoes")


def walk(*actions: str, session: Session = START, shop: Shelf = SHELF) -> Session:
    for action in actions:
        parsed = parse(action)
        after = act(session, parsed, shop) if parsed else None
        assert after is not None, action
        session = after
    return session


def refused(session: Session, action: str, shop: Shelf = SHELF) -> bool:
    parsed = parse(action)
    return parsed is None or act(session, parsed, shop) is None


RESULTS = walk("search[shoes]")
ITEM = walk("click[b000000003]", session=RESULTS)


def test_the_first_page_only_searches() -> None:
    assert text(START, SHELF) == "Search" and clickables(START, SHELF) == []
    assert refused(START, "click[search]") and refused(START, "click[back to search]")


def test_results_are_fifty_hits_ten_a_page() -> None:
    shown = text(RESULTS, SHELF).split(pages.SEPARATOR)
    assert shown[:3] == ["Back to Search", "Page 1 (Total results: 50)", "Next >"]
    assert shown[3:6] == ["B000000000", "Trail Shoes 0", "$20.0"]
    assert len(shown) == 3 + 3 * 10
    assert clickables(RESULTS, SHELF) == ["back to search", "next >", *(f"b{number:09d}" for number in range(10))]
    assert refused(RESULTS, "click[< prev]") and refused(RESULTS, "click[b000000010]")
    second = walk("click[next >]", session=RESULTS)
    assert clickables(second, SHELF)[1:4] == ["< prev", "next >", "b000000010"]
    assert walk("click[< prev]", session=second) == RESULTS
    last = walk(*["click[next >]"] * 4, session=RESULTS)
    assert clickables(last, SHELF)[-1] == "b000000049" and refused(last, "click[next >]")


def test_ten_hits_have_no_next_page_and_none_have_no_products() -> None:
    ten = Shelf(SHELF.products[:10])
    assert "Next >" not in text(walk("search[shoes]", shop=ten), ten)
    assert text(walk("search[zebra]"), SHELF) == "Back to Search [SEP] Page 1 (Total results: 0)"


def test_an_item_shows_options_price_and_sub_pages() -> None:
    assert text(ITEM, SHELF).split(pages.SEPARATOR) == [
        *("Back to Search", "< Prev", "size", "9.5", "10", "color", "navy blue", "light pink"),
        *("Trail Shoes 3", "Price: $20.0", "Rating: N.A."),
        *("Description", "Features", "Reviews", "Attributes", "Buy Now"),
    ]
    assert readable(walk("click[10]", session=ITEM), SHELF).splitlines()[2:5] == ["size", "[9.5]", "[10]*"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("description", "Shoes for every trail."),
        ("features", "Rubber sole [SEP] Machine washable"),
        ("reviews", "There are no reviews."),
        (
            "attributes",
            "arch support [SEP] slip resistant [SEP] fashion [SEP] trail shoes [SEP] Clothing › Men › Shoes",
        ),
    ],
)
def test_sub_pages_lead_back_to_the_item_with_its_options(name: str, shown: str) -> None:
    chosen = walk("click[10]", session=ITEM)
    page = walk(f"click[{name}]", session=chosen)
    assert text(page, SHELF) == f"Back to Search [SEP] < Prev [SEP] {shown}"
    assert walk("click[< prev]", session=page) == chosen
    assert walk("click[back to search]", session=page) == START
    assert refused(page, "click[buy now]")


def test_empty_sub_pages_say_so() -> None:
    shop = Shelf([product(description="", bullets=("",))])
    item = walk("search[shoes]", "click[b000000001]", shop=shop)
    assert "There is no description." in text(walk("click[description]", session=item, shop=shop), shop)
    assert "There are no features." in text(walk("click[features]", session=item, shop=shop), shop)


def test_the_last_click_of_a_group_counts() -> None:
    assert walk("click[9.5]", "click[navy blue]", "click[10]", session=ITEM).options == {
        "size": "10",
        "color": "navy blue",
    }


def test_options_are_forgotten_when_results_are_shown() -> None:
    chosen = walk("click[10]", session=ITEM)
    assert walk("click[< prev]", session=chosen) == RESULTS
    assert walk("search[shoes]", session=chosen) == RESULTS
    assert walk("click[< prev]", "click[b000000004]", session=chosen).options == {}
    assert walk("click[back to search]", session=chosen) == START


def test_the_page_of_results_is_kept_over_an_item() -> None:
    second = walk("click[next >]", session=RESULTS)
    assert walk("click[b000000012]", "click[< prev]", session=second) == second


def test_a_search_works_on_every_page_but_the_last() -> None:
    for session in (START, RESULTS, ITEM, walk("click[reviews]", session=ITEM)):
        assert walk("search[shoes]", session=session) == RESULTS
    done = walk("click[buy now]", session=ITEM)
    assert done.page == "done" and refused(done, "search[shoes]") and refused(done, "click[back to search]")
    assert text(replace(done, score=0.75), SHELF).endswith("[SEP] 0.75")


def test_a_value_in_two_groups_belongs_to_the_last() -> None:
    shop = Shelf([product(options={"size": ("small",), "fit": ("small",)})])
    item = walk("search[shoes]", "click[b000000001]", "click[small]", shop=shop)
    assert item.options == {"fit": "small"}


def test_a_value_named_like_a_button_is_only_text() -> None:
    shop = Shelf([product(options={"gift": ("buy now", "description", "yes")})])
    item = walk("search[shoes]", "click[b000000001]", shop=shop)
    assert clickables(item, shop).count("buy now") == 1
    assert walk("click[description]", session=item, shop=shop).page == "description"


def test_injected_text_is_text() -> None:
    shop = Shelf([product(title=f"Shoes [SEP] {INJECTION}", options={"size": (INJECTION.lower(),)})])
    results = walk("search[shoes]", shop=shop)
    assert clickables(results, shop) == ["back to search", "b000000001"]
    assert refused(results, "click[buy now]", shop)
    item = walk("click[b000000001]", f"click[{INJECTION}]", session=results, shop=shop)
    assert item.options == {"size": INJECTION.lower()} and item.page == "item"


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("search[red shoes]", Action("search", "red shoes")),
        ("I think so.\n\nclick[Buy Now]", Action("click", "buy now")),
        ("click[x]\nsearch[y]\n \n", Action("search", "y")),
        ("Action: click[< Prev]", Action("click", "< prev")),
        (" **`CLICK [ a  b\t]`** ", Action("click", "a b")),
        ("search[a [b] c]", Action("search", "a [b] c")),
        ("click[a]b]", Action("click", "a]b")),
        ("search[\x00a\x07b]", Action("search", "a b")),
    ],
)
def test_the_action_is_the_last_line(answer: str, action: Action) -> None:
    assert parse(answer) == action
    assert str(action) == f"{action.verb}[{action.argument}]"


@pytest.mark.parametrize(
    "answer",
    [
        *("", "\n\n", "buy now", "click", "click[]", "search[]", "search[ \t ]", "search[\x00]", "click[buy now"),
        *("click[buy now]\nand that is it", "press[buy now]", "I click[buy now]", "x" * 100_000),
        *("search[" + "x" * 401 + "]", "search[" + "x" * 100_000 + "]", "click[" * 20_000, "[" * 100_000),
    ],
)
def test_other_answers_are_no_action(answer: str) -> None:
    assert parse(answer) is None


def test_only_the_end_of_a_very_long_answer_is_read() -> None:
    assert parse("so " * 50_000 + "\nclick[buy now]") == Action("click", "buy now")
    assert parse("search[" + "x" * 400 + "]") == Action("search", "x" * 400)
