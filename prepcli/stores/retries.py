"""Time-outs and retries of requests, and calls in daemon threads: they do not delay the exit of the process."""

from __future__ import annotations

import contextvars
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from prepcli.core.errors import usage_error

TIMEOUT_VARIABLE = "PREP_TIMEOUT"
HUB_TIMEOUT_VARIABLE = "HF_HUB_DOWNLOAD_TIMEOUT"  # huggingface_hub reads it too
TIMEOUT_S = 10.0
MAX_TRIES = 4
# Per time-out. A slower response body counts as stalled.
MIN_PROGRESS_NBYTES = 64 << 10
WRITE_TIMEOUT_FACTOR = 3  # requests that store data have this multiple of the time-out
MAX_RETRY_AFTER_S = 60.0  # upper limit of a Retry-After header

T = TypeVar("T")
U = TypeVar("U")


def ignore_note(text: str) -> None:
    """Ignore a note."""


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
        note: Called with a text before each retry.
    """

    timeout_s: float = TIMEOUT_S
    note: Callable[[str], object] = ignore_note

    def __reduce__(self) -> tuple[type[RetryPolicy], tuple[float]]:
        """Pickle only the time-out: `note` is local to the process."""
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
        self.note(f"{failure}; trying again{delay} ({tries + 1} of {max_tries})")


DEFAULT_RETRY_POLICY = RetryPolicy()


def retry_policy_from_env(environ: Mapping[str, str], note: Callable[[str], object]) -> RetryPolicy:
    """Read the time-out from PREP_TIMEOUT, or from HF_HUB_DOWNLOAD_TIMEOUT.

    Raises:
        UsageError: The value is not a number of seconds above 0, at most 86400.
    """
    if environ.get(TIMEOUT_VARIABLE):
        name = TIMEOUT_VARIABLE
    else:
        name = HUB_TIMEOUT_VARIABLE
    text = environ.get(name, "").strip()
    if not text:
        return RetryPolicy(note=note)
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
    return RetryPolicy(timeout_s, note)


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
