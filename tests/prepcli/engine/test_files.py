"""Runs of bytes to and from files: ragged ends, file systems without direct I/O, short counts, full disks."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.engine import files as files_module
from prepcli.engine import io_policy
from prepcli.engine.files import PAGE, ByteArray, Files, allocate_buffer, io_error
from prepcli.engine.io_policy import WritePolicy
from prepcli.errors import PrepError
from prepcli.planning.strided_copies import StridedCopy

SIZE = 5 * PAGE + 123
QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def some_bytes(count: int, seed: int = 0) -> ByteArray:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(some_bytes(SIZE).tobytes())
    return path


def no_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that says at once that it has no direct I/O, as tmpfs once did."""
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


def no_direct_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says so only when it is asked to read or write."""
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def refuse(fd: int, buffers: list[memoryview], at: int, real: Callable[..., int] = real) -> int:
            if fd in directs():
                raise OSError(errno.EINVAL, "no direct I/O")
            return real(fd, buffers, at)

        monkeypatch.setattr(os, name, refuse)


def directs() -> set[int]:
    """The descriptors of this process that are past the page cache."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_DIRECT:
                found.add(int(name))
        except OSError:
            continue
    return found


def short_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that moves some of the bytes at a time: a page, then odd numbers of them."""
    for name in ("preadv", "pwritev"):
        real, counts = getattr(os, name), iter([PAGE, 1, 1000, PAGE, 7] * 10_000)

        def some(fd: int, buffers: list[memoryview], at: int, real: Callable[..., int] = real, counts=counts) -> int:
            (view,) = buffers
            count = next(counts)
            if fd in directs():
                count = max(PAGE, count // PAGE * PAGE)
            return real(fd, [view[:count]], at)

        monkeypatch.setattr(os, name, some)


def writeback(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is faster through the page cache."""
    monkeypatch.setattr(files_module, "BLOCK_NBYTES", 2 * PAGE)
    monkeypatch.setattr(files_module, "WritePolicy", lambda *_, **__: WritePolicy(0, has_direct=False))


WAYS = {
    "direct": lambda monkeypatch: None,
    "writeback": writeback,
    "none": no_direct,
    "none, said late": no_direct_later,
    "short": short_counts,
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kind of file system."""
    WAYS[request.param](monkeypatch)
    return request.param


@pytest.mark.parametrize(
    ("offset", "width"),
    [
        (0, SIZE),
        (0, PAGE),
        (5, 10),
        (5, 2 * PAGE),
        (PAGE, PAGE),
        (PAGE - 1, 2),
        (SIZE - 1, 1),
        (PAGE + 8, SIZE - PAGE - 8),
    ],
)
def test_a_run_is_read_as_deep_in_a_page_as_it_lies(way: str, source: Path, offset: int, width: int):
    with Files([source]) as files:
        found = files.read_run(StridedCopy(0, 0, offset, width), allocate_buffer(SIZE + 2 * PAGE))
        assert found.tobytes() == some_bytes(SIZE)[offset : offset + width].tobytes()
        assert found.ctypes.data % PAGE == offset % PAGE


def test_runs_are_read_one_after_another(way: str, source: Path):
    copies = [StridedCopy(0, 0, 0, PAGE, ((2, 0, 2 * PAGE),)), StridedCopy(0, 0, 7, 5, ((3, 0, 1000), (2, 0, 10)))]
    expected = b"".join(
        some_bytes(SIZE)[at : at + copy.run_nbytes].tobytes() for copy in copies for at in copy.run_offsets()
    )
    with Files([source]) as files:
        assert files.read_runs(copies, allocate_buffer(SIZE)).tobytes() == expected


@pytest.mark.parametrize("lead", [0, 5, PAGE - 1])
@pytest.mark.parametrize(("offset", "width"), [(0, SIZE), (5, SIZE - 5), (PAGE, 2 * PAGE), (PAGE - 3, 7), (9, PAGE)])
def test_what_is_written_is_there_and_nothing_else(way: str, tmp_path: Path, lead: int, offset: int, width: int):
    old, new = some_bytes(SIZE, 1), some_bytes(SIZE, 2)
    path = tmp_path / "out"
    path.write_bytes(old.tobytes())
    data = allocate_buffer(SIZE + 2 * PAGE)[lead : lead + width]
    data[...] = new[:width]
    with Files([path], [SIZE]) as files:
        files.write([StridedCopy(0, 0, offset, width)], data)
        files.write_bytes(0, b"head")
        files.sync()
    old[offset : offset + width] = new[:width]
    old[:4] = np.frombuffer(b"head", np.uint8)
    assert path.read_bytes() == old.tobytes()


@QUIET
@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(1, 2 * PAGE)), max_size=5), st.integers(0, PAGE))
def test_any_runs_in_any_order(tmp_path: Path, spans: list[tuple[int, int]], lead: int):
    expected = np.zeros(SIZE, np.uint8)
    path = tmp_path / "out"
    path.unlink(missing_ok=True)
    with Files([path], [SIZE]) as files:
        for number, (low, length) in enumerate(spans):
            width = min(length, SIZE - low)
            if width:
                data = allocate_buffer(4 * PAGE)[lead : lead + width]
                data[...] = number + 1
                files.write([StridedCopy(0, 0, low, width)], data)
                expected[low : low + width] = number + 1
    with Files([path]) as files:
        for low, length in spans:
            if width := min(length, SIZE - low):
                found = files.read_run(StridedCopy(0, 0, low, width), allocate_buffer(4 * PAGE))
                assert np.array_equal(found, expected[low : low + width])
    assert path.read_bytes() == expected.tobytes()


def test_a_file_that_has_its_size_is_kept_another_is_cut_or_grown(tmp_path: Path):
    sizes = {"kept": 10, "cut": 12, "grown": 3}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    with Files([tmp_path / name for name in [*sizes, "new"]], [10] * 4):
        pass
    assert (tmp_path / "kept").read_bytes() == b"x" * 10
    assert (tmp_path / "cut").read_bytes() == b"x" * 10
    assert (tmp_path / "grown").read_bytes() == b"x" * 3 + b"\0" * 7
    assert (tmp_path / "new").read_bytes() == b"\0" * 10


def test_all_descriptors_are_closed_in_the_end(way: str, source: Path, tmp_path: Path):
    before = os.listdir("/proc/self/fd")
    with Files([source, source]) as files:
        files.read_run(StridedCopy(0, 0, 0, 2 * PAGE), allocate_buffer(4 * PAGE))
    with pytest.raises(PrepError), Files([source, tmp_path / "absent"]):
        pass
    assert os.listdir("/proc/self/fd") == before


def test_more_files_than_a_process_may_have_open_unless_it_asks_for_more(tmp_path: Path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, before[1]))
    try:
        with Files([tmp_path / str(number) for number in range(100)], [10] * 100) as files:
            files.write_bytes(99, b"x" * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (tmp_path / "99").read_bytes() == b"x" * 10


def test_more_files_than_the_system_lets_a_process_have_open(monkeypatch, source: Path):
    failing(monkeypatch, "open", errno.EMFILE, after=3)
    with pytest.raises(PrepError, match="cannot read or write") as caught:
        Files([source] * 9)
    assert "ulimit -n" in caught.value.hint


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path):
    with pytest.raises(PrepError, match=r"cannot read or write .*absent") as caught:
        Files([tmp_path / "absent"])
    assert caught.value.why == "No such file or directory"
    with pytest.raises(PrepError, match="cannot read or write"):
        Files([tmp_path], [10])


@pytest.mark.parametrize("width", [2 * PAGE, SIZE])
def test_a_file_that_is_cut_short_while_it_is_read(source: Path, width: int):
    with Files([source]) as files:
        os.truncate(source, PAGE)
        with pytest.raises(PrepError, match="source is cut short") as caught:
            files.read_run(StridedCopy(0, 0, 0, width), allocate_buffer(SIZE + 2 * PAGE))
        assert caught.value.why == f"{width - PAGE:,} bytes are missing at byte 4,096"
        with pytest.raises(PrepError, match="source is cut short"):
            files.read_runs([StridedCopy(0, 0, PAGE, 10)], allocate_buffer(PAGE))


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, after: int = 0) -> None:
    """From call `after` on, the system says so."""
    real, left = getattr(os, name), iter([True] * after)

    def fail(*args: object) -> object:
        if next(left, False):
            return real(*args)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("after", [0, 1])
def test_a_full_disk_is_said_so_and_what_to_do(monkeypatch, tmp_path: Path, number: int, after: int):
    with Files([tmp_path / "out"], [SIZE]) as files:
        failing(monkeypatch, "pwritev", number, after)
        with pytest.raises(PrepError, match="the disk that holds out is full") as caught:
            files.write([StridedCopy(0, 0, 5, SIZE - 5)], allocate_buffer(SIZE + PAGE)[5:SIZE])
    assert "goes on from where it stopped" in caught.value.hint


def test_an_error_of_the_disk_is_named(monkeypatch, source: Path):
    with Files([source]) as files:
        failing(monkeypatch, "preadv", errno.EIO)
        with pytest.raises(PrepError, match=r"cannot read or write .*source") as caught:
            files.read_run(StridedCopy(0, 0, 0, PAGE), allocate_buffer(2 * PAGE))
    assert caught.value.why == "Input/output error"


def test_what_could_not_be_made_durable_is_never_taken_for_durable(monkeypatch, tmp_path: Path):
    with Files([tmp_path / "a", tmp_path / "b"], [PAGE, PAGE]) as files:
        files.write([StridedCopy(0, 0, 0, PAGE), StridedCopy(0, 1, 0, PAGE)], allocate_buffer(2 * PAGE))
        with monkeypatch.context() as patched:
            failing(patched, "fdatasync", errno.EIO, after=1)
            with pytest.raises(PrepError, match=r"cannot read or write .*b"):
                files.sync()
        with pytest.raises(PrepError, match=r"cannot read or write .*b"):  # though the system would now say yes
            files.sync()


def test_a_failed_writeback_is_never_durable(monkeypatch, tmp_path: Path):
    def fail(*_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writeback(monkeypatch)
    monkeypatch.setattr(io_policy, "start_writeback", fail)
    with Files([tmp_path / "out"], [64 * PAGE]) as files:
        files.policy.writeback = io_policy.Writeback(0)
        monkeypatch.setattr(files_module, "BLOCK_NBYTES", 64 * PAGE)
        for call in (lambda: files.write([StridedCopy(0, 0, 0, 64 * PAGE)], allocate_buffer(64 * PAGE)), files.sync):
            with pytest.raises(PrepError, match=r"cannot read or write .*out") as caught:
                call()
            assert caught.value.why == "Input/output error"


def test_writeback_covers_each_whole_page_once(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(files_module, "WritePolicy", lambda *_, **__: WritePolicy(0, has_direct=False))
    monkeypatch.setattr(files_module, "BLOCK_NBYTES", 32 * PAGE)
    started: list[tuple[int, int]] = []
    monkeypatch.setattr(io_policy, "start_writeback", lambda fd, at, nbytes: started.append((at, at + nbytes)))
    with Files([tmp_path / "out"], [100 * PAGE]) as files:
        files.write([StridedCopy(0, 0, 5, 99 * PAGE)], allocate_buffer(99 * PAGE))
    assert started[0][0] == PAGE
    assert started[-1][1] == 99 * PAGE
    assert all(before[1] == after[0] for before, after in itertools.pairwise(started))


def test_writeback_leaves_short_runs_to_sync(monkeypatch, tmp_path: Path):
    writeback(monkeypatch)
    monkeypatch.setattr(io_policy, "start_writeback", lambda *_: pytest.fail("started"))
    with Files([tmp_path / "out"], [100 * PAGE]) as files:
        files.write([StridedCopy(0, 0, 0, PAGE, ((9, PAGE, 2 * PAGE),))], allocate_buffer(9 * PAGE))


def test_sync_asks_only_for_files_that_were_written(monkeypatch, tmp_path: Path):
    with Files([tmp_path / "a", tmp_path / "b"], [PAGE, PAGE]) as files:
        files.write([StridedCopy(0, 1, 0, PAGE)], allocate_buffer(PAGE))
        asked: list[int] = []
        monkeypatch.setattr(os, "fdatasync", asked.append)
        files.sync()
        files.sync()
        assert [os.readlink(f"/proc/self/fd/{fd}") for fd in asked] == [str(tmp_path / "b")]


def test_errors_say_what_the_system_says():
    assert io_error(Path("x/y"), OSError(errno.EACCES, "Permission denied")).why == "Permission denied"
    assert io_error(Path("x/y"), OSError("odd")).why == "odd"
