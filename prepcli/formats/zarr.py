"""Documents that describe zarr arrays, of version 2 (`.zarray`) and 3 (`zarr.json`), as TensorStore writes them.

What prep cannot carry is refused by its name: nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prepcli.errors import PrepError
from prepcli.formats.codecs import COMPRESSORS, CRC32C
from prepcli.formats.orbax import ZARR_TYPESTRS
from prepcli.formats.untrusted import parse_json, quote_name

ZARRAY, ZARR_JSON = ".zarray", "zarr.json"
RESAVE_HINT = (
    "save it again raw, in Python: import orbax.checkpoint as ocp; "
    "ocp.PyTreeCheckpointer(use_compression=False).save(NEW, ocp.PyTreeCheckpointer().restore(OLD))"
)
SUPPORTED_STORAGE = f"prep reads C order, little endian, raw or with {', '.join(COMPRESSORS)}"
_DTYPES = {typestr: dtype for dtype, typestr in ZARR_TYPESTRS.items()} | {"<i1": "int8", "<u1": "uint8", "<b1": "bool"}
MAX_DIMS, MAX_CHUNK_BITS = 32, 48  # TensorStore's own rank; elements of a chunk, far above any

ChunkIndex = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ZarrSharding:
    """Stored values that hold several chunks each and a table of where they lie."""

    shard_shape: tuple[int, ...]
    has_checksum: bool  # whether a CRC-32C follows the table
    index_is_at_end: bool


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """An array as its document has it; `steps` are those of `codecs`, `zeros`: missing chunks stand for zeros."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: str
    codec_names: tuple[str, ...]
    sharding: ZarrSharding | None
    missing_is_zero: bool
    chunk_key: Callable[
        [ChunkIndex], str
    ]  # what follows `NAME/` in the key of a chunk, or of a shard where there are such

    @property
    def stored_chunk_shape(self) -> tuple[int, ...]:
        """Extents of what one key stands for."""
        return self.sharding.shard_shape if self.sharding else self.chunk_shape

    @property
    def stored_grid(self) -> tuple[int, ...]:
        """Keys along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.stored_chunk_shape))


def parse_zarr_document(name: str, file_name: str, text: bytes) -> ZarrArray:
    """The array `name` by the text of its document. PrepError for what is broken, and for what prep cannot carry."""
    try:
        document = parse_json(text)
    except ValueError as error:
        raise broken_document_error(name, file_name, str(error)) from error
    if not isinstance(document, dict):
        raise broken_document_error(name, file_name, "it is not a JSON object")
    return _version_2(name, document) if file_name == ZARRAY else _version_3(name, document)


def broken_document_error(name: str, file_name: str, why: str) -> PrepError:
    """The error for a document that makes no sense."""
    return PrepError(f"the {file_name} of {name} is broken", why)


def _version_2(name: str, document: Mapping[str, Any]) -> ZarrArray:
    compressor, order, separator = (document.get(key) for key in ("compressor", "order", "dimension_separator"))
    method = compressor.get("id") if isinstance(compressor, dict) else compressor
    if method is not None and method not in COMPRESSORS:
        raise _unread(f"{name} is stored compressed with {quote_name(str(method))}")
    if document.get("filters"):
        raise _unread(f"{name} is stored with filters")
    if order != "C":
        raise _unread(f"{name} is stored in order {quote_name(str(order))}")
    if separator not in (None, "."):
        raise _unread(f"the chunks of {name} are named with {quote_name(str(separator))}")
    typestr = document.get("dtype")
    if isinstance(typestr, str) and typestr.startswith(">"):
        raise _unread(f"{name} is stored big endian")
    dtype = _DTYPES.get(typestr) if isinstance(typestr, str) else None
    shape, chunk = _shape_and_chunk(name, ZARRAY, document.get("shape"), document.get("chunks"))
    steps = (str(method),) if method is not None else ()
    zeros = _is_zero(document.get("fill_value"))
    return ZarrArray(
        shape, chunk, _carried(name, dtype, typestr), steps, None, zeros, lambda i: ".".join(map(str, i)) or "0"
    )


def _version_3(name: str, document: Mapping[str, Any]) -> ZarrArray:
    if (document.get("zarr_format"), document.get("node_type")) != (3, "array"):
        raise broken_document_error(name, ZARR_JSON, "it does not describe an array of zarr 3")
    if document.get("storage_transformers"):
        raise _unread(f"{name} is stored with storage transformers")
    grid = _named(name, document.get("chunk_grid"), "chunk_grid")
    if grid[0] != "regular":
        raise _unread(f"{name} is cut into the grid {quote_name(grid[0])}")
    shape, chunk = _shape_and_chunk(name, ZARR_JSON, document.get("shape"), grid[1].get("chunk_shape"))
    dtype = document.get("data_type")
    carried = _carried(name, dtype if isinstance(dtype, str) and dtype in ZARR_TYPESTRS else None, dtype)
    codecs = _codecs(name, document.get("codecs"))
    shards = None
    if codecs and codecs[0][0] == "sharding_indexed":
        if len(codecs) > 1:
            raise _unread(f"the shards of {name} are stored with {quote_name(codecs[1][0])}")
        inner, shards = _shards(name, chunk, codecs[0][1])
        chunk, codecs = inner, _codecs(name, codecs[0][1].get("codecs"))
    zeros = _is_zero(document.get("fill_value"))
    return ZarrArray(shape, chunk, carried, _steps(name, codecs), shards, zeros, _keys(name, document))


def _shards(name: str, shape: tuple[int, ...], settings: Mapping[str, Any]) -> tuple[tuple[int, ...], ZarrSharding]:
    """The chunk within a shard of `shape`, and how shards are stored."""
    outer, inner = _shape_and_chunk(name, ZARR_JSON, list(shape), settings.get("chunk_shape"))
    if any(whole % part for whole, part in zip(outer, inner)):
        raise broken_document_error(name, ZARR_JSON, f"chunks {list(inner)} do not divide shards {list(outer)}")
    steps = _steps(name, _codecs(name, settings.get("index_codecs")))
    if steps not in ((), (CRC32C,)):
        raise _unread(f"the shards of {name} have an index that is stored with {', '.join(steps)}")
    location = settings.get("index_location", "end")
    if location not in ("start", "end"):
        raise broken_document_error(name, ZARR_JSON, f"the index of a shard is at its {quote_name(str(location))}")
    return inner, ZarrSharding(outer, bool(steps), location == "end")


_Codec = tuple[str, Mapping[str, Any]]


def _codecs(name: str, found: Any) -> list[_Codec]:
    if not isinstance(found, list):
        raise broken_document_error(name, ZARR_JSON, "it has no list of codecs")
    return [_named(name, each, "codec") for each in found]


def _named(name: str, found: Any, what: str) -> _Codec:
    """Name and settings of what zarr 3 calls a named configuration."""
    match found:
        case {"name": str(kind)} if isinstance(found.get("configuration", {}), dict):
            return kind, found.get("configuration", {})
        case str(kind):
            return kind, {}
    raise broken_document_error(name, ZARR_JSON, f"it has a {what} without a name")


def _steps(name: str, codecs: Sequence[_Codec]) -> tuple[str, ...]:
    """Steps after the elements became bytes: one compressor at most, then a checksum at most."""
    if not codecs or codecs[0][0] != "bytes":
        raise _unread(f"{name} is stored with {quote_name(codecs[0][0]) if codecs else 'no codec'} in place of `bytes`")
    if codecs[0][1].get("endian", "little") != "little":
        raise _unread(f"{name} is stored big endian")
    steps = tuple(kind for kind, _ in codecs[1:])
    compressor = steps[:1] if steps[:1] and steps[0] in ("zstd", "gzip") else ()
    if steps not in (compressor, (*compressor, CRC32C)):
        raise _unread(f"{name} is stored with {', '.join(map(quote_name, steps))}")
    return steps


def _keys(name: str, document: Mapping[str, Any]) -> Callable[[ChunkIndex], str]:
    kind, settings = _named(name, document.get("chunk_key_encoding"), "chunk_key_encoding")
    separator = settings.get("separator", "/" if kind == "default" else ".")
    if kind not in ("default", "v2") or separator not in ("/", "."):
        raise _unread(f"the chunks of {name} are named as {quote_name(kind)} with {quote_name(str(separator))}")
    if kind == "v2":
        return lambda index: separator.join(map(str, index)) or "0"
    return lambda index: separator.join(("c", *map(str, index)))


def _shape_and_chunk(name: str, file: str, shape: Any, chunk: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    a, b = _extents(shape), _extents(chunk)
    if a is None or b is None or len(a) != len(b) or 0 in b or len(a) > MAX_DIMS or math.prod(b) >> MAX_CHUNK_BITS:
        raise broken_document_error(name, file, f"shape {shape!s:.100}, chunks {chunk!s:.100}")
    return a, b


def _extents(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(n) is int and n >= 0 for n in value):
        return tuple(value)
    return None


def _carried(name: str, dtype: str | None, spelled: Any) -> str:
    if dtype is None:
        raise PrepError(f"{name} is {quote_name(str(spelled))}", f"prep carries {', '.join(ZARR_TYPESTRS)}")
    return dtype


def _is_zero(fill: Any) -> bool:
    """Whether a fill value is 0 in all its bits; none is."""
    return fill is None or fill is False or (isinstance(fill, int | float) and str(fill) in ("0", "0.0"))


def _unread(what: str) -> PrepError:
    return PrepError(what, SUPPORTED_STORAGE, RESAVE_HINT)
