"""Signals within a conversion."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from prepcli.core.signals import (
    STOP_SIGNALS,
    Stopped,
    answer_signals,
    block_signals,
    note_durable_work,
    notes_of,
    raise_on_signal,
    remember_signal,
)
from prepcli.execution.checkpoint_manager import BackgroundSave
from tests.helpers.waiting import MAX_S

# A wait that a signal does not end: its exception is lost, or another thread receives the signal just before the wait.
LOST_SIGNAL = """
import os, queue, signal, sys, threading
from prepcli.core.signals import Stopped, raise_on_signal

class Signals:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

def wait_after_destructor():
    Signals()
    queue.SimpleQueue().get()

def wait_in_thread_join():
    # Blocked in the main thread only: the kernel gives the signal to the other one.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    thread.start()
    thread.join()

try:
    with raise_on_signal():
        globals()[sys.argv[1]]()
except Stopped as stopped:
    print(stopped.signal_name)
"""

BLOCKED_WITHOUT_HANDLER = """
import os, signal, threading
from prepcli.core.signals import block_signals

threading.Thread(target=threading.Event().wait, daemon=True).start()
received, written = os.pipe()
os.set_blocking(written, False)
signal.set_wakeup_fd(written)
with block_signals():
    os.kill(os.getpid(), signal.SIGTERM)
    # The other thread receives the signal. It may have to wait for a processor.
    os.read(received, 1)
    print("the end of the block", flush=True)
print("the code after it", flush=True)
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


def test_note_that_fails_does_not_hide_the_signal() -> None:
    def describe() -> str:
        raise PrepError("the store does not answer")

    with pytest.raises(Stopped) as stopped, note_durable_work(describe):
        raise Stopped("SIGTERM")
    assert notes_of(stopped.value) == []


def test_signal_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with raise_on_signal():
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_later_stop_signals_do_not_disturb_cleanup() -> None:
    """Job managers repeat a signal before they kill a process."""
    cleaned = []

    def convert() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
            cleaned.append("all")

    with pytest.raises(Stopped) as stopped, raise_on_signal(), raise_on_signal():
        convert()
    assert cleaned == ["all"]
    assert stopped.value.signal_name == "SIGTERM"


@pytest.mark.parametrize("wait", ["wait_after_destructor", "wait_in_thread_join"])
def test_lost_signal_ends_a_wait_of_the_main_thread(wait: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", LOST_SIGNAL, wait],
        capture_output=True,
        text=True,
        timeout=MAX_S,
        check=False,
    )
    assert (process.stdout, process.stderr, process.returncode) == ("SIGTERM\n", "", 0)


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

    with (
        pytest.raises(KeyboardInterrupt),
        answer_signals(lambda _: None, quits.set),
        raise_on_signal([signal.SIGINT]),
    ):
        convert()
    assert signal.getsignal(signal.SIGINT) is handler


def test_one_interrupt_outside_of_inner_blocks_is_not_two() -> None:
    quits, handler = threading.Event(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), answer_signals(lambda _: None, quits.set):
        os.kill(os.getpid(), signal.SIGINT)
    assert not quits.is_set()
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_after_a_remembered_signal_quits() -> None:
    """The thread of the outer block knows the signal of the inner one."""
    quits = threading.Event()
    with answer_signals(lambda _: None, quits.set):
        with remember_signal(lambda _: None, fail):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert quits.wait(MAX_S)


@pytest.mark.parametrize("number", [*STOP_SIGNALS, signal.SIGINT])
def test_blocked_signal_of_another_thread_comes_later(number: signal.Signals) -> None:
    """The kernel gives a signal that the main thread blocks to another thread."""
    arrived, quits = threading.Event(), threading.Event()
    reached: list[str] = []
    handlers = [signal.getsignal(each) for each in (*STOP_SIGNALS, signal.SIGINT)]

    def start_worker() -> None:
        with block_signals():
            os.kill(os.getpid(), number)
            # Python code runs in the main thread until the handler is due.
            assert not arrived.wait(0.2)
            reached.append("the end of the block")
        reached.append("the code after it")

    with (
        pytest.raises((Stopped, KeyboardInterrupt)),
        answer_signals(lambda _: None, quits.set),
        raise_on_signal([*STOP_SIGNALS, signal.SIGINT]),
    ):
        start_worker()
    assert reached == ["the end of the block"]
    # One Ctrl-C is not two.
    assert not quits.is_set()
    assert [signal.getsignal(each) for each in (*STOP_SIGNALS, signal.SIGINT)] == handlers


def test_signal_to_a_saving_thread_neither_tears_nor_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "step"
    blocks = [bytes([number]) * 4096 for number in range(8)]
    begin = threading.Event()

    def save() -> None:
        begin.wait()
        with path.open("wb", buffering=0) as file:
            for block in blocks:
                file.write(block)
                signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
                # A wait of this thread goes on after the signal.
                time.sleep(0.01)

    with remember_signal(lambda _: None, fail) as poll:
        begin.set()
        BackgroundSave(save).wait()
        assert poll() == "SIGTERM"
    assert path.read_bytes() == b"".join(blocks)
    path.unlink()
    begin.clear()

    # The save may send its next signals after the inner block, where their default effect would end the process.
    with remember_signal(lambda _: None, fail):
        saving = BackgroundSave(save)
        with pytest.raises(Stopped):
            wait_interruptibly(saving, begin)
        saving.wait()
    assert path.read_bytes() == b"".join(blocks)


def test_blocked_signal_has_its_default_effect_later() -> None:
    process = subprocess.run(
        [sys.executable, "-c", BLOCKED_WITHOUT_HANDLER],
        capture_output=True,
        text=True,
        timeout=MAX_S,
        check=False,
    )
    assert (process.stdout, process.returncode) == ("the end of the block\n", -signal.SIGTERM)


def wait_interruptibly(saving: BackgroundSave, begin: threading.Event) -> None:
    with raise_on_signal():
        begin.set()
        saving.wait()


def fail() -> None:
    raise AssertionError("the process would end")
