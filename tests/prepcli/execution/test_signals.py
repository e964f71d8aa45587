"""Signals within a conversion."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading

import pytest

from prepcli.execution.signals import (
    STOP_SIGNALS,
    Stopped,
    interrupt_at_once,
    raise_on_signal,
    remember_signal,
)
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


def test_remembered_signal_is_answered_in_a_thread() -> None:
    """The main thread need not run Python code: here it waits for the answer."""
    answers = queue.SimpleQueue[str]()
    with remember_signal(answers.put, fail) as poll:
        assert poll() == ""
        os.kill(os.getpid(), signal.SIGUSR1)
        assert answers.get(timeout=MAX_S) == "SIGUSR1"
        assert poll() == "SIGUSR1"
        # Repeated by a job manager: no second answer, and no end of the process
        os.kill(os.getpid(), signal.SIGTERM)
        assert poll() == "SIGUSR1"
    assert answers.empty()


def test_second_ctrl_c_calls_the_quit_function() -> None:
    answers, quits = queue.SimpleQueue[str](), threading.Event()
    with remember_signal(answers.put, quits.set):
        os.kill(os.getpid(), signal.SIGTERM)
        answers.get(timeout=MAX_S)
        os.kill(os.getpid(), signal.SIGINT)
        assert quits.wait(MAX_S)


def test_first_interrupt_raises_and_the_second_one_quits() -> None:
    quits, handler = threading.Event(), signal.getsignal(signal.SIGINT)

    def convert() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            # The main thread is not interrupted again while it cleans up.
            os.kill(os.getpid(), signal.SIGINT)
            assert quits.wait(MAX_S)

    with pytest.raises(KeyboardInterrupt), interrupt_at_once(lambda _: None, quits.set):
        convert()
    assert signal.getsignal(signal.SIGINT) is handler


def fail() -> None:
    raise AssertionError("the process would end")
