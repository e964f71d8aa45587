"""Curves of runs by step as SVG text, in colours that the style of the page sets for light and dark screens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from prepcli.inspection.run_metrics import Point

WIDTH, HEIGHT = 420, 220  # small units: text stays readable where a phone shows the chart at about this width
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 26
MAX_POINTS = 400
MAX_DOTS = 80  # curves with more points have no tooltips
NUM_TICKS = 5
UNITS = ((1e6, "M"), (1e3, "k"))
MIN_FIXED, MAX_FIXED = 1e-3, 1e9  # axes of smaller or larger values have exponents
COLORS = (  # light and dark
    *(("#1d4ed8", "#7aa7ff"), ("#c2410c", "#fb923c"), ("#15803d", "#4ade80")),
    *(("#7e22ce", "#c084fc"), ("#a16207", "#facc15"), ("#0e7490", "#22d3ee")),
)
CHART_STYLE = (
    f":root {{ {' '.join(f'--run{n}: {light};' for n, (light, _) in enumerate(COLORS))} }}\n"
    "@media (prefers-color-scheme: dark) { :root {"
    f" {' '.join(f'--run{n}: {dark};' for n, (_, dark) in enumerate(COLORS))} }} }}\n"
    ".chart { width: 100% }\n"
    ".chart text { fill: currentColor; opacity: .75; font-size: 11px }\n"
    ".chart .grid { stroke: #8884; fill: none }\n"
    ".chart polyline { fill: none; stroke-width: 1.6; stroke-linejoin: round }\n"
    ".chart circle:not(.single, :hover) { fill-opacity: 0 }\n"
)


@dataclass(frozen=True, slots=True)
class RunCurve:
    """Values of a run by step.

    Attributes:
        name: Name of the run.
        color: Number of the run's colour.
        points: (step, value) in the order of steps.
    """

    name: str
    color: int
    points: Sequence[Point]


def color_of(number: int) -> str:
    """Return the CSS colour of the run with this number."""
    return f"var(--run{number % len(COLORS)})"


def run_chart(curves: Sequence[RunCurve], title: str, steps: tuple[float, float] | None = None) -> str:
    """Draw curves over the same steps.

    Args:
        curves: Curves with at least one point in all.
        title: Accessible title.
        steps: First and last step of the x axis; None: those of the curves.

    Returns:
        An `<svg>` element.
    """
    x_values = [step for curve in curves for step, _ in curve.points]
    y_values = [value for curve in curves for _, value in curve.points]
    x_range = steps or (min(x_values), max(x_values))
    x_axis = _Axis(_ticks(*x_range, whole=True), (LEFT, WIDTH - RIGHT), x_range)
    y_ticks = _ticks(min(y_values), max(y_values))
    y_axis = _Axis(y_ticks, (HEIGHT - BOTTOM, TOP), (min(*y_values, y_ticks[0]), max(*y_values, y_ticks[-1])))
    parts = [*_grid(x_axis, y_axis), *(part for curve in curves for part in _curve(curve, x_axis, y_axis))]
    content = "\n".join(parts)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{escape(title)}</title>\n'
        f"{content}\n</svg>"
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    """Linear scale from a range of values to a range of pixels, with the values of its ticks."""

    ticks: Sequence[float]
    pixels: tuple[float, float]
    values: tuple[float, float]

    def position(self, value: float) -> float:
        """Return the pixel of a value."""
        (first, last), (low, high) = self.pixels, self.values
        return first + (last - first) * ((value - low) / (high - low) if high > low else 0.5)


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return round numbers from the largest at most `low`, or the first above it if they are whole, to `high`."""
    if whole and low == high:
        return [low]
    span = _span(low, high)
    power = 10.0 ** math.floor(math.log10(span / NUM_TICKS))
    size = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= NUM_TICKS)
    size = max(1.0, size) if whole else size
    first, last = (
        (math.ceil(low / size), math.floor(high / size)) if whole else (math.floor(low / size), math.ceil(high / size))
    )
    return [number * size for number in range(first, last + 1)]


def _span(low: float, high: float) -> float:
    """Return the range of an axis, at least 1e-5 of its values: labels have room for seven digits."""
    largest = max(abs(low), abs(high))
    return max(high - low, largest * 1e-5) if high > low else largest or 1.0


def _grid(x_axis: _Axis, y_axis: _Axis) -> Iterator[str]:
    for tick, text in zip(y_axis.ticks, _tick_texts(y_axis.ticks)):
        y = y_axis.position(tick)
        yield f'<path class="grid" d="M{LEFT},{y:.1f} H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    for tick, text in zip(x_axis.ticks, _tick_texts(x_axis.ticks)):
        x = x_axis.position(tick)
        yield f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{text}</text>'


def _tick_texts(ticks: Sequence[float]) -> list[str]:
    """Return ticks as texts with one unit, and with as many digits as tell them apart."""
    largest = max(map(abs, ticks))
    size = ticks[1] - ticks[0] if len(ticks) > 1 else largest or 1.0
    scale, unit = next(((scale, unit) for scale, unit in UNITS if largest >= 1e4 and scale <= largest), (1.0, ""))
    if largest and not MIN_FIXED <= largest < MAX_FIXED:
        digits = max(0, math.floor(math.log10(largest) + 1e-9) - math.floor(math.log10(size) + 1e-9))
        return [f"{tick:.{digits}e}" for tick in ticks]
    digits = max(0, -math.floor(math.log10(size / scale) + 1e-9))
    return [f"{tick / scale:.{digits}f}{unit if tick else ''}" for tick in ticks]


def _curve(curve: RunCurve, x_axis: _Axis, y_axis: _Axis) -> Iterator[str]:
    points = thin_out(curve.points)
    color = color_of(curve.color)
    line = " ".join(f"{x_axis.position(step):.1f},{y_axis.position(value):.1f}" for step, value in points)
    yield f'<polyline points="{line}" stroke="{color}"/>'
    if len(points) > MAX_DOTS:
        return
    for step, value in points:
        name = escape(f"{curve.name}, step {step:,.0f}: {value:.6g}")
        position = f'cx="{x_axis.position(step):.1f}" cy="{y_axis.position(value):.1f}"'
        look = 'r="4"' if len(points) > 1 else 'class="single" r="3"'  # a line of one point is invisible
        yield f'<circle {position} {look} fill="{color}" stroke="{color}" stroke-opacity="0">'
        yield f"<title>{name}</title></circle>"


def thin_out(points: Sequence[Point], max_points: int = MAX_POINTS) -> Sequence[Point]:
    """Return at most `max_points` points: the lowest and the highest of equal parts, in the order of steps."""
    if len(points) <= max_points:
        return points
    num_parts = max_points // 2
    kept: list[Point] = []
    for number in range(num_parts):
        start, stop = (len(points) * n // num_parts for n in (number, number + 1))
        part = points[start:stop]
        extremes = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(extremes)
    return kept
