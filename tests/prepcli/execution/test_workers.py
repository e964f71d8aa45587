"""Workers: their arguments and their memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError
from prepcli.core.observer import NullProgress
from prepcli.engine.budget import MIB, MIN_MEMORY_NBYTES
from prepcli.engine.conversion_result import ConversionResult
from prepcli.execution.workers import (
    MAX_BASELINE_NBYTES,
    ProcessOptions,
    WorkerPool,
    worker_argv,
    worker_memory_nbytes,
)
from prepcli.planning.work_units import Share

OWN = [
    "--workers",
    "1",
    "--processes",
    "4/2",
    "--memory",
    "99",
    "--json",
    "--quiet",
    "--progress",
    "json",
]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["export", "x", "--workers", "4"], ["export", "x", "--workers", "4", *OWN]),
        (["export", "--json", "--", "-x"], ["export", "--json", *OWN, "--", "-x"]),
    ],
)
def test_worker_argv_appends_the_workers_own_options(words: list[str], expected: list[str]):
    assert worker_argv(words, Share(4, 2), memory_nbytes=99) == expected


@given(
    st.integers(MIN_MEMORY_NBYTES, 1 << 40), st.integers(1, 64), st.integers(0, MAX_BASELINE_NBYTES)
)
def test_worker_memory_fits_into_the_budget(memory_nbytes: int, workers: int, own_nbytes: int):
    if workers * MIN_MEMORY_NBYTES + (workers - 1) * own_nbytes <= memory_nbytes:
        worker_nbytes = worker_memory_nbytes(memory_nbytes, workers, baseline_nbytes=own_nbytes)
        assert worker_nbytes >= MIN_MEMORY_NBYTES
        assert workers * worker_nbytes + (workers - 1) * own_nbytes <= memory_nbytes
        return
    with pytest.raises(PrepError) as caught:
        worker_memory_nbytes(memory_nbytes, workers, baseline_nbytes=own_nbytes)
    assert caught.value.code == USAGE
    needed, fitting = (
        word.strip("`,") for word in (caught.value.hint.split()[1], caught.value.hint.split()[-1])
    )
    assert (
        worker_memory_nbytes(
            int(needed.removesuffix("MiB")) * MIB, workers, baseline_nbytes=own_nbytes
        )
        >= MIN_MEMORY_NBYTES
    )
    assert (
        worker_memory_nbytes(memory_nbytes, int(fitting), baseline_nbytes=own_nbytes)
        >= MIN_MEMORY_NBYTES
    )


def test_worker_memory_ignores_memory_of_the_caller():
    assert (
        worker_memory_nbytes(512 << 20, 2, baseline_nbytes=2 << 30)
        == worker_memory_nbytes(512 << 20, 2, baseline_nbytes=MAX_BASELINE_NBYTES)
        == (512 - 64) << 19
    )


def test_worker_memory_of_one_process_is_the_whole_budget():
    assert worker_memory_nbytes(1, 1, baseline_nbytes=1 << 30) == 1


class Counting(NullProgress):
    ended = 0

    def end(self) -> None:
        self.ended += 1


def test_pool_without_workers_uses_the_commands_progress():
    progress = Counting()
    with WorkerPool(ProcessOptions(), Share(), memory_nbytes=1, progress=progress) as workers:
        assert workers.progress is progress
        result = ConversionResult()
        workers.add_reports(result)
        assert result == ConversionResult()
    assert progress.ended == 0


def test_pool_ends_progress_after_all_workers():
    progress = Counting()
    options = ProcessOptions(num_workers=2, argv=("export",))
    with WorkerPool(options, Share(), memory_nbytes=1 << 30, progress=progress) as workers:
        workers.progress.end()
        assert progress.ended == 0
    assert progress.ended == 1
