"""Files far away, read in ranges: tried again until the bytes are here, small runs by way of a little read ahead.

A `Ranges` makes single requests and says `Lost` where one may be made again; what is common to all of them is here.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from prepcli.engine.files import ByteArray, allocate_buffer
from prepcli.errors import PrepError
from prepcli.remote.retries import MIN_PROGRESS_NBYTES, RetryPolicy, map_in_daemon_threads

MAX_STALLED_TRIES = 8  # one after another that bring next to nothing
MAX_STALLED_TIMEOUTS = 4  # fewer tries where they take longer: no more than these time-outs without progress
FIRST_WAIT_S = 0.5
MAX_WAIT_S = 30.0
MAX_RETRY_AFTER_S = 300.0  # however long a server wants to be left alone
PROGRESS_NBYTES = MIN_PROGRESS_NBYTES  # a request that brings less has not got anywhere

DIRECT_READ_NBYTES = 1 << 20  # runs of this size are read into their place, with nothing in between
PART_NBYTES = 4 << 20  # of a large run, for a request of its own
MAX_IN_FLIGHT = 4
MIN_READ_AHEAD_NBYTES = 128 << 10  # where reading goes on the next piece is larger
MAX_READ_AHEAD_NBYTES = 2 << 20
READ_AHEAD_CACHE_NBYTES = 6 << 20  # of all pieces: within what a budget leaves beside its buffers


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a checkpoint: its name in there, its size, and a text that tells its content from any other."""

    path: str
    size: int
    digest: str


class RetryableError(Exception):
    """A request came to nothing, and may be made again, after `wait_s` seconds if the other side says so."""

    def __init__(self, why: str, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class RangeReader(Protocol):
    """Who asks for ranges; from several threads at once. Plain data, so that it can go to another process."""

    @property
    def name(self) -> str:
        """The checkpoint, as messages call it."""
        ...

    @property
    def retry_policy(self) -> RetryPolicy:
        """Limits of each request, and who hears of failed ones."""
        ...

    def read(self, file: RemoteFile, offset: int, into: ByteArray) -> int:
        """Make one request for the bytes from `offset` on; the count of those that came, from the first one on.

        Raises Lost, or PrepError where another try is of no use: it is gone, changed, or not for us.
        """
        ...


def file_changed_error(reader: RangeReader, file: RemoteFile, why: str) -> PrepError:
    """The error for a file that is not the one that was listed."""
    return PrepError(f"{file.path} changed while it was read", f"in {reader.name}: {why}", "run again with `--restart`")


def read_range(
    reader: RangeReader, file: RemoteFile, offset: int, into: ByteArray, stop: threading.Event | None = None
) -> None:
    """Fill `into`, however many requests that takes.

    `stop` ends the waiting early, with a PrepError that nobody is meant to see.

    Raises:
        PrepError: TRIES requests in a row, or those of GIVE_UP_TIMEOUTS time-outs, got nowhere.
    """
    stop = stop or threading.Event()
    done, tries, spent_s = 0, 0, 0.0
    while done < into.size:
        lost, began_s = RetryableError("the answers are cut short or come too slowly"), time.monotonic()
        try:
            count = reader.read(file, offset + done, into[done:])
        except RetryableError as error:
            count, lost = 0, error
        wanted, done = into.size - done, done + count
        if count >= min(PROGRESS_NBYTES, wanted):
            tries, spent_s = 0, 0.0
            continue
        tries, spent_s = tries + 1, spent_s + time.monotonic() - began_s
        if (
            tries == MAX_STALLED_TRIES
            or spent_s >= MAX_STALLED_TIMEOUTS * reader.retry_policy.timeout_s
            or stop.is_set()
        ):
            raise _given_up(reader, file, lost, tries)
        wait_s = _wait_s(tries, lost)
        reader.retry_policy.report_retry(
            f"{file.path}: {lost}", wait_s, tries, _expected_tries(tries, spent_s, reader.retry_policy)
        )
        if stop.wait(wait_s):
            raise _given_up(reader, file, lost, tries)


def _expected_tries(tries: int, spent_s: float, patience: RetryPolicy) -> int:
    """Return after how many tries there will be an error if all take as long as those so far."""
    by_time = math.ceil(tries * MAX_STALLED_TIMEOUTS * patience.timeout_s / max(spent_s, 1e-9))
    return max(tries + 1, min(MAX_STALLED_TRIES, by_time))


def _wait_s(tries: int, lost: RetryableError) -> float:
    """Seconds until the next try: longer each time, and not the same for all who wait."""
    own = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (tries - 1)) * random.uniform(0.5, 1)
    return max(own, min(lost.retry_after_s, MAX_RETRY_AFTER_S))


def _given_up(ranges: RangeReader, file: RemoteFile, lost: RetryableError, tries: int) -> PrepError:
    hint = "check the network and run the same command again: it goes on from where it stopped"
    return PrepError(f"cannot read {file.path} of {ranges.name}", f"{tries} tries in a row failed: {lost}", hint)


def read_range_in_parallel(reader: RangeReader, file: RemoteFile, offset: int, into: ByteArray) -> None:
    """Fill `into` with several requests at once if it is large. PrepError as of `read_range`."""
    count = max(1, min(MAX_IN_FLIGHT, into.size // PART_NBYTES))
    if count == 1:
        read_range(reader, file, offset, into)
        return
    cuts = [into.size * number // count for number in range(count + 1)]
    stop = threading.Event()

    def read(part: tuple[int, int]) -> None:
        read_range(reader, file, offset + part[0], into[part[0] : part[1]], stop)

    try:
        map_in_daemon_threads(read, itertools.pairwise(cuts), count)
    finally:
        stop.set()  # after an error the others give up at their next wait


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a file that were read ahead."""

    path: str
    start: int
    data: ByteArray

    @property
    def stop(self) -> int:
        return self.start + self.data.size

    def has(self, path: str, offset: int) -> bool:
        return self.path == path and self.start <= offset < self.stop


class ReadAheadCache:
    """Remote files as they are read: large runs into their place, small ones out of pieces that were read ahead.

    All files share the pieces, which hold at most AHEAD_NBYTES; the one that was not used for longest goes first.
    """

    def __init__(self, reader: RangeReader) -> None:
        self._ranges = reader
        self._pieces: list[_Piece] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[ReadAheadCache], tuple[RangeReader]]:
        return ReadAheadCache, (self._ranges,)

    def read(self, file: RemoteFile, offset: int, into: ByteArray) -> None:
        """Fill `into`. PrepError as of `read_range`, and for bytes that the file does not have."""
        if offset + into.size > file.size:
            why = f"it has {file.size:,} bytes, asked for are those up to {offset + into.size:,}"
            raise PrepError(f"{file.path} of {self._ranges.name} is cut short", why)
        if into.size >= DIRECT_READ_NBYTES:
            read_range_in_parallel(self._ranges, file, offset, into)
            return
        with self._lock:
            for start, stop, piece in self._covering(file, offset, offset + into.size):
                into[start - offset : stop - offset] = piece.data[start - piece.start : stop - piece.start]

    def _covering(self, file: RemoteFile, offset: int, stop: int) -> Iterator[tuple[int, int, _Piece]]:
        while offset < stop:
            piece = next((p for p in self._pieces if p.has(file.path, offset)), None) or self._fetched(file, offset)
            self._pieces.remove(piece)
            self._pieces.append(piece)
            yield offset, min(stop, piece.stop), piece
            offset = min(stop, piece.stop)

    def _fetched(self, file: RemoteFile, offset: int) -> _Piece:
        """The next piece: twice as large as the one that it follows, which is not needed any more."""
        before = next((p for p in self._pieces if (p.path, p.stop) == (file.path, offset)), None)
        wanted = min(2 * before.data.size, MAX_READ_AHEAD_NBYTES) if before else MIN_READ_AHEAD_NBYTES
        size = min(wanted, file.size - offset)
        if before:
            self._pieces = [piece for piece in self._pieces if piece is not before]
        while sum(piece.data.size for piece in self._pieces) + size > READ_AHEAD_CACHE_NBYTES:
            self._pieces.pop(0)
        piece = _Piece(file.path, offset, allocate_buffer(size)[:size])
        read_range(self._ranges, file, offset, piece.data)
        self._pieces.append(piece)
        return piece


@dataclass(frozen=True, slots=True)
class RemoteBlob:
    """A remote file to read tensors from."""

    file: RemoteFile
    cache: ReadAheadCache

    @property
    def name(self) -> str:
        return self.file.path

    def open(self) -> RemoteBlobReader:
        return RemoteBlobReader(self)


class RemoteBlobReader:
    """A remote file while it is read: connections are the session's, so there is nothing to let go of."""

    def __init__(self, blob: RemoteBlob) -> None:
        self._blob = blob

    def read_at(self, offset: int, into: ByteArray) -> None:
        self._blob.cache.read(self._blob.file, offset, into)

    def close(self) -> None:
        """Nothing is held."""
