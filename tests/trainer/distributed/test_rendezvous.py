"""The meeting of processes before jax starts, in threads of one process."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from prepcli.core.errors import PrepError
from prepcli.core.process_address import ProcessAddress
from prepcli.launch.local import free_port
from tests.helpers.waiting import MAX_S
from trainer.distributed.rendezvous import index_ranges, meet_processes, process_place

pytestmark = pytest.mark.waits


def meet(
    processes: Sequence[tuple[int, int]],
    timeout_s: float,
    *,
    before: Callable[[int], None] | None = None,
) -> list[str]:
    """Let processes, as (index, count), meet; return the error of each, or an empty text.

    Args:
        processes: Index and number of processes, as each process has them.
        timeout_s: Seconds that each waits.
        before: Called with the port after process 0 has started, if it is the first.
    """
    port = free_port()
    with ThreadPoolExecutor(len(processes)) as pool:
        futures = [pool.submit(meet_as, *processes[0], port=port, timeout_s=timeout_s)]
        if before is not None:
            before(port)
        futures += [
            pool.submit(meet_as, *process, port=port, timeout_s=timeout_s)
            for process in processes[1:]
        ]
        return [future.result() for future in futures]


def meet_as(
    index: int,
    count: int,
    *,
    port: int,
    timeout_s: float = MAX_S,
    job: str = "",
    settings_digest: str = "",
) -> str:
    """Meet the other processes as one of them; return its error, or an empty text."""
    address = ProcessAddress(
        index, count, f"127.0.0.1:{port}", job=job, settings_digest=settings_digest
    )
    try:
        meet_processes(address, timeout_s)
    except PrepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_meet_processes_returns_when_all_have_come(order: tuple[int, ...]):
    assert meet([(index, 4) for index in order], MAX_S) == ["", "", "", ""]


def test_meet_processes_names_the_missing_in_every_process():
    errors = meet([(0, 6), (2, 6)], 5.0)
    for error in errors:
        assert "processes 1, 3-5 of 6 did not start within 5 s" in error
        assert "127.0.0.1" in error
    assert len(errors) == 2


def test_meet_processes_without_process_0_names_the_address():
    [error] = meet([(1, 2)], 0.5)
    assert "process 1 of 2 did not reach process 0 within 0.5 s" in error
    assert "address tried: 127.0.0.1:" in error
    assert "refused" in error


def test_meet_processes_refuses_a_second_process_of_an_index():
    errors = meet([(0, 3), (1, 3), (1, 3)], MAX_S)
    assert all("two processes have the index 1" in error for error in errors)


def test_meet_processes_refuses_other_counts():
    errors = meet([(0, 3), (1, 2)], MAX_S)
    assert all(
        "process 0 expects 3, and process 1 at 127.0.0.1 expects 2" in error for error in errors
    )


def test_meet_processes_ignores_other_connections():
    def connect(port: int) -> None:
        for line in (b"GET / HTTP/1.1\r\n\n", b'{"protocol": "other"}\n', b"[]\n", b""):
            with connection_to(port) as connection:
                connection.sendall(line)

    assert meet([(0, 2), (1, 2)], MAX_S, before=connect) == ["", ""]


def test_meet_processes_replaces_a_process_that_has_ended():
    def start_and_end(port: int) -> None:
        with connection_to(port) as connection:
            connection.sendall(b'{"protocol": "prep-1", "index": 1, "count": 3}\n')

    assert meet([(0, 3), (1, 3), (2, 3)], MAX_S, before=start_and_end) == ["", "", ""]


def test_meet_processes_returns_the_places():
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        addresses = [ProcessAddress(index, 3, f"127.0.0.1:{port}") for index in range(3)]
        places = [*pool.map(meet_processes, addresses, [MAX_S] * 3)]
    assert [sorted(known) for known in places] == [[0, 1, 2], [0, 1], [0, 2]]
    assert {place for known in places for place in known.values()} == {process_place()}


def test_meet_processes_refuses_another_job_alone():
    """The job goes on; a process of another job, with the same address, learns which job it has reached."""
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet_as, 0, 3, port=port, job="SLURM job 7.0")
        second = pool.submit(meet_as, 2, 3, port=port, job="SLURM job 7.0")
        error = meet_as(1, 2, port=port, job="SLURM job 8.0")
        last = pool.submit(meet_as, 1, 3, port=port, job="SLURM job 7.0")
        assert [first.result(), second.result(), last.result()] == ["", "", ""]
    assert f"process 0 at 127.0.0.1:{port} belongs to another job" in error
    assert f"`SLURM job 7.0` on {process_place()}; this process is of `SLURM job 8.0`" in error


def test_meet_processes_names_refused_processes():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet_as, 0, 2, port=port, job="recipe a", timeout_s=5.0)
        assert "belongs to another job" in meet_as(1, 2, port=port, job="recipe b")
        assert "process 1 of 2 did not start" in first.result()
        assert f"it refused process 1 of `recipe b` ({process_place()})" in first.result()


@pytest.mark.parametrize("is_first", [True, False])
def test_meet_processes_prefers_equal_settings(is_first: bool):
    """Of two processes with the same index, the one with the settings of process 0 belongs to its job."""
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        process_0 = pool.submit(meet_as, 0, 3, port=port, settings_digest="a")
        digests = ("b", "a") if is_first else ("a", "b")
        results = {}
        for digest in digests:
            results[digest] = pool.submit(meet_as, 1, 3, port=port, settings_digest=digest)
            time.sleep(0.5)
        assert "belongs to another job" in results["b"].result()
        assert meet_as(2, 3, port=port, settings_digest="a") == ""
        assert (process_0.result(), results["a"].result()) == ("", "")


def test_meet_processes_reports_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PrepError, match=f"process 0 cannot listen on port {port}"):
            meet_processes(ProcessAddress(0, 2, f"127.0.0.1:{port}"), 1)


def test_index_ranges_joins_neighbours():
    assert index_ranges([5, 1, 3, 4]) == "1, 3-5"
    assert index_ranges([]) == ""


def connection_to(port: int) -> socket.socket:
    """Connect to process 0, which may not listen yet."""
    for _ in range(300):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=MAX_S)
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise AssertionError("process 0 does not listen")


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 16000 + b"\n",
        b'{"protocol": "prep-1", "index": 1e999, "count": 2}\n',
        b'{"protocol": "prep-1", "index": "1", "count": 2}\n',
        b'{"protocol": "prep-1"}\n',
        b"[1]\n",
        b"\xff\xfe\n",
    ],
)
def test_meet_processes_ignores_strangers(line: bytes):
    def send(port: int) -> None:
        deadline_s = time.monotonic() + MAX_S
        while time.monotonic() < deadline_s:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=MAX_S) as connection:
                    connection.sendall(line)
                    assert connection.recv(1) == b""
                return
            except ConnectionError:
                time.sleep(0.01)

    assert meet([(0, 2), (1, 2)], MAX_S, before=send) == ["", ""]
