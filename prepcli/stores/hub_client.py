"""HTTP client for huggingface_hub with a time-out on every request and reported retries.

The library's own client waits without limit on most requests and retries some silently. Here each request follows a
RetryPolicy, and the last failure is a NoAnswerError, not caught by the library. The library's retries apply
only to requests with a body that can be sent once.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from prepcli.stores.retries import (
    MAX_RETRY_AFTER_S,
    MAX_TRIES,
    MIN_PROGRESS_NBYTES,
    WRITE_TIMEOUT_FACTOR,
    RetryPolicy,
    call_with_timeout,
    enforce_throughput,
)

NO_RETRY_EXTENSION = "prep_once"  # extension of a request that the caller retries
RETRYABLE_STATUSES = {408, 425, 429, *range(500, 600)}
MALFORMED_ANSWER = "the hub's answer is malformed"
CHECK_ENDPOINT = "a proxy or a login page may have answered: check the network and HF_ENDPOINT"


class NoAnswerError(OSError):
    """Failure of all tries of a request. `status` is the server's last HTTP error status, or 0."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.status = status


def install_retrying_client(retry_policy: RetryPolicy) -> None:
    """Make huggingface_hub send all requests of this process with these time-outs and retries."""
    from huggingface_hub import set_client_factory

    state = _RetryState()

    def make() -> Any:
        client = _default_client()
        http = sys.modules[type(client).__module__.partition(".")[0]]  # httpx, or a fork of it
        client.send = _RetryingSender(client.send, http, retry_policy, state)
        return client

    set_client_factory(make)


def _default_client() -> Any:
    """Return the default client of huggingface_hub, with its proxies, event hooks and TLS settings."""
    # `default_client_factory` is private. The public `set_client_factory` replaces the client as
    # a whole, and without the library's own one its hooks would be lost: request ids, offline
    # mode and the limits of the cloud environment. Tested with huggingface_hub 2.4.0.
    from huggingface_hub.utils._http import default_client_factory

    return default_client_factory()


def is_malformed_answer(error: BaseException) -> bool:
    """Return whether huggingface_hub failed to parse an answer: HTML, a wrong type or a missing key."""
    if not isinstance(error, ValueError | LookupError | TypeError | AttributeError):
        return False
    # A built-in exception with a frame of huggingface_hub in its traceback comes from the library.
    frames = traceback.walk_tb(error.__traceback__)
    return any(
        frame.f_globals.get("__name__", "").startswith("huggingface_hub") for frame, _ in frames
    )


@dataclass(slots=True)
class _RetryState:
    """Retry state, shared by all clients: the failed tries of each request since it last made progress."""

    has_answered: bool = False
    failures: dict[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _RetryingSender:
    """Replacement of `Client.send` with time-outs and retries."""

    send: Callable[..., Any]
    http: Any
    retry_policy: RetryPolicy
    state: _RetryState

    def __call__(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        """Send a request, and resend it after a failure if its body can be sent again."""
        if NO_RETRY_EXTENSION in request.extensions:
            return self.send(request, stream=stream, **options)
        while True:
            try:
                response = self._read_body(
                    request, stream, self._send_with_timeout(request, options)
                )
            except self._network_errors as error:
                # The first connection of the process failed, so the machine is offline. Retries would
                # only delay the error message.
                if isinstance(error, self.http.ConnectError) and not self.state.has_answered:
                    raise
                self._record_failure(request, self._failure_text(request, error), error)
                if not self._can_resend(request):
                    # The library resends it from the start of its body.
                    raise
                continue
            if response.status_code not in RETRYABLE_STATUSES or _is_commit(request):
                return response
            self._record_failure(
                request,
                f"HTTP {response.status_code} from {_request_host(request)}",
                None,
                response,
            )
            if not self._can_resend(request):
                return response
            response.close()

    @property
    def _network_errors(self) -> tuple[type[Exception], ...]:
        return self.http.TimeoutException, self.http.NetworkError, self.http.RemoteProtocolError

    def _can_resend(self, request: Any) -> bool:
        # A body in memory can be sent twice. A file or a generator is at its end after the first
        # try, and only the library can rewind it.
        return isinstance(request.stream, self.http.ByteStream)

    def _send_with_timeout(self, request: Any, options: dict[str, Any]) -> Any:
        """Send a request and return the response with its body unread.

        Raise ReadTimeout if its headers are late.
        """
        timeout_s = self.retry_policy.timeout_s
        limit_s = timeout_s * (1 if request.method in ("GET", "HEAD") else WRITE_TIMEOUT_FACTOR)
        limits = {"connect": timeout_s, "read": limit_s, "write": limit_s, "pool": limit_s}
        request.extensions = {**request.extensions, "timeout": limits}
        body_nbytes = int(request.headers.get("content-length") or 0)
        if self._can_resend(request):
            # Time to send the body at the minimum rate, MIN_PROGRESS_NBYTES per limit, and one
            # limit for the answer. e.g. 128 KiB with a limit of 10 s: 10 * (1 + 2) = 30 s.
            whole_s = limit_s * (1 + body_nbytes / MIN_PROGRESS_NBYTES)
        else:
            whole_s = None
        try:
            response = call_with_timeout(
                lambda: self.send(request, stream=True, **options), whole_s
            )
        except TimeoutError as error:
            raise self.http.ReadTimeout(str(error), request=request) from error
        self.state.has_answered = True
        return response

    def _read_body(self, request: Any, stream: bool, response: Any) -> Any:
        """Read the body of a response. Wrap the body of a stream, which is read later."""
        response.stream = self._limit_stream(response.stream, request, stream)
        if stream or response.status_code in RETRYABLE_STATUSES:
            return response
        try:
            response.read()
        except BaseException:
            response.close()
            raise
        if not _is_commit(request):
            self.state.failures.pop(_request_key(request), None)
        return response

    def _limit_stream(self, inner: Any, request: Any, stream: bool) -> Any:
        """Wrap a body to fail if the data arrives too slowly, and count the failures of a download."""
        sender = self

        class Limited(self.http.SyncByteStream):
            def __iter__(self) -> Iterator[bytes]:
                try:
                    yield from sender._enforce_throughput(inner, request)
                except sender._network_errors as error:
                    if stream:
                        sender._record_failure(request, sender._failure_text(request, error), error)
                    raise

            def close(self) -> None:
                inner.close()

        return Limited()

    def _enforce_throughput(self, inner: Any, request: Any) -> Iterator[bytes]:
        nbytes = 0
        try:
            for chunk in enforce_throughput(inner, self.retry_policy.timeout_s):
                yield chunk
                nbytes += len(chunk)
                if nbytes >= MIN_PROGRESS_NBYTES:
                    self.state.failures.pop(_request_key(request), None)
        except TimeoutError as error:
            raise self.http.ReadTimeout(str(error), request=request) from error

    def _record_failure(
        self, request: Any, failure: str, error: Exception | None, response: Any = None
    ) -> None:
        """Count a failed try and wait for the next one. Raise NoAnswerError after the last one."""
        failures = self.state.failures
        key = _request_key(request)
        tries = failures[key] = failures.get(key, 0) + 1
        if tries == MAX_TRIES or _is_commit(request):
            failures.pop(key)
            if tries > 1:
                tries_text = f" ({tries} tries)"
            else:
                tries_text = ""
            raise NoAnswerError(
                failure + tries_text, response.status_code if response is not None else 0
            ) from error
        if response is not None:
            server_wait_s = min(retry_after_s(response.headers), MAX_RETRY_AFTER_S)
        else:
            server_wait_s = 0.0
        if response is not None:
            response.headers.pop("retry-after", None)  # the library would wait a second time
            response.headers.pop("ratelimit", None)
        wait_s = max(self.retry_policy.backoff_s(tries), server_wait_s)
        self.retry_policy.report_retry(failure, wait_s, tries=tries)
        time.sleep(wait_s)

    def _failure_text(self, request: Any, error: Exception) -> str:
        host = _request_host(request)
        if isinstance(error.__cause__, TimeoutError) and "fewer" in str(error):
            return f"{host} is too slow: {error}"
        if isinstance(error, self.http.TimeoutException):
            if request.method in ("GET", "HEAD"):
                factor = 1
            else:
                factor = WRITE_TIMEOUT_FACTOR
            return f"no answer from {host} for {self.retry_policy.timeout_s * factor:g} s"
        if isinstance(error, self.http.ConnectError):
            return f"cannot connect to {host}"
        return f"{host} closed the connection"


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds of a Retry-After header (a number or a date), or 0 if there is none."""
    text = headers.get("retry-after", "").strip()
    if text.isdecimal():
        # 9 digits bound the conversion of an untrusted header. The caller limits the wait further.
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _is_commit(request: Any) -> bool:
    """Return whether a request creates a commit: a retry could create a second one."""
    return request.method == "POST" and "/commit/" in request.url.path


def _request_key(request: Any) -> tuple[str, str]:
    return request.method, str(request.url)


def _request_host(request: Any) -> str:
    return request.url.netloc.decode()
