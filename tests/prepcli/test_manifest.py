"""Manifests: what is written comes back, what is broken or of another time is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prepcli.errors import PrepError
from prepcli.manifest import MANIFEST, manifest_bytes, read_manifest

WHOLE = {
    "kind": "hf", "request": "prep x", "plan": "xxh3:0", "config": {}, "prefixed": True, "tied": False,
    "tensors": {"w": {"digests": [[0, 3, "a"]]}},
}  # fmt: skip


def written(folder: Path, data: bytes) -> Path:
    (folder / MANIFEST).write_bytes(data)
    return folder


def test_what_is_written_comes_back(tmp_path):
    assert read_manifest(tmp_path) is None
    assert read_manifest(written(tmp_path, manifest_bytes(WHOLE))) == {"format": 1, **WHOLE}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is broken"),
        (b'{"format": 1', "is broken"),
        (b"\xff\xfe", "is broken"),
        (b"[" * 100_000, "is broken"),
        (b"[]", "it says 'list'"),
        (b"{}", "it says None"),
        (b'{"format": 2}', "it says 2, this prep reads 1"),
    ],
)
def test_what_is_no_manifest_of_ours_is_named(tmp_path, data: bytes, text: str):
    with pytest.raises(PrepError) as caught:
        read_manifest(written(tmp_path, data))
    assert str(tmp_path / MANIFEST) in caught.value.what
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"config": []},
        {"kind": None},
        {"tensors": {"w": {}}},
        {"tensors": {"w": {"digests": [[0, "3", "a"]]}}},
        {"tensors": {"w": [[0, 3, "a"]]}},
        {"kind": "init"},  # of which more is known
    ],
)
def test_what_later_commands_need_is_checked(tmp_path, change: dict[str, object]):
    with pytest.raises(PrepError, match="is broken"):
        read_manifest(written(tmp_path, manifest_bytes(WHOLE | change)))


def test_a_manifest_that_is_a_folder_is_named(tmp_path):
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(PrepError, match="cannot read"):
        read_manifest(tmp_path)


def test_it_is_json_that_people_can_read(tmp_path):
    text = manifest_bytes(WHOLE).decode()
    assert json.loads(text)["tied"] is False
    assert text.endswith("}\n")
