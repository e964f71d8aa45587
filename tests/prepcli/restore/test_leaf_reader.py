"""Jobs of concurrent reads share the buffers of a reader."""

from __future__ import annotations

import threading

from prepcli.engine.budget import Budget, BufferPool
from prepcli.engine.files import PAGE
from prepcli.restore.leaf_reader import StoppedReadsError, run_jobs
from prepcli.stores.buffers import ByteArray


def test_call_without_jobs_waits_for_no_buffer():
    buffers = BufferPool(Budget(PAGE, PAGE, 1))
    buffers.acquire(1)

    def run(job: int, buffer: ByteArray) -> None:
        raise AssertionError("there is no job")

    thread = threading.Thread(target=run_jobs, args=(iter(()), run, buffers, 2), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_jobs_run_with_fewer_buffers_than_threads():
    numbers: list[int] = []

    def run(job: int, buffer: ByteArray) -> None:
        assert buffer.size > 0
        numbers.append(job)

    errors = run_jobs(iter(range(20)), run, BufferPool(Budget(PAGE, PAGE, 1)), 4)
    assert errors == []
    assert sorted(numbers) == list(range(20))


def test_stopped_call_drops_its_jobs_and_returns_an_error():
    numbers: list[int] = []

    def run(job: int, buffer: ByteArray) -> None:
        numbers.append(job)

    buffers = BufferPool(Budget(PAGE, PAGE, 1))
    errors = run_jobs(iter(range(20)), run, buffers, 1, is_stopped=lambda: len(numbers) == 3)
    assert numbers == [0, 1, 2]
    assert [type(error) for error in errors] == [StoppedReadsError]
