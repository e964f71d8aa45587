"""Explore the interleavings of processes that share a folder: a model checker that runs the real code.

Each simulated process is a thread, and one thread runs at a time. It stops before its operations on files, locks and
time, so a schedule is a list of events: start a process, resume it, kill it, or let time pass once no process can run.
`explore` visits every reachable state. It repeats a schedule from its beginning to try another event after it, and
abandons a schedule that reaches a known state. A state is the content of the folder, the clock, and the observations
of each process.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import os
import shutil
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prepcli.execution import converter, folder_output

Event = tuple[str, int]
READS = ("listdir", "scandir", "stat", "lstat")
CHANGES = ("rename", "replace", "unlink", "mkdir", "rmdir", "write", "pwrite", "ftruncate")
# Operations before which a process may be interrupted, in addition to `sleep` and `step`.
COARSE = frozenset({"wait", "replace"})
FINE = COARSE | {"open", "flock", "close", "rename", *READS, *CHANGES}
ANY = 1 << 30
# Seconds that pass at each tick of the clock
STEPS_S = (25.0, 700.0)


class Killed(BaseException):
    """The end of a simulated process by SIGKILL: its operations have no effect any more."""


@dataclass(eq=False)
class Process:
    """A simulated process.

    Attributes:
        body: The code of the process.
        may_start: Returns whether the process may start.
        attempt: Number of the attempt it belongs to.
        ended: Exception that ended the process, or None.
    """

    body: Callable[[], None]
    may_start: Callable[[], bool] = lambda: True
    attempt: int = 0
    thread: threading.Thread | None = None
    resume: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    label: str = ""
    history: list[Any] = field(default_factory=list)
    # Observations since the last sleep.
    observations: list[Any] = field(default_factory=list)
    is_killed: bool = False
    is_done: bool = False
    # Number of changes by other processes when the process went idle.
    idle_at: int = -1
    ended: BaseException | None = None
    fds: set[int] = field(default_factory=set)
    changes: int = 0
    num_tokens: int = 0

    @property
    def is_live(self) -> bool:
        """Return whether the process has started and has not ended."""
        return self.thread is not None and not self.is_done

    def key(self) -> tuple[Any, ...]:
        """Return a key of the process's state."""
        if self.is_done:
            return self.is_killed, type(self.ended), getattr(self.ended, "code", 0)
        return self.thread is not None, self.label, tuple(self.history), tuple(self.observations)


class World:
    """Processes in a folder, and their clock."""

    current: World | None = None

    def __init__(
        self,
        folder: Path,
        processes: Sequence[Process],
        *,
        points: frozenset[str],
        kills: int,
        switches: int,
    ) -> None:
        """Create a world. `switches` limits the interruptions of a process that could continue."""
        self.folder, self.processes, self.points = folder, processes, points
        self.kills, self.switches, self.ticks, self.clock_s = kills, switches, 0, 1000.0
        # Index of the process that ran last.
        self.last = -1
        self.back = threading.Semaphore(0)
        self.threads: dict[int, Process] = {}
        World.current = self

    # Events

    def events(self) -> list[Event]:
        """Return the possible next events; an empty list once all processes have ended."""
        numbered = list(enumerate(self.processes))
        runs = [("run", n) for n, p in numbered if self._can_run(p)]
        starts = [("start", n) for n, p in numbered if p.thread is None and p.may_start()]
        kills = [("kill", n) for n, p in numbered if p.is_live and self.kills]
        if not runs and not starts and any(p.is_live for p in self.processes):
            assert self.ticks < len(STEPS_S), (
                f"waits for ever: {[(p.label, p.is_done) for p in self.processes]}"
            )
            return [("tick", 0), *kills]
        if not self.switches and ("run", self.last) in runs:
            return [("run", self.last), *kills]
        return [*runs, *starts, *kills]

    def do(self, event: Event) -> None:
        """Apply an event."""
        kind, number = event
        process = self.processes[number]
        if kind in ("run", "start"):
            self.switches -= number != self.last >= 0 and self._can_run(self.processes[self.last])
            self.last = number
        if kind == "tick":
            self.clock_s += STEPS_S[self.ticks]
            self.ticks += 1
            for waiting in self.processes:
                waiting.idle_at = -1
            return
        if kind == "kill":
            self.kills -= 1
            process.is_killed = True
        if kind == "start":
            process.thread = threading.Thread(target=self._run, args=(process,), daemon=True)
            process.thread.start()
        else:
            process.resume.release()
        self.back.acquire()

    def key(self) -> int:
        """Return a hash of the world's state."""
        budgets = self.kills, self.switches, self.ticks, self.last if not self.switches else -1
        return hash((budgets, self._content(), tuple(process.key() for process in self.processes)))

    def end(self) -> None:
        """End all threads."""
        for process in self.processes:
            while process.is_live:
                process.is_killed = True
                process.resume.release()
                self.back.acquire()
            if process.thread is not None:
                process.thread.join()
        World.current = None

    def _can_run(self, process: Process) -> bool:
        """Return whether a process can continue: it is live, and a peer has changed a file since it went idle."""
        return process.is_live and process.idle_at != self._changes_of_peers(process)

    def _changes_of_peers(self, process: Process) -> int:
        return sum(peer.changes for peer in self.processes if peer is not process)

    def _content(self) -> tuple[Any, ...]:
        """Return names and bytes of all files, without times and process ids."""
        entries: list[Any] = []
        for top, folders, names in os.walk(self.folder):
            entries.append((top.removeprefix(str(self.folder)), sorted(folders), sorted(names)))
            for name in sorted(set(names) - {"lock", "door"}):
                data = Path(top, name).read_bytes() if not name.startswith("lock.") else b""
                entries.append(data)
        return tuple(sorted(map(repr, entries)))

    # In the threads of the processes

    def _run(self, process: Process) -> None:
        """Run a process in its thread, and close its files at the end."""
        self.threads[threading.get_ident()] = process
        try:
            process.body()
        except BaseException as error:
            process.ended = error
        for fd in list(process.fds):
            _REAL["close"](fd)
        process.fds.clear()
        process.changes += 1
        process.is_done = True
        self.back.release()

    def stop_at(self, process: Process, label: str, *, is_idle: bool = False) -> None:
        """Stop before an operation until the process is resumed."""
        process.label = label
        process.idle_at = self._changes_of_peers(process) if is_idle else -1
        self.back.release()
        process.resume.acquire()
        if process.is_killed:
            raise Killed

    def operation(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Run an operation of the current thread."""
        process = self.threads.get(threading.get_ident())
        if process is None:
            return call(*args, **options)
        if process.is_killed:
            raise Killed
        if name in self.points:
            self.stop_at(process, f"{name} {_file_name(args)}")
        if name in CHANGES:
            process.changes += 1
        try:
            result = call(*args, **options)
        except OSError as error:
            process.observations.append((name, _file_name(args), type(error).__name__))
            raise
        process.observations.append((name, _file_name(args), _observation(name, result, args)))
        return result

    def sleep(self) -> None:
        """Wait until another process has changed a file; equal observations are recorded once."""
        process = self.threads[threading.get_ident()]
        if process.is_killed:
            raise Killed
        if process.history[-1:] != [tuple(process.observations)]:
            process.history.append(tuple(process.observations))
        process.observations = []
        self.stop_at(process, "sleep", is_idle=True)


def step(label: str, *state: object) -> None:
    """Mark a point of a process's body where it may be interrupted, with all its state there."""
    world = World.current
    if world and (process := world.threads.get(threading.get_ident())):
        process.history, process.observations = [repr(state)], []
        world.stop_at(process, label)


def explore(make: Callable[[Path], World], check: Callable[[World], None], folder: Path) -> int:
    """Visit every state, and `check` each world whose processes have all ended; return the number of states."""
    known_states: set[int] = set()
    schedules: list[tuple[Event, ...]] = [()]
    for number in itertools.count():
        if not schedules:
            return len(known_states)
        schedule = schedules.pop()
        run_folder = folder / str(number)
        run_folder.mkdir()
        world = make(run_folder)
        try:
            schedules += _follow_schedule(world, schedule, known_states, check)
        finally:
            world.end()
            shutil.rmtree(run_folder)
    raise AssertionError


def _follow_schedule(
    world: World, schedule: tuple[Event, ...], seen: set[int], check: Callable[[World], None]
) -> list[tuple[Event, ...]]:
    """Repeat a schedule and follow it to a known state or its end; return the schedules that branch off."""
    branches: list[tuple[Event, ...]] = []
    for event in schedule:
        world.do(event)
    try:
        while (key := world.key()) not in seen:
            seen.add(key)
            first, *alternatives = world.events() or [("end", 0)]
            if first[0] == "end":
                check(world)
                break
            branches += [(*schedule, alternative) for alternative in alternatives]
            schedule = (*schedule, first)
            world.do(first)
    except AssertionError as error:
        states = [(process.label, process.ended) for process in world.processes]
        raise AssertionError(f"{error}\nafter {schedule}\nprocesses {states}") from error
    return branches


# Simulated operations

_REAL: dict[str, Any] = {"close": os.close, "flock": fcntl.flock}


def _file_name(args: tuple[Any, ...]) -> str:
    """Return the file name in the first argument of a system call."""
    return (
        os.path.basename(os.fspath(args[0]))
        if args and isinstance(args[0], str | os.PathLike)
        else ""
    )


def _observation(name: str, result: Any, args: tuple[Any, ...]) -> Any:
    """Return the observation that an operation gives to its process."""
    if name == "listdir":
        return tuple(sorted(result))
    if name in ("stat", "lstat"):
        return result.st_mode
    if name == "open" and isinstance(result, io.BufferedReader):
        return result.peek()
    return name == "flock"


def _flock(fd: int, operation: int) -> None:
    """Wait for a lock without blocking the thread that runs the world."""
    world = World.current
    process = world.threads.get(threading.get_ident()) if world else None
    if world is None or process is None:
        return _REAL["flock"](fd, operation)
    if "wait" in world.points and not operation & fcntl.LOCK_NB:
        world.stop_at(process, "wait for a lock")
    while True:
        try:
            _REAL["flock"](fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if operation & fcntl.LOCK_NB:
                raise
            world.stop_at(process, "blocked", is_idle=True)
        else:
            if operation & fcntl.LOCK_EX:
                process.fds.add(fd)
                process.changes += 1
            return None


def _token(nbytes: int) -> str:
    """Return a text that no other process draws, equal in equal schedules."""
    world = World.current
    process = world.threads.get(threading.get_ident()) if world else None
    if world is None or process is None:
        return "outside"
    process.num_tokens += 1
    return f"{world.processes.index(process)}-{process.num_tokens}"


def _close(fd: int) -> None:
    """Release the descriptor's lock, also for a killed process."""
    world = World.current
    process = world.threads.get(threading.get_ident()) if world else None
    if world and process is not None and fd in process.fds:
        if "close" in world.points and not process.is_killed:
            world.stop_at(process, "close")
        process.fds.discard(fd)
        process.changes += 1
    _REAL["close"](fd)


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Make the operations of a world's threads stop, and replace their clock by the world's."""

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **options: Any) -> Any:
            world = World.current
            return world.operation(name, call, args, options) if world else call(*args, **options)

        return operation

    clock = types.SimpleNamespace(
        monotonic=lambda: World.current.clock_s if World.current else 0.0,
        sleep=lambda seconds: World.current.sleep() if World.current else None,
        strftime=lambda form: "now",
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in (*READS, *CHANGES, "open"):
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        patch.setattr(io, "open", wrapped("open", io.open))
        patch.setattr(fcntl, "flock", wrapped("flock", _flock))
        patch.setattr(os, "close", _close)
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda fd: None)
        for module in (converter, folder_output):
            patch.setattr(module, "time", clock)
        patch.setattr(folder_output, "secrets", types.SimpleNamespace(token_hex=_token))
        yield
