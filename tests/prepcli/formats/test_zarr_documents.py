"""Metadata documents of zarr arrays, compared with those that TensorStore writes."""

from __future__ import annotations

from typing import Any

import pytest
import tensorstore

from prepcli.formats.zarr import ZARR_TYPESTRS, encode_zarr_document
from prepcli.planning.item_storage import ZARR2, ZARR3, Compression

FORMS = [((), ()), ((5,), (2,)), ((0, 3), (1, 3)), ((4, 6, 2), (4, 3, 1))]
COMPRESSIONS = [None, Compression("zstd", 3)]


def tensorstore_document(
    driver: str, document: str, metadata: dict[str, Any], **spec: Any
) -> bytes:
    """Return the document that TensorStore writes for an array."""
    spec |= {"driver": driver, "kvstore": "memory://", "metadata": metadata}
    kvstore = tensorstore.open(spec, create=True).result().kvstore
    assert kvstore is not None
    return kvstore[document]


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
@pytest.mark.parametrize("dtype", ZARR_TYPESTRS)
@pytest.mark.parametrize(("shape", "chunk"), FORMS)
def test_zarray_equals_the_document_of_tensorstore(
    shape: Any, chunk: Any, dtype: str, compression: Compression | None
):
    compressor = None if compression is None else {"id": "zstd", "level": 3}
    metadata = {"shape": shape, "chunks": chunk, "compressor": compressor}
    expected = tensorstore_document("zarr", ".zarray", metadata, dtype=dtype)
    assert encode_zarr_document(ZARR2, shape, dtype, chunk, compression) == expected


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
@pytest.mark.parametrize("dtype", ZARR_TYPESTRS)
def test_zarr_json_equals_the_document_of_tensorstore(dtype: str, compression: Compression | None):
    codecs: list[dict[str, Any]] = [{"name": "bytes"}]
    if compression is not None:
        codecs.append({"name": "zstd", "configuration": {"level": 3}})
    grid = {"name": "regular", "configuration": {"chunk_shape": [2, 3]}}
    metadata = {"shape": [4, 3], "chunk_grid": grid, "data_type": dtype, "codecs": codecs}
    expected = tensorstore_document("zarr3", "zarr.json", metadata)
    assert encode_zarr_document(ZARR3, (4, 3), dtype, (2, 3), compression) == expected
