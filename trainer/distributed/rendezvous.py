"""The meeting of all processes of a job before jax starts, on the port that jax uses afterwards.

If a process is missing, jax aborts the waiting ones without naming it. Here process 0 listens on its port, and all
other processes connect to it. When all have connected, or after the time limit, it answers each
with a verdict: a line of JSON with null, or with the error that all processes raise. A process of
another job may have the same address by mistake. It gets its own error at once, and does not end
the meeting.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from prepcli.core.errors import PrepError
from prepcli.core.process_address import ProcessAddress, is_loopback, split_host_port


def process_place() -> str:
    """Return the host and the id of this process, as messages show them."""
    return f"{socket.gethostname()}, pid {os.getpid()}"


PROTOCOL = "prep-1"
# Any program on the network may connect and send data without a line end. A process sends a host
# name, a job name and a digest.
MAX_LINE_BYTES = 1 << 14
# Seconds that process 0 waits for a line from a connection. A port scanner sends none.
HELLO_TIMEOUT_S = 5.0
# Seconds that a process waits for the verdict of process 0, after the time limit of process 0
# itself.
VERDICT_DELAY_S = 10.0
# Seconds between two attempts to connect.
RETRY_S = 0.2
# Open files that a process needs in addition to the connections.
SPARE_FILES = 512
# Refused processes that a message names.
MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class _Peer:
    """A connected process."""

    index: int  # Index of the process in its job
    count: int  # Number of processes of its job
    ip: str  # IP address of its connection
    place: str  # Its host and process id. Its IP address if it did not send them.
    job: str  # Name of its job. Empty if it is unknown.
    settings_digest: str  # Digest of its settings. Empty if it is unknown.
    connection: socket.socket  # Connection to it


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Processes accepted by process 0, by index, and the places of refused processes."""

    address: ProcessAddress
    peers: dict[int, _Peer] = field(default_factory=dict[int, _Peer])
    refused: list[str] = field(default_factory=list[str])


def meet_processes(address: ProcessAddress, timeout_s: float) -> dict[int, str]:
    """Wait until all processes of a job have connected to process 0.

    Args:
        address: This process.
        timeout_s: Seconds to wait.

    Returns:
        Host and process id by index. Process 0 has all processes, any other process has process 0 and itself.

    Raises:
        PrepError: A process did not start in time, two have the same index, or their numbers of processes differ.
    """
    deadline = time.monotonic() + timeout_s
    if address.index:
        places = {0: _report_to_process_0(address, deadline, timeout_s=timeout_s)}
    else:
        meeting = _Meeting(address)
        peers = meeting.peers
        error: PrepError | None = None
        with contextlib.ExitStack() as connections:
            # The socket closes before the verdicts are sent: jax's service then listens on the same port.
            with _open_listener(address) as listener:
                while len(peers) < address.count - 1 and error is None:
                    peer = _accept_peer(listener, deadline)
                    if peer is None:
                        error = _missing_error(meeting, timeout_s)
                    else:
                        connections.enter_context(peer.connection)
                        error = _add_peer(meeting, peer)
            for peer in peers.values():
                _send_verdict(peer, error)
        if error is not None:
            raise error
        places = {index: peer.place for index, peer in peers.items()}
    return places | {address.index: process_place()}


def index_ranges(indices: Iterable[int]) -> str:
    """Return indices as text, e.g. 1, 3, 4, 5 -> `1, 3-5`."""
    ranges: list[tuple[int, int]] = []
    for index in sorted(indices):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1] = (ranges[-1][0], index)
        else:
            ranges.append((index, index))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _add_peer(meeting: _Meeting, peer: _Peer) -> PrepError | None:
    """Add a process, or refuse one of another job. Return the error if it contradicts this job."""
    # A process may replace one that has ended. When the job is complete, ended processes are removed, so that process
    # 0 waits for their replacements.
    peers = meeting.peers
    address = meeting.address
    other = peers.get(peer.index)
    # A restarted process has the index of its ended predecessor.
    if other is not None and not _is_connected(other):
        other = None
    if stranger := _find_stranger(peer, other, address):
        _refuse_peer(meeting, stranger)
        if stranger is peer:
            return None
        other = None
    error = _peer_error(peer, other, address)
    if error is not None:
        _send_verdict(peer, error)
        return error
    peers[peer.index] = peer
    if len(peers) == address.count - 1:
        for ended in [index for index, other in peers.items() if not _is_connected(other)]:
            del peers[ended]
    return None


def _find_stranger(peer: _Peer, other: _Peer | None, address: ProcessAddress) -> _Peer | None:
    """Return the process of another job, of two processes with the same index. None if no job is known to differ."""
    if peer.job and address.job and peer.job != address.job:
        return peer
    if other is None or peer.settings_digest == other.settings_digest:
        return None
    # The process with the digest of process 0 belongs to its job, so the other process is from another job.
    # If neither has it, no stranger is known.
    return {peer.settings_digest: other, other.settings_digest: peer}.get(address.settings_digest)


def _refuse_peer(meeting: _Meeting, peer: _Peer) -> None:
    """Send a process the error that process 0 belongs to another job, and close its connection."""
    address = meeting.address
    what = f"process 0 at {address.coordinator} belongs to another job"
    why = f"it is of {_job_text(address.job)} on {process_place()}; this process is of {_job_text(peer.job)}"
    hint = "give each job a port of its own with `cluster.host0_port`"
    _send_verdict(peer, PrepError(what, why, hint))
    peer.connection.close()
    meeting.refused.append(f"process {peer.index} of {_job_text(peer.job)} ({peer.place})")


def _job_text(job: str) -> str:
    return f"`{job}`" if job else "a job without a name"


def _open_listener(address: ProcessAddress) -> socket.socket:
    """Return a socket that listens on the port of process 0 on all interfaces."""
    # Every connection counts towards the soft limit of open files.
    count = address.count + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    _, port = split_host_port(address.coordinator)
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, backlog=min(address.count, 4096), dualstack_ipv6=has_both
        )
    except OSError as error:
        why = error.strerror or str(error)
        hint = "set another port with `cluster.host0_port`"
        raise PrepError(f"process 0 cannot listen on port {port}", why, hint) from error


def _accept_peer(listener: socket.socket, deadline: float) -> _Peer | None:
    """Return the next process that connects. None if no process has by the deadline. Other connections are closed."""
    while (remaining_s := deadline - time.monotonic()) > 0:
        listener.settimeout(remaining_s)
        try:
            connection, (host, *_) = listener.accept()
        except OSError:
            # A time-out, or a connection that its other end has closed.
            continue
        connection.settimeout(HELLO_TIMEOUT_S)
        # Any program may connect. A port scanner sends no line or no JSON, and deeply nested JSON
        # raises RecursionError.
        with contextlib.suppress(OSError, ValueError, RecursionError):
            hello = json.loads(
                _read_line(connection, min(deadline, time.monotonic() + HELLO_TIMEOUT_S))
            )
            # A dual-stack socket shows an IPv4 address as e.g. ::ffff:192.0.2.1.
            ip = str(host).removeprefix("::ffff:")
            if peer := _read_peer(hello, ip, connection):
                return peer
        connection.close()
    return None


def _read_peer(hello: Any, ip: str, connection: socket.socket) -> _Peer | None:
    """Return the process of a first line. None if the line is not of this protocol."""
    if not isinstance(hello, dict) or hello.get("protocol") != PROTOCOL:
        return None
    index = hello.get("index")
    count = hello.get("count")
    if not (isinstance(index, int) and isinstance(count, int)):
        return None
    place, job, settings_digest = (str(hello.get(key, "")) for key in ("place", "job", "settings"))
    return _Peer(
        index,
        count,
        ip=ip,
        place=place or ip,
        job=job,
        settings_digest=settings_digest,
        connection=connection,
    )


def _peer_error(peer: _Peer, other: _Peer | None, address: ProcessAddress) -> PrepError | None:
    """Return the error for a process that disagrees with this job, or None."""
    # It expects a different number of processes, or its index is out of range or belongs to another process.
    if peer.count != address.count:
        why = f"process 0 expects {address.count}, and process {peer.index} at {peer.ip} expects {peer.count}"
        return PrepError(
            "the numbers of processes differ", why, "set the same number for all processes"
        )
    if other is not None or not 0 < peer.index < address.count:
        places = f"{other.place if other else process_place()} and {peer.place}"
        what = f"two processes have the index {peer.index}"
        return PrepError(
            what, f"they run on {places}", "start each process with an index of its own"
        )
    return None


def _is_connected(peer: _Peer) -> bool:
    """Return whether a process has kept its connection open."""
    peer.connection.setblocking(False)
    try:
        # A process sends no data after its first line: an open connection raises BlockingIOError,
        # and a closed one returns no bytes.
        return bool(peer.connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        peer.connection.settimeout(HELLO_TIMEOUT_S)


def _missing_error(meeting: _Meeting, timeout_s: float) -> PrepError:
    """Return the error that names the missing processes and the refused ones."""
    address = meeting.address
    missing = sorted({*range(1, address.count)} - {*meeting.peers})
    noun = "process" if len(missing) == 1 else "processes"
    what = f"{noun} {index_ranges(missing)} of {address.count} did not start within {timeout_s:g} s"
    why = f"process 0 waited at {address.coordinator} (processes are numbered from 0)"
    if meeting.refused:
        why += f"; it refused {', '.join(meeting.refused[:MAX_NAMED])}"
    host, port = split_host_port(address.coordinator)
    hint = "see the logs of these processes; a larger `cluster.start_timeout` waits longer"
    if is_loopback(host):
        hint = f"{host} reaches only this host; elsewhere `cluster.host0_address` is needed; {hint}"
    else:
        hint = f"port {port} of {host} must be reachable from their hosts; {hint}"
    return PrepError(what, why, hint)


def _report_to_process_0(address: ProcessAddress, deadline: float, *, timeout_s: float) -> str:
    """Connect to process 0. Return its place, or raise the error in its answer."""
    hello = {
        "protocol": PROTOCOL,
        "index": address.index,
        "count": address.count,
        "place": process_place(),
    }
    hello |= {"job": address.job, "settings": address.settings_digest}
    last_error = "no answer"
    while (remaining_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(
                split_host_port(address.coordinator), timeout=remaining_s
            ) as connection:
                connection.sendall(json.dumps(hello).encode() + b"\n")
                # Process 0 may have started later, and waits `timeout_s` from its own start.
                answer_by = time.monotonic() + timeout_s + VERDICT_DELAY_S
                verdict = json.loads(_read_line(connection, answer_by))
                error = verdict["error"]
                place = str(verdict.get("place", ""))
        except (OSError, ValueError, KeyError, TypeError) as failure:
            # Process 0 does not listen yet, or its service closed the connection.
            last_error = getattr(failure, "strerror", None) or str(failure) or last_error
            time.sleep(RETRY_S)
            continue
        if error:
            raise PrepError(*error)
        return place
    what = (
        f"process {address.index} of {address.count} did not reach process 0 within {timeout_s:g} s"
    )
    hint = "see the log of process 0; its host's firewall must allow the port; `cluster.host0_address` names the host"
    raise PrepError(what, f"address tried: {address.coordinator} ({last_error})", hint)


def _send_verdict(peer: _Peer, error: PrepError | None) -> None:
    """Send a process the verdict: the error, or null if all have connected."""
    # The watchdog finds ended processes later.
    verdict = {
        "error": [error.what, error.why, error.hint] if error else None,
        "place": process_place(),
    }
    with contextlib.suppress(OSError):
        peer.connection.sendall(json.dumps(verdict).encode() + b"\n")


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    """Return a line of at most MAX_LINE_BYTES."""
    line = b""
    while not line.endswith(b"\n"):
        # A timeout of 0 would make the socket non-blocking.
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(MAX_LINE_BYTES)
        if not data or len(line) > MAX_LINE_BYTES:
            raise ConnectionError("the connection was closed")
        line += data
    return line
