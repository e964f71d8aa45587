"""Checksum blocks of an output while it is staged: one file of sums for each process, joined when it is finished."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from prepcli.engine.checksums import Recorder, Sums, load_sums, read_back
from prepcli.execution.staging import Staging
from prepcli.planning.extents import Extent, extents, leaf_blocks
from prepcli.planning.plan import Plan

SUMS = "checksums"  # `checksums.I` in the work folder: of process I


def recorder(plan: Plan, stage: Staging, index: int = 0) -> Recorder | None:
    """Return a recorder of the bytes written of the share of process `index`; None for an output without leaves."""
    return Recorder(stage.work / f"{SUMS}.{index}", _extents(plan)) if plan.leaves else None


def forget(stage: Staging) -> None:
    """Remove the sums that all processes saved; blocks without one are read back when the output is finished."""
    for path in stage.work.glob(f"{SUMS}.*"):
        path.unlink(missing_ok=True)


def collected(plan: Plan, stage: Staging, files: Sequence[Path]) -> Sums:
    """Return the sums of all blocks: those that the processes saved, and the others read back from `files`."""
    blocks = leaf_blocks(plan.leaves)
    sums: Sums = np.zeros(max((leaf.stop for leaf in blocks.values()), default=0), np.uint64)
    for path in sorted(stage.work.glob(f"{SUMS}.*")):
        sums = np.where(sums == 0, load_sums(path, sums.size), sums)
    read_back(sums, _extents(plan), files)
    return sums


def _extents(plan: Plan) -> list[Extent]:
    return extents(plan.leaves, leaf_blocks(plan.leaves))
