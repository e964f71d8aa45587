"""Readers of bytes: files, concatenated pieces, strided views, arrays in memory and chunked tensors."""

from __future__ import annotations

import gc
import weakref
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.boxes import Range
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.commands.cli.main import main
from prepcli.core.errors import PrepError
from prepcli.engine.blobs import (
    BlockCache,
    DerivedArrays,
    DerivedReader,
    HostLeaf,
    HostLeafReader,
    MemoryBlob,
    RowOperation,
    StoredMatrix,
    open_blobs,
)
from prepcli.engine.files import PAGE, Files
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.planning.arrays import location_copies, whole_array
from prepcli.planning.plan import Stream
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from prepcli.stores.buffers import allocate_buffer
from tests.helpers.plans import flat
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint

# (offset, length) in the second file.
PIECES = (
    (3, 5000),
    (20_000, 1),
    (9000, 4096),
    (0, 0),
    (13_000, 7000),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    new_folder = tmp_path_factory.mktemp("blobs")
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (new_folder / name).write_bytes(rng.bytes(40_000))
    return new_folder


def _blobs(folder: Path) -> tuple[Path, MemoryBlob, Path]:
    return folder / "a", MemoryBlob("pieces", _bytes(folder, 1)), folder / "b"


def _bytes(folder: Path, number: int) -> bytes:
    b = (folder / "b").read_bytes()
    concatenated = b"".join(b[offset : offset + nbytes] for offset, nbytes in PIECES)
    return [(folder / "a").read_bytes(), concatenated, b][number]


@given(st.integers(0, 2), st.data())
def test_read_run_reads_files_and_blobs(folder: Path, number: int, data: st.DataObject):
    content = _bytes(folder, number)
    offset = data.draw(st.integers(0, len(content) - 1))
    width = data.draw(st.integers(1, len(content) - offset))
    into = allocate_buffer(48_000)
    with open_blobs(_blobs(folder)) as reader:
        assert (
            reader.read_run(StridedCopy(0, number, offset, width), into).tobytes()
            == content[offset : offset + width]
        )
        view = np.zeros(width, np.uint8)
        reader.read_at(number, offset, view)
        assert view.tobytes() == content[offset : offset + width]


def test_read_runs_joins_runs_of_several_files(folder: Path):
    a, concatenated, b = (_bytes(folder, number) for number in range(3))
    copies = [
        StridedCopy(0, 0, 5, 10),
        StridedCopy(0, 1, 4990, 20, ((3, 20, 1000),)),
        StridedCopy(0, 2, 1, 7),
        StridedCopy(0, 2, 20, 2),
    ]
    with open_blobs(_blobs(folder)) as reader:
        data_read = reader.read_runs(copies, allocate_buffer(4096)).tobytes()
    pieces = b"".join(concatenated[4990 + offset : 5010 + offset] for offset in (0, 1000, 2000))
    assert data_read == a[5:15] + pieces + b[1:8] + b[20:22]


def test_open_blobs_of_files_only_returns_files(folder: Path):
    with open_blobs([folder / "a", folder / "b"]) as reader:
        assert isinstance(reader, Files)


def test_read_at_rejects_range_beyond_its_file(folder: Path):
    with open_blobs([folder / "a"]) as reader, pytest.raises(PrepError, match="a is cut short"):
        reader.read_at(0, 39_000, np.zeros(2000, np.uint8))


@pytest.mark.parametrize("order", [*permutations(range(3))])
@pytest.mark.parametrize("step", [1, 3])
def test_read_values_reads_strided_views_in_c_order(
    tmp_path: Path, order: tuple[int, ...], step: int
):
    storage = np.arange(11 * 12 * 13, dtype=np.float32).reshape(11, 12, 13)
    (tmp_path / "s").write_bytes(b"lead" + storage.tobytes())
    view = storage[2:, ::step, 1:].transpose(order)
    start = 4 + (2 * 12 * 13 + 1) * 4
    side = (whole_array("w", "float32", view.shape, (0, start), view.strides),)
    stream = Stream("w", "float32", view.shape, (0, view.shape[0]), side, ())
    with open_blobs([tmp_path / "s"]) as reader:
        data_read = b"".join(
            run.tobytes()
            for _, run in read_values(reader, stream, buffers=allocate_run_buffers(4096))
        )
    assert data_read == view.tobytes()


def test_contiguous_strided_view_is_one_run():
    shape = (4, 6, 2)
    view = whole_array("w", "float32", shape, (0, 8), (48, 8, 4))
    locations = (flat("float32", shape, 8), view)
    contiguous, view = (
        Stream("w", "float32", shape, (1, 3), (location,), ()) for location in locations
    )
    assert [*location_copies(contiguous.reads, contiguous.box)] == [
        *location_copies(view.reads, view.box)
    ]


class AddOne(RowOperation):
    """Adds 1 to each byte of a stored matrix, transposed: a block needs some columns of all rows."""

    def __init__(self, rows: int, columns: int) -> None:
        self.shape = (columns, rows)
        self.dtype = "uint8"
        self.matrix = StoredMatrix(
            whole_array("m", "uint8", (rows, columns), (0, 0)), rows, columns
        )

    def block_rows(self, memory_nbytes: int) -> int:
        return 3

    def read_rows(self, rows: Range, reader: DerivedReader) -> np.ndarray:
        columns = reader.read_matrix(self.matrix, (0, self.matrix.rows), rows)
        return np.ascontiguousarray(columns.T + np.uint8(1))


@given(st.data())
def test_derived_arrays_of_derived_arrays_share_a_bounded_cache(data: st.DataObject):
    values = np.random.default_rng(0).integers(0, 200, (24, 36), dtype=np.uint8)
    inner = DerivedArrays("inner", (AddOne(24, 36),), (MemoryBlob("m", values.tobytes()),))
    outer = DerivedArrays("outer", (AddOne(36, 24), AddOne(36, 24)), (inner,))
    expected = 2 * (values + np.uint8(2)).tobytes()
    assert outer.offsets[-1] == len(expected)
    cache = BlockCache(data.draw(st.sampled_from([200, 700, 5000]), label="memory"))
    reader = outer.open(cache)
    for _ in range(6):
        start = data.draw(st.integers(0, len(expected)), label="start")
        into = np.zeros(data.draw(st.integers(0, len(expected) - start), label="bytes"), np.uint8)
        reader.read_at(start, into)
        assert into.tobytes() == expected[start : start + into.size]
        held = [block.nbytes for block in cache._held.values()]
        assert sum(held) <= cache.most_nbytes or len(held) == 1
    reader.close()
    assert not cache._held


def leaf(array: np.ndarray) -> HostLeaf:
    return HostLeaf.whole(array.shape, array.dtype.name, fetch=lambda: array)


@given(st.integers(0, 9000), st.integers(1, 3000))
def test_read_run_keeps_page_offset(offset: int, width: int):
    array = np.arange(12000, dtype=np.uint8)
    into = allocate_buffer(4 * PAGE)
    data_read = HostLeafReader([leaf(array)]).read_run(StridedCopy(0, 0, offset, width), into)
    assert data_read.tobytes() == array[offset : offset + width].tobytes()
    assert (data_read.ctypes.data - offset) % PAGE == 0


def test_read_runs_packs_runs():
    array = np.arange(4 * 5 * 6, dtype=np.int32).reshape(4, 5, 6)
    copies = [StridedCopy(0, 0, 24, 8, ((4, 48, 120), (2, 24, 24))), StridedCopy(0, 0, 0, 24)]
    data_read = (
        HostLeafReader([leaf(array)]).read_runs(copies, allocate_buffer(PAGE)).view(np.int32)
    )
    assert data_read.tolist() == [*array[:, 1:3, :2].reshape(-1).tolist(), *array[0, 0].tolist()]


def test_leaf_is_fetched_once_and_released_at_its_end():
    class Array(np.ndarray):
        pass

    fetched: list[weakref.ref[np.ndarray]] = []

    def fetch() -> np.ndarray:
        array = np.zeros(100, np.uint8).view(Array)
        fetched.append(weakref.ref(array))
        return array

    leaves, into = (
        HostLeafReader(
            [HostLeaf.whole((100,), "uint8", fetch=fetch), leaf(np.zeros((), np.int32))]
        ),
        allocate_buffer(PAGE),
    )
    assert fetched == []
    leaves.read_run(StridedCopy(0, 0, 0, 60), into)
    leaves.read_run(StridedCopy(0, 1, 0, 4), into)
    gc.collect()
    assert len(fetched) == 1
    leaves.read_run(StridedCopy(60, 0, 60, 40), into)
    gc.collect()
    assert len(fetched) == 1
    assert fetched[0]() is None


def test_read_run_accepts_any_memory_order_and_dtype():
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    data_read = HostLeafReader([leaf(array)]).read_run(
        StridedCopy(0, 0, 0, 24), allocate_buffer(PAGE)
    )
    assert data_read.view(np.float32).tolist() == [0, 3, 1, 4, 2, 5]
    assert HostLeafReader([leaf(np.array([True, False]))]).read_run(
        StridedCopy(0, 0, 0, 2), allocate_buffer(PAGE)
    ).tolist() == [1, 0]


@pytest.mark.parametrize("fetched", [np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float16)])
def test_read_run_rejects_other_shape_or_dtype(fetched: np.ndarray):
    leaves = HostLeafReader([HostLeaf.whole((3, 2), "float32", fetch=lambda: fetched)])
    with pytest.raises(ValueError, match=r"a leaf of \(3, 2\) float32 was fetched as"):
        leaves.read_run(StridedCopy(0, 0, 0, 24), allocate_buffer(PAGE))


@pytest.mark.parametrize("run_nbytes", [32, 100, 1 << 20])
def test_read_values_returns_tensors_in_c_order(tmp_path: Path, run_nbytes: int) -> None:
    tensors = make_checkpoint(tmp_path / "llama", LLAMA, "float16", vocab_size=12)
    assert (
        main(
            [
                "save-init",
                str(tmp_path / "llama"),
                "--out",
                str(tmp_path / "init"),
                "--mesh",
                "1,2,2",
                "-q",
            ]
        )
        == 0
    )
    for folder in ("llama", "init"):
        source = open_source(locate(str(tmp_path / folder)))
        assert len(source.tensors) == len(tensors)
        with open_blobs(source.byte_sources) as files:
            for tensor in source.tensors:
                stream = Stream(
                    tensor.name,
                    tensor.dtype,
                    tensor.shape,
                    (0, tensor.shape[0]),
                    tensor.placement,
                    (),
                )
                runs = [
                    (start, bytes(data))
                    for start, data in read_values(
                        files, stream, buffers=allocate_run_buffers(run_nbytes)
                    )
                ]
                content = b"".join(data for _, data in runs)
                assert content == tensors[source.names.full_name(tensor.name)].tobytes()
                assert [start for start, _ in runs] == [
                    sum(len(d) for _, d in runs[:i]) for i in range(len(runs))
                ]
                assert all(0 < len(data) <= run_nbytes for _, data in runs)
