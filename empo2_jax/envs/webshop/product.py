"""What a product and an instruction are: the files' records checked field by field, and what follows from them.

Everything that ends up on a page is text on one line without control characters.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from empo2_jax.errors import DataError, short
from empo2_jax.randomness import uniform

DEFAULT_PRICE = 100.0  # dollars, of a product whose price is not given
NO_ATTRIBUTES = ("DUMMY_ATTR",)  # what the original gives a product without attributes
LONGEST_ASIN = 10

_UNPRINTABLE = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u2028\u2029\u200b-\u200f\u202a-\u202e\u2066-\u2069]+")
_PRICE = re.compile(r"\$([^$]*)")


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class RawOption(_Record):
    """One value of an option; its picture is not used."""

    value: str


class RawProduct(_Record):
    """A record of items_shuffle*.json."""

    asin: str
    name: str
    full_description: str | None
    small_description: list[str] | str | None
    category: str
    query: str
    product_category: str
    pricing: str | None = None
    customization_options: dict[str, list[RawOption] | None] | None

    @field_validator("customization_options", mode="before")
    @classmethod
    def _empty(cls, value: Any) -> Any:
        return value or None


class RawAttributes(_Record):
    """A value of items_ins_v2*.json."""

    attributes: list[str] | None = None
    instruction: str | None = None
    instruction_attributes: list[str] | None = None


class RawInstruction(_Record):
    """One instruction that a person wrote, of items_human_ins.json."""

    instruction: str
    instruction_attributes: list[str]
    instruction_options: list[str] = Field(default_factory=list)


def clean(text: str) -> str:
    """The text on one line, without control and direction characters."""
    return _UNPRINTABLE.sub(" ", text).strip()


@dataclass(frozen=True)
class Product:
    """A product as the shop knows it. Prices in dollars: none, one, or the ends of a range."""

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    category: str
    query: str
    product_category: str  # path, parts joined by "›"
    prices: tuple[float, ...]
    options: Mapping[str, tuple[str, ...]]  # values by group, lower case
    attributes: tuple[str, ...]

    @property
    def price_tag(self) -> str:
        """The price as pages show it."""
        return " to ".join(f"${price}" for price in self.prices or (DEFAULT_PRICE,))

    @property
    def price(self) -> float:
        """What it costs: of a range a value drawn once and for all, a function of the product alone."""
        if len(self.prices) < 2:
            return self.prices[0] if self.prices else DEFAULT_PRICE
        low, high = self.prices
        return low + (high - low) * uniform(0, "webshop-price", self.asin)

    @property
    def search_text(self) -> str:
        """What the search engine reads: title, description, first bullet point and options."""
        options = ", and ".join(f"{group}: {', '.join(values)}" for group, values in self.options.items())
        return " ".join([self.title, self.description, *self.bullets[:1], options]).lower()

    def to_record(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Product":
        """The inverse of `to_record`."""
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in record.items()
        }
        fields["options"] = {group: tuple(values) for group, values in record["options"].items()}
        return cls(**fields)


def usable(asin: str) -> bool:
    """Whether a record is a product: the files hold some that the original passes over too."""
    return asin != "nan" and 0 < len(asin) <= LONGEST_ASIN


def make_product(raw: RawProduct, attributes: RawAttributes | None, where: str) -> Product:
    """A product from its two records; `where` names the place in errors about its price."""
    points = raw.small_description if isinstance(raw.small_description, list) else [raw.small_description or ""]
    return Product(
        asin=raw.asin,
        title=clean(raw.name),
        description=clean(raw.full_description or ""),
        bullets=tuple(clean(point) for point in points),
        category=raw.category,
        query=raw.query.lower().strip(),
        product_category=raw.product_category,
        prices=parse_prices(raw.pricing, where),
        options=_options(raw),
        attributes=_attributes(attributes),
    )


def parse_prices(text: str | None, where: str) -> tuple[float, ...]:
    """The first two numbers after dollar signs ("$12.99$20.00"); () for no text."""
    if not text:
        return ()
    numbers = []
    for part in _PRICE.findall(text)[:2]:
        digits = re.sub(r"[^\d.]", "", part)
        try:
            numbers.append(float(digits))
        except ValueError:
            raise DataError(f"{where}: pricing = {short(text)}: not a number of dollars") from None
    if not numbers or not all(map(math.isfinite, numbers)):
        raise DataError(f"{where}: pricing = {short(text)}: $NUMBER or $NUMBER$NUMBER is allowed")
    return tuple(numbers)


def _options(raw: RawProduct) -> dict[str, tuple[str, ...]]:
    options: dict[str, tuple[str, ...]] = {}
    for group, contents in (raw.customization_options or {}).items():
        values = [clean(content.value.strip().replace("/", " | ").lower()) for content in contents or ()]
        if any(values):
            options[clean(group.lower())] = tuple(dict.fromkeys(filter(None, values)))
    return options


def _attributes(raw: RawAttributes | None) -> tuple[str, ...]:
    if raw is None or raw.attributes is None:
        return NO_ATTRIBUTES
    return tuple(map(clean, raw.attributes))
