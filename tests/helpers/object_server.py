"""Fake object store on the loopback interface, with obstore's part of the XML API of S3 and GCS.

with serving_objects({"bucket/folder/file": b"…"}) as store:
    subprocess.run(…, env={**os.environ, **store.environment()})
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.helpers import loopback
from tests.helpers.range_server import FaultInjector, SentRange, etag, send_range

if TYPE_CHECKING:
    # The benchmarks serve stores without pytest.
    import pytest

# The time of the store when it starts.
START = datetime(2024, 1, 1, tzinfo=UTC)
CONDITIONS = ("If-None-Match", "If-Match", "x-goog-if-generation-match")
# A write is refused as busy (503) or by a rate limit (429), or the connection is cut before or after
# the object is stored.
WRITE_FAULTS = ("busy", "limit", "cut", "lost-answer")
FAULT_STATUSES = {"busy": 503, "limit": 429}
# Faults of requests other than PUT and GET of an object.
OTHER_FAULTS = WRITE_FAULTS
# Maximum number of objects in one answer to a listing.
PAGE_OBJECTS = 7


@dataclass(slots=True)
class FakeObjectStore:
    """A running fake store: its objects by `BUCKET/KEY`, the requests so far, and the sent bytes of objects."""

    objects: dict[str, bytes]
    faults: FaultInjector
    url: str = ""
    requests: list[str] = field(default_factory=list)
    sent: list[SentRange] = field(default_factory=list)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    # Requests with this text in their line get the answer `status`.
    failing_requests: str = "\0"
    status: int = 403
    # One of loopback.STALL_KINDS, to stall these requests instead of the answer `status`.
    stall: str = ""
    time: datetime = START
    # Faults of writes, each of WRITE_FAULTS.
    write_faults: FaultInjector = field(default_factory=lambda: FaultInjector(kinds=WRITE_FAULTS))
    # Faults of listings, and of HEAD, POST and DELETE requests.
    other_faults: FaultInjector = field(default_factory=lambda: FaultInjector(kinds=OTHER_FAULTS))
    # Metadata of each object, and of each multipart upload, as headers.
    metadata: dict[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    # Numbers of multipart uploads.
    upload_numbers: Iterator[int] = field(default_factory=itertools.count)
    # Seconds before each answer.
    delay_s: float = 0.0
    # Called before each PUT, POST and DELETE changes the store.
    before_change: Callable[[], object] = int
    # Object and number of bytes of each write that arrived, also of refused ones.
    received: list[tuple[str, int]] = field(default_factory=list)
    # The writes among `received` that changed no object: by a fault, or by a condition (412).
    refused: list[tuple[str, int]] = field(default_factory=list)
    # Object of each write that was stored. A multipart upload is stored once.
    stored: list[str] = field(default_factory=list)
    # Number of requests that are being answered.
    num_running: int = 0
    # Listings do not show objects with this text in their key.
    unlisted: str = "\0"
    # Whether the last part of each multipart upload is lost.
    forgets_parts: bool = False
    # Whether the answer to the completion of each multipart upload is lost.
    loses_completions: bool = False
    # Whether the store supports writes that depend on the version of the object.
    has_conditions: bool = True
    # Generation and time of the last write of each object.
    versions: dict[str, tuple[int, datetime]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def environment(self) -> dict[str, str]:
        """Return the variables of obstore for this store, for both clouds."""
        s3 = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_SKIP_SIGNATURE": "true",
            "AWS_REGION": "x",
        }
        return s3 | {"GOOGLE_BASE_URL": self.url, "GOOGLE_BEARER_TOKEN": "ya29.secret"}

    def version(self, key: str) -> tuple[int, datetime]:
        """Return the generation of an object and the time of its last write; 0 if it does not exist."""
        return self.versions.get(key, (1, START)) if key in self.objects else (0, START)

    def store(self, key: str, content: bytes, metadata: Mapping[str, str] | None = None) -> None:
        """Store an object as a new generation, with the headers of its metadata."""
        newest = max((generation for generation, _ in self.versions.values()), default=1)
        self.objects[key], self.versions[key] = content, (newest + 1, self.time)
        self.metadata[key] = metadata or {}
        self.stored.append(key)

    def objects_below(self, prefix: str) -> dict[str, bytes]:
        """Return the objects below a prefix, by the rest of their keys."""
        return {
            key.removeprefix(prefix): data
            for key, data in self.objects.items()
            if key.startswith(prefix)
        }


@contextmanager
def serve_objects(
    objects: Mapping[str, bytes] | None = None, faults: FaultInjector | None = None
) -> Iterator[FakeObjectStore]:
    """Serve a fake store with these objects from a thread."""
    store = FakeObjectStore(dict(objects or {}), faults or FaultInjector())

    class Handler(_Handler):
        fake = store

    with loopback.serve(Handler) as store.url:
        yield store


@contextmanager
def use_objects(
    monkeypatch: pytest.MonkeyPatch,
    objects: Mapping[str, bytes] | None = None,
    faults: FaultInjector | None = None,
) -> Iterator[FakeObjectStore]:
    """Serve a fake store that the environment of this process names."""
    with serve_objects(objects, faults) as store:
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)
        yield store


class _Handler(loopback.Handler):
    fake: FakeObjectStore

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        """Count the request as running while it is answered."""
        with self.fake.lock:
            self.fake.num_running += 1
        try:
            self._answer_request()
        finally:
            with self.fake.lock:
                self.fake.num_running -= 1

    def _answer_request(self) -> None:
        """Record the request and answer it, or fail or stall as the server is set up."""
        nbytes = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(nbytes)
        if len(body) < nbytes:
            # The client was killed while it sent the body.
            self._cut()
            return
        parts = urlsplit(self.path)
        key = unquote(parts.path).lstrip("/")
        query = {
            name: values[0]
            for name, values in parse_qs(parts.query, keep_blank_values=True).items()
        }
        line = f"{self.command} {key}"
        self.fake.requests.append(line)
        time.sleep(self.fake.delay_s)
        if self.command in ("PUT", "POST", "DELETE"):
            self.fake.before_change()
        if self.fake.failing_requests in line and self.fake.stall:
            loopback.stall(self, self.fake.stall)
        elif self.fake.failing_requests in line:
            self._send(self.fake.status, b"<Error><Code>AccessDenied</Code></Error>")
        elif self.command == "PUT":
            self.fake.received.append((key, nbytes))
            faults = self.fake.write_faults
            is_refused = self._answer_with_faults(faults, partial(self._write, key, query, body))
            if is_refused:
                self.fake.refused.append((key, nbytes))
        elif self.command == "GET" and "list-type" not in query:
            self._read(key)
        else:
            self._answer_with_faults(
                self.fake.other_faults, partial(self._answer_other, key, query, body)
            )

    def _answer_other(self, key: str, query: dict[str, str], body: bytes) -> None:
        """Answer a listing, or a HEAD, POST or DELETE request."""
        if "list-type" in query:
            self._list(key.rstrip("/"), query)
        elif self.command == "HEAD":
            self._read(key)
        elif self.command == "DELETE" and "uploadId" in query:
            is_known = self.fake.parts.pop(query["uploadId"], None) is not None
            self._send(204 if is_known else 404, b"")
        elif self.command == "DELETE":
            self.fake.objects.pop(key, None)
            self._send(204, b"")
        elif "delete" in query:
            self._delete_objects(key.rstrip("/"), body)
        else:
            self._multipart(key, query)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        """Send one page of the keys below a prefix."""
        prefix, after = (
            query.get("prefix", ""),
            query.get("continuation-token", query.get("start-after", "")),
        )
        keys = sorted(
            key.removeprefix(f"{bucket}/")
            for key in self.fake.objects
            if key.startswith(f"{bucket}/{prefix}") and self.fake.unlisted not in key
        )
        left = [key for key in keys if key > after]
        page = left[:PAGE_OBJECTS]
        more = (
            f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
            if len(left) > PAGE_OBJECTS
            else ""
        )
        entries = "".join(self._contents(key, self.fake.objects[f"{bucket}/{key}"]) for key in page)
        truncated = str(len(left) > PAGE_OBJECTS).lower()
        xml = f"<ListBucketResult>{entries}<IsTruncated>{truncated}</IsTruncated>{more}</ListBucketResult>"
        self._send(200, xml.encode())

    def _contents(self, key: str, data: bytes) -> str:
        """Return an object's entry of a listing."""
        modified = START.strftime("%Y-%m-%dT%H:%M:%S.000Z")
        fields = f"<Key>{escape(key)}</Key><LastModified>{modified}</LastModified><Size>{len(data)}</Size>"
        return f"<Contents>{fields}<ETag>{escape(etag(data))}</ETag></Contents>"

    def _read(self, key: str) -> None:
        """Send an object, or the requested range of it."""
        data = self.fake.objects.get(key)
        if data is None:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif self.headers.get("If-Match", etag(data)) != etag(data):
            self._send(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        else:
            generation, modified = self.fake.version(key)
            fields = {
                "ETag": etag(data),
                "Last-Modified": format_datetime(modified, usegmt=True),
                "x-goog-generation": str(generation),
                **self.fake.metadata.get(key, {}),
            }
            if self.command == "HEAD":
                self._send(200, data, fields)
            else:
                span = send_range(self, data, self.fake.faults.next_fault(), fields)
                self.fake.sent.append(SentRange(key, *span))

    def _answer_with_faults(self, faults: FaultInjector, answer: Callable[[], object]) -> bool:
        """Answer a request, or do what the next fault says. Return whether it was refused or cut before."""
        fault = faults.next_fault()
        if fault in FAULT_STATUSES:
            self._send(FAULT_STATUSES[fault], b"<Error><Code>SlowDown</Code></Error>")
            return True
        if fault == "cut":
            self._cut()
            return True
        if fault == "lost-answer":
            answers = self.wfile
            self.wfile = BytesIO()
            answer()
            self.wfile = answers
            self._cut()
            return False
        answer()
        return False

    def _cut(self) -> None:
        """Close the connection without an answer."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _write(self, key: str, query: dict[str, str], body: bytes) -> None:
        """Store an object, or one part of an upload, if its conditions hold."""
        if "uploadId" in query:
            self.fake.parts[query["uploadId"]][int(query["partNumber"])] = body
            self._send(200, b"", {"ETag": etag(body)})
            return
        conditions = {name: self.headers[name] for name in CONDITIONS if name in self.headers}
        if conditions and not self.fake.has_conditions:
            self._send(501, b"<Error><Code>NotImplemented</Code></Error>")
            return
        with self.fake.lock:
            is_allowed = self._allows(key, conditions)
            if is_allowed:
                self.fake.store(key, body, self._metadata())
        if is_allowed:
            generation, _ = self.fake.version(key)
            self._send(200, b"", {"ETag": etag(body), "x-goog-generation": str(generation)})
        else:
            self.fake.refused.append((key, len(body)))
            self._send(412, b"<Error><Code>PreconditionFailed</Code></Error>")

    def _allows(self, key: str, conditions: Mapping[str, str]) -> bool:
        """Return whether an object has the version required by the headers of a write."""
        data = self.fake.objects.get(key)
        known = {
            "If-None-Match": "*" if data is None else "",
            "If-Match": "" if data is None else etag(data),
            "x-goog-if-generation-match": str(self.fake.version(key)[0]),
        }
        return all(known[name] == value for name, value in conditions.items())

    def _metadata(self) -> dict[str, str]:
        """Return the headers of a write with metadata of its object."""
        return {name: value for name, value in self.headers.items() if "-meta-" in name}

    def _multipart(self, key: str, query: dict[str, str]) -> None:
        """Start an upload in parts, or complete it."""
        if "uploads" in query:
            upload = str(next(self.fake.upload_numbers))
            self.fake.parts[upload] = {}
            self.fake.metadata[upload] = self._metadata()
            name = f"<Bucket>b</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
            xml = f"<InitiateMultipartUploadResult>{name}</InitiateMultipartUploadResult>"
        elif query["uploadId"] not in self.fake.parts:
            # The upload was completed by an earlier request, whose answer was lost.
            self._send(404, b"<Error><Code>NoSuchUpload</Code></Error>")
            return
        else:
            parts = self.fake.parts.pop(query["uploadId"])
            if self.fake.forgets_parts:
                parts.popitem()
            content = b"".join(parts[number] for number in sorted(parts))
            self.fake.store(key, content, self.fake.metadata.pop(query["uploadId"]))
            if self.fake.loses_completions:
                self._cut()
                return
            known = escape(etag(self.fake.objects[key]))
            xml = f"<CompleteMultipartUploadResult><ETag>{known}</ETag></CompleteMultipartUploadResult>"
        self._send(200, xml.encode())

    def _delete_objects(self, bucket: str, body: bytes) -> None:
        """Delete the objects listed in the body."""
        text = body.decode()
        keys = [part.partition("</Key>")[0] for part in text.split("<Key>")[1:]]
        for key in keys:
            self.fake.requests.append(f"DELETE {bucket}/{key}")
            self.fake.objects.pop(f"{bucket}/{key}", None)
        fields = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._send(200, f"<DeleteResult>{fields}</DeleteResult>".encode())

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/xml", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
