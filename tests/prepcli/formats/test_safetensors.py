"""Tests of reading safetensors headers, compared with the safetensors library."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from prepcli.core.errors import FAILED, PrepError
from prepcli.formats.model_files import FileHeader
from prepcli.formats.safetensors import DTYPES, read_safetensors_header
from prepcli.planning.tensors import ITEM_BITS, array_bits

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def packed(header: object, payload: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def read(folder: Path, content: bytes) -> FileHeader:
    path = folder / "x.safetensors"
    path.write_bytes(content)
    return read_safetensors_header(path, 0)


def refusal(folder: Path, content: bytes) -> PrepError:
    with pytest.raises(PrepError) as caught:
        read(folder, content)
    return caught.value


def library_accepts(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return False
    return True


def as_read(header: FileHeader, content: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    return {
        t.name: (t.dtype, list(t.shape), content[t.offset : t.offset + t.nbytes])
        for t in header.tensors
    }


def as_library_reads(content: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    return {
        name: (DTYPES[tensor["dtype"]], tensor["shape"], bytes(tensor["data"]))
        for name, tensor in safetensors.deserialize(content)
    }


def test_read_header_supports_every_dtype(tmp_path: Path) -> None:
    # The format has no int4.
    assert sorted(DTYPES.values()) == sorted({*ITEM_BITS} - {"int4"})
    header, offset = {}, 0
    for code, dtype in DTYPES.items():
        nbytes = array_bits(dtype, (3, 8)) // 8
        header[code] = {"dtype": code, "shape": [3, 8], "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    content = packed(header, bytes(i % 251 for i in range(offset)))
    assert as_read(read(tmp_path, content), content) == as_library_reads(content)


def test_read_header_matches_library_on_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(5, dtype=np.int64),
        "c": np.array(True),
    }
    save_file(arrays, path, {"format": "pt", "by": "me"})
    header, content = read_safetensors_header(path, 7), path.read_bytes()
    assert as_read(header, content) == as_library_reads(content)
    assert dict(header.metadata) == {"format": "pt", "by": "me"}
    assert [t.offset for t in header.tensors] == sorted(t.offset for t in header.tensors)
    assert {t.file for t in header.tensors} == {7}
    assert (header.file_name, header.size) == ("model.safetensors", len(content))
    data_start = 8 + int.from_bytes(content[:8], "little")
    assert header.tensors[0].offset == data_start
    assert header.digest == xxhash.xxh3_128_hexdigest(content[:data_start])
    assert header.mtime_ns == path.stat().st_mtime_ns


def test_header_digest_covers_header_without_payload(tmp_path: Path) -> None:
    first = read(tmp_path, packed({"a": ENTRY}, bytes(8)))
    other_payload = read(tmp_path, packed({"a": ENTRY}, bytes(range(8))))
    other_padding = read(tmp_path, packed(json.dumps({"a": ENTRY}).encode() + b" ", bytes(8)))
    assert first.digest == other_payload.digest != other_padding.digest


def test_read_header_follows_links(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(packed({"a": ENTRY}, bytes(8)))
    (tmp_path / "model.safetensors").symlink_to("blob")
    header = read_safetensors_header(tmp_path / "model.safetensors", 0)
    assert (header.file_name, len(header.tensors)) == ("model.safetensors", 1)


ACCEPTED = {
    "no tensors": packed({}),
    "spaces around": packed(b" \n\t{ \r\n} "),
    "only metadata": packed({"__metadata__": {"format": "pt"}}),
    "no metadata": packed({"a": ENTRY}, bytes(8)),
    "null as metadata": packed({"__metadata__": None, "a": ENTRY}, bytes(8)),
    "null as metadata at the end": packed(b'{"__metadata__" : null }'),
    "not in the order of offsets": packed(
        {"b": {**ENTRY, "data_offsets": [8, 16]}, "a": ENTRY}, bytes(16)
    ),
    "empty tensor": packed(
        {"a": {**ENTRY, "shape": [0, 3], "data_offsets": [0, 0]}, "b": ENTRY}, bytes(8)
    ),
    "empty tensor between": packed(
        {
            "b": {**ENTRY, "data_offsets": [8, 16]},
            "e": {**ENTRY, "shape": [0], "data_offsets": [8, 8]},
            "a": ENTRY,
        },
        bytes(16),
    ),
    "scalar": packed({"a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}}, b"x"),
    "packed": packed({"a": {"dtype": "F6_E2M3", "shape": [2, 2], "data_offsets": [0, 3]}}, b"abc"),
    "braces and quotes in a name": packed({'{"}, ü \n\\': ENTRY}, bytes(8)),
    "escaped fields": packed(
        b'{"\\u0061":{"d\\u0074ype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)
    ),
}


@pytest.mark.parametrize("content", ACCEPTED.values(), ids=ACCEPTED)
def test_read_header_accepts_unusual_valid_headers(tmp_path: Path, content: bytes) -> None:
    assert as_read(read(tmp_path, content), content) == as_library_reads(content)


def entry(**changes: object) -> bytes:
    return packed({"a": {**ENTRY, **changes}}, bytes(8))


DIGITS = b"9" * 1_000_000
BROKEN = {
    "not JSON": (packed(b"garbage!"), "not a JSON object"),
    "a list": (packed(b"[1, 2]"), "not a JSON object"),
    "cut JSON": (packed(b'{"a":{"dtype":"F32"'), "byte 9 is not the entry"),
    "trailing comma": (packed(b'{"__metadata__":{},}'), "byte 27 is not the entry"),
    "text after the end": (packed(b'{"__metadata__":{}} x'), "text follows its end at byte 27"),
    "byte order mark": (packed(b"\xef\xbb\xbf{}"), "not a JSON object"),
    "not UTF-8": (packed(b'{"\xff":{}}'), "not UTF-8"),
    "UTF-16": (packed("{}".encode("utf-16")), "not a JSON object"),
    "half a surrogate pair as name": (packed(b'{"\\ud800":{}}'), "not UTF-8"),
    "half a surrogate pair in metadata": (
        packed(b'{"__metadata__":{"a":"\\ud800"}}'),
        "surrogates not allowed",
    ),
    "control character in a name": (
        packed(b'{"a\x01":{}}'),
        "JSON is broken: Invalid control character",
    ),
    "NaN": (packed(b'{"a":{"dtype":NaN}}'), "NaN is not JSON"),
    "metadata that is no object": (packed({"__metadata__": "pt"}), "byte 9 is not the entry"),
    "metadata that is a float": (
        packed({"__metadata__": {"a": 0.5}}),
        "__metadata__ must hold only text",
    ),
    "metadata that is no text": (
        packed({"__metadata__": {"a": 1}}),
        "__metadata__ must hold only text",
    ),
    "nested metadata": (packed({"__metadata__": {"a": {}}}), "byte 9 is not the entry"),
    "entry that is no object": (packed({"a": [1]}), "byte 9 is not the entry"),
    "missing field": (
        packed({"a": {"dtype": "F32", "shape": [2]}}),
        "`a` must have dtype, shape and data_offsets",
    ),
    "unknown field": (
        entry(strides=[1]),
        "`a` must have dtype, shape and data_offsets, nothing else",
    ),
    "unknown dtype": (entry(dtype="F8"), "the dtype of `a` is not one of BOOL, U8"),
    "dtype that is no text": (entry(dtype=["F32"]), "the dtype of `a` is not one of"),
    "shape that is no list": (entry(shape=2), "shape or data_offsets of `a`"),
    "float in shape": (entry(shape=[2.0]), "shape or data_offsets of `a`"),
    "bool in shape": (entry(shape=[2, True]), "shape or data_offsets of `a`"),
    "negative in shape": (entry(shape=[-1, -2]), "shape or data_offsets of `a`"),
    "minus zero": (
        packed(b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'),
        "shape or data_offsets of `a`",
    ),
    "text in shape": (entry(shape=["2"]), "shape or data_offsets of `a`"),
    "more dims than NumPy has": (entry(shape=[1] * 63 + [1, 2]), "shape or data_offsets of `a`"),
    "number past 2^63": (
        entry(shape=[2**63, 0], data_offsets=[0, 0]),
        "shape or data_offsets of `a`",
    ),
    "endless number": (
        packed(b'{"a":{"dtype":"F32","shape":[' + DIGITS + b"]}}"),
        "must have dtype",
    ),
    "endless number as offset": (
        packed(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,' + DIGITS + b"]}}"),
        "shape or data_offsets of `a`",
    ),
    "overflowing shape": (entry(shape=[2**40, 2**40]), "2^63 bits or more"),
    "overflowing shape of nothing": (
        entry(shape=[2**40, 2**40, 0], data_offsets=[0, 0]),
        "2^63 bits or more",
    ),
    "one offset": (entry(data_offsets=[8]), "shape or data_offsets of `a`"),
    "three offsets": (entry(data_offsets=[0, 4, 8]), "shape or data_offsets of `a`"),
    "wrong number of bytes": (entry(shape=[3]), "`a` F32 [3] takes 96 bits, its data_offsets 64"),
    "half a byte": (
        entry(dtype="F4", shape=[15]),
        "`a` F4 [15] takes 60 bits, its data_offsets 64",
    ),
    "reversed offsets": (entry(data_offsets=[8, 0]), "takes 64 bits, its data_offsets -64"),
    "hole at the start": (
        packed({"a": {**ENTRY, "data_offsets": [4, 12]}}, bytes(12)),
        "hole: `a` starts at byte 74, not 70",
    ),
    "hole": (
        packed({"a": ENTRY, "b": {**ENTRY, "data_offsets": [9, 17]}}, bytes(17)),
        "hole: `b` starts at byte",
    ),
    "overlap": (
        packed({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, bytes(12)),
        "overlap: `b` starts",
    ),
    "same bytes twice": (packed({"a": ENTRY, "b": ENTRY}, bytes(8)), "overlap: `b` starts"),
    "name twice": (
        packed(b'{"a":{},"a":{}}'.replace(b"{}", json.dumps(ENTRY).encode()), bytes(8)),
        "`a` twice",
    ),
    "metadata twice": (packed(b'{"__metadata__":{},"__metadata__":{}}'), "`__metadata__` twice"),
    "metadata twice, once null": (
        packed(b'{"__metadata__":{},"__metadata__":null}'),
        "`__metadata__` twice",
    ),
    "metadata key twice": (packed(b'{"__metadata__":{"k":"","k":""}}'), "`k` twice"),
    "field twice": (packed(b'{"a":{"dtype":"F32","dtype":"F32"}}'), "`dtype` twice"),
    "terminal codes in a name": (packed({"\x1b[2J": {}}), "'\\x1b[2J' must have"),
    "very long name": (packed({"a" * 5000: {}}), "a" * 99 + "' must have"),
    "nested bomb": (packed(b'{"a":' + b'{"a":' * 100_000), "byte 9 is not the entry"),
    "nested bomb of lists": (
        packed(b'{"a":{"shape":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"),
        "nested too deeply",
    ),
    "wide bomb": (
        packed(b'{"a":{"shape":[' + b"[]," * 1_400_000 + b"[]]}}"),
        "byte 9 is not the entry",
    ),
}


@pytest.mark.parametrize(("content", "why"), BROKEN.values(), ids=BROKEN)
def test_read_header_rejects_invalid_headers(tmp_path: Path, content: bytes, why: str) -> None:
    error = refusal(tmp_path, content)
    assert error.what == "x.safetensors has a broken header"
    assert why in error.why
    assert len(error.why) < 500
    assert error.why.isprintable()
    assert error.code == FAILED


OTHER = {
    "empty": (b"", "x.safetensors is cut short", "it has 0 bytes"),
    "seven bytes": (bytes(7), "x.safetensors is cut short", "it has 7 bytes"),
    "zeros": (bytes(100), "x.safetensors is not a safetensors file", "header length is 0 bytes"),
    "huge header": (
        (2**63).to_bytes(8, "little") + b"{}",
        "x.safetensors is not a safetensors file",
        "036,854,775,808",
    ),
    "header over the limit": (
        (10**8 + 1).to_bytes(8, "little"),
        "x.safetensors is not a safetensors file",
        "100,000,001",
    ),
    "cut in the header": (
        packed({"a": ENTRY})[:20],
        "x.safetensors is cut short",
        "promises 69 bytes, the file has 20",
    ),
    "cut": (
        packed({"a": ENTRY}, bytes(7)),
        "x.safetensors is cut short",
        "promises 77 bytes, the file has 76",
    ),
    "trailing byte": (
        packed({"a": ENTRY}, bytes(9)),
        "x.safetensors is too long",
        "promises 77 bytes, the file has 78",
    ),
    "trailing byte, no tensors": (
        packed({}, b"x"),
        "x.safetensors is too long",
        "promises 10 bytes, the file has 11",
    ),
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid",
        "x.safetensors is a Git LFS pointer",
        "refers",
    ),
    "web page": (
        b"\n<!DOCTYPE html><html>",
        "x.safetensors is a web page, not a safetensors file",
        "error page",
    ),
    "zip": (
        b"PK\x03\x04\x00\x00\x08\x08" + bytes(99),
        "x.safetensors is a zip archive, not",
        "PyTorch",
    ),
    "pickle": (
        b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
        "x.safetensors is a pickle, not",
        "PyTorch",
    ),
    "GGUF": (b"GGUF\x03\x00\x00\x00" + bytes(9), "x.safetensors is a GGUF file, not", "quantised"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(9), "x.safetensors is an HDF5 file, not", "Keras"),
    "JSON": (b'{"error": "gone"}', "x.safetensors is bare JSON, not", "length"),
}


@pytest.mark.parametrize(("content", "what", "why"), OTHER.values(), ids=OTHER)
def test_read_header_names_other_formats(
    tmp_path: Path, content: bytes, what: str, why: str
) -> None:
    error = refusal(tmp_path, content)
    assert what in error.what
    assert why in error.why
    assert error.hint


def test_truncated_file_error_has_a_download_hint(tmp_path: Path) -> None:
    folder = tmp_path / "models--acme--tiny" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    header = packed({"a": {"dtype": "F32", "shape": [4096, 1024], "data_offsets": [0, 16777216]}})
    error = refusal(folder, header + bytes(1000))
    assert error.what == "x.safetensors is cut short"
    assert error.why == "its header promises 16,777,301 bytes, the file has 1,085"
    assert error.hint == "download it again: `hf download acme/tiny x.safetensors --force-download`"


def test_read_header_rejects_special_and_missing_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    for name in ("pipe", "folder", "loop", "absent", "long" * 100):
        with pytest.raises(PrepError, match=name):
            read_safetensors_header(tmp_path / f"{name}.safetensors", 0)


REFUSED_HERE_ONLY = {
    "name twice",
    "metadata key twice",
    "unknown field",
    "more dims than NumPy has",
}


@pytest.mark.parametrize("case", [*BROKEN, *OTHER])
def test_rejected_files_match_library_except_stricter_rules(case: str) -> None:
    content = (BROKEN | OTHER)[case][0]
    assert library_accepts(content) == (case in REFUSED_HERE_ONLY)


VALID = packed(
    {
        "__metadata__": {"format": "pt"},
        "w": ENTRY,
        "v": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [8, 20]},
        "m": {"dtype": "BOOL", "shape": [], "data_offsets": [20, 21]},
    },
    bytes(range(21)),
)


@fuzzed
@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(VALID) - 1), st.binary(max_size=3), st.integers(0, 3)),
        max_size=3,
    )
)
def test_changed_bytes_match_library_or_are_rejected(tmp_path: Path, changes: list) -> None:
    content = VALID
    for offset, inserted, deleted_count in changes:
        content = content[:offset] + inserted + content[offset + deleted_count :]
    try:
        header = read(tmp_path, content)
    except PrepError:
        return
    assert as_read(header, content) == as_library_reads(content)


@fuzzed
@given(
    text=st.binary(max_size=60) | st.text(max_size=60).map(str.encode),
    payload=st.binary(max_size=9),
    whole=st.booleans(),
)
@example(text=b"{}", payload=b"", whole=True)
def test_any_bytes_match_library_or_are_rejected(
    tmp_path: Path, text: bytes, payload: bytes, whole: bool
) -> None:
    content = packed(text, payload) if whole else text
    try:
        header = read(tmp_path, content)
    except PrepError:
        return
    assert as_read(header, content) == as_library_reads(content)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.floats()
    | st.sampled_from(["F32", "U8", "F4", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "x"]), inner)
    ),
    max_leaves=6,
)
near_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F8"]) | json_values,
        "shape": st.lists(st.integers(-1, 3), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 9), min_size=2, max_size=2) | json_values,
    }
)


@fuzzed
@given(
    header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), near_entries | json_values),
    payload=st.binary(),
)
def test_any_json_matches_library_or_is_rejected(
    tmp_path: Path, header: dict, payload: bytes
) -> None:
    content = packed(header, payload)
    try:
        parsed = read(tmp_path, content)
    except PrepError:
        return
    assert as_read(parsed, content) == as_library_reads(content)
