"""Copy a folder by direct or buffered I/O, in one thread or two: the floor of a conversion's time.

    python -m bench.floor SOURCE OUT --read direct --write paced --threads 2

The copy is durable when the command ends. `bench.evidence` runs all of them and keeps the fastest.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import queue
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from prepcli.engine.write_policy import Writeback, allocate

PAGE_NBYTES = mmap.PAGESIZE
BLOCK_NBYTES = 16 << 20
BUFFER_COUNT = 6
FilledBuffer = tuple[memoryview, int, int]  # buffer, offset in the file, bytes


@dataclass(frozen=True, slots=True)
class CopyMethod:
    """A copy method: how to read (direct, buffered), how to write (direct, buffered, paced), and one or two threads."""

    read: str
    write: str
    threads: int

    def __str__(self) -> str:
        return f"{self.read}/{self.write} x{self.threads}"

    def command(self, source: Path, out: Path) -> tuple[str | Path, ...]:
        """Return the command that copies `source` to `out` with this method."""
        options = ("--read", self.read, "--write", self.write, "--threads", str(self.threads))
        return (sys.executable, "-m", "bench.floor", source, out, *options)


READS, WRITES = ("direct", "buffered"), ("direct", "paced", "buffered")
READ_WRITE_PAIRS = ("direct", "direct"), ("direct", "paced"), ("buffered", "buffered")
COPY_METHODS = tuple(
    CopyMethod(read, write, threads)
    for (read, write), threads in itertools.product(READ_WRITE_PAIRS, (2, 1))
)


def copy_folder(source: Path, out: Path, method: CopyMethod) -> None:
    """Copy all files of a folder into a new folder and fsync them."""
    out.mkdir(parents=True)
    free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(BUFFER_COUNT):
        memory = mmap.mmap(-1, BLOCK_NBYTES)
        memory.madvise(mmap.MADV_HUGEPAGE)
        free.put(memoryview(memory))
    for path in sorted(source.rglob("*")):
        target = out / path.relative_to(source)
        if path.is_dir():
            target.mkdir()
        else:
            _copy_file(path, target, method, free)


def _copy_file(
    source: Path, target: Path, method: CopyMethod, free: queue.SimpleQueue[memoryview]
) -> None:
    reader = os.open(source, os.O_RDONLY | (os.O_DIRECT if method.read == "direct" else 0))
    writer = os.open(
        target,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if method.write == "direct" else 0),
    )
    try:
        size = os.fstat(reader).st_size
        allocate(writer, size)
        _write_blocks(
            _iter_filled_buffers(reader, size, method.read, free),
            _BlockWriter(writer, method.write, free),
            method.threads,
        )
        os.ftruncate(writer, size)  # direct writes are padded to a whole page
        os.fsync(writer)
    finally:
        os.close(reader)
        os.close(writer)


def _iter_filled_buffers(
    reader: int, size: int, read: str, free: queue.SimpleQueue[memoryview]
) -> Iterator[FilledBuffer]:
    for offset in range(0, size, BLOCK_NBYTES):
        buffer = free.get()
        count, wanted = 0, min(BLOCK_NBYTES, size - offset)
        while count < wanted:
            count += os.preadv(reader, [buffer[count:]], offset + count)
        if read == "buffered":
            os.posix_fadvise(reader, offset, count, os.POSIX_FADV_DONTNEED)
        yield buffer, offset, count


class _BlockWriter:
    """Writer of blocks to a file, which returns their buffers to the pool."""

    def __init__(self, writer: int, write: str, free: queue.SimpleQueue[memoryview]) -> None:
        self._writer, self._write, self._free = writer, write, free
        self._writeback = Writeback()

    def write_block(self, block: FilledBuffer) -> None:
        """Write a block, in whole pages for direct I/O, and release its buffer."""
        buffer, offset, count = block
        end = -(-count // PAGE_NBYTES) * PAGE_NBYTES if self._write == "direct" else count
        done = 0
        try:
            while done < end:
                done += os.pwritev(self._writer, [buffer[done:end]], offset + done)
            if self._write == "paced":
                self._writeback.start(self._writer, offset, count)
        finally:
            self._free.put(buffer)


def _write_blocks(blocks: Iterator[FilledBuffer], sink: _BlockWriter, threads: int) -> None:
    if threads == 1:
        for block in blocks:
            sink.write_block(block)
        return
    with ThreadPoolExecutor(1) as pool:
        for written in [pool.submit(sink.write_block, block) for block in blocks]:
            written.result()


def main(arguments: Sequence[str] | None = None) -> None:
    """Copy the folder given by the arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.floor", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that does not exist yet")
    parser.add_argument("--read", choices=READS, default="direct")
    parser.add_argument("--write", choices=WRITES, default="direct")
    parser.add_argument("--threads", type=int, choices=(1, 2), default=2)
    options = parser.parse_args(arguments)
    copy_folder(
        options.source, options.out, CopyMethod(options.read, options.write, options.threads)
    )


if __name__ == "__main__":
    main()
