"""Processes of a job as threads of this process, for code that talks to the others through a ProcessGroup."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tests.helpers.waiting import MAX_S

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class _Board:
    """The calls of all threads, with their texts, by number and thread."""

    calls: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    # Whether a thread has failed.
    is_closed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, key: tuple[int, int], call: tuple[str, str]) -> None:
        """Publish a call."""
        with self.changed:
            self.calls[key] = call
            self.changed.notify_all()

    def get(self, key: tuple[int, int]) -> tuple[str, str]:
        """Wait for a call; raise AssertionError if a thread has failed before it."""
        with self.changed:
            self.changed.wait_for(lambda: key in self.calls or self.is_closed, MAX_S)
            assert key in self.calls, f"thread {key[1]} made no call {key[0]}"
            return self.calls[key]

    def close(self) -> None:
        """End the waits of all threads for calls that are missing."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


class ThreadGroup:
    """One member of a group of threads. A member that makes another call than the others fails.

    Attributes:
        index: Number of the thread.
        count: Number of threads.
        gathered: Names of the calls of `gather`.
    """

    def __init__(self, index: int, count: int, *, board: _Board) -> None:
        self.index, self.count, self._board = index, count, board
        self.gathered: list[str] = []
        self._num_calls = 0

    def barrier(self, name: str) -> None:
        """Wait for all threads."""
        self._exchange_texts(f"barrier {name}", "")

    def gather(self, name: str, text: str) -> list[str]:
        """Return the texts of all threads on thread 0."""
        self.gathered.append(name)
        texts = self._exchange_texts(f"gather {name}", text)
        return texts if self.index == 0 else []

    def broadcast(self, name: str, text: str) -> str:
        """Return the text of thread 0."""
        return self._exchange_texts(f"broadcast {name}", text)[0]

    def _exchange_texts(self, call: str, text: str) -> list[str]:
        """Return the texts of all threads. All must make the same call."""
        self._num_calls += 1
        self._board.put((self._num_calls, self.index), (call, text))
        texts = list[str]()
        for index in range(self.count):
            other_call, other_text = self._board.get((self._num_calls, index))
            assert other_call == call, f"thread {index} called {other_call}, not {call}"
            texts.append(other_text)
        return texts


def run_together(count: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Run `work` in `count` threads that form a group; return the result or the exception of each."""
    board = _Board()

    def run(index: int) -> Any:
        try:
            return work(ThreadGroup(index, count, board=board))
        except BaseException as error:
            board.close()
            return error

    with ThreadPoolExecutor(count) as executor:
        return list(executor.map(run, range(count)))


def run_group(count: int, work: Callable[[ThreadGroup], ResultT]) -> list[ResultT]:
    """Run `work` as `run_together` does; return the results, or raise the first error."""
    results = list[ResultT]()
    for result in run_together(count, work):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results
