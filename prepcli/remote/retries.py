"""How long prep waits for a server, how often it tries again, and work in threads that no exit waits for."""

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

from prepcli.errors import usage_error

TIMEOUT_VARIABLE = "PREP_TIMEOUT"
HUB_TIMEOUT_VARIABLE = "HF_HUB_DOWNLOAD_TIMEOUT"  # of huggingface_hub
TIMEOUT_S = 10.0
MAX_TRIES = 4
MIN_PROGRESS_NBYTES = 64 << 10  # in one time-out: a body that comes more slowly counts as stopped
WRITE_TIMEOUT_FACTOR = 3  # a server that stores data answers later than one that reads it
MAX_RETRY_AFTER_S = 60.0  # of a Retry-After header

T = TypeVar("T")
U = TypeVar("U")


def ignore_note(text: str) -> None:
    """Drop a note."""


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    """Result of a call in another thread: its values, one or none, or its error."""

    values: tuple[T, ...] = ()
    error: BaseException | None = None

    def get(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.values[0]


def _outcome(call: Callable[[], T]) -> _Outcome[T]:
    try:
        return _Outcome((call(),))
    except BaseException as error:
        return _Outcome(error=error)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of a request: `timeout_s` for an answer and for each part of it; `note` is called before each new try."""

    timeout_s: float = TIMEOUT_S
    note: Callable[[str], object] = ignore_note

    def __reduce__(self) -> tuple[type[RetryPolicy], tuple[float]]:
        """Pickle without `note`, which belongs to this process."""
        return RetryPolicy, (self.timeout_s,)

    def backoff_s(self, tries: int) -> float:
        """Return the seconds between try number `tries` and the next one: 1, 2, 4 by default."""
        return self.timeout_s / TIMEOUT_S * 2 ** (tries - 1)

    def report_retry(self, failure: str, wait_s: float, tries: int, max_tries: int = MAX_TRIES) -> None:
        """Tell the user that a try failed and that another one follows."""
        later = f" in {wait_s:.0f} s" if wait_s >= 1 else ""
        self.note(f"{failure}; trying again{later} ({tries + 1} of {max_tries})")


DEFAULT_RETRY_POLICY = RetryPolicy()


def retry_policy_from_env(environ: Mapping[str, str], note: Callable[[str], object]) -> RetryPolicy:
    """Read the time-out from PREP_TIMEOUT, else from the hub library's variable.

    Raises:
        PrepError: It is not a positive number of seconds (usage).
    """
    name = TIMEOUT_VARIABLE if environ.get(TIMEOUT_VARIABLE) else HUB_TIMEOUT_VARIABLE
    text = environ.get(name, "").strip()
    if not text:
        return RetryPolicy(note=note)
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= 86400:
        raise usage_error(f"{name}={text[:40]} is invalid", "it takes seconds, at most 86400", f"{name}=30")
    return RetryPolicy(timeout_s, note)


def call_with_timeout(
    call: Callable[[], T], limit_s: float | None, on_late: Callable[[], object] | None = None, late_s: float = TIMEOUT_S
) -> T:
    """Return the result of a call that runs in a daemon thread.

    The calling thread stays open to Ctrl-C, whatever the call blocks on. A call that is too late is abandoned.

    Args:
        call: Function to run.
        limit_s: Seconds after which it is too late; None for no limit.
        late: Called once where the result is not there after `late_s` seconds, less than `limit_s`.
        late_s: See `late`.

    Raises:
        TimeoutError: The call did not return within `limit_s`.
    """
    results = queue.SimpleQueue[_Outcome[T]]()
    context = contextvars.copy_context()
    threading.Thread(target=lambda: results.put(_outcome(lambda: context.run(call))), daemon=True).start()
    outcome = _result(results, late_s if on_late else limit_s)
    if outcome is None and on_late:
        on_late()
        outcome = _result(results, None if limit_s is None else limit_s - late_s)
    if outcome is None:
        raise TimeoutError(f"no result within {limit_s:g} s")
    return outcome.get()


def _result(results: queue.SimpleQueue[_Outcome[T]], wait_s: float | None) -> _Outcome[T] | None:
    try:
        return results.get(timeout=wait_s)
    except queue.Empty:
        return None


def map_in_daemon_threads(function: Callable[[T], U], items: Iterable[T], num_threads: int) -> list[U]:
    """Apply a function to all items in `count` daemon threads and return the results in order.

    The first error, or Ctrl-C, is raised at once: items that no thread has begun are dropped, and no exit waits for
    those under way.
    """
    work = deque(enumerate(items))
    results = queue.SimpleQueue[tuple[int, _Outcome[U]]]()
    found: dict[int, U] = {}
    total = len(work)

    def drain() -> None:
        while work:
            try:
                number, item = work.popleft()
            except IndexError:  # another thread took it
                return
            outcome = _outcome(lambda item=item: function(item))
            if outcome.error is not None:
                work.clear()
            results.put((number, outcome))

    for _ in range(min(num_threads, total)):
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(drain,), name="prep-remote", daemon=True).start()
    try:
        while len(found) < total:
            number, outcome = results.get()
            found[number] = outcome.get()
    finally:
        work.clear()
    return [found[number] for number in range(total)]


def enforce_throughput(
    chunks: Iterable[bytes], timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[bytes]:
    """Pass on the chunks of a body; only the time spent waiting for them counts.

    Raises:
        TimeoutError: Fewer than LEAST_NBYTES came within `timeout_s`.
    """
    nbytes, waited_s, source = 0, 0.0, iter(chunks)
    while True:
        began_s = clock()
        chunk = next(source, None)
        waited_s += clock() - began_s
        if chunk is None:
            return
        nbytes += len(chunk)
        yield chunk
        if nbytes >= MIN_PROGRESS_NBYTES:
            nbytes, waited_s = 0, 0.0
        elif waited_s > timeout_s:
            raise TimeoutError(f"fewer than {MIN_PROGRESS_NBYTES >> 10} KiB came in {timeout_s:g} s")
