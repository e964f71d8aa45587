"""The HTTP client that huggingface_hub uses while prep runs: time-outs on every request, and retries that are told.

The library's own client waits for ever on most requests and retries in silence on others. Here each request has the
limits of a Patience, the last failure is a NoAnswer, which the library passes on, and the library's own retries see
only requests whose body cannot be sent twice.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from prepcli.remote.retries import (
    MAX_RETRY_AFTER_S,
    MAX_TRIES,
    MIN_PROGRESS_NBYTES,
    WRITE_TIMEOUT_FACTOR,
    RetryPolicy,
    call_with_timeout,
    enforce_throughput,
)

NO_RETRY_EXTENSION = "prep_once"  # extension of a request that its sender retries itself
RETRYABLE_STATUSES = {408, 425, 429, *range(500, 600)}
MALFORMED_ANSWER = "the hub's answer is not understood"
CHECK_ENDPOINT = "a proxy or a login page may have answered: check the network and HF_ENDPOINT"


class NoAnswerError(OSError):
    """All tries of a request failed. `status` is the server's last one if it answered with trouble of its own."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.status = status


def install_retrying_client(retry_policy: RetryPolicy) -> None:
    """Make huggingface_hub send all requests of this process within the limits of `patience`."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    record = _Record()

    def make() -> Any:
        client: Any = default_client_factory()
        http = sys.modules[type(client).__module__.partition(".")[0]]  # httpx, or a fork of it
        client.send = _Sender(client.send, http, retry_policy, record)
        return client

    set_client_factory(make)


def is_malformed_answer(error: BaseException) -> bool:
    """Return whether huggingface_hub stumbled over an answer: HTML, another type, a missing key."""
    if not isinstance(error, ValueError | LookupError | TypeError | AttributeError):
        return False
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith("huggingface_hub") for frame, _ in frames)


@dataclass(slots=True)
class _Record:
    """State that outlives a client: the failed tries of each request since it last made progress."""

    has_answered: bool = False
    failures: dict[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Sender:
    """Replacement of `Client.send`."""

    send: Callable[..., Any]
    http: Any
    patience: RetryPolicy
    record: _Record

    def __call__(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        """Send a request; after a failure again, where its body can be sent again."""
        if NO_RETRY_EXTENSION in request.extensions:
            return self.send(request, stream=stream, **options)
        while True:
            try:
                response = self._read(request, stream, self._answer(request, options))
            except self._lost as error:
                if isinstance(error, self.http.ConnectError) and not self.record.has_answered:
                    raise  # no network: there is nothing to wait for
                self._failed(request, self._text(request, error), error)
                if not self._can_repeat(request):
                    raise  # the library sends it again, from the start of its body
                continue
            if response.status_code not in RETRYABLE_STATUSES or _is_commit(request):
                return response
            self._failed(request, f"{_host(request)} says {response.status_code}", None, response)
            if not self._can_repeat(request):
                return response
            response.close()

    @property
    def _lost(self) -> tuple[type[Exception], ...]:
        return self.http.TimeoutException, self.http.NetworkError, self.http.RemoteProtocolError

    def _can_repeat(self, request: Any) -> bool:
        return isinstance(request.stream, self.http.ByteStream)

    def _answer(self, request: Any, options: dict[str, Any]) -> Any:
        """Return the answer with its body unread; ReadTimeout if its headers are not there in time."""
        timeout_s = self.patience.timeout_s
        limit_s = timeout_s * (1 if request.method in ("GET", "HEAD") else WRITE_TIMEOUT_FACTOR)
        limits = {"connect": timeout_s, "read": limit_s, "write": limit_s, "pool": limit_s}
        request.extensions = {**request.extensions, "timeout": limits}
        body_nbytes = int(request.headers.get("content-length") or 0)
        whole_s = limit_s * (1 + body_nbytes / MIN_PROGRESS_NBYTES) if self._can_repeat(request) else None
        try:
            response = call_with_timeout(lambda: self.send(request, stream=True, **options), whole_s)
        except TimeoutError as error:
            raise self.http.ReadTimeout(str(error), request=request) from error
        self.record.has_answered = True
        return response

    def _read(self, request: Any, stream: bool, response: Any) -> Any:
        """Return a response whose body is read, or for a stream is limited as it is read."""
        response.stream = self._limited(response.stream, request, stream)
        if stream or response.status_code in RETRYABLE_STATUSES:
            return response
        try:
            response.read()
        except BaseException:
            response.close()
            raise
        if not _is_commit(request):
            self.record.failures.pop(_key(request), None)
        return response

    def _limited(self, inner: Any, request: Any, stream: bool) -> Any:
        """Return the stream of a body that fails where it comes too slowly; failures of a download are counted."""
        sender = self

        class Limited(self.http.SyncByteStream):
            def __iter__(self) -> Iterator[bytes]:
                try:
                    yield from sender._in_pace(inner, request)
                except sender._lost as error:
                    if stream:
                        sender._failed(request, sender._text(request, error), error)
                    raise

            def close(self) -> None:
                inner.close()

        return Limited()

    def _in_pace(self, inner: Any, request: Any) -> Iterator[bytes]:
        nbytes = 0
        try:
            for chunk in enforce_throughput(inner, self.patience.timeout_s):
                yield chunk
                nbytes += len(chunk)
                if nbytes >= MIN_PROGRESS_NBYTES:
                    self.record.failures.pop(_key(request), None)
        except TimeoutError as error:
            raise self.http.ReadTimeout(str(error), request=request) from error

    def _failed(self, request: Any, failure: str, error: Exception | None, busy: Any = None) -> None:
        """Count a failed try, then wait; NoAnswer after the last one."""
        failures, key = self.record.failures, _key(request)
        tries = failures[key] = failures.get(key, 0) + 1
        if tries == MAX_TRIES or _is_commit(request):
            failures.pop(key)
            counted = f" ({tries} tries)" if tries > 1 else ""
            raise NoAnswerError(failure + counted, busy.status_code if busy is not None else 0) from error
        asked_s = min(retry_after_s(busy.headers), MAX_RETRY_AFTER_S) if busy is not None else 0.0
        if busy is not None:
            busy.headers.pop("retry-after", None)  # the library would wait for it again
            busy.headers.pop("ratelimit", None)
        wait_s = max(self.patience.backoff_s(tries), asked_s)
        self.patience.report_retry(failure, wait_s, tries)
        time.sleep(wait_s)

    def _text(self, request: Any, error: Exception) -> str:
        host = _host(request)
        if isinstance(error.__cause__, TimeoutError) and "fewer" in str(error):
            return f"{host} is too slow: {error}"
        if isinstance(error, self.http.TimeoutException):
            factor = 1 if request.method in ("GET", "HEAD") else WRITE_TIMEOUT_FACTOR
            return f"no answer from {host} for {self.patience.timeout_s * factor:g} s"
        if isinstance(error, self.http.ConnectError):
            return f"cannot connect to {host}"
        return f"{host} closed the connection"


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds that a Retry-After header asks to wait, as a number or a date; 0 if there is none."""
    text = headers.get("retry-after", "").strip()
    if text.isdecimal():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _is_commit(request: Any) -> bool:
    """Return whether a request makes a commit: a second one could make it twice."""
    return request.method == "POST" and "/commit/" in request.url.path


def _key(request: Any) -> tuple[str, str]:
    return request.method, str(request.url)


def _host(request: Any) -> str:
    return request.url.netloc.decode()
