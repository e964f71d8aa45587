"""Sums of what a run writes: equal to those of the files, in any layout, resumed, shared or read back."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.console.progress import NullProgress
from prepcli.engine import checksum_recorder, pipeline
from prepcli.engine.checksum_recorder import ChecksumRecorder, compute_unknown, load_checksums
from prepcli.engine.digest import checksum
from prepcli.engine.files import Files
from prepcli.planning import checksum_blocks
from prepcli.planning.checksum_blocks import BLOCK_NBYTES
from prepcli.planning.chunk_extents import ChunkExtent, chunk_extents, leaf_blocks
from prepcli.planning.grids import ChunkGrid, StridedPlacement
from prepcli.planning.plan import OutputLeaf, PlacedChunks
from prepcli.planning.strided_copies import StridedCopy
from tests.helpers.plans import SavePlan, dividing_chunks, make_save_plan
from tests.helpers.strategies import complete_tables
from tests.prepcli.engine.test_pipeline import QUIET, make_budget
from trainer.models.axis_map import AxisMap


def extents_of(made: SavePlan) -> list[ChunkExtent]:
    return chunk_extents(made.plan.leaves, leaf_blocks(made.plan.leaves))


def from_files(places: list[ChunkExtent], paths: list[Path]) -> np.ndarray:
    """The sum of every block, of the bytes that are in the files."""
    sums = np.zeros(max(extent.blocks.stop_number for extent in places), np.uint64)
    data = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
    for extent in places:
        for at in range(extent.chunk_count):
            start = extent.offset + at * extent.stride_nbytes
            for block in extent.blocks.per_chunk.overlapping(0, extent.blocks.per_chunk.chunk_nbytes):
                number = extent.first_block(at) + block.number
                sums[number] = checksum(data[extent.file][start + block.start : start + block.stop].data)
    return sums


@QUIET
@given(rows=complete_tables(), data=st.data())
def test_sums_are_those_of_the_files(tmp_path_factory: pytest.TempPathFactory, rows: tuple[AxisMap, ...], data: Any):
    folder = tmp_path_factory.mktemp("plan")
    made = make_save_plan(rows, [data.draw(dividing_chunks(row.leaf_shape)) for row in rows])
    limit, most = data.draw(st.sampled_from([4, 20, 64, 4096])), data.draw(st.sampled_from([8, 24, 1 << 20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum_blocks, "BLOCK_NBYTES", most)
        patch.setattr(checksum_recorder, "SHORTEST_RUN", 0)
        places, paths = extents_of(made), made.data_files(folder)
        recorder = ChecksumRecorder(folder / "sums", places)
        with Files([made.write_source(folder)]) as left, Files(paths, made.layout.file_sizes) as right:
            pipeline.run(made.plan.streams, left, right, make_budget(limit), NullProgress(), checksums=recorder)
    wanted, known = from_files(places, paths), recorder.sums != 0
    assert (recorder.sums[known] == wanted[known]).all()
    compute_unknown(recorder.sums, places, paths)
    assert (recorder.sums == wanted).all()


DATA = np.random.default_rng(0).integers(0, 256, 3 * BLOCK_NBYTES, np.uint8)
NUMBERS = np.array([checksum(block.data) for block in DATA.reshape(3, -1)], np.uint64)


@pytest.fixture
def recorder(tmp_path: Path) -> ChecksumRecorder:
    """A recorder of one leaf of three blocks, which begins at byte 4096 of its file."""
    shape = (DATA.size,)
    box = PlacedChunks((0,), (1,), StridedPlacement(0, 4096, (0,), (DATA.size,)))
    leaves = [OutputLeaf(("x",), "int8", ChunkGrid(shape, shape), (box,))]
    return ChecksumRecorder(tmp_path / "sums", chunk_extents(leaves, leaf_blocks(leaves)))


def observe(recorder: ChecksumRecorder, *edges: int) -> None:
    """Pass the bytes between edges, each in one run."""
    for low, high in itertools.pairwise(edges):
        recorder.record([StridedCopy(0, 0, 4096 + low, high - low)], DATA[low:high])


def test_pieces_in_order_need_no_reading_back(recorder: ChecksumRecorder):
    observe(recorder, 0, 5000, BLOCK_NBYTES + 7, 2 * BLOCK_NBYTES + 1, DATA.size)
    assert (recorder.sums == NUMBERS).all()


def test_pieces_out_of_order_are_left_unknown(recorder: ChecksumRecorder):
    observe(recorder, 5000, 2 * BLOCK_NBYTES)
    observe(recorder, 0, 5000)
    observe(recorder, 2 * BLOCK_NBYTES + 1, DATA.size)
    assert recorder.sums.tolist() == [0, NUMBERS[1], 0]


def test_short_runs_are_left_unknown(recorder: ChecksumRecorder):
    columns = StridedCopy(0, 0, 4096, 64, ((DATA.size // 128, 64, 128),))
    recorder.record([columns], DATA[: columns.nbytes])
    assert not recorder.sums.any()


def test_saved_sums_are_known_to_the_next_run(recorder: ChecksumRecorder, tmp_path: Path):
    observe(recorder, 0, 2 * BLOCK_NBYTES)
    recorder.save()
    assert load_checksums(tmp_path / "sums", 3).tolist() == [*NUMBERS[:2], 0]
    assert not load_checksums(tmp_path / "sums", 4).any(), "sums of another plan"
    torn = (tmp_path / "sums").read_bytes()[:-1]
    (tmp_path / "sums").write_bytes(torn)
    assert not load_checksums(tmp_path / "sums", 3).any()
    assert not load_checksums(tmp_path / "none", 3).any()
