"""The events between training steps: when they are due, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

# Steps. 0 means never.
Interval = int | Fraction


def is_due(step: int, every: Interval) -> bool:
    """Return whether an event happens after a step: the first step that completes a multiple of the interval."""
    # With every = 5/2, the quotients of steps 1 to 5 are 0 0 1 1 2: it happens after steps 3 and 5.
    return bool(every) and step // every > (step - 1) // every


def num_due(first_step: int, last_step: int, every: Interval) -> int:
    """Return how often an event happens after the steps of a range, if it always happens after the last one."""
    count = 0
    if every:
        count = last_step // every - (first_step - 1) // every
    return count + (not is_due(last_step, every))


@dataclass(frozen=True, slots=True)
class MissingEvents:
    """Events of the start step that an earlier process of the run has not logged.

    Attributes:
        evaluation: Whether its evaluation is missing.
        num_samples: Number of missing samples, the last ones of the step.
    """

    evaluation: bool = False
    num_samples: int = 0

    def __bool__(self) -> bool:
        """Return whether an event is missing."""
        return self.evaluation or self.num_samples > 0


NO_MISSING_EVENTS = MissingEvents()


@dataclass(slots=True)
class EventTimes:
    """The seconds that the last event of each kind took, such as `evaluation` or `save`.

    Attributes:
        clock: Returns the time in seconds.
        seconds: Seconds by kind. An event that was interrupted is not among them.
    """

    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Measure the event of the `with` block."""
        started_s = self.clock()
        yield
        self.seconds[kind] = self.clock() - started_s
