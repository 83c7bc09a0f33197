"""The reward of a purchase as published with WebShop: type × (attributes + options + price) / (their number).

Text is compared by token-set ratio as thefuzz does by default: lower case, punctuation to spaces ("5" and "5.5" are
alike). Deviations from the original code: no attributes to match is no crash, and a price limit is always positive.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rapidfuzz import fuzz, utils

from empo2_jax.envs.webshop.goals import Goal
from empo2_jax.envs.webshop.nouns import Nouns
from empo2_jax.envs.webshop.product import Product

ALIKE = 85  # texts match above this ratio (0–100)

# In the order in which the original looks for them; the first one inside a text stands for the text.
_COLORS = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel "
    "camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry "
    "cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey "
    "heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight "
    "mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow "
    "red rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal "
    "tiger turquoise violet walnut wheat white wine yellow"
)
COLORS = tuple(_COLORS.split())


@dataclass(frozen=True)
class Reward:
    """The parts of a purchase's reward; `total` is between 0 and 1."""

    type: float  # 1, 0.5, 0.1 or 0
    attributes: int  # of the goal, found
    options: int  # of the goal, chosen
    price: bool  # within the limit
    parts: int  # what could be matched: attributes, options and the price

    @property
    def total(self) -> float:
        """The reward."""
        return self.type * (self.attributes + self.options + self.price) / self.parts


def reward(bought: Product, chosen: Sequence[str], goal: Goal, wanted: Product, nouns: Nouns) -> Reward:
    """What buying `bought` with the option values `chosen` is worth, given `goal`, which was made from `wanted`."""
    return Reward(
        type=type_factor(bought, wanted, nouns),
        attributes=matched_attributes(bought, goal.attributes),
        options=matched_options(chosen, goal.options),
        price=goal.limit is None or bought.price <= goal.limit,
        parts=len(goal.attributes) + len(goal.options) + 1,
    )


def likeness(one: str, other: str) -> float:
    """Token-set ratio of two texts, 0 to 100."""
    return fuzz.token_set_ratio(one, other, processor=utils.default_process)


def alike(one: str, other: str) -> bool:
    """Whether two texts match."""
    return likeness(one, other) > ALIKE


def type_factor(bought: Product, wanted: Product, nouns: Nouns) -> float:
    """How far two products are of one type: by query, category path and the nouns of their titles."""
    asked = nouns(wanted.title)
    shared = len(set(asked) & set(nouns(bought.title))) / len(asked) if asked else 0.2
    if shared == 0.0:
        return 0.0
    if shared < 0.1:
        return 0.1
    same_query = bought.query == wanted.query
    same_category = len(_path(bought) & _path(wanted)) >= 2
    return 1.0 if same_query or same_category or shared > 0.2 else 0.5


def matched_attributes(bought: Product, asked: Sequence[str]) -> int:
    """How many of the asked attributes the product has in its attributes, or word for word in its texts."""
    texts = (bought.title.lower(), " ".join(bought.bullets).lower(), bought.description.lower())
    return sum(
        any(alike(has, attribute) for has in bought.attributes) or any(attribute in text for text in texts)
        for attribute in asked
    )


def matched_options(chosen: Sequence[str], asked: Sequence[str]) -> int:
    """How many of the asked option values are like one of the chosen ones; colors count by their first color word."""
    values = [first_color(value) for value in chosen]
    return sum(any(alike(value, first_color(option)) for value in values) for option in asked)


def first_color(text: str) -> str:
    """The first of `COLORS` inside the text, else the text."""
    return next((color for color in COLORS if color in text), text)


def _path(product: Product) -> set[str]:
    return {part.strip() for part in product.product_category.split("›")}
