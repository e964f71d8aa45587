"""Files: bounded reads, atomic writes, links, syncs, and untrusted JSON and names."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import DamagedError, PrepError
from prepcli.core.json_values import parse_json, quote_name
from prepcli.stores.files import (
    SYNC_THREADS,
    check_no_symlinks,
    list_folder,
    open_no_follow,
    open_regular_file,
    read_complete_lines,
    read_no_follow,
    read_regular_file,
    read_small_file,
    replacing_file,
    resolve_named_path,
    stat_file,
    sync_many,
    sync_paths,
    write_file,
    write_no_follow,
)


def test_open_regular_file_follows_links(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    with open_regular_file(tmp_path / "link") as file:
        assert file.read() == b"text"


def test_open_regular_file_refuses_other_kinds(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path in (tmp_path, tmp_path / "fifo", tmp_path / "socket", Path("/dev/zero")):
            with pytest.raises(PrepError, match="is not a file"):
                open_regular_file(path)


def test_open_regular_file_raises_os_errors(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        open_regular_file(tmp_path / "missing")


def test_open_regular_file_leaves_no_descriptor(tmp_path: Path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PrepError):
        open_regular_file(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_read_regular_file_has_a_limit(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(PrepError, match="it has 5 bytes, the limit is 4"):
        read_regular_file(tmp_path / "file", 4)


def test_read_regular_file_allocates_only_the_file_size(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"12345")
    tracemalloc.start()
    try:
        read_regular_file(tmp_path / "file")
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 1 << 20


@pytest.mark.parametrize("name", ["train", "a/b.arrow", "a..b", "./c"])
def test_resolve_named_path_stays_inside(name: str):
    assert resolve_named_path(Path("data"), name, Path("data/list.json")) == Path("data") / name


@pytest.mark.parametrize(
    "name", ["../private", "a/../../b", "/etc/passwd", "", ".", "a\0b", 7, None]
)
def test_resolve_named_path_refuses_paths_outside(name: object):
    with pytest.raises(PrepError, match=r"data/list\.json names"):
        resolve_named_path(Path("data"), name, Path("data/list.json"))


def test_read_lines_yields_complete_lines(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\n\ntwo\nthr")
    assert list(read_complete_lines(path)) == [b"one", b"", b"two"]


def test_read_lines_skips_long_lines(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_bytes(b"1234\n12345\n" + b"x" * 1000 + b"\nend\n" + b"y" * 1000)
    assert list(read_complete_lines(path, max_nbytes=4)) == [b"1234", b"", b"", b"end"]


def test_read_lines_refuses_fifos(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(PrepError, match="is not a file"):
        next(read_complete_lines(tmp_path / "fifo"))


@pytest.mark.parametrize("rest", [b"", b".github.com/spec/v1\noid sha256:0\nsize 1\n"])
def test_open_regular_file_refuses_lfs_pointers(rest: bytes, tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"version https://git-lfs" + rest)
    with pytest.raises(DamagedError, match=r"data\.jsonl is a Git LFS pointer") as caught:
        open_regular_file(path)
    assert str(caught.value.hint) == "run `git lfs pull`"


def test_open_regular_file_opens_texts_that_begin_as_a_pointer(tmp_path: Path):
    path = tmp_path / "data.txt"
    path.write_bytes(b"version https://git-lfs" + bytes(1024))
    with open_regular_file(path) as file:
        assert file.read(7) == b"version"


def test_write_file_creates_and_replaces(tmp_path: Path):
    path = tmp_path / "page.html"
    write_file(path, b"old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["page.html"]


def test_write_file_uses_the_umask(tmp_path: Path):
    write_file(tmp_path / "page.html", b"")
    (tmp_path / "other").touch()
    assert (tmp_path / "page.html").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_write_file_accepts_the_longest_name(tmp_path: Path):
    path = tmp_path / ("é" * 127 + "x")
    write_file(path, b"text")
    assert path.read_bytes() == b"text"


def test_write_file_keeps_an_existing_file_unless_asked(tmp_path: Path):
    path = tmp_path / "job.sh"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_file(path, b"new", overwrite=False)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["job.sh"]


def test_write_file_follows_no_link(tmp_path: Path):
    (tmp_path / "target").write_bytes(b"private")
    (tmp_path / "page.html").symlink_to("target")
    with pytest.raises(PrepError, match="it is a symbolic link"):
        write_file(tmp_path / "page.html", b"new")
    assert (tmp_path / "target").read_bytes() == b"private"


def test_write_file_refuses_fifos_and_folders(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(PrepError, match="it is not a regular file"):
            write_file(path, b"new")


def test_write_file_keeps_the_old_file_when_the_disk_is_full(tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_bytes(b"old")
    program = (
        "import resource, signal, sys; from pathlib import Path; from prepcli.stores.files import write_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    write_file(Path(sys.argv[1]), bytes(5000))\n"
        "except OSError as error:\n    sys.exit(error.errno)\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode
        == errno.EFBIG
    )
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["page.html"]


def test_write_file_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    path = tmp_path / "job.sh"
    write_file(path, b"new", overwrite=False)
    assert path.read_bytes() == b"new"
    with pytest.raises(FileExistsError):
        write_file(path, b"other", overwrite=False)
    assert os.listdir(tmp_path) == ["job.sh"]


def test_replacing_file_keeps_the_old_file_after_an_error(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"old")

    def write_half() -> None:
        with replacing_file(path) as file:
            file.write(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
UNSAFE_FILES: dict[str, Callable[[Path, Path], object]] = {
    "symbolic link": lambda path, target: path.symlink_to(target),
    "hard link": lambda path, target: path.hardlink_to(target),
    "not a regular file": lambda path, target: os.mkfifo(path),
}


@pytest.mark.parametrize("kind", UNSAFE_FILES)
def test_open_no_follow_rejects_links(tmp_path: Path, kind: str):
    target = tmp_path / "target"
    target.write_text("mine")
    UNSAFE_FILES[kind](tmp_path / "unsafe", target)
    with pytest.raises(PrepError, match=kind):
        open_no_follow(tmp_path / "unsafe", WRITE)
    assert target.read_text() == "mine"


def test_write_no_follow_replaces_a_file(tmp_path: Path):
    write_no_follow(tmp_path / "file", b"longer")
    write_no_follow(tmp_path / "file", b"new")
    assert read_no_follow(tmp_path / "file") == b"new"


def test_open_no_follow_passes_other_errors_on(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        read_no_follow(tmp_path / "absent")


@pytest.mark.parametrize("place", ["folder", "folder/link", "folder/below/link"])
def test_check_no_symlinks_finds_links_anywhere(tmp_path: Path, place: str):
    (tmp_path / "real/below").mkdir(parents=True)
    path = tmp_path / place.replace("folder", "real")
    if place == "folder":
        path = tmp_path / "linked"
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PrepError, match="is a symbolic link"):
        check_no_symlinks(path if place == "folder" else tmp_path / "real")


@pytest.mark.parametrize("count", [0, 1, SYNC_THREADS, SYNC_THREADS + 1, 500])
def test_each_item_is_synced_once(count: int):
    synced: list[int] = []
    sync_many(synced.append, range(count))
    assert sorted(synced) == list(range(count))


def test_many_items_are_synced_at_the_same_time():
    barrier = threading.Barrier(SYNC_THREADS, timeout=60)
    met: list[int] = []

    def sync(item: int) -> None:
        # Each of the first items waits for the others. The barrier raises an error if they do not all come.
        if item < SYNC_THREADS:
            barrier.wait()
            met.append(item)

    sync_many(sync, range(2 * SYNC_THREADS))
    assert sorted(met) == list(range(SYNC_THREADS))


@pytest.mark.parametrize("count", [3, 500])
def test_error_of_one_item_is_raised(count: int):
    def sync(item: int) -> None:
        if item == count // 2:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        sync_many(sync, range(count))


def test_absent_file_is_an_error(tmp_path: Path):
    paths = [tmp_path / str(number) for number in range(50)]
    for path in paths:
        path.touch()
    sync_paths(paths)
    paths[20].unlink()
    with pytest.raises(FileNotFoundError):
        sync_paths(paths)


json_without_negatives_or_floats = st.recursive(
    st.none() | st.booleans() | st.text(max_size=5) | st.integers(0, 10**19 - 1),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(value=json_without_negatives_or_floats)
def test_parse_json_matches_json_without_negatives_or_floats(value: object) -> None:
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


def test_parse_json_other_numbers_become_minus_one() -> None:
    assert parse_json(b"[1, -1, -0, 9999999999999999999, 10000000000000000000, 1.5, 1e999]") == [
        1, -1, -1, 9999999999999999999, -1, 1.5, math.inf,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"{", "its JSON is broken"),
        (b'{"a": 1, "b": 2, "a": 1}', "it names `a` twice"),
        (b"[NaN]", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"\xff", "its text is not UTF-8"),
        (b'{"\\ud800": 1}', "its text is not UTF-8"),
        (b"[" * 100_000, "its JSON is nested too deeply"),
        (b'{"a":' * 100_000, "its JSON is nested too deeply"),
    ],
)
def test_parse_json_rejects_invalid_json(text: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_json(text)


@given(name=st.text())
def test_quote_name_is_short_and_printable(name: str) -> None:
    assert quote_name(name).isprintable()
    assert len(quote_name(name * 1000)) <= 1002
    assert quote_name("layers.0.w") == "`layers.0.w`"


def test_stat_file_and_list_folder_reject_wrong_paths(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"xyz")
    (tmp_path / "a").mkdir()
    assert list_folder(tmp_path) == ["a", "b"]
    assert stat_file(tmp_path / "b").st_size == 3
    with pytest.raises(PrepError, match="a is not a file"):
        stat_file(tmp_path / "a")
    with pytest.raises(PrepError, match=r"cannot read .*c"):
        stat_file(tmp_path / "c")
    with pytest.raises(PrepError, match=r"cannot read .*b"):
        list_folder(tmp_path / "b")


def test_read_small_file_rejects_large_and_special_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"xyz")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    assert read_small_file(tmp_path / "a", 3) == b"xyz"
    with pytest.raises(PrepError) as caught:
        read_small_file(tmp_path / "a", 2)
    assert (caught.value.what, caught.value.why) == (
        f"{tmp_path / 'a'} is too large",
        "it has 3 bytes, the limit is 2",
    )
    for name in ("pipe", "zeros"):
        with pytest.raises(PrepError, match="is not a file"):
            read_small_file(tmp_path / name, 3)
