"""Write the metadata documents of zarr arrays, byte for byte as TensorStore writes them."""

from __future__ import annotations

import json

from prepcli.formats.orbax import ZARR_TYPESTRS, ArrayMeta
from prepcli.planning.tensors import ITEM_BITS


def encode_zarray(meta: ArrayMeta, zstd_level: int | None = None) -> bytes:
    """Return the `.zarray` document of an array of zarr 2."""
    # The keys are in TensorStore's order, which is the alphabetical one.
    compressor = None
    if zstd_level is not None:
        compressor = {"id": "zstd", "level": zstd_level}
    document = {
        "chunks": meta.chunk_shape,
        "compressor": compressor,
        "dimension_separator": ".",
        "dtype": ZARR_TYPESTRS[meta.dtype],
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": meta.shape,
        "zarr_format": 2,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def encode_zarr_json(meta: ArrayMeta, zstd_level: int | None = None) -> bytes:
    """Return the `zarr.json` document of an array of zarr 3."""
    codecs: list[dict[str, object]] = [{"name": "bytes"}]
    # Elements of one byte have no byte order.
    if ITEM_BITS[meta.dtype] > 8:
        codecs = [{"configuration": {"endian": "little"}, "name": "bytes"}]
    if zstd_level is not None:
        settings = {"checksum": False, "level": zstd_level}
        codecs.append({"configuration": settings, "name": "zstd"})
    document = {
        "chunk_grid": {"configuration": {"chunk_shape": meta.chunk_shape}, "name": "regular"},
        "chunk_key_encoding": {"name": "default"},
        "codecs": codecs,
        "data_type": meta.dtype,
        "fill_value": _zero(meta.dtype),
        "node_type": "array",
        "shape": meta.shape,
        "zarr_format": 3,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _zero(dtype: str) -> object:
    """Return the fill value. Zarr 3 requires one, and no chunk is missing."""
    if dtype == "bool":
        return False
    if "int" in dtype:
        return 0
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    return 0.0
