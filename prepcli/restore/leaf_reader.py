"""Reads of leaves by several threads: jobs from one iterator, each thread with a separate buffer."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Generic, TypeVar

import numpy as np

from prepcli.algebra.boxes import Box
from prepcli.core.worker_thread import run_in_threads
from prepcli.engine.blobs import FilesAndBlobs
from prepcli.engine.budget import Budget, BufferPool
from prepcli.engine.files import Files
from prepcli.stores.buffers import ByteArray

Job = TypeVar("Job")
# Arrays to fill, by their boxes of a leaf
BoxArrays = Mapping[Box, np.ndarray]


class StoppedReadsError(Exception):
    """Reads were stopped before their end, so their arrays must not be used."""


class _JobQueue(Generic[Job]):
    """Thread-safe queue of jobs."""

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._lock = threading.Lock()

    def next(self) -> Job | None:
        """Return the next job, or None if there is none left, or after `stop`."""
        with self._lock:
            # A generator must not run in two threads at once.
            return next(self._jobs, None)

    def stop(self) -> None:
        """Drop the remaining jobs."""
        with self._lock:
            self._jobs = iter(())


def run_jobs(
    jobs: Iterator[Job],
    run: Callable[[Job, ByteArray], None],
    buffers: BufferPool,
    num_threads: int,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[BaseException]:
    """Run jobs in threads until there are none left. After an error the remaining jobs are dropped.

    Args:
        jobs: The jobs.
        run: Runs a job with a buffer.
        buffers: Buffers for the threads.
        num_threads: Number of threads.
        is_stopped: Whether the remaining jobs are dropped. Asked before each job.

    Returns:
        The exceptions of signals, and then the exceptions of the jobs. Stopped jobs are an exception too.
    """
    job_queue = _JobQueue(jobs)

    def work() -> None:
        # A thread without a job must not wait for a buffer: other calls may hold all of them.
        job = job_queue.next()
        if job is None:
            return
        (buffer,) = buffers.acquire(1)
        try:
            while job is not None and not is_stopped():
                run(job, buffer)
                job = job_queue.next()
        except BaseException:
            # The arrays of a failed read are not used, so other jobs would be wasted.
            job_queue.stop()
            raise
        finally:
            buffers.release([buffer])

    errors = run_in_threads(work, num_threads, on_interruption=job_queue.stop)
    if not errors and is_stopped():
        errors.append(StoppedReadsError())
    return errors


class LeafReader:
    """Open files, and threads with buffers for reads of leaves. Several threads may read at once.

    Attributes:
        read_nbytes: Bytes read so far.
    """

    def __init__(
        self, files: Files | FilesAndBlobs, *, num_threads: int, buffer_nbytes: int
    ) -> None:
        """Take the files, and allocate no buffer before the first read."""
        self.read_nbytes = 0
        self._files = files
        self._num_threads = num_threads
        self._buffers = BufferPool(Budget(num_threads * buffer_nbytes, buffer_nbytes, num_threads))
        self._count_lock = threading.Lock()
        self._is_stopped = False
        # Closes the files also if a caller drops the reader without `close`.
        self._finalizer = weakref.finalize(self, files.close)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._finalizer()

    def stop_reads(self) -> None:
        """Drop the remaining requests of all reads. They raise StoppedReadsError, and so do later reads."""
        self._is_stopped = True

    def run_reads(
        self, jobs: Iterator[Job], run: Callable[[Job, ByteArray], int]
    ) -> list[BaseException]:
        """Run the jobs of a read in threads, and count their bytes.

        Args:
            jobs: The jobs.
            run: Runs a job with a buffer, and returns the number of bytes read.

        Returns:
            The exceptions. See `run_jobs`.
        """

        def run_and_count(job: Job, buffer: ByteArray) -> None:
            nbytes = run(job, buffer)
            # `+=` of an attribute is not atomic between threads.
            with self._count_lock:
                self.read_nbytes += nbytes

        return run_jobs(
            jobs,
            run_and_count,
            self._buffers,
            self._num_threads,
            is_stopped=lambda: self._is_stopped,
        )
