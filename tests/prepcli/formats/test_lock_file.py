"""Lock files: what is written is read back, and every malformed file is one error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import DamagedError, PrepError
from prepcli.formats.lock_file import Lock, LockedFile, LockedTensor, encode_lock, read_lock

SHA256 = "5f" * 32
XXH3 = "9a" * 16
LOCK = Lock(
    source="m",
    revision=None,
    files={"config.json": LockedFile(bytes=2, digest=SHA256)},
    tensors={"w": LockedTensor(dtype="float32", shape=(3, 2), digests=((0, 3, XXH3),))},
)

names = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def tensors(draw: st.DrawFn) -> LockedTensor:
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    num_rows = shape[0] if shape else 1
    cut = draw(st.integers(0, num_rows))
    return LockedTensor(
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        shape=tuple(shape),
        digests=((0, cut, XXH3), (cut, num_rows, XXH3)),
    )


@given(st.dictionaries(names, tensors(), max_size=4), names)
def test_lock_is_read_as_it_was_written(tmp_path_factory, entries, source):
    path = tmp_path_factory.mktemp("lock") / "lock.json"
    lock = Lock(source=source, revision=None, files={}, tensors=entries)
    path.write_bytes(encode_lock(lock))
    assert read_lock(path) == lock


def test_lock_has_one_line_per_entry():
    lines = encode_lock(LOCK).decode().splitlines()
    assert [line for line in lines if line.startswith('"config.json"')]
    assert [line for line in lines if line.startswith('"w":{"dtype":"float32","shape":[3,2]')]
    assert json.loads(encode_lock(LOCK))["tensors"]["w"]["digests"] == [[0, 3, XXH3]]


def change(**fields: object) -> bytes:
    return json.dumps(json.loads(encode_lock(LOCK)) | fields).encode()


def tensor(**fields: object) -> bytes:
    entry = {"dtype": "float32", "shape": [3, 2], "digests": [[0, 3, XXH3]]}
    return change(tensors={"w": entry | fields})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "EOF"),
        (b"[]", "object"),
        (b"{}", "`source`"),
        (change(format=2), "`format`"),
        (change(algorithms={"files": "md5", "tensors": "xxh3-128"}), "`algorithms.files`"),
        (change(files={"a": {"bytes": -1}}), "`files.a.bytes`"),
        (change(files={"a": {"bytes": 1, "digest": "5f"}}), "`files.a.digest`"),
        (change(comment="mine"), "`comment`"),
        (tensor(shape=[3, True]), "`tensors.w.shape.1`"),
        (tensor(digests=[[0, 2, XXH3]]), "cover 2 of 3 rows"),
        (tensor(digests=[[1, 3, XXH3]]), "do not follow each other"),
        (tensor(digests=[[0, 3, XXH3.upper()]]), "`tensors.w.digests.0.2`"),
        (tensor(digests=[]), "cover 0 of 3 rows"),
        (encode_lock(LOCK)[:-9], "EOF"),
    ],
)
def test_malformed_lock_names_the_entry(tmp_path: Path, data: bytes, why: str):
    path = tmp_path / "lock.json"
    path.write_bytes(data)
    with pytest.raises(DamagedError, match="is not a lock file") as caught:
        read_lock(path)
    assert why in caught.value.why


def test_missing_lock_file_raises_prep_error(tmp_path: Path):
    with pytest.raises(PrepError, match="cannot read"):
        read_lock(tmp_path / "absent.json")
