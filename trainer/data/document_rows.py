"""Stored rows of whole documents: computed once in bounded memory, and memory-mapped by each run.

A folder in the store, named by a digest of all inputs of the rows, has the arrays of `document_packing`:

- `windows.bin`
- `assignments.bin`
- `rows.json`: `RowsMeta`, with the XXH3-128 digests of the other files.

Earlier versions of prep ignore the folder.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from prepcli.core.errors import PrepError
from prepcli.core.formatting import count_text
from prepcli.core.json_values import load_json
from prepcli.stores.files import read_regular_file
from trainer.data.document_packing import (
    BLOCK_DOCUMENTS,
    WINDOW,
    WINDOW_DTYPE,
    DocumentRows,
    RowCounts,
    write_rows,
)
from trainer.data.files import Note
from trainer.data.store import DamagedStoreError, MappedTokens, StoreMeta, document_end_blocks
from trainer.data.store_files import HashingFile, discard_folder, file_digest, new_folder

# Part of the identity of rows. Raise it when the same documents give other rows.
ROWS_VERSION = 1
WINDOWS_FILE = "windows.bin"
ASSIGNMENTS_FILE = "assignments.bin"
META_FILE = "rows.json"
DTYPES = {WINDOWS_FILE: WINDOW_DTYPE, ASSIGNMENTS_FILE: np.dtype("u1")}
# Files of rows in the larger form of earlier versions
EARLIER_FILES = {"starts.bin", "lengths.bin", "ends.bin"}
# Fewer documents take less than a second, so no message is shown.
MIN_NOTE_DOCUMENTS = 1_000_000


@dataclass(frozen=True, slots=True)
class RowsMeta:
    """Metadata of stored rows, as written to `rows.json`."""

    identity: str  # Digest of all inputs of the rows, and the name of the folder
    packing: str  # The recipe's `data.packing`
    seq_length: int  # Length of a row in tokens
    n_pieces: int  # Number of pieces
    n_rows: int  # Number of rows
    max_length: int  # Tokens of the longest piece
    digests: Mapping[str, str]  # XXH3-128 by file name


def make_rows(tokens: MappedTokens, packing: str) -> DocumentRows:
    """Return the rows of a token store, made in memory."""
    buffers = {name: io.BytesIO() for name in DTYPES}
    _write_files(buffers, tokens, packing)
    arrays = {name: np.frombuffer(buffers[name].getvalue(), DTYPES[name]) for name in DTYPES}
    return _document_rows(arrays, tokens, packing)


def _write_files(
    files: Mapping[str, HashingFile] | Mapping[str, io.BytesIO], tokens: MappedTokens, packing: str
) -> RowCounts:
    def blocks() -> Iterator[npt.NDArray[np.int64]]:
        return document_end_blocks(tokens, BLOCK_DOCUMENTS)

    return write_rows(
        files[WINDOWS_FILE], files[ASSIGNMENTS_FILE], blocks, tokens.seq_length, packing
    )


def _document_rows(
    arrays: Mapping[str, npt.NDArray[Any]], tokens: MappedTokens, packing: str
) -> DocumentRows:
    return DocumentRows(
        arrays[WINDOWS_FILE],
        arrays[ASSIGNMENTS_FILE],
        packing,
        ends=tokens.ends,
        seq_length=tokens.seq_length,
        n_tokens=tokens.n_tokens,
    )


def stored_rows(
    store: Path, meta: StoreMeta, tokens: MappedTokens, packing: str, *, target: Path, note: Note
) -> DocumentRows:
    """Return the stored rows of a token store. Compute missing or damaged ones in the folder `target`.

    Several processes may do so at the same time. If the rows cannot be written, they are made in memory.
    """
    identity = rows_identity(meta, packing, tokens.seq_length)
    try:
        try:
            return read_rows(store / identity, tokens)
        except FileNotFoundError:
            pass
        except DamagedStoreError as error:
            if not isinstance(error, EarlierRowsError):
                note(f"{error.what} ({error.why}): they are rebuilt")
            if target == store:
                discard_folder(store / identity)
        _build_rows(target / identity, tokens, packing, note)
        return read_rows(target / identity, tokens, checks_digests=False)
    except (OSError, PrepError) as error:
        note(f"the sequences of documents are made in memory, since they cannot be stored: {error}")
        return make_rows(tokens, packing)


def open_rows(store: Path, meta: StoreMeta, tokens: MappedTokens, packing: str) -> DocumentRows:
    """Return rows stored or checked by another process. Compute missing ones in memory."""
    try:
        folder = store / rows_identity(meta, packing, tokens.seq_length)
        return read_rows(folder, tokens, checks_digests=False)
    except (OSError, DamagedStoreError):
        return make_rows(tokens, packing)


def rows_identity(meta: StoreMeta, packing: str, seq_length: int) -> str:
    """Return the name of the folder of stored rows: a digest of the token store, the packing and the length."""
    inputs = {
        "version": ROWS_VERSION,
        "tokens": meta.identity,
        "n_tokens": meta.n_tokens,
        "n_documents": meta.n_documents,
        "documents": meta.documents_digest,
        "packing": packing,
        "seq_length": seq_length,
        "window": WINDOW,
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(inputs).encode())


def read_rows(folder: Path, tokens: MappedTokens, *, checks_digests: bool = True) -> DocumentRows:
    """Map stored rows into memory. Their digests are not checked if another process has done so.

    Raises:
        FileNotFoundError: There are no rows.
        DamagedStoreError: The files differ from the metadata, or one cannot be read.
    """
    folder.stat()
    try:
        meta = _parse_meta(folder, read_regular_file(folder / META_FILE))
        arrays = _map_arrays(folder, meta, checks_digests=checks_digests)
    except DamagedStoreError:
        raise
    except (OSError, PrepError) as error:
        raise _damaged_rows_error(folder, str(error)) from error
    if meta.seq_length != tokens.seq_length:
        raise _damaged_rows_error(
            folder, f"{META_FILE} has rows of {count_text(meta.seq_length, 'token')}"
        )
    rows = _document_rows(arrays, tokens, meta.packing)
    # `rows.json` is the only file of the folder without a digest.
    if (rows.n_rows, rows.max_length) != (meta.n_rows, meta.max_length):
        raise _damaged_rows_error(folder, f"{META_FILE} differs from {WINDOWS_FILE}")
    if int(arrays[WINDOWS_FILE]["assignment_end"][-1]) != len(arrays[ASSIGNMENTS_FILE]):
        raise _damaged_rows_error(folder, f"{ASSIGNMENTS_FILE} is cut off")
    return rows


def _map_arrays(
    folder: Path, meta: RowsMeta, *, checks_digests: bool
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of rows by file name."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, dtype in DTYPES.items():
        path = folder / name
        nbytes = path.stat().st_size
        n_windows = -(-meta.n_pieces // WINDOW)
        if name == WINDOWS_FILE and nbytes != n_windows * dtype.itemsize:
            raise _damaged_rows_error(folder, f"{name} has {count_text(nbytes, 'byte')}")
        if checks_digests and file_digest(path) != meta.digests[name]:
            raise _damaged_rows_error(folder, f"{name} differs from its digest")
        # A plain array: each slice of a memmap creates another object of that class, which is slow.
        n_items = nbytes // dtype.itemsize
        arrays[name] = np.asarray(np.memmap(path, dtype, "r", shape=(n_items,)))
    return arrays


def _build_rows(folder: Path, tokens: MappedTokens, packing: str, note: Note) -> None:
    """Build rows in a new folder."""
    if tokens.n_documents >= MIN_NOTE_DOCUMENTS:
        note(
            f"arranging {count_text(tokens.n_documents, 'document')} in sequences, once for these tokens"
        )
    with new_folder(folder) as temporary:
        with ExitStack() as stack:
            opened = {name: stack.enter_context((temporary / name).open("xb")) for name in DTYPES}
            files = {name: HashingFile(file) for name, file in opened.items()}
            counts = _write_files(files, tokens, packing)
        digests = {name: file.digest() for name, file in files.items()}
        meta = RowsMeta(folder.name, packing, tokens.seq_length, **asdict(counts), digests=digests)
        (temporary / META_FILE).write_text(json.dumps(asdict(meta), indent=1) + "\n")


def _parse_meta(folder: Path, data: bytes) -> RowsMeta:
    """Return the metadata of rows. Raise DamagedStoreError if it is invalid."""
    try:
        values = load_json(data)
        meta = RowsMeta(**{key.name: values[key.name] for key in fields(RowsMeta)})
        if meta.digests.keys() == EARLIER_FILES:
            raise EarlierRowsError(f"the rows in {folder} are of an earlier version")
        numbers = (meta.seq_length, meta.n_pieces, meta.n_rows, meta.max_length)
        is_valid = all(type(number) is int and number > 0 for number in numbers)
        is_valid &= isinstance(meta.digests, dict) and meta.digests.keys() == DTYPES.keys()
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _damaged_rows_error(folder, f"{META_FILE} is malformed") from None
    if not is_valid or meta.identity != folder.name:
        raise _damaged_rows_error(
            folder, f"{META_FILE} has invalid values or belongs to other rows"
        )
    return meta


class EarlierRowsError(DamagedStoreError):
    """Error for rows in the larger form of earlier versions. They are written again."""


def _damaged_rows_error(folder: Path, why: str) -> DamagedStoreError:
    hint = f"`rm -r {folder}`: the next run rebuilds them"
    return DamagedStoreError(f"the rows in {folder} are damaged", why, hint)
