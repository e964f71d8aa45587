"""Malformed Parquet and Arrow files are errors with the file and the row, in bounded memory, and never a signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from prepcli.core.errors import PrepError
from tests.helpers.hostile_tables import (
    INVALID_TABLES,
    file_bytes,
    parquet_bytes,
    stream_bytes,
    text_batch,
)
from trainer.data.files import hash_file
from trainer.data.readers import READERS
from trainer.data.readers.reader import ReadOptions, Record
from trainer.tables import process

FORMATS: dict[str, Callable[[pa.RecordBatch], bytes]] = {"stream": stream_bytes, "file": file_bytes}


def read_table(path: Path, data: bytes, options: ReadOptions | None = None) -> list[dict[str, Any]]:
    """Return the rows of a file with these bytes."""
    path.write_bytes(data)
    reader = READERS["parquet" if path.suffix == ".parquet" else "arrow"]
    pieces = reader.read(hash_file(path), options or ReadOptions())
    return [dict(piece.values) for piece in pieces if isinstance(piece, Record)]


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("name", INVALID_TABLES)
def test_error_names_the_row_of_an_offset_outside_its_buffer(
    tmp_path: Path, name: str, file_format: str
):
    path = tmp_path / "a.arrow"
    data = INVALID_TABLES[name].corrupt(FORMATS[file_format])
    with pytest.raises(PrepError, match=r"a\.arrow, row 2: invalid"):
        read_table(path, data)
    errors: list[PrepError] = []
    assert read_table(path, data, ReadOptions(errors.append))
    assert [error.what for error in errors] == [f"{path}, row 2: invalid"]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_error_names_the_row_of_text_that_is_not_utf8(tmp_path: Path, suffix: str):
    batch = text_batch([0, 3, 4, 7], b"cat\xffsat")
    path = tmp_path / f"a.{suffix}"
    data = parquet_bytes(batch) if suffix == "parquet" else stream_bytes(batch)
    with pytest.raises(PrepError, match=rf"a\.{suffix}, row 2: invalid - .*UTF"):
        read_table(path, data)
    assert [row["text"] for row in read_table(path, data, ReadOptions(lambda error: None))] == [
        "cat",
        "sat",
    ]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_an_error(tmp_path: Path, suffix: str):
    batch = pa.RecordBatch.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    data = parquet_bytes(batch) if suffix == "parquet" else stream_bytes(batch)
    with pytest.raises(PrepError, match="two columns are named `text`"):
        read_table(tmp_path / f"a.{suffix}", data)


def test_file_without_columns_is_refused(tmp_path: Path):
    table = pa.table({"a": [1, 2]}).select([])
    data = parquet_bytes(pa.RecordBatch.from_arrays([], schema=table.schema))
    with pytest.raises(PrepError, match="it has no columns"):
        read_table(tmp_path / "a.parquet", data)


def test_deeply_nested_type_is_refused(tmp_path: Path):
    kind = pa.int8()
    for _ in range(40):
        kind = pa.list_(kind)
    batch = pa.RecordBatch.from_arrays([pa.nulls(1, kind)], names=["text"])
    with pytest.raises(PrepError, match="nested more than 32 levels deep"):
        read_table(tmp_path / "a.arrow", stream_bytes(batch))


def test_value_that_python_cannot_represent_is_an_error(tmp_path: Path):
    dates = pa.array([2**31 - 1], pa.int32()).view(pa.date32())
    with pytest.raises(PrepError, match=r"row 1: column `text` has no value in Python"):
        read_table(
            tmp_path / "a.arrow", stream_bytes(pa.RecordBatch.from_arrays([dates], names=["text"]))
        )


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_row_over_the_limit_is_an_error_or_is_skipped(tmp_path: Path, suffix: str):
    batch = pa.RecordBatch.from_arrays([pa.array(["cat", "a" * 2000, "sat"])], names=["text"])
    path = tmp_path / f"a.{suffix}"
    data = parquet_bytes(batch) if suffix == "parquet" else stream_bytes(batch)
    with pytest.raises(PrepError, match=r"row 2: too large - it has 2,008 bytes") as caught:
        read_table(path, data, ReadOptions(max_document_nbytes=1000))
    assert caught.value.why.endswith("`data.max_document_bytes` is 1,000")
    options = ReadOptions(lambda error: None, max_document_nbytes=1000)
    assert [row["text"] for row in read_table(path, data, options)] == ["cat", "sat"]


def _many_nulls() -> pa.RecordBatch:
    """Return a batch with a list of 2^31 - 1 nulls in a few bytes."""
    array = pa.Array.from_buffers(
        pa.list_(pa.null()),
        1,
        [None, pa.py_buffer(b"\0\0\0\0\xff\xff\xff\x7f")],
        children=[pa.nulls(2**31 - 1)],
    )
    return pa.RecordBatch.from_arrays([array], names=["text"])


def _repeated_text() -> pa.RecordBatch:
    """Return a batch with a list of one long text, 10,000 times."""
    indices = pa.array([0] * 10_000, pa.int32())
    texts = pa.DictionaryArray.from_arrays(indices, pa.array(["a" * 1_000_000]))
    array = pa.ListArray.from_arrays(pa.array([0, 10_000], pa.int32()), texts)
    return pa.RecordBatch.from_arrays([array], names=["text"])


@pytest.mark.parametrize("make_batch", [_many_nulls, _repeated_text])
def test_compressed_row_with_a_huge_value_is_refused(
    tmp_path: Path, make_batch: Callable[[], pa.RecordBatch]
):
    with pytest.raises(PrepError, match=r"row 1: too large - it has 1\d,\d{3},\d{3},\d{3} bytes"):
        read_table(tmp_path / "a.arrow", stream_bytes(make_batch(), compression="zstd"))


def test_rows_of_one_dictionary_are_read_in_bounded_parts(tmp_path: Path):
    texts = pa.DictionaryArray.from_arrays(
        pa.array([0] * 100, pa.int32()), pa.array(["a" * 1_000_000])
    )
    batch = pa.RecordBatch.from_arrays([texts], names=["text"])
    (tmp_path / "a.arrow").write_bytes(stream_bytes(batch))
    with (tmp_path / "a.arrow").open("rb") as stream:
        parts = [
            *process.read_table(stream, "Arrow", (tmp_path / "a.arrow").stat().st_size, 64 << 20)
        ]
    assert sum(part.batch.num_rows for part in parts if isinstance(part, process.Part)) == 100
    assert max(part.batch.nbytes for part in parts if isinstance(part, process.Part)) < 5_000_000


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_page_over_the_memory_limit_is_refused(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(process, "DECODING_NBYTES", 32 << 20)
    batch = pa.RecordBatch.from_arrays([pa.array(["a" * 60_000_000])], names=["text"])
    path = tmp_path / f"a.{suffix}"
    data = (
        parquet_bytes(batch, compression="zstd")
        if suffix == "parquet"
        else stream_bytes(batch, compression="zstd")
    )
    with pytest.raises(
        PrepError, match=r"after row 0 - .* needs more than 41,554,432 bytes of memory"
    ) as caught:
        read_table(path, data, ReadOptions(max_document_nbytes=1_000_000))
    assert "data.max_document_bytes" in caught.value.hint


class KillingStream:
    """A stream that ends the worker before it answers."""

    def __init__(self, worker: process._Worker) -> None:
        self._worker = worker

    def seek(self, offset: int) -> int:
        os.kill(self._worker._process.pid, signal.SIGSEGV)
        return offset

    def read(self, nbytes: int) -> bytes:
        return b"\0" * nbytes


def test_signal_of_the_worker_is_an_error_of_the_file(monkeypatch: pytest.MonkeyPatch):
    worker = process._take_worker()
    monkeypatch.setattr(process, "_idle", [worker])
    with pytest.raises(process.TableError, match="the process that decodes it ended by SIGSEGV"):
        list(process.read_table(KillingStream(worker), "Parquet", 1000, 1000))  # type: ignore[arg-type]


def test_worker_reads_the_next_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "_idle", [])
    data = stream_bytes(text_batch([0, 3, 7], b"cat sat"))
    assert [row["text"] for row in read_table(tmp_path / "a.arrow", data)] == ["cat", " sat"]
    (worker,) = process._idle
    assert len(read_table(tmp_path / "a.arrow", data)) == 2
    assert process._idle == [worker]
    worker.stop()


def test_idle_worker_that_was_killed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The kernel may kill an idle worker to free memory, while the process trains between two reads."""
    worker = process._take_worker()
    worker._process.kill()
    worker.wait()
    monkeypatch.setattr(process, "_idle", [worker])
    data = stream_bytes(text_batch([0, 3, 7], b"cat sat"))
    assert [row["text"] for row in read_table(tmp_path / "a.arrow", data)] == ["cat", " sat"]
    assert worker not in process._idle
    process.stop_workers()
