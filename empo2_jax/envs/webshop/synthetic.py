"""A made-up catalogue in the files and format of WebShop: for tests, quick runs and trying things without its data.

Everything is a function of (count, seed). Products come in families that differ in attributes, options and price, so
that search alone does not solve a goal, but every goal can be met exactly.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from empo2_jax.cache import cache_folder
from empo2_jax.errors import ConfigError
from empo2_jax.randomness import generator

VERSION = 1
DEFAULT_COUNT, DEFAULT_SEED = 400, 0


class Kind(NamedTuple):
    """A family of products."""

    noun: str
    category: str
    path: str
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]


_COLORS = ("black", "navy blue", "forest green", "light pink", "white", "burgundy")
_SHOES = {"size": ("6.5", "7", "8", "9.5", "10"), "color": _COLORS}
_CLOTHES = {"size": ("small", "medium", "large", "x-large"), "color": _COLORS}
_PACKS = {"size": ("pack of 1", "pack of 6", "pack of 12"), "flavor": ("vanilla", "sea salt", "chocolate", "mango")}
_FURNITURE = {"color": ("walnut", "white", "espresso", "grey"), "size": ('24"/36"', '30"/48"', '36"/60"')}

KINDS = (
    Kind(
        "running shoes",
        "fashion",
        "Clothing, Shoes & Jewelry › Women › Shoes › Athletic",
        ("rubber sole", "arch support", "slip resistant", "machine washable"),
        _SHOES,
    ),
    Kind(
        "hiking boots",
        "fashion",
        "Clothing, Shoes & Jewelry › Men › Shoes › Outdoor",
        ("rubber sole", "water resistant", "steel toe", "memory foam"),
        _SHOES,
    ),
    Kind(
        "hooded jacket",
        "fashion",
        "Clothing, Shoes & Jewelry › Men › Clothing › Jackets",
        ("long sleeve", "machine washable", "fleece lined", "elastic waist"),
        _CLOTHES,
    ),
    Kind(
        "summer dress",
        "fashion",
        "Clothing, Shoes & Jewelry › Women › Clothing › Dresses",
        ("short sleeve", "hand washable", "elastic waist", "floral print"),
        _CLOTHES,
    ),
    Kind(
        "protein bars",
        "grocery",
        "Grocery & Gourmet Food › Snack Foods › Bars › Protein",
        ("gluten free", "low sugar", "high protein", "non gmo"),
        _PACKS,
    ),
    Kind(
        "roasted almonds",
        "grocery",
        "Grocery & Gourmet Food › Snack Foods › Nuts & Seeds › Almonds",
        ("gluten free", "low sodium", "non gmo", "resealable bag"),
        _PACKS,
    ),
    Kind(
        "hair serum",
        "beauty",
        "Beauty & Personal Care › Hair Care › Treatments › Serums",
        ("sulfate free", "cruelty free", "argan oil", "dry hair"),
        {"size": ("2 fl oz", "4 fl oz", "8 fl oz")},
    ),
    Kind(
        "bluetooth speaker",
        "electronics",
        "Electronics › Portable Audio › Speakers › Bluetooth",
        ("stereo sound", "long battery", "hands free", "water resistant"),
        {"color": _COLORS[:4]},
    ),
    Kind(
        "coffee table",
        "garden",
        "Home & Kitchen › Furniture › Living Room › Tables",
        ("easy assembly", "solid wood", "storage space", "metal legs"),
        _FURNITURE,
    ),
    Kind(
        "usb cable",
        "electronics",
        "Electronics › Accessories › Cables › USB",
        ("fast charging", "gold plated", "high speed", "nylon braided"),
        {},
    ),
)
_BRANDS = ("Alderwick", "Brontel", "Cassivo", "Dunmere", "Elvanto", "Fennrick", "Gladehill", "Hartwyn", "Ilsmoor")
_WISHES = ("i am looking for", "i need", "please find me", "i want to buy")


def make(folder: Path, count: int = DEFAULT_COUNT, seed: int = DEFAULT_SEED) -> None:
    """Write the three files for `count` products to a new or empty folder."""
    if count < 1:
        raise ConfigError(f"{count} products: at least 1 is allowed")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: not empty")
    folder.mkdir(parents=True, exist_ok=True)
    attributes: dict[str, Any] = {}
    human: dict[str, Any] = {}
    with (folder / "items_shuffle.json").open("w", encoding="utf-8") as file:
        file.write("[")
        for number in range(count):
            rng = generator(seed, "webshop-product", number)
            kind = KINDS[int(rng.integers(len(KINDS)))]
            product, attributes[product["asin"]] = _product(kind, number, rng)
            wishes = _human(kind, product, attributes[product["asin"]]["attributes"], rng)
            if wishes:
                human[product["asin"]] = wishes
            file.write((",\n" if number else "") + json.dumps(product, ensure_ascii=False))
        file.write("]\n")
    (folder / "items_ins_v2.json").write_text(json.dumps(attributes), encoding="utf-8")
    (folder / "items_human_ins.json").write_text(json.dumps(human), encoding="utf-8")


def ensure(count: int = DEFAULT_COUNT) -> Path:
    """The folder of the catalogue of `count` products in the cache, made when first needed."""
    folder = cache_folder("webshop") / f"synthetic-v{VERSION}-{count}-{DEFAULT_SEED}"
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        make(partial, count)
        try:
            partial.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(partial)
    return folder


def _product(kind: Kind, number: int, rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    has = sorted(rng.choice(kind.attributes, int(rng.integers(2, 4)), replace=False).tolist())
    options = {
        group: sorted(rng.permutation(values)[: int(rng.integers(2, 5))]) for group, values in kind.options.items()
    }
    brand, price = str(rng.choice(_BRANDS)), round(float(rng.uniform(5, 150)), 2)
    prices = ("", f"${price}${price + 12:.2f}", f"${price}")[min(2, int(rng.integers(12)))]
    title = f"{brand} {kind.noun.title()}, {has[0].title()}, Model {number}"
    product = {
        "asin": f"B{number:09d}",
        "name": title,
        "full_description": f"These {kind.noun} by {brand} are made for every day. They come with {has[0]}.",
        "small_description": [f"Known for {attribute}" for attribute in has],
        "category": kind.category,
        "query": kind.noun,
        "product_category": kind.path,
        "pricing": prices,
        "customization_options": {
            group: [{"value": str(value), "image": None} for value in values] for group, values in options.items()
        },
        "images": [""],
    }
    asked = has[:2]
    attributes = {
        "attributes": has,
        "instruction": f"Find me {', '.join(asked)} {kind.noun}" if number % 2 == 0 else None,
        "instruction_attributes": asked if number % 2 == 0 else None,
    }
    return product, attributes


def _human(kind: Kind, product: dict[str, Any], has: list[str], rng: np.random.Generator) -> list[dict[str, Any]]:
    wishes = []
    for _ in range(int(rng.integers(1, 3))):
        asked = sorted(rng.choice(has, int(rng.integers(1, len(has) + 1)), replace=False).tolist())
        chosen = [str(rng.choice([value["value"] for value in values])) for values in _values(product)]
        wanted = f"{rng.choice(_WISHES)!s} {kind.noun} with {' and '.join(asked)}"
        instruction = wanted + (f" in {', '.join(chosen)}" if chosen else "") + "."
        wishes.append(
            {
                "instruction": instruction,
                "instruction_attributes": asked,
                "instruction_options": [value.replace("/", " | ") for value in chosen],
            }
        )
    return wishes


def _values(product: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return list(product["customization_options"].values())
