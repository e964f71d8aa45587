"""Tests of reading and writing manifests."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
import xxhash

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.formats.manifest import (
    MANIFEST_FILE,
    NO_MANIFEST,
    check_files,
    check_header,
    encode_manifest,
    find_manifest_folder,
    read_manifest,
    record_file,
)
from prepcli.planning.manifest_fields import Manifest

WHOLE = {
    "kind": "hf", "request": "prep x", "plan": "xxh3:0", "config": {}, "prefixed": True, "tied": False,
    "tensors": {"w": {"digests": [[0, 3, "a"]]}},
}  # fmt: skip
LAYOUT = {"scan": True, "scan_axis": 0, "rules": [], "step": 3, "slots": {}, "others": {}}


def write_manifest(folder: Path, data: bytes) -> Path:
    (folder / MANIFEST_FILE).write_bytes(data)
    return folder


def test_read_manifest_returns_the_encoded_manifest(tmp_path):
    assert read_manifest(tmp_path) is None
    manifest = read_manifest(write_manifest(tmp_path, encode_manifest(WHOLE)))
    assert manifest is not None
    assert manifest == {"format": 1, **WHOLE}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is broken"),
        (b'{"format": 1', "is broken"),
        (b"\xff\xfe", "is broken"),
        (b"[" * 100_000, "is broken"),
        (b"[]", "it holds a JSON list, not an object"),
        (b"{}", "its `format` is None"),
        (b'{"format": 2}', "its `format` is 2, this version of prep reads 1"),
    ],
)
def test_read_manifest_rejects_other_files(tmp_path, data: bytes, text: str):
    with pytest.raises(PrepError) as caught:
        read_manifest(write_manifest(tmp_path, data))
    assert str(tmp_path / MANIFEST_FILE) in caught.value.what
    assert text in str(caught.value)


def test_read_manifest_checks_algorithm_of_digests(tmp_path):
    data = encode_manifest({**WHOLE, "tensor_digest": "xxh3-128"})
    assert read_manifest(write_manifest(tmp_path, data))
    write_manifest(tmp_path, encode_manifest({**WHOLE, "tensor_digest": "sha256"}))
    with pytest.raises(PrepError, match="`tensor_digest` is `sha256`"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"config": []},
        {"kind": None},
        {"tensors": {"w": {}}},
        {"tensors": {"w": {"digests": [[0, "3", "a"]]}}},
        {"tensors": {"w": [[0, 3, "a"]]}},
        {"kind": "init"},  # requires additional keys
        {"kind": "train"} | LAYOUT | {"step": "3"},
        {"kind": "train"} | LAYOUT | {"slots": {"opt_state.mu": []}},
        {"kind": "train"} | LAYOUT | {"slots": {"opt_state.mu": {"w": {}}}},
        {"kind": "train"} | LAYOUT | {"others": {"step": {"digests": "abc"}}},
        {"base": "tiny"},  # optional
        {"tensors": {"w": {"digests": [[0, 3]]}}},
        {"tensors": {"w": {"digests": [[0, 3, "a"], [4, 5, "a"]]}}},
        {"tensors": {"w": {"digests": [[3, 0, "a"]]}}},
        {"tensors": {"w": {"digests": [], "shape": "3"}}},
        {"tensors": {"w": {"digests": [], "shape": [-3]}}},
        {"tensors": {"w": {"digests": [], "dtype": "float99"}}},
        {"slots": {"opt_state.mu": {"w": {"digests": [], "shape": [[3]]}}}},
        {"rules": [["a=mp"]]},
        {"command": ["save-init"]},
        {"command": None},
        {"towers": None},
        {"training_state": {"step": 1}},
        {"vocab": {"true": "3", "padded": 4}},
        {"leaves": {"w": {"shape": [3]}}},
        {"added_tokens": {"tokens": []}},
    ],
)
def test_read_manifest_checks_types_of_keys(tmp_path, change: dict[str, object]):
    with pytest.raises(PrepError, match="is broken"):
        read_manifest(write_manifest(tmp_path, encode_manifest(WHOLE | change)))


def test_read_manifest_rejects_a_folder(tmp_path):
    (tmp_path / MANIFEST_FILE).mkdir()
    with pytest.raises(PrepError, match="is not a file"):
        read_manifest(tmp_path)


def test_read_manifest_rejects_a_pipe(tmp_path):
    os.mkfifo(tmp_path / MANIFEST_FILE)
    with pytest.raises(PrepError, match="is not a file"):
        read_manifest(tmp_path)


def test_encode_manifest_is_indented_json(tmp_path):
    text = encode_manifest(WHOLE).decode()
    assert json.loads(text)["tied"] is False
    assert text.endswith("}\n")


def test_read_manifest_returns_state_of_training_step(tmp_path):
    state = {
        "slots": {"opt_state.mu": WHOLE["tensors"]},
        "others": {"step": {"digests": [[0, 1, "b"]]}},
    }
    step = WHOLE | {"kind": "train"} | LAYOUT | state
    manifest = read_manifest(write_manifest(tmp_path, encode_manifest(step)))
    assert manifest is not None
    assert manifest == {"format": 1, **step}


@pytest.mark.parametrize("path", ["run", "run/10", "run/10/state"])
def test_find_manifest_folder_returns_last_training_step(tmp_path, path: str):
    for step in ("9", "10"):
        (tmp_path / "run" / step / "state").mkdir(parents=True)
        (tmp_path / "run" / step / "state/_METADATA").touch()
        (tmp_path / "run" / step / MANIFEST_FILE).touch()
    assert find_manifest_folder(tmp_path / path) == tmp_path / "run/10"


def test_find_manifest_folder_searches_item_and_its_parent(tmp_path):
    for name in ("state", "item"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "_METADATA").touch()
    assert find_manifest_folder(tmp_path / "state") == tmp_path / "state"
    (tmp_path / MANIFEST_FILE).touch()
    assert find_manifest_folder(tmp_path / "item") == tmp_path / "item"
    assert find_manifest_folder(tmp_path / "state") == tmp_path
    (tmp_path / "state" / MANIFEST_FILE).touch()
    assert find_manifest_folder(tmp_path / "state") == tmp_path / "state"
    assert find_manifest_folder(tmp_path / "nothing") == tmp_path / "nothing"


LISTED = WHOLE | {"files": {"config.json": {"bytes": 2, "xxh3": "0" * 32}}}


def test_encode_manifest_adds_digest_of_canonical_json(tmp_path):
    manifest = read_manifest(write_manifest(tmp_path, encode_manifest(LISTED | {"later": (1, 2)})))
    assert manifest is not None
    content = dict(manifest)
    stored_digest = content.pop("digest")
    assert content == {"format": 1, **LISTED, "later": [1, 2]}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert stored_digest == xxhash.xxh3_128_hexdigest(canonical.encode())


def test_read_manifest_rejects_every_flipped_bit_of_content(tmp_path):
    data = encode_manifest(LISTED)
    intact = read_manifest(write_manifest(tmp_path, data))
    for position, bit in itertools.product(range(len(data)), range(8)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << bit
        try:
            manifest = read_manifest(write_manifest(tmp_path, bytes(flipped)))
        except PrepError:
            continue
        assert manifest == intact, f"bit {bit} of byte {position}"  # white space


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": {"config.json": {}}},
        {"files": {"config.json": {"bytes": "2", "xxh3": "0"}}},
        {"files": {"config.json": {"bytes": 2}}},
        {"files": {"config.json": 2}},
    ],
)
def test_read_manifest_checks_types_of_file_records(tmp_path, change: dict[str, object]):
    with pytest.raises(PrepError, match="is broken"):
        read_manifest(write_manifest(tmp_path, encode_manifest(WHOLE | change)))


@pytest.mark.parametrize("key", ["files", "digest"])
def test_read_manifest_rejects_files_or_digest_alone(tmp_path, key: str):
    manifest = json.loads(encode_manifest(LISTED))
    del manifest[key]
    with pytest.raises(PrepError, match="it has only one of"):
        read_manifest(write_manifest(tmp_path, json.dumps(manifest).encode()))


def test_read_manifest_rejects_a_digest_of_null(tmp_path):
    manifest = json.loads(encode_manifest(LISTED)) | {"digest": None}
    with pytest.raises(PrepError, match="`digest` is None"):
        read_manifest(write_manifest(tmp_path, json.dumps(manifest).encode()))


@pytest.mark.parametrize("change", [{"origin": []}, {"merged": {"adapter": 3}}, {"source": "m"}])
def test_malformed_identity_of_a_source_reads_as_missing(tmp_path, change: dict[str, object]):
    manifest = read_manifest(write_manifest(tmp_path, encode_manifest(WHOLE | change)))
    assert manifest is not None
    assert (manifest.origin, manifest.merged, manifest.source_name) == ({}, None, "")


def test_manifest_of_an_early_version_has_defaults(tmp_path):
    manifest = read_manifest(write_manifest(tmp_path, encode_manifest(WHOLE)))
    assert manifest is not None
    assert (manifest.scan, manifest.scan_axis, [*manifest.rules]) == (True, 0, [])
    assert (manifest.mesh, manifest.step, manifest.command) == (None, None, None)
    assert ("files" in manifest, manifest.files, manifest.packed) == (False, {}, {})
    assert not manifest.is_tree
    assert not manifest.is_adapter


def test_manifest_keeps_unknown_keys_and_order(tmp_path):
    stored = encode_manifest({"later_key": {"b": 1, "a": [2]}, **LISTED})
    manifest = read_manifest(write_manifest(tmp_path, stored))
    assert manifest is not None
    assert encode_manifest(manifest) == stored


def test_no_manifest_is_false_and_a_manifest_is_true():
    assert not NO_MANIFEST
    assert Manifest(kind="hf")


def write_output(folder: Path) -> Manifest:
    """Write two small files, and return a manifest that lists them."""
    (folder / "hf").mkdir()
    (folder / "hf/config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("[]")
    names = ("tokenizer.json", "hf/config.json")
    return Manifest(files={name: record_file(folder / name) for name in names})


def test_record_file_returns_size_and_digest(tmp_path):
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
