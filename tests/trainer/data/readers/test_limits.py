"""Lines and rows over the limit are errors with file and line, and are not held in memory."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from prepcli.core.errors import PrepError
from trainer.data.files import hash_file
from trainer.data.readers import READERS
from trainer.data.readers.reader import ReadOptions, Record, open_decompressed, read_lines

LIMIT = 100
LONG = b"a" * 5000


def read_records(path: Path, data: bytes, options: ReadOptions) -> list[Record]:
    """Return the records of a file with these bytes."""
    path.write_bytes(data)
    reader = READERS["csv" if path.suffix in (".csv", ".tsv") else "json"]
    return [piece for piece in reader.read(hash_file(path), options) if isinstance(piece, Record)]


@pytest.mark.parametrize(
    "text",
    [b"", b"\n", b"abc", b"abc\n\nabcd\n", b"abcde\nab", b"abcde", b"abcd\n", b"ab\n" + LONG],
)
def test_read_lines_cuts_long_lines(text: bytes):
    lines = list(read_lines(io.BytesIO(text), 4))
    assert [line.nbytes for line in lines] == [len(line) for line in text.splitlines(keepends=True)]
    for line, whole in zip(lines, text.splitlines(keepends=True), strict=True):
        assert line.is_too_long == (len(whole.rstrip(b"\n")) > 4)
        assert line.content == (b"" if line.is_too_long else whole)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", b'{"text": "b"}\n{"text": "' + LONG + b'"}\n{"text": "c"}\n'),
        ("a.csv", b"id,text\n1,b\n2," + LONG + b"\n3,c\n"),
    ],
)
def test_long_line_is_an_error_or_is_skipped(tmp_path: Path, name: str, data: bytes):
    number = 2 if name == "a.jsonl" else 3
    with pytest.raises(PrepError) as caught:
        read_records(tmp_path / name, data, ReadOptions(max_document_nbytes=LIMIT))
    assert caught.value.what in (
        f"{tmp_path / name}:{number}: too long",
        f"{tmp_path / name}:{number}: too large",
    )
    assert "`data.max_document_bytes` is 100" in caught.value.why
    assert "data.max_document_bytes=N" in caught.value.hint
    errors: list[PrepError] = []
    options = ReadOptions(errors.append, max_document_nbytes=LIMIT)
    records = read_records(tmp_path / name, data, options)
    assert [record.values["text"] for record in records] == ["b", "c"]
    assert [record.place for record in records] == [
        f"{tmp_path / name}:{number + step}" for step in (-1, 1)
    ]
    assert len(errors) == 1
    assert sum(record.nbytes for record in records) == len(data)


def test_row_of_many_lines_is_limited(tmp_path: Path):
    data = b'id,text\n1,"' + b"line\n" * 50 + b'"\n'
    with pytest.raises(PrepError, match=r"a\.csv:2: too large - it has 10\d bytes or more"):
        read_records(tmp_path / "a.csv", data, ReadOptions(max_document_nbytes=LIMIT))


def test_default_limit_is_64_mib():
    assert ReadOptions().max_document_nbytes == 64 << 20


COMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_highly_compressed_stream_is_decompressed_in_parts(suffix: str):
    data = COMPRESS[suffix](bytes(200 << 20))
    limit = 64 << 20
    code = (
        "import io, resource, sys; from trainer.data.readers.reader import open_decompressed; "
        f"stream = open_decompressed(io.BytesIO(sys.stdin.buffer.read()), 'a', {suffix!r}); "
        "before = int(open('/proc/self/statm').read().split()[5]) * resource.getpagesize(); "
        f"resource.setrlimit(resource.RLIMIT_DATA, (before + {limit}, -1)); "
        "print(sum(len(block) for block in iter(lambda: stream.read(1 << 20), b'')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=data, capture_output=True, check=False
    )
    assert done.stdout.split() == [str(200 << 20).encode()], done.stderr[-500:]


def test_frame_with_a_large_window_is_refused():
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    stream = io.BytesIO()
    with compressor.stream_writer(stream, closefd=False) as writer:
        writer.write(bytes(1000))
    with pytest.raises(PrepError, match=r"a\.zst cannot be decompressed - .*memory"):
        open_decompressed(io.BytesIO(stream.getvalue()), "a.zst", ".zst").read()
