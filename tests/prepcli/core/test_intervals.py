"""The steps of a run after which an event happens: at whole numbers of steps and at fractions, and their number."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from prepcli.core.intervals import EventSteps, Interval, is_due, num_due

LAST = 24


def due_steps(events: EventSteps) -> list[int]:
    return [step for step in range(1, events.last + 1) if events.is_due(step)]


def test_interval_is_due_at_the_first_step_that_completes_it():
    every = Fraction(5, 2)
    assert [step for step in range(1, 11) if is_due(step, every)] == [3, 5, 8, 10]
    assert [step for step in range(1, 11) if is_due(step, 4)] == [4, 8]
    assert not any(is_due(step, 0) for step in range(1, 11))


@pytest.mark.parametrize("every", [0, 1, 4, 5, 12, Fraction(5, 2), Fraction(2, 3)])
def test_number_of_due_steps_is_counted(every: Interval):
    for first in range(1, LAST + 2):
        steps = range(first, LAST + 1)
        assert num_due(steps, every) == sum(is_due(step, every) for step in steps)


def test_event_happens_at_each_interval_and_after_the_last_step():
    assert due_steps(EventSteps((4, 6), 13)) == [4, 6, 8, 12, 13]
    assert due_steps(EventSteps((0,), 13)) == [13]


def test_steps_of_several_intervals_are_counted_once():
    for intervals in product((0, 1, 4, 6, 7, 12), repeat=3):
        events = EventSteps(intervals, LAST)
        for first in (1, 5, LAST, LAST + 1):
            expected = [step for step in due_steps(events) if step >= first]
            assert events.count_from(first) == len(expected), (intervals, first)


def test_steps_of_a_fraction_may_be_counted_twice():
    events = EventSteps((Fraction(5, 2), 8), 20)
    assert due_steps(events) == [3, 5, 8, 10, 13, 15, 16, 18, 20]
    assert events.count_from(1) == 10
