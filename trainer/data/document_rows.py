"""Stored rows of whole documents: computed once in bounded memory, and memory-mapped by each run.

A row is one training sequence. It consists of one or more pieces of documents.

A folder in the store, named by a digest of all inputs of the rows:

- `starts.bin`: first token of each piece of a document, row after row (int64, little-endian).
- `lengths.bin`: tokens of each piece (int32, little-endian).
- `ends.bin`: end of each row in the pieces (int64, little-endian).
- `rows.json`: `RowsMeta`, with the XXH3-128 digests of the other files.

If these files may take more than MAX_INDEX_NBYTES, the folder has the compact files of `window_rows` instead. Earlier
versions of prep ignore the folder.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
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
    DocumentRows,
    MakeRows,
    PackedRows,
    collect_rows,
    pack_documents,
    pad_documents,
)
from trainer.data.files import Note
from trainer.data.new_folders import HashingFile, discard_folder, new_folder
from trainer.data.store import (
    DamagedStoreError,
    MappedTokens,
    StoreMeta,
    document_end_blocks,
    file_digest,
)
from trainer.data.window_rows import (
    ASSIGNMENTS_FILE,
    WINDOW_DTYPE,
    WINDOWS_FILE,
    RowCounts,
    WindowRows,
    write_windows,
)
from trainer.recipe.text_fields import SEGMENTED

# Rows of documents by `data.packing`
DOCUMENT_ROWS: Mapping[str, MakeRows] = {SEGMENTED: pack_documents, "none": pad_documents}
# Part of the identity of rows. Raise it when the same documents give other rows.
ROWS_VERSION = 1
STARTS_FILE = "starts.bin"
LENGTHS_FILE = "lengths.bin"
ENDS_FILE = "ends.bin"
META_FILE = "rows.json"
DTYPES = {STARTS_FILE: np.dtype("<i8"), LENGTHS_FILE: np.dtype("<i4"), ENDS_FILE: np.dtype("<i8")}
COMPACT_DTYPES = {WINDOWS_FILE: WINDOW_DTYPE, ASSIGNMENTS_FILE: np.dtype("u1")}
# Above this size of all files, rows are stored in the compact form, where reading a row takes longer.
MAX_INDEX_NBYTES = 1 << 30
# Fewer documents take less than a second, so no message is shown.
MIN_NOTE_DOCUMENTS = 1_000_000


@dataclass(frozen=True, slots=True)
class RowsMeta:
    """Metadata of stored rows, as written to `rows.json`.

    Attributes:
        identity: Digest of all inputs of the rows, and the name of the folder.
        packing: The recipe's `data.packing`.
        seq_length: Length of a row in tokens.
        n_pieces: Number of pieces.
        n_rows: Number of rows.
        max_length: Tokens of the longest piece.
        digests: XXH3-128 by file name.
    """

    identity: str
    packing: str
    seq_length: int
    n_pieces: int
    n_rows: int
    max_length: int
    digests: Mapping[str, str]

    @property
    def is_compact(self) -> bool:
        """Whether the files are those of `window_rows`."""
        return self.digests.keys() == COMPACT_DTYPES.keys()

    @property
    def dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """Dtype of the items of each file."""
        if self.is_compact:
            return COMPACT_DTYPES
        return DTYPES

    def n_items(self, name: str) -> int | None:
        """Return the number of items of a file. None for a file of any size."""
        if name == ASSIGNMENTS_FILE:
            return None
        if name == WINDOWS_FILE:
            return -(-self.n_pieces // WINDOW)
        if name == ENDS_FILE:
            return self.n_rows
        return self.n_pieces


def make_rows(tokens: MappedTokens, packing: str) -> PackedRows:
    """Return the rows of a token store, made in memory.

    Args:
        tokens: The token store.
        packing: A key of `DOCUMENT_ROWS`.
    """
    ends = document_end_blocks(tokens, BLOCK_DOCUMENTS)
    return collect_rows(DOCUMENT_ROWS[packing](ends, tokens.seq_length), tokens.seq_length)


def stored_rows(
    store: Path, meta: StoreMeta, tokens: MappedTokens, packing: str, *, target: Path, note: Note
) -> DocumentRows:
    """Return the stored rows of a token store. Compute missing or damaged ones.

    Several processes may do so at the same time. If the rows cannot be written, they are made in
    memory.

    Args:
        store: Folder of the store.
        meta: Its metadata.
        tokens: The mapped store.
        packing: A key of `DOCUMENT_ROWS`.
        target: Folder for missing rows: the store, or a temporary folder.
        note: Called with messages for the user.
    """
    identity = rows_identity(meta, packing, tokens.seq_length)
    rows = _read_valid_rows(store / identity, tokens, note)
    if rows is not None:
        return rows
    folder = target / identity
    try:
        if folder.parent == store or _read_valid_rows(folder, tokens) is None:
            # Damaged ones
            discard_folder(folder)
            _build_rows(folder, tokens, packing, note)
        return read_rows(folder, tokens, checks_digests=False)
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
    """Return the name of the folder of stored rows, a digest.

    Rows with equal digests are equal: it covers the token store, the packing and the sequence length.
    """
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
    """Map stored rows into memory.

    Args:
        folder: The rows.
        tokens: The token store.
        checks_digests: Read all bytes to check the digests. False if another process has done so.

    Raises:
        FileNotFoundError: There are no rows.
        DamagedStoreError: The files differ from the metadata, or one cannot be read.
    """
    folder.stat()
    try:
        meta = _parse_meta(folder, read_regular_file(folder / META_FILE))
        arrays = _map_arrays(folder, meta, checks_digests=checks_digests)
        _check_settings(folder, meta, arrays, tokens, checks_lengths=checks_digests)
    except DamagedStoreError:
        raise
    except (OSError, PrepError) as error:
        raise _damaged_rows_error(folder, str(error)) from error
    if meta.is_compact:
        return WindowRows(arrays, tokens, meta.packing)
    return PackedRows(
        starts=arrays[STARTS_FILE],
        lengths=arrays[LENGTHS_FILE],
        ends=arrays[ENDS_FILE],
        seq_length=meta.seq_length,
        n_tokens=tokens.n_tokens,
        max_length=meta.max_length,
    )


def _map_arrays(
    folder: Path, meta: RowsMeta, *, checks_digests: bool
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of rows by file name."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, dtype in meta.dtypes.items():
        path = folder / name
        nbytes = path.stat().st_size
        n_items = meta.n_items(name)
        if n_items is None:
            n_items = nbytes
        if nbytes != n_items * dtype.itemsize:
            raise _damaged_rows_error(folder, f"{name} has {count_text(nbytes, 'byte')}")
        if checks_digests and file_digest(path) != meta.digests[name]:
            raise _damaged_rows_error(folder, f"{name} differs from its digest")
        # A plain array: each slice of a memmap creates another object of that class, which is slow.
        arrays[name] = np.asarray(np.memmap(path, dtype, "r", shape=(n_items,)))
    return arrays


def _check_settings(
    folder: Path,
    meta: RowsMeta,
    arrays: Mapping[str, npt.NDArray[Any]],
    tokens: MappedTokens,
    *,
    checks_lengths: bool,
) -> None:
    """Raise DamagedStoreError if `rows.json` contradicts the tokens or the arrays.

    It is the only file of the folder without a digest.
    """
    if meta.seq_length != tokens.seq_length:
        raise _damaged_rows_error(
            folder, f"{META_FILE} has rows of {count_text(meta.seq_length, 'token')}"
        )
    if meta.is_compact:
        _check_windows(folder, meta, arrays)
    elif checks_lengths and meta.max_length != int(arrays[LENGTHS_FILE].max()):
        raise _damaged_rows_error(
            folder, f"{META_FILE} has pieces of {count_text(meta.max_length, 'token')}"
        )


def _check_windows(folder: Path, meta: RowsMeta, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise DamagedStoreError if `rows.json` or the assignments contradict the windows."""
    windows = arrays[WINDOWS_FILE]
    if (int(windows["row_end"][-1]), int(windows["max_length"].max())) != (
        meta.n_rows,
        meta.max_length,
    ):
        raise _damaged_rows_error(folder, f"{META_FILE} differs from {WINDOWS_FILE}")
    if int(windows["assignment_end"][-1]) != len(arrays[ASSIGNMENTS_FILE]):
        raise _damaged_rows_error(folder, f"{ASSIGNMENTS_FILE} is cut off")


def _read_valid_rows(
    folder: Path, tokens: MappedTokens, note: Note = lambda text: None
) -> DocumentRows | None:
    """Return stored rows, or None if they are missing or damaged. Report damage to `note`."""
    try:
        return read_rows(folder, tokens)
    except FileNotFoundError:
        return None
    except DamagedStoreError as error:
        note(f"{error.what} ({error.why}): they are rebuilt")
        return None


def _build_rows(folder: Path, tokens: MappedTokens, packing: str, note: Note) -> None:
    """Build rows in a new folder."""
    if tokens.n_documents >= MIN_NOTE_DOCUMENTS:
        note(
            f"arranging {count_text(tokens.n_documents, 'document')} in sequences, once for these tokens"
        )
    with new_folder(folder) as temporary:
        _write_rows(temporary, folder.name, tokens, packing)


def _write_rows(folder: Path, identity: str, tokens: MappedTokens, packing: str) -> None:
    """Write the files of rows durably."""
    write = _write_pieces
    dtypes: Mapping[str, np.dtype[Any]] = DTYPES
    if _max_nbytes(tokens) > MAX_INDEX_NBYTES:
        write = write_windows
        dtypes = COMPACT_DTYPES
    with contextlib.ExitStack() as stack:
        opened = {name: stack.enter_context((folder / name).open("xb")) for name in dtypes}
        files = {name: HashingFile(file) for name, file in opened.items()}
        counts = write(files, tokens, packing)
        digests = {name: file.digest() for name, file in files.items()}
    meta = RowsMeta(identity, packing, tokens.seq_length, **asdict(counts), digests=digests)
    (folder / META_FILE).write_text(json.dumps(asdict(meta), indent=1) + "\n")


def _max_nbytes(tokens: MappedTokens) -> int:
    """Return an upper bound of the bytes of rows that are not compact."""
    # A document of n tokens has at most n // seq_length + 1 pieces, and each row at least one piece.
    n_pieces = tokens.n_documents + tokens.n_blocks
    return n_pieces * sum(dtype.itemsize for dtype in DTYPES.values())


def _write_pieces(
    files: Mapping[str, HashingFile], tokens: MappedTokens, packing: str
) -> RowCounts:
    """Write the pieces of all rows."""
    counts = RowCounts()
    ends = document_end_blocks(tokens, BLOCK_DOCUMENTS)
    for block in DOCUMENT_ROWS[packing](ends, tokens.seq_length):
        arrays = {
            STARTS_FILE: block.pieces.starts,
            LENGTHS_FILE: block.pieces.lengths,
            ENDS_FILE: block.ends,
        }
        for name, array in arrays.items():
            files[name].write(array.astype(DTYPES[name]).tobytes())
        counts.n_pieces += len(block.pieces.lengths)
        counts.n_rows += len(block.ends)
        counts.max_length = max(counts.max_length, int(block.pieces.lengths.max()))
    return counts


def _parse_meta(folder: Path, data: bytes) -> RowsMeta:
    """Return the metadata of rows. Raise DamagedStoreError if it is invalid."""
    try:
        values = load_json(data)
        meta = RowsMeta(**{key.name: values[key.name] for key in fields(RowsMeta)})
        numbers = (meta.seq_length, meta.n_pieces, meta.n_rows, meta.max_length)
        is_valid = all(type(number) is int and number > 0 for number in numbers)
        is_valid &= isinstance(meta.digests, dict) and meta.digests.keys() in (
            DTYPES.keys(),
            COMPACT_DTYPES.keys(),
        )
    except (ValueError, TypeError, KeyError):
        raise _damaged_rows_error(folder, f"{META_FILE} is malformed") from None
    if not is_valid or meta.identity != folder.name:
        raise _damaged_rows_error(
            folder, f"{META_FILE} has invalid values or belongs to other rows"
        )
    return meta


def _damaged_rows_error(folder: Path, why: str) -> DamagedStoreError:
    hint = f"`rm -r {folder}`: the next run rebuilds them"
    return DamagedStoreError(f"the rows in {folder} are damaged", why, hint)
