"""The shop as a pure state machine: a session, what its page shows, and where an action leads.

Pages: search, results (50 hits, 10 a page), item, its sub pages, done. `search[text]` works on every page and
`click[thing]` on what the page shows, both in lower case; anything else leads nowhere. Showing results forgets chosen
options; the last click in a group of options counts. No text of a product is ever anything but text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from empo2_jax.envs.webshop.product import Product

PER_PAGE = 10
LONGEST = 400  # characters of an action's argument
SEPARATOR = " [SEP] "

BACK, NEXT, PREVIOUS, BUY = "Back to Search", "Next >", "< Prev", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")

_ACTION = re.compile(r"(?:action\s*:\s*)?(search|click)\s*\[(.*)\]", re.IGNORECASE)
_EDGES = " \t`*\"'."
_SPACE = re.compile(r"[\s\x00-\x1f\x7f]+")

Page = Literal["search", "results", "item", "description", "features", "reviews", "attributes", "done"]


@runtime_checkable
class Shop(Protocol):
    """What pages need of a catalogue."""

    def product(self, number: int) -> Product:
        """The product of a number."""
        ...

    def search(self, text: str) -> list[int]:
        """Numbers of the products found, best first."""
        ...


class Action(NamedTuple):
    """A well-formed action; `argument` is lower case and not empty."""

    verb: str  # search or click
    argument: str

    def __str__(self) -> str:
        return f"{self.verb}[{self.argument}]"


class Part(NamedTuple):
    """One visible string; `click` is what `click[…]` must hold, "" for plain text."""

    text: str
    click: str = ""
    kind: Literal["text", "button", "product", "option", "chosen"] = "text"


@dataclass(frozen=True)
class Session:
    """Where a shopper is. `hits` and `product` are product numbers; `options` the values chosen, by group."""

    instruction: str
    page: Page = "search"
    query: str = ""
    hits: tuple[int, ...] = ()
    number: int = 1  # page of the results
    product: int = -1
    options: Mapping[str, str] = field(default_factory=dict)
    score: float = 0.0  # reward of the purchase, once the page is done


def parse(answer: str) -> Action | None:
    """The action on the last line of an answer; what stands before it is thought. None if there is none."""
    lines = [line for line in answer[-4 * LONGEST :].splitlines() if line.strip(_EDGES)]
    match = _ACTION.fullmatch(lines[-1].strip(_EDGES)) if lines else None
    if match is None or len(match[2]) > LONGEST:
        return None
    argument = _SPACE.sub(" ", match[2]).strip().lower()
    return Action(match[1].lower(), argument) if argument else None


def act(session: Session, action: Action, shop: Shop) -> Session | None:
    """The session after an action; None if the page has no such thing to click, or the purchase is done."""
    if session.page == "done":
        return None
    if action.verb == "search":
        hits = tuple(shop.search(action.argument))
        return replace(session, page="results", query=action.argument, hits=hits, number=1, product=-1, options={})
    part = next((part for part in view(session, shop) if part.click == action.argument), None)
    return None if part is None else _click(session, part, shop)


def _click(session: Session, part: Part, shop: Shop) -> Session:
    if part.kind == "button":
        return _button(session, part.text)
    if part.kind == "product":
        number = next(hit for hit in _shown(session) if shop.product(hit).asin == part.text)
        return replace(session, page="item", product=number)
    groups = shop.product(session.product).options
    group = next(group for group in reversed(list(groups)) if part.click in groups[group])
    return replace(session, options={**session.options, group: part.click})


def _button(session: Session, name: str) -> Session:
    if name == BACK:
        return Session(session.instruction)
    if name == BUY:
        return replace(session, page="done")
    if name == NEXT:
        return replace(session, number=session.number + 1)
    if name == PREVIOUS and session.page == "results":
        return replace(session, number=session.number - 1)
    if name == PREVIOUS and session.page == "item":
        return replace(session, page="results", product=-1, options={})
    pages: dict[str, Page] = {
        PREVIOUS: "item",
        "Description": "description",
        "Features": "features",
        "Reviews": "reviews",
        "Attributes": "attributes",
    }
    return replace(session, page=pages[name])


def view(session: Session, shop: Shop) -> list[Part]:
    """The page's strings in reading order, below the instruction; where two could be clicked alike, the first is."""
    if session.page == "search":
        return [Part("Search")]
    if session.page == "done":
        score = f"{session.score:.4g}"
        return [Part("Thank you for shopping with us!"), Part("Your score (min 0, max 1)"), Part(score)]
    if session.page == "results":
        return _results(session, shop)
    product = shop.product(session.product)
    if session.page == "item":
        return _item(session, product)
    texts = {
        "description": [product.description or "There is no description."],
        "features": list(filter(None, product.bullets)) or ["There are no features."],
        "reviews": ["There are no reviews."],
        "attributes": [*product.attributes, product.category, product.query, product.product_category],
    }
    return [_button_part(BACK), _button_part(PREVIOUS), *map(Part, texts[session.page])]


def _results(session: Session, shop: Shop) -> list[Part]:
    parts = [_button_part(BACK), Part(f"Page {session.number} (Total results: {len(session.hits)})")]
    if session.number > 1:
        parts.append(_button_part(PREVIOUS))
    if session.number * PER_PAGE < len(session.hits):
        parts.append(_button_part(NEXT))
    for number in _shown(session):
        product = shop.product(number)
        parts += [Part(product.asin, product.asin.lower(), "product"), Part(product.title), Part(product.price_tag)]
    return parts


def _item(session: Session, product: Product) -> list[Part]:
    parts = [_button_part(BACK), _button_part(PREVIOUS)]
    own = {name.lower() for name in (BACK, PREVIOUS, BUY, *SUB_PAGES)}
    for group, values in product.options.items():
        parts.append(Part(group))
        chosen = session.options.get(group)
        for value in values:  # a value named like a button of the shop cannot be clicked
            parts.append(Part(value, "" if value in own else value, "chosen" if value == chosen else "option"))
    parts += [Part(product.title), Part(f"Price: {product.price_tag}"), Part("Rating: N.A.")]
    return [*parts, *map(_button_part, SUB_PAGES), _button_part(BUY)]


def _button_part(name: str) -> Part:
    return Part(name, name.lower(), "button")


def _shown(session: Session) -> Sequence[int]:
    return session.hits[(session.number - 1) * PER_PAGE : session.number * PER_PAGE]


def text(session: Session, shop: Shop) -> str:
    """The page as the original's text observation, without the instruction: its strings joined by " [SEP] "."""
    return SEPARATOR.join(part.text for part in view(session, shop))


def readable(session: Session, shop: Shop) -> str:
    """The page for people: a line per string, what can be clicked in brackets, chosen options starred."""
    lines = []
    for part in view(session, shop):
        star = "*" if part.kind == "chosen" else ""
        lines.append(f"[{part.text}]{star}" if part.click else part.text)
    return "\n".join(lines)


def clickables(session: Session, shop: Shop) -> list[str]:
    """What can be clicked, in reading order, each once."""
    return list(dict.fromkeys(part.click for part in view(session, shop) if part.click))
