"""Ranges of a hub's files over HTTP, through huggingface_hub's own session: its proxies, certificates and token.

A large file's address redirects to a signed one elsewhere, which expires and must not be told the token: it is kept
while it works and asked for anew when it does not.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin, urlsplit

import numpy as np

from prepcli.engine.files import ByteArray
from prepcli.errors import PrepError
from prepcli.remote.hub_client import NO_RETRY_EXTENSION, RETRYABLE_STATUSES, retry_after_s
from prepcli.remote.remote_files import RemoteFile, RetryableError, file_changed_error
from prepcli.remote.retries import DEFAULT_RETRY_POLICY, RetryPolicy, call_with_timeout, enforce_throughput

HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
MAX_REDIRECTS = 5
EXPIRED_URL_STATUSES = {400, 401, 403, 404, 410}  # what stores say of a signed address whose time is over

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-[0-9]{1,19}/([0-9]{1,19}|\*)")
_COUNT = re.compile(r"[0-9]{1,19}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(slots=True)
class _Place:
    """Where a file's bytes are served, and the ETag that they had there first."""

    url: str
    is_elsewhere: bool
    etag: str = ""


@dataclass(slots=True)
class HubRangeReader:
    """Reads files of one commit of a repository."""

    name: str
    commit: str
    endpoint: str
    retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY
    file_urls: dict[str, _Place] = field(default_factory=dict, repr=False)

    def read(self, file: RemoteFile, offset: int, into: ByteArray) -> int:
        """As `remote.Ranges` has it."""
        place = self.file_urls.get(file.path) or _Place(self._address(file), is_elsewhere=False)
        for _ in range(MAX_REDIRECTS):
            found = self._ask(place, file, offset, into)
            if isinstance(found, int):
                return found
            place = found
        raise RetryableError("its address redirects in a circle")

    def _address(self, file: RemoteFile) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.name, file.path, revision=self.commit, endpoint=self.endpoint)

    def _ask(self, place: _Place, file: RemoteFile, offset: int, into: ByteArray) -> int | _Place:
        """The count of bytes that came, or where they are to be asked for instead."""
        headers = self._headers(place) | {"Range": f"bytes={offset}-{offset + into.size - 1}"}
        try:
            with contextlib.closing(self._answer(place.url, headers)) as response:
                if 300 <= response.status_code < 400:
                    return self._redirected(place, file, response.headers)
                self._check(place, file, response.status_code, response.headers)
                self._check_range(file, offset, response.status_code, response.headers)
                self.file_urls[file.path] = place
                return _received(response, into, self.retry_policy.timeout_s)
        except Exception as error:
            if not is_network_error(error):
                raise
            raise RetryableError(_failure(error, place.url, self.retry_policy)) from error

    def _answer(self, url: str, headers: dict[str, str]) -> Any:
        """Return the answer to one GET, its body unread."""
        from huggingface_hub.utils import get_session

        session, timeout_s = get_session(), self.retry_policy.timeout_s
        request = session.build_request(
            "GET", url, headers=headers, timeout=timeout_s, extensions={NO_RETRY_EXTENSION: True}
        )
        return call_with_timeout(lambda: session.send(request, stream=True, follow_redirects=False), timeout_s)

    def _headers(self, place: _Place) -> dict[str, str]:
        """Whoever is not the endpoint is not told the token."""
        from huggingface_hub.utils import build_hf_headers

        built = build_hf_headers(token=False if place.is_elsewhere else None)
        return {**built, "Accept-Encoding": "identity"}  # ranges are of the bytes as they are

    def _redirected(self, place: _Place, file: RemoteFile, headers: Mapping[str, str]) -> _Place:
        self._check_digest(file, headers)
        try:
            url = urljoin(place.url, headers.get("location", ""))
            scheme, host = urlsplit(url)[:2]
        except ValueError:
            scheme = host = url = ""
        if scheme not in ("http", "https") or not host or url == place.url:
            raise RetryableError("its address redirects to nowhere")
        return _Place(url, (scheme, host) != urlsplit(self.endpoint)[:2])

    def _check_digest(self, file: RemoteFile, headers: Mapping[str, str]) -> None:
        """The endpoint tells the SHA-256 of a large file with every answer."""
        told = headers.get("x-linked-etag", "").strip('W/"')
        if _SHA256.fullmatch(told) and file.digest.startswith("sha256:") and file.digest != f"sha256:{told}":
            raise file_changed_error(self, file, f"it was {file.digest}, the hub now has sha256:{told}")

    def _check(self, place: _Place, file: RemoteFile, status: int, headers: Mapping[str, str]) -> None:
        """Raise for an answer that is not the file's bytes as they were."""
        if status in RETRYABLE_STATUSES:
            raise RetryableError(f"the server says {status}", retry_after_s(headers))
        if place.is_elsewhere and status in EXPIRED_URL_STATUSES:
            self.file_urls.pop(file.path, None)
            raise RetryableError(f"the server that the hub names says {status}")
        if status in (412, 416):
            raise file_changed_error(self, file, f"the server says {status}")
        if status not in (200, 206):
            why = f"the hub says {status}" + (": access is not granted any more" if status in (401, 403) else "")
            raise PrepError(f"cannot read {file.path} of {self.name}", why)
        if not place.is_elsewhere:
            self._check_digest(file, headers)
        etag = headers.get("etag", "").removeprefix("W/")
        if place.etag and etag and etag != place.etag:
            raise file_changed_error(self, file, f"its ETag was {place.etag}, now it is {etag}")
        place.etag = place.etag or etag

    def _check_range(self, file: RemoteFile, offset: int, status: int, headers: Mapping[str, str]) -> None:
        """Raise for an answer of other bytes than were asked for."""
        if headers.get("content-encoding", "identity") != "identity":
            raise RetryableError("the server encodes what it sends")
        found = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
        size = headers.get("content-length", "") if status == 200 else found[2] if found else ""
        if _COUNT.fullmatch(size) and int(size) != file.size:
            raise file_changed_error(self, file, f"it had {file.size:,} bytes, now it has {int(size):,}")
        if status == 200 and offset:
            raise RetryableError("the server sends the whole file where a range was asked for")
        if status == 206 and (found is None or int(found[1]) != offset):
            raise RetryableError("the server sends another range than was asked for")


def _received(response: Any, into: ByteArray, timeout_s: float) -> int:
    """The count of bytes that came before the answer ended, was cut, or was all there."""
    done = 0
    try:
        for chunk in enforce_throughput(response.iter_raw(), timeout_s):
            count = min(len(chunk), into.size - done)
            into[done : done + count] = np.frombuffer(chunk, np.uint8, count)
            done += count
            if count < len(chunk):  # more than was asked for: the connection is of no further use
                break
    except Exception as error:
        if not is_network_error(error):
            raise
        if not done:
            raise
    return done


def is_network_error(error: BaseException) -> bool:
    """Whether an error is of the connection, or of the library that makes it, and not of the program."""
    from huggingface_hub.errors import HfHubHTTPError

    from_library = type(error).__module__.partition(".")[0] in HTTP_LIBRARIES
    return (from_library or isinstance(error, OSError)) and not isinstance(error, HfHubHTTPError | PrepError)


def _failure(error: BaseException, url: str, patience: RetryPolicy) -> str:
    """Name a failed request: the host where nothing came in time, else what the library says."""
    if isinstance(error, TimeoutError) or type(error).__name__.endswith("Timeout"):
        return f"no answer from {urlsplit(url).netloc} for {patience.timeout_s:g} s"
    return _text_of(error)


def _text_of(error: BaseException) -> str:
    """What the library says, without the addresses in it: they are signed."""
    text = re.sub(r"https?://\S+", "…", str(error))
    return text or type(error).__name__
