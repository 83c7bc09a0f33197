"""What a shopper is asked to buy: human instructions, or one per combination of a product's options.

A goal's text, price limit and place in the splits are functions of the data alone: every process sees the same goals,
and no goal is in two splits (the copy of verl-agent shuffles per worker, so its training and evaluation overlap).
Positions below `TEST` are for evaluation, as in the paper; the last ones are the dev split.
"""

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from empo2_jax.envs.webshop.product import Product
from empo2_jax.randomness import generator

KINDS = ("human", "synthetic")
ORDERS = ("", "-original-order")  # suffix of a kind
TEST = 500  # goals of the test split where there are enough
DEV = 500

_LIMITS = tuple(10.0 * step for step in range(1, 100))  # dollars that a limit can be
_SEED = 233  # of the original's shuffle


@dataclass(frozen=True)
class Goal:
    """An instruction and what a purchase is measured by; `product` is the number of the product behind it."""

    id: str
    product: int
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    limit: float | None  # dollars; None: the price does not matter


def goal_id(asin: str, instruction: str, options: Sequence[str]) -> str:
    """16 hexadecimal digits that name a goal in every process and version of the data."""
    text = "\x00".join([asin, instruction, *options])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def price_limit(identity: str, price: float) -> float | None:
    """The larger of two draws from the first four tens above the price; None if fewer than two are left."""
    above = [limit for limit in _LIMITS if limit > price][:4]
    if len(above) < 2:
        return None
    return above[int(np.max(generator(0, "webshop-limit", identity).choice(len(above), 2, replace=False)))]


def human_records(number: int, instructions: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Records of the human goals of one product; instructions without attributes are none."""
    for raw in instructions:
        if raw["instruction_attributes"]:
            yield {
                "product": number,
                "instruction": raw["instruction"],
                "attributes": raw["instruction_attributes"],
                "options": raw["instruction_options"],
            }


def count_combinations(product: Product) -> int:
    """How many choices of one value per option group there are; 1 without groups."""
    return math.prod(len(values) for values in product.options.values())


def combination(product: Product, number: int) -> tuple[str, ...]:
    """The choice of a number: one value per group, groups by name, the last one changing fastest."""
    chosen = []
    for group in sorted(product.options, reverse=True):
        number, place = divmod(number, len(product.options[group]))
        chosen.append(product.options[group][place])
    return tuple(reversed(chosen))


class Goals:
    """All goals of one kind in one order, made when asked for.

    A record names product, instruction and attributes, with either its options or, if synthetic, none: then `ends`
    counts the goals up to and including each record.
    """

    def __init__(
        self,
        kind: str,
        records: Sequence[Mapping[str, Any]],
        ends: Int64[np.ndarray, " records"] | None,
        product: Callable[[int], Product],
        original_order: bool,
    ) -> None:
        self.kind, self._records, self._ends, self._product = kind, records, ends, product
        count = int(ends[-1]) if ends is not None and len(ends) else len(records)
        self._order = _original(count) if original_order else generator(0, "webshop-goals", kind).permutation(count)
        if ends is None:
            self._order = self._distinct()
        test, dev = min(TEST, len(self) // 3), min(DEV, len(self) // 6)
        first, last = range(test), range(len(self) - dev, len(self))
        self._splits = {"test": first, "train": range(first.stop, last.start), "dev": last}
        assert 0 <= first.stop <= last.start <= len(self), "splits overlap"

    def __len__(self) -> int:
        return len(self._order)

    def split(self, name: str) -> range:
        """Positions of "train", "dev" or "test"."""
        return self._splits[name]

    def __getitem__(self, position: int) -> Goal:
        if not 0 <= position < len(self):
            raise IndexError(position)
        number = int(self._order[position])
        return self._human(number) if self._ends is None else self._synthetic(number, self._ends)

    def _human(self, number: int) -> Goal:
        record = self._records[number]
        return self._goal(record, record["instruction"].strip(".").strip(), tuple(record["options"]))

    def _synthetic(self, number: int, ends: Int64[np.ndarray, " records"]) -> Goal:
        place = int(np.searchsorted(ends, number, side="right"))
        record = self._records[place]
        product = self._product(record["product"])
        chosen = combination(product, number - (int(ends[place - 1]) if place else 0))
        named = ", and ".join(f"{group}: {value}" for group, value in zip(sorted(product.options), chosen, strict=True))
        return self._goal(record, record["instruction"] + (f" with {named}" if named else ""), chosen)

    def _goal(self, record: Mapping[str, Any], instruction: str, options: tuple[str, ...]) -> Goal:
        product = self._product(record["product"])
        identity = goal_id(product.asin, instruction, options)
        limit = price_limit(identity, product.price)
        clause = "" if limit is None else f", and price lower than {limit:.2f} dollars"
        return Goal(identity, record["product"], instruction + clause, tuple(record["attributes"]), options, limit)

    def _distinct(self) -> Int64[np.ndarray, " goals"]:
        """The order without goals that occurred before: the same words for the same product."""
        seen, kept = set(), []
        for number in self._order.tolist():
            record = self._records[number]
            key = (record["product"], record["instruction"].strip(".").strip(), *record["options"])
            if key not in seen:
                seen.add(key)
                kept.append(number)
        return np.asarray(kept, np.int64)


def _original(count: int) -> Int64[np.ndarray, " count"]:
    """The order of the original's seeded shuffle of its list."""
    order = list(range(count))
    random.Random(_SEED).shuffle(order)  # noqa: S311  (theirs)
    return np.asarray(order, np.int64)
