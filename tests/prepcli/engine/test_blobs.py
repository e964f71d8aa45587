"""Files, joined pieces and strided views are read alike."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.engine.blobs import ConcatenatedBlob, FileRange, open_blobs
from prepcli.engine.files import Files, allocate_buffer
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.errors import PrepError
from prepcli.planning.plan import Contiguous, Stream, Strided, read_copies
from prepcli.planning.strided_copies import StridedCopy

PIECES = ((3, 5000), (20_000, 1), (9000, 4096), (0, 0), (13_000, 7000))  # of the second file: offset, length


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("blobs")
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (made / name).write_bytes(rng.bytes(40_000))
    return made


def _blobs(folder: Path) -> tuple[Path, ConcatenatedBlob, Path]:
    parts = tuple(FileRange(folder / "b", offset, nbytes) for offset, nbytes in PIECES)
    return folder / "a", ConcatenatedBlob("pieces", parts), folder / "b"


def _bytes(folder: Path, number: int) -> bytes:
    b = (folder / "b").read_bytes()
    joined = b"".join(b[offset : offset + nbytes] for offset, nbytes in PIECES)
    return [(folder / "a").read_bytes(), joined, b][number]


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2), st.data())
def test_runs_of_files_and_pieces(folder: Path, number: int, data: st.DataObject):
    whole = _bytes(folder, number)
    offset = data.draw(st.integers(0, len(whole) - 1))
    width = data.draw(st.integers(1, len(whole) - offset))
    into = allocate_buffer(48_000)
    with open_blobs(_blobs(folder)) as reads:
        assert reads.read_run(StridedCopy(0, number, offset, width), into).tobytes() == whole[offset : offset + width]
        found = np.zeros(width, np.uint8)
        reads.read_at(number, offset, found)
        assert found.tobytes() == whole[offset : offset + width]


def test_runs_of_several_one_after_another(folder: Path):
    a, joined, b = (_bytes(folder, number) for number in range(3))
    wanted = [
        StridedCopy(0, 0, 5, 10),
        StridedCopy(0, 1, 4990, 20, ((3, 20, 1000),)),
        StridedCopy(0, 2, 1, 7),
        StridedCopy(0, 2, 20, 2),
    ]
    with open_blobs(_blobs(folder)) as reads:
        found = reads.read_runs(wanted, allocate_buffer(4096)).tobytes()
    pieces = b"".join(joined[4990 + at : 5010 + at] for at in (0, 1000, 2000))
    assert found == a[5:15] + pieces + b[1:8] + b[20:22]


def test_plain_files_stay_plain(folder: Path):
    with open_blobs([folder / "a", folder / "b"]) as reads:
        assert isinstance(reads, Files)


def test_a_piece_that_reaches_beyond_its_file(folder: Path):
    long = ConcatenatedBlob("long", (FileRange(folder / "a", 39_000, 2000),))
    with open_blobs([long]) as reads, pytest.raises(PrepError, match="a is cut short"):
        reads.read_at(0, 0, np.zeros(2000, np.uint8))


@pytest.mark.parametrize("order", [*permutations(range(3))])
@pytest.mark.parametrize("step", [1, 3])
def test_a_view_is_read_in_the_order_of_its_tensor(tmp_path: Path, order: tuple[int, ...], step: int):
    storage = np.arange(11 * 12 * 13, dtype=np.float32).reshape(11, 12, 13)
    (tmp_path / "s").write_bytes(b"lead" + storage.tobytes())
    view = storage[2:, ::step, 1:].transpose(order)
    start = 4 + (2 * 12 * 13 + 1) * 4
    side = (Strided(0, start, view.strides),)
    stream = Stream("w", "float32", view.shape, (0, view.shape[0]), side, ())
    with open_blobs([tmp_path / "s"]) as reads:
        found = b"".join(run.tobytes() for _, run in read_values(reads, stream, allocate_run_buffers(4096)))
    assert found == view.tobytes()


def test_a_view_without_gaps_is_one_run():
    shape = (4, 6, 2)
    views = (Contiguous(0, 8), Strided(0, 8, (48, 8, 4)))
    flat, view = (Stream("w", "float32", shape, (1, 3), (side,), ()) for side in views)
    assert [*read_copies(flat, flat.box)] == [*read_copies(view, view.box)]
