"""What the page is made of: sections with charts and tables, which are all that the template knows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

from empo2_jax.charts import line_chart, number_text

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """A table's cell that is more than a text."""

    text: str
    search: str = ""  # what the episode viewer looks for when the cell is chosen; spaces count as one
    share: float | None = None  # drawn as a bar, 0–1


@dataclass(frozen=True)
class Table:
    """Rows under columns; one that can be long has a filter and shows cells of text below each other on a phone."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    filtered: bool = False


@dataclass(frozen=True)
class Chart:
    """A picture and the numbers behind it."""

    title: str
    note: str
    svg: str
    table: Table | None = None


@dataclass(frozen=True)
class Section:
    """A heading with what belongs under it."""

    title: str
    about: str = ""
    charts: Sequence[Chart] = field(default_factory=tuple)
    tables: Sequence[Table] = field(default_factory=tuple)
    missing: Sequence[str] = field(default_factory=tuple)  # what cannot be shown, and why


def chart(
    title: str, note: str, series: Mapping[str, Sequence[tuple[float, float]]], x_label: str = "iteration"
) -> Chart | None:
    """Lines over `x_label` with their numbers; None when there is no finite point."""
    svg = line_chart(title, series, x_label)
    if not svg:
        return None
    values = {label: dict(points) for label, points in series.items()}
    places = sorted({x for points in values.values() for x in points})
    rows = [[text(x), *(text(points.get(x, "")) for points in values.values())] for x in places]
    return Chart(title, note, svg, Table(title, "", [x_label, *values], rows))


def text(value: Any) -> str:
    """A number in a few digits, everything else as it is."""
    return number_text(float(value)) if is_number(value) else str(value)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a JSON value is a number; NaN and infinities are texts there."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` items, evenly spread, first and last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def first_of(shown: int, found: int, what: str, order: str) -> str:
    """What a table that may be cut says of itself."""
    return f"{what}: {found:,}, {order}." if shown == found else f"{what}: the first {shown:,} of {found:,}, {order}."
