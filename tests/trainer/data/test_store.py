"""The token store: complete or absent, and damage is detected."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from trainer.data import store
from trainer.models.errors import PrepError

NAME = "0" * 32
HOLD = """
import sys
from pathlib import Path
from trainer.data.store import lock_cache
with lock_cache(Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""


def fill(writer: store.TokenWriter) -> None:
    """Append three documents, one of them empty."""
    writer.append(np.array([1, 2, 3], np.uint32))
    writer.append(np.array([], np.uint32))
    writer.append(np.array([7], np.uint32))
    writer.end_document()
    writer.end_document()
    writer.append(np.array([5], np.uint32))
    writer.end_document()


@pytest.mark.parametrize(("dtype", "code"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_store_reads_back_what_was_written(tmp_path: Path, dtype: str, code: str):
    store.build_store(tmp_path / NAME, dtype, fill)
    meta = store.read_meta(tmp_path / NAME)
    tokens = store.map_tokens(tmp_path / NAME, meta, 2)
    assert (meta.identity, meta.dtype, meta.n_tokens, meta.n_documents, meta.max_id) == (NAME, dtype, 5, 3, 7)
    files = {path.name: path.read_bytes() for path in (tmp_path / NAME).glob("*.bin")}
    assert meta.digests == {name: xxhash.xxh3_128_hexdigest(data) for name, data in files.items()}
    assert (tokens.ids.tolist(), tokens.ends.tolist()) == ([1, 2, 3, 7, 5], [4, 4, 5])
    assert (tokens.n_tokens, tokens.n_documents, tokens.n_blocks, tokens.identity) == (5, 3, 2, NAME)
    assert (tmp_path / NAME / "tokens.bin").read_bytes() == np.array([1, 2, 3, 7, 5], code).tobytes()
    assert (tmp_path / NAME / "documents.bin").read_bytes() == np.array([4, 4, 5], "<u8").tobytes()


@pytest.mark.parametrize(("max_id", "dtype"), [(0, "uint16"), (65535, "uint16"), (65536, "uint32")])
def test_dtype_for_holds_max_id(max_id: int, dtype: str):
    assert store.dtype_for(max_id) == dtype


def test_failed_build_leaves_nothing(tmp_path: Path):
    def fails(writer: store.TokenWriter) -> None:
        fill(writer)
        raise PrepError("bad line")

    with pytest.raises(PrepError, match="bad line"):
        store.build_store(tmp_path / NAME, "uint16", fails)
    assert list(tmp_path.iterdir()) == []


def test_build_store_removes_only_incomplete_stores(tmp_path: Path):
    for name in ("f" * 32 + ".partial", NAME + ".partial", "model-init.partial", "1" * 32):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens.bin").write_bytes(b"x")
    store.build_store(tmp_path / NAME, "uint16", fill)
    assert {path.name for path in tmp_path.iterdir()} == {NAME, "model-init.partial", "1" * 32}


@pytest.mark.parametrize(
    ("file", "data", "why"),
    [
        ("tokens.bin", b"123", "tokens.bin has 3 bytes, meta.json records 10"),
        ("documents.bin", b"", "documents.bin has 0 bytes, meta.json records 24"),
        ("meta.json", b"{", "meta.json is malformed"),
        ("meta.json", b"[]", "meta.json is malformed"),
        ("meta.json", b"{}", "meta.json is malformed"),
        ("tokens.bin", None, "No such file"),
        ("meta.json", None, "No such file"),
    ],
)
def test_damaged_store_is_reported(tmp_path: Path, file: str, data: bytes | None, why: str):
    folder = tmp_path / NAME
    store.build_store(folder, "uint16", fill)
    if data is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(data)
    with pytest.raises(PrepError) as caught:
        store.read_meta(folder)
    assert why in caught.value.why
    assert caught.value.what == f"the tokens in {folder} are damaged"
    assert caught.value.hint.startswith(f"`rm -r {folder}`")


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
def test_flipped_bit_is_detected(tmp_path: Path, name: str):
    folder = tmp_path / NAME
    store.build_store(folder, "uint16", fill)
    data = bytearray((folder / name).read_bytes())
    data[3] ^= 4
    (folder / name).write_bytes(data)
    with pytest.raises(store.DamagedStoreError, match=rf"{name} differs from the digest that meta\.json records"):
        store.read_meta(folder)


def test_digests_that_another_process_checked_are_not_checked_again(tmp_path: Path):
    folder = tmp_path / NAME
    store.build_store(folder, "uint16", fill)
    meta = store.read_meta(folder)
    data = bytearray((folder / "tokens.bin").read_bytes())
    data[3] ^= 4
    (folder / "tokens.bin").write_bytes(data)
    assert store.read_meta(folder, checks_digests=False) == meta
    (folder / "tokens.bin").write_bytes(data[:-1])
    with pytest.raises(store.DamagedStoreError, match="bytes"):
        store.read_meta(folder, checks_digests=False)


def test_store_without_digests_is_read(tmp_path: Path):
    folder = tmp_path / NAME
    store.build_store(folder, "uint16", fill)
    meta = json.loads((folder / "meta.json").read_text())
    del meta["digests"]
    (folder / "meta.json").write_text(json.dumps(meta))
    assert store.read_meta(folder).digests == {}


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"},
        {"n_tokens": "5"},
        {"identity": "1" * 32},
        {"digests": {"tokens.bin": "0"}},
        {"digests": []},
    ],
)
def test_store_with_invalid_meta_is_rejected(tmp_path: Path, change: dict[str, object]):
    folder = tmp_path / NAME
    store.build_store(folder, "uint16", fill)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | change))
    with pytest.raises(PrepError, match=r"meta\.json has invalid values or belongs to another store"):
        store.read_meta(folder)


def test_lock_cache_fails_if_folder_cannot_be_created(tmp_path: Path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(PrepError, match=r"cannot read or write .*file - File exists"),
        store.lock_cache(tmp_path / "file", print),
    ):
        pass


def test_lock_cache_waits_for_other_process(tmp_path: Path):
    notes: list[str] = []
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"

        def note(text: str) -> None:
            notes.append(text)
            assert holder.poll() is None
            holder.kill()

        with store.lock_cache(tmp_path, note):
            assert holder.wait() < 0
    assert notes == [f"another process writes tokens to {tmp_path}: waiting for it"]


def test_build_store_keeps_the_store_of_another_process(tmp_path: Path):
    """Two processes build one store; the first to finish gives it its name."""

    def fill_slowly(writer: store.TokenWriter) -> None:
        fill(writer)
        store.build_store(tmp_path / NAME, "uint16", fill)
        kept.append((tmp_path / NAME).stat().st_ino)

    kept: list[int] = []
    store.build_store(tmp_path / NAME, "uint16", fill_slowly)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert kept == [(tmp_path / NAME).stat().st_ino]
    assert store.read_meta(tmp_path / NAME).n_tokens == 5


def test_build_store_replaces_a_damaged_store(tmp_path: Path):
    store.build_store(tmp_path / NAME, "uint16", fill)
    (tmp_path / NAME / "tokens.bin").write_bytes(b"")
    store.build_store(tmp_path / NAME, "uint16", fill)
    assert store.read_meta(tmp_path / NAME).n_tokens == 5
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_lock_cache_works_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*args: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(store.fcntl, "flock", no_locks)
    with store.lock_cache(tmp_path, print):
        store.build_store(tmp_path / NAME, "uint16", fill)
    assert store.read_meta(tmp_path / NAME).n_tokens == 5
