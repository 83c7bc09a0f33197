"""What `empo2 webshop check DIR` finds out: which files are there, what is wrong in them, what could be played with.

Reads everything and builds nothing. A build stops at the first wrong record; here wrong records are counted.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from empo2_jax.envs.webshop import catalogue, goals
from empo2_jax.envs.webshop.catalogue import Files, SourceReader
from empo2_jax.errors import ConfigError, DataError

SHOWN = 5  # wrong records told apart


class Finding(NamedTuple):
    """One line of the report."""

    name: str
    found: str
    ok: bool


def check(data: Path) -> list[Finding]:
    """All findings about a data folder (or one product file in it); what is not ok keeps WebShop from working.

    Raises:
        ConfigError: there is nothing.
    """
    if not data.exists():
        raise ConfigError(f"{data}: no such folder; docs/webshop.md says which files it holds and how to make some")
    try:
        files = catalogue.find_files(data)
    except ConfigError as error:
        return [*_present(data), Finding("data", str(error), False)]
    findings = [Finding(kind, _size(path), path is not None) for kind, path in zip(Files._fields, files, strict=True)]
    if files.human is None:
        missing = f"{catalogue.HUMAN} is missing: only synthetic goals, which the paper does not use"
        findings[-1] = Finding("human", missing, True)
    return [*findings, *_contents(files)]


def _present(data: Path) -> Iterator[Finding]:
    """Which of the three files are there, where the set is not complete."""
    for kind, pattern in zip(Files._fields, (catalogue.PRODUCTS, catalogue.ATTRIBUTES, catalogue.HUMAN), strict=True):
        names = ", ".join(path.name for path in sorted(data.glob(pattern)))
        yield Finding(kind, names or f"{pattern} is missing", bool(names) or kind == "human")


def _size(path: Path | None) -> str:
    return f"{path.name}, {path.stat().st_size / 1e6:,.1f} MB" if path else ""


def _contents(files: Files) -> Iterator[Finding]:
    problems: list[str] = []
    products = human = synthetic = bare = 0
    try:
        source = SourceReader(files, problems.append)
        for row in source.rows():
            products += 1
            bare += row.attributes is None
            human += sum(1 for _ in goals.human_records(0, row.instructions))
            if row.attributes and row.attributes.instruction and row.attributes.instruction_attributes:
                synthetic += goals.count_combinations(row.product)
    except DataError as error:
        problems.append(str(error))
        yield Finding("readable", "not to the end", False)
    else:
        yield Finding("passed over", f"{source.unusable} without a usable asin, {source.repeated} repeated", True)
        yield Finding("instructions without product", str(len(source.left_over)), True)
    yield Finding("usable products", f"{products:,}, {bare:,} of them without attributes", products > 0)
    yield Finding("goals", f"{human:,} human, {synthetic:,} synthetic", human + synthetic > 0)
    for problem in problems[:SHOWN]:
        yield Finding("wrong record", problem, False)
    if len(problems) > SHOWN:
        yield Finding("wrong record", f"{len(problems) - SHOWN:,} more", False)
