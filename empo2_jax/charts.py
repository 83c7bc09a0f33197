"""Line charts as inline SVG: no script, no plotting library, readable in print and with a screen reader."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 270  # the texts can still be read where a page is as wide as a phone
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 40  # the first at the least: long ticks make it wider
ASCII, WIDE = 10, 16  # most that a character takes on average, at the 15 units that letters have on a phone
LEGEND, COLUMN = 276, 200  # most that a label takes, and that one in a legend of two columns does
LEAST, MOST = 1e-300, 1e307  # of a span; of a value: beyond them sums and steps are no floats
SIZES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# Okabe and Ito's palette (safe for color-blind readers), darkened where contrast on white was below 3:1.
COLORS = ("#0072b2", "#d55e00", "#007a5a", "#a8588a", "#8a6d00", "#2a7fa8", "#333333", "#7a4fbf")
DASHES = ("", "7 3", "2 3", "9 3 2 3")

Points = Sequence[tuple[float, float]]
Bands = Mapping[str, Sequence[tuple[float, float, float]]]  # (x, low, high) by label


def line_chart(title: str, series: Mapping[str, Points], x_label: str = "iteration", bands: Bands | None = None) -> str:
    """An SVG with one line per series and a legend; points with a NaN or beyond ±1e307 are left out.

    Args:
        title: Accessible name of the picture.
        series: Points (x, y) by label, in the order of drawing.
        x_label: Label of the horizontal axis.
        bands: Intervals around some of the series, drawn behind the lines; left out as points are.

    Returns:
        Markup, every text escaped; "" when there is no finite point.
    """
    finite = _finite(series)
    if not finite:
        return ""
    around = {label: [band for band in (bands or {}).get(label, ()) if all(map(_drawn, band))] for label in finite}
    edges = [(x, y) for band in around.values() for x, *ends in band for y in ends]
    every = [*(point for points in finite.values() for point in points), *edges]
    xs = _span([x for x, _ in every])
    counted = all(float(x).is_integer() for x, _ in every)  # iterations: no tick between them
    x_ticks = [x for x in ticks(*xs) if xs[0] <= x <= xs[1] and (float(x).is_integer() or not counted)]
    y_ticks = ticks(*_span([y for _, y in every]))
    widest = max(map(_text_width, tick_texts(y_ticks)))
    frame = _Frame(xs, (y_ticks[0], y_ticks[-1]), max(LEFT, widest + 8))
    name, columns = escape(title, quote=True), _columns(finite)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 22 * math.ceil(len(finite) / columns)}" role="img" aria-label="{name}">',
        f"<title>{name}</title>",
        *_grid(frame, x_ticks, y_ticks, escape(x_label)),
    ]
    tints = {label: COLORS[number % len(COLORS)] for number, label in enumerate(series)}  # the same in every picture
    for label, band in around.items():
        if len(band) > 1:
            there, back = ([(x, high) for x, _, high in band], [(x, low) for x, low, _ in reversed(band)])
            corners = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in there + back)
            parts.append(f'<polygon points="{corners}" fill="{tints[label]}" fill-opacity="0.12"/>')
    for number, (label, points) in enumerate(finite.items()):
        stroke = _stroke(number, tints[label])
        parts += _line(stroke, tints[label], [(frame.x(x), frame.y(y)) for x, y in points])
        x, y = _legend_place(number, columns)
        parts.append(f'<line x1="{x}" x2="{x + 26}" y1="{y - 4}" y2="{y - 4}" stroke-width="2.5" {stroke}/>')
        parts.append(f'<text x="{x + 32}" y="{y}">{escape(_cut(label))}</text>')
    return "".join([*parts, "</svg>"])


def interval_chart(title: str, intervals: Mapping[str, tuple[float, float, float]], zero: bool = False) -> str:
    """An SVG with one row per label: a dot at the value, a bar from the low to the high end where they can be drawn.

    Args:
        title: Accessible name of the picture.
        intervals: (value, low, high) by label, from top to bottom; NaN and what is beyond ±1e307 is not drawn.
        zero: Whether the axis includes 0, with a line there.

    Returns:
        Markup, every text escaped; "" with nothing to draw.
    """
    ends = [x for row in intervals.values() for x in row if _drawn(x)]
    if not ends:
        return ""
    left, height = max(190, 12 + max(_text_width(_cut(label)) for label in intervals)), 26 * len(intervals)
    at = _ticks_within(*_span([*ends, 0.0] if zero else ends), WIDTH - left - RIGHT)
    span = (at[0], at[-1])

    def place(x: float) -> float:
        return left + (x - span[0]) / (span[1] - span[0]) * (WIDTH - left - RIGHT)

    name = escape(title, quote=True)
    parts = [f'<svg viewBox="0 0 {WIDTH} {height + 34}" role="img" aria-label="{name}"><title>{name}</title>']
    for x, text in zip(at, tick_texts(at), strict=True):
        parts.append(f'<line class="grid" x1="{place(x):.1f}" x2="{place(x):.1f}" y1="4" y2="{height + 8}"/>')
        parts.append(_tick_below(place(x), height + 26, text))
    if zero:
        parts.append(f'<line x1="{place(0.0):.1f}" x2="{place(0.0):.1f}" y1="4" y2="{height + 8}" stroke="#333333"/>')
    for number, (label, (value, low, high)) in enumerate(intervals.items()):
        y, color = 26 * number + 18, COLORS[0]
        parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{escape(_cut(label))}</text>')
        if _drawn(low) and _drawn(high):
            line = f'<line x1="{place(low):.1f}" x2="{place(high):.1f}" y1="{y}" y2="{y}" stroke="{color}"'
            parts.append(f'{line} stroke-width="3"/>')
        if _drawn(value):
            parts.append(f'<circle cx="{place(value):.1f}" cy="{y}" r="4.5" fill="{color}"/>')
    return "".join([*parts, "</svg>"])


def scatter_chart(title: str, groups: Mapping[str, Sequence[tuple[float, float, float]]]) -> str:
    """An SVG with one dot per point, no axes, and a legend: places say what lies near what and nothing else.

    Args:
        title: Accessible name of the picture.
        groups: Points (x, y, radius) by label; those with a NaN or beyond ±1e307 are left out. Each label has a
            color and a small shift of its own, so that equal places of several labels are all seen.

    Returns:
        Markup, every text escaped; "" when there is no finite point.
    """
    finite = _finite(groups)
    if not finite:
        return ""
    every = [point for points in finite.values() for point in points]
    frame = _Frame(_span([x for x, _, _ in every]), _span([y for _, y, _ in every]))
    name, columns = escape(title, quote=True), _columns(finite)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 22 * math.ceil(len(finite) / columns)}" role="img" aria-label="{name}">',
        f"<title>{name}</title>",
    ]
    for number, (label, points) in enumerate(finite.items()):
        color, turn = COLORS[number % len(COLORS)], 2 * math.pi * number / len(finite)
        right, down = (4 * math.sin(turn), -4 * math.cos(turn)) if len(finite) > 1 else (0.0, 0.0)
        for x, y, radius in points:
            place = f'cx="{frame.x(x) + right:.1f}" cy="{frame.y(y) + down:.1f}" r="{radius:.1f}"'
            parts.append(f'<circle {place} fill="{color}" fill-opacity="0.55"/>')
        x, y = _legend_place(number, columns)
        parts.append(f'<circle cx="{x + 13}" cy="{y - 4}" r="5" fill="{color}"/>')
        parts.append(f'<text x="{x + 32}" y="{y}">{escape(_cut(label))}</text>')
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values that enclose [low, high], at least `LEAST` apart and within ±2 `MOST`."""
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 12 - math.floor(math.log10(magnitude))
    return [round(number * step, digits) for number in range(first, last + 1)]


def number_text(value: float) -> str:
    """A number in at most four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 10_000 and float(value).is_integer() else f"{value:.4g}"


def tick_texts(values: Sequence[float]) -> list[str]:
    """The ticks of one axis, short: of one size (k, M, G, T), in as few digits from four on as tell them apart."""
    largest = max(map(abs, values), default=0.0)
    sizes = SIZES if 1e4 <= largest < 1e15 else ()
    size, sign = next((one for one in sizes if one[0] <= largest), (1.0, ""))
    digits = next(n for n in range(4, 18) if n == 17 or len({f"{value:.{n}g}" for value in values}) == len(values))
    texts = [f"{value / size:.{digits}g}".replace("e+", "e").replace("e-0", "e-") for value in values]
    return [text if value == 0 else f"{text}{sign}" for text, value in zip(texts, values, strict=True)]


@dataclass(frozen=True)
class _Frame:
    """Where values are in the picture: the span of either axis, and where the plot begins."""

    xs: tuple[float, float]
    ys: tuple[float, float]
    left: int = LEFT

    def x(self, value: float) -> float:
        return self.left + (value - self.xs[0]) / (self.xs[1] - self.xs[0]) * (WIDTH - self.left - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.ys[0]) / (self.ys[1] - self.ys[0]) * (HEIGHT - TOP - BOTTOM)


def _ticks_within(low: float, high: float, room: int) -> list[float]:
    """Ticks whose texts stand beside each other in `room` units, or the fewest."""
    choices = [ticks(low, high, count) for count in (5, 3, 2)]
    widths = [sum(_text_width(text) + 8 for text in tick_texts(at)) for at in choices]
    return next((at for at, width in zip(choices, widths, strict=True) if width <= room), choices[-1])


def _drawn(value: float) -> bool:
    """Whether it has a place: no NaN, and within ±`MOST`."""
    return bool(abs(value) <= MOST)  # of NumPy's numbers, too


def _finite(groups: Mapping[str, Sequence[tuple[float, ...]]]) -> dict[str, list[tuple[float, ...]]]:
    """The points whose numbers have a place, of the labels that have any."""
    finite = {label: [p for p in points if all(map(_drawn, p))] for label, points in groups.items()}
    return {label: points for label, points in finite.items() if points}


def _text_width(text: str) -> int:
    """Units that a text takes at the most, about."""
    return sum(ASCII if character.isascii() else WIDE for character in text)


def _cut(label: str) -> str:
    """The label; of a long one the end, which tells paths apart."""
    if _text_width(label) <= LEGEND:
        return label
    return next(text for n in range(len(label)) if _text_width(text := f"…{label[n:]}") <= LEGEND)


def _columns(labels: Iterable[str]) -> int:
    """Of a legend."""
    return 2 if all(_text_width(_cut(label)) <= COLUMN for label in labels) else 1


def _legend_place(number: int, columns: int) -> tuple[int, int]:
    return 12 + number % columns * 234, HEIGHT + 14 + 22 * (number // columns)


def _span(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    if high - low > max(1e-9 * size, LEAST):  # less is rounding, and has no distinct ticks
        return low, high
    pad = size * 0.1 if size > 10 * LEAST else 1.0
    return low - pad, high + pad


def _tick_below(x: float, y: int, text: str) -> str:
    """A tick's text under its place, or as far to the right as it is seen as a whole."""
    return f'<text x="{min(x, WIDTH - 2 - _text_width(text) / 2):.1f}" y="{y}" text-anchor="middle">{text}</text>'


def _grid(frame: _Frame, x_ticks: list[float], y_ticks: list[float], x_label: str) -> list[str]:
    parts = []
    left, right = frame.left, WIDTH - RIGHT
    for value, text in zip(y_ticks, tick_texts(y_ticks), strict=True):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    parts += [
        _tick_below(frame.x(value), HEIGHT - BOTTOM + 16, text)
        for value, text in zip(x_ticks, tick_texts(x_ticks), strict=True)
    ]
    middle = (left + right) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{x_label}</text>')
    return parts


def _stroke(number: int, color: str) -> str:
    dash = DASHES[(number // 2 + number // len(COLORS)) % len(DASHES)]  # 32 pairs of color and dashes
    return f'stroke="{color}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _line(stroke: str, color: str, places: Points) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    marks = (
        [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in places] if len(places) < 41 else []
    )
    return [f'<polyline points="{path}" fill="none" stroke-width="2" {stroke}/>', *marks]
