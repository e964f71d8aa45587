"""Parquet and Arrow files, read in record batches with pyarrow.

Arrow files have the file format or the stream format of Arrow IPC; `datasets` writes the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from trainer.data.files import DataFile
from trainer.data.readers.reader import DEFAULT_OPTIONS, Reader, ReadOptions, Record, read_seekable
from trainer.models.errors import PrepError

if TYPE_CHECKING:
    from pyarrow import RecordBatch

BATCH_ROWS = 256  # of a Parquet file; long documents make a batch large
READ_BUFFER_NBYTES = 1 << 20  # per column of a Parquet file
FILE_MAGIC = b"ARROW1"

Batches = Iterator[tuple["RecordBatch", int]]  # each with its share of the file's bytes


def _read_table(
    make_batches: Callable[[BinaryIO, int], Batches],
    type_name: str,
    file: DataFile,
    options: ReadOptions = DEFAULT_OPTIONS,
    /,
) -> Iterator[Record]:
    """Yield one record per row; `pyarrow` must be installed."""
    return read_seekable(file, partial(_parse_table, file, make_batches, type_name))


def _parse_table(
    file: DataFile, make_batches: Callable[[BinaryIO, int], Batches], type_name: str, stream: BinaryIO
) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException
    except ModuleNotFoundError as error:
        hint = "`pip install 'prepcli[data]'`"
        raise PrepError(f"cannot read {file.path}", "pyarrow is not installed", hint) from error
    number = 0
    try:
        for batch, nbytes in make_batches(stream, file.nbytes):
            for index in range(batch.num_rows):
                number += 1
                yield Record(_Row(batch, index), f"{file.path}, row {number}", 0 if index else nbytes)
    except (ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        why = str(error).partition("\n")[0]
        what = f"{file.path} cannot be read as {type_name} after row {number:,}"
        raise PrepError(what, why, "get the file again, or set `data.type`") from error


class _Row(Mapping[str, Any]):
    """A row of a record batch; a value is converted to a Python object when it is used."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: RecordBatch, index: int) -> None:
        self._batch, self._index = batch, index

    def __getitem__(self, column: str) -> Any:
        position = self._batch.schema.get_field_index(column)
        if position < 0:
            raise KeyError(column)
        return self._batch.column(position)[self._index].as_py()

    def __contains__(self, column: object) -> bool:
        return column in self._batch.schema.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch.schema.names)

    def __len__(self) -> int:
        return len(self._batch.schema.names)


def _parquet_batches(stream: BinaryIO, nbytes: int) -> Batches:
    from pyarrow.parquet import ParquetFile

    parquet = ParquetFile(stream, buffer_size=READ_BUFFER_NBYTES, pre_buffer=False)
    n_rows, end = parquet.metadata.num_rows, 0
    for batch in parquet.iter_batches(BATCH_ROWS, use_threads=False):
        start, end = end, end + batch.num_rows
        yield batch, nbytes * end // n_rows - nbytes * start // n_rows


def _arrow_batches(stream: BinaryIO, nbytes: int) -> Batches:
    is_file = stream.read(len(FILE_MAGIC)) == FILE_MAGIC
    stream.seek(0)
    return _ipc_file_batches(stream, nbytes) if is_file else _ipc_stream_batches(stream)


def _ipc_file_batches(stream: BinaryIO, nbytes: int) -> Batches:
    from pyarrow import ipc

    reader = ipc.open_file(stream)
    count = reader.num_record_batches
    for index in range(count):
        yield reader.get_batch(index), nbytes * (index + 1) // count - nbytes * index // count


def _ipc_stream_batches(stream: BinaryIO) -> Batches:
    from pyarrow import ipc

    position = 0
    for batch in ipc.open_stream(stream):
        yield batch, stream.tell() - position
        position = stream.tell()


PARQUET_READER = Reader((".parquet",), partial(_read_table, _parquet_batches, "Parquet"))
ARROW_READER = Reader((".arrow",), partial(_read_table, _arrow_batches, "Arrow"), other_suffixes=(".feather",))
