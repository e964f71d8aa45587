"""Copies of a token store in the formats of other trainers: datasets of Megatron-LM, and tables of Parquet."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trainer.data.files import io_error
from trainer.data.readers.megatron_file import (
    DTYPE_CODES,
    HEADER,
    INDEX_SUFFIX,
    LENGTH_DTYPE,
    MAGIC,
    OFFSET_DTYPE,
    VERSION,
    ids_path,
)
from trainer.data.store import (
    TOKENS_FILE,
    MappedTokens,
    StoreMeta,
    document_end_blocks,
    file_digest,
    map_tokens,
)
from trainer.files.writing import replacing_file
from trainer.models.errors import PrepError

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema

ExportFormat = Literal["megatron", "parquet"]
# Documents that are read together.
BLOCK_DOCUMENTS = 1 << 16
MAX_INT32 = 2**31 - 1
# Key of the metadata of a table with the identity of its tokens.
IDENTITY_KEY = b"prep.tokens"
IDS_COLUMN = "input_ids"
WEIGHTS_COLUMN = "loss_mask"
# Rows of a table that are compressed together.
ROW_GROUP_DOCUMENTS = 1 << 14


def export_tokens(store: Path, meta: StoreMeta, target: Path, file_format: ExportFormat) -> Path:
    """Write the tokens of a store in another format. An equal output is kept.

    Args:
        store: Folder of the store.
        meta: Its metadata, with checked digests.
        target: The output without its suffix.
        file_format: Its format.

    Returns:
        The file to name in a recipe: `.idx` with the `.bin` beside it, or `.parquet`.

    Raises:
        PrepError: The format cannot store the tokens, other tokens are there already, or a file
            cannot be written.
    """
    writers: dict[ExportFormat, Callable[[Path, StoreMeta, Path], Path]] = {
        "megatron": _export_megatron,
        "parquet": _export_parquet,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    return writers[file_format](store, meta, target)


def _export_megatron(store: Path, meta: StoreMeta, target: Path) -> Path:
    """Write the two files of a dataset of Megatron-LM. The index comes last."""
    if meta.has_weights:
        why = (
            "Megatron's format has no loss weights, and some tokens of the data have loss weight 0"
        )
        raise PrepError("the tokens cannot be written for Megatron", why, "use the format parquet")
    tokens = map_tokens(store, meta, seq_length=1)
    dtype = "uint16"
    if meta.dtype == "uint32":
        # Megatron has no uint32. Ids below 2^31 have the same bytes as int32.
        dtype = "int32"
    if meta.max_id > MAX_INT32 or _longest_document(tokens) > MAX_INT32:
        why = f"ids and lengths of documents are at most {MAX_INT32:,}"
        raise PrepError("the tokens cannot be written for Megatron", why, "use the format parquet")
    index = target.with_name(f"{target.name}{INDEX_SUFFIX}")
    ids = ids_path(index)
    if ids.exists() and file_digest(ids) != meta.digests[TOKENS_FILE]:
        raise _other_tokens_error(ids)
    if not ids.exists():
        _copy_file(store / TOKENS_FILE, ids)
    # The index of equal ids may have other documents, and is small. It is always written.
    with _writing(index), replacing_file(index) as file:
        for data in _megatron_index(tokens, dtype):
            file.write(data)
    return index


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file to a new name."""
    with (
        _writing(target),
        replacing_file(target, overwrite=False) as file,
        source.open("rb") as content,
    ):
        shutil.copyfileobj(content, file)


def _megatron_index(tokens: MappedTokens, dtype: str) -> Iterator[bytes]:
    """Yield the content of an `.idx` file. Each document is one sequence."""
    n_documents = tokens.n_documents
    yield HEADER.pack(MAGIC, VERSION, DTYPE_CODES[dtype], n_documents, n_documents + 1)
    for lengths in _document_lengths(tokens):
        yield lengths.astype(LENGTH_DTYPE).tobytes()
    first = 0
    itemsize = np.dtype(dtype).itemsize
    for ends in document_end_blocks(tokens, BLOCK_DOCUMENTS):
        # A document starts where the one before it ends.
        starts = np.concatenate([[first], ends[:-1]]) * itemsize
        yield starts.astype(OFFSET_DTYPE).tobytes()
        first = int(ends[-1])
    for low in range(0, n_documents + 1, BLOCK_DOCUMENTS):
        bounds = np.arange(low, min(low + BLOCK_DOCUMENTS, n_documents + 1))
        yield bounds.astype(OFFSET_DTYPE).tobytes()


def _document_lengths(tokens: MappedTokens) -> Iterator[np.ndarray]:
    """Yield the lengths of consecutive documents."""
    first = 0
    for ends in document_end_blocks(tokens, BLOCK_DOCUMENTS):
        yield np.diff(ends, prepend=first)
        first = int(ends[-1])


def _longest_document(tokens: MappedTokens) -> int:
    return max((int(lengths.max()) for lengths in _document_lengths(tokens)), default=0)


def _export_parquet(store: Path, meta: StoreMeta, target: Path) -> Path:
    """Write a table with one row per document: its ids, and the loss weights if some are 0."""
    parquet, schema = _parquet_schema(meta)
    path = target.with_name(f"{target.name}.parquet")
    if path.exists():
        if (parquet.read_schema(path).metadata or {}).get(IDENTITY_KEY) != meta.identity.encode():
            raise _other_tokens_error(path)
        return path
    tokens = map_tokens(store, meta, seq_length=1)
    with (
        _writing(path),
        replacing_file(path, overwrite=False) as file,
        parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        for batch in _record_batches(tokens, schema):
            writer.write_batch(batch)
    return path


def _parquet_schema(meta: StoreMeta) -> tuple[Any, Schema]:
    """Return the module `pyarrow.parquet`, and the columns of a table."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        hint = "`pip install 'prepcli[data]'`"
        raise PrepError("cannot write Parquet", "pyarrow is not installed", hint) from error
    columns = {IDS_COLUMN: pa.list_(pa.int32())}
    if meta.max_id > MAX_INT32:
        columns[IDS_COLUMN] = pa.list_(pa.int64())
    if meta.has_weights:
        columns[WEIGHTS_COLUMN] = pa.list_(pa.uint8())
    return parquet, pa.schema(columns, metadata={IDENTITY_KEY: meta.identity.encode()})


def _record_batches(tokens: MappedTokens, schema: Schema) -> Iterator[RecordBatch]:
    """Yield the documents of a store as rows."""
    import pyarrow as pa

    first = 0
    for ends in document_end_blocks(tokens, ROW_GROUP_DOCUMENTS):
        part = slice(first, int(ends[-1]))
        offsets = pa.array(np.concatenate([[0], ends - first]), pa.int32())
        values = {IDS_COLUMN: tokens.ids[part]}
        if tokens.weights is not None:
            values[WEIGHTS_COLUMN] = tokens.weights[part]
        columns: list[Any] = []
        for field in schema:
            array = pa.array(np.asarray(values[field.name]), type=field.type.value_type)
            columns.append(pa.ListArray.from_arrays(offsets, array, type=field.type))
        yield pa.record_batch(columns, schema=schema)
        first = int(ends[-1])


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Name a file in the OSErrors of the block."""
    try:
        yield
    except OSError as error:
        raise io_error(path, error) from error


def _other_tokens_error(path: Path) -> PrepError:
    return PrepError(f"{path} already exists", "it has other tokens", "write to another folder")
