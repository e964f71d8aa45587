"""Charts as SVG elements: curves, and the shards of a matrix on its devices.

The colours are CSS variables: one palette for light screens and one for dark screens. A page or an
SVG file with a chart also contains their definitions, `CHART_STYLE`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from prepcli.algebra.boxes import Box

Point = tuple[float, float]

# Light and dark variants of each colour.
COLORS = (
    ("#1d4ed8", "#7aa7ff"),
    ("#c2410c", "#fb923c"),
    ("#15803d", "#4ade80"),
    ("#7e22ce", "#c084fc"),
    ("#a16207", "#facc15"),
    ("#0e7490", "#22d3ee"),
)
LIGHT_COLORS = " ".join(f"--color{number}: {light};" for number, (light, _) in enumerate(COLORS))
DARK_COLORS = " ".join(f"--color{number}: {dark};" for number, (_, dark) in enumerate(COLORS))
CHART_STYLE = f"""
:root {{ {LIGHT_COLORS} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK_COLORS} }} }}
.chart text {{ opacity: .75; font-size: 11px }}
.chart .grid {{ stroke: #8884; fill: none }}
.chart polyline {{ fill: none; stroke-linejoin: round }}
.chart circle:not(.single, :hover) {{ fill-opacity: 0 }}
.chart.wide {{ width: 100% }}
@media (max-width: 40rem) {{ .chart.wide text {{ font-size: 19px }} }}
"""

# Width and height. Text stays readable where a phone shows a small chart at about its width.
SMALL = (420, 220)
WIDE = (760, 280)
# Margins around the plot: labels of the y axis on the left, labels of the x axis below.
LEFT = 52
RIGHT = 12
TOP = 10
BOTTOM = 26
# Additional margins for the names of vertical lines, of curves and of axes.
MARK_HEIGHT = 14
LEGEND_HEIGHT = 18
AXIS_NAME_HEIGHT = 16
# Estimated width of a character of 11 pixels: text has no measure before a browser draws it.
CHARACTER_WIDTH = 6.4

MAX_POINTS = 400
# Longer curves have no tooltips.
MAX_DOTS = 80
NUM_TICKS = 5
UNITS = ((1e6, "M"), (1e3, "k"))
# Smaller labels have no unit.
MIN_UNIT = 1e4
# Labels outside this range have exponents.
MIN_FIXED = 1e-3
MAX_FIXED = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A curve of a line chart.

    Attributes:
        name: Name in the legend and the tooltips.
        points: (x, y) in ascending order of x.
        color: Number of the colour.
        width: Width of the line. A wide curve stays visible below a narrow one.
    """

    name: str
    points: Sequence[Point]
    color: int = 0
    width: float = 1.6


def color_of(number: int) -> str:
    """Return the CSS colour with this number. The colours repeat."""
    return f"var(--color{number % len(COLORS)})"


def line_chart(
    curves: Sequence[Curve],
    title: str,
    *,
    size: tuple[int, int] = WIDE,
    x_range: tuple[float, float] | None = None,
    x_name: str = "",
    y_name: str = "",
    marks: Sequence[tuple[float, str]] = (),
    from_zero: bool = False,
    is_log: bool = False,
    has_legend: bool = True,
) -> str:
    """Draw curves on shared axes with round ticks.

    Args:
        curves: The curves.
        title: Accessible title.
        size: Width and height.
        x_range: First and last value of the x axis. Default: the range of the curves.
        x_name: Name of the x axis, such as `step`. Tooltips have it too.
        y_name: Name of the y axis, with its unit.
        marks: Vertical lines: x and name.
        from_zero: Whether both axes begin at 0.
        is_log: Whether both axes are logarithmic. All values must then be positive.
        has_legend: Whether to name the curves above the plot, each beside a piece of its line.

    Returns:
        An `<svg>` element, or an empty text if no curve has a point.
    """
    points = list(itertools.chain(*(curve.points for curve in curves)))
    if not points:
        return ""
    xs = [x for x, _ in points]
    ys = [y for _, y in points]
    if from_zero:
        xs.append(0)
        ys.append(0)
    width, height = size
    top = TOP
    if has_legend:
        top += LEGEND_HEIGHT
    parts: list[str] = []
    if y_name:
        parts.append(_text_element(0, top + 6, y_name))
        top += AXIS_NAME_HEIGHT
    if marks:
        top += MARK_HEIGHT
    bottom = height - BOTTOM
    if x_name:
        bottom -= AXIS_NAME_HEIGHT
        parts.append(_text_element((LEFT + width - RIGHT) / 2, height - 6, x_name, "middle"))
    x_axis = _axis(x_range or (min(xs), max(xs)), (LEFT, width - RIGHT), is_log)
    y_axis = _axis((min(ys), max(ys)), (bottom, top), is_log, ends_with_ticks=True)
    parts += _grid_lines(x_axis, y_axis, width)
    for x, name in marks:
        parts += _mark_elements(x_axis.position(x), name, y_axis, width)
    for curve in curves:
        parts += _curve_elements(curve, x_axis, y_axis, x_name)
    if has_legend:
        parts += _legend_elements(curves)
    return _svg_document(size, parts, title)


@dataclass(frozen=True, slots=True)
class _Axis:
    """Axis of a chart: maps values to pixels, and has the values of its ticks."""

    ticks: Sequence[float]
    values: tuple[float, float]
    pixels: tuple[float, float]
    is_log: bool

    def position(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high = self.values
        if self.is_log:
            value = math.log(value)
            low = math.log(low)
            high = math.log(high)
        share = 0.5
        if high > low:
            share = (value - low) / (high - low)
        first, last = self.pixels
        return first + share * (last - first)


def _axis(
    values: tuple[float, float],
    pixels: tuple[float, float],
    is_log: bool,
    *,
    ends_with_ticks: bool = False,
) -> _Axis:
    """Return an axis of values, with ticks between them. It may end with ticks, so that no curve touches the border."""
    low, high = values
    if is_log:
        return _Axis(_log_ticks(low, high), values, pixels, is_log)
    if low == high and not ends_with_ticks:
        return _Axis([low], values, pixels, is_log)
    size = _tick_size(low, high)
    if ends_with_ticks:
        first, last = math.floor(low / size), math.ceil(high / size)
    else:
        # Training steps are whole numbers, so the ticks are at least 1 apart: none is at step 2.5.
        if low == int(low) and high == int(high):
            size = max(1.0, size)
        first, last = math.ceil(low / size), math.floor(high / size)
    ticks = [number * size for number in range(first, last + 1)]
    if ends_with_ticks:
        # Rounding may leave the outer ticks just inside of the values.
        values = (min(low, ticks[0]), max(high, ticks[-1]))
    return _Axis(ticks, values, pixels, is_log)


def _tick_size(low: float, high: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten with at most NUM_TICKS steps in a range.

    >>> _tick_size(2.31, 5.9), _tick_size(1, 480)
    (1.0, 100.0)
    """
    largest = max(abs(low), abs(high))
    span = high - low
    if span == 0:
        span = largest or 1.0
    # At least 1e-5 of the values: labels have room for seven digits.
    span = max(span, largest * 1e-5)
    power = 10.0 ** math.floor(math.log10(span / NUM_TICKS))
    for factor in (1, 2, 5):
        if span / (power * factor) <= NUM_TICKS:
            return power * factor
    return power * 10


def _log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten in a range, or only the powers if these are many.

    >>> _log_ticks(0.8, 6), _log_ticks(0.1, 1000)
    ([1.0, 2.0, 5.0], [0.1, 1.0, 10.0, 100.0, 1000.0])
    """
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    powers = [float(f"1e{exponent}") for exponent in range(first, last + 1)]
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    candidates = [power * factor for power, factor in itertools.product(powers, factors)]
    ticks = [tick for tick in candidates if low <= tick <= high]
    return ticks or [low]


def _grid_lines(x_axis: _Axis, y_axis: _Axis, width: float) -> Iterator[str]:
    """Yield a horizontal line for each tick of the y axis, and the labels of both axes."""
    left, right = x_axis.pixels
    bottom, _ = y_axis.pixels
    for tick, text in zip(y_axis.ticks, _tick_texts(y_axis.ticks)):
        y = y_axis.position(tick)
        yield f'<path class="grid" d="M{left},{y:.1f} H{right}"/>'
        yield _text_element(left - 6, y + 4, text, "end")
    for tick, text in zip(x_axis.ticks, _tick_texts(x_axis.ticks)):
        yield _centered_text(x_axis.position(tick), bottom + 18, text, width)


def _legend_elements(curves: Sequence[Curve]) -> Iterator[str]:
    """Yield a piece of each curve's line and its name, side by side above the plot."""
    x = float(LEFT)
    for curve in curves:
        color = color_of(curve.color)
        yield f'<path d="M{x:.1f},{TOP + 2} h18" stroke="{color}" stroke-width="{curve.width}"/>'
        yield _text_element(x + 24, TOP + 6, curve.name)
        x += 24 + _text_width(curve.name) + 20


def _tick_texts(ticks: Sequence[float]) -> list[str]:
    """Return the labels of ticks, with one unit and with as many digits as distinguish them.

    >>> _tick_texts([0, 50_000, 100_000]), _tick_texts([1.0, 1.5])
    (['0', '50k', '100k'], ['1.0', '1.5'])
    """
    largest = max(map(abs, ticks))
    size = largest or 1.0
    if len(ticks) > 1:
        size = ticks[1] - ticks[0]
    # 1e-9: the logarithm of a power of ten may be just below the integer.
    size_exponent = math.floor(math.log10(size) + 1e-9)
    if largest and not MIN_FIXED <= largest < MAX_FIXED:
        digits = max(0, math.floor(math.log10(largest) + 1e-9) - size_exponent)
        return [f"{tick:.{digits}e}" for tick in ticks]
    scale, unit = (1.0, "")
    if largest >= MIN_UNIT:
        scale, unit = next(known for known in UNITS if known[0] <= largest)
    digits = max(0, -math.floor(math.log10(size / scale) + 1e-9))
    texts = []
    for tick in ticks:
        text = f"{tick / scale:.{digits}f}"
        if tick:
            text += unit
        texts.append(text)
    return texts


def _mark_elements(x: float, name: str, y_axis: _Axis, width: float) -> Iterator[str]:
    """Yield a dashed vertical line with its name above the plot."""
    bottom, top = y_axis.pixels
    yield (
        f'<path d="M{x:.1f},{top} V{bottom}" stroke="currentColor" stroke-dasharray="3 4"'
        ' opacity="0.5"/>'
    )
    yield _centered_text(x, top - 6, name, width)


def _curve_elements(curve: Curve, x_axis: _Axis, y_axis: _Axis, x_name: str) -> Iterator[str]:
    """Yield the line of a curve, and a dot with a tooltip for each point of a short one."""
    points = thin_out(curve.points)
    color = color_of(curve.color)
    positions = [(x_axis.position(x), y_axis.position(y)) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
    yield f'<polyline points="{line}" stroke="{color}" stroke-width="{curve.width}"/>'
    if len(points) > MAX_DOTS:
        return
    look = 'r="4"'
    if len(points) == 1:
        # A line of one point is invisible, so its dot is always shown.
        look = 'class="single" r="3"'
    for (x, y), (pixel_x, pixel_y) in zip(points, positions):
        x_text = f"{x:,.0f}" if x == int(x) else f"{x:.6g}"
        name = escape(f"{curve.name}, {x_name} {x_text}: {y:.6g}")
        yield (
            f'<circle cx="{pixel_x:.1f}" cy="{pixel_y:.1f}" {look} fill="{color}"'
            f' stroke="{color}" stroke-opacity="0"><title>{name}</title></circle>'
        )


def thin_out(points: Sequence[Point], max_points: int = MAX_POINTS) -> Sequence[Point]:
    """Return at most `max_points` points in their order, with the extremes of the curve.

    The points are divided into equal parts. Each part keeps its lowest and its highest point.
    """
    if len(points) <= max_points:
        return points
    num_parts = max_points // 2
    kept: list[Point] = []
    for number in range(num_parts):
        start = len(points) * number // num_parts
        stop = len(points) * (number + 1) // num_parts
        by_y = sorted(points[start:stop], key=lambda point: point[1])
        kept += sorted({by_y[0], by_y[-1]})
    return kept


def shard_map_svg(shape: Sequence[int], boxes: Sequence[Box], title: str) -> str:
    """Draw a matrix [rows, columns] cut into shards, from the box of each device."""
    width, height = SMALL
    devices_of: dict[Box, list[str]] = {}
    for device, box in enumerate(boxes):
        devices_of.setdefault(box, []).append(str(device))
    parts = []
    for ((row, row_stop), (column, column_stop)), devices in devices_of.items():
        numbers = ", ".join(devices)
        x = width * column / shape[1]
        y = height * row / shape[0]
        box_width = width * (column_stop - column) / shape[1]
        box_height = height * (row_stop - row) / shape[0]
        name = f"device {numbers}: rows {row}:{row_stop}, columns {column}:{column_stop}"
        parts.append(
            f'<g><title>{escape(name)}</title><rect x="{x + 1:.1f}" y="{y + 1:.1f}"'
            f' width="{box_width:.1f}" height="{box_height:.1f}" fill="{color_of(0)}"'
            ' fill-opacity="0.3" stroke="currentColor"/>'
        )
        parts.append(
            _text_element(x + box_width / 2, y + box_height / 2 + 4, numbers, "middle") + "</g>"
        )
    return _svg_document((width + 2, height + 2), parts, title)


def _text_element(x: float, y: float, text: str, anchor: str = "start") -> str:
    look = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor"'
    return f"<text {look}>{escape(text)}</text>"


def _text_width(text: str) -> float:
    """Return the estimated width of a text in pixels."""
    return CHARACTER_WIDTH * len(text)


def _centered_text(x: float, y: float, text: str, width: float) -> str:
    """Return a text that is centered at `x`, or ends at the border of the picture where it would be cut."""
    half = _text_width(text) / 2
    if x + half > width:
        return _text_element(width, y, text, "end")
    if x < half:
        return _text_element(0, y, text)
    return _text_element(x, y, text, "middle")


def _svg_document(size: tuple[int, int], parts: Iterable[str], title: str) -> str:
    width, height = size
    content = "\n".join(parts)
    look = "chart wide" if size == WIDE else "chart"
    return (
        f'<svg class="{look}" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img"><title>{escape(title)}</title>\n{content}\n</svg>'
    )
