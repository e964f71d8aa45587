"""Tests of the records of an output's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.formats.manifest import NO_MANIFEST, check_files, check_header, record_files
from prepcli.planning.manifest_fields import Manifest


def write_output(folder: Path) -> Manifest:
    """Write two small files, and return a manifest that lists them."""
    (folder / "hf").mkdir()
    (folder / "hf/config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("[]")
    return Manifest(files=record_files(folder, ["tokenizer.json", "hf/config.json"]))


def test_record_files_returns_size_and_digest_by_name(tmp_path):
    manifest = write_output(tmp_path)
    assert manifest.files == {
        "hf/config.json": {"bytes": 2, "xxh3": xxhash.xxh3_128_hexdigest(b"{}")},
        "tokenizer.json": {"bytes": 2, "xxh3": xxhash.xxh3_128_hexdigest(b"[]")},
    }


def test_check_files_accepts_recorded_and_added_files(tmp_path):
    manifest = write_output(tmp_path)
    (tmp_path / "README.md").write_text("added by the user")
    check_files(tmp_path, manifest)


def test_check_files_ignores_outputs_without_record(tmp_path):
    check_files(tmp_path, NO_MANIFEST)


@pytest.mark.parametrize("content", [b"[}", b"[", b"[] ", b""])
def test_check_files_names_changed_file_and_accept_option(tmp_path, content: bytes):
    manifest = write_output(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DamagedError) as caught:
        check_files(tmp_path, manifest)
    assert caught.value.what == f"{tmp_path}/tokenizer.json is damaged"
    assert f"`prep verify {tmp_path} --accept tokenizer.json`" in caught.value.hint
    check_files(tmp_path, manifest, ["hf/config.json"])


@pytest.mark.parametrize("name", ["_METADATA", "state/manifest.ocdbt", "d/0123"])
def test_check_files_suggests_no_accept_for_item_files(tmp_path, name: str):
    with pytest.raises(DamagedError) as caught:
        check_files(tmp_path, Manifest(files={name: {"bytes": 2, "xxh3": "0"}}))
    assert caught.value.hint == GET_AGAIN_HINT


def test_check_files_names_missing_file(tmp_path):
    manifest = write_output(tmp_path)
    (tmp_path / "hf/config.json").unlink()
    with pytest.raises(DamagedError, match=r"config\.json does not exist"):
        check_files(tmp_path, manifest)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", ""])
def test_check_files_opens_no_file_outside_the_folder(tmp_path, name: str):
    with pytest.raises(PrepError, match=r"prep-manifest\.json names"):
        check_files(tmp_path, Manifest(files={name: {"bytes": 2, "xxh3": "0"}}))


def test_check_files_rejects_a_pipe(tmp_path):
    manifest = write_output(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(PrepError, match="is not a file"):
        check_files(tmp_path, manifest)


def test_check_header_compares_recorded_header(tmp_path):
    manifest = Manifest(files={"model.safetensors": {"bytes": 9, "header": "a"}})
    check_header(tmp_path / "model.safetensors", manifest, "a")
    check_header(tmp_path / "other.safetensors", manifest, "b")
    with pytest.raises(DamagedError, match=r"model\.safetensors is damaged"):
        check_header(tmp_path / "model.safetensors", manifest, "b")
