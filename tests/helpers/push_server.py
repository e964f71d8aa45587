"""Fake Hugging Face hub on the loopback interface that accepts pushes: repositories, branches, LFS and commits."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.helpers import loopback

TOKEN = "hf_secret"


@dataclass(slots=True)
class PushedRepo:
    """A repository: the files of each branch."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})


@dataclass(slots=True)
class FakePushHub:
    """A running fake hub: the pushed repositories and the requests so far.

    Requests whose line contains `failing_requests` get `status`, or `body` if it is set, or stall as in
    loopback.STALL_KINDS.
    """

    url: str = ""
    repos: dict[str, PushedRepo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    # Requests without the token of the user.
    unauthenticated: list[str] = field(default_factory=list)
    failing_requests: str = "\0"
    status: int = 400
    body: bytes | None = None
    stall: str = ""


@contextmanager
def serve_push_hub(repos: dict[str, PushedRepo] | None = None) -> Iterator[FakePushHub]:
    """Serve a fake hub that accepts pushes from a thread."""
    hub = FakePushHub(repos=repos or {})

    class Handler(_Handler):
        fake = hub

    with loopback.serve(Handler) as hub.url:
        yield hub


class _Handler(loopback.Handler):
    fake: FakePushHub

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        """Record the request and answer it, or fail or stall as the server is set up."""
        body = self._body()
        path = unquote(urlsplit(self.path).path)
        line = f"{self.command} {path}"
        self.fake.requests.append(line)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.fake.unauthenticated.append(line)
        if self.fake.failing_requests in line and self.fake.stall:
            loopback.stall(self, self.fake.stall)
        elif self.fake.failing_requests in line and self.fake.body is not None:
            self._send_bytes(200, self.fake.body, {"Content-Type": "text/html"})
        elif self.fake.failing_requests in line:
            self._send(self.fake.status, {"error": "trouble"})
        elif path == "/api/whoami-v2":
            is_authorized = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            self._send(200 if is_authorized else 401, {"name": "o", "type": "user"})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.startswith("/lfs/"):
            self._store_object(path.removeprefix("/lfs/"), body)
        else:
            self._answer_repo(path.strip("/").removeprefix("api/models/").split("/"), body)

    def _body(self) -> bytes:
        """Return the body of the request, with its chunks joined."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _create(self, requested: dict[str, Any]) -> None:
        """Create a repository."""
        name = f"{requested.get('organization') or 'o'}/{requested['name']}"
        exists = name in self.fake.repos
        self.fake.repos.setdefault(
            name,
            PushedRepo(bool(requested.get("private")) or requested.get("visibility") == "private"),
        )
        self._send(409 if exists else 200, {"url": f"{self.fake.url}/{name}"})

    def _store_object(self, oid: str, body: bytes) -> None:
        """Store a large file after a check of its digest."""
        assert hashlib.sha256(body).hexdigest() == oid
        self.fake.objects[oid] = body
        self._send(200, {})

    def _answer_repo(self, parts: list[str], body: bytes) -> None:
        """Answer a request for one repository."""
        name = "/".join(parts[:2]).removesuffix(".git")
        rest, repo = parts[2:], self.fake.repos.get(name)
        if repo is None:
            self._send(404, {"error": "no such repository"}, {"X-Error-Code": "RepoNotFound"})
            return
        revision = "/".join(rest[1:]) or "main"
        if rest[:1] == ["info"]:
            self._send(
                200,
                {"objects": [self._upload_actions(item) for item in json.loads(body)["objects"]]},
            )
        elif rest[:1] == ["branch"]:
            repo.branches.setdefault(revision, dict(repo.branches["main"]))
            self._send(200, {})
        elif rest[:1] == ["preupload"]:
            self._send(200, {"files": [_mode(file["path"]) for file in json.loads(body)["files"]]})
        elif rest[:1] == ["commit"]:
            self._commit(name, repo.branches[revision], body)
        elif rest[:1] == ["tree"]:
            self._send(
                200, [_file_fields(path, data) for path, data in repo.branches[revision].items()]
            )
        else:
            siblings = [{"rfilename": path} for path in repo.branches.get(revision, {})]
            self._send(
                200,
                {
                    "id": name,
                    "sha": "0" * 40,
                    "private": repo.private,
                    "siblings": siblings,
                    "tags": [],
                },
            )

    def _upload_actions(self, requested: dict[str, Any]) -> dict[str, Any]:
        """Return where to upload a large file. Nowhere if it is stored already."""
        upload = {"upload": {"href": f"{self.fake.url}/lfs/{requested['oid']}"}}
        return requested | ({} if requested["oid"] in self.fake.objects else {"actions": upload})

    def _commit(self, name: str, branch: dict[str, bytes], body: bytes) -> None:
        """Apply the operations of a commit to a branch."""
        for line in body.decode().splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                branch[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                branch[value["path"]] = self.fake.objects[value["oid"]]
            elif operation["key"] == "deletedFile":
                del branch[value["path"]]
        self._send(
            200, {"commitUrl": f"{self.fake.url}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40}
        )

    def _send(self, status: int, document: object, headers: dict[str, str] | None = None) -> None:
        self._send_bytes(
            status,
            json.dumps(document).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )

    def _send_bytes(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _mode(path: str) -> dict[str, object]:
    """Return how the hub wants a file to be uploaded."""
    is_large = path.endswith(".safetensors")
    return {"path": path, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}


def _file_fields(path: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
