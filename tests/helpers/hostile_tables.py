"""Parquet and Arrow files with valid headers whose content is malformed, or far larger than the file."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import ipc, parquet

GOOD_OFFSETS = (0, 113, 277)  # numbers that no other part of a small file has


def stream_bytes(batch: pa.RecordBatch, *, compression: str | None = None) -> bytes:
    """Return a batch in the stream format of Arrow."""
    buffer = io.BytesIO()
    with ipc.new_stream(
        buffer, batch.schema, options=ipc.IpcWriteOptions(compression=compression)
    ) as writer:
        writer.write_batch(batch)
    return buffer.getvalue()


def file_bytes(batch: pa.RecordBatch, *, compression: str | None = None) -> bytes:
    """Return a batch in the file format of Arrow."""
    buffer = io.BytesIO()
    with ipc.new_file(
        buffer, batch.schema, options=ipc.IpcWriteOptions(compression=compression)
    ) as writer:
        writer.write_batch(batch)
    return buffer.getvalue()


def parquet_bytes(batch: pa.RecordBatch, **options: Any) -> bytes:
    """Return a batch as Parquet."""
    buffer = io.BytesIO()
    parquet.write_table(pa.Table.from_batches([batch]), buffer, **options)
    return buffer.getvalue()


def text_batch(
    offsets: Sequence[int] = GOOD_OFFSETS, text: bytes = b"x" * GOOD_OFFSETS[-1]
) -> pa.RecordBatch:
    """Return texts of these offsets; whether they are UTF-8 is not checked."""
    array = pa.StringArray.from_buffers(
        len(offsets) - 1, pa.py_buffer(_numbers(offsets)), pa.py_buffer(text)
    )
    return pa.RecordBatch.from_arrays([array], names=["text"])


def _numbers(values: Sequence[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def _list_batch() -> pa.RecordBatch:
    """Return a valid batch with lists."""
    array = pa.ListArray.from_arrays(
        pa.array(GOOD_OFFSETS, pa.int32()), pa.array([0] * GOOD_OFFSETS[-1], pa.int8())
    )
    return pa.RecordBatch.from_arrays([array], names=["text"])


def _dictionary_batch() -> pa.RecordBatch:
    """Return a valid batch with dictionary-encoded texts."""
    texts = pa.array([f"text {number}" for number in range(GOOD_OFFSETS[-1] + 1)])
    array = pa.DictionaryArray.from_arrays(pa.array(GOOD_OFFSETS, pa.int32()), texts)
    return pa.RecordBatch.from_arrays([array], names=["text"])


@dataclass(frozen=True, slots=True)
class InvalidTable:
    """A table whose second row refers to memory outside of its buffers.

    Attributes:
        make_batch: Returns a valid batch that has GOOD_OFFSETS.
        offsets: Numbers that replace them.
    """

    make_batch: Callable[[], pa.RecordBatch]
    offsets: Sequence[int]

    def corrupt(self, write: Callable[[pa.RecordBatch], bytes]) -> bytes:
        """Return the table as a file, uncompressed, with the wrong offsets."""
        data = write(self.make_batch())
        good = _numbers(GOOD_OFFSETS)
        assert data.count(good) == 1
        return data.replace(good, _numbers(self.offsets))


INVALID_TABLES: Mapping[str, InvalidTable] = {
    "text outside of the buffer": InvalidTable(text_batch, [0, 113, 1 << 30]),
    "negative offset": InvalidTable(text_batch, [0, 113, -(1 << 30)]),
    "list outside of its elements": InvalidTable(_list_batch, [0, 113, 1 << 30]),
    "index outside of the dictionary": InvalidTable(_dictionary_batch, [0, 1 << 30, 7]),
}
