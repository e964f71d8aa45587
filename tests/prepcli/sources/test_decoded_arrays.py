"""Arrays in every form of storage read as the bytes of their chunks, in any order and within any memory."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.engine.chunk_cache import ChunkCache
from prepcli.errors import PrepError
from prepcli.formats.codecs import READ_BLOCK_NBYTES
from prepcli.formats.ocdbt import FileRange, write_ocdbt_index
from prepcli.formats.ocdbt_read import read_ocdbt_index
from prepcli.formats.orbax import ZARR_TYPESTRS, ArrayMeta, unravel_chunk_index
from prepcli.formats.orbax_read import read_item
from prepcli.planning.tensors import itemsize
from prepcli.sources import decoded_arrays as decoded_module
from prepcli.sources.decoded_arrays import DecodedArray, DecodedArrayReader
from tests.helpers.orbax_items import NOW_NS, chunk_bytes, random_array
from tests.helpers.zarr_items import STORAGE_FORMS, StorageForm, write_zarr_item

META = ArrayMeta(("params", "w"), (7, 10), "float32", (2, 4))
ZEROS = ArrayMeta(("params", "z"), (6, 4), "int16", (2, 4))
ARRAYS = {META: random_array("float32", (7, 10)), ZEROS: np.zeros((6, 4), np.int16)}
NUMBER = ArrayMeta(("step",), (), "int32", ())


def all_bytes(meta: ArrayMeta, array: np.ndarray) -> bytes:
    return b"".join(
        chunk_bytes(array, meta.chunk_shape, unravel_chunk_index(meta.grid, n)) for n in range(math.prod(meta.grid))
    )


def inside(meta: ArrayMeta) -> np.ndarray:
    """Which bytes of all chunks are within the array: what is beyond its edge is anybody's guess."""
    ones = np.ones(meta.shape, np.uint8)
    cells = (
        chunk_bytes(ones, meta.chunk_shape, unravel_chunk_index(meta.grid, n)) for n in range(math.prod(meta.grid))
    )
    return np.frombuffer(b"".join(cells), np.uint8).repeat(itemsize(meta.dtype)) == 1


def opened(folder: Path, name: str, memory: int = 1 << 20) -> tuple[DecodedArrayReader, ArrayMeta]:
    item = read_item(folder)
    number = next(n for n, meta in enumerate(item.arrays) if meta.name == name)
    return DecodedArray(item, number).open_with_cache(ChunkCache(memory)), item.arrays[number]


def read(reader: DecodedArrayReader, offset: int, nbytes: int) -> bytes:
    into = np.full(nbytes, 77, np.uint8)
    reader.read_at(offset, into)
    return into.tobytes()


@pytest.mark.parametrize("form", STORAGE_FORMS, ids=str)
def test_every_form_holds_the_same_bytes(tmp_path: Path, form: StorageForm):
    write_zarr_item(tmp_path / "item", {**ARRAYS, NUMBER: np.array(7, np.int32)}, form)
    assert set(read_item(tmp_path / "item").arrays) == {*ARRAYS, NUMBER}
    for meta, array in ARRAYS.items():
        reader, found = opened(tmp_path / "item", meta.name)
        data = np.frombuffer(read(reader, 0, math.prod(found.grid) * meta.chunk_nbytes), np.uint8)
        wanted = np.frombuffer(all_bytes(meta, array), np.uint8)
        assert np.array_equal(data[inside(meta)], wanted[inside(meta)])
    reader, _ = opened(tmp_path / "item", "step")
    assert read(reader, 0, 4) == b"\7\0\0\0"


@pytest.mark.parametrize("dtype", sorted(ZARR_TYPESTRS))
@pytest.mark.parametrize("zarr3", [False, True])
def test_every_dtype(tmp_path: Path, dtype: str, zarr3: bool):
    meta = ArrayMeta(("w",), (5, 3), dtype, (5, 3))
    array = random_array(dtype, (5, 3))
    write_zarr_item(tmp_path / "item", {meta: array}, StorageForm(zarr3=zarr3, codec_names=("zstd",)))
    reader, found = opened(tmp_path / "item", "w")
    assert (found, read(reader, 0, array.nbytes)) == (meta, array.tobytes())


@settings(max_examples=120, deadline=None)
@given(data=st.data(), form=st.sampled_from(STORAGE_FORMS), memory=st.sampled_from([1 << 19, 600_000, 1 << 21]))
def test_any_pieces_in_any_order(tmp_path_factory, data: st.DataObject, form: StorageForm, memory: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoded_module, "READ_BLOCK_NBYTES", data.draw(st.sampled_from([3, 8, 1000]), label="piece"))
        patch.setattr(decoded_module, "WHOLE_CHUNK_DIVISOR", data.draw(st.sampled_from([1, 1 << 30]), label="small"))
        folder = tmp_path_factory.mktemp("any") / "item"
        write_zarr_item(folder, ARRAYS, form)
        reader, _ = opened(folder, META.name, max(memory, (1 << 19) + 32))
        wanted, kept = all_bytes(META, ARRAYS[META]), inside(META)
        for _ in range(data.draw(st.integers(1, 8))):
            start = data.draw(st.integers(0, len(wanted)), label="start")
            nbytes = data.draw(st.integers(0, len(wanted) - start), label="bytes")
            found = np.frombuffer(read(reader, start, nbytes), np.uint8)
            mask = kept[start : start + nbytes]
            assert np.array_equal(found[mask], np.frombuffer(wanted, np.uint8)[start : start + nbytes][mask])
        reader.close()


def one_chunk(folder: Path, array: np.ndarray, frame: bytes) -> Path:
    """An item of one array in one chunk, which is stored as `frame`."""
    meta = ArrayMeta(("w",), array.shape, array.dtype.name, array.shape)
    write_zarr_item(folder, {meta: array}, StorageForm(codec_names=("zstd",)))
    (folder / "frame").write_bytes(frame)
    entries = {
        **dict(read_ocdbt_index(folder)),
        b"w/" + b".".join([b"0"] * array.ndim): FileRange("frame", 0, len(frame)),
    }
    write_ocdbt_index(folder, sorted(entries.items()), NOW_NS)
    return folder


def refused(folder: Path, nbytes: int, memory: int = 1 << 22, offset: int = 0) -> PrepError:
    reader, _ = opened(folder, "w", memory)
    with pytest.raises(PrepError) as caught:
        read(reader, offset, nbytes)
    return caught.value


LARGE = np.random.default_rng(0).integers(0, 9, 3_000_000, np.uint8)  # of several pieces


def test_a_large_chunk_is_decoded_within_little_memory(tmp_path: Path):
    frame = zstandard.ZstdCompressor(level=1).compress(LARGE.tobytes())
    folder = one_chunk(tmp_path / "item", LARGE, frame)
    reader, _ = opened(folder, "w", 2 << 20)
    assert read(reader, 1_000_000, 1_500_000) == LARGE[1_000_000:2_500_000].tobytes()
    assert read(reader, 10, 100) == LARGE[10:110].tobytes()  # from the start again
    assert read(reader, LARGE.size - 7, 7) == LARGE[-7:].tobytes()


def test_a_chunk_that_is_read_again_is_kept_whole_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    frame = zstandard.ZstdCompressor(level=1).compress(LARGE.tobytes())
    folder = one_chunk(tmp_path / "item", LARGE, frame)
    begun = []
    honest = decoded_module.open_decoder
    monkeypatch.setattr(decoded_module, "open_decoder", lambda *a: (begun.append(1), honest(*a))[1])
    reader, _ = opened(folder, "w", 8 << 20)
    for offset in (2_000_000, 1_000_000, 0, 2_500_000, 5):
        assert read(reader, offset, 300_000) == LARGE[offset : offset + 300_000].tobytes()
    assert len(begun) == 2


def test_chunks_are_let_go_of_when_memory_is_short(tmp_path: Path):
    meta = ArrayMeta(("w",), (64, 50_000), "uint8", (1, 50_000))
    array = random_array("uint8", (64, 50_000))
    write_zarr_item(tmp_path / "item", {meta: array}, StorageForm(codec_names=("zstd",), ocdbt=False))
    cache = ChunkCache(2 << 20)
    reader = DecodedArray(read_item(tmp_path / "item"), 0).open_with_cache(cache)
    for row in (*range(64), 3, 60):
        assert read(reader, row * 50_000 + 10, 20_000) == array[row, 10:20_010].tobytes()
        assert sum(held.nbytes for held in cache._held.values()) <= 2 << 20


def test_a_frame_that_says_that_it_holds_more_is_refused_unread(tmp_path: Path):
    frame = zstandard.ZstdCompressor(level=19).compress(bytes(500 << 20))
    error = refused(one_chunk(tmp_path / "item", np.zeros(4096, np.uint8), frame), 10)
    assert error.what == f"chunk 0 of `w` of {tmp_path / 'item'} cannot be decoded"
    assert error.why == "frame: its frame says that it holds 524,288,000 bytes, not 4,096"


def test_a_frame_that_hides_what_it_holds_gives_no_more_than_it_should(tmp_path: Path):
    stream = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    frame = b"".join(stream.compress(bytes(1 << 20)) for _ in range(200)) + stream.flush()
    error = refused(one_chunk(tmp_path / "item", np.zeros(4096, np.uint8), frame), 4096)
    assert error.why == "frame: it holds more than 4,096 bytes"


def test_a_window_beyond_memory_is_refused_with_both_numbers(tmp_path: Path):
    parameters = zstandard.ZstdCompressionParameters.from_level(19, window_log=26)
    data = np.zeros(80 << 20, np.uint8)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compress(data.tobytes())
    error = refused(one_chunk(tmp_path / "item", np.zeros(data.size, np.uint8), frame), 10, 16 << 20)
    assert error.why == "frame: decoding it takes 64.5 MiB, `--memory` leaves 16.0 MiB for it"


@pytest.mark.parametrize("kept", [0, 3, 10, -20])
def test_a_frame_that_is_cut_short_is_refused(tmp_path: Path, kept: int):
    frame = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(LARGE.tobytes())
    assert "frame: " in refused(one_chunk(tmp_path / "item", LARGE, frame[:kept]), LARGE.size).why


def test_a_flipped_bit_is_refused_where_there_is_a_checksum(tmp_path: Path):
    frame = bytearray(zstandard.ZstdCompressor(level=1, write_checksum=True).compress(LARGE.tobytes()))
    frame[len(frame) // 2] ^= 1
    assert refused(one_chunk(tmp_path / "item", LARGE, bytes(frame)), LARGE.size)


def test_a_file_that_is_gone_is_named(tmp_path: Path):
    write_zarr_item(tmp_path / "item", ARRAYS, StorageForm(ocdbt=False, codec_names=("zstd",)))
    reader, _ = opened(tmp_path / "item", META.name)
    (tmp_path / "item/params.w/0.0").unlink()
    with pytest.raises(PrepError, match=r"cannot read .*params\.w/0\.0"):
        read(reader, 0, 4)


@settings(max_examples=1600, deadline=None)
@given(data=st.data(), form=st.sampled_from([f for f in STORAGE_FORMS if f.codec_names]))
def test_changed_bytes_are_refused_or_harmless(tmp_path_factory, data: st.DataObject, form: StorageForm):
    """Of what is stored of chunks; nothing but a PrepError, and no more bytes than were asked for."""
    folder = tmp_path_factory.getbasetemp() / "changed" / str(STORAGE_FORMS.index(form))
    if not folder.exists():
        write_zarr_item(folder, ARRAYS, form)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in ("_METADATA", "zarr.json"))
    file = data.draw(st.sampled_from(files), label="file")
    old = file.read_bytes()
    start = data.draw(st.integers(0, len(old)), label="start")
    end = data.draw(st.sampled_from([start, start + 1, start + 5, len(old)]), label="end")
    file.write_bytes(old[:start] + data.draw(st.binary(max_size=6), label="new") + old[end:])
    try:
        with contextlib.suppress(PrepError):
            reader, meta = opened(folder, META.name)
            read(reader, 0, math.prod(meta.grid) * META.chunk_nbytes)
    finally:
        file.write_bytes(old)


def test_pieces_are_small():
    assert READ_BLOCK_NBYTES <= 1 << 20
