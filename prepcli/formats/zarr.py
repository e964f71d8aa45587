"""Parse the metadata documents of zarr arrays, version 2 (`.zarray`) and 3 (`zarr.json`), as TensorStore writes them.

Unsupported features raise an error with their name. Specifications: https://zarr-specs.readthedocs.io.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.json_types import JsonObject, JsonValue
from prepcli.formats.codecs import COMPRESSORS, CRC32C
from prepcli.formats.orbax import ZARR_TYPESTRS, ZARRAY
from prepcli.formats.untrusted import parse_json, quote_name

ZARR_JSON = "zarr.json"
RESAVE_HINT = (
    "save it again raw, in Python: import orbax.checkpoint as ocp; "
    "ocp.PyTreeCheckpointer(use_compression=False).save(NEW, ocp.PyTreeCheckpointer().restore(OLD))"
)
SUPPORTED_STORAGE = f"prep reads C order, little endian, raw or with {', '.join(COMPRESSORS)}"
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

ChunkIndex = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ZarrSharding:
    """Storage of several chunks in one value (a shard) with an index of their locations."""

    shard_shape: tuple[int, ...]
    has_checksum: bool  # whether a CRC-32C follows the index
    index_is_at_end: bool


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """Parsed metadata document of an array. `missing_is_zero`: whether missing chunks read as zeros."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: str
    codec_names: tuple[str, ...]
    sharding: ZarrSharding | None
    missing_is_zero: bool
    # Key of a chunk, or of a shard, without its prefix `NAME/`.
    chunk_key: Callable[[ChunkIndex], str]

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


def parse_zarr_document(name: str, file_name: str, text: bytes) -> ZarrArray:
    """Parse the metadata document of an array.

    Args:
        name: Quoted name of the array for errors.
        file_name: `.zarray` or `zarr.json`.
        text: Content of the document.

    Raises:
        PrepError: The document is invalid, or the array uses an unsupported feature.
    """
    try:
        document = parse_json(text)
    except ValueError as error:
        raise broken_document_error(name, file_name, str(error)) from error
    if not isinstance(document, dict):
        raise broken_document_error(name, file_name, "it is not a JSON object")
    if file_name == ZARRAY:
        return _parse_v2(name, document)
    return _parse_v3(name, document)


def broken_document_error(name: str, file_name: str, why: str) -> PrepError:
    """Return the error for an invalid metadata document."""
    return DamagedError(f"the {file_name} of {name} is broken", why, GET_AGAIN_HINT)


def _parse_v2(name: str, document: JsonObject) -> ZarrArray:
    """Parse the metadata of an array of zarr 2."""
    compressor, order, separator = (
        document.get(key) for key in ("compressor", "order", "dimension_separator")
    )
    if isinstance(compressor, dict):
        method = compressor.get("id")
    else:
        method = compressor
    if method is not None and method not in COMPRESSORS:
        raise _unsupported_storage_error(
            f"{name} is stored compressed with {quote_name(str(method))}"
        )
    if document.get("filters"):
        raise _unsupported_storage_error(f"{name} is stored with filters")
    if order != "C":
        raise _unsupported_storage_error(f"{name} is stored in order {quote_name(str(order))}")
    if separator not in (None, "."):
        raise _unsupported_storage_error(
            f"the chunks of {name} are named with {quote_name(str(separator))}"
        )
    typestr = document.get("dtype")
    if isinstance(typestr, str) and typestr.startswith(">"):
        raise _unsupported_storage_error(f"{name} is stored big endian")
    if isinstance(typestr, str):
        dtype = _DTYPES.get(typestr)
    else:
        dtype = None
    shape, chunk = _parse_shapes(name, ZARRAY, document.get("shape"), document.get("chunks"))
    if method is not None:
        steps = (str(method),)
    else:
        steps = ()
    zeros = _is_zero(document.get("fill_value"))
    return ZarrArray(
        shape,
        chunk,
        _require_dtype(name, dtype, typestr),
        steps,
        None,
        zeros,
        lambda i: ".".join(map(str, i)) or "0",
    )


def _parse_v3(name: str, document: JsonObject) -> ZarrArray:
    """Parse the metadata of an array of zarr 3."""
    if (document.get("zarr_format"), document.get("node_type")) != (3, "array"):
        raise broken_document_error(name, ZARR_JSON, "it does not describe an array of zarr 3")
    if document.get("storage_transformers"):
        raise _unsupported_storage_error(f"{name} is stored with storage transformers")
    chunk_grid = _parse_named_config(name, document.get("chunk_grid"), "chunk_grid")
    if chunk_grid[0] != "regular":
        raise _unsupported_storage_error(f"{name} has the chunk grid {quote_name(chunk_grid[0])}")
    shape, chunk = _parse_shapes(
        name, ZARR_JSON, document.get("shape"), chunk_grid[1].get("chunk_shape")
    )
    dtype = document.get("data_type")
    prep_dtype = _require_dtype(
        name, dtype if isinstance(dtype, str) and dtype in ZARR_TYPESTRS else None, dtype
    )
    codecs = _parse_codecs(name, document.get("codecs"))
    shards = None
    # With shards, the outer chunk grid counts shards, and the codec states the chunks.
    if codecs and codecs[0][0] == "sharding_indexed":
        if len(codecs) > 1:
            raise _unsupported_storage_error(
                f"the shards of {name} are stored with {quote_name(codecs[1][0])}"
            )
        inner_chunk_shape, shards = _parse_sharding(name, chunk, codecs[0][1])
        chunk = inner_chunk_shape
        codecs = _parse_codecs(name, codecs[0][1].get("codecs"))
    zeros = _is_zero(document.get("fill_value"))
    return ZarrArray(
        shape,
        chunk,
        prep_dtype,
        _byte_codec_names(name, codecs),
        shards,
        zeros,
        _make_chunk_key(name, document),
    )


def _parse_sharding(
    name: str, shape: tuple[int, ...], settings: JsonObject
) -> tuple[tuple[int, ...], ZarrSharding]:
    """Return the chunk shape within a shard of `shape`, and the storage of shards."""
    shard_shape, chunk_shape = _parse_shapes(
        name, ZARR_JSON, list(shape), settings.get("chunk_shape")
    )
    if any(
        shard_extent % chunk_extent for shard_extent, chunk_extent in zip(shard_shape, chunk_shape)
    ):
        raise broken_document_error(
            name, ZARR_JSON, f"chunks {list(chunk_shape)} do not divide shards {list(shard_shape)}"
        )
    index_codecs = _byte_codec_names(name, _parse_codecs(name, settings.get("index_codecs")))
    if index_codecs not in ((), (CRC32C,)):
        raise _unsupported_storage_error(
            f"the shards of {name} have an index that is stored with {', '.join(index_codecs)}"
        )
    location = settings.get("index_location", "end")
    if location not in ("start", "end"):
        raise broken_document_error(
            name, ZARR_JSON, f"the index of a shard is at its {quote_name(str(location))}"
        )
    return chunk_shape, ZarrSharding(shard_shape, bool(index_codecs), location == "end")


_Codec = tuple[str, JsonObject]


def _parse_codecs(name: str, value: JsonValue) -> list[_Codec]:
    if not isinstance(value, list):
        raise broken_document_error(name, ZARR_JSON, "it has no list of codecs")
    return [_parse_named_config(name, codec, "codec") for codec in value]


def _parse_named_config(name: str, value: JsonValue, what: str) -> _Codec:
    """Return name and configuration of a zarr v3 extension object."""
    match value:
        case {"name": str(kind), "configuration": dict(settings)}:
            return kind, settings
        case {"name": str(kind)} if "configuration" not in value:
            return kind, {}
        case str(kind):
            return kind, {}
    raise broken_document_error(name, ZARR_JSON, f"it has a {what} without a name")


def _byte_codec_names(name: str, codecs: Sequence[_Codec]) -> tuple[str, ...]:
    """Return the names of the bytes-to-bytes codecs: at most one compressor, then at most one checksum."""
    if not codecs or codecs[0][0] != "bytes":
        if codecs:
            first_codec = f"has {quote_name(codecs[0][0])} as its first zarr codec"
        else:
            first_codec = "has no zarr codec"
        raise _unsupported_storage_error(
            f"{name} {first_codec}; an array must begin with the codec `bytes`"
        )
    if codecs[0][1].get("endian", "little") != "little":
        raise _unsupported_storage_error(f"{name} is stored big endian")
    names = tuple(codec_name for codec_name, _ in codecs[1:])
    if names[:1] and names[0] in ("zstd", "gzip"):
        compressor = names[:1]
    else:
        compressor = ()
    if names not in (compressor, (*compressor, CRC32C)):
        raise _unsupported_storage_error(
            f"{name} is stored with {', '.join(map(quote_name, names))}"
        )
    return names


def _make_chunk_key(name: str, document: JsonObject) -> Callable[[ChunkIndex], str]:
    kind, settings = _parse_named_config(
        name, document.get("chunk_key_encoding"), "chunk_key_encoding"
    )
    separator = settings.get("separator", "/" if kind == "default" else ".")
    if kind not in ("default", "v2") or separator not in ("/", "."):
        raise _unsupported_storage_error(
            f"the chunks of {name} are named as {quote_name(kind)} with {quote_name(str(separator))}"
        )
    if kind == "v2":
        return lambda index: separator.join(map(str, index)) or "0"
    return lambda index: separator.join(("c", *map(str, index)))


def _parse_shapes(
    name: str, file_name: str, shape: Any, chunk_shape: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape_extents = _parse_shape(shape)
    chunk_extents = _parse_shape(chunk_shape)
    if (
        shape_extents is None
        or chunk_extents is None
        or len(shape_extents) != len(chunk_extents)
        or 0 in chunk_extents
        or len(shape_extents) > MAX_DIMS
        or math.prod(chunk_extents) >> MAX_CHUNK_BITS
    ):
        needs = f"equal ranks of at most {MAX_DIMS}, and chunks of 1 to 2**{MAX_CHUNK_BITS} - 1 elements"
        shapes = f"shape {shape!s:.100} and chunk shape {chunk_shape!s:.100}"
        raise broken_document_error(
            name, file_name, f"{shapes} must be lists of extents with {needs}"
        )
    return shape_extents, chunk_extents


def _parse_shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(n) is int and n >= 0 for n in value):
        return tuple(value)
    return None


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
    return (
        fill_value is None
        or fill_value is False
        or (isinstance(fill_value, int | float) and str(fill_value) in ("0", "0.0"))
    )


def _unsupported_storage_error(what: str) -> PrepError:
    return PrepError(what, SUPPORTED_STORAGE, RESAVE_HINT)
