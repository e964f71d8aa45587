"""Copies of a token store in the formats of other trainers: datasets of Megatron-LM, and tables of Parquet."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from prepcli.core.errors import Option, PrepError, text
from prepcli.stores.files import replacing_file
from trainer.data.fields import compile_fields
from trainer.data.files import io_error
from trainer.data.readers.ids_files import (
    DTYPE_CODES,
    INDEX_SUFFIX,
    LENGTH_DTYPE,
    OFFSET_DTYPE,
    ids_path,
)
from trainer.data.readers.ids_files import INDEX_HEADER as HEADER
from trainer.data.readers.ids_files import INDEX_MAGIC as MAGIC
from trainer.data.readers.ids_files import INDEX_VERSION as VERSION
from trainer.data.store import (
    LOSS_WEIGHTS,
    TOKENS_FILE,
    MappedTokens,
    StoreMeta,
    document_end_blocks,
    map_tokens,
)
from trainer.data.store_files import file_digest, files_digest
from trainer.data.tokenize_config import TokenizeConfig

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
# Maximum rows and tokens of a row group. A row group is in memory, and has at least one document.
ROW_GROUP_DOCUMENTS = 1 << 14
ROW_GROUP_TOKENS = 1 << 24


def check_exportable(config: TokenizeConfig, file_format: ExportFormat) -> None:
    """Raise PrepError if a format cannot store the tokens of a config. No data is read."""
    if config.examples.has_encoder:
        why = "the data has pairs of a source and a target, for a model with an encoder"
        hint = text("remove {}", Option("format"))
        raise PrepError(text("{} is not supported", Option("format", file_format)), why, hint)
    checks: dict[ExportFormat, Callable[[TokenizeConfig], object]] = {
        "megatron": _check_loss_weights,
        "parquet": lambda config: _import_parquet(),
    }
    checks[file_format](config)


def export_tokens(store: Path, meta: StoreMeta, target: Path, file_format: ExportFormat) -> Path:
    """Write the tokens of a store in another format. An output with the same tokens is kept.

    Several processes may write the same output. `target` has no suffix yet.

    Returns:
        The file to name in a recipe: `.idx` of a dataset, or `.parquet`.

    Raises:
        PrepError: The format cannot store the tokens, other tokens are there already, or a file
            cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise io_error(target.parent, error) from error
    writers: dict[ExportFormat, Callable[[Path, StoreMeta, Path], Path]] = {
        "megatron": _export_megatron,
        "parquet": _export_parquet,
    }
    return writers[file_format](store, meta, target)


def _check_loss_weights(config: TokenizeConfig) -> None:
    """Raise PrepError if the tokens of a config have loss weights."""
    if compile_fields(config.examples, vocab=config.vocab).has_weights:
        raise _loss_weights_error()


def _export_megatron(store: Path, meta: StoreMeta, target: Path) -> Path:
    """Write the two files of a dataset of Megatron-LM. The index gets its name last."""
    if meta.has_weights:
        raise _loss_weights_error()
    tokens = map_tokens(store, meta, seq_length=1)
    _check_document_lengths(tokens)
    dtype = "uint16"
    if meta.dtype == "uint32":
        # Megatron has no uint32. Ids below 2^31 have the same bytes as int32.
        dtype = "int32"
    if meta.max_id > MAX_INT32:
        raise _megatron_error(f"its ids are at most {MAX_INT32:,}, the data has {meta.max_id:,}")
    index = target.with_name(f"{target.name}{INDEX_SUFFIX}")
    # The index of equal ids may have other documents, and is small. It is always written.
    with _writing(index), replacing_file(index) as file:
        for data in _megatron_index(tokens, dtype):
            file.write(data)
        # Durable before the ids get their name: a full disk leaves both files, or none.
        file.flush()
        os.fsync(file.fileno())
        sources = [store / name / TOKENS_FILE for name in meta.shards]
        ids = ids_path(index)
        try:
            with _writing(ids), replacing_file(ids, overwrite=False) as copy:
                for source in sources:
                    with source.open("rb") as content:
                        shutil.copyfileobj(content, copy)
        except FileExistsError:
            # An earlier call or another process wrote it.
            if file_digest(ids) != files_digest(sources):
                raise _other_tokens_error(ids) from None
    return index


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


def _check_document_lengths(tokens: MappedTokens) -> None:
    """Raise PrepError if a document has more tokens than both formats can store."""
    longest = max((int(lengths.max()) for lengths in _document_lengths(tokens)), default=0)
    if longest > MAX_INT32:
        why = f"a document has {longest:,} tokens, the formats have at most {MAX_INT32:,}"
        raise PrepError("the tokens cannot be written", why, "divide the data into more documents")


def _export_parquet(store: Path, meta: StoreMeta, target: Path) -> Path:
    """Write a table with one row per document: its ids, and the loss weights if some are 0."""
    parquet = _import_parquet()
    schema = _parquet_schema(meta)
    path = target.with_name(f"{target.name}.parquet")
    tokens = map_tokens(store, meta, seq_length=1)
    _check_document_lengths(tokens)
    try:
        with (
            _writing(path),
            replacing_file(path, overwrite=False) as file,
            parquet.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            for batch in _record_batches(tokens, schema):
                writer.write_batch(batch)
    except FileExistsError:
        # An earlier call or another process wrote it.
        if _table_identity(path) != meta.identity:
            raise _other_tokens_error(path) from None
    return path


def _import_parquet() -> Any:
    """Return the module `pyarrow.parquet`. Raise PrepError if it is not installed."""
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        hint = "`pip install 'prepcli[data]'`"
        raise PrepError("cannot write Parquet", "pyarrow is not installed", hint) from error
    return parquet


def _parquet_schema(meta: StoreMeta) -> Schema:
    """Return the columns of a table."""
    import pyarrow as pa

    columns = {IDS_COLUMN: pa.list_(pa.int32())}
    if meta.max_id > MAX_INT32:
        columns[IDS_COLUMN] = pa.list_(pa.int64())
    if meta.has_weights:
        columns[WEIGHTS_COLUMN] = pa.list_(pa.uint8())
        if len(meta.loss_weights) > len(LOSS_WEIGHTS):
            columns[WEIGHTS_COLUMN] = pa.list_(pa.float32())
    return pa.schema(columns, metadata={IDENTITY_KEY: meta.identity.encode()})


def _table_identity(path: Path) -> str | None:
    """Return the identity of the tokens of a table, or None if the file is no table of prep."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        metadata = parquet.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError):
        return None
    return metadata.get(IDENTITY_KEY, b"").decode()


def _record_batches(tokens: MappedTokens, schema: Schema) -> Iterator[RecordBatch]:
    """Yield the documents of a store as rows."""
    import pyarrow as pa

    # A list array has the values of all rows in one array, and the offset of each row: no row is
    # copied on its own.
    first = 0
    for ends in _row_groups(tokens):
        part = slice(first, int(ends[-1]))
        offsets = pa.array(np.concatenate([[0], ends - first]), pa.int32())
        values: dict[str, npt.NDArray[Any]] = {IDS_COLUMN: tokens.ids[part]}
        if tokens.weight_codes is not None:
            values[WEIGHTS_COLUMN] = tokens.read_weights(first, int(ends[-1]))
        columns: list[Any] = []
        for field in schema:
            array = pa.array(np.asarray(values[field.name]), type=field.type.value_type)
            columns.append(pa.ListArray.from_arrays(offsets, array, type=field.type))
        yield pa.record_batch(columns, schema=schema)
        first = int(ends[-1])


def _row_groups(tokens: MappedTokens) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the ends of the documents of each row group."""
    first = 0
    for block in document_end_blocks(tokens, ROW_GROUP_DOCUMENTS):
        ends = block
        while len(ends):
            n_documents = int(np.searchsorted(ends, first + ROW_GROUP_TOKENS, side="right"))
            n_documents = max(n_documents, 1)
            yield ends[:n_documents]
            first = int(ends[n_documents - 1])
            ends = ends[n_documents:]


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Name a file in the OSErrors of the block. A FileExistsError is left to the caller."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise io_error(path, error) from error


def _other_tokens_error(path: Path) -> PrepError:
    return PrepError(f"{path} already exists", "it has other tokens", "write to another folder")


def _megatron_error(why: str) -> PrepError:
    return PrepError("the tokens cannot be written for Megatron", why, "use the format parquet")


def _loss_weights_error() -> PrepError:
    why = "its format has no loss weights, and some tokens of the data have loss weight 0"
    return _megatron_error(why)
