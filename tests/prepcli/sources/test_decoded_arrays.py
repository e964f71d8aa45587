"""Decoded chunks: bytes of every storage form, read in any order and within any memory."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.algebra.boxes import strides
from prepcli.algebra.grids import ChunkGrid, StridedChunks
from prepcli.core.errors import PrepError
from prepcli.engine.blobs import BlockCache, DerivedArrays, DerivedReader
from prepcli.engine.casts import Scale
from prepcli.formats.ocdbt import ValueLocation, read_ocdbt_index
from prepcli.formats.orbax import read_item
from prepcli.formats.orbax_chunks import unplaced_array, unravel_chunk_index
from prepcli.formats.zarr import ZARR_TYPESTRS
from prepcli.planning.arrays import Array, whole_array
from prepcli.planning.libraries import LayoutScale
from prepcli.planning.tensors import itemsize
from prepcli.sources import decoded_arrays as decoded_module
from prepcli.sources.decoded_arrays import JoinChunks, decoded_array, unscaled_array
from prepcli.sources.source import stored_tensor
from tests.helpers.orbax_items import (
    NOW_NS,
    chunk_bytes,
    metadata_of,
    random_array,
    write_ocdbt_index,
)
from tests.helpers.slow_cases import slow_except
from tests.helpers.zarr_items import STORAGE_FORMS, StorageForm, write_zarr_item

META = unplaced_array(("params", "w"), (7, 10), "float32", (2, 4))
ZEROS = unplaced_array(("params", "z"), (6, 4), "int16", (2, 4))
ARRAYS = {META: random_array("float32", (7, 10)), ZEROS: np.zeros((6, 4), np.int16)}
NUMBER = unplaced_array(("step",), (), "int32", ())


def all_bytes(meta: Array, array: np.ndarray) -> bytes:
    return b"".join(
        chunk_bytes(array, meta.chunk_shape, unravel_chunk_index(meta.grid.chunk_counts, n))
        for n in range(math.prod(meta.grid.chunk_counts))
    )


def inside_mask(meta: Array) -> np.ndarray:
    """Return a mask of the chunks' bytes within the array. Bytes beyond its edge are undefined."""
    ones = np.ones(meta.shape, np.uint8)
    chunks = (
        chunk_bytes(ones, meta.chunk_shape, unravel_chunk_index(meta.grid.chunk_counts, n))
        for n in range(math.prod(meta.grid.chunk_counts))
    )
    return np.frombuffer(b"".join(chunks), np.uint8).repeat(itemsize(meta.dtype)) == 1


def open_array(folder: Path, name: str, memory: int = 1 << 20) -> tuple[DerivedReader, Array]:
    item = read_item(folder)
    number = next(n for n, meta in enumerate(item.arrays) if meta.name == name)
    return decoded_array(item, number).open(BlockCache(memory)), item.arrays[number]


def read_bytes(reader: DerivedReader, offset: int, nbytes: int) -> bytes:
    into = np.full(nbytes, 77, np.uint8)
    reader.read_at(offset, into)
    return into.tobytes()


@pytest.mark.parametrize("form", STORAGE_FORMS, ids=str)
def test_read_is_equal_for_every_storage_form(tmp_path: Path, form: StorageForm):
    write_zarr_item(tmp_path / "item", {**ARRAYS, NUMBER: np.array(7, np.int32)}, form)
    assert set(map(metadata_of, read_item(tmp_path / "item").arrays)) == {*ARRAYS, NUMBER}
    for meta, array in ARRAYS.items():
        reader, stored_meta = open_array(tmp_path / "item", meta.name)
        data = np.frombuffer(
            read_bytes(reader, 0, math.prod(stored_meta.grid.chunk_counts) * meta.chunk_nbytes),
            np.uint8,
        )
        expected = np.frombuffer(all_bytes(meta, array), np.uint8)
        assert np.array_equal(data[inside_mask(meta)], expected[inside_mask(meta)])
    reader, _ = open_array(tmp_path / "item", "step")
    assert read_bytes(reader, 0, 4) == b"\7\0\0\0"


@pytest.mark.parametrize("dtype", sorted(ZARR_TYPESTRS))
@pytest.mark.parametrize("zarr3", [False, True])
def test_read_decodes_every_dtype(tmp_path: Path, dtype: str, zarr3: bool):
    meta = unplaced_array(("w",), (5, 3), dtype, (5, 3))
    array = random_array(dtype, (5, 3))
    write_zarr_item(
        tmp_path / "item", {meta: array}, StorageForm(zarr3=zarr3, codec_names=("zstd",))
    )
    reader, stored_meta = open_array(tmp_path / "item", "w")
    assert metadata_of(stored_meta) == meta
    assert read_bytes(reader, 0, array.nbytes) == array.tobytes()


@given(
    data=st.data(),
    form=st.sampled_from(STORAGE_FORMS),
    memory=st.sampled_from([1 << 19, 600_000, 1 << 21]),
)
def test_read_decodes_any_ranges_in_any_order(
    tmp_path_factory, data: st.DataObject, form: StorageForm, memory: int
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            decoded_module,
            "READ_BLOCK_NBYTES",
            data.draw(st.sampled_from([3, 8, 1000]), label="piece"),
        )
        patch.setattr(
            decoded_module,
            "WHOLE_CHUNK_DIVISOR",
            data.draw(st.sampled_from([1, 1 << 30]), label="small"),
        )
        folder = tmp_path_factory.mktemp("any") / "item"
        write_zarr_item(folder, ARRAYS, form)
        reader, _ = open_array(folder, META.name, max(memory, (1 << 19) + 32))
        expected, defined = all_bytes(META, ARRAYS[META]), inside_mask(META)
        for _ in range(data.draw(st.integers(1, 8))):
            start = data.draw(st.integers(0, len(expected)), label="start")
            nbytes = data.draw(st.integers(0, len(expected) - start), label="bytes")
            data_read = np.frombuffer(read_bytes(reader, start, nbytes), np.uint8)
            mask = defined[start : start + nbytes]
            assert np.array_equal(
                data_read[mask], np.frombuffer(expected, np.uint8)[start : start + nbytes][mask]
            )
        reader.close()


def write_one_chunk(folder: Path, array: np.ndarray, frame: bytes) -> Path:
    """Write an item of one array in one chunk, stored as `frame`."""
    meta = unplaced_array(("w",), array.shape, array.dtype.name, array.shape)
    write_zarr_item(folder, {meta: array}, StorageForm(codec_names=("zstd",)))
    (folder / "frame").write_bytes(frame)
    entries = {
        **dict(read_ocdbt_index(folder)),
        b"w/" + b".".join([b"0"] * array.ndim): ValueLocation("frame", 0, len(frame)),
    }
    write_ocdbt_index(folder, sorted(entries.items()), NOW_NS)
    return folder


def read_error(folder: Path, nbytes: int, memory: int = 1 << 22, offset: int = 0) -> PrepError:
    reader, _ = open_array(folder, "w", memory)
    with pytest.raises(PrepError) as caught:
        read_bytes(reader, offset, nbytes)
    return caught.value


LARGE = np.random.default_rng(0).integers(0, 9, 3_000_000, np.uint8)  # of several blocks


def test_large_chunk_is_decoded_within_little_memory(tmp_path: Path):
    frame = zstandard.ZstdCompressor(level=1).compress(LARGE.tobytes())
    folder = write_one_chunk(tmp_path / "item", LARGE, frame)
    reader, _ = open_array(folder, "w", 2 << 20)
    assert read_bytes(reader, 1_000_000, 1_500_000) == LARGE[1_000_000:2_500_000].tobytes()
    assert read_bytes(reader, 10, 100) == LARGE[10:110].tobytes()  # decodes the chunk again
    assert read_bytes(reader, LARGE.size - 7, 7) == LARGE[-7:].tobytes()


def test_chunk_is_kept_whole_after_a_second_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    frame = zstandard.ZstdCompressor(level=1).compress(LARGE.tobytes())
    folder = write_one_chunk(tmp_path / "item", LARGE, frame)
    decoders = []
    open_decoder = decoded_module.open_decoder
    monkeypatch.setattr(
        decoded_module, "open_decoder", lambda *a: (decoders.append(1), open_decoder(*a))[1]
    )
    reader, _ = open_array(folder, "w", 8 << 20)
    for offset in (2_000_000, 1_000_000, 0, 2_500_000, 5):
        assert read_bytes(reader, offset, 300_000) == LARGE[offset : offset + 300_000].tobytes()
    assert len(decoders) == 2


def test_cache_evicts_chunks_to_stay_within_memory(tmp_path: Path):
    meta = unplaced_array(("w",), (64, 50_000), "uint8", (1, 50_000))
    array = random_array("uint8", (64, 50_000))
    write_zarr_item(
        tmp_path / "item", {meta: array}, StorageForm(codec_names=("zstd",), ocdbt=False)
    )
    cache = BlockCache(2 << 20)
    reader = decoded_array(read_item(tmp_path / "item"), 0).open(cache)
    for row in (*range(64), 3, 60):
        assert read_bytes(reader, row * 50_000 + 10, 20_000) == array[row, 10:20_010].tobytes()
        assert sum(chunk.nbytes for chunk in cache._held.values()) <= 2 << 20


def test_frame_with_a_too_large_size_is_rejected(tmp_path: Path):
    frame = zstandard.ZstdCompressor(level=1).compress(bytes(50 << 20))
    error = read_error(write_one_chunk(tmp_path / "item", np.zeros(4096, np.uint8), frame), 10)
    assert error.what == f"chunk 0 of `w` of {tmp_path / 'item'} cannot be decoded"
    assert error.why == "frame: its frame has a content size of 52,428,800 bytes, not 4,096"


def test_frame_without_size_cannot_exceed_the_chunk(tmp_path: Path):
    stream = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    frame = b"".join(stream.compress(bytes(1 << 20)) for _ in range(200)) + stream.flush()
    error = read_error(write_one_chunk(tmp_path / "item", np.zeros(4096, np.uint8), frame), 4096)
    assert error.why == "frame: it holds more than 4,096 bytes"


def test_zstd_window_beyond_the_memory_is_rejected(tmp_path: Path):
    parameters = zstandard.ZstdCompressionParameters.from_level(19, window_log=26)
    data = np.zeros(80 << 20, np.uint8)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compress(data.tobytes())
    error = read_error(
        write_one_chunk(tmp_path / "item", np.zeros(data.size, np.uint8), frame), 10, 16 << 20
    )
    assert error.why == "frame: decoding it takes 64.5 MiB, the memory limit leaves 16.0 MiB for it"


@pytest.mark.parametrize("length", [0, 3, 10, -20])
def test_truncated_frame_is_rejected(tmp_path: Path, length: int):
    frame = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(LARGE.tobytes())
    assert (
        "frame: "
        in read_error(write_one_chunk(tmp_path / "item", LARGE, frame[:length]), LARGE.size).why
    )


def test_frame_checksum_detects_a_flipped_bit(tmp_path: Path):
    frame = bytearray(
        zstandard.ZstdCompressor(level=1, write_checksum=True).compress(LARGE.tobytes())
    )
    frame[len(frame) // 2] ^= 1
    assert read_error(write_one_chunk(tmp_path / "item", LARGE, bytes(frame)), LARGE.size)


def test_missing_file_is_named_in_the_error(tmp_path: Path):
    write_zarr_item(tmp_path / "item", ARRAYS, StorageForm(ocdbt=False, codec_names=("zstd",)))
    reader, _ = open_array(tmp_path / "item", META.name)
    (tmp_path / "item/params.w/0.0").unlink()
    with pytest.raises(PrepError, match=r"cannot read .*params\.w/0\.0"):
        read_bytes(reader, 0, 4)


@pytest.mark.parametrize("count", slow_except((60, 1600), (60,)))
def test_fuzzed_chunks_raise_prep_error_or_read(tmp_path_factory, count: int):
    """Damaged stored chunks may only raise a PrepError, and never return too many bytes."""

    @settings(max_examples=count)
    @given(data=st.data(), form=st.sampled_from([f for f in STORAGE_FORMS if f.codec_names]))
    def check(data: st.DataObject, form: StorageForm):
        folder = tmp_path_factory.getbasetemp() / "changed" / str(STORAGE_FORMS.index(form))
        if not folder.exists():
            write_zarr_item(folder, ARRAYS, form)
        files = sorted(
            path
            for path in folder.rglob("*")
            if path.is_file() and path.name not in ("_METADATA", "zarr.json")
        )
        file = data.draw(st.sampled_from(files), label="file")
        old = file.read_bytes()
        start = data.draw(st.integers(0, len(old)), label="start")
        end = data.draw(st.sampled_from([start, start + 1, start + 5, len(old)]), label="end")
        file.write_bytes(old[:start] + data.draw(st.binary(max_size=6), label="new") + old[end:])
        try:
            with contextlib.suppress(PrepError):
                reader, meta = open_array(folder, META.name)
                read_bytes(reader, 0, math.prod(meta.grid.chunk_counts) * META.chunk_nbytes)
        finally:
            file.write_bytes(old)

    check()


@given(data=st.data())
def test_joined_chunks_are_read_in_c_order(tmp_path_factory, data: st.DataObject):
    extents = st.lists(st.integers(1, 5), max_size=4).map(tuple)
    shape = data.draw(extents, label="shape")
    chunk_shape = tuple(data.draw(st.integers(1, extent), label="chunk") for extent in shape)
    values = random_array("float32", shape)
    meta = unplaced_array(("w",), shape, "float32", chunk_shape)
    path = tmp_path_factory.mktemp("joined") / "chunks"
    path.write_bytes(all_bytes(meta, values))
    grid = ChunkGrid(shape, chunk_shape)
    steps = strides(grid.chunk_counts, math.prod(chunk_shape) * 4)
    chunks = StridedChunks(0, 0, (0,) * len(shape), steps)
    tensor = stored_tensor(Array("w", "float32", shape, chunk_shape, chunks))
    other = stored_tensor(whole_array("o", "uint8", (4,), (0, 0)))
    content = path.read_bytes()[:4] + values.tobytes()
    with pytest.MonkeyPatch.context() as patch:
        rows_nbytes = data.draw(st.sampled_from([1, 24, 1 << 20]), label="block")
        patch.setattr(decoded_module, "JOIN_BLOCK_NBYTES", rows_nbytes)
        blob = DerivedArrays("w", (JoinChunks(other), JoinChunks(tensor)), (path,))
        with contextlib.closing(blob.open()) as reader:
            for _ in range(4):
                start = data.draw(st.integers(0, len(content)), label="start")
                nbytes = data.draw(st.integers(0, len(content) - start), label="bytes")
                assert read_bytes(reader, start, nbytes) == content[start : start + nbytes]


def test_scale_of_decoded_chunks_is_undone_in_any_range(tmp_path: Path):
    write_zarr_item(tmp_path / "item", ARRAYS, StorageForm(codec_names=("zstd",)))
    item = read_item(tmp_path / "item")
    number = next(n for n, meta in enumerate(item.arrays) if meta.name == META.name)
    with contextlib.closing(decoded_array(item, number).open()) as plain:
        stored = read_bytes(plain, 0, math.prod(META.grid.chunk_counts) * META.chunk_nbytes)
    scale = LayoutScale(16)
    with np.errstate(all="ignore"):
        expected = Scale(scale).undo(np.frombuffer(stored, np.float32)).tobytes()
    blob = unscaled_array(item, number, scale)
    assert blob.offsets[-1] == len(expected)
    with contextlib.closing(blob.open()) as reader:
        for start, stop in ((0, len(expected)), (3, 9), (101, 102), (7, len(expected) - 1)):
            assert read_bytes(reader, start, stop - start) == expected[start:stop]
