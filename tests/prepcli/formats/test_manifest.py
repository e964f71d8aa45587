"""Manifests, lock files, and the steps of runs in them: written, read, and refused if malformed."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.formats.lock_file import Lock, LockedFile, LockedTensor, encode_lock, read_lock
from prepcli.formats.manifest import (
    MANIFEST_FILE,
    NO_MANIFEST,
    check_files,
    check_header,
    encode_manifest,
    find_manifest_folder,
    listed_step,
    listed_steps,
    read_manifest,
    record_file,
)
from prepcli.formats.step_scores import best_step
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


MANIFEST = {"format": 1, "kind": "hf", "request": "", "plan": "", "config": {}, "tensors": {}}
MANIFEST |= {"prefixed": False, "tied": False}


def write_run(run: Path, fields_by_step: dict[int, dict[str, Any]]) -> None:
    for step, fields in fields_by_step.items():
        (run / str(step) / "state").mkdir(parents=True)
        (run / str(step) / "state/_METADATA").touch()
        (run / str(step) / "prep-manifest.json").write_text(json.dumps(MANIFEST | fields))


@pytest.mark.parametrize(
    ("evaluations", "best"),
    [
        ({1: (2.0, 4), 2: (1.0, 4), 3: (1.0, 4)}, 2),
        ({1: (1.0, 4), 2: (2.0, 9), 3: (1.5, 9)}, 3),  # resumed with another `eval.limit`
        ({1: (1.0, 4), 2: (2.0, 9), 3: (None, 9)}, 2),
        ({1: (1.0, None), 2: (2.0, None)}, 1),
        ({1: (None, 4)}, None),
    ],
)
def test_best_step_compares_equal_evaluations(
    tmp_path: Path, evaluations: dict[int, tuple[float | None, int | None]], best: int | None
):
    keys = ("eval_loss", "eval_sequences")
    write_run(
        tmp_path,
        {step: dict(zip(keys, values, strict=True)) for step, values in evaluations.items()},
    )
    assert best_step(tmp_path) == best


@pytest.mark.parametrize(
    ("recipe", "best"), [('best = "eval_loss"', 2), ('best = "accuracy"', None)]
)
def test_best_step_has_its_only_evaluations_in_the_log(
    tmp_path: Path, recipe: str, best: int | None
):
    """A signal stopped each evaluation, and the next start repeated it."""
    fields = {"eval_sequences": 4, "recipe": f"[checkpoint]\n{recipe}\n"}
    write_run(tmp_path, {1: fields, 2: fields})
    lines = [
        {"step": 1, "eval_loss": 2.0},
        {"step": 2, "eval_loss": 1.0},
        {"step": [], "eval_loss": 0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert best_step(tmp_path) == best


def test_listed_steps_have_a_manifest():
    paths = ["recipe.toml", "10/prep-manifest.json", "9/prep-manifest.json", "11/state/_METADATA"]
    assert listed_steps(
        [*paths, "012/prep-manifest.json", "a/prep-manifest.json", "8/state/prep-manifest.json"]
    ) == [
        9,
        10,
    ]


@pytest.mark.parametrize(
    ("path", "step"),
    [("12/state/d/x", 12), ("0/x", 0), ("12", None), ("012/x", None), ("metrics.jsonl", None)],
)
def test_listed_step_comes_from_the_first_folder(path: str, step: int | None):
    assert listed_step(path) == step
