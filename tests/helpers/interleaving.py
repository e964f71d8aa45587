"""Explore how processes that share a folder interleave: a model checker that runs the real code.

Each simulated process is a thread, and one thread runs at a time. It stops before its operations on files, locks and
time, so a schedule is a list of events: start a process, let it go on, kill it, or let time pass once nobody can go on.
`explore` visits every state that some schedule leads to. It repeats a schedule from its beginning to try another event
after it, and follows no schedule that leads to a state it has seen. A state is the content of the folder, the clock,
and all that each process has observed.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import json
import os
import shutil
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prepcli.execution import coordination, failure_notes, locks

Event = tuple[str, int]
READS = ("listdir", "scandir", "stat", "lstat")
CHANGES = ("rename", "replace", "unlink", "mkdir", "rmdir", "write", "pwrite", "ftruncate")
COARSE = frozenset({"wait", "replace"})  # where a process may be interrupted, besides `sleep` and `step`
FINE = COARSE | {"open", "flock", "close", "rename", *READS, *CHANGES}
ANY = 1 << 30
STEPS_S = (25.0, 700.0, 700.0, 700.0)  # by which time passes: beyond the time to return, then beyond all patience


class Killed(BaseException):
    """The end of a simulated process by SIGKILL: no operation of it has an effect any more."""


@dataclass(eq=False)
class Process:
    """A process: what it runs, when it may start, and how far it is. `ended`: what it raised, or None."""

    body: Callable[[], None]
    may_start: Callable[[], bool] = lambda: True
    attempt: int = 0
    thread: threading.Thread | None = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    label: str = ""
    history: list[Any] = field(default_factory=list)
    look: list[Any] = field(default_factory=list)  # what it observed since it last slept
    is_killed: bool = False
    is_done: bool = False
    idle_at: int = -1  # the number of changes by others at which it has nothing to do
    ended: BaseException | None = None
    fds: set[int] = field(default_factory=set)
    changes: int = 0

    @property
    def is_live(self) -> bool:
        return self.thread is not None and not self.is_done

    def key(self) -> tuple[Any, ...]:
        if self.is_done:
            return self.is_killed, type(self.ended), getattr(self.ended, "code", 0)
        return self.thread is not None, self.label, tuple(self.history), tuple(self.look)


class World:
    """Processes in a folder, and their clock."""

    current: World | None = None

    def __init__(
        self, folder: Path, processes: Sequence[Process], *, points: frozenset[str], kills: int, switches: int
    ) -> None:
        """`switches`: how often a process may be interrupted for another one although it could go on."""
        self.folder, self.processes, self.points = folder, processes, points
        self.kills, self.switches, self.ticks, self.clock_s = kills, switches, 0, 1000.0
        self.last = -1  # the process that ran last
        self.back = threading.Semaphore(0)
        self.threads: dict[int, Process] = {}
        World.current = self

    # What may happen next

    def events(self) -> list[Event]:
        """What can happen next; nothing once all processes have ended."""
        numbered = list(enumerate(self.processes))
        found = [("run", n) for n, p in numbered if self._can_run(p)]
        starts = [("start", n) for n, p in numbered if p.thread is None and p.may_start()]
        kills = [("kill", n) for n, p in numbered if p.is_live and self.kills]
        if not found and not starts and any(p.is_live for p in self.processes):
            assert self.ticks < len(STEPS_S), f"waits for ever: {[(p.label, p.is_done) for p in self.processes]}"
            return [("tick", 0), *kills]
        if not self.switches and ("run", self.last) in found:
            return [("run", self.last), *kills]
        return [*found, *starts, *kills]

    def do(self, event: Event) -> None:
        """Let it happen."""
        kind, number = event
        process = self.processes[number]
        if kind in ("run", "start"):
            self.switches -= number != self.last >= 0 and self._can_run(self.processes[self.last])
            self.last = number
        if kind == "tick":
            self.clock_s += STEPS_S[self.ticks]
            self.ticks += 1
            for each in self.processes:
                each.idle_at = -1
            return
        if kind == "kill":
            self.kills -= 1
            process.is_killed = True
        if kind == "start":
            process.thread = threading.Thread(target=self._run, args=(process,), daemon=True)
            process.thread.start()
        else:
            process.go.release()
        self.back.acquire()

    def key(self) -> int:
        budgets = self.kills, self.switches, self.ticks, self.last if not self.switches else -1
        return hash((budgets, self._content(), tuple(process.key() for process in self.processes)))

    def end(self) -> None:
        """End all threads."""
        for process in self.processes:
            while process.is_live:
                process.is_killed = True
                process.go.release()
                self.back.acquire()
            if process.thread is not None:
                process.thread.join()
        World.current = None

    def _can_run(self, process: Process) -> bool:
        return process.is_live and process.idle_at != self._changes_of_others(process)

    def _changes_of_others(self, process: Process) -> int:
        return sum(each.changes for each in self.processes if each is not process)

    def _content(self) -> tuple[Any, ...]:
        """Names and bytes, but for what says when and by whom a file was written."""
        found: list[Any] = []
        for top, folders, names in os.walk(self.folder):
            found.append((top.removeprefix(str(self.folder)), sorted(folders), sorted(names)))
            for name in sorted(set(names) - {"lock", "door"}):
                data = Path(top, name).read_bytes() if not name.startswith("lock.") else b""
                found.append(_which(top, data) if name.startswith("heard.") else data)
        return tuple(sorted(map(repr, found)))

    # In the threads

    def _run(self, process: Process) -> None:
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
        """Stop before an operation, until the process may go on."""
        process.label = label
        process.idle_at = self._changes_of_others(process) if is_idle else -1
        self.back.release()
        process.go.acquire()
        if process.is_killed:
            raise Killed

    def operation(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """An operation of the thread that runs."""
        process = self.threads.get(threading.get_ident())
        if process is None:
            return call(*args, **options)
        if process.is_killed:
            raise Killed
        if name in self.points:
            self.stop_at(process, f"{name} {_shown(args)}")
        if name in CHANGES:
            process.changes += 1
        try:
            result = call(*args, **options)
        except OSError as error:
            process.look.append((name, _shown(args), type(error).__name__))
            raise
        process.look.append((name, _shown(args), _seen(name, result, args)))
        return result

    def sleep(self) -> None:
        """Until another process has changed something; equal looks are remembered once."""
        process = self.threads[threading.get_ident()]
        if process.is_killed:
            raise Killed
        if process.history[-1:] != [tuple(process.look)]:
            process.history.append(tuple(process.look))
        process.look = []
        self.stop_at(process, "sleep", is_idle=True)


def step(label: str, *state: object) -> None:
    """A point of a process's body where it may be interrupted, and all that it knows there."""
    world = World.current
    if world and (process := world.threads.get(threading.get_ident())):
        process.history, process.look = [repr(state)], []
        world.stop_at(process, label)


def explore(make: Callable[[Path], World], check: Callable[[World], None], folder: Path) -> int:
    """Visit every state; `check` each world whose processes have all ended. The number of states."""
    seen: set[int] = set()
    schedules: list[tuple[Event, ...]] = [()]
    for number in itertools.count():
        if not schedules:
            return len(seen)
        schedule = schedules.pop()
        place = folder / str(number)
        place.mkdir()
        world = make(place)
        try:
            schedules += _followed(world, schedule, seen, check)
        finally:
            world.end()
            shutil.rmtree(place)
    raise AssertionError


def _followed(
    world: World, schedule: tuple[Event, ...], seen: set[int], check: Callable[[World], None]
) -> list[tuple[Event, ...]]:
    """Repeat a schedule and follow it to a state that was seen, or to its end; the schedules that branch off."""
    branches: list[tuple[Event, ...]] = []
    for event in schedule:
        world.do(event)
    try:
        while (key := world.key()) not in seen:
            seen.add(key)
            first, *others = world.events() or [("end", 0)]
            if first[0] == "end":
                check(world)
                break
            branches += [(*schedule, other) for other in others]
            schedule = (*schedule, first)
            world.do(first)
    except AssertionError as error:
        told = [(process.label, process.ended) for process in world.processes]
        raise AssertionError(f"{error}\nafter {schedule}\nprocesses {told}") from error
    return branches


# The operations that are simulated

_REAL: dict[str, Any] = {"close": os.close, "flock": fcntl.flock}


def _shown(args: tuple[Any, ...]) -> str:
    return os.path.basename(os.fspath(args[0])) if args and isinstance(args[0], str | os.PathLike) else ""


def _seen(name: str, result: Any, args: tuple[Any, ...]) -> Any:
    """What an operation tells its process."""
    if name == "listdir":
        return tuple(sorted(result))
    if name in ("stat", "lstat"):
        return result.st_mode
    if name == "open" and isinstance(result, io.BufferedReader):
        return result.peek()
    return name == "flock"


def _which(top: str, data: bytes) -> Any:
    """Which of the failure notes that are there a process has heard of."""
    with contextlib.suppress(ValueError):
        heard = json.loads(data)
        return [
            name
            for name in sorted(heard)
            if (note := failure_notes._read_note(Path(top, name))) and note.stamp == heard[name]
        ]
    return data


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


def _close(fd: int) -> None:
    """Release what belongs to a descriptor, also of a process that was killed."""
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
    """Operations of the threads of a world stop where it says; its clock is theirs."""

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
        for module in (coordination, failure_notes, locks):
            patch.setattr(module, "time", clock)
        yield
