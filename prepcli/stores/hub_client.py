"""HTTP requests to the hub: a client for huggingface_hub with time-outs, and reads of byte ranges.

The library's own client waits without limit on most requests and retries some silently. Here each request follows a
RetryPolicy, and the last failure is a NoAnswerError, not caught by the library. The library's retries apply
only to requests with a body that can be sent once.

Byte ranges are read over the library's own session with its proxies, certificates and token. The URL of a large file
redirects to a signed URL on another host. A signed URL expires, and must not receive the token: it is reused until it
fails, then requested again.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urljoin, urlsplit

from prepcli.core.errors import PrepError
from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import (
    DEFAULT_RETRY_POLICY,
    MAX_RETRY_AFTER_S,
    MAX_TRIES,
    MIN_PROGRESS_NBYTES,
    WRITE_TIMEOUT_FACTOR,
    RemoteFile,
    RetryableError,
    RetryPolicy,
    call_with_timeout,
    enforce_throughput,
    file_changed_error,
    receive_body,
)

NO_RETRY_EXTENSION = "prep_once"  # extension of a request that the caller retries
RETRYABLE_STATUSES = {408, 425, 429, *range(500, 600)}
MALFORMED_ANSWER = "the hub's answer is malformed"
CHECK_ENDPOINT = "a proxy or a login page may have answered: check the network and HF_ENDPOINT"
HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
MAX_REDIRECTS = 5
# A store's answers for an expired signed URL.
EXPIRED_URL_STATUSES = {400, 401, 403, 404, 410}
# At most 19 digits: every size below 2**63 has at most 19, and longer numbers are not converted.
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-[0-9]{1,19}/([0-9]{1,19}|\*)")
_COUNT = re.compile(r"[0-9]{1,19}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
        # `default_client_factory` is private. The public `set_client_factory` replaces the client as a whole, and
        # without the library's own one its hooks would be lost: request ids, offline mode and the limits of the cloud
        # environment. Tested with huggingface_hub 2.4.0.
        from huggingface_hub.utils._http import default_client_factory

        client = default_client_factory()
        http = sys.modules[type(client).__module__.partition(".")[0]]  # httpx, or a fork of it
        client.send = _RetryingSender(client.send, http, retry_policy, state)
        return client

    set_client_factory(make)


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
        """Read the body of a response. Wrap the body of a stream for later."""
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
            tries_text = f" ({tries} tries)" if tries > 1 else ""
            raise NoAnswerError(
                failure + tries_text, response.status_code if response is not None else 0
            ) from error
        server_wait_s = 0.0
        if response is not None:
            server_wait_s = min(retry_after_s(response.headers), MAX_RETRY_AFTER_S)
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
            factor = 1 if request.method in ("GET", "HEAD") else WRITE_TIMEOUT_FACTOR
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


@dataclass(slots=True)
class _FileUrl:
    """URL of a file, and the ETag of its first answer."""

    url: str
    is_external: bool
    etag: str = ""


@dataclass(slots=True)
class HubRangeReader:
    """RangeReader of the files of one commit of a repository."""

    name: str
    commit: str
    endpoint: str
    retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY
    file_urls: dict[str, _FileUrl] = field(default_factory=dict, repr=False)

    def read(self, file: RemoteFile, offset: int, into: ByteArray) -> int:
        """Make one request, following redirects. See `RangeReader.read`."""
        from huggingface_hub import hf_hub_url

        file_url = self.file_urls.get(file.path)
        if file_url is None:
            url = hf_hub_url(self.name, file.path, revision=self.commit, endpoint=self.endpoint)
            file_url = _FileUrl(url, is_external=False)
        for _ in range(MAX_REDIRECTS):
            count_or_redirect = self._request(file_url, file, offset, into)
            if isinstance(count_or_redirect, int):
                return count_or_redirect
            file_url = count_or_redirect
        raise RetryableError("its URL leads to a redirect loop")

    def _request(
        self, file_url: _FileUrl, file: RemoteFile, offset: int, into: ByteArray
    ) -> int | _FileUrl:
        """Return the number of bytes received, or the URL of a redirect."""
        from huggingface_hub.utils import build_hf_headers

        # Only the hub's own endpoint receives the token. Ranges count unencoded bytes.
        headers = build_hf_headers(token=False if file_url.is_external else None)
        headers |= {
            "Accept-Encoding": "identity",
            "Range": f"bytes={offset}-{offset + into.size - 1}",
        }
        try:
            with contextlib.closing(self._send_get(file_url.url, headers)) as response:
                if 300 <= response.status_code < 400:
                    return self._follow_redirect(file_url, file, response.headers)
                self._check_status(file_url, file, response.status_code, response.headers)
                self._check_range(file, offset, response.status_code, response.headers)
                # Later ranges of the file skip the hub's redirect, until the signed URL expires.
                self.file_urls[file.path] = file_url
                chunks = enforce_throughput(response.iter_raw(), self.retry_policy.timeout_s)
                return receive_body(chunks, into, is_network_error)
        except Exception as error:
            if not is_network_error(error):
                raise
            raise RetryableError(_failure_text(error, file_url.url, self.retry_policy)) from error

    def _send_get(self, url: str, headers: dict[str, str]) -> Any:
        """Send one GET and return the response with its body unread."""
        from huggingface_hub.utils import get_session

        session = get_session()
        timeout_s = self.retry_policy.timeout_s
        request = session.build_request(
            "GET", url, headers=headers, timeout=timeout_s, extensions={NO_RETRY_EXTENSION: True}
        )
        return call_with_timeout(
            lambda: session.send(request, stream=True, follow_redirects=False), timeout_s
        )

    def _follow_redirect(
        self, file_url: _FileUrl, file: RemoteFile, headers: Mapping[str, str]
    ) -> _FileUrl:
        self._check_digest(file, headers)
        try:
            url = urljoin(file_url.url, headers.get("location", ""))
            scheme, host = urlsplit(url)[:2]
        except ValueError:
            scheme = host = url = ""
        if scheme not in ("http", "https") or not host or url == file_url.url:
            raise RetryableError("its URL redirects to an invalid URL")
        # An external URL gets no token: a redirect to another scheme or host must not leak it.
        return _FileUrl(url, (scheme, host) != urlsplit(self.endpoint)[:2])

    def _check_digest(self, file: RemoteFile, headers: Mapping[str, str]) -> None:
        """Compare the SHA-256 in the endpoint's headers, for large files, with the listed one."""
        sha256 = headers.get("x-linked-etag", "").strip('W/"')
        if (
            _SHA256.fullmatch(sha256)
            and file.digest.startswith("sha256:")
            and file.digest != f"sha256:{sha256}"
        ):
            raise file_changed_error(
                self, file, f"it was {file.digest}, the hub now has sha256:{sha256}"
            )

    def _check_status(
        self, file_url: _FileUrl, file: RemoteFile, status: int, headers: Mapping[str, str]
    ) -> None:
        """Raise unless the answer has bytes of the listed file."""
        if status in RETRYABLE_STATUSES:
            raise RetryableError(f"HTTP {status} from the server", retry_after_s(headers))
        if file_url.is_external and status in EXPIRED_URL_STATUSES:
            # The retry starts at the hub again, which redirects to a newly signed URL.
            self.file_urls.pop(file.path, None)
            raise RetryableError(f"HTTP {status} from the URL that the hub redirects to")
        if status in (412, 416):
            raise file_changed_error(self, file, f"HTTP {status} from the server")
        if status not in (200, 206):
            why = f"HTTP {status} from the hub"
            hint = f"check {self.endpoint}/{self.name}"
            if status in (401, 403):
                why = f"{why}: access is not granted any more"
                hint = f"{hint}, then `hf auth login`, or set HF_TOKEN"
            raise PrepError(f"cannot read {file.path} of {self.name}", why, hint)
        if not file_url.is_external:
            self._check_digest(file, headers)
        etag = headers.get("etag", "").removeprefix("W/")
        if file_url.etag and etag and etag != file_url.etag:
            raise file_changed_error(self, file, f"its ETag was {file_url.etag}, now it is {etag}")
        file_url.etag = file_url.etag or etag

    def _check_range(
        self, file: RemoteFile, offset: int, status: int, headers: Mapping[str, str]
    ) -> None:
        """Raise unless the answer has the requested range."""
        if headers.get("content-encoding", "identity") != "identity":
            raise RetryableError("the server encodes its answer")
        content_range = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
        size = ""
        if status == 200:
            size = headers.get("content-length", "")
        elif content_range:
            size = content_range[2]
        if _COUNT.fullmatch(size) and int(size) != file.size:
            raise file_changed_error(
                self, file, f"it had {file.size:,} bytes, now it has {int(size):,}"
            )
        # A whole file from byte 0 is a valid answer only for a range that starts there.
        if status == 200 and offset:
            raise RetryableError("the server sends the whole file instead of a range")
        if status == 206 and (content_range is None or int(content_range[1]) != offset):
            raise RetryableError("the server sends another range than the requested one")


def is_network_error(error: BaseException) -> bool:
    """Return whether an error is one of the connection or of the HTTP library."""
    from huggingface_hub.errors import HfHubHTTPError

    from_library = type(error).__module__.partition(".")[0] in HTTP_LIBRARIES
    return (from_library or isinstance(error, OSError)) and not isinstance(
        error, HfHubHTTPError | PrepError
    )


def _failure_text(error: BaseException, url: str, retry_policy: RetryPolicy) -> str:
    """Describe a failed request: the silent host, or the library's message."""
    if isinstance(error, TimeoutError) or type(error).__name__.endswith("Timeout"):
        return f"no answer from {urlsplit(url).netloc} for {retry_policy.timeout_s:g} s"
    # The library's message without its (signed) URLs.
    text = re.sub(r"https?://\S+", "…", str(error))
    return text or type(error).__name__
