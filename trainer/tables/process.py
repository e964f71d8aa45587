"""Start worker processes that decode tables, and receive their rows."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import BinaryIO, cast

from trainer.tables.batches import InvalidRow, Part
from trainer.tables.messages import RANGE, ROWS, Kind, read_message, write_message

# Memory of a worker without its rows: a page or a record batch, compressed and decompressed, and
# dictionaries.
DECODING_NBYTES = 1 << 30
# Memory for copies of the largest row: in its page, in its batch and in the message.
ROW_COPIES = 8


class TableError(Exception):
    """A file cannot be decoded.

    Attributes:
        why: The cause.
        exceeds_memory: Whether a part of the file needs more memory than the worker may use.
    """

    def __init__(self, why: str, *, exceeds_memory: bool = False) -> None:
        """Create the error. See the attributes."""
        super().__init__(why)
        self.why = why
        self.exceeds_memory = exceeds_memory


class _Worker:
    """A worker process of this process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._process = subprocess.Popen(
            # Without -P, a file `json.py` in the current folder would be imported.
            [sys.executable, "-P", "-m", "trainer.tables.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.requests = cast(BinaryIO, self._process.stdout)
        self.answers = cast(BinaryIO, self._process.stdin)

    @property
    def is_usable(self) -> bool:
        """Whether this process has started the worker, and the worker still runs."""
        return self.owner == os.getpid() and self._process.poll() is None

    def stop(self) -> int:
        """Kill the process if it still runs. Return its exit code, or minus the signal's number."""
        self._process.kill()
        self.requests.close()
        with suppress(OSError):
            # The pipe may hold bytes that the killed process has not read.
            self.answers.close()
        return self._process.wait()

    def wait(self) -> int:
        """Wait for a process with a closed pipe. Return its exit code or minus a signal number."""
        return self._process.wait()


# Idle workers, kept for the next file: a new worker takes a second to start.
_idle: list[_Worker] = []


def read_table(
    stream: BinaryIO, table_format: str, nbytes: int, max_row_nbytes: int
) -> Iterator[Part | InvalidRow]:
    """Yield the valid parts and the invalid rows of a table, decoded by a worker process.

    Args:
        stream: The file, seekable.
        table_format: PARQUET or ARROW.
        nbytes: Size of the file.
        max_row_nbytes: Maximum bytes of the values of a row.

    Raises:
        TableError: The file is malformed, or needs too much memory.
    """
    # A file states the sizes of its pages and dictionaries, and pyarrow allocates what it states. Only
    # the system can limit that, and only for a whole process: the worker fails, and the run goes on
    # to report the file. E.g. rows of 64 MiB give 1 GiB + 8 * 64 MiB = 1.5 GiB.
    max_nbytes = DECODING_NBYTES + ROW_COPIES * max_row_nbytes
    worker = _take_worker()
    is_done = False
    try:
        settings = {
            "format": table_format,
            "nbytes": nbytes,
            "max_row_nbytes": max_row_nbytes,
            "max_nbytes": max_nbytes,
        }
        write_message(worker.answers, Kind.OPEN, json.dumps(settings).encode())
        yield from _receive_parts(stream, worker, max_nbytes)
        is_done = True
    except TableError as error:
        is_done = not error.exceeds_memory
        raise
    except (EOFError, BrokenPipeError):
        raise TableError(_describe_end(worker.wait())) from None
    finally:
        # A worker in the middle of a file, e.g. of a caller that stops early, still sends rows. After
        # a failed allocation its heap may be full. Neither is used again.
        if is_done:
            _idle.append(worker)
        else:
            worker.stop()


def _receive_parts(
    stream: BinaryIO, worker: _Worker, max_nbytes: int
) -> Iterator[Part | InvalidRow]:
    """Yield the parts that the worker decodes. Send it the bytes that it requests."""
    from pyarrow import ipc

    while True:
        kind, content = read_message(worker.requests)
        if kind is Kind.END:
            return
        if kind is Kind.READ:
            offset, nbytes = RANGE.unpack(content)
            stream.seek(offset)
            write_message(worker.answers, Kind.DATA, _read_range(stream, nbytes))
        elif kind is Kind.INVALID_ROW:
            yield InvalidRow(**json.loads(content))
        elif kind is Kind.BATCH:
            first_row, share = ROWS.unpack_from(content)
            batch = ipc.open_stream(memoryview(content)[ROWS.size :]).read_next_batch()
            yield Part(batch, first_row, share)
        else:
            raise _decoding_error(json.loads(content), max_nbytes)


def _read_range(stream: BinaryIO, nbytes: int) -> bytes:
    """Return the next `nbytes` bytes of a stream, fewer only at its end."""
    blocks: list[bytes] = []
    while nbytes > 0 and (block := stream.read(nbytes)):
        blocks.append(block)
        nbytes -= len(block)
    return b"".join(blocks)


def _decoding_error(content: dict[str, object], max_nbytes: int) -> TableError:
    """Return the worker's error as a TableError."""
    if "exceeds_memory" not in content:
        return TableError(str(content["why"]))
    why = f"a page, dictionary or record batch of it needs more than {max_nbytes:,} bytes of memory"
    return TableError(why, exceeds_memory=True)


def _describe_end(code: int) -> str:
    """Return why a worker ended."""
    if code >= 0:
        return f"the process that decodes it ended with exit code {code}"
    return f"the process that decodes it ended by {signal.Signals(-code).name}"


def _take_worker() -> _Worker:
    """Return an idle worker, or a new one.

    A forked process inherits the list of idle workers. It does not use them: two processes on one
    pair of pipes would mix their messages.
    """
    while _idle:
        worker = _idle.pop()
        if worker.is_usable:
            return worker
    return _Worker()


@atexit.register
def stop_workers() -> None:
    """End the idle workers of this process."""
    while _idle:
        worker = _idle.pop()
        if worker.owner == os.getpid():
            worker.stop()
