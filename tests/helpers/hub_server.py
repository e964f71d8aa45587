"""Fake Hugging Face hub on the loopback interface, with the HTTP endpoints that downloads by huggingface_hub use.

    with serving({"owner/name": Repo({"config.json": b"{}"})}) as hub:
        subprocess.run(…, env={**os.environ, **hub.environment(tmp_path)})

The library reads HF_ENDPOINT when it is imported, hence the subprocess.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.helpers import loopback
from tests.helpers.range_server import FakeFileStore, FaultInjector, SentRange, send_range

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True, slots=True)
class FakeRepo:
    """A repository with one commit. A `status` other than 200 is the answer to every request for it."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    status: int = 200
    # The hub's X-Error-Code, such as GatedRepo.
    error_code: str = ""
    revisions: tuple[str, ...] = ("main", COMMIT)
    # Sizes that the hub reports instead of the true ones, by file name.
    sizes: Mapping[str, int] = field(default_factory=dict)
    # Server of the large files (LFS), by the SHA-256 of their content.
    store: FakeFileStore | None = None
    large: tuple[str, ...] = ()
    # Faults of the byte ranges that the hub serves itself.
    faults: FaultInjector = field(default_factory=FaultInjector)
    # Part of a request line -> one of loopback.STALL_KINDS.
    stalls: Mapping[str, str] = field(default_factory=dict)
    # Number of bytes that a faulty proxy adds to each file.
    num_surplus: int = 0
    # Answer instead of the repository's description.
    model_info: bytes | None = None
    # Contents that the hub sends instead of the true ones, with the true sizes and ETags, by file
    # name.
    damaged: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FakeHub:
    """A running fake hub: its URL, the requests so far (`METHOD /path`, without query), and the ranges that it sent."""

    url: str
    requests: list[str] = field(default_factory=list)
    sent: list[SentRange] = field(default_factory=list)
    # Each request with its Authorization header.
    authorizations: list[tuple[str, str]] = field(default_factory=list)

    def environment(self, home: Path) -> dict[str, str]:
        """Return the variables that make huggingface_hub use this hub, and a cache under `home`."""
        return hub_environment(self.url, home)


def hub_environment(url: str, home: Path) -> dict[str, str]:
    """Return the variables of `FakeHub.environment` for any URL."""
    return {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


@contextmanager
def serve_hub(repos: Mapping[str, FakeRepo]) -> Iterator[FakeHub]:
    """Serve a fake hub with these repositories from a thread; requests for other repositories get 404."""
    requests: list[str] = []
    sent: list[SentRange] = []
    seen_authorizations: list[tuple[str, str]] = []

    class Handler(_Handler):
        request_lines = requests
        sent_ranges = sent
        tokens = seen_authorizations
        served = repos

    with loopback.serve(Handler) as url:
        yield FakeHub(url, requests, sent, seen_authorizations)


class _Handler(loopback.Handler):
    """Handler of `/api/models/ID[/revision/REV | /tree/REV]` and `/ID/resolve/REV/FILE`, and the same of datasets."""

    request_lines: list[str]
    sent_ranges: list[SentRange]
    tokens: list[tuple[str, str]]
    served: Mapping[str, FakeRepo]

    def do_HEAD(self) -> None:
        """Answer with the headers of the GET."""
        self._answer()

    def do_GET(self) -> None:
        """Answer any GET."""
        self._answer()

    def _answer(self) -> None:
        """Record the request and answer it, or stall as the repository says."""
        sent_path = urlsplit(self.path).path
        path = unquote(sent_path)
        self.request_lines.append(f"{self.command} {path}")
        self.tokens.append((f"{self.command} {path}", self.headers.get("Authorization", "")))
        # A revision may have an escaped slash, e.g. refs%2Fconvert%2Fparquet.
        parts = [unquote(part) for part in sent_path.strip("/").split("/")]
        is_api = parts[:1] == ["api"] and parts[1:2] in (["models"], ["datasets"])
        owner, name, *rest = parts[2:] if is_api else parts[1:] if parts[0] == "datasets" else parts
        repo = self.served.get(f"{owner}/{name}", FakeRepo(status=404, error_code="RepoNotFound"))
        revision = rest[1] if len(rest) > 1 else "main"
        stalled = next(
            (kind for part, kind in repo.stalls.items() if part in f"{self.command} {path}"), ""
        )
        if stalled:
            loopback.stall(self, stalled)
        elif is_api and repo.model_info is not None:
            self._send(200, repo.model_info, {"Content-Type": "text/html"})
        elif repo.status != 200:
            self._error(repo.status, repo.error_code)
        elif revision not in repo.revisions:
            self._error(404, "RevisionNotFound")
        elif is_api:
            is_tree = rest[:1] == ["tree"]
            self._json(_tree(repo) if is_tree else _info(f"{owner}/{name}", repo))
        else:
            self._file(repo, "/".join(rest[2:]))

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code} if code else {})

    def _json(self, document: object) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: FakeRepo, name: str) -> None:
        """Send a file. A large one is redirected to the object store."""
        if name not in repo.files:
            self._error(404, "EntryNotFound")
            return
        content = repo.files[name]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(content)}"'}
        if name in repo.large and repo.store is not None:
            linked = {"X-Linked-ETag": f'"{_sha256(content)}"', "X-Linked-Size": str(len(content))}
            self._send(
                302, b"", {**headers, **linked, "Location": repo.store.signed_url(_sha256(content))}
            )
            return
        if self.command == "GET" and self.headers.get("Range", "").partition("-")[2]:
            span = send_range(self, content, repo.faults.next_fault(), headers)
            self.sent_ranges.append(SentRange(name, *span))
            return
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        surplus = bytes(repo.num_surplus) if self.command == "GET" else b""
        sent = repo.damaged.get(name, content)
        self._send(206 if start else 200, sent[start:] + surplus, headers)
        if self.command == "GET":
            self.sent_ranges.append(SentRange(name, start, len(content)))

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@functools.lru_cache(64)
def _etag(content: bytes) -> str:
    """Return git's blob id, which the hub sends for small files."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@functools.lru_cache(64)
def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _size(repo: FakeRepo, name: str) -> int:
    return repo.sizes.get(name, len(repo.files[name]))


def _info(hub_id: str, repo: FakeRepo) -> dict[str, object]:
    """Return the description of a repository with its files, as `/api/models/ID` answers."""
    siblings = [_sibling(repo, name, content) for name, content in repo.files.items()]
    return {
        "id": hub_id,
        "sha": COMMIT,
        "siblings": siblings,
        "tags": [],
        "private": False,
        "downloads": 0,
        "likes": 0,
    }


def _sibling(repo: FakeRepo, name: str, content: bytes) -> dict[str, object]:
    """Return the entry of a file in the description of a repository."""
    fields = {"rfilename": name, "size": _size(repo, name), "blobId": _etag(content)}
    lfs = {"sha256": _sha256(content), "size": len(content), "pointerSize": 134}
    return {**fields, "lfs": lfs} if name in repo.large else fields


def _tree(repo: FakeRepo) -> list[dict[str, object]]:
    """Return the list of files that `/api/models/ID/tree/REV` answers."""
    return [
        {"type": "file", "path": name, "size": _size(repo, name), "oid": _etag(content)}
        for name, content in repo.files.items()
    ]
