"""Checksums of an output's blocks while it is staged: one file per process, merged when the output is finished."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from prepcli.engine.checksum_recorder import (
    ChecksumArray,
    ChecksumRecorder,
    compute_unknown,
    load_checksums,
)
from prepcli.execution.staging import Staging
from prepcli.planning.chunk_placement import chunk_extents, count_blocks
from prepcli.planning.plan import Plan

# `checksums.I` in the work folder belongs to process I
CHECKSUMS_STEM = "checksums"


def checksum_recorder(plan: Plan, stage: Staging, *, index: int = 0) -> ChecksumRecorder | None:
    """Return a recorder of the bytes of process `index`, or None without leaves."""
    if not plan.leaves:
        return None
    return ChecksumRecorder(stage.work / f"{CHECKSUMS_STEM}.{index}", chunk_extents(plan.leaves))


def delete_checksums(stage: Staging) -> None:
    """Delete the checksums of all processes. Blocks without a checksum are read back at the end."""
    for path in stage.work.glob(f"{CHECKSUMS_STEM}.*"):
        path.unlink(missing_ok=True)


def collect_checksums(plan: Plan, stage: Staging, *, files: Sequence[Path]) -> ChecksumArray:
    """Return the checksums of all blocks.

    Missing checksums are computed from the data files.

    Args:
        plan: The plan of the output.
        stage: The staging folder.
        files: Paths of the data files, in the plan's order.

    Returns:
        One uint64 per block.
    """
    extents = chunk_extents(plan.leaves)
    checksums: ChecksumArray = np.zeros(count_blocks(extents), np.uint64)
    # Each process has recorded the blocks of its chunks. Zeros are unknown.
    for path in sorted(stage.work.glob(f"{CHECKSUMS_STEM}.*")):
        checksums = np.where(checksums == 0, load_checksums(path, checksums.size), checksums)
    compute_unknown(checksums, extents, files=files)
    return checksums
