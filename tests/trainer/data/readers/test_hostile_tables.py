"""Malformed Parquet and Arrow files are errors with the file and the row, in bounded memory, and never a signal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from prepcli.core.errors import PrepError
from prepcli.core.sandbox import Sandbox
from tests.helpers.hostile_tables import (
    INVALID_TABLES,
    file_bytes,
    parquet_bytes,
    stream_bytes,
    text_batch,
)
from trainer.data.files import hash_file
from trainer.data.readers import READERS, table_files
from trainer.data.readers.reader import ReadOptions, Record

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


def test_rows_of_one_dictionary_are_read_in_bounded_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """100 MB of texts, decoded with 32 MiB for a part and 8 rows."""
    monkeypatch.setattr(table_files, "DECODING_NBYTES", 32 << 20)
    texts = pa.DictionaryArray.from_arrays(
        pa.array([0] * 100, pa.int32()), pa.array(["a" * 1_000_000])
    )
    batch = pa.RecordBatch.from_arrays([texts], names=["text"])
    options = ReadOptions(max_document_nbytes=2_000_000)
    rows = read_table(tmp_path / "a.arrow", stream_bytes(batch), options)
    assert [len(row["text"]) for row in rows] == [1_000_000] * 100


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_page_over_the_memory_limit_is_refused(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(table_files, "DECODING_NBYTES", 32 << 20)
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


def test_end_of_the_process_between_two_parts_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The kernel may kill the process to free memory. Another one must not read the first rows again."""
    boxes: list[Sandbox] = []

    class KeptSandbox(Sandbox):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            boxes.append(self)

    monkeypatch.setattr(table_files, "Sandbox", KeptSandbox)
    path = tmp_path / "a.arrow"
    batch = pa.RecordBatch.from_arrays([pa.array(["a" * 3_000_000] * 4)], names=["text"])
    path.write_bytes(stream_bytes(batch))
    rows = READERS["arrow"].read(hash_file(path), ReadOptions())
    next(rows)
    (box,) = boxes
    box._children[0].stop()
    with pytest.raises(PrepError, match="after row 1 - the process that decodes it was ended"):
        list(rows)
