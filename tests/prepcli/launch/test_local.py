"""Local processes: their environment, output, signals and exit codes."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prepcli.core.errors import FAILED, INTERRUPTED, STOPPED, USAGE, PrepError
from prepcli.launch import local
from prepcli.launch.local import ProcessWatcher, process_environment

WAIT = "import time; time.sleep(3600)"
KILLED = "import os; os.kill(os.getpid(), 9)"
STOP_AT_SIGNAL = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", file=sys.stderr, flush=True)
time.sleep(3600)
"""


def test_free_port_is_none_of_the_ports_of_connections():
    """A connection could take such a port before the job does."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {local.free_port() for _ in range(20)}
    assert not [port for port in ports if first <= port <= last]
    assert len(ports) > 1


def test_free_ports_differ_if_nearly_all_ports_are_assigned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Many servers have this range. Two jobs that start together must not choose one port."""
    path = tmp_path / "ip_local_port_range"
    path.write_text("1024\t65535\n")
    monkeypatch.setattr(local, "ASSIGNED_PORTS", path)
    assert len({local.free_port() for _ in range(20)}) > 1


def test_free_port_is_unused(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        used = server.getsockname()[1]
        monkeypatch.setattr(local, "FIRST_PORT", used)
        monkeypatch.setattr(local, "MIN_PORTS", 1)
        monkeypatch.setattr(local, "_first_assigned_port", lambda: used + 2)
        assert local.free_port() != used


def test_free_port_is_one_of_the_kernel_if_all_others_are_used(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        used = server.getsockname()[1]
        monkeypatch.setattr(local, "FIRST_PORT", used)
        monkeypatch.setattr(local, "MIN_PORTS", 1)
        monkeypatch.setattr(local, "_first_assigned_port", lambda: used + 1)
        assert local.free_port() not in (0, used)


def start(*scripts: str) -> list[subprocess.Popen[str]]:
    """Start one Python process per script, as `start_processes` does."""
    return [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for script in scripts
    ]


def watch(
    *scripts: str, poll_signal: Callable[[], str] = lambda: "", grace_s: float = 3600.0
) -> tuple[str | PrepError, list[tuple[int, str]]]:
    """Run scripts to their end, and return the result or the error, and the lines."""
    lines: list[tuple[int, str]] = []
    watcher = ProcessWatcher(
        start(*scripts), lambda index, line: lines.append((index, line)), poll_signal, grace_s
    )
    try:
        return watcher.wait(), lines
    except PrepError as error:
        return error, lines


def failure(
    *scripts: str, poll_signal: Callable[[], str] = lambda: "", grace_s: float = 3600.0
) -> PrepError:
    """Run scripts with at least one failure, and return the error."""
    result, _ = watch(*scripts, poll_signal=poll_signal, grace_s=grace_s)
    assert isinstance(result, PrepError)
    return result


def test_environment_describes_one_process():
    inherited = {
        "HOME": "/h",
        "SLURM_PROCID": "3",
        "XLA_FLAGS": "-",
        "JAX_PROCESS_ID": "7",
        "OMPI_COMM_WORLD_RANK": "1",
    }
    assert process_environment(inherited, index=1, count=2, port=9, devices=4) == {
        "HOME": "/h",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:9",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }


def test_stdout_of_process_0_is_the_result():
    script = "import sys; print('out{0}'); print('a\\nb{0}', file=sys.stderr)"
    result, lines = watch(*(script.format(index) for index in range(2)))
    assert result == "out0\n"
    assert sorted(lines) == [(0, "a"), (0, "b0"), (1, "a"), (1, "b1")]


def test_undecodable_output_is_replaced(tmp_path: Path):
    (tmp_path / "prepcli.py").write_text("import sys; sys.stderr.buffer.write(b'\\xff\\n')")
    lines: list[str] = []
    processes = local.start_processes([], count=1, devices=1, environ={}, env={}, cwd=tmp_path)
    ProcessWatcher(processes, lambda _, line: lines.append(line), lambda: "", 3600.0).wait()
    assert lines == ["�"]


@pytest.mark.parametrize("code", [FAILED, USAGE, STOPPED, INTERRUPTED])
def test_job_returns_exit_code_of_failed_process(code: int):
    error = failure("", f"raise SystemExit({code})")
    assert error.code == code
    assert "process 1" in error.what


def test_other_processes_are_killed_after_their_grace():
    error = failure(WAIT, "raise SystemExit(1)", grace_s=0.1)
    assert (error.what, error.code) == ("process 1 exited with 1", FAILED)


def test_hint_names_lines_only_if_there_are_some():
    assert "lines" not in failure("", "raise SystemExit(1)").hint
    assert "lines that begin with [1]" in failure("", "import sys; sys.exit('no data')").hint


def test_a_killed_process_is_named_and_the_run_can_resume():
    error, lines = watch(WAIT, KILLED, grace_s=0.1)
    assert isinstance(error, PrepError)
    assert (error.what, error.code) == ("process 1 was killed by SIGKILL", STOPPED)
    assert "resume" in error.hint
    assert lines == [(1, "process 1 was killed by SIGKILL; the others stop")]


@pytest.mark.parametrize(
    "survivor", ["raise SystemExit(75)", "raise SystemExit(1)", "import os; os.abort()"]
)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_the_cause_of_the_others(victim: int, survivor: str, tmp_path: Path):
    """Both ends may be seen at once, in any order."""
    wait = f"import os, time\nwhile os.path.exists({str(tmp_path)!r}): time.sleep(0.01)\n"
    scripts = [wait + survivor, wait + KILLED]
    if victim == 0:
        scripts.reverse()
    processes = start(*scripts)
    tmp_path.rmdir()
    for process in processes:
        process.wait()
    with pytest.raises(PrepError) as caught:
        ProcessWatcher(processes, lambda *_: None, lambda: "", 3600.0).wait()
    assert (caught.value.what, caught.value.code) == (
        f"process {victim} was killed by SIGKILL",
        STOPPED,
    )


def test_survivors_report_a_lost_process_within_their_grace(tmp_path: Path):
    """The survivor ends only when it misses the other process, as the watchdog does."""
    pid_file = tmp_path / "pid"
    survivor = f"""
import os, sys, time
while True:
    try:
        os.kill(int(open({str(pid_file)!r}).read() or os.getpid()), 0)
    except FileNotFoundError:
        pass
    except ProcessLookupError:
        sys.stderr.write("process 1 is lost\\n")
        raise SystemExit(75)
    time.sleep(0.01)
"""
    victim = f"import os; open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n" + KILLED
    error, lines = watch(survivor, victim)
    assert isinstance(error, PrepError)
    assert (error.what, error.code) == ("process 1 was killed by SIGKILL", STOPPED)
    assert (0, "process 1 is lost") in lines


def test_signal_reaches_all_processes():
    lines: list[tuple[int, str]] = []
    processes = start(STOP_AT_SIGNAL, STOP_AT_SIGNAL)
    watcher = ProcessWatcher(
        processes,
        lambda *line: lines.append(line),
        lambda: "SIGTERM" if len(lines) == 2 else "",
        3600.0,
    )
    with pytest.raises(PrepError, match="stopped by SIGTERM") as caught:
        watcher.wait()
    assert caught.value.code == STOPPED
    assert [process.returncode for process in processes] == [STOPPED, STOPPED]


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", STOPPED), ("SIGINT", INTERRUPTED)])
def test_signal_before_the_start_of_prep_counts_as_a_stop(name: str, code: int):
    script = STOP_AT_SIGNAL.replace(
        "signal.SIGTERM, lambda *_: sys.exit(75)", f"signal.{name}, signal.SIG_DFL"
    )
    lines: list[str] = []
    watcher = ProcessWatcher(
        start(script, script),
        lambda _, line: lines.append(line),
        lambda: name if len(lines) == 2 else "",
        3600.0,
    )
    with pytest.raises(PrepError) as caught:
        watcher.wait()
    assert caught.value.code == code


def test_processes_end_when_the_watcher_fails():
    processes = start(WAIT, WAIT)

    def fail() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ProcessWatcher(processes, lambda *_: None, fail, 3600.0).wait()
    assert [process.wait() for process in processes] == [-signal.SIGKILL, -signal.SIGKILL]
