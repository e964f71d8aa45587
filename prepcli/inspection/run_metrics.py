"""Metrics and samples of a run in bounded memory: curves with their extremes, and evenly spaced values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Generic, TypeVar

# A file of metrics may have any length and any names. These limits bound a record of it to 512
# curves of 2,048 points.
# Larger integers are not floats, and axes cannot show them.
MAX_NUMBER = 1e300
# Buckets of a curve. A curve with at most this many points is exact.
MAX_BUCKETS = 1024
MAX_CURVES = 512
MAX_NAME_NCHARS = 256
MAX_MEDIAN_VALUES = 1 << 14
MAX_EVAL_SIZES = 256
MEDIAN_NAMES = ("tokens_per_s", "mfu")

Point = tuple[float, float]
T = TypeVar("T")


def is_number(value: object) -> bool:
    """Return whether a value of a JSON file is a finite number."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER
    )


class RunningCurve:
    """Points of a metric in the order of a file, at most `MAX_BUCKETS` buckets of as many points each.

    A bucket keeps its lowest and its highest point, so that spikes stay visible. When all buckets are full,
    neighbours are merged, and the next buckets are twice as large. The result depends only on the points.

    Attributes:
        last: The last value.
    """

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        """Create a curve without points.

        Args:
            max_buckets: Maximum number of buckets, an even number.
        """
        self.last: float | None = None
        self._lows: list[Point] = []
        self._highs: list[Point] = []
        self._max_buckets = max_buckets
        self._bucket_size = 1
        self._room = 0  # number of points that still fit into the last bucket

    def add(self, step: float, value: float) -> None:
        """Append a point."""
        self.last = value
        if self._room:
            self._room -= 1
            if value < self._lows[-1][1]:
                self._lows[-1] = (step, value)
            elif value > self._highs[-1][1]:
                self._highs[-1] = (step, value)
            return
        if len(self._lows) == self._max_buckets:
            self._merge_neighbours()
        self._lows.append((step, value))
        self._highs.append((step, value))
        self._room = self._bucket_size - 1

    def points(self) -> list[Point]:
        """Return the lowest and the highest point of each bucket, in the order of steps."""
        points: list[Point] = []
        for low, high in zip(self._lows, self._highs):
            # The set keeps one point if both extremes are equal. Points sort by step.
            points += sorted({low, high})
        return points

    def _merge_neighbours(self) -> None:
        """Merge each pair of neighbouring buckets into one bucket of twice the size. All buckets are full."""
        # The number of buckets is even, so each bucket has a neighbour to merge with.
        value = itemgetter(1)
        self._lows = [min(pair, key=value) for pair in zip(self._lows[::2], self._lows[1::2])]
        self._highs = [max(pair, key=value) for pair in zip(self._highs[::2], self._highs[1::2])]
        self._bucket_size *= 2


class EvenSample(Generic[T]):
    """At most `capacity` items of a sequence, evenly spaced from the first item. A short sequence is kept whole."""

    def __init__(self, capacity: int) -> None:
        """Create an empty sample.

        Args:
            capacity: Maximum number of items.
        """
        self.count = 0
        self.items: list[T] = []
        self._capacity = capacity
        self._distance = 1

    def add(self, item: T) -> None:
        """Append an item to the sequence."""
        if self.count % self._distance == 0:
            if len(self.items) == self._capacity:
                # Every second item stays, e.g. 0 2 4 6 with distance 2: 0 4 with distance 4.
                self.items = self.items[::2]
                self._distance *= 2
            if self.count % self._distance == 0:
                self.items.append(item)
        self.count += 1


@dataclass(slots=True)
class RunMetrics:
    """Metrics of a run.

    Attributes:
        steps: Lowest and highest step with a line, or None without lines.
        last_step: Step of the last line, or None without lines.
        curves: Curve of each name, in the order of the first lines with it.
    """

    steps: tuple[float, float] | None = None
    last_step: int | None = None
    curves: dict[str, RunningCurve] = field(default_factory=dict)
    _median_values: dict[str, EvenSample[float]] = field(
        default_factory=lambda: {name: EvenSample(MAX_MEDIAN_VALUES) for name in MEDIAN_NAMES}
    )
    # Keyed by the number of evaluation tokens.
    _best_losses: dict[float | None, float] = field(default_factory=dict)

    @staticmethod
    def of(lines: Iterable[Mapping[str, Any]]) -> RunMetrics:
        """Return the metrics of lines with steps."""
        metrics = RunMetrics()
        for line in lines:
            metrics.add(line)
        return metrics

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line. Values other than finite numbers are ignored, and so is a line without a finite step."""
        step = line["step"]
        if not is_number(step):
            return
        self.last_step = step
        low, high = self.steps or (step, step)
        self.steps = (min(low, step), max(high, step))
        for name, value in line.items():
            curve = self.curves.get(name) or self._new_curve(name)
            # The first test is the fast one.
            if (
                curve is not None
                and (type(value) is float or is_number(value))
                and -MAX_NUMBER < value < MAX_NUMBER
            ):
                curve.add(step, value)
                if name in self._median_values:
                    self._median_values[name].add(value)
        if is_number(line.get("eval_loss")):
            self._add_loss(line["eval_loss"], line.get("eval_tokens"))

    def points(self, name: str) -> list[Point]:
        """Return (step, value) pairs of a name. Long curves keep only the extremes of each bucket."""
        curve = self.curves.get(name)
        if curve:
            return curve.points()
        return []

    def last(self, name: str) -> float | None:
        """Return the last value of a name, or None if there is none."""
        curve = self.curves.get(name)
        if curve:
            return curve.last
        return None

    def median_values(self, name: str) -> list[float]:
        """Return values of a name at equal distances."""
        return self._median_values[name].items

    def best_eval_loss(self) -> float | None:
        """Return the lowest evaluation loss. Only evaluations on as many tokens as the last one count."""
        return next(reversed(self._best_losses.values()), None)

    def _new_curve(self, name: str) -> RunningCurve | None:
        if name == "step" or len(self.curves) >= MAX_CURVES or len(name) > MAX_NAME_NCHARS:
            return None
        return self.curves.setdefault(name, RunningCurve())

    def _add_loss(self, loss: float, num_tokens: object) -> None:
        if isinstance(num_tokens, int | float) and is_number(num_tokens):
            key = num_tokens
        else:
            key = None
        best = self._best_losses.pop(key, loss)
        # The last number of tokens is the last key.
        self._best_losses[key] = min(best, loss)
        if len(self._best_losses) > MAX_EVAL_SIZES:
            # `pop` above moves a used key to the end, so the first key is the one that was not used for longest.
            del self._best_losses[next(iter(self._best_losses))]
