"""Processes of a job as threads of this process, for code that talks to the others through a ProcessGroup."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from tests.helpers.waiting import MAX_S

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class _Board:
    """Texts that the threads have published, by name."""

    texts: dict[str, str] = field(default_factory=dict)
    # Whether a thread has failed.
    is_closed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, name: str, text: str) -> None:
        """Publish a text."""
        with self.changed:
            self.texts[name] = text
            self.changed.notify_all()

    def get(self, name: str) -> str:
        """Wait for a text; raise AssertionError if a thread has failed."""
        with self.changed:
            self.changed.wait_for(lambda: name in self.texts or self.is_closed, MAX_S)
            assert name in self.texts, f"no process sent {name}"
            return self.texts[name]

    def close(self) -> None:
        """End the waits of all threads."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


class ThreadProcess:
    """ProcessGroup of one thread."""

    def __init__(self, board: _Board, index: int, count: int) -> None:
        self._board, self.index, self.count = board, index, count
        self._calls = 0

    def barrier(self, name: str) -> None:
        """Wait for all threads."""
        self.gather(name, "")
        self.broadcast(name, "")

    def gather(self, name: str, text: str) -> list[str]:
        """Return the texts of all threads on thread 0."""
        key = self._next_key(name)
        self._board.put(f"{key} {self.index}", text)
        return (
            [self._board.get(f"{key} {index}") for index in range(self.count)]
            if self.index == 0
            else []
        )

    def broadcast(self, name: str, text: str) -> str:
        """Return the text of thread 0."""
        key = self._next_key(name)
        if self.index == 0:
            self._board.put(key, text)
        return self._board.get(key)

    def _next_key(self, name: str) -> str:
        """Return a key for this call, equal in all processes."""
        self._calls += 1
        return f"{self._calls} {name}"


def run_processes(count: int, function: Callable[[ThreadProcess], ResultT]) -> list[ResultT]:
    """Call a function in `count` threads that form a group; return its results by index, or raise its first error."""
    board = _Board()

    def call(index: int) -> ResultT:
        try:
            return function(ThreadProcess(board, index, count))
        except BaseException:
            board.close()
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))
