"""The start of jax in several processes: the address of process 0, and processes that are connected already."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from prepcli.core.process_address import ProcessAddress
from prepcli.launch.local import free_port
from tests.helpers.waiting import MAX_S
from trainer.distributed.processes import check_coordinator_host

CONNECTED = """
import sys
import jax
from trainer.distributed.processes import CoordinatedProcesses
from trainer.distributed.processes import start_processes
from prepcli.core.errors import PrepError
from prepcli.core.process_address import ProcessAddress

jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", num_processes=1, process_id=0)
for group in (CoordinatedProcesses(), CoordinatedProcesses()):
    group.barrier("name")
    assert group.gather("name", "text") == ["text"]
timeouts = {"start_timeout_s": 1, "heartbeat_timeout_s": 10}
assert start_processes(None, **timeouts).count == 1
try:
    start_processes(ProcessAddress(1, 2, "127.0.0.1:1", reason="the test"), **timeouts)
except PrepError as error:
    print(error)
"""

TWICE = """
import sys
import jax
from trainer.distributed.processes import start_processes
from prepcli.core.errors import PrepError
from prepcli.core.process_address import ProcessAddress

address = ProcessAddress(int(sys.argv[2]), 2, f"127.0.0.1:{sys.argv[1]}")
group = start_processes(address, start_timeout_s=60, heartbeat_timeout_s=10)
assert jax.device_count() == 2 * jax.local_device_count()
group.barrier("end")  # the other process may still exchange its devices
group.disconnect()
try:
    start_processes(address, start_timeout_s=60, heartbeat_timeout_s=10)
except PrepError as error:
    print(error)
"""


def address(coordinator: str, *, hosts: int | None, host: int | None) -> ProcessAddress:
    """Return the address of process 1 of 4."""
    return ProcessAddress(1, 4, coordinator, host_count=hosts, host_index=host)


def resolve_to(monkeypatch: pytest.MonkeyPatch, *ips: str) -> None:
    """Let every host name have these IP addresses."""

    def getaddrinfo(host: str, port: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0)) for ip in ips]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize("coordinator", ["127.0.0.1:99", "localhost:99", "[::1]:99"])
def test_check_coordinator_host_refuses_loopback(coordinator: str):
    with pytest.raises(PrepError, match="reaches only its own host - the processes run on 2 hosts"):
        check_coordinator_host(address(coordinator, hosts=2, host=0))


@pytest.mark.parametrize("hosts", [1, None])
def test_check_coordinator_host_allows_loopback_on_one_host(hosts: int | None):
    check_coordinator_host(address("127.0.0.1:99", hosts=hosts, host=0))


def test_check_coordinator_host_names_the_loopback_address(monkeypatch: pytest.MonkeyPatch):
    resolve_to(monkeypatch, "127.0.1.1")
    with pytest.raises(
        PrepError, match=r"the host n001 of process 0 has the loopback address 127\.0\.1\.1"
    ):
        check_coordinator_host(address("n001:99", hosts=2, host=1))
    # Host 0 may resolve its own name to a loopback address.
    check_coordinator_host(address("n001:99", hosts=2, host=0))
    resolve_to(monkeypatch, "127.0.1.1", "10.0.0.1")
    check_coordinator_host(address("n001:99", hosts=2, host=1))


def test_start_processes_keeps_connected_processes():
    process = subprocess.run(
        [sys.executable, "-c", CONNECTED, str(free_port())],
        capture_output=True,
        text=True,
        check=True,
        timeout=MAX_S,
    )
    assert "jax is connected as process 0 of 1, and the test says otherwise" in process.stdout


def test_start_processes_refuses_a_second_start():
    """The devices stay those of the first job, whose connection has ended."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWICE, port, index], stdout=subprocess.PIPE, text=True
        )
        for index in "01"
    ]
    outputs = [process.communicate(timeout=MAX_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    for output in outputs:
        assert "this Python process has used jax's devices before" in output
        assert "start a new Python process for each run" in output
