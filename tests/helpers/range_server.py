"""File server on the loopback interface for byte ranges, with injected faults.

with serving_ranges({"weights": content}, Faults(rate=0.3)) as store:
    …  # store.url + "/weights", store.asked: the headers of each request
"""

from __future__ import annotations

import functools
import hashlib
import random
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit

from tests.helpers import loopback

# Kinds of bytes after the range: counted in Content-Length, not counted, or in an answer without
# Content-Length.
SURPLUS_KINDS = ("announced", "unannounced", "unframed")
NUM_SURPLUS = 1000
FAULT_KINDS = ("drop", "empty", "short", "refuse", "busy", "limit", "whole", "other")


@dataclass(slots=True)
class FaultInjector:
    """Random faults for a fraction `rate` of the requests, reproducible by `seed`."""

    rate: float = 0.0
    kinds: tuple[str, ...] = FAULT_KINDS
    seed: int = 0
    injected: list[str] = field(default_factory=list)
    _random: random.Random = field(default_factory=random.Random, repr=False)

    def __post_init__(self) -> None:
        self._random.seed(self.seed)

    def next_fault(self) -> str:
        """Return the fault for the next request; empty for none."""
        fault = (
            self._random.choice(self.kinds)
            if self.kinds and self._random.random() < self.rate
            else ""
        )
        self.injected.append(fault)
        return fault


@dataclass(frozen=True, slots=True)
class SentRange:
    """Bytes of a file that a server has sent: from `start` to `stop`."""

    name: str
    start: int
    stop: int


@dataclass(slots=True)
class FakeFileStore:
    """A running file server: its files, and method, path and headers of the requests so far."""

    files: dict[str, bytes]
    faults: FaultInjector
    # Number of requests after which a signed URL expires.
    max_url_uses: int = 1 << 30
    url: str = ""
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    signature_uses: dict[str, int] = field(default_factory=dict)
    retry_after: str = "0"
    delay_s: float = 0.0

    def signed_url(self, name: str) -> str:
        """Return a signed URL of a file."""
        return f"{self.url}/{name}?signature={len(self.signature_uses)}"


@functools.lru_cache(64)
def etag(content: bytes) -> str:
    """Return the ETag of a content, with quotes."""
    return f'"{hashlib.md5(content).hexdigest()}"'


def send_range(
    handler: BaseHTTPRequestHandler, content: bytes, fault: str, headers: Mapping[str, str]
) -> tuple[int, int]:
    """Answer a GET with the requested range, changed by the fault; return the range of bytes that were sent."""
    low, high = parse_range(handler.headers.get("Range", ""), len(content))
    has_range = "Range" in handler.headers
    if fault == "refuse":
        _hang_up(handler)
    elif fault in ("busy", "limit"):
        _send(handler, 503 if fault == "busy" else 429, b"", headers)
    elif low >= len(content):
        _send(handler, 416, b"", {"Content-Range": f"bytes */{len(content)}"})
    elif fault == "whole" or not has_range:
        _send(handler, 200, content, headers)
        return 0, len(content)
    else:
        if fault == "short":
            high = max(low + 1, (low + high) // 2)
        if fault == "other":
            low, high = max(0, low - 1), max(1, high - 1)
        body = content[low:high]
        if fault in SURPLUS_KINDS:
            _send_surplus(
                handler,
                fault,
                body,
                {**headers, "Content-Range": f"bytes {low}-{high - 1}/{len(content)}"},
            )
            return low, high
        sent = {"drop": len(body) // 2, "empty": 0}.get(fault, len(body))
        _send(
            handler,
            206,
            body[:sent],
            {**headers, "Content-Range": f"bytes {low}-{high - 1}/{len(content)}"},
            len(body),
        )
        return low, low + sent
    return 0, 0


def parse_range(text: str, size: int) -> tuple[int, int]:
    """Return the first byte and one past the last of a Range header; the whole content if there is none."""
    first, _, last = text.removeprefix("bytes=").partition("-")
    return int(first or 0), min(size, int(last) + 1 if last else size)


def _send(
    handler: BaseHTTPRequestHandler,
    status: int,
    body: bytes,
    headers: Mapping[str, str],
    length: int | None = None,
) -> None:
    handler.send_response(status)
    length = len(body) if length is None else length
    for name, value in {**headers, "Content-Length": str(length)}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)
    if len(body) < length:
        _hang_up(handler)


def _send_surplus(
    handler: BaseHTTPRequestHandler, fault: str, body: bytes, headers: Mapping[str, str]
) -> None:
    """Send more bytes than the range has, as a faulty proxy does."""
    surplus = bytes(NUM_SURPLUS)
    if fault == "announced":
        _send(handler, 206, body + surplus, headers)
        return
    handler.send_response(206)
    for name, value in headers.items():
        handler.send_header(name, value)
    if fault == "unannounced":
        handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body + surplus)
    _hang_up(handler)


def _hang_up(handler: BaseHTTPRequestHandler) -> None:
    """Close the connection in the middle of an answer."""
    handler.wfile.flush()
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serve_ranges(
    files: Mapping[str, bytes], faults: FaultInjector | None = None, max_url_uses: int = 1 << 30
) -> Iterator[FakeFileStore]:
    """Serve these files from a thread."""
    store = FakeFileStore(dict(files), faults or FaultInjector(), max_url_uses)

    class Handler(_Handler):
        served = store

    with loopback.serve(Handler) as store.url:
        yield store


class _Handler(loopback.Handler):
    served: FakeFileStore

    def do_GET(self) -> None:
        """Answer with a range of a file, or 403 if the signed URL has expired."""
        parts = urlsplit(self.path)
        name = unquote(parts.path).strip("/")
        self.served.requests.append(("GET", name, dict(self.headers)))
        signature = "".join(parse_qs(parts.query).get("signature", []))
        time.sleep(self.served.delay_s)
        self.served.signature_uses[signature] = self.served.signature_uses.get(signature, 0) + 1
        if signature and self.served.signature_uses[signature] > self.served.max_url_uses:
            _send(self, 403, b"<Error>ExpiredToken</Error>", {})
        elif name not in self.served.files:
            _send(self, 404, b"", {})
        else:
            content = self.served.files[name]
            send_range(
                self,
                content,
                self.served.faults.next_fault(),
                {"ETag": etag(content), "Retry-After": self.served.retry_after},
            )
