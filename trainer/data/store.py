"""The token store: a folder with the token ids of all documents.

The folder has its final name only if it is complete on disk.

- `tokens.bin`: ids of all documents, concatenated (uint16 or uint32, little-endian).
- `documents.bin`: end of each document in `tokens.bin`, in tokens (uint64, little-endian).
- `weights.bin`: loss weight of each token as a target, as its index in `StoreMeta.loss_weights`
  (uint8). Only in stores where some weights are 0.
- `meta.json`: `StoreMeta`, with the XXH3-128 digests of the other files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from prepcli.core.errors import PrepError
from prepcli.core.formatting import count_text
from prepcli.core.json_values import load_json
from prepcli.stores.files import open_regular_file, read_regular_file
from trainer.data.document_packing import DocumentRows
from trainer.data.files import io_error

TOKENS_FILE = "tokens.bin"
DOCUMENTS_FILE = "documents.bin"
WEIGHTS_FILE = "weights.bin"
META_FILE = "meta.json"
# The loss weights of most stores, and the first ones of each.
LOSS_WEIGHTS = (0.0, 1.0)
MAX_LOSS_WEIGHTS = 256
# uint64, because a store may have more than 2^32 tokens.
DOCUMENT_END_DTYPE = np.dtype("<u8")
DIGEST_READ_NBYTES = 4 << 20
# The possible sets of file names in `digests`: of an earlier version, without and with loss weights.
DIGEST_NAMES = (
    set[str](),
    {TOKENS_FILE, DOCUMENTS_FILE},
    {TOKENS_FILE, DOCUMENTS_FILE, WEIGHTS_FILE},
)


@dataclass(frozen=True, slots=True)
class StoreMeta:
    """Metadata of a token store, as written to `meta.json`.

    Attributes:
        identity: Digest of all inputs of tokenization, and the store's folder name.
        dtype: Dtype of the ids, "uint16" or "uint32".
        n_tokens: Number of ids.
        n_documents: Number of documents.
        max_id: Largest id, or -1 for an empty store.
        digests: XXH3-128 by file name. Empty in stores of earlier versions.
        ignored: Number of each part of conversations that the tokens do not show, by name. Empty in stores
            of earlier versions.
        loss_weights: The different loss weights of its tokens, 0 and 1 first.
    """

    identity: str
    dtype: str
    n_tokens: int
    n_documents: int
    max_id: int
    digests: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, int] = field(default_factory=dict)
    loss_weights: Sequence[float] = LOSS_WEIGHTS

    @property
    def has_weights(self) -> bool:
        """Whether the store has loss weights."""
        return WEIGHTS_FILE in self.digests


@dataclass(frozen=True, slots=True, eq=False)
class MappedTokens:
    """A memory-mapped token store.

    Attributes:
        ids: [n_tokens] uint16 or uint32, ids of all documents, end-of-sequence ids included.
        ends: [n_documents] uint64, end of each document in `ids`.
        identity: Identity of the store.
        seq_length: Tokens of a block, or maximum tokens of a target.
        weight_codes: [n_tokens] uint8, index in `loss_weights` of the weight of each token as a target. 0
            is a weight of 0. None if all weights are 1.
        rows: Rows of whole documents. None if documents are concatenated.
        loss_weights: The loss weights.
    """

    ids: npt.NDArray[np.unsignedinteger[Any]]
    ends: npt.NDArray[np.uint64]
    identity: str
    seq_length: int
    weight_codes: npt.NDArray[np.uint8] | None = None
    rows: DocumentRows | None = None
    loss_weights: Sequence[float] = LOSS_WEIGHTS

    @property
    def n_tokens(self) -> int:
        """Number of ids."""
        return len(self.ids)

    @property
    def n_documents(self) -> int:
        """Number of documents."""
        return len(self.ends)

    @property
    def n_blocks(self) -> int:
        """Number of complete blocks."""
        return self.n_tokens // self.seq_length

    def decode_weights(self, codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Return the loss weights of codes, in an array of the same shape."""
        return np.array(self.loss_weights, np.float32)[codes]


def document_end_blocks(tokens: MappedTokens, n_documents: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the ends of all documents, `n_documents` at a time.

    Files are read, not mapped: pages of a map would stay in the memory of the process.
    """
    for low in range(0, tokens.n_documents, n_documents):
        count = min(n_documents, tokens.n_documents - low)
        # Only a whole memory map has the map as its base. The `offset` of a slice is not its offset
        # in the file, so a slice is read from memory.
        if (
            isinstance(tokens.ends, np.memmap)
            and isinstance(tokens.ends.base, mmap)
            and tokens.ends.filename
        ):
            offset = tokens.ends.offset + low * DOCUMENT_END_DTYPE.itemsize
            ends = np.fromfile(tokens.ends.filename, DOCUMENT_END_DTYPE, count, offset=offset)
        else:
            ends = tokens.ends[low : low + count]
        yield ends.astype(np.int64)


def little_endian(dtype: str) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the dtype of ids on disk."""
    return np.dtype(dtype).newbyteorder("<")


def read_meta(folder: Path, *, checks_digests: bool = True) -> StoreMeta:
    """Read the metadata of a store and check the sizes and digests of its files.

    Args:
        folder: The store.
        checks_digests: Read all bytes to check the digests. False if another process has done so.

    Raises:
        DamagedStoreError: The files differ from the metadata.
        PrepError: A file cannot be read.
    """
    try:
        data = read_regular_file(folder / META_FILE)
    except PrepError as error:
        raise _damaged_store_error(folder, f"{error.what}: {error.why}") from error
    except OSError as error:
        raise _damaged_store_error(folder, f"{error.filename}: {error.strerror}") from error
    meta = _parse_meta(folder, data)
    # Sizes come first: they find a file cut short without reading it.
    try:
        expected_nbytes = file_sizes(meta)
        sizes = {name: (folder / name).stat().st_size for name in expected_nbytes}
    except OSError as error:
        raise _damaged_store_error(folder, f"{error.filename}: {error.strerror}") from error
    for name, nbytes in expected_nbytes.items():
        if sizes[name] != nbytes:
            raise _damaged_store_error(
                folder,
                f"{name} has {count_text(sizes[name], 'byte')}, {META_FILE} records {nbytes:,}",
            )
    if not checks_digests:
        return meta
    for name, digest in meta.digests.items():
        if file_digest(folder / name) != digest:
            raise _damaged_store_error(
                folder, f"{name} differs from the digest that {META_FILE} records"
            )
    return meta


def file_sizes(meta: StoreMeta) -> dict[str, int]:
    """Return the bytes of each file of a store, without its metadata."""
    sizes = {
        TOKENS_FILE: meta.n_tokens * np.dtype(meta.dtype).itemsize,
        DOCUMENTS_FILE: meta.n_documents * DOCUMENT_END_DTYPE.itemsize,
    }
    if meta.has_weights:
        sizes[WEIGHTS_FILE] = meta.n_tokens
    return sizes


def file_digest(path: Path) -> str:
    """Return the XXH3-128 digest of a file."""
    state = xxhash.xxh3_128()
    try:
        with open_regular_file(path) as file:
            while data := file.read(DIGEST_READ_NBYTES):
                state.update(data)
    except OSError as error:
        raise io_error(path, error) from error
    return state.hexdigest()


def _parse_meta(folder: Path, data: bytes) -> StoreMeta:
    """Return the metadata of a store. Raise DamagedStoreError if it is invalid."""
    try:
        values = {"digests": {}, "ignored": {}, "loss_weights": [*LOSS_WEIGHTS]} | load_json(data)
        meta = StoreMeta(**{key.name: values[key.name] for key in fields(StoreMeta)})
        numbers = (meta.n_tokens, meta.n_documents, meta.max_id)
        is_valid = meta.dtype in ("uint16", "uint32") and all(
            type(number) is int for number in numbers
        )
        is_valid &= isinstance(meta.digests, dict) and {*meta.digests} in DIGEST_NAMES
        is_valid &= all(type(count) is int for count in meta.ignored.values())
        is_valid &= _are_loss_weights(meta.loss_weights)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _damaged_store_error(folder, f"{META_FILE} is malformed") from None
    if not is_valid or meta.identity != folder.name:
        raise _damaged_store_error(
            folder, f"{META_FILE} has invalid values or belongs to another store"
        )
    return meta


def _are_loss_weights(values: Any) -> bool:
    """Return whether a value is a list of loss weights that begins with 0 and 1."""
    return (
        isinstance(values, list)
        and tuple(values[:2]) == LOSS_WEIGHTS
        and len(values) <= MAX_LOSS_WEIGHTS
        and all(type(weight) is float and 0 <= weight <= 1 for weight in values)
    )


class DamagedStoreError(PrepError):
    """Error for a store with missing, changed or malformed files."""


def _damaged_store_error(folder: Path, why: str) -> DamagedStoreError:
    return DamagedStoreError(
        f"the tokens in {folder} are damaged",
        why,
        f"`rm -r {folder}`: the next run rebuilds them",
    )


def map_tokens(folder: Path, meta: StoreMeta, seq_length: int) -> MappedTokens:
    """Map the files of a store into memory, without reading them."""
    # A map costs no memory of its own: the pages belong to the page cache, all processes of a host
    # share them, and the system may drop them at any time. The digests were checked on opening.
    ids = _map_array(folder / TOKENS_FILE, little_endian(meta.dtype), meta.n_tokens)
    ends = _map_array(folder / DOCUMENTS_FILE, DOCUMENT_END_DTYPE, meta.n_documents)
    codes = None
    if meta.has_weights:
        codes = _map_array(folder / WEIGHTS_FILE, np.dtype(np.uint8), meta.n_tokens)
    return MappedTokens(
        ids=ids,
        ends=ends,
        identity=meta.identity,
        seq_length=seq_length,
        weight_codes=codes,
        loss_weights=meta.loss_weights,
    )


def _map_array(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """Map a file into memory. An empty file cannot be mapped."""
    if not count:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", shape=(count,))
