"""Shared runs: bytes, digests and resumption on a file system with reflinks, a simulated one, and one without."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file

from prepcli.algebra.axis_map import bind_row
from prepcli.algebra.rows import parse_row
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.core.errors import PrepError
from prepcli.core.observer import NullProgress
from prepcli.engine import files as files_module
from prepcli.engine.background_sync import StreamPrefix
from prepcli.engine.budget import Budget
from prepcli.engine.conversion_result import ConversionResult
from prepcli.engine.files import PAGE, Files
from prepcli.engine.pipeline import Pipeline, PipelineUnit
from prepcli.planning.plan import Stream
from tests.helpers.plans import flat, make_save_plan, reverse_streams
from tests.helpers.run_cli import run_failing, run_json, run_ok
from tests.helpers.strategies import leaf_by_numpy
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint

# A folder on a file system with reflinks, for tests on a machine whose temporary folder has none.
FOLDER_VARIABLE = "PREP_REFLINK_FOLDER"
# <linux/fs.h>: FICLONERANGE
CLONE_RANGE = 0x4020940D
# The answers of Linux for files that cannot be shared: see ioctl_ficlonerange(2).
REFUSALS = ("EOPNOTSUPP", "EXDEV", "EINVAL", "ENOTTY", "ETXTBSY", "EPERM", "EBADF", "EISDIR")


def copy_bytes(fd: int, request: int, fields: bytes) -> int:
    """Simulate FICLONERANGE on a file system with blocks of one page."""
    source_fd, source_offset, nbytes, offset = struct.unpack("=qQQQ", fields)
    size = os.fstat(source_fd).st_size
    if not nbytes:
        nbytes = size - source_offset
    elif (source_offset | offset | nbytes) % PAGE or source_offset + nbytes > size:
        raise OSError(errno.EINVAL, "Invalid argument")
    os.pwrite(fd, os.pread(source_fd, nbytes, source_offset), offset)
    return 0


@dataclass
class Sharing:
    """Passes calls of FICLONERANGE on, and records them.

    Attributes:
        folder: Folder of the files.
        call: Shares a range of files.
        before: Called before a range is shared. It may raise.
        after: Called after a range is shared.
        ranges: (source offset, bytes) of each call. 0 bytes for a whole file.
        written_nbytes: Bytes that `os.pwritev` has written.
    """

    folder: Path
    call: Callable[[int, int, bytes], object]
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    ranges: list[tuple[int, int]] = field(default_factory=list)
    written_nbytes: int = 0

    def start(self, monkeypatch: pytest.MonkeyPatch) -> Sharing:
        """Record the system calls from now on."""
        real_ioctl = fcntl.ioctl
        real_pwritev = os.pwritev

        def ioctl(fd: int, request: int, *arguments: Any) -> object:
            if request != CLONE_RANGE:
                return real_ioctl(fd, request, *arguments)
            self.ranges.append(struct.unpack("=qQQQ", arguments[0])[1:3])
            self.before()
            result = self.call(fd, request, *arguments)
            self.after()
            return result

        def pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:
            count = real_pwritev(fd, buffers, offset)
            self.written_nbytes += count
            return count

        monkeypatch.setattr(fcntl, "ioctl", ioctl)
        monkeypatch.setattr(os, "pwritev", pwritev)
        return self


def has_reflinks(folder: Path) -> bool:
    """Return whether `cp` can share the blocks of a file in a folder."""
    (folder / "probe").write_bytes(bytes(PAGE))
    command = ["cp", "--reflink=always", folder / "probe", folder / "copy"]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


@pytest.fixture(params=["simulated", "kernel"])
def sharing(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Sharing]:
    """Yield a simulated file system with reflinks, and a real one if there is one."""
    if request.param == "simulated":
        yield Sharing(tmp_path, copy_bytes).start(monkeypatch)
        return
    parent = os.environ.get(FOLDER_VARIABLE, tmp_path)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        if not has_reflinks(Path(folder)):
            pytest.skip(f"{parent} has no reflinks: set {FOLDER_VARIABLE} to a folder with them")
        yield Sharing(Path(folder), fcntl.ioctl).start(monkeypatch)


def some_bytes(nbytes: int) -> bytes:
    return np.random.default_rng(0).bytes(nbytes)


def copy_stream(
    folder: Path,
    nbytes: int,
    offsets: tuple[int, int] = (0, 0),
    units: list[PipelineUnit] | None = None,
    *,
    has_threads: bool = True,
) -> ConversionResult:
    """Copy a tensor of bytes between two offsets of the files `in` and `out`, in slabs of 32 pages."""
    read_offset, write_offset = offsets
    reads = (flat("uint8", (nbytes,), read_offset),)
    writes = (flat("uint8", (nbytes,), write_offset),)
    stream = Stream("w", "uint8", (nbytes,), (0, nbytes), reads, writes)
    with (
        Files([folder / "in"]) as source,
        Files([folder / "out"], [write_offset + nbytes]) as sink,
    ):
        pipeline = Pipeline(
            [stream],
            source,
            sink=sink,
            budget=Budget(1 << 30, 32 * PAGE, 6),
            progress=NullProgress(),
            units=units,
            has_threads=has_threads,
        )
        return pipeline.run()


@pytest.mark.parametrize("has_threads", [True, False])
@pytest.mark.parametrize(
    ("offsets", "shared_pages"),
    [
        # Slabs of 32, 32 and 16 pages and 123 bytes, which are written.
        ((0, 0), 80),
        ((0, 3 * PAGE), 80),
        # Neither the first nor the last page is whole.
        ((8, 8), 79),
        ((PAGE - 8, 2 * PAGE - 8), 80),
        ((8, 16), 0),
        ((PAGE // 2, 0), 0),
    ],
)
def test_runs_with_equal_page_offsets_are_shared(
    sharing: Sharing, offsets: tuple[int, int], shared_pages: int, has_threads: bool
):
    nbytes = 80 * PAGE + 123
    content = some_bytes(offsets[0] + nbytes)
    (sharing.folder / "in").write_bytes(content)
    result = copy_stream(sharing.folder, nbytes, offsets, has_threads=has_threads)
    expected = content[offsets[0] :]
    assert (sharing.folder / "out").read_bytes() == bytes(offsets[1]) + expected
    assert result.digests[0].written == xxhash.xxh3_128_hexdigest(expected)
    assert sum(count for _, count in sharing.ranges) == shared_pages * PAGE
    assert sharing.written_nbytes == nbytes - shared_pages * PAGE


def test_short_runs_are_written(sharing: Sharing):
    (sharing.folder / "in").write_bytes(some_bytes(15 * PAGE))
    copy_stream(sharing.folder, 15 * PAGE)
    assert not sharing.ranges
    assert sharing.written_nbytes == 15 * PAGE


def test_digest_is_of_the_output_if_the_source_changes(sharing: Sharing):
    nbytes = 80 * PAGE + 123
    (sharing.folder / "in").write_bytes(some_bytes(8 + nbytes))

    def change_source() -> None:
        (sharing.folder / "in").write_bytes(bytes(8 + nbytes))

    sharing.after = change_source
    result = copy_stream(sharing.folder, nbytes, (8, 8))
    written = (sharing.folder / "out").read_bytes()[8:]
    assert any(written)
    assert result.digests[0].written == xxhash.xxh3_128_hexdigest(written)


def test_durable_bytes_are_not_shared_again(sharing: Sharing):
    content = some_bytes(96 * PAGE)
    for name in ("in", "out"):
        (sharing.folder / name).write_bytes(content)
    prefix_nbytes = 40 * PAGE
    digest = xxhash.xxh3_128_hexdigest(content[:prefix_nbytes])
    unit = PipelineUnit(0, [0], prefix=StreamPrefix(0, prefix_nbytes, digest))
    copy_stream(sharing.folder, len(content), units=[unit])
    # The second slab has durable bytes and new ones, and is written.
    assert sharing.ranges == [(64 * PAGE, 32 * PAGE)]
    assert sharing.written_nbytes == 32 * PAGE
    assert (sharing.folder / "out").read_bytes() == content


def test_transposed_tensors_are_not_shared(sharing: Sharing):
    row = bind_row(parse_row("b a <- w: a b"), {"a": 256, "b": 256})
    plan = make_save_plan([row], [(256, 256)])
    streams = plan.plan.streams
    source = plan.write_source(sharing.folder)
    (leaf,) = plan.data_files(sharing.folder)
    copy = sharing.folder / "copy"
    for moved, path, out in ((streams, source, leaf), (reverse_streams(streams), leaf, copy)):
        with Files([path]) as reader, Files([out], [source.stat().st_size]) as sink:
            budget = Budget(1 << 30, 1 << 20, 6)
            Pipeline(moved, reader, sink=sink, budget=budget, progress=NullProgress()).run()
    assert not sharing.ranges
    np.testing.assert_array_equal(plan.read_leaf([leaf]), leaf_by_numpy(row, plan.tensors))
    assert copy.read_bytes() == source.read_bytes()


def test_files_that_are_not_kept_open_are_shared(sharing: Sharing, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files_module, "MAX_KEPT_FILES", 0)
    content = some_bytes(32 * PAGE)
    (sharing.folder / "in").write_bytes(content)
    copy_stream(sharing.folder, len(content))
    assert sharing.ranges == [(0, len(content))]
    assert not sharing.written_nbytes
    assert (sharing.folder / "out").read_bytes() == content


def test_shared_runs_are_synced(sharing: Sharing, monkeypatch: pytest.MonkeyPatch):
    (sharing.folder / "in").write_bytes(some_bytes(PAGE))
    synced: list[int] = []
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    out = sharing.folder / "out"
    page = StridedCopy(0, 0, 0, PAGE)
    with Files([sharing.folder / "in"]) as source, Files([out], [PAGE]) as sink:
        assert sink.share(page, source, page)
        sink.sync()
    assert synced == [out.stat().st_ino]


# Commands


def make_model(folder: Path) -> Path:
    """Write a model in several files, with an embedding and a head of 512 KiB each. Return its folder."""
    make_checkpoint(folder / "model", LLAMA, vocab_size=4096, hidden_size=32, tied=False)
    return folder / "model"


def pad_vocab(folder: Path, out: str) -> tuple[str, ...]:
    """Return the words of a command that adds 64 rows to the vocabulary: 2 pages."""
    return ("pad-vocab", str(folder / "model"), "--size", "4160", "--out", str(folder / out))


def data_files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the safetensors files of a folder."""
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def refuse(number: int) -> Callable[..., int]:
    """Return a system call that fails with an error number."""

    def call(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def test_padded_model_shares_its_tensors(sharing: Sharing):
    model = make_model(sharing.folder)
    run_ok(*pad_vocab(sharing.folder, "shared"))
    shared_nbytes = sum(count for _, count in sharing.ranges)
    # At most a page at each end of both tensors is not shared.
    assert shared_nbytes >= 2 * (512 << 10) - 4 * PAGE
    written_nbytes = sharing.written_nbytes
    sharing.call = refuse(errno.EOPNOTSUPP)
    run_ok(*pad_vocab(sharing.folder, "written"))
    assert sharing.written_nbytes - written_nbytes == written_nbytes + shared_nbytes
    written = data_files(sharing.folder / "written")
    assert written
    assert data_files(sharing.folder / "shared") == written
    tensors: dict[str, np.ndarray] = {}
    for path in model.glob("*.safetensors"):
        tensors |= load_file(path)
    for path in (sharing.folder / "shared").glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            np.testing.assert_array_equal(tensor[: len(tensors[name])], tensors[name])


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_sharing_is_tried_once_per_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    content = some_bytes(96 * PAGE)
    (tmp_path / "in").write_bytes(content)
    sharing = Sharing(tmp_path, refuse(getattr(errno, name))).start(monkeypatch)
    result = copy_stream(tmp_path, len(content))
    assert len(sharing.ranges) == 1
    assert sharing.written_nbytes == len(content)
    assert (tmp_path / "out").read_bytes() == content
    assert result.digests[0].written == xxhash.xxh3_128_hexdigest(content)


@pytest.mark.parametrize("is_shared_again", [True, False])
def test_stopped_conversion_resumes_to_the_same_bytes(
    sharing: Sharing, capsys: pytest.CaptureFixture[str], is_shared_again: bool
):
    make_model(sharing.folder)

    def stop() -> None:
        if len(sharing.ranges) == 2:
            raise PrepError("stopped", "by the test", "none")

    sharing.before = stop
    assert "stopped" in run_failing(capsys, 1, *pad_vocab(sharing.folder, "out"))
    sharing.before = lambda: None
    if not is_shared_again:
        sharing.call = refuse(errno.EXDEV)
    report = run_json(capsys, *pad_vocab(sharing.folder, "out"))
    assert report["bytes"]["resumed"] >= 512 << 10
    sharing.call = refuse(errno.EXDEV)
    run_ok(*pad_vocab(sharing.folder, "expected"))
    assert data_files(sharing.folder / "out") == data_files(sharing.folder / "expected")


@pytest.mark.parametrize("option", [("--compress", "zstd"), ("--dtype", "bfloat16")])
def test_changed_tensors_are_not_shared(sharing: Sharing, option: tuple[str, str]):
    model = make_model(sharing.folder)
    run_ok("save-init", str(model), *option, "--out", str(sharing.folder / "out"))
    # Only side files are shared, in whole.
    assert {nbytes for _, nbytes in sharing.ranges} == {0}


def test_copied_file_is_shared(sharing: Sharing, monkeypatch: pytest.MonkeyPatch):
    model = make_model(sharing.folder)
    content = some_bytes(20 * PAGE + 123)
    (model / "large.txt").write_bytes(content)
    monkeypatch.setattr("shutil.copyfileobj", refuse(errno.EIO))
    out = sharing.folder / "out"
    run_ok("save-init", str(model), "--copy", "large.txt", "--out", str(out))
    assert (out / "hf" / "large.txt").read_bytes() == content
