"""Read parts of leaves in background threads before they are needed, in the order of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from prepcli.algebra.boxes import Box
from prepcli.core.worker_thread import WorkerThread, wait_for_threads
from prepcli.engine.checkpoint_store import CheckpointReader

# Steps that are pending at once. Each read has threads, and small leaves have few bytes. A leaf has one or more reads
# and the step at its end, so that 16 small leaves are read at once.
MAX_PENDING_STEPS = 32

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LeafRead:
    """One read of a leaf.

    Attributes:
        name: Name of the leaf.
        arrays: Host arrays to fill, by their boxes of the leaf.
    """

    name: str
    arrays: Mapping[Box, np.ndarray]

    @property
    def nbytes(self) -> int:
        """Size of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def run(self, reader: CheckpointReader) -> None:
        """Fill the arrays."""
        if self.arrays:
            reader.read(self.name, self.arrays)


@dataclass(frozen=True, slots=True)
class _PendingStep(Generic[T]):
    """A step and the thread of its read. A step without a read has no thread."""

    step: T
    nbytes: int
    thread: WorkerThread | None

    def wait(self) -> T:
        """Wait until the arrays are filled. Raise the error of the read."""
        if self.thread is not None:
            self.thread.drain()
            if self.thread.errors:
                raise self.thread.errors[0]
        return self.step


def read_ahead(
    reader: CheckpointReader, steps: Iterable[tuple[T, LeafRead]], max_nbytes: int
) -> Iterator[T]:
    """Yield steps in order, each after its read.

    Args:
        reader: The open checkpoint.
        steps: Steps with their reads. The arrays of a read are allocated when its step is taken from the iterable.
        max_nbytes: Size of the arrays that are filled ahead. 0: fill the arrays of a step when it is needed, in the
            calling thread.

    Raises:
        PrepError: A read failed.
    """
    if max_nbytes == 0:
        for step, read in steps:
            read.run(reader)
            yield step
        return
    pending = deque[_PendingStep[T]]()
    try:
        for step, read in steps:
            pending.append(_start_read(reader, step, read))
            while _is_full(pending, max_nbytes):
                yield _finish_first(pending)
        while pending:
            yield _finish_first(pending)
    finally:
        # After an error or a signal, arrays and files must outlive the running reads. Otherwise a slow store would
        # send all that is pending first.
        if pending:
            reader.stop_reads()
        threads = [item.thread for item in pending if item.thread is not None]
        wait_for_threads(threads, on_interruption=lambda error: None)
        for thread in threads:
            thread.stop()


def _is_full(pending: Collection[_PendingStep[T]], max_nbytes: int) -> bool:
    nbytes = sum(item.nbytes for item in pending)
    return nbytes > max_nbytes or len(pending) > MAX_PENDING_STEPS


def _start_read(reader: CheckpointReader, step: T, read: LeafRead) -> _PendingStep[T]:
    if not read.arrays:
        return _PendingStep(step, 0, None)
    thread = WorkerThread()
    thread.submit(lambda: read.run(reader))
    return _PendingStep(step, read.nbytes, thread)


def _finish_first(pending: deque[_PendingStep[T]]) -> T:
    """Wait for the first pending step, and remove it."""
    # It stays pending during the wait: a signal may interrupt the wait, and the read continues.
    item = pending[0]
    step = item.wait()
    if item.thread is not None:
        item.thread.stop()
    pending.popleft()
    return step
