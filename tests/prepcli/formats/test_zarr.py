"""Tests of parsing zarr metadata documents, and of rejecting unsupported ones by name."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import tensorstore
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from prepcli.formats.orbax_chunks import unplaced_array
from prepcli.formats.zarr import ZARR_TYPESTRS, ZarrArray, encode_zarr_document, parse_zarr_document
from prepcli.planning.item_storage import ZARR2, ZARR3, Compression
from tests.helpers.slow_cases import slow_except
from tests.helpers.zarr_items import StorageForm, document

META = unplaced_array(("w",), (4, 6), "float32", (2, 3))
SHARDED = StorageForm(zarr3=True, chunks_per_shard=2, codec_names=("zstd", "crc32c"))


def version_2(**changes: Any) -> ZarrArray:
    return parse_zarr_document(
        "w", ZARR2, json.dumps(document(META, StorageForm()) | changes).encode()
    )


def version_3(form: StorageForm = SHARDED, **changes: Any) -> ZarrArray:
    return parse_zarr_document("w", ZARR3, json.dumps(document(META, form) | changes).encode())


def codec(name: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "configuration": settings}


BYTES = codec("bytes", endian="little")


def sharding(**changes: Any) -> list[dict[str, Any]]:
    return [
        codec(
            "sharding_indexed",
            **{"chunk_shape": [2, 3], "codecs": [BYTES], "index_codecs": [BYTES], **changes},
        )
    ]


def test_parse_v3_reads_the_sharding_codec():
    array = version_3()
    assert (array.shape, array.chunk_shape, array.dtype, array.codec_names) == (
        (4, 6),
        (2, 3),
        "float32",
        ("zstd", "crc32c"),
    )
    assert (array.stored_chunk_shape, array.stored_grid, array.missing_is_zero) == (
        (4, 6),
        (1, 1),
        True,
    )
    assert array.chunk_keys.key((3, 1)) == "c/3/1"


def test_chunks_have_less_than_2_to_48_elements():
    largest = [1 << 24, (1 << 24) - 1]
    assert version_2(chunks=largest).chunk_shape == tuple(largest)
    with pytest.raises(PrepError, match=r"chunks of 1 to 2\*\*48 - 1 elements"):
        version_2(chunks=[1 << 24, 1 << 24])


@pytest.mark.parametrize(
    ("encoding", "keys"),
    [
        ({"name": "default"}, ["c/1/2", "c"]),
        (codec("default", separator="."), ["c.1.2", "c"]),
        ({"name": "v2"}, ["1.2", "0"]),
        (codec("v2", separator="/"), ["1/2", "0"]),
    ],
)
def test_chunk_key_follows_its_encoding(encoding: dict[str, Any], keys: list[str]):
    key = version_3(chunk_key_encoding=encoding).chunk_keys.key
    assert [key((1, 2)), key(())] == keys


@pytest.mark.parametrize(
    ("fill", "is_zero"),
    [
        (None, True),
        (0, True),
        (0.0, True),
        (False, True),
        (1, False),
        (-0.0, False),
        ("0x0", False),
        (True, False),
    ],
)
def test_missing_is_zero_follows_fill_value(fill: Any, is_zero: bool):
    assert version_2(fill_value=fill).missing_is_zero == is_zero
    assert version_3(fill_value=fill).missing_is_zero == is_zero


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"zarr_format": 2}, "the zarr.json of w is broken"),
        ({"node_type": "group"}, "the zarr.json of w is broken"),
        ({"shape": [4]}, "the zarr.json of w is broken"),
        ({"chunk_grid": codec("regular", chunk_shape=[0, 3])}, "the zarr.json of w is broken"),
        (
            {"chunk_grid": codec("regular", chunk_shape=[1 << 30, 1 << 30])},
            "the zarr.json of w is broken",
        ),
        (
            {"shape": [1] * 40, "chunk_grid": codec("regular", chunk_shape=[1] * 40)},
            "the zarr.json of w is broken",
        ),
        ({"chunk_grid": codec("rectilinear")}, "w has the chunk grid `rectilinear`"),
        ({"chunk_grid": 3}, "the zarr.json of w is broken"),
        ({"data_type": "int2"}, "w is `int2`"),
        ({"data_type": {"name": "structured"}}, "w is `{'name': 'structured'}`"),
        ({"storage_transformers": [1]}, "w is stored with storage transformers"),
        (
            {"chunk_key_encoding": codec("default", separator="-")},
            "w has chunks that are named as `default` with `-`",
        ),
        (
            {"chunk_key_encoding": {"name": "base64"}},
            "w has chunks that are named as `base64` with `.`",
        ),
        ({"codecs": []}, "w has no zarr codec; an array must begin with the codec `bytes`"),
        ({"codecs": 3}, "the zarr.json of w is broken"),
        ({"codecs": [{}]}, "the zarr.json of w is broken"),
        ({"codecs": [codec("bytes", endian="big")]}, "w is stored big endian"),
        (
            {"codecs": [codec("transpose", order=[1, 0]), BYTES]},
            "w has `transpose` as its first zarr codec; an array must begin with the codec `bytes`",
        ),
        ({"codecs": [BYTES, codec("blosc")]}, "w is stored with `blosc`"),
        ({"codecs": [BYTES, codec("zlib")]}, "w is stored with `zlib`"),
        ({"codecs": [BYTES, codec("crc32c"), codec("zstd")]}, "w is stored with `crc32c`, `zstd`"),
        ({"codecs": [BYTES, codec("zstd"), codec("zstd")]}, "w is stored with `zstd`, `zstd`"),
        ({"codecs": [*sharding(), codec("zstd")]}, "w has shards that are stored with `zstd`"),
        (
            {"codecs": sharding(codecs=sharding())},
            "w has `sharding_indexed` as its first zarr codec; an array must begin with the codec `bytes`",
        ),
        ({"codecs": sharding(chunk_shape=[3, 3])}, "the zarr.json of w is broken"),
        ({"codecs": sharding(chunk_shape=[2])}, "the zarr.json of w is broken"),
        ({"codecs": sharding(index_location="middle")}, "the zarr.json of w is broken"),
        (
            {"codecs": sharding(index_codecs=[BYTES, codec("gzip")])},
            "w has shards with an index that is stored with gzip",
        ),
    ],
)
def test_unsupported_v3_documents_are_rejected(changes: dict[str, Any], what: str):
    with pytest.raises(PrepError) as caught:
        version_3(**changes)
    assert caught.value.what == what


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 1 << 70), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=6,
)
WORDS = st.sampled_from(
    ["zstd", "bytes", "crc32c", "sharding_indexed", "gzip", "default", "v2", "regular", "/", "."]
)


def spots(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a document."""
    inside = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    return [path, *(spot for key, value in inside for spot in spots(value, (*path, key)))]


def replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copied = dict(document) if isinstance(document, dict) else list(document)
    copied[path[0]] = replaced(document[path[0]], path[1:], value)
    return copied


@pytest.mark.parametrize("count", slow_except((150, 1500), (150,)))
def test_changed_documents_are_rejected_or_parsed(count: int):
    @settings(max_examples=count, deadline=None)
    @given(
        data=st.data(),
        form=st.sampled_from(
            [StorageForm(codec_names=("zstd",)), SHARDED, StorageForm(zarr3=True)]
        ),
    )
    def check(data: st.DataObject, form: StorageForm):
        changed = json.loads(json.dumps(document(META, form)))
        for _ in range(data.draw(st.integers(1, 3))):
            spot = data.draw(st.sampled_from(spots(changed)))
            changed = replaced(
                changed, spot, data.draw(st.one_of(JSON, WORDS, st.just([1, 2]), st.just([BYTES])))
            )
        with contextlib.suppress(PrepError):
            array = parse_zarr_document(
                "w", ZARR3 if form.zarr3 else ZARR2, json.dumps(changed).encode()
            )
            assert len(array.shape) == len(array.chunk_shape) == len(array.stored_grid)
            assert all(n > 0 for n in array.chunk_shape)
            assert array.chunk_keys.key((0,) * len(array.shape))

    check()


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
