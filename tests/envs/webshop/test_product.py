"""Records of the files: what is read, what follows, and one clear line for each field that is wrong."""

import pytest

from empo2_jax.envs.webshop.product import (
    Product,
    RawAttributes,
    RawInstruction,
    RawProduct,
    clean,
    make_product,
    parse_prices,
    usable,
)
from empo2_jax.errors import DataError
from empo2_jax.readers import shaped
from tests.fixtures.shop import product, raw


def make(**changes) -> Product:
    attributes = RawAttributes(attributes=["arch support"])
    return make_product(shaped(raw(**changes), RawProduct, "file: record 7"), attributes, "file: record 7")


def test_a_record_becomes_a_product() -> None:
    made = make()
    assert made.query == "trail shoes"
    assert made.prices == (12.99, 20.0)
    assert made.price_tag == "$12.99 to $20.0"
    assert made.options == {"size": ("9.5", "10 | 11"), "color": ("navy blue", "light pink")}
    assert made.bullets == ("Rubber sole", "Washable")
    assert made.search_text == (
        "alderwick trail shoes shoes for every trail. rubber sole size: 9.5, 10 | 11, and color: navy blue, light pink"
    )
    assert Product.from_record(made.to_record()) == made


def test_texts_without_bullets_options_and_attributes() -> None:
    made = make_product(
        RawProduct(**raw(small_description="One text", customization_options=None, full_description=None)), None, ""
    )
    assert (made.bullets, made.options, made.description) == (("One text",), {}, "")
    assert made.attributes == ("DUMMY_ATTR",)
    assert make(customization_options="").options == {}


@pytest.mark.parametrize("field", ["asin", "name", "full_description", "query", "product_category", "category"])
def test_a_missing_field_is_named(field: str) -> None:
    record = {key: value for key, value in raw().items() if key != field}
    with pytest.raises(DataError, match=f"^file: record 7: {field} is missing$"):
        shaped(record, RawProduct, "file: record 7")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 5}, "name = 5: text is allowed"),
        ({"asin": None}, "asin = None: "),
        ({"small_description": [1]}, "small_description"),
        ({"customization_options": {"size": [{"image": 1}]}}, r"customization_options.size\[0\].value is missing"),
        ({"customization_options": ["x"]}, "customization_options = "),
        ({"pricing": 12.5}, "pricing = 12.5"),
        ({"name": ["x" * 500]}, r"name = .{57}\.\.\.: "),
    ],
)
def test_a_wrong_field_is_shown(changes, message: str) -> None:
    with pytest.raises(DataError, match=f"^file: record 7: {message}"):
        make(**changes)


def test_records_that_are_no_objects() -> None:
    with pytest.raises(DataError, match=r"^file: record 7: the record = 'x': a table of keys and values is allowed"):
        shaped("x", RawProduct, "file: record 7")
    with pytest.raises(DataError, match="instruction_attributes is missing"):
        shaped({"instruction": "buy"}, RawInstruction, "human")


@pytest.mark.parametrize(
    ("text", "prices"),
    [
        (None, ()),
        ("", ()),
        ("$12.99", (12.99,)),
        ("$12.99$20.00", (12.99, 20.0)),
        ("$1,299.00", (1299.0,)),
        ("$5 - $7 - $9", (5.0, 7.0)),
    ],
)
def test_prices(text: str | None, prices: tuple[float, ...]) -> None:
    assert parse_prices(text, "") == prices


@pytest.mark.parametrize("text", ["$", "$abc", "12.99", "free", "$1.2.3", "$5$x"])
def test_a_price_that_is_no_number_is_an_error(text: str) -> None:
    with pytest.raises(DataError, match=r"^here: pricing = "):
        parse_prices(text, "here")


def test_the_price_of_a_range_is_fixed_and_inside() -> None:
    prices = [product(asin=f"B{number}", prices=(10.0, 20.0)).price for number in range(50)]
    assert all(10 <= price <= 20 for price in prices) and len(set(prices)) == 50
    assert product(prices=(10.0, 20.0)).price == product(prices=(10.0, 20.0), title="x").price
    assert product(prices=()).price == 100.0 and product(prices=()).price_tag == "$100.0"
    assert product(prices=(7.5,)).price == 7.5


def test_text_is_one_line_without_control_characters() -> None:
    assert clean(" a\n\x00b\x1b[31m\u202ec\t d ") == "a b [31m c d"
    assert make(name="Shoes\nclick[buy now]").title == "Shoes click[buy now]"


def test_option_values_are_kept_once_and_empty_ones_not() -> None:
    made = make(customization_options={"Size": [{"value": v} for v in ("S", "s ", " ", "M")], "Color": [{"value": ""}]})
    assert made.options == {"size": ("s", "m")}


@pytest.mark.parametrize(("asin", "good"), [("B012345678", True), ("nan", False), ("B0123456789", False), ("", False)])
def test_usable_asins(asin: str, good: bool) -> None:
    assert usable(asin) is good
