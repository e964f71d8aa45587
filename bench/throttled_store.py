"""An S3 store on the loopback interface with the delay and the rate per connection of a real store.

    python -m bench.throttled_store FOLDER --mib-s 16 --delay-ms 20

Serves the files of FOLDER as the objects of the bucket `bucket`, read-only. Every answer begins after the delay, and
its body is sent at the rate. The first line of stdout is the URL. `GET /-/counts` answers with the traffic since the
last `GET /-/reset`, as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.helpers import loopback
from tests.helpers.range_server import parse_range

BUCKET = "bucket"
# The rate is kept by sleeping between pieces of this size.
PIECE_NBYTES = 256 << 10
MIB = 1 << 20
LAST_MODIFIED = "Mon, 01 Jan 2024 00:00:00 GMT"


@dataclass(frozen=True)
class Traffic:
    """The traffic of a store.

    Attributes:
        requests: Requests of all kinds.
        nbytes: Sent bytes of objects.
        repeated_nbytes: Bytes among `nbytes` that were sent before.
        max_concurrent: Largest number of requests under way at once.
    """

    requests: int = 0
    nbytes: int = 0
    repeated_nbytes: int = 0
    max_concurrent: int = 0


@dataclass
class ThrottledStore:
    """A running store.

    Attributes:
        folder: Folder with the objects.
        rate: Bytes per second of each connection.
        delay_s: Seconds until an answer begins.
        url: Its URL.
    """

    folder: Path
    rate: float
    delay_s: float
    url: str = ""
    _requests: int = 0
    _concurrent: int = 0
    _max_concurrent: int = 0
    _sent: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def counted_request(self) -> Iterator[None]:
        """Count a request. It is under way until the end of the block."""
        with self._lock:
            self._requests += 1
            self._concurrent += 1
            self._max_concurrent = max(self._max_concurrent, self._concurrent)
        try:
            yield
        finally:
            with self._lock:
                self._concurrent -= 1

    def count_bytes(self, key: str, start: int, stop: int) -> None:
        """Count bytes of an object."""
        with self._lock:
            self._sent.setdefault(key, []).append((start, stop))

    def reset(self) -> None:
        """Forget the traffic."""
        with self._lock:
            self._requests = 0
            self._max_concurrent = self._concurrent
            self._sent.clear()

    def traffic(self) -> Traffic:
        """Return the traffic since the last reset."""
        with self._lock:
            spans = [sorted(ranges) for ranges in self._sent.values()]
            requests = self._requests
            max_concurrent = self._max_concurrent
        nbytes = 0
        distinct_nbytes = 0
        for ranges in spans:
            nbytes += sum(stop - start for start, stop in ranges)
            distinct_nbytes += union_nbytes(ranges)
        return Traffic(requests, nbytes, nbytes - distinct_nbytes, max_concurrent)


def union_nbytes(ranges: list[tuple[int, int]]) -> int:
    """Return the number of bytes in the union of sorted ranges.

    >>> union_nbytes([(0, 4), (2, 6), (8, 9)])
    7
    """
    total = 0
    end = 0
    for start, stop in ranges:
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


@contextlib.contextmanager
def serve_throttled(folder: Path, rate: float, delay_s: float) -> Iterator[ThrottledStore]:
    """Serve a folder from threads of this process.

    Args:
        folder: Folder with the objects.
        rate: Bytes per second of each connection.
        delay_s: Seconds until an answer begins.
    """
    store = ThrottledStore(folder, rate, delay_s)

    class Handler(_Handler):
        served = store

    with loopback.serve(Handler) as store.url:
        yield store


class _Handler(loopback.Handler):
    served: ThrottledStore

    def do_HEAD(self) -> None:
        """Answer with the headers of an object."""
        self._answer()

    def do_GET(self) -> None:
        """Answer with an object, a range of it, a listing or the traffic."""
        if self.path == "/-/counts":
            self._send(200, json.dumps(dataclasses.asdict(self.served.traffic())).encode())
        elif self.path == "/-/reset":
            self.served.reset()
            self._send(200, b"")
        else:
            self._answer()

    def _answer(self) -> None:
        with self.served.counted_request():
            self._answer_late()

    def _answer_late(self) -> None:
        time.sleep(self.served.delay_s)
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        path = self.served.folder / key
        if bucket != BUCKET:
            self._send(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        elif key == "":
            prefix = parse_qs(url.query).get("prefix", [""])[0]
            self._send(200, list_objects(self.served.folder, prefix).encode())
        elif path.is_file():
            self._send_object(key, path)
        else:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def _send_object(self, key: str, path: Path) -> None:
        """Send the requested range of an object, or all of it, or its headers only."""
        size = path.stat().st_size
        start, stop = parse_range(self.headers.get("Range", ""), size)
        if start > stop or (start == size and size > 0):
            self._send(416, b"", {"Content-Range": f"bytes */{size}"})
            return
        self.send_response(206 if "Range" in self.headers else 200)
        headers = object_headers(size)
        headers["Content-Length"] = str(stop - start)
        if "Range" in self.headers:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send_paced(key, path, start, stop)

    def _send_paced(self, key: str, path: Path, start: int, stop: int) -> None:
        """Send bytes of a file at the rate of a connection."""
        self.wfile.flush()
        start_s = time.monotonic()
        offset = start
        with path.open("rb") as file:
            while offset < stop:
                count = min(PIECE_NBYTES, stop - offset)
                sent = os.sendfile(self.connection.fileno(), file.fileno(), offset, count)
                self.served.count_bytes(key, offset, offset + sent)
                offset += sent
                due_s = start_s + (offset - start) / self.served.rate
                time.sleep(max(0.0, due_s - time.monotonic()))

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def object_headers(size: int) -> dict[str, str]:
    """Return the headers of an object. Objects never change: the ETag is their size."""
    return {
        "ETag": f'"{size:x}"',
        "Last-Modified": LAST_MODIFIED,
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }


def list_objects(folder: Path, prefix: str) -> str:
    """Return the answer of ListObjectsV2: all objects with a prefix on one page."""
    entries = list[str]()
    for path in sorted(folder.rglob("*")):
        key = path.relative_to(folder).as_posix()
        if not path.is_file() or not key.startswith(prefix):
            continue
        size = path.stat().st_size
        etag = escape(object_headers(size)["ETag"])
        entries.append(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>{etag}</ETag>"
            "<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
        )
    count = f"<KeyCount>{len(entries)}</KeyCount><IsTruncated>false</IsTruncated>"
    return f"<ListBucketResult><Name>{BUCKET}</Name>{count}{''.join(entries)}</ListBucketResult>"


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder with the objects")
    parser.add_argument("--mib-s", type=float, default=16, help="rate of each connection")
    parser.add_argument("--delay-ms", type=float, default=20, help="delay of each answer")
    options = parser.parse_args()
    with serve_throttled(options.folder, options.mib_s * MIB, options.delay_ms / 1000) as store:
        print(store.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
