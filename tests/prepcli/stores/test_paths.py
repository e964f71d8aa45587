"""Tests of paths in a store: the same answers as a folder on a disk, safe names, bounded reads, local copies."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import DamagedError, PrepError
from prepcli.formats.safetensors import read_safetensors_header
from prepcli.stores import paths
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.files import (
    list_folder,
    open_regular_file,
    read_bytes,
    read_small_file,
    stat_file,
    stat_indexed_file,
)
from prepcli.stores.paths import (
    StoreListing,
    create_temporary_folder,
    local_copy,
    path_in_folder,
    read_all,
)
from tests.helpers.memory_stores import MemoryReader, store_of
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import make_checkpoint

NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)
FILES = st.dictionaries(NAMES, st.binary(max_size=9), min_size=1, max_size=5).filter(
    lambda files: not any(a != b and b.startswith(f"{a}/") for a in files for b in files)
)


@given(FILES, NAMES, st.integers(0, 12), st.integers(0, 12))
def test_store_answers_like_a_folder(files: dict[str, bytes], name: str, offset: int, nbytes: int):
    root, _ = store_of(files)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        stored, local = root / name, folder / name
        assert stored.exists() == local.exists()
        assert stored.is_file() == local.is_file()
        assert stored.is_dir() == local.is_dir()
        assert stored.name == local.name
        assert [str(path_in_folder(p, root)) for p in stored.parents] == [
            str(p.relative_to(folder)) for p in local.parents if p.is_relative_to(folder)
        ]
        if local.is_dir():
            assert list_folder(stored) == list_folder(local)
            with pytest.raises(PrepError, match="is not a file"):
                read_small_file(stored)
        elif local.is_file():
            assert stat_file(stored).st_size == local.stat().st_size
            assert read_small_file(stored) == local.read_bytes()
            assert read_bytes(stored, offset, nbytes) == read_bytes(local, offset, nbytes)
            with open_regular_file(stored) as stream:
                stream.seek(offset)
                assert stream.read() == local.read_bytes()[offset:]
            into = np.zeros(len(files[name]), np.uint8)
            stored.read_at(0, into)
            assert into.tobytes() == files[name]
            assert local_copy(stored).read_bytes() == files[name]
        else:
            for read in (read_small_file, read_bytes, stat_file, list_folder):
                with pytest.raises(PrepError, match=r"cannot read gs://bucket/m/.*"):
                    read(stored)
            with pytest.raises(DamagedError, match="does not exist"):
                stat_indexed_file(stored)


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../../x", "a/./b", "a\0b", "x" * 300, "a/" * 600 + "b"]
)
def test_listing_rejects_names_outside_of_its_folder(name: str):
    with pytest.raises(PrepError, match=r"invalid file name|the list of files names"):
        store_of({name: b""})


@given(st.text(max_size=40))
def test_local_copy_stays_in_its_folder(name: str):
    try:
        root, _ = store_of({name: b"x"})
    except PrepError:
        return
    copy = (root / name).local()
    assert copy.read_bytes() == b"x"
    assert ".." not in copy.parts
    assert copy.is_relative_to(tempfile.gettempdir())


def test_equal_files_have_copies_with_equal_times():
    root, _ = store_of({"a": b"x", "b": b"x", "c": b"y"})
    times = [(root / name).local().stat().st_mtime_ns for name in "abc"]
    assert times[0] == times[1] != times[2]


def test_small_file_is_fetched_once():
    root, reader = store_of({"config.json": b"{}"})
    assert [read_small_file(root / "config.json") for _ in range(3)] == [b"{}"] * 3
    assert len(reader.requests) == 1


def test_bytes_of_a_fetched_file_need_no_request():
    root, reader = store_of({"config.json": b"{}", "a/index": b"0123456789"})
    for name in ("config.json", "a/index"):
        (root / name).local()
    with open_regular_file(root / "config.json") as stream:
        assert stream.read() == b"{}"
    assert read_bytes(root / "a/index", 2, 3) == b"234"
    assert read_bytes(root / "a/index", 8, 1 << 60) == b"89"
    assert len(reader.requests) == 2


def test_large_file_is_not_downloaded_as_a_copy(tmp_path: Path):
    downloads: list[str] = []

    def download(name: str) -> Path:
        downloads.append(name)
        return tmp_path / name

    files = [RemoteFile("tokenizer.json", paths.SMALL_NBYTES + 1, "")]
    root = StoreListing("OWNER/NAME", MemoryReader({}), files, download).root
    with pytest.raises(PrepError, match=r"tokenizer.json of .* is too large"):
        (root / "tokenizer.json").local()
    assert downloads == []


def test_pointer_of_git_lfs_in_a_store_is_an_error():
    root, _ = store_of({"w": b"version https://git-lfs.github.com/spec/v1\n"})
    for read in (read_small_file, read_bytes):
        with pytest.raises(DamagedError, match="gs://bucket/m/w is a Git LFS pointer"):
            read(root / "w")


def test_large_files_and_indexes_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(PrepError, match="is too large"):
        read_all(MemoryReader({}), RemoteFile("tokenizer.json", 1 << 40, ""))
    monkeypatch.setattr(paths, "MAX_INDEX_NBYTES", 10)
    monkeypatch.setattr(paths, "MAX_SMALL_FILES_NBYTES", 10)
    root, _ = store_of({"a": bytes(8), "b": bytes(8)})
    for read in (lambda name: read_bytes(root / name, 0, 8), lambda name: (root / name).local()):
        read("a")
        with pytest.raises(PrepError, match=r"is too large|is not a checkpoint"):
            read("b")


@pytest.mark.parametrize("padding", slow_except([0, 100, 200_000], [100]))
def test_header_of_safetensors_is_read_without_its_tensors(tmp_path: Path, padding: int):
    make_checkpoint(tmp_path / "m", vocab_size=90_001, hidden_size=64)
    real = max((tmp_path / "m").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = real.read_bytes()
    nbytes = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + nbytes] + b" " * padding
    content = (nbytes + padding).to_bytes(8, "little") + header + content[8 + nbytes :]
    root, reader = store_of({real.name: content})
    found = read_safetensors_header(root / real.name, 0)
    assert found.size == len(content)
    assert len(found.tensors) == len(read_safetensors_header(real, 0).tensors)
    assert sum(size for _, _, size in reader.requests) <= (512 << 10) + padding
    assert len(reader.requests) <= 3


def test_stream_reads_at_most_the_bytes_of_its_buffer():
    root, reader = store_of({"w": bytes(1 << 20)})
    with open_regular_file(root / "w", buffering=4096) as stream:
        stream.seek(500_000)
        assert len(stream.read(100)) == 100
    assert [size for _, _, size in reader.requests] == [4096]


def test_pickled_path_reads_the_same_bytes():
    root, _ = store_of({"a/w": b"0123456789"})
    path = pickle.loads(pickle.dumps(root / "a" / "w"))
    into = np.zeros(4, np.uint8)
    path.open().read_at(3, into)
    assert (str(path), into.tobytes()) == ("gs://bucket/m/a/w", b"3456")


def test_paths_of_two_stores_are_not_in_one_folder(tmp_path: Path):
    root, other = store_of({"a": b""})[0], store_of({"a": b""})[0]
    assert path_in_folder(root / "a", root) == PurePosixPath("a")
    assert path_in_folder(root / "a", other) is None
    assert path_in_folder(root / "a", tmp_path) is None
    assert path_in_folder(tmp_path / "a", tmp_path) == Path("a")


def folder_of_killed_process(environment: dict[str, str]) -> Path:
    program = (
        "import os; from prepcli.stores.paths import create_temporary_folder;"
        " print(create_temporary_folder(), flush=True); os.abort()"
    )
    process = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == -signal.SIGABRT
    return Path(process.stdout.strip())


def test_temporary_folder_of_killed_process_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    leftover = folder_of_killed_process(os.environ | {"TMPDIR": str(tmp_path)})
    assert leftover.parent == tmp_path
    (leftover / "config.json").write_text("{}")
    (tmp_path / "kept").mkdir()
    (tmp_path / "prep-remote-link").symlink_to(tmp_path / "kept")
    alive = create_temporary_folder()
    assert leftover.exists()  # a new folder may not be locked yet
    for folder in (leftover, alive, tmp_path / "kept"):
        os.utime(folder, (0, 0))
    another = create_temporary_folder()
    assert {path.name for path in tmp_path.iterdir()} == {
        alive.name,
        another.name,
        "kept",
        "prep-remote-link",
    }


# The handler of the first line runs after the one that removes the temporary folder.
LATE_COPY = """
import atexit, contextlib, threading
import numpy as np
from prepcli.core.errors import PrepError
from tests.helpers.memory_stores import MemoryReader, store_of
atexit.register(lambda: (is_ending.set(), thread.join()))
root, reader = store_of({"a": b"x", "late/b": b"y"})
is_ending, is_reading = threading.Event(), threading.Event()
read_now = MemoryReader.read
def read(self, file, offset, into):
    if file.path == "late/b":
        is_reading.set()
        is_ending.wait()
    return read_now(self, file, offset, into)
MemoryReader.read = read
def copy_late():
    with contextlib.suppress(PrepError):
        (root / "late" / "b").local()
(root / "a").local()
thread = threading.Thread(target=copy_late, daemon=True)
thread.start()
is_reading.wait()
"""


def test_copy_that_ends_after_its_process_leaves_no_folder(tmp_path: Path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", LATE_COPY], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []
