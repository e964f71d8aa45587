"""Byte ranges of files on the hub, over huggingface_hub's own session with its proxies, certificates and token.

The URL of a large file redirects to a signed URL on another host. A signed URL expires, and must not receive the token:
it is reused until it fails, then requested again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin, urlsplit

import numpy as np

from prepcli.core.errors import PrepError
from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import RemoteFile, RetryableError, file_changed_error
from prepcli.stores.hub_client import NO_RETRY_EXTENSION, RETRYABLE_STATUSES, retry_after_s
from prepcli.stores.retries import (
    DEFAULT_RETRY_POLICY,
    RetryPolicy,
    call_with_timeout,
    enforce_throughput,
)

HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
MAX_REDIRECTS = 5
# A store's answers for an expired signed URL.
EXPIRED_URL_STATUSES = {
    400,
    401,
    403,
    404,
    410,
}

# At most 19 digits: every size below 2**63 has at most 19, and longer numbers are not converted.
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-[0-9]{1,19}/([0-9]{1,19}|\*)")
_COUNT = re.compile(r"[0-9]{1,19}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
        file_url = self.file_urls.get(file.path) or _FileUrl(self._hub_url(file), is_external=False)
        for _ in range(MAX_REDIRECTS):
            count_or_redirect = self._request(file_url, file, offset, into)
            if isinstance(count_or_redirect, int):
                return count_or_redirect
            file_url = count_or_redirect
        raise RetryableError("its URL leads to a redirect loop")

    def _hub_url(self, file: RemoteFile) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.name, file.path, revision=self.commit, endpoint=self.endpoint)

    def _request(
        self, file_url: _FileUrl, file: RemoteFile, offset: int, into: ByteArray
    ) -> int | _FileUrl:
        """Return the number of bytes received, or the URL of a redirect."""
        headers = self._request_headers(file_url) | {
            "Range": f"bytes={offset}-{offset + into.size - 1}"
        }
        try:
            with contextlib.closing(self._send_get(file_url.url, headers)) as response:
                if 300 <= response.status_code < 400:
                    return self._follow_redirect(file_url, file, response.headers)
                self._check_status(file_url, file, response.status_code, response.headers)
                self._check_range(file, offset, response.status_code, response.headers)
                # Later ranges of the file skip the hub's redirect, until the signed URL expires.
                self.file_urls[file.path] = file_url
                return _receive(response, into, self.retry_policy.timeout_s)
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

    def _request_headers(self, file_url: _FileUrl) -> dict[str, str]:
        """Return the request headers. Only the hub's own endpoint receives the token."""
        from huggingface_hub.utils import build_hf_headers

        headers = build_hf_headers(token=False if file_url.is_external else None)
        return {**headers, "Accept-Encoding": "identity"}  # ranges count unencoded bytes

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


def _receive(response: Any, into: ByteArray, timeout_s: float) -> int:
    """Copy the body into `into` and return the number of bytes received before it ended or was cut."""
    done = 0
    try:
        for chunk in enforce_throughput(response.iter_raw(), timeout_s):
            count = min(len(chunk), into.size - done)
            into[done : done + count] = np.frombuffer(chunk, np.uint8, count)
            done += count
            if count < len(chunk):  # the server sent more than requested
                break
    except Exception as error:
        if not is_network_error(error):
            raise
        if not done:
            raise
    return done


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
    return _redacted_text(error)


def _redacted_text(error: BaseException) -> str:
    """Return the library's message without its (signed) URLs."""
    text = re.sub(r"https?://\S+", "…", str(error))
    return text or type(error).__name__
