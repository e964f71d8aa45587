"""Charts as SVG text for self-contained pages: curves, bars, and the devices that hold each slice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from trainer.models.partition import Box

WIDTH, HEIGHT, MARGIN = 640, 240, 44
COLORS = ("#8fb7e8", "#c2410c", "#15803d", "#7c3aed", "#ca8a04", "#0e7490")


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y) in the order of x. A wide curve stays visible below a narrow one."""

    name: str
    points: Sequence[tuple[float, float]]
    width: float = 2.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: its name, its length, and the text of its value."""

    name: str
    value: float
    text: str


def line_chart(
    curves: Sequence[Curve],
    marks: Sequence[tuple[float, str]] = (),
    *,
    title: str = "",
    from_zero: bool = False,
    is_log: bool = False,
) -> str:
    """Draw curves on shared axes.

    Args:
        curves: The curves.
        marks: Vertical lines: x and name.
        title: Title of the chart.
        from_zero: Whether the axes begin at 0.
        is_log: Whether both axes are logarithmic; all values are then positive.

    Returns:
        An `<svg>` element; empty without points.
    """
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    if not xs:
        return ""
    low_x, low_y = (0, 0) if from_zero else (min(xs), min(ys))
    across = _Scale(low_x, max(xs), MARGIN, WIDTH - 28, is_log)
    up = _Scale(low_y, max(ys), HEIGHT - 28, 24, is_log)
    parts = [*_axes(across, up), *(_mark(across.position(x), name) for x, name in marks)]
    for number, curve in enumerate(curves):
        colour = COLORS[number % len(COLORS)]
        line = " ".join(f"{across.position(x):.1f},{up.position(y):.1f}" for x, y in curve.points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{curve.width}"/>')
        parts.append(_text(WIDTH / 2, 36 + 16 * number, curve.name, "middle", colour))
    return _svg(WIDTH, HEIGHT, parts, title)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Linear or logarithmic scale from values to pixels."""

    low: float
    high: float
    first: float
    last: float
    is_log: bool = False

    @property
    def middle(self) -> float:
        """The value in the middle."""
        return math.sqrt(self.low * self.high) if self.is_log else (self.low + self.high) / 2

    def position(self, value: float) -> float:
        """Return the pixel of a value."""
        value, low, high = (math.log(number) if self.is_log else number for number in (value, self.low, self.high))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.first + share * (self.last - self.first)


def _axes(across: _Scale, up: _Scale) -> Iterable[str]:
    yield f'<path d="M{across.first},{up.last} V{up.first} H{across.last}" fill="none" stroke="currentColor"/>'
    for value in (up.low, up.middle, up.high):
        text = f"{value:.2f}" if value < 1000 else f"{value:,.0f}"
        yield _text(across.first - 6, up.position(value) + 4, text, "end")
    for value in (across.low, across.high):
        yield _text(across.position(value), up.first + 18, f"{value:.3g}", "middle")


def _mark(x: float, name: str) -> str:
    line = f'<path d="M{x:.1f},20 V{HEIGHT - 28}" stroke="currentColor" stroke-dasharray="3 4" opacity="0.5"/>'
    return line + _text(x, 14, name, "middle")


def bar_chart(bars: Sequence[Bar], limit: Bar | None = None, *, title: str = "") -> str:
    """Draw horizontal bars, and a vertical line for the limit."""
    longest = max([bar.value for bar in bars] + ([limit.value] if limit else []), default=0) or 1
    left, room, height = 200, WIDTH - 300, 24 * len(bars) + 30
    parts = []
    for number, bar in enumerate(bars):
        y, width = 24 * number + 24, room * bar.value / longest
        parts.append(_text(left - 8, y + 13, bar.name, "end"))
        parts.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="16" fill="{COLORS[0]}"/>')
        parts.append(_text(left + width + 6, y + 13, bar.text))
    if limit:
        x = left + room * limit.value / longest
        parts.append(f'<path d="M{x:.1f},18 V{height - 4}" stroke="{COLORS[1]}" stroke-width="2"/>')
        parts.append(_text(x, 13, f"{limit.name} {limit.text}", "middle", COLORS[1]))
    return _svg(WIDTH, height, parts, title)


def stacked_bar(parts: Sequence[Bar], limit: Bar | None = None, *, title: str = "") -> str:
    """Draw the parts of a total as one horizontal bar with a legend, and a vertical line for the limit."""
    room, height = WIDTH - 40, 80 + 18 * len(parts)
    longest = max(sum(part.value for part in parts), limit.value if limit else 0) or 1
    elements, x = [], 20.0
    for number, part in enumerate(parts):
        colour, width, y = COLORS[number % len(COLORS)], room * part.value / longest, 74 + 18 * number
        elements.append(f'<rect x="{x:.1f}" y="24" width="{width:.1f}" height="28" fill="{colour}"/>')
        elements.append(f'<rect x="20" y="{y}" width="12" height="12" fill="{colour}"/>')
        elements.append(_text(40, y + 11, f"{part.name}: {part.text}"))
        x += width
    if limit:
        mark = 20 + room * limit.value / longest
        anchor = "end" if mark > WIDTH / 2 else "start"
        elements.append(f'<path d="M{mark:.1f},18 V58" stroke="currentColor" stroke-width="2"/>')
        elements.append(_text(mark, 13, f"{limit.name} {limit.text}", anchor))
    return _svg(WIDTH, height, elements, title)


def shard_map_svg(shape: Sequence[int], boxes: Sequence[Box], *, title: str = "") -> str:
    """Draw a matrix cut into the slices that devices hold; the tooltip of a slice shows its rows and columns."""
    width, height = 420, 220
    parts = []
    for rows, columns in dict.fromkeys((box[0], box[1]) for box in boxes):
        holders = [str(n) for n, box in enumerate(boxes) if (box[0], box[1]) == (rows, columns)]
        x, y = width * columns[0] / shape[1], height * rows[0] / shape[0]
        w, h = width * (columns[1] - columns[0]) / shape[1], height * (rows[1] - rows[0]) / shape[0]
        name = f"device {', '.join(holders)}: rows {rows[0]}:{rows[1]}, columns {columns[0]}:{columns[1]}"
        parts.append(
            f'<g><title>{escape(name)}</title><rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{w:.1f}" height="{h:.1f}"'
            f' fill="{COLORS[0]}" fill-opacity="0.5" stroke="currentColor"/>'
            f"{_text(x + w / 2, y + h / 2 + 4, ', '.join(holders), 'middle')}</g>"
        )
    return _svg(width + 2, height + 2, parts, title)


def _text(x: float, y: float, text: str, anchor: str = "start", color: str = "currentColor") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'


def _svg(width: int, height: int, parts: Iterable[str], title: str) -> str:
    inside = "\n".join(parts)
    name = f"<title>{escape(title)}</title>" if title else ""
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">{name}\n{inside}\n</svg>'
