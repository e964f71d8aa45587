"""Metadata documents of zarr arrays, compared with those that TensorStore writes."""

from __future__ import annotations

import json

import pytest
import tensorstore

from prepcli.formats.orbax import ZARR_TYPESTRS, ArrayMeta
from prepcli.formats.zarr_documents import encode_zarr_json

CODECS = {None: [], 3: [{"name": "zstd", "configuration": {"level": 3}}]}


@pytest.mark.parametrize("level", CODECS)
@pytest.mark.parametrize("dtype", ZARR_TYPESTRS)
def test_encode_zarr_json_equals_the_document_of_tensorstore(dtype: str, level: int | None):
    document = encode_zarr_json(ArrayMeta(("a",), (4, 3), dtype, (2, 3)), level)
    grid = {"name": "regular", "configuration": {"chunk_shape": [2, 3]}}
    metadata = {"shape": [4, 3], "chunk_grid": grid, "data_type": dtype}
    metadata["codecs"] = [{"name": "bytes"}, *CODECS[level]]
    spec = {"driver": "zarr3", "kvstore": "memory://", "metadata": metadata}
    kvstore = tensorstore.open(spec, create=True).result().kvstore
    assert kvstore is not None
    assert document == kvstore.read(b"zarr.json").result().value
    assert json.loads(document)["data_type"] == dtype
