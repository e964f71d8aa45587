"""Processes of a job: their start, agreement, heartbeats, and the end of all if one is lost."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PYTHON, TERMINAL, Option, PrepError
from prepcli.core.process_address import ProcessAddress
from prepcli.core.process_group import SingleProcess
from prepcli.launch.local import free_port
from tests.helpers.thread_groups import ThreadGroup, run_group, run_together
from tests.helpers.waiting import MAX_S
from trainer.distributed import agreement
from trainer.distributed.agreement import check_agreement
from trainer.distributed.processes import ConnectionBrokenError, check_coordinator_host
from trainer.distributed.rendezvous import meet_processes, process_place
from trainer.distributed.watchdog import (
    INTERVAL_S,
    Heartbeat,
    HeartbeatMonitor,
    JobEnd,
    Watchdog,
    WatchSettings,
    lost_process,
)

# The start of jax in several processes: the address of process 0, and processes that are connected already.

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


# The meeting of processes before jax starts, in threads of one process.


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


@pytest.mark.waits
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_meet_processes_returns_when_all_have_come(order: tuple[int, ...]):
    assert meet([(index, 4) for index in order], MAX_S) == ["", "", "", ""]


@pytest.mark.waits
def test_meet_processes_names_the_missing_in_every_process():
    errors = meet([(0, 6), (2, 6)], 5.0)
    for error in errors:
        assert "processes 1, 3-5 of 6 did not start within 5 s" in error
        assert "127.0.0.1" in error
    assert len(errors) == 2


@pytest.mark.waits
def test_meet_processes_without_process_0_names_the_address():
    [error] = meet([(1, 2)], 0.5)
    assert "process 1 of 2 did not reach process 0 within 0.5 s" in error
    assert "address tried: 127.0.0.1:" in error
    assert "refused" in error


@pytest.mark.waits
def test_meet_processes_refuses_a_second_process_of_an_index():
    errors = meet([(0, 3), (1, 3), (1, 3)], MAX_S)
    assert all("two processes have the index 1" in error for error in errors)


@pytest.mark.waits
def test_meet_processes_refuses_other_counts():
    errors = meet([(0, 3), (1, 2)], MAX_S)
    assert all(
        "process 0 expects 3, and process 1 at 127.0.0.1 expects 2" in error for error in errors
    )


@pytest.mark.waits
def test_meet_processes_replaces_a_process_that_has_ended():
    def start_and_end(port: int) -> None:
        with connection_to(port) as connection:
            connection.sendall(b'{"protocol": "prep-1", "index": 1, "count": 3}\n')

    assert meet([(0, 3), (1, 3), (2, 3)], MAX_S, before=start_and_end) == ["", "", ""]


@pytest.mark.waits
def test_meet_processes_returns_the_places():
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        addresses = [ProcessAddress(index, 3, f"127.0.0.1:{port}") for index in range(3)]
        places = [*pool.map(meet_processes, addresses, [MAX_S] * 3)]
    assert [sorted(known) for known in places] == [[0, 1, 2], [0, 1], [0, 2]]
    assert {place for known in places for place in known.values()} == {process_place()}


@pytest.mark.waits
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


@pytest.mark.waits
def test_meet_processes_names_refused_processes():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet_as, 0, 2, port=port, job="recipe a", timeout_s=5.0)
        assert "belongs to another job" in meet_as(1, 2, port=port, job="recipe b")
        assert "process 1 of 2 did not start" in first.result()
        assert f"it refused process 1 of `recipe b` ({process_place()})" in first.result()


@pytest.mark.waits
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


@pytest.mark.waits
def test_meet_processes_reports_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PrepError, match=f"process 0 cannot listen on port {port}"):
            meet_processes(ProcessAddress(0, 2, f"127.0.0.1:{port}"), 1)


def connection_to(port: int) -> socket.socket:
    """Connect to process 0, which may not listen yet."""
    for _ in range(300):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=MAX_S)
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise AssertionError("process 0 does not listen")


@pytest.mark.waits
@pytest.mark.parametrize(
    "line",
    [
        b"[" * 16000 + b"\n",
        b'{"protocol": "prep-1", "index": 1e999, "count": 2}\n',
        b'{"protocol": "prep-1", "index": "1", "count": 2}\n',
        b'{"protocol": "prep-1"}\n',
        b"[1]\n",
        b"\xff\xfe\n",
        b"GET / HTTP/1.1\r\n\n",
        b'{"protocol": "other"}\n',
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


# The decision that a process of a job is lost or stuck.


def beat(count: int, phase: str = "step 3", num_phases: int = 5) -> Heartbeat:
    return Heartbeat(count, "host", phase, num_phases)


def monitor(step_timeout_s: float = 0.0) -> HeartbeatMonitor:
    return HeartbeatMonitor(2, timeout_s=10.0, step_timeout_s=step_timeout_s, start_s=0.0)


def test_monitor_accepts_regular_heartbeats():
    watched = monitor()
    assert all(watched.check({0: beat(s), 1: beat(s)}, float(s)) is None for s in range(100))


def test_monitor_names_the_silent_process_and_its_phase():
    watched = monitor()
    for second in range(11):
        assert watched.check({0: beat(second), 1: beat(1, "save 3")}, float(second)) is None
    end = watched.check({0: beat(11), 1: beat(1, "save 3")}, 11.0)
    assert end is not None
    assert (end.kind, end.process) == ("lost", 1)
    assert end.what == "process 1 (host) is lost"
    assert end.why == "no heartbeat for 11 s; its last phase was `save 3`"


def test_monitor_names_a_process_without_any_heartbeat():
    watched = monitor()
    ends = [watched.check({0: beat(second)}, float(second)) for second in range(12)]
    assert ends[:11] == [None] * 11
    assert ends[11] == JobEnd(
        "lost", 1, "process 1 is lost", "no heartbeat for 11 s; no heartbeat of it arrived"
    )


def test_monitor_knows_the_places_of_silent_processes():
    watched = HeartbeatMonitor(
        2, timeout_s=10.0, step_timeout_s=0.0, start_s=0.0, places={1: "node1, pid 7"}
    )
    ends = [watched.check({0: beat(second)}, float(second)) for second in range(12)]
    reason = "no heartbeat for 11 s; no heartbeat of it arrived"
    assert ends[11] == JobEnd("lost", 1, "process 1 (node1, pid 7) is lost", reason)


def test_monitor_ignores_the_time_of_its_own_suspension():
    watched = monitor()
    watched.check({0: beat(1), 1: beat(1)}, 1.0)
    assert watched.check({0: beat(2), 1: beat(1)}, 500.0) is None
    assert watched.check({0: beat(3), 1: beat(2)}, 504.0) is None


def test_monitor_names_the_process_behind_in_a_stuck_step():
    watched, end = monitor(step_timeout_s=20.0), None
    for second in range(22):
        beats = {0: beat(second, "step 5", num_phases=7), 1: beat(second, "step 3", num_phases=5)}
        end = watched.check(beats, float(second))
        assert end is None or second == 21
    assert end is not None
    assert (end.kind, end.process) == ("stuck", 1)
    assert "it is in `step 3`, others are in `step 5`" in end.why


def test_monitor_names_a_step_in_which_all_are_stuck():
    watched = monitor(step_timeout_s=20.0)
    ends = [
        watched.check({0: beat(second), 1: beat(second)}, float(second)) for second in range(22)
    ]
    assert ends[21] is not None
    assert ends[21].what == "`step 3` is stuck"


@pytest.mark.parametrize("phase", ["load", "compile", "evaluate 3", "save 3"])
def test_monitor_step_timeout_ignores_other_phases(phase: str):
    watched = monitor(step_timeout_s=20.0)
    assert all(
        watched.check({0: beat(s, phase), 1: beat(s, phase)}, float(s)) is None for s in range(60)
    )


def test_heartbeat_and_end_survive_json():
    end = lost_process(0, beat(4), 0.0)
    assert end.why == "its connection broke; its last phase was `step 3`"
    assert JobEnd.from_json(end.to_json()) == end
    assert Heartbeat.from_json(beat(4).to_json()) == dataclasses.replace(beat(4))


# Watchdogs of several processes, as threads of one process.

# Time limit of a job with a lost process.
TIMEOUT_S = 1.0

# Time limit of a job with two live processes beside a lost one.
LIVE_TIMEOUT_S = 5.0

# Time between two heartbeats.
BEAT_S = 0.02


@dataclass
class Texts:
    """Texts of a simulated coordination service; `is_up` is shared by all processes."""

    index: int
    texts: dict[str, str]
    is_up: threading.Event
    count: int = 3

    def publish(self, key: str, text: str) -> None:
        self._require_up(key)
        self.texts[key] = text

    def read(self, key: str) -> str | None:
        self._require_up(key)
        return self.texts.get(key)

    def read_by_index(self, key: str) -> dict[int, str]:
        self._require_up(key)
        return {
            int(name.split("/")[1]): text
            for name, text in [*self.texts.items()]
            if name.startswith(f"{key}/")
        }

    def _require_up(self, key: str) -> None:
        """Raise ConnectionBrokenError if the network is down."""
        if not self.is_up.is_set():
            raise ConnectionBrokenError(f"no answer for {key}")


@dataclass
class Job:
    """Watchdogs of a job, and the ends that they report."""

    is_up: threading.Event = field(default_factory=threading.Event)
    ends: dict[int, JobEnd] = field(default_factory=dict[int, JobEnd])
    reported: dict[int, threading.Event] = field(default_factory=dict[int, threading.Event])
    texts: dict[str, str] = field(default_factory=dict[str, str])
    dogs: list[Watchdog] = field(default_factory=list[Watchdog])

    def close(self) -> None:
        for dog in self.dogs:
            dog.close()


def start_job(
    num_started: int = 3, is_broken: Callable[[], bool] = lambda: False, *, timeout_s: float = MAX_S
) -> Job:
    """Start watchdogs for the processes of a job. Return them with what they report."""
    job = Job()
    job.is_up.set()
    for index in range(num_started):
        job.reported[index] = threading.Event()

        def on_end(end: JobEnd, index: int = index) -> None:
            job.ends[index] = end
            job.reported[index].set()

        settings = WatchSettings(
            timeout_s, 0.0, {index: f"host-{index}"}, beat_s=BEAT_S, grace_s=BEAT_S
        )
        job.dogs.append(
            Watchdog(
                Texts(index, job.texts, job.is_up), settings, is_broken=is_broken, on_end=on_end
            )
        )
    for dog in job.dogs:
        dog.start()
    return job


@pytest.mark.waits
def test_watchdogs_of_all_processes_name_the_lost_one():
    # Process 2 never starts.
    job = start_job(num_started=2, timeout_s=LIVE_TIMEOUT_S)
    assert all(job.reported[index].wait(MAX_S) for index in (0, 1))
    job.close()
    assert {end.what for end in job.ends.values()} == {"process 2 is lost"}


@pytest.mark.waits
def test_watchdogs_quote_the_error_of_a_failed_process():
    job = start_job()
    job.dogs[1].end_job(JobEnd("failed", 1, "process 1 (host-1) failed", "no space left"))
    assert all(job.reported[index].wait(MAX_S) for index in (0, 2))
    job.close()
    assert {index: end.why for index, end in job.ends.items()} == {
        0: "no space left",
        2: "no space left",
    }


@pytest.mark.waits
def test_process_0_fails_after_the_others_have_read_it():
    job = start_job()
    job.dogs[0].end_job(JobEnd("failed", 0, "process 0 (host-0) failed", "no space left"))
    assert {"seen/1", "seen/2"} <= set(job.texts)
    assert all(job.reported[index].wait(MAX_S) for index in (1, 2))
    job.close()


@pytest.mark.waits
def test_watchdogs_name_process_0_if_it_does_not_answer():
    job = start_job(timeout_s=TIMEOUT_S)
    job.is_up.clear()
    assert all(job.reported[index].wait(MAX_S) for index in (1, 2))
    job.close()
    assert {end.what.partition(" (")[0] for end in job.ends.values()} == {"process 0"}


@pytest.mark.waits
def test_watchdog_names_a_process_0_that_never_decided():
    ends, reported = list[JobEnd](), threading.Event()

    def on_end(end: JobEnd) -> None:
        ends.append(end)
        reported.set()

    settings = WatchSettings(TIMEOUT_S, 0.0, {0: "node0, pid 7", 1: "node1, pid 8"})
    dog = Watchdog(
        Texts(1, {}, threading.Event()), settings, is_broken=lambda: False, on_end=on_end
    )
    dog.start()
    assert reported.wait(MAX_S)
    dog.close()
    assert [end.what for end in ends] == ["process 0 (node0, pid 7) is lost"]


class SilentTexts(Texts):
    """Texts of a process. Their service stops, and never answers, when the process publishes the end of the job."""

    def publish(self, key: str, text: str) -> None:
        if key.startswith("ended/"):
            self.is_up.clear()
            threading.Event().wait()
        super().publish(key, text)


@pytest.mark.waits
def test_failed_process_ends_if_the_service_does_not_answer():
    ends, is_up = list[JobEnd](), threading.Event()
    is_up.set()
    texts = SilentTexts(1, {}, is_up)
    settings = WatchSettings(TIMEOUT_S, 0.0, {1: "node1, pid 8"})
    dog = Watchdog(texts, settings, is_broken=lambda: not is_up.is_set(), on_end=ends.append)
    dog.start()
    main = threading.Thread(
        target=dog.end_job, args=(JobEnd("failed", 1, "process 1 failed", "disk"),), daemon=True
    )
    main.start()
    main.join(MAX_S)
    assert not main.is_alive(), "the main thread can report the error"
    assert ends == [], "the watchdog does not report another one"


@pytest.mark.waits
def test_watchdogs_stay_silent_after_close():
    job = start_job(timeout_s=TIMEOUT_S)
    job.close()
    job.is_up.clear()
    assert not job.reported[0].wait(2 * TIMEOUT_S)
    assert not job.ends


@pytest.mark.waits
def test_interval_fits_the_timeout_and_the_number_of_processes():
    assert WatchSettings(60.0, 0.0, {}).interval_s(4) == INTERVAL_S
    assert WatchSettings(5.0, 0.0, {}).interval_s(4) == 1.0
    assert WatchSettings(60.0, 0.0, {}).interval_s(4096) > 8


# Comparison of facts between processes, which are threads here.


def compare(
    facts: list[dict[str, str]],
    warnings: list[str] | None = None,
    options: Mapping[str, Option] | None = None,
) -> tuple[list[PrepError | None], list[str]]:
    """Compare the facts of threads; return the error of each, and the names that the first has gathered."""
    gathered = list[str]()

    def run(group: ThreadGroup) -> None:
        warn = None if warnings is None else warnings.append
        try:
            check_agreement(group, facts[group.index], hint="the hint", options=options, warn=warn)
        finally:
            if group.index == 0:
                gathered.extend(group.gathered)

    return run_together(len(facts), run), gathered


def test_equal_facts_are_compared_by_their_digests_only():
    errors, gathered = compare([{"jax": "1", "optimizer.lr": "0.1"}] * 3)
    assert errors == [None] * 3
    # A difference would make the processes gather the facts themselves next.
    assert gathered == ["agreement"]


def test_check_agreement_names_differences_in_every_process():
    lines = [
        {"jax": "1", "seed": "1"},
        {"jax": "1", "seed": "2"},
        {"jax": "1", "seed": "1"},
        {"jax": "2", "seed": "1"},
    ]
    errors, _ = compare(lines)
    for error in errors:
        assert error is not None
        assert error.what == "the processes differ in `jax`, `seed`"
        assert error.hint == "the hint"
        assert "jax: 1 in processes 0-2 (host " in error.why
        assert "; 2 in process 1 (host " in error.why
    assert len({str(error) for error in errors}) == 1


def test_check_agreement_names_missing_and_few_facts():
    errors, _ = compare([{str(i): "x" for i in range(7)}, {}])
    assert errors[0] is not None
    assert errors[0].what.endswith("and 2 more")
    assert "0: x in process 0" in errors[0].why
    assert "not set in process 1" in errors[0].why


def test_check_agreement_warns_of_clocks(monkeypatch: pytest.MonkeyPatch):
    clocks: dict[str, float] = {}

    def thread_time() -> float:
        return clocks.setdefault(threading.current_thread().name, len(clocks) * 60.0)

    monkeypatch.setattr(agreement.time, "time", thread_time)
    warnings: list[str] = []
    errors, _ = compare([{}, {}], warnings)
    assert errors == [None, None]
    assert len(warnings) == 1
    assert "60 s ahead of the clock of process" in warnings[0]


def test_check_agreement_of_one_process_is_silent():
    check_agreement(SingleProcess(), {"jax": "1"}, hint="", warn=pytest.fail)


def test_check_agreement_names_the_option_of_a_fact():
    options = {"no_verify": Option("verify", False)}
    errors, _ = compare([{"no_verify": "True"}, {"no_verify": "False"}], options=options)
    for error in errors:
        assert error is not None
        assert error.rendered(TERMINAL).what == "the processes differ in `--no-verify`"
        assert error.rendered(PYTHON).what == "the processes differ in `verify=False`"


# Hosts of a job, and the processes that write a folder for those that share it.


def test_processes_per_host_counts_one_machine_only(monkeypatch: pytest.MonkeyPatch):
    assert run_group(3, agreement.processes_per_host) == [3] * 3
    assert agreement.processes_per_host(SingleProcess()) == 1
    names = iter("aab")
    monkeypatch.setattr(agreement, "machine_id", lambda: next(names))
    assert run_group(3, agreement.processes_per_host) == [2] * 3


def test_machine_id_depends_on_kernel_and_host_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ids = [agreement.machine_id()]
    monkeypatch.setattr(agreement.socket, "gethostname", lambda: "container")
    ids.append(agreement.machine_id())
    monkeypatch.setattr(agreement, "BOOT_ID", tmp_path / "missing")
    ids.append(agreement.machine_id())
    assert len({*ids}) == 3
    assert agreement.machine_id() == ids[-1]


@pytest.mark.parametrize(
    ("num_shared", "writers"), [(4, [True, False, False, False]), (2, [True, False, True, False])]
)
def test_each_folder_has_exactly_one_writing_process(
    tmp_path: Path, num_shared: int, writers: list[bool]
):
    """Processes after the first `num_shared` ones have a folder of their own."""

    def writes(process: ThreadGroup) -> bool:
        folder = tmp_path / ("shared" if process.index < num_shared else "other")
        folder.mkdir(exist_ok=True)
        return process.index in agreement.folder_processes(folder, process).writers

    assert run_group(4, writes) == writers
    assert list(tmp_path.rglob(f"{agreement.PROBE_PREFIX}*")) == []


def test_sees_folder_removes_only_old_probes(tmp_path: Path):
    old, new = (tmp_path / f"{agreement.PROBE_PREFIX}{age}" for age in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    assert agreement.sees_folder(tmp_path, SingleProcess())
    assert list(tmp_path.iterdir()) == [new], "another job may use it"


def test_writers_are_one_process_of_each_other_host():
    answers = [("a", True), ("a", True), ("b", False), ("b", False), ("c", False), ("d", True)]
    assert agreement._folder_writers(answers) == [0, 2, 4]
    assert agreement._host_leaders(answers) == [0, 2, 4, 5]
