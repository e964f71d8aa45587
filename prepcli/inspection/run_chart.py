"""Curves of runs by step as SVG text, in colours that the style of the page sets for light and dark screens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from prepcli.inspection.run_record import Point

WIDTH, HEIGHT = 420, 220  # small units: text stays readable where a phone shows the chart at about this width
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 26
MAX_POINTS = 400
MAX_DOTS = 80  # curves with more points have no tooltips
NUM_TICKS = 5
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
    ".chart circle:not(:hover) { fill-opacity: 0 }\n"
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


def run_chart(curves: Sequence[RunCurve], title: str) -> str:
    """Draw curves over the same steps.

    Args:
        curves: Curves with at least one point in all.
        title: Title for readers of the page that do not see it.

    Returns:
        An `<svg>` element.
    """
    steps = [step for curve in curves for step, _ in curve.points]
    values = [value for curve in curves for _, value in curve.points]
    across = _Axis(_ticks(min(steps), max(steps), whole=True), (LEFT, WIDTH - RIGHT), (min(steps), max(steps)))
    y_ticks = _ticks(min(values), max(values))
    up = _Axis(y_ticks, (HEIGHT - BOTTOM, TOP), (min(*values, y_ticks[0]), max(*values, y_ticks[-1])))
    parts = [*_grid(across, up), *(part for curve in curves for part in _curve(curve, across, up))]
    inside = "\n".join(parts)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{escape(title)}</title>\n{inside}\n</svg>'
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
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / NUM_TICKS))
    size = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= NUM_TICKS)
    size = max(1.0, size) if whole else size
    first, last = (
        (math.ceil(low / size), math.floor(high / size)) if whole else (math.floor(low / size), math.ceil(high / size))
    )
    return [number * size for number in range(first, last + 1)]


def _grid(across: _Axis, up: _Axis) -> Iterator[str]:
    digits = _digits(up.ticks)
    for tick in up.ticks:
        y = up.position(tick)
        yield f'<path class="grid" d="M{LEFT},{y:.1f} H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick_text(tick, digits)}</text>'
    for tick in across.ticks:
        x = across.position(tick)
        yield f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{_tick_text(tick, 0)}</text>'


def _digits(ticks: Sequence[float]) -> int:
    """Return the digits after the point that tell ticks apart."""
    size = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) or 1.0
    return max(0, -math.floor(math.log10(size) + 1e-9))


def _tick_text(tick: float, digits: int) -> str:
    if abs(tick) >= 1e6:
        return f"{tick / 1e6:g}M"
    if abs(tick) >= 1e4:
        return f"{tick / 1e3:g}k"
    return f"{tick:.{digits}f}" if digits <= 4 else f"{tick:.2g}"


def _curve(curve: RunCurve, across: _Axis, up: _Axis) -> Iterator[str]:
    points = thin_out(curve.points)
    color = color_of(curve.color)
    line = " ".join(f"{across.position(step):.1f},{up.position(value):.1f}" for step, value in points)
    yield f'<polyline points="{line}" stroke="{color}"/>'
    if len(points) > MAX_DOTS:
        return
    for step, value in points:
        name = escape(f"{curve.name}, step {step:,.0f}: {value:.6g}")
        place = f'cx="{across.position(step):.1f}" cy="{up.position(value):.1f}"'
        yield f'<circle {place} r="{4 if len(points) > 1 else 3}" fill="{color}" stroke="{color}" stroke-opacity="0">'
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
