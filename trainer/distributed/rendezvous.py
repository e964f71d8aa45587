"""The meeting of all processes of a job before jax starts, on the port that jax uses afterwards.

If a process is missing, jax aborts the waiting ones without naming it. Here process 0 listens on its port, and all
others connect to it. When all have connected, or after the time limit, it answers each with a verdict: a line of JSON
with null, or with the error that all processes raise.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from trainer.models.coordinator_address import is_loopback, split_host_port
from trainer.models.errors import PrepError
from trainer.models.process_address import ProcessAddress

PROTOCOL = "prep-1"
MAX_LINE_BYTES = 1 << 14
HELLO_TIMEOUT_S = 5.0  # for a line from a connection to process 0
VERDICT_DELAY_S = 10.0  # for the verdict, after process 0 has waited its time
RETRY_S = 0.2
SPARE_FILES = 512  # open files besides the connections


@dataclass(frozen=True, slots=True)
class _Peer:
    """A connected process."""

    index: int
    count: int
    host: str
    connection: socket.socket


def meet_processes(address: ProcessAddress, timeout_s: float) -> None:
    """Wait until all processes of a job have connected to process 0.

    Args:
        address: This process.
        timeout_s: Seconds to wait.

    Raises:
        PrepError: A process did not start in time, two have the same index, or their numbers of processes differ.
    """
    deadline = time.monotonic() + timeout_s
    if address.index:
        _report_to_process_0(address, deadline, timeout_s=timeout_s)
    else:
        _gather_processes(address, deadline, timeout_s=timeout_s)


def index_ranges(indices: Iterable[int]) -> str:
    """Return indices as text: those of 1, 3, 4, 5 are `1, 3-5`."""
    ranges: list[tuple[int, int]] = []
    for index in sorted(indices):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1] = (ranges[-1][0], index)
        else:
            ranges.append((index, index))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _gather_processes(address: ProcessAddress, deadline: float, *, timeout_s: float) -> None:
    """Accept all other processes, then send each the verdict, and raise it if it is an error."""
    peers: dict[int, _Peer] = {}
    error: PrepError | None = None
    with contextlib.ExitStack() as connections:
        with _listen(address) as listener:  # until the others connect to the service of jax
            while len(peers) < address.count - 1 and error is None:
                peer = _accept(listener, deadline)
                if peer is None:
                    error = _missing_error(address, peers, timeout_s)
                else:
                    connections.enter_context(peer.connection)
                    error = _add_peer(peers, peer, address)
        for peer in peers.values():
            _send_verdict(peer, error)
    if error is not None:
        raise error


def _add_peer(peers: dict[int, _Peer], peer: _Peer, address: ProcessAddress) -> PrepError | None:
    """Add a process to the others; return the error if it does not belong to the job.

    A process may replace one that has ended. When the job is complete, all that have ended are removed.
    """
    other = peers.get(peer.index)
    error = _peer_error(peer, other if other and _is_connected(other) else None, address)
    if error is not None:
        _send_verdict(peer, error)
        return error
    peers[peer.index] = peer
    if len(peers) == address.count - 1:
        for ended in [index for index, other in peers.items() if not _is_connected(other)]:
            del peers[ended]
    return None


def _listen(address: ProcessAddress) -> socket.socket:
    """Return a socket that listens on the port of process 0 on all interfaces."""
    _allow_open_files(address.count + SPARE_FILES)
    _, port = split_host_port(address.coordinator)
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, backlog=min(address.count, 4096), dualstack_ipv6=has_both
        )
    except OSError as error:
        why, hint = error.strerror or str(error), "another port with `--set cluster.host0_port=PORT`"
        raise PrepError(f"process 0 cannot listen on port {port}", why, hint) from error


def _allow_open_files(count: int) -> None:
    """Raise the soft limit of open files, which every connection counts towards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _accept(listener: socket.socket, deadline: float) -> _Peer | None:
    """Return the next process that connects; None if none has by the deadline. Other connections are closed."""
    while (remaining_s := deadline - time.monotonic()) > 0:
        listener.settimeout(remaining_s)
        try:
            connection, (host, *_) = listener.accept()
        except OSError:  # a time-out, or a connection that its other end has closed
            continue
        connection.settimeout(HELLO_TIMEOUT_S)
        with contextlib.suppress(OSError, ValueError, RecursionError):
            hello = json.loads(_read_line(connection, min(deadline, time.monotonic() + HELLO_TIMEOUT_S)))
            if isinstance(hello, dict) and hello.get("protocol") == PROTOCOL:
                index, count = hello.get("index"), hello.get("count")
                if isinstance(index, int) and isinstance(count, int):
                    ip = str(host).removeprefix("::ffff:")  # of IPv4 on a socket for both
                    return _Peer(index, count, ip, connection)
        connection.close()
    return None


def _peer_error(peer: _Peer, other: _Peer | None, address: ProcessAddress) -> PrepError | None:
    """Return the error of a process that does not belong to the job, or whose index another process has."""
    if peer.count != address.count:
        why = f"process 0 expects {address.count}, and process {peer.index} at {peer.host} expects {peer.count}"
        return PrepError("the numbers of processes differ", why, "set the same number for all processes")
    if other is not None or not 0 < peer.index < address.count:
        hosts = f"{other.host if other else 'the host of process 0'} and {peer.host}"
        what = f"two processes have the index {peer.index}"
        return PrepError(what, f"they run on {hosts}", "start each process with an index of its own")
    return None


def _is_connected(peer: _Peer) -> bool:
    """Return whether a process, which sends nothing after its first line, has kept its connection open."""
    peer.connection.setblocking(False)
    try:
        return bool(peer.connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        peer.connection.settimeout(HELLO_TIMEOUT_S)


def _missing_error(address: ProcessAddress, connected: Collection[int], timeout_s: float) -> PrepError:
    """Return the error that names the processes that have not connected."""
    missing = sorted({*range(1, address.count)} - {*connected})
    noun = "process" if len(missing) == 1 else "processes"
    what = f"{noun} {index_ranges(missing)} of {address.count} did not start within {timeout_s:g} s"
    why = f"process 0 waited at {address.coordinator} (processes are numbered from 0)"
    host, port = split_host_port(address.coordinator)
    hint = "see the logs of these processes; `--set cluster.start_timeout=SECONDS` waits longer"
    if is_loopback(host):
        hint = f"{host} reaches only this host; elsewhere `cluster.host0_address` is needed; {hint}"
    else:
        hint = f"port {port} of {host} must be reachable from their hosts; {hint}"
    return PrepError(what, why, hint)


def _report_to_process_0(address: ProcessAddress, deadline: float, *, timeout_s: float) -> None:
    """Connect to process 0, and raise the error that it answers."""
    hello = {"protocol": PROTOCOL, "index": address.index, "count": address.count}
    last_error = "no answer"
    while (remaining_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(split_host_port(address.coordinator), timeout=remaining_s) as connection:
                connection.sendall(json.dumps(hello).encode() + b"\n")
                answer_by = time.monotonic() + timeout_s + VERDICT_DELAY_S  # process 0 may have started later
                verdict = json.loads(_read_line(connection, answer_by))["error"]
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ) as error:  # process 0 does not listen yet, or its service closed the connection
            last_error = getattr(error, "strerror", None) or str(error) or last_error
            time.sleep(RETRY_S)
            continue
        if verdict:
            raise PrepError(*verdict)
        return
    what = f"process {address.index} of {address.count} did not reach process 0 within {timeout_s:g} s"
    hint = "see the log of process 0; its host's firewall must allow the port; `cluster.host0_address` names the host"
    raise PrepError(what, f"address tried: {address.coordinator} ({last_error})", hint)


def _send_verdict(peer: _Peer, error: PrepError | None) -> None:
    """Send a process the error, or that all have connected. A process that has ended is noticed later."""
    verdict = {"error": [error.what, error.why, error.hint] if error else None}
    with contextlib.suppress(OSError):
        peer.connection.sendall(json.dumps(verdict).encode() + b"\n")


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    """Return a line of at most MAX_LINE_BYTES.

    Raises:
        OSError: The connection ends, or the time of the deadline has come, before the line does.
    """
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(MAX_LINE_BYTES)
        if not data or len(line) > MAX_LINE_BYTES:
            raise ConnectionError("the connection was closed")
        line += data
    return line
