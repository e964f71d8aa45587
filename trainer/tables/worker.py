"""The process that decodes tables: `python -m trainer.tables.worker`.

It reads the bytes of the file through its parent, so it needs no access to the file, which may be
remote. It ends when its parent does.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from prepcli.core.json_values import JsonObject
from trainer.tables.batches import InvalidRow, Part, read_parts
from trainer.tables.messages import RANGE, ROWS, Kind, read_message, write_message

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# pyarrow reads a few bytes at a time. Each read of the buffer is a message to the parent.
BUFFER_NBYTES = 64 << 10
# Maximum bytes of the file in one message, which both processes hold in memory.
MAX_READ_NBYTES = 4 << 20


class ParentFile(io.RawIOBase):
    """A file read through the parent process."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO, nbytes: int) -> None:
        """Start at the first byte.

        Args:
            requests: Pipe to the parent.
            answers: Pipe from the parent.
            nbytes: Size of the file.
        """
        self._requests = requests
        self._answers = answers
        self._nbytes = nbytes
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset from the start, the position or the end. Return the new position."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        if start + offset < 0:
            raise OSError(f"there is no byte {start + offset:,}")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read bytes into a buffer. Return their number, 0 at the end."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._nbytes - self._position, MAX_READ_NBYTES))
        if not count:
            return 0
        write_message(self._requests, Kind.READ, RANGE.pack(self._position, count))
        _, data = read_message(self._answers)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def main() -> None:
    """Decode files at the requests of the parent, one after another."""
    # SLURM and terminals send a signal to all processes of a job. The parent handles it. If the
    # worker ended at once, the parent would report a malformed file.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # A malformed file may crash the decoder. The parent reports the signal, and nobody needs the
    # dump.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = cast(BinaryIO, sys.stdin.buffer)
    requests = cast(BinaryIO, sys.stdout.buffer)
    # Other allocators reserve 1 GiB at once, which counts for the limit. pyarrow reads this name
    # when it is loaded.
    os.putenv("ARROW_DEFAULT_MEMORY_POOL", "system")
    try:
        import pyarrow
        import pyarrow.parquet

        # A second thread for decoding or reading would have buffers of its own.
        pyarrow.set_cpu_count(1)
        pyarrow.set_io_thread_count(1)
        start_nbytes = _private_memory_nbytes()
        while True:
            _, settings = read_message(answers)
            _send_file(json.loads(settings), requests, answers, start_nbytes)
    except (EOFError, BrokenPipeError):
        return


def _send_file(
    settings: Mapping[str, Any], requests: BinaryIO, answers: BinaryIO, start_nbytes: int
) -> None:
    """Send the rows of a file to the parent."""
    from pyarrow import ArrowException

    max_row_nbytes = int(settings["max_row_nbytes"])
    _limit_memory(start_nbytes + int(settings["max_nbytes"]))
    file = ParentFile(requests, answers, int(settings["nbytes"]))
    stream = cast(BinaryIO, io.BufferedReader(file, BUFFER_NBYTES))
    failure: JsonObject | None = None
    try:
        for part in read_parts(stream, settings["format"], int(settings["nbytes"]), max_row_nbytes):
            _send_part(part, requests)
    except MemoryError:
        failure = {"exceeds_memory": True}
    except (ArrowException, ValueError, OSError, RecursionError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        failure = {"why": str(error).partition("\n")[0] or type(error).__name__}
    if failure is None:
        write_message(requests, Kind.END)
    else:
        write_message(requests, Kind.FAILED, json.dumps(failure).encode())


def _send_part(part: Part | InvalidRow, requests: BinaryIO) -> None:
    """Send rows, or an invalid row, to the parent process."""
    from pyarrow import BufferOutputStream, ipc

    if isinstance(part, InvalidRow):
        values = {"number": part.number, "why": part.why, "nbytes": part.nbytes}
        write_message(requests, Kind.INVALID_ROW, json.dumps(values).encode())
        return
    sink = BufferOutputStream()
    with ipc.new_stream(sink, part.batch.schema) as writer:
        writer.write_batch(part.batch)
    content = sink.getvalue()
    write_message(requests, Kind.BATCH, ROWS.pack(part.first_row, part.nbytes), memoryview(content))


def _limit_memory(nbytes: int) -> None:
    """Limit the private memory of this process."""
    # RLIMIT_DATA counts private writable memory (since Linux 4.7), not the mapped libraries of
    # pyarrow, which RLIMIT_AS would count. A failed allocation raises MemoryError or ends the
    # process.
    hard_limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard_limit != resource.RLIM_INFINITY:
        nbytes = min(nbytes, hard_limit)
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, hard_limit))


def _private_memory_nbytes() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmData":
            return int(value.split()[0]) << 10
    return 0


if __name__ == "__main__":
    main()
