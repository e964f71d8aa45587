"""Documents of zarr arrays, and the registry of codecs."""

from __future__ import annotations

import contextlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from prepcli.formats.codecs import (
    CODECS,
    WRITTEN_CODECS,
    Encoder,
    Gzip,
    WrittenCodec,
    codecs_by,
    parse_compression,
)
from prepcli.formats.orbax_chunks import unplaced_array
from prepcli.formats.zarr import ZARR_TYPESTRS, ZarrArray, encode_zarr_document, parse_zarr_document
from prepcli.planning.item_storage import ZARR2, ZARR3, Compression
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint
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


@pytest.mark.parametrize("count", slow_except((60, 1500), (60,)))
def test_changed_documents_are_rejected_or_parsed(count: int):
    @settings(max_examples=count)
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


@pytest.mark.parametrize(("text", "level"), [("zstd", 1), ("zstd:1", 1), ("zstd:19", 19)])
def test_parse_compression_returns_codec_and_level(text: str, level: int):
    assert parse_compression(text) == Compression("zstd", level)


def test_parse_compression_returns_none_without_a_text():
    assert parse_compression(None) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unknown",
        "gzip",
        "zstd:",
        "zstd:0",
        "zstd:20",
        "zstd:-1",
        "zstd:1e1",
        "zstd:" + "9" * 99,
    ],
)
def test_parse_compression_rejects_invalid_text(text: str):
    with pytest.raises(PrepError, match="is invalid") as caught:
        parse_compression(text)
    assert caught.value.code == 2
    assert "zstd, and zstd:1 to zstd:19" in caught.value.why


@pytest.mark.parametrize("key", ["name", "zarr2_id", "zarr3_name"])
def test_codecs_by_refuses_a_name_twice(key: str):
    class OtherGzip(Gzip):
        """A codec with all names of another one."""

    with pytest.raises(ValueError, match=f"Gzip and OtherGzip have the {key} gzip"):
        codecs_by(key, (*CODECS.values(), OtherGzip))


class WrittenGzip(Gzip, WrittenCodec):
    """A codec that prep writes too."""

    levels = range(1, 10)
    default_level = 6

    @classmethod
    def settings(cls, level: int, zarr_version: int) -> dict[str, object]:
        return {"level": level}

    @classmethod
    def open_encoder(cls, level: int, nbytes: int) -> Encoder:
        return zlib.compressobj(level, wbits=cls.window_bits)

    @classmethod
    def encoder_nbytes(cls, level: int, chunk_nbytes: int) -> int:
        return 1 << 18

    @classmethod
    def max_encoded_nbytes(cls, nbytes: int, num_chunks: int) -> int:
        return nbytes + nbytes // 1000 + 64 * num_chunks


@pytest.mark.parametrize("storage", ["ocdbt", "zarr3-files"])
def test_one_class_adds_a_codec_to_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
):
    """Judge by TensorStore. Its driver of zarr 2 names the settings `id` and `level`, that of zarr 3 `level`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(CODECS, "gzip", WrittenGzip)
    monkeypatch.setitem(WRITTEN_CODECS, "gzip", WrittenGzip)
    table = make_checkpoint(tmp_path / "model", GPT_NEO)["transformer.wte.weight"]
    run_ok("save-init", "./model", "--out", "o", "--compress", "gzip:3", "--storage", storage)
    run_ok("verify", "o", "./model")
    name = "params.embed.tokens"
    driver = "zarr3"
    kvstore = {"driver": "file", "path": f"{tmp_path}/o/{name}/"}
    if storage == "ocdbt":
        driver = "zarr"
        kvstore = {"driver": "ocdbt", "base": f"file://{tmp_path}/o/", "path": f"{name}/"}
    array = tensorstore.open({"driver": driver, "kvstore": kvstore}).result()
    codec = array.codec
    assert codec is not None
    assert "gzip" in str(codec.to_json())
    assert np.array_equal(np.asarray(array.read().result()), table)
