"""Threads of one process in the place of processes: a ProcessGroup whose members share memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.helpers.waiting import MAX_S
from trainer.distributed.process_group import ProcessGroup


class _Exchange:
    """Texts of all members, per call."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=MAX_S)
        self.texts: list[str] = [""] * count


class ThreadGroup:
    """One member of a group of threads. A member that makes another call than the others breaks the group."""

    def __init__(self, index: int, count: int, *, exchange: _Exchange) -> None:
        self.index, self.count, self._exchange = index, count, exchange

    def barrier(self, name: str) -> None:
        self._exchange_texts(f"barrier {name}", "")

    def gather(self, name: str, text: str) -> list[str]:
        texts = self._exchange_texts(f"gather {name}", text)
        return texts if self.index == 0 else []

    def broadcast(self, name: str, text: str) -> str:
        return self._exchange_texts(f"broadcast {name}", text)[0]

    def _exchange_texts(self, call: str, text: str) -> list[str]:
        """Return the texts of all threads. All must make the same call."""
        exchange = self._exchange
        exchange.texts[self.index] = f"{call}\n{text}"
        exchange.barrier.wait()
        calls, texts = zip(*(entry.split("\n", 1) for entry in exchange.texts))
        exchange.barrier.wait()
        assert set(calls) == {call}, calls
        return list(texts)


def run_together(count: int, work: Callable[[ProcessGroup], Any]) -> list[Any]:
    """Run `work` in `count` threads; return the result or the exception of each."""
    exchange = _Exchange(count)

    def run(index: int) -> Any:
        try:
            return work(ThreadGroup(index, count, exchange=exchange))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as executor:
        return list(executor.map(run, range(count)))
