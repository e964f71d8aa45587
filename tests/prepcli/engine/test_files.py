"""Files: runs with partial pages, file systems without direct I/O, short counts, full disks."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.algebra.strided_copies import StridedCopy
from prepcli.core.errors import RESUME_HINT, PrepError
from prepcli.engine import files as files_module
from prepcli.engine import write_policy
from prepcli.engine.files import PAGE, Files
from prepcli.engine.write_policy import Writeback, WritePolicy
from prepcli.stores.buffers import ByteArray, allocate_buffer
from prepcli.stores.files import io_error
from tests.helpers.run_cli import run_json
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint

SIZE = 5 * PAGE + 123
QUIET = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def some_bytes(count: int, seed: int = 0) -> ByteArray:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(some_bytes(SIZE).tobytes())
    return path


def reject_direct_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system that rejects direct I/O in `open`, as tmpfs did before Linux 6.6."""
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


def reject_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system that rejects direct I/O only in reads and writes."""
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def refuse(
            fd: int, buffers: list[memoryview], offset: int, real: Callable[..., int] = real
        ) -> int:
            if fd in direct_descriptors():
                raise OSError(errno.EINVAL, "no direct I/O")
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, name, refuse)


def direct_descriptors() -> set[int]:
    """Return this process's descriptors with O_DIRECT."""
    data_read = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_DIRECT:
                data_read.add(int(name))
        except OSError:
            continue
    return data_read


def return_short_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system that transfers part of the bytes per call: a page, then odd counts."""
    for name in ("preadv", "pwritev"):
        real, counts = getattr(os, name), iter([PAGE, 1, 1000, PAGE, 7] * 10_000)

        def short_call(
            fd: int,
            buffers: list[memoryview],
            offset: int,
            real: Callable[..., int] = real,
            counts=counts,
        ) -> int:
            (view,) = buffers
            count = next(counts)
            if fd in direct_descriptors():
                count = max(PAGE, count // PAGE * PAGE)
            return real(fd, [view[:count]], offset)

        monkeypatch.setattr(os, name, short_call)


def cache_some_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a page cache with the first pages of some reads, and part of a page at the end of others."""
    monkeypatch.setattr(files_module, "MIN_CACHED_NBYTES", PAGE)
    real = os.preadv
    counts = itertools.cycle([0, PAGE, 2 * PAGE, PAGE + 5])

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if not flags:
            return real(fd, buffers, offset)
        count = next(counts)
        if not count:
            raise BlockingIOError
        (view,) = buffers
        return real(fd, [view[:count]], offset)

    monkeypatch.setattr(os, "preadv", preadv)


def prefer_writeback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system with faster writes through the page cache."""
    monkeypatch.setattr(files_module, "WRITEBACK_NBYTES", 2 * PAGE)
    monkeypatch.setattr(
        files_module, "WritePolicy", lambda *_, **__: WritePolicy(0, has_direct=False)
    )


MEMORY_FOLDER = "/dev/shm"


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """Yield a new folder in tmpfs."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    if [MEMORY_FOLDER, "tmpfs"] not in mounts or not os.access(MEMORY_FOLDER, os.W_OK):
        pytest.skip(f"{MEMORY_FOLDER} is not a writable tmpfs")
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as folder:
        yield Path(folder)


def take_flags_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a system without flags for `preadv`."""
    monkeypatch.setattr(files_module, "MIN_CACHED_NBYTES", PAGE)
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise NotImplementedError
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


def build_for_an_old_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a Python that was built for a C library without `preadv2`."""
    monkeypatch.setattr(files_module, "MIN_CACHED_NBYTES", PAGE)
    monkeypatch.setattr(files_module, "_CACHED_ONLY", None)


FILE_SYSTEMS = {
    "direct": lambda monkeypatch: None,
    "writeback": prefer_writeback,
    "none": reject_direct_open,
    "none, rejected late": reject_direct_io,
    "short": return_short_counts,
    "cached": cache_some_pages,
    "no flags": take_flags_away,
    "old library": build_for_an_old_library,
}


@pytest.fixture(params=FILE_SYSTEMS)
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Simulate each file system, and return its name."""
    FILE_SYSTEMS[request.param](monkeypatch)
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
def test_read_run_keeps_page_offset(file_system: str, source: Path, offset: int, width: int):
    with Files([source]) as files:
        data_read = files.read_run(
            StridedCopy(0, 0, offset, width), allocate_buffer(SIZE + 2 * PAGE)
        )
        assert data_read.tobytes() == some_bytes(SIZE)[offset : offset + width].tobytes()
        assert data_read.ctypes.data % PAGE == offset % PAGE


def test_read_runs_packs_runs(file_system: str, source: Path):
    copies = [
        StridedCopy(0, 0, 0, PAGE, ((2, 0, 2 * PAGE),)),
        StridedCopy(0, 0, 7, 5, ((3, 0, 1000), (2, 0, 10))),
    ]
    expected = b"".join(
        some_bytes(SIZE)[offset : offset + copy.run_nbytes].tobytes()
        for copy in copies
        for offset in copy.run_offsets()
    )
    with Files([source]) as files:
        assert files.read_runs(copies, allocate_buffer(SIZE)).tobytes() == expected


@pytest.mark.parametrize("lead", [0, 5, PAGE - 1])
@pytest.mark.parametrize(
    ("offset", "width"), [(0, SIZE), (5, SIZE - 5), (PAGE, 2 * PAGE), (PAGE - 3, 7), (9, PAGE)]
)
def test_write_changes_only_its_bytes(
    file_system: str, tmp_path: Path, lead: int, offset: int, width: int
):
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
@given(
    st.lists(st.tuples(st.integers(0, SIZE), st.integers(1, 2 * PAGE)), max_size=5),
    st.integers(0, PAGE),
)
def test_last_write_of_overlapping_runs_wins(
    tmp_path: Path, spans: list[tuple[int, int]], lead: int
):
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
                data_read = files.read_run(StridedCopy(0, 0, low, width), allocate_buffer(4 * PAGE))
                assert np.array_equal(data_read, expected[low : low + width])
    assert path.read_bytes() == expected.tobytes()


def test_files_resize_only_files_of_another_size(tmp_path: Path):
    sizes = {"kept": 10, "cut": 12, "grown": 3}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    with Files([tmp_path / name for name in [*sizes, "new"]], [10] * 4):
        pass
    assert (tmp_path / "kept").read_bytes() == b"x" * 10
    assert (tmp_path / "cut").read_bytes() == b"x" * 10
    assert (tmp_path / "grown").read_bytes() == b"x" * 3 + b"\0" * 7
    assert (tmp_path / "new").read_bytes() == b"\0" * 10


def test_close_closes_all_descriptors(file_system: str, source: Path, tmp_path: Path):
    before = os.listdir("/proc/self/fd")
    with Files([source, source]) as files:
        files.read_run(StridedCopy(0, 0, 0, 2 * PAGE), allocate_buffer(4 * PAGE))
    with pytest.raises(PrepError), Files([source, tmp_path / "absent"]):
        pass
    assert os.listdir("/proc/self/fd") == before


def test_files_raise_the_soft_open_file_limit(tmp_path: Path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, before[1]))
    try:
        with Files([tmp_path / str(number) for number in range(100)], [10] * 100) as files:
            files.write_bytes(99, b"x" * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (tmp_path / "99").read_bytes() == b"x" * 10


def test_files_report_the_hard_open_file_limit(monkeypatch, source: Path):
    fail_from_call(monkeypatch, "open", errno.EMFILE, after=3)
    with pytest.raises(PrepError, match="cannot read or write") as raised:
        Files([source] * 9)
    assert "ulimit -n" in raised.value.hint


def test_many_files_take_no_descriptors(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(files_module, "MAX_KEPT_FILES", 2)
    paths = [tmp_path / name for name in "abc"]
    before = os.listdir("/proc/self/fd")
    data = np.random.default_rng(0).integers(0, 256, 2 * SIZE, np.uint8)
    copies = [StridedCopy(0, 2, 5, SIZE - 5), StridedCopy(0, 0, 0, SIZE)]
    with Files(paths, [SIZE] * 3) as files:
        files.write(copies, data[: 2 * SIZE - 5])
        files.write_bytes(1, b"header")
        files.sync()
        files.check_unchanged()
        assert os.listdir("/proc/self/fd") == before
    assert paths[2].read_bytes()[5:] == data[: SIZE - 5].tobytes()
    assert paths[0].read_bytes() == data[SIZE - 5 : 2 * SIZE - 5].tobytes()
    assert paths[1].read_bytes()[:6] == b"header"
    with Files(paths) as files:
        packed = files.read_runs(copies, allocate_buffer(2 * SIZE + PAGE))
        run = files.read_run(StridedCopy(0, 0, 3, 100), allocate_buffer(2 * PAGE))
        assert os.listdir("/proc/self/fd") == before
    assert packed.tobytes() == data[: 2 * SIZE - 5].tobytes()
    assert run.tobytes() == data[SIZE - 2 : SIZE + 98].tobytes()


def test_a_replaced_file_that_is_not_kept_open_is_an_error(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(files_module, "MAX_KEPT_FILES", 1)
    with Files([tmp_path / "a", tmp_path / "b"], [SIZE, SIZE]) as files:
        (tmp_path / "new").write_bytes(bytes(SIZE))
        os.replace(tmp_path / "new", tmp_path / "b")
        with pytest.raises(PrepError, match="b was changed by another program"):
            files.write_bytes(1, b"header")
        with pytest.raises(PrepError, match="b was changed by another program"):
            files.check_unchanged()
    with Files([tmp_path / "a", tmp_path / "b"]) as files:
        os.replace(tmp_path / "a", tmp_path / "b")
        with pytest.raises(PrepError, match="b was changed by another program") as raised:
            files.read_at(1, 0, allocate_buffer(PAGE))
    assert raised.value.why == "while prep read it"


def test_open_error_names_the_file(tmp_path: Path):
    with pytest.raises(PrepError, match=r"cannot read or write .*absent") as raised:
        Files([tmp_path / "absent"])
    assert raised.value.why == "No such file or directory"
    with pytest.raises(PrepError, match="cannot read or write"):
        Files([tmp_path], [10])


@pytest.mark.parametrize("width", [2 * PAGE, SIZE])
def test_read_reports_a_truncated_file(source: Path, width: int):
    with Files([source]) as files:
        os.truncate(source, PAGE)
        with pytest.raises(PrepError, match="source is cut short") as raised:
            files.read_run(StridedCopy(0, 0, 0, width), allocate_buffer(SIZE + 2 * PAGE))
        assert raised.value.why == f"{width - PAGE:,} bytes are missing at byte 4,096"
        with pytest.raises(PrepError, match="source is cut short"):
            files.read_runs([StridedCopy(0, 0, PAGE, 10)], allocate_buffer(PAGE))


def fail_from_call(monkeypatch: pytest.MonkeyPatch, name: str, number: int, after: int = 0) -> None:
    """Make a system call fail with an error number from call `after` on."""
    real, remaining = getattr(os, name), iter([True] * after)

    def fail(*args: object) -> object:
        if next(remaining, False):
            return real(*args)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("after", [0, 1])
def test_write_reports_a_full_disk_with_hint(monkeypatch, tmp_path: Path, number: int, after: int):
    with Files([tmp_path / "out"], [SIZE]) as files:
        fail_from_call(monkeypatch, "pwritev", number, after)
        with pytest.raises(PrepError, match="the disk that holds out is full") as raised:
            files.write([StridedCopy(0, 0, 5, SIZE - 5)], allocate_buffer(SIZE + PAGE)[5:SIZE])
    assert raised.value.hint == f"free some space, then {RESUME_HINT}"


def test_read_reports_io_errors(monkeypatch, source: Path):
    with Files([source]) as files:
        fail_from_call(monkeypatch, "preadv", errno.EIO)
        with pytest.raises(PrepError, match=r"cannot read or write .*source") as raised:
            files.read_run(StridedCopy(0, 0, 0, PAGE), allocate_buffer(2 * PAGE))
    assert raised.value.why == "Input/output error"


def test_sync_repeats_an_earlier_error(monkeypatch, tmp_path: Path):
    with Files([tmp_path / "a", tmp_path / "b"], [PAGE, PAGE]) as files:
        files.write(
            [StridedCopy(0, 0, 0, PAGE), StridedCopy(0, 1, 0, PAGE)], allocate_buffer(2 * PAGE)
        )
        with monkeypatch.context() as patched:
            fail_from_call(patched, "fdatasync", errno.EIO, after=1)
            with pytest.raises(PrepError, match=r"cannot read or write .*b"):
                files.sync()
        # The error is repeated, although the system call would now succeed.
        with pytest.raises(PrepError, match=r"cannot read or write .*b"):
            files.sync()


def test_sync_repeats_an_error_of_opening(monkeypatch, tmp_path: Path):
    """Another pipeline, which wrote to the same files, must not call them durable."""
    monkeypatch.setattr(files_module, "MAX_KEPT_FILES", 1)
    with Files([tmp_path / "a", tmp_path / "b"], [PAGE, PAGE]) as files:
        files.write(
            [StridedCopy(0, 0, 0, PAGE), StridedCopy(0, 1, 0, PAGE)], allocate_buffer(2 * PAGE)
        )
        with monkeypatch.context() as patched:
            fail_from_call(patched, "open", errno.EMFILE)
            with pytest.raises(PrepError, match="Too many open files"):
                files.sync()
        with pytest.raises(PrepError, match="Too many open files"):
            files.sync()


def test_sync_repeats_a_writeback_error(monkeypatch, tmp_path: Path):
    def fail(*_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    prefer_writeback(monkeypatch)
    monkeypatch.setattr(write_policy, "start_writeback", fail)
    with Files([tmp_path / "out"], [64 * PAGE]) as files:
        files.policy.writeback = Writeback(0)
        monkeypatch.setattr(files_module, "WRITEBACK_NBYTES", 64 * PAGE)
        for call in (
            lambda: files.write([StridedCopy(0, 0, 0, 64 * PAGE)], allocate_buffer(64 * PAGE)),
            files.sync,
        ):
            with pytest.raises(PrepError, match=r"cannot read or write .*out") as raised:
                call()
            assert raised.value.why == "Input/output error"


def test_writeback_covers_each_whole_page_once(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(
        files_module, "WritePolicy", lambda *_, **__: WritePolicy(0, has_direct=False)
    )
    monkeypatch.setattr(files_module, "WRITEBACK_NBYTES", 32 * PAGE)
    started: list[tuple[int, int]] = []
    monkeypatch.setattr(
        write_policy,
        "start_writeback",
        lambda fd, offset, nbytes: started.append((offset, offset + nbytes)),
    )
    with Files([tmp_path / "out"], [100 * PAGE]) as files:
        files.write([StridedCopy(0, 0, 5, 99 * PAGE)], allocate_buffer(99 * PAGE))
    assert started[0][0] == PAGE
    assert started[-1][1] == 99 * PAGE
    assert all(before[1] == after[0] for before, after in itertools.pairwise(started))


def test_writeback_leaves_short_runs_to_sync(monkeypatch, tmp_path: Path):
    prefer_writeback(monkeypatch)
    started: list[tuple[int, ...]] = []
    monkeypatch.setattr(write_policy, "start_writeback", lambda *run: started.append(run))
    with Files([tmp_path / "out"], [100 * PAGE]) as files:
        files.write([StridedCopy(0, 0, 0, PAGE, ((9, PAGE, 2 * PAGE),))], allocate_buffer(9 * PAGE))
    assert started == []


def test_sync_keeps_files_after_an_unexpected_error(monkeypatch, tmp_path: Path):
    """Another lane, whose sync comes later, wrote to the same files."""

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with Files([tmp_path / "a"], [PAGE]) as files:
        files.write([StridedCopy(0, 0, 0, PAGE)], allocate_buffer(PAGE))
        with monkeypatch.context() as patched:
            patched.setattr(files_module, "sync_many", fail)
            with pytest.raises(RuntimeError, match="new thread"):
                files.sync()
        synced: list[int] = []
        monkeypatch.setattr(os, "fdatasync", synced.append)
        files.sync()
        assert len(synced) == 1


def test_sync_reports_a_write_that_fails_meanwhile(monkeypatch, tmp_path: Path):
    """The system reports a failed writeback once, to another lane, and the sync itself succeeds."""

    def fail(*_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def write_in_another_lane(fd: int) -> None:
        with pytest.raises(PrepError, match="cannot read or write"):
            files.write([StridedCopy(0, 0, 0, 64 * PAGE)], allocate_buffer(64 * PAGE))

    prefer_writeback(monkeypatch)
    monkeypatch.setattr(files_module, "WRITEBACK_NBYTES", 64 * PAGE)
    with Files([tmp_path / "out"], [64 * PAGE]) as files:
        files.policy.writeback = Writeback(0)
        files.write([StridedCopy(0, 0, 0, PAGE)], allocate_buffer(PAGE))
        monkeypatch.setattr(write_policy, "start_writeback", fail)
        monkeypatch.setattr(os, "fdatasync", write_in_another_lane)
        with pytest.raises(PrepError, match=r"cannot read or write .*out") as raised:
            files.sync()
    assert raised.value.why == "Input/output error"


def test_sync_includes_written_files_only(monkeypatch, tmp_path: Path):
    with Files([tmp_path / "a", tmp_path / "b"], [PAGE, PAGE]) as files:
        files.write([StridedCopy(0, 1, 0, PAGE)], allocate_buffer(PAGE))
        synced: list[int] = []
        monkeypatch.setattr(os, "fdatasync", synced.append)
        files.sync()
        files.sync()
        assert [os.readlink(f"/proc/self/fd/{fd}") for fd in synced] == [str(tmp_path / "b")]


def test_io_error_states_the_system_error():
    assert (
        io_error(Path("x/y"), OSError(errno.EACCES, "Permission denied")).why == "Permission denied"
    )
    assert io_error(Path("x/y"), OSError("odd")).why == "odd"


def test_conversion_in_memory_copies_nothing_for_its_page_offset(memory_folder: Path, capsys):
    model = memory_folder / "model"
    make_checkpoint(model, LLAMA)
    words = ("pad-vocab", str(model), "--multiple", "7", "--out", str(memory_folder / "out"))
    report = run_json(capsys, *words)
    assert report["bytes"]["moved"] == report["bytes"]["read"] + report["bytes"]["written"]


def test_cached_pages_are_not_read_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # The kernel keeps written pages, and may read further ones into the cache.
    monkeypatch.setattr(files_module, "MIN_CACHED_NBYTES", PAGE)
    content = some_bytes(64 * PAGE)
    path = tmp_path / "source"
    path.write_bytes(content.tobytes())
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        assert fd not in direct_descriptors()
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    with Files([path]) as files:
        run = StridedCopy(0, 0, 0, content.size)
        np.testing.assert_array_equal(files.read_run(run, allocate_buffer(66 * PAGE)), content)
