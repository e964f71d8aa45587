"""Run code on untrusted input in a child process, with limits of memory and CPU time.

A `Sandbox` is an object in a child process, such as a compiled chat template or a loaded tokenizer. Its class is one of
prep, its arguments and results are JSON values and bytes. The libraries that it calls may crash, loop or allocate
without end: that ends the child, and the parent raises one error. The next call starts another child.

The processes exchange messages over a pair of pipes. The parent writes only while the child waits for a message, so the
pipes cannot deadlock:

    parent                      child
    MAKE class, limits, arguments   ->
    CALL method, limits, arguments  ->
    DROP                            ->                         without an answer
                                    <-  READ offset, length    as often as the method reads the parent's file
    DATA bytes                      ->
                                    <-  RETURN results, or RAISE an error

Both processes have this module. The child is started as a program and not forked: a fork copies the locks of JAX's
threads.
"""

from __future__ import annotations

import atexit
import importlib
import io
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MIB = 1 << 20
# Bytes of the parent's file in one message, which both processes hold in memory.
MAX_READ_NBYTES = 4 * MIB
# Children without a sandbox that are kept for the next one. A new child takes a tenth of a second to start.
MAX_IDLE = 4
MAX_ERROR_CHARS = 2000
# Seconds in which a child with closed pipes ends.
END_S = 10.0
# Seconds between two looks of a child at its parent.
PARENT_POLL_S = 1.0
HEADER = struct.Struct("<Q")
# Without -P, a file `json.py` in the current folder would be imported.
COMMAND = (sys.executable, "-P", "-c", "from prepcli.core.sandbox import main; main()")
# Other allocators of pyarrow reserve 1 GiB at once, which counts for the limit.
ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system"}

MAKE = "make"
CALL = "call"
DROP = "drop"
READ = "read"
DATA = "data"
RETURN = "return"
RAISE = "raise"
MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one call.

    Attributes:
        memory_nbytes: Private memory of the child beyond that of its imports.
        cpu_s: Seconds of CPU time, in all threads together. A busy machine does not change them.
    """

    memory_nbytes: int
    cpu_s: int


class _ProcessEndedError(Exception):
    """The process at the other end of the pipes has ended. The parent's file may raise EOFError itself."""


class SandboxError(Exception):
    """A call in a child process failed.

    Attributes:
        type_name: Type of the exception in the child, e.g. `builtins.ValueError`. Empty if the child ended.
    """

    def __init__(self, why: str, type_name: str = "") -> None:
        """Create the error from its cause and the type of the exception in the child."""
        super().__init__(why)
        self.type_name = type_name


class SandboxLimitError(SandboxError):
    """A call reached a limit. Whether it does may depend on the machine.

    Attributes:
        is_memory: Whether an allocation failed. Otherwise a signal ended the child, e.g. at the limit of CPU time.
    """

    def __init__(self, why: str, *, is_memory: bool) -> None:
        """Create the error. See the attributes."""
        super().__init__(why)
        self.is_memory = is_memory


class Sandbox:
    """An object in a child process.

    Threads may share it. Their calls run one after another.

    >>> box = Sandbox("builtins:complex", [1, 2], limits=Limits(64 * MIB, cpu_s=10))
    >>> box.call("__abs__", limits=Limits(64 * MIB, cpu_s=10))
    [2.23606797749979]
    """

    def __init__(self, class_name: str, arguments: Sequence[Any], *, limits: Limits) -> None:
        """Keep the arguments. The first call starts the child.

        Args:
            class_name: Module and name of the class.
            arguments: Its arguments: JSON values and bytes.
            limits: Limits of its creation.
        """
        self._creation = (class_name, limits, arguments)
        self._lock = threading.Lock()
        # The child of this sandbox, if it has one. The finalizer must not refer to the sandbox.
        self._children: list[_Child] = []
        weakref.finalize(self, _release, self._children)

    def start(self) -> None:
        """Create the object, if there is none. See `call` for the errors."""
        with self._lock:
            self._started_child()

    def call(
        self, method: str, *arguments: Any, limits: Limits, file: BinaryIO | None = None
    ) -> list[Any]:
        """Call a method of the object, and return its results.

        Args:
            method: Name of the method.
            *arguments: JSON values and bytes.
            limits: Limits of the call.
            file: The file that `ParentFile` reads, seekable.

        Returns:
            The items of the tuple that the method returns, or its only result.

        Raises:
            SandboxLimitError: The call takes too much memory or time.
            SandboxError: The call, or the creation of the object, raises an exception or ends the child.
        """
        with self._lock:
            child = self._started_child()
            return child.request(CALL, method, limits, arguments, file)

    def _started_child(self) -> _Child:
        """Return a child that has made the object."""
        while self._children and not self._children[0].is_usable:
            self._children.pop().stop()
        if not self._children:
            child = _take_child()
            try:
                child.request(MAKE, *self._creation)
            except SandboxError:
                _release([child])
                raise
            self._children.append(child)
        return self._children[0]


class _Child:
    """A child process of this process."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        # The parent may have found prep through its `sys.path`, e.g. in a notebook beside a checkout.
        paths = [str(Path(__file__).resolve().parents[2])]
        for path in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
            paths.append(os.path.abspath(path))
        try:
            self._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
                # An idle child may outlive the folder in which it was started.
                cwd="/",
            )
        except OSError as error:
            raise SandboxError(f"its process cannot start: {error}") from error
        self._answers = cast(BinaryIO, self._process.stdout)
        self._requests = cast(BinaryIO, self._process.stdin)
        self._is_waiting = True

    @property
    def is_usable(self) -> bool:
        """Whether the child runs and waits for a request of this process.

        A forked process inherits the children of its parent. Two processes on one pair of pipes would mix messages.
        """
        is_own = self._owner == os.getpid()
        return is_own and self._is_waiting and self._process.poll() is None

    def request(
        self,
        kind: str,
        name: str,
        limits: Limits,
        arguments: Sequence[Any],
        file: BinaryIO | None = None,
    ) -> list[Any]:
        """Send a request, and return the results of its answer. See `Sandbox.call`."""
        self._is_waiting = False
        try:
            self._send(kind, name, limits.memory_nbytes, limits.cpu_s, *arguments)
            while True:
                kind, items = read_message(self._answers, limits.memory_nbytes)
                if kind != READ:
                    break
                offset, nbytes = items
                assert file is not None
                file.seek(offset)
                self._send(DATA, _read_range(file, nbytes))
        except _ProcessEndedError:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            raise _end_error(self.stop(), limits) from None
        except BaseException:
            # Later answers would belong to this request.
            self.stop()
            raise
        if kind == MEMORY:
            # The heap may be full.
            self.stop()
            raise SandboxLimitError(_memory_text(limits), is_memory=True)
        self._is_waiting = True
        if kind == RAISE:
            raise SandboxError(*items)
        return items

    def _send(self, kind: str, *items: Any) -> None:
        try:
            write_message(self._requests, kind, *items)
        except BrokenPipeError:
            raise _ProcessEndedError from None

    def drop(self) -> None:
        """Free the object of the child, which may be large, while no sandbox uses it."""
        with suppress(_ProcessEndedError):
            self._send(DROP)

    def stop(self) -> int:
        """End the child of this process. Return its exit code, or minus the number of its signal."""
        if self._owner != os.getpid():
            return 0
        self._process.kill()
        self._answers.close()
        with suppress(OSError):
            # The pipe may hold bytes that the child has not read.
            self._requests.close()
        return self._process.wait()


# Children without a sandbox.
_idle: list[_Child] = []


def _take_child() -> _Child:
    """Return an idle child, or a new one."""
    while _idle:
        child = _idle.pop()
        if child.is_usable:
            return child
        child.stop()
    return _Child()


def _release(children: list[_Child]) -> None:
    """Keep the child of a sandbox for the next one, or end it."""
    while children:
        child = children.pop()
        if child.is_usable and len(_idle) < MAX_IDLE:
            child.drop()
            _idle.append(child)
        else:
            child.stop()


@atexit.register
def stop_idle() -> None:
    """End the idle children."""
    while _idle:
        _idle.pop().stop()


def _end_error(code: int, limits: Limits) -> SandboxError:
    """Return the error of a child that has ended during a call."""
    if code == -signal.SIGXCPU:
        why = f"it took more than {limits.cpu_s:,} s of CPU time"
        return SandboxLimitError(why, is_memory=False)
    if code in (-signal.SIGABRT, -signal.SIGKILL):
        # Libraries in C++ and Rust abort if they cannot allocate, and the kernel kills if the machine is full.
        name = signal.Signals(-code).name
        why = f"its process was ended by {name}, probably because {_memory_text(limits)}"
        return SandboxLimitError(why, is_memory=False)
    if code >= 0:
        return SandboxError(f"its process ended with exit code {code}")
    return SandboxError(f"its process was ended by {signal.Signals(-code).name}")


def _memory_text(limits: Limits) -> str:
    return f"it needs more than {limits.memory_nbytes // MIB:,} MiB of memory"


def _read_range(file: BinaryIO, nbytes: int) -> bytes:
    """Return the next `nbytes` bytes of a file, fewer only at its end."""
    blocks: list[bytes] = []
    while nbytes > 0 and (block := file.read(nbytes)):
        blocks.append(block)
        nbytes -= len(block)
    return b"".join(blocks)


# --- Messages


def write_message(stream: BinaryIO, kind: str, *items: Any) -> None:
    """Write a message: the length of its JSON, its JSON, and then the items that are bytes.

    Args:
        stream: The pipe.
        kind: Kind of the message.
        *items: JSON values and bytes. In the JSON, `[VALUE]` is a value, and a number is a count of bytes.
    """
    blocks: list[bytes | memoryview] = []
    values: list[Any] = [kind]
    for item in items:
        if isinstance(item, bytes | memoryview):
            blocks.append(item)
            values.append(len(item))
        else:
            values.append([item])
    content = json.dumps(values).encode()
    stream.write(HEADER.pack(len(content)))
    for block in (content, *blocks):
        stream.write(block)
    stream.flush()


def read_message(stream: BinaryIO, max_nbytes: int = sys.maxsize) -> tuple[str, list[Any]]:
    """Read the next message: its kind and its items.

    Args:
        stream: The pipe.
        max_nbytes: Maximum bytes of the JSON, and of each item that is bytes.

    Raises:
        _ProcessEndedError: The other process has ended, or sends more.
    """
    (nbytes,) = HEADER.unpack(_read_exactly(stream, HEADER.size, max_nbytes))
    kind, *values = json.loads(_read_exactly(stream, nbytes, max_nbytes))
    items: list[Any] = []
    for value in values:
        if isinstance(value, int):
            items.append(_read_exactly(stream, value, max_nbytes))
        else:
            items.append(value[0])
    return kind, items


def _read_exactly(stream: BinaryIO, nbytes: int, max_nbytes: int) -> bytes:
    if nbytes > max_nbytes:
        raise _ProcessEndedError
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise _ProcessEndedError
    return data


# --- The child


@dataclass(slots=True)
class _Channel:
    """The pipes of a child to its parent."""

    requests: BinaryIO
    answers: BinaryIO


# The channel, in a child.
_channels: list[_Channel] = []


class ParentFile(io.RawIOBase):
    """The file that the parent passes to a call, read in the child. The child needs no access to it."""

    def __init__(self, nbytes: int) -> None:
        """Start at the first byte of a file with `nbytes` bytes."""
        (self._channel,) = _channels
        self._nbytes = nbytes
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset from the start, the position or the end. Return the new position."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        if start + offset < 0:
            raise OSError(f"there is no byte {start + offset:,}")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read bytes into a buffer. Return their number, 0 at the end."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._nbytes - self._position, MAX_READ_NBYTES))
        if not count:
            return 0
        write_message(self._channel.answers, READ, self._position, count)
        _, (data,) = read_message(self._channel.requests)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def main() -> None:
    """Answer the requests of the parent, one after another."""
    # SLURM and terminals send a signal to all processes of a job. The parent handles it. If the child
    # ended at once, the parent would report malformed input.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # A program inherits ignored and blocked signals, and this one is the limit of CPU time.
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGXCPU])
    # The parent reports a crash, and nobody needs the dump.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    channel = _Channel(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    _channels.append(channel)
    # A library that prints would write into the pipe.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    with suppress(_ProcessEndedError, BrokenPipeError):
        _answer_requests(channel)


def _answer_requests(channel: _Channel) -> None:
    server = _Server()
    functions = {MAKE: server.make, CALL: server.call}
    while True:
        # The limits of the last call are not for the next request, nor for its imports.
        _set_soft_limit(resource.RLIMIT_DATA, resource.RLIM_INFINITY)
        _set_soft_limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
        kind, items = read_message(channel.requests)
        if kind == DROP:
            server.drop()
            continue
        answer = _run(functions[kind], *items)
        try:
            write_message(channel.answers, *answer)
        except MemoryError:
            write_message(channel.answers, MEMORY)


class _Server:
    """The object of a child."""

    def __init__(self) -> None:
        self._target: Any = None
        self._imported_nbytes = 0

    def make(self, class_name: str, memory_nbytes: int, cpu_s: int, *arguments: Any) -> tuple[()]:
        """Import a class, and create its object in place of the one before."""
        self._target = None
        module_name, _, name = class_name.partition(":")
        function = getattr(importlib.import_module(module_name), name)
        self._imported_nbytes = _private_memory_nbytes()
        self._limit(memory_nbytes, cpu_s)
        self._target = function(*arguments)
        return ()

    def drop(self) -> None:
        """Free the object."""
        self._target = None

    def call(self, method: str, memory_nbytes: int, cpu_s: int, *arguments: Any) -> Any:
        """Call a method of the object, and return its results."""
        self._limit(memory_nbytes, cpu_s)
        return getattr(self._target, method)(*arguments)

    def _limit(self, memory_nbytes: int, cpu_s: int) -> None:
        # RLIMIT_DATA counts private writable memory (since Linux 4.7), not the mapped libraries of pyarrow, which
        # RLIMIT_AS would count. A failed allocation raises MemoryError or ends the process.
        _set_soft_limit(resource.RLIMIT_DATA, self._imported_nbytes + memory_nbytes)
        # SIGXCPU ends the process.
        _set_soft_limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + cpu_s)


def _run(function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """Call a function. Return the kind of its answer, and the items."""
    try:
        results = function(*arguments)
    except MemoryError:
        return (MEMORY,)
    except BaseException as error:
        # A panic of Rust is a BaseException.
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        return RAISE, str(error)[:MAX_ERROR_CHARS], name
    if isinstance(results, tuple):
        return RETURN, *cast(tuple[Any, ...], results)
    return RETURN, results


def _set_soft_limit(kind: int, value: int) -> None:
    """Set a limit of this process, at most to the hard limit."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY and (value == resource.RLIM_INFINITY or value > hard):
        value = hard
    resource.setrlimit(kind, (value, hard))


def _private_memory_nbytes() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmData":
            return int(value.split()[0]) << 10
    return 0


def _end_with_parent(parent: int) -> None:
    """End the process when its parent has ended: a call may still compute, and forked processes keep pipes open.

    A call that keeps Python's lock ends at its limit of CPU time.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)
