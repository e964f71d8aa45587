"""A model hub on the loopback interface: as much of its HTTP interface as downloads by huggingface_hub need.

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
from tests.helpers.range_server import FakeFileStore, FaultInjector, send_range

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True, slots=True)
class FakeRepo:
    """A repository of one commit; a `status` other than 200 is what every request for it gets instead."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    status: int = 200
    error_code: str = ""  # the hub's X-Error-Code, such as GatedRepo
    revisions: tuple[str, ...] = ("main", COMMIT)
    sizes: Mapping[str, int] = field(default_factory=dict)  # told instead of the true ones
    store: FakeFileStore | None = None  # where its large files (LFS) are, by the SHA-256 of their content
    large: tuple[str, ...] = ()
    faults: FaultInjector = field(default_factory=FaultInjector)  # of ranges of files that the hub serves itself
    stalls: Mapping[str, str] = field(default_factory=dict)  # part of a request's line -> a way of loopback.STALLS
    model_info: bytes | None = None  # sent in place of what the hub says of the repository


@dataclass(frozen=True, slots=True)
class FakeHub:
    """A hub that runs: where, and what it was asked for (`METHOD /path`, the query left out)."""

    url: str
    requests: list[str] = field(default_factory=list)
    authorizations: list[tuple[str, str]] = field(default_factory=list)  # the request, and who says to be asking

    def environment(self, home: Path) -> dict[str, str]:
        """The variables that make huggingface_hub use this hub, and a cache under `home`."""
        return hub_environment(self.url, home)


def hub_environment(url: str, home: Path) -> dict[str, str]:
    """As `Hub.environment`, for an address where nobody may answer."""
    return {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


@contextmanager
def serve_hub(repos: Mapping[str, FakeRepo]) -> Iterator[FakeHub]:
    """A hub with these repositories, in a thread of this process; any other is answered with 404."""
    requests: list[str] = []
    said: list[tuple[str, str]] = []

    class Handler(_Handler):
        asked = requests
        tokens = said
        known = repos

    with loopback.serve(Handler) as url:
        yield FakeHub(url, requests, said)


class _Handler(loopback.Handler):
    """`/api/models/ID[/revision/REV | /tree/REV]` and `/ID/resolve/REV/FILE`."""

    asked: list[str]
    tokens: list[tuple[str, str]]
    known: Mapping[str, FakeRepo]

    def do_HEAD(self) -> None:
        """The same headers as for GET."""
        self._answer()

    def do_GET(self) -> None:
        """Everything is a GET."""
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append(f"{self.command} {path}")
        self.tokens.append((f"{self.command} {path}", self.headers.get("Authorization", "")))
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if is_api else parts
        repo = self.known.get(f"{owner}/{name}", FakeRepo(status=404, error_code="RepoNotFound"))
        revision = rest[1] if len(rest) > 1 else "main"
        stalled = next((kind for part, kind in repo.stalls.items() if part in f"{self.command} {path}"), "")
        if stalled:
            loopback.stall(self, stalled)
        elif is_api and repo.model_info is not None:
            self._send(200, repo.model_info, {"Content-Type": "text/html"})
        elif repo.status != 200:
            self._error(repo.status, repo.error_code)
        elif revision not in repo.revisions:
            self._error(404, "RevisionNotFound")
        elif is_api:
            tells_tree = rest[:1] == ["tree"]
            self._json(_tree(repo) if tells_tree else _info(f"{owner}/{name}", repo))
        else:
            self._file(repo, "/".join(rest[2:]))

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code} if code else {})

    def _json(self, document: object) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: FakeRepo, name: str) -> None:
        if name not in repo.files:
            self._error(404, "EntryNotFound")
            return
        content = repo.files[name]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(content)}"'}
        if name in repo.large and repo.store is not None:
            linked = {"X-Linked-ETag": f'"{_sha256(content)}"', "X-Linked-Size": str(len(content))}
            self._send(302, b"", {**headers, **linked, "Location": repo.store.signed_url(_sha256(content))})
            return
        if self.command == "GET" and self.headers.get("Range", "").partition("-")[2]:
            send_range(self, content, repo.faults.next_fault(), headers)
            return
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self._send(206 if start else 200, content[start:], headers)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@functools.lru_cache(64)
def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@functools.lru_cache(64)
def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _size(repo: FakeRepo, name: str) -> int:
    return repo.sizes.get(name, len(repo.files[name]))


def _info(hub_id: str, repo: FakeRepo) -> dict[str, object]:
    siblings = [_sibling(repo, name, content) for name, content in repo.files.items()]
    return {"id": hub_id, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False, "downloads": 0, "likes": 0}


def _sibling(repo: FakeRepo, name: str, content: bytes) -> dict[str, object]:
    told = {"rfilename": name, "size": _size(repo, name), "blobId": _etag(content)}
    lfs = {"sha256": _sha256(content), "size": len(content), "pointerSize": 134}
    return {**told, "lfs": lfs} if name in repo.large else told


def _tree(repo: FakeRepo) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": name, "size": _size(repo, name), "oid": _etag(content)}
        for name, content in repo.files.items()
    ]
