"""Signals within a conversion."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from prepcli.execution.signals import STOP_SIGNALS, Stopped, raise_on_signal
from tests.helpers.waiting import MAX_S

TWICE = """
import os, signal
from prepcli.execution.signals import raise_on_signal
with raise_on_signal():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        print("still here")
"""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_raises_a_base_exception(number: signal.Signals) -> None:
    caught = []

    def convert() -> None:
        with raise_on_signal():
            try:
                os.kill(os.getpid(), number)
            except Exception as error:
                caught.append(error)

    with pytest.raises(Stopped) as stopped:
        convert()
    assert caught == []
    assert stopped.value.signal_name == number.name


def test_signal_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with raise_on_signal():
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_second_signal_ends_the_process_at_once() -> None:
    process = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=MAX_S, check=False
    )
    assert (process.returncode, process.stdout) == (-signal.SIGTERM, "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signal_in_a_destructor_is_raised_at_the_end() -> None:
    class Signals:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    reached = []

    def convert() -> None:
        with raise_on_signal():
            Signals()
            reached.append("the end of the block")

    with pytest.raises(Stopped):
        convert()
    assert reached == ["the end of the block"]
