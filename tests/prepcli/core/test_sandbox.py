"""Objects in a child process: results, errors, limits, signals, and the end of either process."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prepcli.core import sandbox
from prepcli.core.sandbox import MIB, Limits, Sandbox, SandboxError, SandboxLimitError
from tests.helpers.slow_cases import slow_except
from tests.helpers.waiting import wait_until

LIMITS = Limits(64 * MIB, cpu_s=1)


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Collect what other tests have left, once: with their millions of objects each collection takes seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_idle() -> Iterator[None]:
    """Start without children of other tests, and leave none."""
    gc.collect()
    sandbox.stop_idle()
    yield
    gc.collect()
    sandbox.stop_idle()


def make(class_name: str, *arguments: Any) -> Sandbox:
    return Sandbox(class_name, arguments, limits=LIMITS)


def module(name: str) -> Sandbox:
    """Return a module of a child."""
    return make("importlib:import_module", name)


def child_pid(box: Sandbox) -> int:
    return box._children[0]._process.pid


def test_values_and_bytes_are_passed_and_returned():
    box = make("builtins:dict", [["a", 1.5], ["b", None]])
    assert box.call("get", "a", limits=LIMITS) == [1.5]
    assert box.call("get", "é\ud800", [{"x": "\n"}], limits=LIMITS) == [[{"x": "\n"}]]
    assert box.call("popitem", limits=LIMITS) == ["b", None]
    assert make("builtins:bytes", b"a\0b").call("__add__", b"\xff", limits=LIMITS) == [b"a\0b\xff"]


def test_exception_is_an_error_with_its_type():
    box = make("builtins:list")
    with pytest.raises(SandboxError, match=r"^pop from empty list$") as caught:
        box.call("pop", limits=LIMITS)
    assert caught.value.type_name == "builtins.IndexError"
    assert box.call("__len__", limits=LIMITS) == [0]


def test_exception_of_the_creation_is_an_error():
    box = make("builtins:int", "x")
    for _ in range(2):
        with pytest.raises(SandboxError, match="invalid literal for int"):
            box.call("bit_length", limits=LIMITS)
    assert make("builtins:int", "3").call("bit_length", limits=LIMITS) == [2]


def test_allocation_beyond_the_limit_is_an_error():
    box = make("builtins:str", "abc")
    pid = box.call("__len__", limits=LIMITS) and child_pid(box)
    with pytest.raises(SandboxLimitError, match=r"^it needs more than 64 MiB of memory$") as caught:
        box.call("__mul__", 10**8, limits=LIMITS)
    assert caught.value.is_memory
    # Another child has the same object.
    assert box.call("__len__", limits=LIMITS) == [3]
    assert child_pid(box) != pid
    (text,) = box.call("__mul__", 10**6, limits=LIMITS)
    assert text == "abc" * 10**6


def test_cpu_time_beyond_the_limit_is_an_error():
    """A power of integers is one call of C, which no signal handler of Python interrupts."""
    box = make("builtins:int", 3)
    with pytest.raises(SandboxLimitError, match=r"^it took more than 1 s of CPU time$") as caught:
        box.call("__pow__", 10**9, limits=Limits(4096 * MIB, cpu_s=1))
    assert not caught.value.is_memory
    assert box.call("__pow__", 2, limits=LIMITS) == [9]


def test_time_without_computing_is_not_limited():
    assert module("time").call("sleep", 2.5, limits=LIMITS) == [None]


def test_each_call_has_its_own_time():
    box = module("time")
    start_s = time.monotonic()
    n_calls = 0
    while time.monotonic() < start_s + 3:
        box.call("sleep", 0, limits=LIMITS)
        n_calls += 1
    assert n_calls > 3


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGSEGV, "its process was ended by SIGSEGV"),
        (
            signal.SIGABRT,
            "its process was ended by SIGABRT, probably because it needs more than 64 MiB of memory",
        ),
        (
            signal.SIGKILL,
            "its process was ended by SIGKILL, probably because it needs more than 64 MiB of memory",
        ),
    ],
)
def test_signal_that_ends_a_call_is_an_error(number: signal.Signals, why: str):
    box = module("signal")
    with pytest.raises(SandboxError, match=rf"^{why}$"):
        box.call("raise_signal", number, limits=LIMITS)
    assert box.call("getsignal", signal.SIGSEGV, limits=LIMITS) == [0]


def test_exit_in_a_call_is_an_error():
    with pytest.raises(SandboxError, match=r"^its process ended with exit code 3$"):
        module("os").call("_exit", 3, limits=LIMITS)


def test_idle_child_that_was_killed_is_replaced():
    """The kernel may kill an idle child to free memory, while the process trains between two calls."""
    box = module("os")
    (pid,) = box.call("getpid", limits=LIMITS)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not box._children[0].is_usable)
    assert box.call("getpid", limits=LIMITS) != [pid]


def test_limits_of_a_call_do_not_bound_the_next_request():
    box = make("builtins:bytes")
    assert box.call("__len__", limits=LIMITS) == [0]
    data = bytes(200 * MIB)
    assert box.call("find", data, limits=Limits(1024 * MIB, cpu_s=10)) == [-1]


@pytest.mark.slow
def test_time_limit_holds_if_the_parent_ignores_the_signal():
    before = signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    try:
        box = make("builtins:int", 3)
        with pytest.raises(SandboxLimitError, match="1 s of CPU time"):
            box.call("__pow__", 10**9, limits=Limits(4096 * MIB, cpu_s=1))
    finally:
        signal.signal(signal.SIGXCPU, before)


def test_idle_child_frees_the_object():
    limits = Limits(1024 * MIB, cpu_s=10)
    box = Sandbox("builtins:bytearray", (300 * MIB,), limits=limits)
    box.start()
    pid = child_pid(box)
    assert _data_nbytes(pid) > 300 * MIB
    del box
    gc.collect()
    wait_until(lambda: _data_nbytes(pid) < 300 * MIB)


def test_child_outlives_the_folder_of_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    box = module("os")
    box.start()
    monkeypatch.chdir(tmp_path)
    folder.rmdir()
    assert box.call("getcwd", limits=LIMITS)


def _data_nbytes(pid: int) -> int:
    """Return the private memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmData")]
    return int(line.split()[1]) * 1024


def test_next_sandbox_uses_the_same_child():
    (pid,) = module("os").call("getpid", limits=LIMITS)
    gc.collect()
    assert module("os").call("getpid", limits=LIMITS) == [pid]


@pytest.mark.parametrize(
    "number",
    slow_except([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], [signal.SIGTERM]),
)
def test_child_survives_signals_to_the_job(number: signal.Signals):
    box = module("signal")
    assert box.call("raise_signal", number, limits=LIMITS) == [None]


def test_output_of_a_library_is_not_a_message():
    box = module("os")
    assert box.call("system", "echo text; cat", limits=LIMITS) == [0]
    assert box.call("write", 1, b"text", limits=LIMITS) == [4]


def test_parent_file_is_read_in_ranges():
    data = os.urandom(9 * MIB)
    box = make("prepcli.core.sandbox:ParentFile", len(data))
    stream = io.BytesIO(data)
    assert box.call("read", 5, limits=LIMITS, file=stream) == [data[:5]]
    assert box.call("seek", 4 * MIB, limits=LIMITS) == [4 * MIB]
    assert box.call("read", limits=LIMITS, file=stream) == [data[4 * MIB :]]
    assert box.call("read", limits=LIMITS, file=stream) == [b""]


def test_error_of_the_parent_file_leaves_no_half_answer():
    class BrokenFile(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError("the store is gone")

    box = make("prepcli.core.sandbox:ParentFile", 100)
    with pytest.raises(OSError, match="the store is gone"):
        box.call("read", 5, limits=LIMITS, file=BrokenFile())
    assert box.call("read", 5, limits=LIMITS, file=io.BytesIO(b"abcdefgh")) == [b"abcde"]


def test_threads_share_a_sandbox():
    box = make("builtins:str", "abc")
    results: list[Any] = []

    def call() -> None:
        for number in range(200):
            results.append(box.call("__mul__", number % 7, limits=LIMITS) == ["abc" * (number % 7)])

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 800


FORK = """
import os
from prepcli.core.sandbox import MIB, Limits, Sandbox
limits = Limits(64 * MIB, cpu_s=10)
box = Sandbox("importlib:import_module", ["os"], limits=limits)
first = box.call("getpid", limits=limits)
forked = os.fork()
if not forked:
    os._exit(box.call("getpid", limits=limits) == first)
assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
assert box.call("getpid", limits=limits) == first
"""


def test_forked_process_has_a_child_of_its_own():
    # A process of its own: other tests may have started the threads of JAX in this one.
    subprocess.run([sys.executable, "-c", FORK], check=True)


PARENT = """
import sys
from prepcli.core.sandbox import MIB, Limits, Sandbox
limits = Limits(4096 * MIB, cpu_s=1000)
box = Sandbox("importlib:import_module", ["time"], limits=limits)
box.start()
print(box._children[0]._process.pid, flush=True)
"""
WAITS = {"between calls": "sys.stdin.read()", "in a call": "box.call('sleep', 1000, limits=limits)"}


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_child_ends_with_its_killed_parent(wait: str):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT + wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not has_ended(pid)
    parent.kill()
    parent.wait()
    wait_until(lambda: has_ended(pid))
    parent.stdin.close()
    parent.stdout.close()
