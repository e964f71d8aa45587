"""Writing a token store: under its name it is complete, and one process's store is kept."""

from __future__ import annotations

import errno
import fcntl
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from prepcli.core.errors import PrepError
from tests.helpers.token_stores import NAME, fill
from trainer.data import store
from trainer.data.store_writer import TokenWriter, build_store, dtype_for, lock_cache

HOLD = """
import sys
from pathlib import Path
from trainer.data.store_writer import lock_cache
with lock_cache(Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(("max_id", "dtype"), [(0, "uint16"), (65535, "uint16"), (65536, "uint32")])
def test_dtype_for_holds_max_id(max_id: int, dtype: str):
    assert dtype_for(max_id) == dtype


def test_store_keeps_loss_weights(tmp_path: Path):
    def fill_weights(writer: TokenWriter) -> None:
        writer.append(np.array([1, 2, 3], np.uint32), np.array([0, 1, 0], np.float32))
        writer.append(np.array([4, 5], np.uint32), ends=[2])

    build_store(tmp_path / NAME, "uint16", fill_weights, has_weights=True)
    meta = store.read_meta(tmp_path / NAME)
    assert meta.digests["weights.bin"] == xxhash.xxh3_128_hexdigest(b"\0\1\0\1\1")
    weights = store.map_tokens(tmp_path / NAME, meta, 2).weight_codes
    assert weights is not None
    assert weights.tolist() == [0, 1, 0, 1, 1]


def test_store_without_weights_has_the_files_of_earlier_versions(tmp_path: Path):
    build_store(tmp_path / NAME, "uint16", fill)
    assert {path.name for path in (tmp_path / NAME).iterdir()} == {
        "tokens.bin",
        "documents.bin",
        "meta.json",
    }
    meta = json.loads((tmp_path / NAME / "meta.json").read_text())
    assert [*meta] == ["identity", "dtype", "n_tokens", "n_documents", "max_id", "digests"]
    assert [*meta["digests"]] == ["tokens.bin", "documents.bin"]
    assert (
        store.map_tokens(tmp_path / NAME, store.read_meta(tmp_path / NAME), 2).weight_codes is None
    )


def test_failed_build_leaves_nothing(tmp_path: Path):
    def fails(writer: TokenWriter) -> None:
        fill(writer)
        raise PrepError("bad line")

    with pytest.raises(PrepError, match="bad line"):
        build_store(tmp_path / NAME, "uint16", fails)
    assert list(tmp_path.iterdir()) == []


def test_build_store_removes_only_incomplete_stores(tmp_path: Path):
    for name in ("f" * 32 + ".partial", NAME + ".partial", "model-init.partial", "1" * 32):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens.bin").write_bytes(b"x")
    build_store(tmp_path / NAME, "uint16", fill)
    assert {path.name for path in tmp_path.iterdir()} == {NAME, "model-init.partial", "1" * 32}


def test_lock_cache_fails_if_folder_cannot_be_created(tmp_path: Path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(PrepError, match=r"cannot read or write .*file - File exists"),
        lock_cache(tmp_path / "file", print),
    ):
        pass


def test_lock_cache_waits_for_other_process(tmp_path: Path):
    notes: list[str] = []
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"

        def note(text: str) -> None:
            notes.append(text)
            assert holder.poll() is None
            holder.kill()

        with lock_cache(tmp_path, note):
            assert holder.wait() < 0
    assert notes == [f"another process writes tokens to {tmp_path}: waiting for it"]


def test_build_store_keeps_the_store_of_another_process(tmp_path: Path):
    """Two processes build one store; the first to finish gives it its name."""

    def fill_slowly(writer: TokenWriter) -> None:
        fill(writer)
        build_store(tmp_path / NAME, "uint16", fill)
        kept.append((tmp_path / NAME).stat().st_ino)

    kept: list[int] = []
    build_store(tmp_path / NAME, "uint16", fill_slowly)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert kept == [(tmp_path / NAME).stat().st_ino]
    assert store.read_meta(tmp_path / NAME).n_tokens == 5


def test_build_store_replaces_a_damaged_store(tmp_path: Path):
    build_store(tmp_path / NAME, "uint16", fill)
    (tmp_path / NAME / "tokens.bin").write_bytes(b"")
    build_store(tmp_path / NAME, "uint16", fill)
    assert store.read_meta(tmp_path / NAME).n_tokens == 5
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_lock_cache_works_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*args: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with lock_cache(tmp_path, print):
        build_store(tmp_path / NAME, "uint16", fill)
    assert store.read_meta(tmp_path / NAME).n_tokens == 5
