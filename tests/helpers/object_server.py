"""An object store on the loopback interface: as much of the XML interface, which S3 and GCS share, as obstore needs.

with serving_objects({"bucket/folder/file": b"…"}) as store:
    subprocess.run(…, env={**os.environ, **store.environment()})
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.helpers import loopback
from tests.helpers.range_server import FaultInjector, etag, send_range

LAST_MODIFIED = "2024-01-01T00:00:00.000Z"
PAGE_OBJECTS = 7  # objects that one answer lists


@dataclass(slots=True)
class FakeObjectStore:
    """What is there by `BUCKET/KEY`, and what was asked for, in order."""

    objects: dict[str, bytes]
    faults: FaultInjector
    url: str = ""
    requests: list[str] = field(default_factory=list)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    failing_requests: str = "\0"  # requests with this in their line get `status`
    status: int = 403
    stall: str = ""  # in place of `status`: a way of loopback.STALLS

    def environment(self) -> dict[str, str]:
        """The variables that make obstore use this store for both clouds."""
        s3 = {"AWS_ENDPOINT_URL": self.url, "AWS_ALLOW_HTTP": "true", "AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "x"}
        return s3 | {"GOOGLE_BASE_URL": self.url, "GOOGLE_BEARER_TOKEN": "ya29.secret"}

    def objects_below(self, prefix: str) -> dict[str, bytes]:
        """What lies in a folder."""
        return {key.removeprefix(prefix): data for key, data in self.objects.items() if key.startswith(prefix)}


@contextmanager
def serve_objects(
    objects: Mapping[str, bytes] | None = None, faults: FaultInjector | None = None
) -> Iterator[FakeObjectStore]:
    """A store with these objects, in a thread of this process."""
    store = FakeObjectStore(dict(objects or {}), faults or FaultInjector())

    class Handler(_Handler):
        kept = store

    with loopback.serve(Handler) as store.url:
        yield store


class _Handler(loopback.Handler):
    kept: FakeObjectStore

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
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        key = unquote(parts.path).lstrip("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        line = f"{self.command} {key}"
        self.kept.requests.append(line)
        if self.kept.failing_requests in line and self.kept.stall:
            loopback.stall(self, self.kept.stall)
        elif self.kept.failing_requests in line:
            self._send(self.kept.status, b"<Error><Code>AccessDenied</Code></Error>")
        elif self.command in ("GET", "HEAD"):
            self._listed(key.rstrip("/"), query) if "list-type" in query else self._read(key)
        elif self.command == "DELETE":
            self.kept.objects.pop(key, None)
            self._send(204, b"")
        elif "delete" in query:
            self._deleted(key.rstrip("/"), body)
        elif self.command == "PUT":
            self._written(key, query, body)
        else:
            self._multipart(key, query)

    def _listed(self, bucket: str, query: dict[str, str]) -> None:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", query.get("start-after", ""))
        keys = sorted(
            key.removeprefix(f"{bucket}/") for key in self.kept.objects if key.startswith(f"{bucket}/{prefix}")
        )
        left = [key for key in keys if key > after]
        page = left[:PAGE_OBJECTS]
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(left) > PAGE_OBJECTS else ""
        found = "".join(self._contents(key, self.kept.objects[f"{bucket}/{key}"]) for key in page)
        truncated = str(len(left) > PAGE_OBJECTS).lower()
        xml = f"<ListBucketResult>{found}<IsTruncated>{truncated}</IsTruncated>{more}</ListBucketResult>"
        self._send(200, xml.encode())

    def _contents(self, key: str, data: bytes) -> str:
        told = f"<Key>{escape(key)}</Key><LastModified>{LAST_MODIFIED}</LastModified><Size>{len(data)}</Size>"
        return f"<Contents>{told}<ETag>{escape(etag(data))}</ETag></Contents>"

    def _read(self, key: str) -> None:
        data = self.kept.objects.get(key)
        if data is None:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif self.headers.get("If-Match", etag(data)) != etag(data):
            self._send(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        else:
            told = {"ETag": etag(data), "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
            if self.command == "HEAD":
                self._send(200, data, told)
            else:
                send_range(self, data, self.kept.faults.next_fault(), told)

    def _written(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploadId" in query:
            self.kept.parts[query["uploadId"]][int(query["partNumber"])] = body
        else:
            self.kept.objects[key] = body
        self._send(200, b"", {"ETag": etag(body)})

    def _multipart(self, key: str, query: dict[str, str]) -> None:
        if "uploads" in query:
            upload = str(len(self.kept.parts))
            self.kept.parts[upload] = {}
            name = f"<Bucket>b</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
            xml = f"<InitiateMultipartUploadResult>{name}</InitiateMultipartUploadResult>"
        else:
            parts = self.kept.parts.pop(query["uploadId"])
            self.kept.objects[key] = b"".join(parts[number] for number in sorted(parts))
            known = escape(etag(self.kept.objects[key]))
            xml = f"<CompleteMultipartUploadResult><ETag>{known}</ETag></CompleteMultipartUploadResult>"
        self._send(200, xml.encode())

    def _deleted(self, bucket: str, body: bytes) -> None:
        text = body.decode()
        keys = [part.partition("</Key>")[0] for part in text.split("<Key>")[1:]]
        for key in keys:
            self.kept.requests.append(f"DELETE {bucket}/{key}")
            self.kept.objects.pop(f"{bucket}/{key}", None)
        told = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._send(200, f"<DeleteResult>{told}</DeleteResult>".encode())

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/xml", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
