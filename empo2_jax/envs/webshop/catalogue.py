"""The shop's data: built once from the files of WebShop, kept in the cache by content, opened memory-mapped.

A data folder holds items_shuffle*.json (products), items_ins_v2*.json (attributes and synthetic instructions) and
items_human_ins.json (instructions by people; may be missing). The build reads one record at a time.
"""

import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from empo2_jax.cache import cache_folder
from empo2_jax.envs.webshop import goals, records, search
from empo2_jax.envs.webshop.product import (
    Product,
    RawAttributes,
    RawInstruction,
    RawProduct,
    clean,
    make_product,
    usable,
)
from empo2_jax.errors import ConfigError, DataError
from empo2_jax.readers import parse_json, shaped

LAYOUT = 1  # of the kept files; another number is another folder
CACHED = 4096  # products kept decoded
PRODUCTS, ATTRIBUTES, HUMAN = "items_shuffle*.json", "items_ins_v2*.json", "items_human_ins.json"

_LOG = logging.getLogger(__name__)


class Files(NamedTuple):
    """The files of a data folder."""

    products: Path
    attributes: Path
    human: Path | None


def find_files(data: Path) -> Files:
    """The files that `data` names: a folder, or one of several product files in it.

    Raises:
        ConfigError: no such folder, a file is missing, or several could be meant.
    """
    folder = data.parent if data.is_file() else data
    if not folder.is_dir():
        raise ConfigError(f"env.data = {str(data)!r}: no such folder")
    products = data if data.is_file() else _only(folder, PRODUCTS)
    suffix = products.stem.removeprefix("items_shuffle")
    same_set = folder / f"items_ins_v2{suffix}.json"
    human = folder / HUMAN
    return Files(
        products, same_set if same_set.is_file() else _only(folder, ATTRIBUTES), human if human.is_file() else None
    )


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise ConfigError(f"env.data = {str(folder)!r}: no {pattern} there")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"env.data = {str(folder)!r} holds {names}: name one product file instead of the folder")
    return found[0]


class Counts(NamedTuple):
    """What a build kept and passed over."""

    products: int
    unusable: int  # asin "nan", empty or too long
    repeated: int  # asin seen before
    human: int
    synthetic: int  # products with a synthetic instruction


@dataclass(frozen=True)
class Row:
    """A product with its instructions, as read from the files."""

    product: Product
    attributes: RawAttributes | None
    instructions: list[dict[str, Any]]


class SourceReader:
    """Reads a data folder product by product and counts what it passes over.

    A wrong record raises `DataError`, or is passed over where `problem` takes its message.
    """

    def __init__(self, files: Files, problem: Callable[[str], object] | None = None) -> None:
        self.files, self._problem = files, problem
        self.unusable = self.repeated = 0
        self._attributes = _texts(files.attributes)
        self._human = _texts(files.human) if files.human else {}

    def rows(self) -> Iterator[Row]:
        """Usable products in the files' order, each once."""
        seen: set[str] = set()
        for number, record in enumerate(records.items(self.files.products)):
            try:
                row = self._read(record, number, seen)
            except DataError as error:
                if self._problem is None:
                    raise
                self._problem(str(error))
            else:
                if row is not None:
                    yield row

    def _read(self, record: Any, number: int, seen: set[str]) -> Row | None:
        raw = shaped(record, RawProduct, f"{self.files.products}: record {number}")
        if not usable(raw.asin):
            self.unusable += 1
            return None
        if raw.asin in seen:
            self.repeated += 1
            return None
        seen.add(raw.asin)
        return self._row(raw, number)

    def _row(self, raw: RawProduct, number: int) -> Row:
        line = self._attributes.pop(raw.asin, None)
        where = f"{self.files.attributes}: {raw.asin}"
        attributes = parse_json(line, RawAttributes, where) if line else None
        instructions = [
            shaped(item, RawInstruction, f"{self.files.human}: {raw.asin}: instruction {place}").model_dump()
            for place, item in enumerate(self._human_list(raw.asin))
        ]
        product = make_product(raw, attributes, f"{self.files.products}: record {number} ({raw.asin})")
        return Row(product, attributes, instructions)

    def _human_list(self, asin: str) -> list[Any]:
        value = json.loads(self._human.pop(asin, b"[]"))
        if not isinstance(value, list):
            raise DataError(f"{self.files.human}: {asin}: a list of instructions is expected")
        return value

    @property
    def left_over(self) -> list[str]:
        """Asins with human instructions and no product, after all rows were read."""
        return sorted(self._human)


def _texts(path: Path) -> dict[str, bytes]:
    """The values of a JSON object as text, which takes a fraction of the memory of what it stands for."""
    return {key: json.dumps(value, ensure_ascii=False).encode() for key, value in records.members(path)}


class Catalogue:
    """Products, goals and search of one data set, opened from its kept folder; safe to share between threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts = Counts(**json.loads((folder / "catalogue.json").read_text(encoding="utf-8"))["counts"])
        self._products = records.RecordFile(folder / "products")
        self._recent = functools.lru_cache(CACHED)(lambda number: Product.from_record(self._products[number]))
        self._index = search.SearchIndex(folder / "index")
        if not len(self._products) == len(self._index) == self.counts.products:
            raise DataError(f"{folder}: its parts do not belong together; delete it, and it is made again")

    def __len__(self) -> int:
        return len(self._products)

    def product(self, number: int) -> Product:
        """The product of a number."""
        return self._recent(number)

    def search(self, text: str) -> list[int]:
        """Numbers of the products found, best first, at most `search.HITS`."""
        return self._index.search(text)

    def goals(self, name: str) -> goals.Goals:
        """The goals of "human" or "synthetic", or of these in the original's order ("human-original-order")."""
        kind, _, order = name.partition("-")
        ends = np.load(self.folder / "goals_synthetic_ends.npy", mmap_mode="r") if kind == "synthetic" else None
        kept = records.RecordFile(self.folder / f"goals_{kind}")
        return goals.Goals(kind, kept, ends, self.product, bool(order))


def open_catalogue(data: Path) -> Catalogue:
    """The catalogue of a data folder, built if it is not in the cache yet."""
    files = find_files(data)
    folder = cache_folder("webshop") / f"v{LAYOUT}-{search.VERSION}-{content_hash(files)}"
    if not folder.is_dir():
        _build(files, folder)
    return Catalogue(folder)


def content_hash(files: Files) -> str:
    """32 hexadecimal digits of all bytes of the files; remembered by path, size and time of change."""
    states = [f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files if path]
    key = hashlib.blake2b("\n".join(states).encode(), digest_size=16).hexdigest()
    note = cache_folder("webshop", "hashes", key)
    if note.is_file():
        return note.read_text(encoding="ascii")
    digest = hashlib.blake2b(digest_size=16)
    for path in filter(None, files):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    note.parent.mkdir(parents=True, exist_ok=True)
    partial = note.with_suffix(f".{os.getpid()}")
    partial.write_text(digest.hexdigest(), encoding="ascii")
    partial.replace(note)
    return digest.hexdigest()


def _build(files: Files, folder: Path) -> None:
    """Build in a folder of this process, then move it into place; the first of several processes wins."""
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        counts = _write(SourceReader(files), partial)
        (partial / "catalogue.json").write_text(json.dumps(_description(files, counts)), encoding="utf-8")
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _LOG.info("webshop: built %s from %s: %s", folder, files.products, counts)


def _description(files: Files, counts: Counts) -> Mapping[str, Any]:
    names = [path.name for path in files if path]
    return {"layout": LAYOUT, "search": search.VERSION, "files": names, "counts": counts._asdict()}


def _write(source: SourceReader, folder: Path) -> Counts:
    with (
        closing(records.RecordWriter(folder / "products")) as products,
        closing(records.RecordWriter(folder / "goals_human")) as human,
        closing(records.RecordWriter(folder / "goals_synthetic")) as synthetic,
        closing(search.IndexWriter(folder / "index")) as index,
    ):
        number, asked, ends = -1, 0, [0]
        for row in source.rows():
            number = products.add(row.product.to_record())
            index.add(number, row.product.search_text)
            for record in goals.human_records(number, row.instructions):
                human.add({**record, "instruction": clean(record["instruction"])})
                asked += 1
            raw = row.attributes
            if raw and raw.instruction and raw.instruction_attributes:
                wish = {"product": number, "instruction": clean(raw.instruction)}
                synthetic.add({**wish, "attributes": raw.instruction_attributes})
                ends.append(ends[-1] + goals.count_combinations(row.product))
    if number < 0:
        raise DataError(f"{source.files.products}: no usable product")
    np.save(folder / "goals_synthetic_ends.npy", np.asarray(ends[1:], np.int64))
    return Counts(number + 1, source.unusable, source.repeated, asked, len(ends) - 1)
