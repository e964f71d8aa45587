"""Checksum blocks of an output while it is staged: one file of sums for each process, joined when it is finished."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from prepcli.engine.checksum_recorder import ChecksumArray, ChecksumRecorder, compute_unknown, load_checksums
from prepcli.execution.staging import Staging
from prepcli.planning.chunk_extents import ChunkExtent, chunk_extents, leaf_blocks
from prepcli.planning.plan import Plan

CHECKSUMS_STEM = "checksums"  # `checksums.I` in the work folder: of process I


def checksum_recorder(plan: Plan, stage: Staging, index: int = 0) -> ChecksumRecorder | None:
    """Return a recorder of the bytes written of the share of process `index`; None for an output without leaves."""
    return ChecksumRecorder(stage.work / f"{CHECKSUMS_STEM}.{index}", _extents(plan)) if plan.leaves else None


def delete_checksums(stage: Staging) -> None:
    """Remove the sums that all processes saved; blocks without one are read back when the output is finished."""
    for path in stage.work.glob(f"{CHECKSUMS_STEM}.*"):
        path.unlink(missing_ok=True)


def collect_checksums(plan: Plan, stage: Staging, files: Sequence[Path]) -> ChecksumArray:
    """Return the sums of all blocks: those that the processes saved, and the others read back from `files`."""
    blocks = leaf_blocks(plan.leaves)
    sums: ChecksumArray = np.zeros(max((leaf.stop_number for leaf in blocks.values()), default=0), np.uint64)
    for path in sorted(stage.work.glob(f"{CHECKSUMS_STEM}.*")):
        sums = np.where(sums == 0, load_checksums(path, sums.size), sums)
    compute_unknown(sums, _extents(plan), files)
    return sums


def _extents(plan: Plan) -> list[ChunkExtent]:
    return chunk_extents(plan.leaves, leaf_blocks(plan.leaves))
