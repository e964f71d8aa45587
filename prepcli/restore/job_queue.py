"""Jobs that several threads take from one iterator, each thread with a separate buffer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from prepcli.core.worker_thread import run_in_threads
from prepcli.engine.budget import BufferPool
from prepcli.stores.buffers import ByteArray

Job = TypeVar("Job")


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
