"""HTTP server on the loopback interface, in a thread of this process; the fake hubs and stores are built on it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.helpers.waiting import MAX_S


class Handler(BaseHTTPRequestHandler):
    """Request handler for HTTP/1.1 without buffering delays and without a log."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log."""


STALL_KINDS = ("silent", "close", "headers", "body", "midway")


def stall(handler: BaseHTTPRequestHandler, kind: str) -> None:
    """Stall a request in one of STALL_KINDS: no answer, a closed connection, byte by byte, or half of a body."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n"
    sent = {"body": head + b"\r\n", "midway": head + b'\r\n{"id": '}.get(kind, b"")
    handler.connection.sendall(sent)
    if kind in ("silent", "midway"):
        time.sleep(MAX_S)
    end_s = time.monotonic() + MAX_S
    for byte in head * 1000 if kind in ("headers", "body") else b"":
        if time.monotonic() > end_s:
            break
        handler.connection.sendall(bytes([byte]))
        time.sleep(0.02)
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A job opens many connections at once. The default queue of 5 would refuse some of them.
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


@contextmanager
def serve(handler: type[Handler]) -> Iterator[str]:
    """Serve requests with a handler from a thread; yield the server's URL."""
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
