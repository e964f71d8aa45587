"""A server on the loopback interface, in a thread of this process: what the tests' hubs and stores have in common."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Answers in HTTP/1.1, at once, and tells nobody of it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Tests are quiet."""


STALL_KINDS = ("silent", "close", "headers", "body", "midway")
_LAST_S = 30.0  # of a stalled answer: the client has long given up


def stall(handler: BaseHTTPRequestHandler, kind: str) -> None:
    """Answer as servers in trouble do: never, by closing, byte by byte, or with half of a body."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n"
    sent = {"body": head + b"\r\n", "midway": head + b'\r\n{"id": '}.get(kind, b"")
    handler.connection.sendall(sent)
    if kind in ("silent", "midway"):
        time.sleep(_LAST_S)
    end_s = time.monotonic() + _LAST_S
    for byte in head * 1000 if kind in ("headers", "body") else b"":
        if time.monotonic() > end_s:
            break
        handler.connection.sendall(bytes([byte]))
        time.sleep(0.02)
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that were killed, or had enough: no news."""


@contextmanager
def serve(handler: type[Handler]) -> Iterator[str]:
    """The address of a server whose requests such a handler answers."""
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
