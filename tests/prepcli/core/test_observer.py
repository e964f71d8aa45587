"""Observers of operations: for commands, for Python callers, and for jobs of several processes."""

from __future__ import annotations

import io

import pytest

from prepcli.commands.console.notebook import run_observer_of
from prepcli.commands.console.ui import Ui
from prepcli.core.errors import STOPPED, PrepError
from prepcli.core.observer import (
    CommandObserver,
    OneProcessObserver,
    RecordingObserver,
    RunObserver,
    SilentCommandObserver,
    SilentObserver,
    StreamObserver,
)


def test_ui_is_an_observer_of_commands_runs_and_streams():
    ui = Ui("train", out=io.StringIO(), err=io.StringIO())
    assert run_observer_of(ui) is ui
    assert isinstance(ui, CommandObserver)
    assert isinstance(ui, StreamObserver)


@pytest.mark.parametrize("observer", [SilentObserver(), RecordingObserver(SilentObserver())])
def test_observer_of_a_caller_serves_every_process(observer: SilentObserver | RecordingObserver):
    adapter = run_observer_of(observer)
    assert isinstance(adapter, OneProcessObserver)
    assert isinstance(adapter, RunObserver)
    assert not isinstance(adapter, CommandObserver | StreamObserver)
    assert adapter.for_process(3) is adapter
    assert adapter.open_live_block() is None
    assert adapter.show_final_error(PrepError("stopped", code=STOPPED)) == STOPPED


def test_notes_and_warnings_of_a_run_reach_the_caller():
    recorder = RecordingObserver(SilentObserver())
    run_observer_of(recorder).warn("kernel fails")
    assert recorder.warnings == ["kernel fails"]


def test_silent_command_observer_is_a_command_observer():
    assert isinstance(SilentCommandObserver(command="export"), CommandObserver)
