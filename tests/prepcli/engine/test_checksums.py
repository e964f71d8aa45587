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
from prepcli.engine import checksums, pipeline
from prepcli.engine.checksums import Recorder, load_sums, read_back
from prepcli.engine.digest import checksum
from prepcli.engine.files import Files
from prepcli.planning import checksum_blocks
from prepcli.planning.checksum_blocks import BLOCK_NBYTES
from prepcli.planning.extents import Extent, extents, leaf_blocks
from prepcli.planning.grids import Grid, Lattice
from prepcli.planning.moves import Copy
from prepcli.planning.plan import Leaf, Placed
from tests.helpers.plans import Saved, dividing, saved
from tests.helpers.strategies import tables
from tests.prepcli.engine.test_pipeline import QUIET, spend
from trainer.models.axis_map import AxisMap


def extents_of(made: Saved) -> list[Extent]:
    return extents(made.plan.leaves, leaf_blocks(made.plan.leaves))


def from_files(places: list[Extent], paths: list[Path]) -> np.ndarray:
    """The sum of every block, of the bytes that are in the files."""
    sums = np.zeros(max(extent.blocks.stop for extent in places), np.uint64)
    data = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
    for extent in places:
        for at in range(extent.count):
            start = extent.offset + at * extent.slot_nbytes
            for block in extent.blocks.chunk.touched(0, extent.blocks.chunk.chunk_nbytes):
                number = extent.first_block(at) + block.number
                sums[number] = checksum(data[extent.file][start + block.low : start + block.high].data)
    return sums


@QUIET
@given(rows=tables(), data=st.data())
def test_sums_are_those_of_the_files(tmp_path_factory: pytest.TempPathFactory, rows: tuple[AxisMap, ...], data: Any):
    folder = tmp_path_factory.mktemp("plan")
    made = saved(rows, [data.draw(dividing(row.leaf_shape)) for row in rows])
    limit, most = data.draw(st.sampled_from([4, 20, 64, 4096])), data.draw(st.sampled_from([8, 24, 1 << 20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum_blocks, "BLOCK_NBYTES", most)
        patch.setattr(checksums, "SHORTEST_RUN", 0)
        places, paths = extents_of(made), made.data_files(folder)
        recorder = Recorder(folder / "sums", places)
        with Files([made.source(folder)]) as left, Files(paths, made.layout.sizes) as right:
            pipeline.run(made.plan.streams, left, right, spend(limit), NullProgress(), checksums=recorder)
    wanted, known = from_files(places, paths), recorder.sums != 0
    assert (recorder.sums[known] == wanted[known]).all()
    read_back(recorder.sums, places, paths)
    assert (recorder.sums == wanted).all()


DATA = np.random.default_rng(0).integers(0, 256, 3 * BLOCK_NBYTES, np.uint8)
NUMBERS = np.array([checksum(block.data) for block in DATA.reshape(3, -1)], np.uint64)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    """A recorder of one leaf of three blocks, which begins at byte 4096 of its file."""
    shape = (DATA.size,)
    box = Placed((0,), (1,), Lattice(0, 4096, (0,), (DATA.size,)))
    leaves = [Leaf(("x",), "int8", Grid(shape, shape), (box,))]
    return Recorder(tmp_path / "sums", extents(leaves, leaf_blocks(leaves)))


def observe(recorder: Recorder, *edges: int) -> None:
    """Pass the bytes between edges, each in one run."""
    for low, high in itertools.pairwise(edges):
        recorder.observe([Copy(0, 0, 4096 + low, high - low)], DATA[low:high])


def test_pieces_in_order_need_no_reading_back(recorder: Recorder):
    observe(recorder, 0, 5000, BLOCK_NBYTES + 7, 2 * BLOCK_NBYTES + 1, DATA.size)
    assert (recorder.sums == NUMBERS).all()


def test_pieces_out_of_order_are_left_unknown(recorder: Recorder):
    observe(recorder, 5000, 2 * BLOCK_NBYTES)
    observe(recorder, 0, 5000)
    observe(recorder, 2 * BLOCK_NBYTES + 1, DATA.size)
    assert recorder.sums.tolist() == [0, NUMBERS[1], 0]


def test_short_runs_are_left_unknown(recorder: Recorder):
    columns = Copy(0, 0, 4096, 64, ((DATA.size // 128, 64, 128),))
    recorder.observe([columns], DATA[: columns.nbytes])
    assert not recorder.sums.any()


def test_saved_sums_are_known_to_the_next_run(recorder: Recorder, tmp_path: Path):
    observe(recorder, 0, 2 * BLOCK_NBYTES)
    recorder.save()
    assert load_sums(tmp_path / "sums", 3).tolist() == [*NUMBERS[:2], 0]
    assert not load_sums(tmp_path / "sums", 4).any(), "sums of another plan"
    torn = (tmp_path / "sums").read_bytes()[:-1]
    (tmp_path / "sums").write_bytes(torn)
    assert not load_sums(tmp_path / "sums", 3).any()
    assert not load_sums(tmp_path / "none", 3).any()
