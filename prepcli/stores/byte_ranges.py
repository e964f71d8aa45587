"""Remote files, read as byte ranges: requests are retried until all bytes are there, small reads are read ahead.

A `RangeReader` makes single requests and raises `RetryableError` if one may be repeated. The time-outs, the retries and
the read-ahead cache, common to all range readers, are in this module. Requests run in daemon threads, which do not
delay the exit of the process.
"""

from __future__ import annotations

import contextvars
import itertools
import math
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from prepcli.core.errors import (
    GET_AGAIN_HINT,
    RERUN_HINT,
    RESUME_HINT,
    DamagedError,
    PrepError,
    usage_error,
)
from prepcli.stores.buffers import ByteArray, allocate_buffer

TIMEOUT_VARIABLE = "PREP_TIMEOUT"
HUB_TIMEOUT_VARIABLE = "HF_HUB_DOWNLOAD_TIMEOUT"  # huggingface_hub reads it too
TIMEOUT_S = 10.0
MAX_TRIES = 4
# Per time-out. A slower response body counts as stalled.
MIN_PROGRESS_NBYTES = 64 << 10
WRITE_TIMEOUT_FACTOR = 3  # requests that store data have this multiple of the time-out
MAX_RETRY_AFTER_S = 300.0  # upper limit of the wait that a server asks for

T = TypeVar("T")
U = TypeVar("U")
MAX_STALLED_TRIES = 8  # consecutive tries that bring almost no bytes
# Time-outs without progress after which fewer tries are made.
MAX_STALLED_TIMEOUTS = 4
FIRST_WAIT_S = 0.5
MAX_WAIT_S = 30.0
# A request that brings fewer bytes made no progress.
PROGRESS_NBYTES = MIN_PROGRESS_NBYTES
DIRECT_READ_NBYTES = 1 << 20  # reads of this size bypass the cache
PART_NBYTES = 4 << 20  # bytes of each concurrent request of a large read
MAX_IN_FLIGHT = 4
# Threads that read a remote checkpoint into arrays, each with one request of at most PART_NBYTES. Stores limit the rate
# of a connection, on GCS and S3 to about 50 MiB/s. 32 connections fill a link of 12 Gbit/s.
MAX_READ_THREADS = 32
MIN_READ_AHEAD_NBYTES = 128 << 10  # doubled with each sequential read
MAX_READ_AHEAD_NBYTES = 2 << 20
# Limit for all cached ranges. A memory budget leaves this much next to its buffers.
READ_AHEAD_CACHE_NBYTES = 6 << 20
LOCK_FILE = ".prep-lock"  # files whose names begin with it belong to the lock, too


def say_nothing(text: str) -> None:
    """Ignore a message."""


@dataclass(frozen=True, slots=True)
class _CallResult(Generic[T]):
    """Result of a call in another thread: its value, as a tuple of one element, or its error."""

    values: tuple[T, ...] = ()
    error: BaseException | None = None

    def get(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.values[0]


def _run_call(call: Callable[[], T]) -> _CallResult[T]:
    try:
        return _CallResult((call(),))
    except BaseException as error:
        return _CallResult(error=error)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Time-out and retries of requests.

    Attributes:
        timeout_s: Seconds to wait for an answer, and for each part of its body.
        say: Called with a text before each retry.
    """

    timeout_s: float = TIMEOUT_S
    say: Callable[[str], object] = say_nothing

    def __reduce__(self) -> tuple[type[RetryPolicy], tuple[float]]:
        """Pickle only the time-out: `say` is local to the process."""
        return RetryPolicy, (self.timeout_s,)

    def backoff_s(self, tries: int) -> float:
        """Return the seconds between try number `tries` and the next one: 1, 2, 4 by default."""
        return self.timeout_s / TIMEOUT_S * 2 ** (tries - 1)

    def report_retry(
        self, failure: str, wait_s: float, *, tries: int, max_tries: int = MAX_TRIES
    ) -> None:
        """Note a failed try and the time of the next one."""
        if wait_s >= 1:
            delay = f" in {wait_s:.0f} s"
        else:
            delay = ""
        self.say(f"{failure}; trying again{delay} ({tries + 1} of {max_tries})")


DEFAULT_RETRY_POLICY = RetryPolicy()


def retry_policy_from_env(environ: Mapping[str, str], say: Callable[[str], object]) -> RetryPolicy:
    """Read the time-out from PREP_TIMEOUT, or from HF_HUB_DOWNLOAD_TIMEOUT."""
    if environ.get(TIMEOUT_VARIABLE):
        name = TIMEOUT_VARIABLE
    else:
        name = HUB_TIMEOUT_VARIABLE
    text = environ.get(name, "").strip()
    if not text:
        return RetryPolicy(say=say)
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    # NaN fails this comparison too. 86400 s is one day.
    if not 0 < timeout_s <= 86400:
        raise usage_error(
            f"{name}={text[:40]} is invalid",
            "it must be a number of seconds above 0, at most 86400",
            f"{name}=30",
        )
    return RetryPolicy(timeout_s, say)


def call_with_timeout(
    call: Callable[[], T],
    limit_s: float | None,
    *,
    on_late: Callable[[], object] | None = None,
    late_s: float = TIMEOUT_S,
) -> T:
    """Run a function in a daemon thread and return its result.

    The calling thread can be interrupted by Ctrl-C even if the function blocks. A late call is abandoned.

    Args:
        call: Function to run.
        limit_s: Seconds after which to raise TimeoutError, or None for no limit.
        on_late: Called once if there is no result after `late_s` seconds.
        late_s: Seconds until `on_late`, less than `limit_s`.

    Raises:
        TimeoutError: The function did not return within `limit_s`.
    """
    results = queue.SimpleQueue[_CallResult[T]]()
    context = contextvars.copy_context()
    threading.Thread(
        target=lambda: results.put(_run_call(lambda: context.run(call))), daemon=True
    ).start()
    result = _wait_for_result(results, late_s if on_late else limit_s)
    if result is None and on_late:
        on_late()
        result = _wait_for_result(results, None if limit_s is None else limit_s - late_s)
    if result is None:
        raise TimeoutError(f"no result within {limit_s:g} s")
    return result.get()


def _wait_for_result(
    results: queue.SimpleQueue[_CallResult[T]], wait_s: float | None
) -> _CallResult[T] | None:
    try:
        return results.get(timeout=wait_s)
    except queue.Empty:
        return None


def map_in_daemon_threads(
    function: Callable[[T], U], items: Iterable[T], *, num_threads: int
) -> list[U]:
    """Apply a function to all items in `num_threads` daemon threads and return the results in order.

    The first error, or Ctrl-C, is raised at once: waiting items are dropped, running ones are abandoned.
    """
    work = deque(enumerate(items))
    results = queue.SimpleQueue[tuple[int, _CallResult[U]]]()
    results_by_number: dict[int, U] = {}
    total = len(work)

    def process_items() -> None:
        while work:
            try:
                number, item = work.popleft()
            except IndexError:  # another thread took the last item
                return
            result = _run_call(lambda item=item: function(item))
            # The other threads find an empty queue, and end after their current items.
            if result.error is not None:
                work.clear()
            results.put((number, result))

    for _ in range(min(num_threads, total)):
        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(process_items,), name="prep-remote", daemon=True
        ).start()
    try:
        while len(results_by_number) < total:
            number, result = results.get()
            results_by_number[number] = result.get()
    finally:
        work.clear()
    return [results_by_number[number] for number in range(total)]


def enforce_throughput(
    chunks: Iterable[bytes], timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[bytes]:
    """Yield the chunks of a response body while they arrive fast enough. Time in the consumer does not count.

    Raises:
        TimeoutError: Fewer than MIN_PROGRESS_NBYTES arrived within `timeout_s`.
    """
    nbytes = 0
    waited_s = 0.0
    source = iter(chunks)
    while True:
        began_s = clock()
        chunk = next(source, None)
        # Only the wait for the source counts, not the time in the consumer of the generator.
        waited_s += clock() - began_s
        if chunk is None:
            return
        nbytes += len(chunk)
        yield chunk
        # A new window begins after every MIN_PROGRESS_NBYTES. The limit is a rate.
        if nbytes >= MIN_PROGRESS_NBYTES:
            nbytes = 0
            waited_s = 0.0
        elif waited_s > timeout_s:
            raise TimeoutError(
                f"fewer than {MIN_PROGRESS_NBYTES >> 10} KiB came in {timeout_s:g} s"
            )


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a remote checkpoint.

    Attributes:
        path: Path within the checkpoint.
        size: Size in bytes.
        digest: Identity of the content, such as `sha256:...` or `etag:...`.
    """

    path: str
    size: int
    digest: str

    @property
    def is_lock(self) -> bool:
        """Whether the file belongs to the lock of an output in a bucket, and not to the output."""
        return self.path.rpartition("/")[2].startswith(LOCK_FILE)


class RetryableError(Exception):
    """Temporary failure of a request. It may be repeated after `retry_after_s` seconds, the server's wait."""

    def __init__(self, why: str, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class RangeReader(Protocol):
    """Client for byte ranges. Several threads use it at once, and it is pickled for other processes."""

    @property
    def name(self) -> str:
        """Name of the checkpoint in messages."""
        ...

    @property
    def retry_policy(self) -> RetryPolicy:
        """Time-out of each request, and the receiver of notes about retries."""
        ...

    def read(self, file: RemoteFile, offset: int, into: ByteArray) -> int:
        """Make one request for the bytes from `offset` on, and return how many were received.

        Raises:
            RetryableError: The request failed and may be repeated.
            PrepError: The file is gone, changed or forbidden.
        """
        ...


def file_changed_error(reader: RangeReader, file: RemoteFile, why: str) -> PrepError:
    """Return the error for a file with other content than listed.

    The hint does not name `--restart`: a training run would delete its steps. The next start of a conversion has
    another plan, and names the option itself.
    """
    return PrepError(
        f"{file.path} changed while it was read", f"in {reader.name}: {why}", RERUN_HINT
    )


def read_range(
    reader: RangeReader,
    file: RemoteFile,
    *,
    offset: int,
    into: ByteArray,
    stop: threading.Event | None = None,
) -> None:
    """Fill `into` with the bytes from `offset` on, with as many requests as necessary.

    Args:
        reader: Makes the requests.
        file: The file to read.
        offset: First byte.
        into: Destination.
        stop: Once set, the next failed request is not repeated.
    """
    tries = FailedTries(reader.retry_policy, stop or threading.Event())
    done = 0
    while done < into.size:
        failure = RetryableError("the answers are cut short or come too slowly")
        began_s = time.monotonic()
        try:
            count = reader.read(file, offset + done, into[done:])
        except RetryableError as error:
            count = 0
            failure = error
        remaining = into.size - done
        done += count
        # Enough bytes arrived: the limits count consecutive tries without progress. The last piece
        # of a range may be shorter than PROGRESS_NBYTES.
        if count >= min(PROGRESS_NBYTES, remaining):
            tries.reset()
            continue
        spent_s = time.monotonic() - began_s
        message = f"{file.path}: {failure}"
        if not tries.wait_for_next(message, spent_s, retry_after_s=failure.retry_after_s):
            what = f"cannot read {file.path} of {reader.name}"
            why = f"{tries.count} tries in a row failed: {failure}"
            raise PrepError(what, why, f"check the network, then {RESUME_HINT}")


def receive_body(
    chunks: Iterable[Any], into: ByteArray, is_cut: Callable[[Exception], bool]
) -> int:
    """Copy the body of an answer into `into` and return the number of bytes received before it ended or was cut.

    Args:
        chunks: Pieces of the body.
        into: Destination. Bytes after its end are ignored.
        is_cut: Whether an error ends the body early. The bytes before it are valid.
    """
    done = 0
    try:
        for chunk in chunks:
            data = np.frombuffer(chunk, np.uint8)
            count = min(data.size, into.size - done)
            into[done : done + count] = data[:count]
            done += count
            # The server sent more than requested. Otherwise the end is read too, which frees the connection.
            if count < data.size:
                break
    except Exception as error:
        if not done or not is_cut(error):
            raise
    return done


@dataclass(slots=True)
class FailedTries:
    """The failed tries of a request in a row. Every store has the same limits of tries and of their time.

    Attributes:
        policy: Time-out of a try, and the receiver of notes.
        stop: Once set, there is no next try.
        count: Number of failed tries.
        spent_s: Seconds that they took.
    """

    policy: RetryPolicy
    stop: threading.Event = field(default_factory=threading.Event)
    count: int = 0
    spent_s: float = 0.0

    def reset(self) -> None:
        """Forget the tries before a request that made progress."""
        self.count = 0
        self.spent_s = 0.0

    def wait_for_next(self, failure: str, spent_s: float, *, retry_after_s: float = 0.0) -> bool:
        """Count a failed try, report it and wait. Return False after the last try."""
        self.count += 1
        self.spent_s += spent_s
        limit_s = MAX_STALLED_TIMEOUTS * self.policy.timeout_s
        if self.count == MAX_STALLED_TRIES or self.spent_s >= limit_s or self.stop.is_set():
            return False
        # Exponential, and at least the server's Retry-After. Jitter of 50 % spreads the retries of many processes.
        backoff_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (self.count - 1)) * random.uniform(0.5, 1)
        wait_s = max(backoff_s, min(retry_after_s, MAX_RETRY_AFTER_S))
        # The number of tries until the error, if all take as long as before.
        tries_in_time = math.ceil(self.count * limit_s / max(self.spent_s, 1e-9))
        max_tries = max(self.count + 1, min(MAX_STALLED_TRIES, tries_in_time))
        self.policy.report_retry(failure, wait_s, tries=self.count, max_tries=max_tries)
        return not self.stop.wait(wait_s)


def read_range_in_parallel(
    reader: RangeReader, file: RemoteFile, *, offset: int, into: ByteArray
) -> None:
    """Fill `into` with the bytes from `offset` on, with concurrent requests if it is large."""
    count = max(1, min(MAX_IN_FLIGHT, into.size // PART_NBYTES))
    if count == 1:
        read_range(reader, file, offset=offset, into=into)
        return
    # E.g. 10 bytes in 4 requests: cuts 0, 2, 5, 7, 10, so parts of 2, 3, 2 and 3 bytes.
    cuts = [into.size * number // count for number in range(count + 1)]
    stop = threading.Event()

    def read(part: tuple[int, int]) -> None:
        read_range(reader, file, offset=offset + part[0], into=into[part[0] : part[1]], stop=stop)

    try:
        map_in_daemon_threads(read, itertools.pairwise(cuts), num_threads=count)
    finally:
        # After an error, the other requests are not repeated.
        stop.set()


@dataclass(frozen=True, slots=True)
class _CachedRange:
    """A byte range of a file in the read-ahead cache."""

    path: str
    start: int
    data: ByteArray

    @property
    def stop(self) -> int:
        return self.start + self.data.size

    def covers(self, path: str, offset: int) -> bool:
        return self.path == path and self.start <= offset < self.stop


class ReadAheadCache:
    """Reader of remote files: large runs directly, small ones through a cache of read-ahead ranges.

    All files share the cache of at most READ_AHEAD_CACHE_NBYTES. The least recently used range is evicted first.
    """

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader
        self._cached_ranges: list[_CachedRange] = []  # least recently used first
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[ReadAheadCache], tuple[RangeReader]]:
        """Pickle the reader without the cached bytes."""
        return ReadAheadCache, (self._reader,)

    def read(
        self, file: RemoteFile, offset: int, into: ByteArray, *, reads_ahead: bool = True
    ) -> None:
        """Fill `into` with the bytes from `offset` on.

        Args:
            file: The file to read.
            offset: First byte.
            into: Destination.
            reads_ahead: Whether a small read requests and keeps bytes after it. Otherwise only these bytes are sent.
        """
        if offset + into.size > file.size:
            why = f"it has {file.size:,} bytes, the read ends at byte {offset + into.size:,}"
            raise DamagedError(
                f"{file.path} of {self._reader.name} is cut short", why, GET_AGAIN_HINT
            )
        # A large read through the cache would copy its bytes and evict the ranges of small reads.
        if into.size >= DIRECT_READ_NBYTES or not reads_ahead:
            # The first bytes may be in the cache.
            done = 0
            with self._lock:
                for cached in self._cached_ranges:
                    if cached.covers(file.path, offset):
                        done = min(cached.stop - offset, into.size)
                        start = offset - cached.start
                        into[:done] = cached.data[start : start + done]
            if done < into.size:
                read_range_in_parallel(self._reader, file, offset=offset + done, into=into[done:])
            return
        # Guards the list of ranges, also during a request. Concurrent small reads of one region
        # then send a single request.
        with self._lock:
            for start, stop, cached in self._ranges_covering(file, offset, offset + into.size):
                into[start - offset : stop - offset] = cached.data[
                    start - cached.start : stop - cached.start
                ]

    def _ranges_covering(
        self, file: RemoteFile, offset: int, stop: int
    ) -> Iterator[tuple[int, int, _CachedRange]]:
        while offset < stop:
            hit = next(
                (cached for cached in self._cached_ranges if cached.covers(file.path, offset)), None
            )
            cached = hit or self._read_ahead(file, offset)
            # Move the range to the end of the list: it is now the most recently used one.
            self._cached_ranges.remove(cached)
            self._cached_ranges.append(cached)
            yield offset, min(stop, cached.stop), cached
            offset = min(stop, cached.stop)

    def _read_ahead(self, file: RemoteFile, offset: int) -> _CachedRange:
        """Read and cache a range from `offset` on.

        If a cached range ends at `offset`, the file is read in order: the new range is twice as large, and replaces it.
        """
        ending_here = (file.path, offset)
        previous = next(
            (cached for cached in self._cached_ranges if (cached.path, cached.stop) == ending_here),
            None,
        )
        if previous:
            wanted = min(2 * previous.data.size, MAX_READ_AHEAD_NBYTES)
        else:
            wanted = MIN_READ_AHEAD_NBYTES
        size = min(wanted, file.size - offset)
        if previous:
            self._cached_ranges = [
                cached for cached in self._cached_ranges if cached is not previous
            ]
        while (
            sum(cached.data.size for cached in self._cached_ranges) + size > READ_AHEAD_CACHE_NBYTES
        ):
            self._cached_ranges.pop(0)
        cached = _CachedRange(file.path, offset, allocate_buffer(size)[:size])
        read_range(self._reader, file, offset=offset, into=cached.data)
        self._cached_ranges.append(cached)
        return cached
