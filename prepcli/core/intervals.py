"""The steps of a run after which an event happens, such as a save: at intervals, and the last one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

# Steps. 0 means never.
Interval = int | Fraction


def is_due(step: int, every: Interval) -> bool:
    """Return whether an event happens after a step: the first step that completes a multiple of the interval."""
    # With every = 5/2, the quotients of steps 1 to 5 are 0 0 1 1 2: it happens after steps 3 and 5.
    return bool(every) and step // every > (step - 1) // every


def num_due(steps: range, every: Interval) -> int:
    """Return the number of steps of a range after which an event happens."""
    if not every or not steps:
        return 0
    # With every = 1/2, each step completes two multiples.
    return min(len(steps), steps[-1] // every - (steps[0] - 1) // every)


@dataclass(frozen=True, slots=True)
class EventSteps:
    """The steps after which an event of a run happens."""

    intervals: tuple[Interval, ...]  # It happens at each of them.
    last: int  # The last step of the run, after which it always happens

    def is_due(self, step: int) -> bool:
        """Return whether the event happens after a step."""
        return step == self.last or any(is_due(step, every) for every in self.intervals)

    def count_from(self, first_step: int) -> int:
        """Return the number of events after the steps from this one on.

        With an interval that is a fraction it may be a few more: steps of two intervals are then counted twice.
        """
        steps = range(first_step, self.last + 1)
        whole: set[int] = set()
        count = 0
        for every in set(self.intervals):
            if every == int(every):
                whole.add(int(every))
            else:
                count += num_due(steps, every)
        # Inclusion and exclusion: 3 of 12 steps are multiples of 4, 2 of 6, and step 12 of both, so 3 + 2 - 1 are due.
        for size in range(1, len(whole) + 1):
            for some in combinations(whole, size):
                count -= (-1) ** size * num_due(steps, math.lcm(*some))
        if steps and not any(is_due(self.last, every) for every in self.intervals):
            count += 1
        return min(count, len(steps))
