"""Lanes of a process: how many pipelines move bytes at the same time, and their threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from prepcli.core.errors import RERUN_HINT, PrepError
from prepcli.core.worker_thread import run_in_threads
from prepcli.engine.budget import MIB
from prepcli.engine.pipeline import Pipeline

# A few saturate the memory and the disk.
MAX_LANES = 4
# A lane with less has small buffers, and one that moves less is not worth a thread.
MIN_LANE_MEMORY_NBYTES = 128 * MIB
MIN_LANE_NBYTES = 16 * MIB


def count_lanes(
    moved_nbytes: int, memory_nbytes: int, *, min_buffer_nbytes: int = 0, kept_nbytes: int = 0
) -> int:
    """Return the number of pipelines that move bytes at the same time, each with its part of a memory limit.

    Args:
        moved_nbytes: Bytes to move.
        memory_nbytes: The limit.
        min_buffer_nbytes: See `make_budget`.
        kept_nbytes: See `make_budget`. Each lane keeps so much.
    """
    needed_nbytes = MIN_LANE_MEMORY_NBYTES + 4 * (min_buffer_nbytes + kept_nbytes)
    counts = (
        MAX_LANES,
        len(os.sched_getaffinity(0)),
        memory_nbytes // needed_nbytes,
        moved_nbytes // MIN_LANE_NBYTES,
    )
    return max(1, min(counts))


def lanes_have_threads(unit_nbytes: Sequence[int], num_lanes: int, *, are_in_memory: bool) -> bool:
    """Return whether the stages of each lane have threads of their own.

    Without them a lane keeps one core busy, and its slabs stay in the caches of the core. This is faster if no stage
    waits for a disk, and if every lane has work until the end or there is one core.

    Args:
        unit_nbytes: Bytes of each unit. Only one lane moves a unit.
        num_lanes: Number of lanes.
        are_in_memory: Whether no file is on a disk.
    """
    if not are_in_memory:
        return True
    if len(os.sched_getaffinity(0)) == 1:
        return False
    is_divided = max(unit_nbytes, default=0) * num_lanes <= sum(unit_nbytes)
    return num_lanes == 1 or not is_divided


def run_pipelines(pipelines: Sequence[Pipeline]) -> None:
    """Run pipelines at the same time, and wait for all of them. The first error stops the others.

    A single pipeline with threads reads in the calling thread. All others run in threads, which a signal ends after a
    slab. Their sources are files of this machine.

    Raises:
        PrepError: Reading or writing failed.
    """
    if len(pipelines) == 1 and pipelines[0].has_threads:
        pipelines[0].run()
        return
    waiting = [*pipelines]

    def stop_all(error: BaseException) -> None:
        for pipeline in pipelines:
            pipeline.fail(error)

    def run_next() -> None:
        try:
            waiting.pop(0).run()
        except BaseException as error:
            stop_all(error)
            raise

    # The exception of the signal is raised in its place.
    stopped = PrepError("the run was interrupted", "by a signal", RERUN_HINT)
    errors = run_in_threads(run_next, len(pipelines), on_interruption=partial(stop_all, stopped))
    if errors:
        raise errors[0]
