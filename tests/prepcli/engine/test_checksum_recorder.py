"""Checksum recorder: recorded and computed checksums match the written files, in any layout."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.axis_map import AxisMap
from prepcli.algebra.grids import ChunkGrid, StridedChunks
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.core.observer import NullProgress
from prepcli.engine import checksum_recorder
from prepcli.engine.checksum_recorder import ChecksumRecorder, compute_unknown
from prepcli.engine.digest import block_checksum
from prepcli.engine.files import Files
from prepcli.engine.pipeline import Pipeline
from prepcli.planning import arrays as stored_arrays
from prepcli.planning.arrays import BLOCK_NBYTES
from prepcli.planning.chunk_placement import ChunkExtent, chunk_extents
from prepcli.planning.plan import OutputLeaf, PlacedChunks
from tests.helpers.plans import SavePlan, dividing_chunks, make_save_plan
from tests.helpers.strategies import complete_tables
from tests.prepcli.engine.test_pipeline import QUIET, make_budget


def plan_extents(save_plan: SavePlan) -> list[ChunkExtent]:
    return chunk_extents(save_plan.plan.leaves)


def file_checksums(extents: list[ChunkExtent], paths: list[Path]) -> np.ndarray:
    """Return the checksum of every block, computed from the files."""
    checksums_of_files = np.zeros(max(extent.blocks.stop_number for extent in extents), np.uint64)
    data = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
    for extent in extents:
        for position in range(extent.chunk_count):
            start = extent.offset + position * extent.stride_nbytes
            for block in extent.blocks.per_chunk.overlapping(
                0, extent.blocks.per_chunk.chunk_nbytes
            ):
                number = extent.first_block(position) + block.number
                checksums_of_files[number] = block_checksum(
                    data[extent.file][start + block.start : start + block.stop].data
                )
    return checksums_of_files


@QUIET
@given(rows=complete_tables(), data=st.data())
def test_recorder_matches_the_files(
    tmp_path_factory: pytest.TempPathFactory, rows: tuple[AxisMap, ...], data: Any
):
    folder = tmp_path_factory.mktemp("plan")
    save_plan = make_save_plan(rows, [data.draw(dividing_chunks(row.leaf_shape)) for row in rows])
    limit, block_nbytes = (
        data.draw(st.sampled_from([4, 20, 64, 4096])),
        data.draw(st.sampled_from([8, 24, 1 << 20])),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_arrays, "BLOCK_NBYTES", block_nbytes)
        patch.setattr(checksum_recorder, "MIN_RUN_NBYTES", 0)
        extents, paths = plan_extents(save_plan), save_plan.data_files(folder)
        recorder = ChecksumRecorder(extents)
        with (
            Files([save_plan.write_source(folder)]) as reader,
            Files(paths, save_plan.layout.file_sizes) as sink,
        ):
            Pipeline(
                save_plan.plan.streams,
                reader,
                sink=sink,
                budget=make_budget(limit),
                progress=NullProgress(),
                checksums=recorder,
            ).run()
    expected, is_known = file_checksums(extents, paths), recorder.sums != 0
    assert (recorder.sums[is_known] == expected[is_known]).all()
    with Files(paths) as written:
        compute_unknown(recorder.sums, extents, written)
    assert (recorder.sums == expected).all()


DATA = np.random.default_rng(0).integers(0, 256, 3 * BLOCK_NBYTES, np.uint8)
NUMBERS = np.array([block_checksum(block.data) for block in DATA.reshape(3, -1)], np.uint64)


@pytest.fixture
def recorder() -> ChecksumRecorder:
    """Return a recorder of a leaf of three blocks that starts at byte 4096 of its file."""
    shape = (DATA.size,)
    box = PlacedChunks((0,), (1,), StridedChunks(0, 4096, (0,), (DATA.size,)))
    leaves = [OutputLeaf(("x",), "int8", ChunkGrid(shape, shape), (box,))]
    return ChecksumRecorder(chunk_extents(leaves))


def record_runs(recorder: ChecksumRecorder, *edges: int) -> None:
    """Record the bytes between neighbouring edges, each as one run."""
    for low, high in itertools.pairwise(edges):
        recorder.record([StridedCopy(0, 0, 4096 + low, high - low)], DATA[low:high])


def test_recorder_hashes_pieces_in_order(recorder: ChecksumRecorder):
    record_runs(recorder, 0, 5000, BLOCK_NBYTES + 7, 2 * BLOCK_NBYTES + 1, DATA.size)
    assert (recorder.sums == NUMBERS).all()


def test_recorder_leaves_unordered_pieces_unknown(recorder: ChecksumRecorder):
    record_runs(recorder, 5000, 2 * BLOCK_NBYTES)
    record_runs(recorder, 0, 5000)
    record_runs(recorder, 2 * BLOCK_NBYTES + 1, DATA.size)
    assert recorder.sums.tolist() == [0, NUMBERS[1], 0]


def test_recorder_does_not_compute_checksums_of_short_runs(recorder: ChecksumRecorder):
    columns = StridedCopy(0, 0, 4096, 64, ((DATA.size // 128, 64, 128),))
    recorder.record([columns], DATA[: columns.nbytes])
    assert not recorder.sums.any()


def test_recorder_names_each_recorded_block_once(recorder: ChecksumRecorder):
    record_runs(recorder, 0, BLOCK_NBYTES, BLOCK_NBYTES + 7)
    assert recorder.take_new().tolist() == [0]
    record_runs(recorder, BLOCK_NBYTES + 7, DATA.size)
    assert recorder.take_new().tolist() == [1, 2]
