"""Compression of raw chunks: the bytes do not depend on interruptions, and each chunk is a zstd frame."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from prepcli.core.observer import NullProgress
from prepcli.execution import compress
from prepcli.execution.compress import compress_chunks
from prepcli.formats.orbax_chunks import WrittenChunk
from prepcli.planning.item_storage import Compression
from tests.helpers.slow_cases import slow_except

LENGTHS = [1, 5000, 70_000, 3, 200_000, 4096, 12, 90_000, 90_000, 17]


class StoppedError(Exception):
    """Simulated kill, without effects on closed files."""


class StopAfter(NullProgress):
    """Progress that stops the work after a number of compressed pieces."""

    def __init__(self, pieces: int) -> None:
        self.left = pieces

    def advance(self, written_bytes: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise StoppedError


def raw_chunks(folder: Path) -> tuple[list[WrittenChunk], list[Path], dict[tuple[int, ...], bytes]]:
    """Write chunks to two files with gaps between them, and return them in reverse order."""
    rng, files, chunks, chunk_bytes = np.random.default_rng(0), [bytearray(), bytearray()], [], {}
    for number, length in enumerate(LENGTHS):
        data = rng.integers(0, 5, length, np.uint8).tobytes()
        file = files[number % 2]
        file += b"gap"
        chunks.append(WrittenChunk(0, (number,), number % 2, len(file), length))
        chunk_bytes[number,] = data
        file += data
    folder.mkdir(exist_ok=True)
    paths = [folder / "raw0", folder / "raw1"]
    for path, file in zip(paths, files):
        path.write_bytes(file)
    return chunks[::-1], paths, chunk_bytes


@dataclass(frozen=True)
class CompressedFiles:
    """Compressed chunks, and names and sizes of the data files."""

    chunks: tuple[WrittenChunk, ...]
    files: tuple[str, ...]
    sizes: tuple[int, ...]


def compress_in(folder: Path, progress: NullProgress | None = None) -> CompressedFiles:
    chunks, paths, _ = raw_chunks(folder)
    packed = compress_chunks(
        iter(chunks),
        paths,
        folder=folder,
        journal=folder / "journal",
        compression=Compression("zstd", 1),
        progress=progress or NullProgress(),
    )
    return CompressedFiles(tuple(packed.relocate(iter(chunks))), packed.files, packed.sizes)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compress, "PIECE_NBYTES", 4096)
    monkeypatch.setattr(compress, "MARK_NBYTES", 50_000)
    monkeypatch.setattr(compress, "FILE_NBYTES", 60_000)


def content(folder: Path, packed: CompressedFiles) -> list[bytes]:
    return [(folder / name).read_bytes() for name in packed.files]


def test_compress_writes_one_frame_per_chunk(tmp_path: Path):
    packed = compress_in(tmp_path / "item")
    _, _, contents = raw_chunks(tmp_path / "item")
    files = content(tmp_path / "item", packed)
    assert tuple(map(len, files)) == packed.sizes
    assert len(files) > 1
    assert {chunk.index for chunk in packed.chunks} == contents.keys()
    for chunk in packed.chunks:
        frame = files[chunk.file][chunk.offset : chunk.offset + chunk.nbytes]
        assert zstandard.frame_content_size(frame) == len(contents[chunk.index])
        assert zstandard.ZstdDecompressor().decompress(frame) == contents[chunk.index]
    assert sum(chunk.nbytes for chunk in packed.chunks) == sum(packed.sizes)


@pytest.mark.parametrize("count", slow_except((12, 60), (12,)))
def test_compress_resumes_to_the_same_bytes_after_any_stop(tmp_path_factory, count: int):
    @settings(max_examples=count, deadline=None)
    @given(stops=st.lists(st.integers(0, 120), max_size=4), torn=st.integers(0, 30))
    def check(stops: list[int], torn: int):
        folder = tmp_path_factory.mktemp("stopped")
        undisturbed = compress_in(folder / "whole")
        for stop in stops:
            try:
                compress_in(folder / "item", StopAfter(stop))
            except StoppedError:
                journal = folder / "item/journal"
                if torn and journal.exists():  # a line that was not written to its end
                    with journal.open("ab") as file:
                        file.write(b"[123456789, 1, 2, 3, 4, 5, 6, 7, 8]"[:torn])
        again = compress_in(folder / "item")
        assert again == undisturbed
        assert content(folder / "item", again) == content(folder / "whole", undisturbed)

    check()


def test_compress_uses_little_memory_per_chunk(tmp_path: Path):
    count = 5000
    (tmp_path / "raw").write_bytes(bytes(count))

    def chunks() -> Iterator[WrittenChunk]:
        return (WrittenChunk(0, (index, 0, 0, 0), 0, index, 1) for index in range(count))

    def compress_into(folder: Path) -> int:
        folder.mkdir()
        packed = compress_chunks(
            chunks(),
            [tmp_path / "raw"],
            folder=folder,
            journal=folder / "journal",
            compression=Compression("zstd", 1),
            progress=NullProgress(),
        )
        return sum(chunk.nbytes for chunk in packed.relocate(chunks()))

    # The first call imports modules and fills caches, in whatever test it is.
    compress_into(tmp_path / "first")
    folder = tmp_path / "second"
    tracemalloc.start()
    try:
        nbytes = compress_into(folder)
        assert nbytes == sum(path.stat().st_size for path in (folder / "d").iterdir())
        assert tracemalloc.get_traced_memory()[1] < 200 * count
    finally:
        tracemalloc.stop()


def test_compress_skips_durable_chunks_on_resume(tmp_path: Path):
    with pytest.raises(StoppedError):
        compress_in(tmp_path / "item", StopAfter(100))
    lines = (tmp_path / "item/journal").read_text().splitlines()
    durable = sum(len(json.loads(line.partition(" ")[2])["lengths"]) for line in lines)
    assert durable >= 2
    pieces = sum(-(-length // 4096) for length in sorted(LENGTHS))
    assert compress_in(tmp_path / "item", StopAfter(pieces - 2)).sizes


def truncate_file(path: Path) -> None:
    path.write_bytes(b"")


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [truncate_file, flip_byte, Path.unlink])
def test_damaged_chunks_are_compressed_again(tmp_path: Path, spoil: Callable[[Path], object]):
    undisturbed = compress_in(tmp_path / "whole")
    with pytest.raises(StoppedError):
        compress_in(tmp_path / "item", StopAfter(100))
    for path in (tmp_path / "item/d").iterdir():
        spoil(path)
    again = compress_in(tmp_path / "item")
    assert content(tmp_path / "item", again) == content(tmp_path / "whole", undisturbed)


def compress_to_chunk_files(folder: Path, progress: NullProgress) -> dict[str, bytes]:
    """Compress each chunk to a file of its own, and return the content of the files."""
    chunks, paths, _ = raw_chunks(folder)
    packed = compress_chunks(
        iter(chunks),
        paths,
        folder=folder / "item",
        journal=folder / "journal",
        compression=Compression("zstd", 1),
        progress=progress,
        chunk_paths=[f"leaf/{chunk.index[0]}" for chunk in chunks],
    )
    return {name: (folder / "item" / name).read_bytes() for name in packed.files}


def test_files_of_single_chunks_share_a_mark_and_resume(tmp_path: Path):
    whole = compress_to_chunk_files(tmp_path / "whole", NullProgress())
    assert len(whole) == len(LENGTHS)
    assert len((tmp_path / "whole/journal").read_bytes().splitlines()) < len(LENGTHS)
    folder = tmp_path / "stopped"
    for pieces in (3, 1, 6):
        with pytest.raises(StoppedError):
            compress_to_chunk_files(folder, StopAfter(pieces))
    (folder / "item/leaf/2").write_bytes(b"left by a kill")
    assert compress_to_chunk_files(folder, NullProgress()) == whole
    (folder / "item/leaf/5").unlink()
    assert compress_to_chunk_files(folder, NullProgress()) == whole


def test_compress_ignores_a_journal_of_earlier_versions(tmp_path: Path):
    (tmp_path / "item").mkdir()
    (tmp_path / "item/journal").write_bytes(b"[10, 20, 30]\n")
    undisturbed, again = compress_in(tmp_path / "whole"), compress_in(tmp_path / "item")
    assert content(tmp_path / "item", again) == content(tmp_path / "whole", undisturbed)


def test_compress_names_a_data_file_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real_open = os.open

    def refuse(path: Path, flags: int, *mode: int) -> int:
        if path == tmp_path / "item" / compress._DataFiles(None).path(1):
            raise OSError(errno.EMFILE, "Too many open files")
        return real_open(path, flags, *mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(PrepError, match="cannot read or write"):
            compress_in(tmp_path / "item")
    assert compress_in(tmp_path / "item") == compress_in(tmp_path / "whole")


def test_compress_names_a_truncated_raw_file(tmp_path: Path):
    chunks, paths, _ = raw_chunks(tmp_path / "item")
    paths[1].write_bytes(b"short")
    with pytest.raises(PrepError, match="raw1 is cut short"):
        compress_chunks(
            chunks,
            paths,
            folder=tmp_path / "item",
            journal=tmp_path / "journal",
            compression=Compression("zstd", 1),
            progress=NullProgress(),
        )
