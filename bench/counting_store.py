"""A fake bucket and a fake hub in a process of their own, which count the bytes that they send to each client.

    python -m bench.counting_store FOLDER CLIENTS

The folder is `gs://bucket/model` and the hub's `o/model`. Each client has ports of its own. The first line of stdout is
JSON: the environment of each client, and the address that answers `/CLIENT` with the bytes sent to it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from tests.helpers import loopback
from tests.helpers.hub_server import FakeHub, FakeRepo, serve_hub
from tests.helpers.object_server import FakeObjectStore, serve_objects

BUCKET_URL = "gs://bucket/model"
HUB_ID = "o/model"


def mapped_files(folder: Path) -> dict[str, bytes]:
    """Map the files of a folder into memory, by their relative paths."""
    return {
        path.relative_to(folder).as_posix(): _mapped(path)
        for path in folder.rglob("*")
        if path.is_file()
    }


def _mapped(path: Path) -> bytes:
    """Return a file's content as a map, which is sliced like bytes. An empty file cannot be mapped."""
    with path.open("rb") as file:
        return (
            cast(bytes, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            if path.stat().st_size
            else b""
        )


@contextlib.contextmanager
def serve_counts(servers: list[tuple[FakeObjectStore, FakeHub]]) -> Iterator[str]:
    """Serve the bytes that were sent to each client so far, and yield the URL."""

    class Handler(loopback.Handler):
        def do_GET(self) -> None:
            """Answer with a number."""
            sent = [item for server in servers[int(self.path.strip("/"))] for item in server.sent]
            body = str(sum(item.stop - item.start for item in sent)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with loopback.serve(Handler) as url:
        yield url


def main() -> None:
    """Serve until stdin ends."""
    files, count = mapped_files(Path(sys.argv[1])), int(sys.argv[2])
    objects = {f"bucket/model/{name}": content for name, content in files.items()}
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [
            (
                stack.enter_context(serve_objects(objects)),
                stack.enter_context(serve_hub({HUB_ID: FakeRepo(files)})),
            )
            for _ in range(count)
        ]
        environments: list[dict[str, Any]] = [
            store.environment() | hub.environment(home / str(index))
            for index, (store, hub) in enumerate(servers)
        ]
        url = stack.enter_context(serve_counts(servers))
        print(json.dumps({"environments": environments, "counts": url}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
