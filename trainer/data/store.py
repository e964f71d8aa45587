"""The token store: a folder with the token ids of all documents, in shards.

A shard has the tokens of a range of the data. It is a folder `00000`, `00001` and so on, in the order of the data:

- `tokens.bin`: ids of its documents, concatenated (uint16 or uint32, little-endian). A document may begin in one
  shard and end in a later one.
- `documents.bin`: end of each document in the shard, in tokens from the start of the shard (uint64,
  little-endian).
- `weights.bin`: loss weight of each token as a target, as its index in `ShardMeta.loss_weights` (uint8). Only in
  stores where some weights are 0.
- `meta.json`: `ShardMeta`, with the XXH3-128 digests of the other files.

A shard is complete under its name, and never changes. `store.json` lists all of them. It is written last, so that a
store without it is incomplete. A store of an earlier version is the folder of its only shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from prepcli.core.errors import PrepError
from prepcli.core.formatting import count_text
from prepcli.core.json_values import JsonObject, load_json
from prepcli.stores.files import fsync_path, read_regular_file, write_file
from trainer.data.document_packing import DocumentRows
from trainer.data.files import io_error
from trainer.data.store_files import ArrayFile, JoinedArray, TokenArray, file_digest

TOKENS_FILE = "tokens.bin"
DOCUMENTS_FILE = "documents.bin"
WEIGHTS_FILE = "weights.bin"
META_FILE = "meta.json"
STORE_FILE = "store.json"
# The loss weights of most stores, and the first ones of each.
LOSS_WEIGHTS = (0.0, 1.0)
MAX_LOSS_WEIGHTS = 256
# uint64, because a store may have more than 2^32 tokens.
DOCUMENT_END_DTYPE = np.dtype("<u8")
# Values of keys that earlier versions of a shard did not have. They are not written.
NEWER_DEFAULTS: Mapping[str, Any] = {
    "ignored": {},
    "loss_weights": [*LOSS_WEIGHTS],
    "n_bad_lines": 0,
    "layout": "",
}
# Tokens that are read together to count those with loss.
COUNT_TOKENS = 1 << 22
# The possible sets of file names in `digests`: of an earlier version, without and with loss weights.
DIGEST_NAMES = (
    set[str](),
    {TOKENS_FILE, DOCUMENTS_FILE},
    {TOKENS_FILE, DOCUMENTS_FILE, WEIGHTS_FILE},
)


@dataclass(frozen=True, slots=True)
class ShardMeta:
    """Metadata of a shard."""

    identity: str  # Identity of its store
    dtype: str  # Dtype of the ids, "uint16" or "uint32"
    n_tokens: int  # Number of ids
    n_documents: int  # Number of document ends in the shard
    max_id: int  # Largest id, or -1 for an empty shard
    # XXH3-128 by file name. Empty in stores of earlier versions.
    digests: Mapping[str, str] = field(default_factory=dict)
    # Number of each part of conversations that the tokens do not show, by name. Empty in stores of earlier versions.
    ignored: Mapping[str, int] = field(default_factory=dict)
    # The different loss weights of its tokens, 0 and 1 first
    loss_weights: Sequence[float] = LOSS_WEIGHTS
    n_bad_lines: int = 0  # Number of skipped invalid records
    # Digest of the division of the data. Shards of different divisions are not of one store. Empty in stores of
    # earlier versions.
    layout: str = ""

    @property
    def has_weights(self) -> bool:
        """Whether the shard has loss weights."""
        return WEIGHTS_FILE in self.digests

    @property
    def file_sizes(self) -> dict[str, int]:
        """Bytes of each file, without the metadata."""
        sizes = {
            TOKENS_FILE: self.n_tokens * np.dtype(self.dtype).itemsize,
            DOCUMENTS_FILE: self.n_documents * DOCUMENT_END_DTYPE.itemsize,
        }
        if self.has_weights:
            sizes[WEIGHTS_FILE] = self.n_tokens
        return sizes

    def to_json(self) -> JsonObject:
        """Return the values as JSON, without the defaults of newer keys."""
        defaults = NEWER_DEFAULTS
        values = asdict(self).items()
        return {
            key: value for key, value in values if key not in defaults or value != defaults[key]
        }


@dataclass(frozen=True, slots=True)
class StoreMeta:
    """Metadata of a complete store."""

    identity: str  # Digest of all inputs of tokenization, and the store's folder name
    # Metadata of the shards by folder name, in the order of the data. The only shard of an earlier version has an
    # empty name.
    shards: Mapping[str, ShardMeta]
    loss_weights: Sequence[float]  # The different loss weights of its tokens, 0 and 1 first

    @property
    def dtype(self) -> str:
        """Dtype of the ids."""
        return next(iter(self.shards.values())).dtype

    @property
    def has_weights(self) -> bool:
        """Whether the store has loss weights."""
        return next(iter(self.shards.values())).has_weights

    @property
    def n_tokens(self) -> int:
        """Number of ids."""
        return sum(shard.n_tokens for shard in self.shards.values())

    @property
    def n_documents(self) -> int:
        """Number of documents."""
        return sum(shard.n_documents for shard in self.shards.values())

    @property
    def max_id(self) -> int:
        """Largest id, or -1 for an empty store."""
        return max(shard.max_id for shard in self.shards.values())

    @property
    def ignored(self) -> dict[str, int]:
        """Number of each part of conversations that the tokens do not show, by name."""
        counts: dict[str, int] = {}
        for shard in self.shards.values():
            for name, count in shard.ignored.items():
                counts[name] = counts.get(name, 0) + count
        return dict(sorted(counts.items()))

    @property
    def documents_digest(self) -> str | None:
        """Digest of the ends of all documents. None if it is not recorded."""
        digests = [shard.digests.get(DOCUMENTS_FILE) for shard in self.shards.values()]
        if len(digests) == 1:
            return digests[0]
        counts = [shard.n_tokens for shard in self.shards.values()]
        return xxhash.xxh3_128_hexdigest(json.dumps([digests, counts]).encode())


def join_shards(identity: str, shards: Mapping[str, ShardMeta]) -> StoreMeta:
    """Return the metadata of a store. Raise PrepError if its shards have too many different loss weights."""
    weights = dict.fromkeys(LOSS_WEIGHTS)
    for shard in shards.values():
        weights |= dict.fromkeys(shard.loss_weights)
    if len(weights) > MAX_LOSS_WEIGHTS:
        raise too_many_weights_error()
    return StoreMeta(identity, shards, [*weights])


def too_many_weights_error() -> PrepError:
    """Return the error for data with more different loss weights than a byte can number."""
    why = f"a dataset may have {MAX_LOSS_WEIGHTS} different ones"
    return PrepError("the data has too many loss weights", why, "round them")


@dataclass(frozen=True, slots=True, eq=False)
class MappedTokens:
    """A memory-mapped token store."""

    # [n_tokens] uint16 or uint32, ids of all documents, end-of-sequence ids included
    ids: TokenArray
    ends: TokenArray  # [n_documents] uint64, end of each document in `ids`
    identity: str  # Identity of the store
    seq_length: int  # Tokens of a block, or maximum tokens of a target
    # [n_tokens] uint8, index in `loss_weights` of the weight of each token as a target. 0 is a weight of 0. None if
    # all weights are 1.
    weight_codes: TokenArray | None = None
    rows: DocumentRows | None = None  # Rows of whole documents. None if documents are concatenated.
    loss_weights: Sequence[float] = LOSS_WEIGHTS  # The loss weights

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

    def read_weights(self, low: int, high: int) -> npt.NDArray[np.float32]:
        """Return the loss weights of the tokens `low` to `high`."""
        if self.weight_codes is None:
            return np.ones(high - low, np.float32)
        return np.array(self.loss_weights, np.float32)[self.weight_codes[low:high]]

    def count_loss(self, low: int = 0, high: int | None = None) -> int:
        """Return the number of tokens with a loss weight above 0, of all tokens or of `low` to `high`."""
        if high is None:
            high = self.n_tokens
        if self.weight_codes is None:
            return high - low
        count = 0
        for start in range(low, high, COUNT_TOKENS):
            codes = self.weight_codes[start : min(start + COUNT_TOKENS, high)]
            count += int(np.count_nonzero(codes))
        return count


def document_end_blocks(tokens: MappedTokens, n_documents: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the ends of all documents, `n_documents` at a time."""
    for low in range(0, tokens.n_documents, n_documents):
        items = slice(low, low + n_documents)
        if isinstance(tokens.ends, JoinedArray):
            yield tokens.ends.read(items).astype(np.int64)
        else:
            yield tokens.ends[items].astype(np.int64)


def little_endian(dtype: str) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the dtype of ids on disk."""
    return np.dtype(dtype).newbyteorder("<")


def is_complete(folder: Path) -> bool:
    """Return whether a folder is a store with all of its tokens. Digests are not checked."""
    return (folder / STORE_FILE).exists() or (folder / META_FILE).exists()


def shard_name(shard: int) -> str:
    """Return the folder name of a shard."""
    return f"{shard:05d}"


def has_shard(folder: Path) -> bool:
    """Return whether a store has a shard."""
    return any(folder.glob(f"[0-9]*/{META_FILE}"))


def read_meta(folder: Path, *, checks_digests: bool = True) -> StoreMeta:
    """Read the metadata of a complete store and check the sizes and digests of its files.

    Digests are not checked if another process has done so.

    Raises:
        DamagedStoreError: The files differ from the metadata.
        PrepError: A file cannot be read.
    """
    if (folder / STORE_FILE).exists():
        values = _read_json(folder, STORE_FILE)
        listed = values.get("shards") if isinstance(values, dict) else None
        if not isinstance(listed, list) or not listed:
            raise damaged_store_error(folder, f"{STORE_FILE} is malformed")
        shards = {
            shard_name(i): _parse_shard(folder, STORE_FILE, value) for i, value in enumerate(listed)
        }
    else:
        shards = {"": _parse_shard(folder, META_FILE, _read_json(folder, META_FILE))}
    for name, shard in shards.items():
        check_files(folder, name, shard, checks_digests=checks_digests)
    dtypes = {shard.dtype for shard in shards.values()}
    if len(dtypes) > 1:
        raise damaged_store_error(folder, f"its shards have ids of {' and '.join(sorted(dtypes))}")
    return join_shards(folder.name, shards)


def read_shard(folder: Path, name: str, *, checks_digests: bool = True) -> ShardMeta:
    """Read the metadata of a shard of a store, complete or not. The rest is as for `read_meta`."""
    file = f"{name}/{META_FILE}"
    shard = _parse_shard(folder, file, _read_json(folder, file))
    check_files(folder, name, shard, checks_digests=checks_digests)
    return shard


def write_meta(folder: Path, meta: StoreMeta) -> None:
    """Write the metadata of a store, and thereby complete it. Raise PrepError if it cannot be written."""
    shards = [shard.to_json() for shard in meta.shards.values()]
    content = json.dumps({"identity": meta.identity, "shards": shards}, indent=1)
    try:
        write_file(folder / STORE_FILE, content.encode() + b"\n")
        # The folder of the store may be new.
        fsync_path(folder.parent)
    except OSError as error:
        raise io_error(folder / STORE_FILE, error) from error


def _read_json(folder: Path, name: str) -> Any:
    """Return the content of a metadata file. Raise DamagedStoreError if it cannot be read."""
    try:
        return load_json(read_regular_file(folder / name))
    except PrepError as error:
        raise damaged_store_error(folder, f"{error.what}: {error.why}") from error
    except OSError as error:
        raise damaged_store_error(folder, f"{error.filename}: {error.strerror}") from error
    except ValueError:
        raise damaged_store_error(folder, f"{name} is malformed") from None


def _parse_shard(folder: Path, file: str, values: Any) -> ShardMeta:
    """Return the metadata of a shard. Raise DamagedStoreError if it is invalid."""
    try:
        all_values = {"digests": {}, **NEWER_DEFAULTS} | values
        shard = ShardMeta(**{key.name: all_values[key.name] for key in fields(ShardMeta)})
        numbers = (shard.n_tokens, shard.n_documents, shard.max_id, shard.n_bad_lines)
        is_valid = shard.dtype in ("uint16", "uint32") and all(
            type(number) is int for number in numbers
        )
        is_valid &= isinstance(shard.digests, dict) and {*shard.digests} in DIGEST_NAMES
        is_valid &= all(type(count) is int for count in shard.ignored.values())
        is_valid &= _are_loss_weights(shard.loss_weights)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise damaged_store_error(folder, f"{file} is malformed") from None
    if not is_valid or shard.identity != folder.name:
        raise damaged_store_error(folder, f"{file} has invalid values or belongs to another store")
    return shard


def _are_loss_weights(values: Any) -> bool:
    """Return whether a value is a list of loss weights that begins with 0 and 1."""
    return (
        isinstance(values, list)
        and tuple(values[:2]) == LOSS_WEIGHTS
        and len(values) <= MAX_LOSS_WEIGHTS
        and all(type(weight) is float and 0 <= weight <= 1 for weight in values)
    )


def check_files(folder: Path, name: str, shard: ShardMeta, *, checks_digests: bool) -> None:
    """Raise DamagedStoreError if the files of a shard differ from its metadata."""
    # Sizes come first: they find a file cut short without reading it.
    try:
        for file, expected_nbytes in shard.file_sizes.items():
            nbytes = (folder / name / file).stat().st_size
            if nbytes != expected_nbytes:
                size = count_text(nbytes, "byte")
                why = f"{Path(name, file)} has {size}, {META_FILE} records {expected_nbytes:,}"
                raise damaged_store_error(folder, why)
    except OSError as error:
        raise damaged_store_error(folder, f"{error.filename}: {error.strerror}") from error
    if not checks_digests:
        return
    for file, digest in shard.digests.items():
        if file_digest(folder / name / file) != digest:
            why = f"{Path(name, file)} differs from the digest that {META_FILE} records"
            raise damaged_store_error(folder, why)


class DamagedStoreError(PrepError):
    """Error for a store with missing, changed or malformed files."""


def damaged_store_error(folder: Path, why: str) -> DamagedStoreError:
    """Return the error for a damaged store."""
    return DamagedStoreError(
        f"the tokens in {folder} are damaged",
        why,
        f"`rm -r {folder}`: the next run rebuilds them",
    )


def map_tokens(folder: Path, meta: StoreMeta, seq_length: int) -> MappedTokens:
    """Map the files of a store into memory, without reading them. The digests were checked on opening."""
    ids: list[ArrayFile] = []
    ends: list[ArrayFile] = []
    weights: list[ArrayFile] = []
    counts = [shard.n_tokens for shard in meta.shards.values()]
    for (name, shard), offset in zip(meta.shards.items(), accumulate(counts, initial=0)):
        path = folder / name
        ids.append(ArrayFile(path / TOKENS_FILE, shard.n_tokens))
        # A shard counts from its first token.
        ends.append(ArrayFile(path / DOCUMENTS_FILE, shard.n_documents, offset))
        # A shard numbers its own loss weights.
        codes = np.array(
            [meta.loss_weights.index(weight) for weight in shard.loss_weights], np.uint8
        )
        if (codes == np.arange(len(codes))).all():
            codes = None
        weights.append(ArrayFile(path / WEIGHTS_FILE, shard.n_tokens, codes=codes))
    weight_codes = None
    if meta.has_weights:
        weight_codes = JoinedArray(weights, np.dtype(np.uint8))
    return MappedTokens(
        ids=JoinedArray(ids, little_endian(meta.dtype)),
        ends=JoinedArray(ends, DOCUMENT_END_DTYPE),
        identity=meta.identity,
        seq_length=seq_length,
        weight_codes=weight_codes,
        loss_weights=meta.loss_weights,
    )
