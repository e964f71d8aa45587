"""Exports of steps in the background: order, use of steps, failures and stops."""

from __future__ import annotations

import errno
import threading

import pytest

from prepcli.core.errors import PrepError
from prepcli.execution.step_exports import StepExports
from tests.helpers.waiting import MAX_S


def test_due_steps_are_exported_in_order():
    exported, warnings = list[int](), list[str]()
    exports = StepExports(2, export=exported.append, warn=warnings.append)
    for step in (1, 2, 3, 4):
        exports.start(step)
    exports.wait()
    assert (exported, warnings) == ([2, 4], [])
    exports.start(6)
    exports.wait()
    assert exported == [2, 4, 6]


def _wait(event: threading.Event) -> None:
    event.wait()


def test_steps_are_in_use_until_their_export_ends():
    may_end, notes = threading.Event(), list[str]()

    def note(text: str) -> None:
        notes.append(text)
        may_end.set()

    exports = StepExports(1, export=lambda step: _wait(may_end), warn=print, note=note)
    exports.start_missing([1, 2])
    assert set(exports.in_use()) == {1, 2}
    exports.wait()
    assert not exports.in_use()
    assert notes == ["exporting steps 1, 2"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PrepError("out exists", "it is something else"), "out exists - it is something else"),
        (OSError(errno.EIO, "Input/output error", "out"), "cannot use out - Input/output error"),
    ],
)
def test_failed_export_warns_and_the_next_one_runs(error: Exception, text: str):
    exported, warnings = list[int](), list[str]()

    def export(step: int) -> None:
        if step == 1:
            raise error
        exported.append(step)

    exports = StepExports(1, export=export, warn=warnings.append)
    exports.start_missing([1, 2])
    exports.wait()
    assert exported == [2]
    assert warnings == [f"step 1 was not exported: {text}"]
    assert not exports.in_use()


def test_abandoned_exports_are_not_waited_for():
    may_end, has_begun = threading.Event(), threading.Event()
    exported = list[int]()

    def export(step: int) -> None:
        has_begun.set()
        may_end.wait()
        exported.append(step)

    others = {*threading.enumerate()}
    exports = StepExports(1, export=export, warn=print)
    exports.start_missing([1, 2])
    has_begun.wait()
    (thread,) = {*threading.enumerate()} - others
    exports.abandon()
    exports.wait()
    assert exported == []
    may_end.set()
    thread.join()
    assert exported == [1]


def test_the_thread_ends_when_exports_are_abandoned_without_work():
    others, has_ended = {*threading.enumerate()}, threading.Event()
    exports = StepExports(1, export=lambda step: has_ended.set(), warn=print)
    exports.start(1)
    has_ended.wait()
    (thread,) = {*threading.enumerate()} - others
    exports.abandon()
    thread.join(timeout=MAX_S)
    assert not thread.is_alive()
