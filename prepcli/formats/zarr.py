"""Metadata documents of zarr arrays, version 2 (`.zarray`) and 3 (`zarr.json`): parse them, and write them.

Documents are written byte for byte as TensorStore writes them. Unsupported features raise an error with their name.
Specifications: https://zarr-specs.readthedocs.io.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.json_values import JsonObject, JsonValue, parse_json, quote_name
from prepcli.formats.codecs import (
    COMPRESSORS,
    CRC32C_NBYTES,
    ZARR2_CODECS,
    ZARR3_CODECS,
    Crc32c,
    codec_of,
)
from prepcli.planning.item_storage import ZARR2, ChunkKeys, Compression, ZarrVersion
from prepcli.planning.tensors import ITEM_BITS

RESAVE_HINT = (
    "save it again raw, in Python: import orbax.checkpoint as ocp; "
    "ocp.PyTreeCheckpointer(use_compression=False).save(NEW, ocp.PyTreeCheckpointer().restore(OLD))"
)
SUPPORTED_STORAGE = f"prep reads C order, little endian, raw or with {', '.join(COMPRESSORS)}"
ZARR_TYPESTRS = {
    "bool": "|b1", "int8": "|i1", "uint8": "|u1",
    "int16": "<i2", "uint16": "<u2", "int32": "<i4", "uint32": "<u4", "int64": "<i8", "uint64": "<u8",
    "int4": "int4",
    "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8",
    "bfloat16": "bfloat16", "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
    "float8_e8m0fnu": "float8_e8m0fnu", "float8_e4m3fnuz": "float8_e4m3fnuz", "float8_e5m2fnuz": "float8_e5m2fnuz",
}  # fmt: skip
"""dtype -> zarr v2 type string. Names without a NumPy type code are an extension of TensorStore."""
# A `.zarray` of version 2 and the keys of its chunks, shape [3, 4] in chunks [2, 4]:
#   {"shape": [3, 4], "chunks": [2, 4], "dtype": "<f4", "order": "C", "compressor": null, ...}
#   NAME/0.0 has rows 0 and 1, NAME/1.0 has row 2 and one row of padding
# Version 3 (`zarr.json`) names the same chunks NAME/c/0/0 and NAME/c/1/0.
_DTYPES = {typestr: dtype for dtype, typestr in ZARR_TYPESTRS.items()} | {
    "<i1": "int8",
    "<u1": "uint8",
    "<b1": "bool",
}
# TensorStore's maximum rank, and a limit of 2^48 elements per chunk, far above any chunk.
MAX_DIMS = 32
MAX_CHUNK_BITS = 48
# Size of a shard's index with 2^20 chunks of 16 bytes.
MAX_SHARD_INDEX_NBYTES = 16 << 20
# The offset and the size of a chunk that a shard does not store.
_ABSENT_CHUNK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class ZarrSharding:
    """Storage of several chunks in one value (a shard) with an index of their locations.

    Attributes:
        shard_shape: Shape of a shard.
        chunks_per_shard: Number of its chunks along each dim.
        has_checksum: Whether a CRC-32C follows the index.
        index_is_at_end: Whether the index follows the chunks.
    """

    shard_shape: tuple[int, ...]
    chunks_per_shard: tuple[int, ...]
    has_checksum: bool
    index_is_at_end: bool

    @property
    def index_nbytes(self) -> int:
        """Size of the index of a shard, its checksum included."""
        return 16 * math.prod(self.chunks_per_shard) + CRC32C_NBYTES * self.has_checksum

    def parse_index(self, index: bytes, shard_nbytes: int) -> list[tuple[int, int]]:
        """Return the offset and size of each chunk of a shard in C order. Offset -1 for a chunk that is not stored.

        Raises:
            ValueError: The checksum differs, or the chunks take more bytes than the shard has.
        """
        if self.has_checksum:
            checksum = struct.pack("<I", google_crc32c.value(index[:-CRC32C_NBYTES]))
            if index[-CRC32C_NBYTES:] != checksum:
                raise ValueError("the checksum of its index does not match")
        # The index has two uint64 per chunk: offset and size. A chunk that is not stored has 2^64 - 1 twice.
        # E.g. 2 chunks of 8 bytes, the second absent:
        #   00 00 .. 00  08 00 .. 00  ff ff .. ff  ff ff .. ff  <CRC-32C>
        count = math.prod(self.chunks_per_shard)
        entries: list[Any] = np.frombuffer(index, "<u8", 2 * count).reshape(-1, 2).tolist()
        ranges: list[tuple[int, int]] = []
        last_stop = 0
        total_nbytes = 0
        for offset, nbytes in entries:
            if offset == nbytes == _ABSENT_CHUNK:
                ranges.append((-1, 0))
                continue
            ranges.append((offset, nbytes))
            last_stop = max(last_stop, offset + nbytes)
            total_nbytes += nbytes
        # Many chunks that share the same bytes would decode to more than the file has.
        if max(last_stop, total_nbytes) > shard_nbytes:
            raise ValueError(f"its index refers to bytes beyond its size of {shard_nbytes:,}")
        return ranges


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """Parsed metadata document of an array. `missing_is_zero`: whether missing chunks read as zeros."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: str
    codec_names: tuple[str, ...]
    sharding: ZarrSharding | None
    missing_is_zero: bool
    # Keys of chunks, or of shards, without the prefix `NAME/`.
    chunk_keys: ChunkKeys

    @property
    def stored_chunk_shape(self) -> tuple[int, ...]:
        """Return the shape that one stored value covers: a shard, or a chunk."""
        if self.sharding:
            return self.sharding.shard_shape
        return self.chunk_shape

    @property
    def stored_grid(self) -> tuple[int, ...]:
        """Return the number of stored values along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.stored_chunk_shape))


def encode_zarr_document(
    version: ZarrVersion,
    shape: Sequence[int],
    dtype: str,
    chunk_shape: Sequence[int],
    compression: Compression | None = None,
) -> bytes:
    """Return the metadata document of an array in C order, little endian."""
    # The keys are in TensorStore's order, which is the alphabetical one.
    if version == ZARR2:
        document = {
            "chunks": chunk_shape,
            "compressor": None,
            "dimension_separator": version.chunk_keys.separator,
            "dtype": ZARR_TYPESTRS[dtype],
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": shape,
            "zarr_format": 2,
        }
        if compression is not None:
            codec = codec_of(compression)
            settings = codec.settings(compression.level, version.number)
            document["compressor"] = {"id": codec.zarr2_id, **settings}
    else:
        codecs: list[dict[str, object]] = [{"name": "bytes"}]
        # Elements of one byte have no byte order.
        if ITEM_BITS[dtype] > 8:
            codecs = [{"configuration": {"endian": "little"}, "name": "bytes"}]
        if compression is not None:
            codec = codec_of(compression)
            settings = codec.settings(compression.level, version.number)
            codecs.append({"configuration": settings, "name": codec.zarr3_name})
        # Zarr 3 requires a fill value. No chunk is missing.
        if dtype == "bool":
            fill_value = False
        elif "int" in dtype:
            fill_value = 0
        elif dtype.startswith("complex"):
            fill_value = [0.0, 0.0]
        else:
            fill_value = 0.0
        document = {
            "chunk_grid": {"configuration": {"chunk_shape": chunk_shape}, "name": "regular"},
            "chunk_key_encoding": {"name": "default"},
            "codecs": codecs,
            "data_type": dtype,
            "fill_value": fill_value,
            "node_type": "array",
            "shape": shape,
            "zarr_format": 3,
        }
    return json.dumps(document, separators=(",", ":")).encode()


class _UnsupportedError(ValueError):
    """A valid document of an array that prep does not read. The text follows the name of the array."""


def parse_zarr_document(name: str, version: ZarrVersion, text: bytes) -> ZarrArray:
    """Parse the metadata document of an array."""
    try:
        document = parse_json(text)
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        return _parse_v2(name, document) if version == ZARR2 else _parse_v3(name, document)
    except _UnsupportedError as error:
        raise PrepError(f"{name} {error}", SUPPORTED_STORAGE, RESAVE_HINT) from error
    except ValueError as error:
        raise broken_document_error(name, version, str(error)) from error


def broken_document_error(name: str, version: ZarrVersion, why: str) -> PrepError:
    """Return the error for an invalid metadata document."""
    return DamagedError(f"the {version.document} of {name} is broken", why, GET_AGAIN_HINT)


def _parse_v2(name: str, document: JsonObject) -> ZarrArray:
    method = document.get("compressor")
    if isinstance(method, dict):
        method = method.get("id")
    codec_names: tuple[str, ...] = ()
    if method is not None:
        if not isinstance(method, str) or method not in ZARR2_CODECS:
            raise _UnsupportedError(f"is stored compressed with {quote_name(str(method))}")
        codec_names = (ZARR2_CODECS[method].name,)
    if document.get("filters"):
        raise _UnsupportedError("is stored with filters")
    order = document.get("order")
    if order != "C":
        raise _UnsupportedError(f"is stored in order {quote_name(str(order))}")
    separator = document.get("dimension_separator")
    if separator not in (None, ZARR2.chunk_keys.separator):
        raise _UnsupportedError(f"has chunks that are named with {quote_name(str(separator))}")
    typestr = document.get("dtype")
    if isinstance(typestr, str) and typestr.startswith(">"):
        raise _UnsupportedError("is stored big endian")
    dtype = _DTYPES.get(typestr) if isinstance(typestr, str) else None
    shape, chunk_shape = _parse_shapes(document.get("shape"), document.get("chunks"))
    return ZarrArray(
        shape,
        chunk_shape,
        _require_dtype(name, dtype, typestr),
        codec_names,
        None,
        _is_zero(document.get("fill_value")),
        ZARR2.chunk_keys,
    )


def _parse_v3(name: str, document: JsonObject) -> ZarrArray:
    if (document.get("zarr_format"), document.get("node_type")) != (3, "array"):
        raise ValueError("it does not describe an array of zarr 3")
    if document.get("storage_transformers"):
        raise _UnsupportedError("is stored with storage transformers")
    grid_name, grid = _parse_extension(document.get("chunk_grid"), "chunk_grid")
    if grid_name != "regular":
        raise _UnsupportedError(f"has the chunk grid {quote_name(grid_name)}")
    shape, chunk_shape = _parse_shapes(document.get("shape"), grid.get("chunk_shape"))
    stored_dtype = document.get("data_type")
    is_known = isinstance(stored_dtype, str) and stored_dtype in ZARR_TYPESTRS
    dtype = _require_dtype(name, str(stored_dtype) if is_known else None, stored_dtype)
    codecs = _parse_codecs(document.get("codecs"))
    sharding = None
    # With shards, the outer chunk grid counts shards, and the codec states the chunks.
    if codecs and codecs[0][0] == "sharding_indexed":
        if len(codecs) > 1:
            raise _UnsupportedError(f"has shards that are stored with {quote_name(codecs[1][0])}")
        _, settings = codecs[0]
        _, inner_shape = _parse_shapes(list(chunk_shape), settings.get("chunk_shape"))
        if any(extent % chunk_extent for extent, chunk_extent in zip(chunk_shape, inner_shape)):
            raise ValueError(f"chunks {list(inner_shape)} do not divide shards {list(chunk_shape)}")
        index_codecs = _byte_codec_names(_parse_codecs(settings.get("index_codecs")))
        if index_codecs not in ((), (Crc32c.name,)):
            raise _UnsupportedError(
                f"has shards with an index that is stored with {', '.join(index_codecs)}"
            )
        location = settings.get("index_location", "end")
        if location not in ("start", "end"):
            raise ValueError(f"the index of a shard is at its {quote_name(str(location))}")
        chunks_per_shard = tuple(extent // chunk for extent, chunk in zip(chunk_shape, inner_shape))
        sharding = ZarrSharding(
            chunk_shape, chunks_per_shard, bool(index_codecs), location == "end"
        )
        chunk_shape = inner_shape
        codecs = _parse_codecs(settings.get("codecs"))
    kind, key_settings = _parse_extension(document.get("chunk_key_encoding"), "chunk_key_encoding")
    separator = key_settings.get("separator", "/" if kind == "default" else ".")
    if kind not in ("default", "v2") or separator not in ("/", "."):
        encoding = f"{quote_name(kind)} with {quote_name(str(separator))}"
        raise _UnsupportedError(f"has chunks that are named as {encoding}")
    return ZarrArray(
        shape,
        chunk_shape,
        dtype,
        _byte_codec_names(codecs),
        sharding,
        _is_zero(document.get("fill_value")),
        ChunkKeys(kind == "default", str(separator)),
    )


# Name and configuration of an extension object of zarr 3, e.g. of a codec.
_Extension = tuple[str, JsonObject]


def _parse_codecs(value: JsonValue) -> list[_Extension]:
    if not isinstance(value, list):
        raise ValueError("it has no list of codecs")
    return [_parse_extension(codec, "codec") for codec in value]


def _parse_extension(value: JsonValue, what: str) -> _Extension:
    match value:
        case {"name": str(kind), "configuration": dict(settings)}:
            return kind, settings
        case {"name": str(kind)} if "configuration" not in value:
            return kind, {}
        case str(kind):
            return kind, {}
    raise ValueError(f"it has a {what} without a name")


def _byte_codec_names(codecs: Sequence[_Extension]) -> tuple[str, ...]:
    """Return the names of the bytes-to-bytes codecs: at most one compressor, then at most one checksum."""
    if not codecs or codecs[0][0] != "bytes":
        first_codec = "has no zarr codec"
        if codecs:
            first_codec = f"has {quote_name(codecs[0][0])} as its first zarr codec"
        raise _UnsupportedError(f"{first_codec}; an array must begin with the codec `bytes`")
    if codecs[0][1].get("endian", "little") != "little":
        raise _UnsupportedError("is stored big endian")
    names = [codec_name for codec_name, _ in codecs[1:]]
    known = [ZARR3_CODECS[codec_name] for codec_name in names if codec_name in ZARR3_CODECS]
    kinds = [codec.is_checksum for codec in known]
    if len(known) < len(names) or kinds not in ([], [False], [True], [False, True]):
        raise _UnsupportedError(f"is stored with {', '.join(map(quote_name, names))}")
    return tuple(codec.name for codec in known)


def _parse_shapes(shape: Any, chunk_shape: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of an array and of its chunks."""
    are_lists = isinstance(shape, list) and isinstance(chunk_shape, list)
    if are_lists and all(type(n) is int and n >= 0 for n in (*shape, *chunk_shape)):
        has_rank = len(shape) == len(chunk_shape) <= MAX_DIMS
        if has_rank and 0 not in chunk_shape and not math.prod(chunk_shape) >> MAX_CHUNK_BITS:
            return tuple(shape), tuple(chunk_shape)
    needs = (
        f"equal ranks of at most {MAX_DIMS}, and chunks of 1 to 2**{MAX_CHUNK_BITS} - 1 elements"
    )
    shapes = f"shape {shape!s:.100} and chunk shape {chunk_shape!s:.100}"
    raise ValueError(f"{shapes} must be lists of extents with {needs}")


def _require_dtype(name: str, dtype: str | None, stored_dtype: Any) -> str:
    if dtype is None:
        raise PrepError(
            f"{name} is {quote_name(str(stored_dtype))}",
            f"prep supports {', '.join(ZARR_TYPESTRS)}",
            "save it again in one of these dtypes",
        )
    return dtype


def _is_zero(fill_value: Any) -> bool:
    """Return whether a fill value is 0 in all bits. A missing fill value counts as 0."""
    is_number = isinstance(fill_value, int | float)
    return (
        fill_value is None or fill_value is False or (is_number and str(fill_value) in ("0", "0.0"))
    )
