"""Several processes on one output: the same bytes as with one process, whatever happens to some of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prepcli.execution.folder_converter import FolderConverter
from tests.helpers.fork_server import PREP, ForkedProcess, run_prep, start_prep, start_python
from tests.helpers.killing import (
    COMMANDS,
    SEVERAL_PROCESSES,
    KillSetup,
    act_when_durable,
    check_killed,
    command_words,
    read_files,
    start_command,
)
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing
from tests.helpers.slow_cases import slow_except
from tests.helpers.waiting import MAX_S, wait_until

pytestmark = pytest.mark.waits


def wait_for_exit(*processes: ForkedProcess, code: int = 0) -> list[tuple[str, str]]:
    """Wait until the processes have ended with the code, and return stdout and stderr of each."""
    outputs = []
    for process in processes:
        out, err = process.communicate(timeout=MAX_S)
        assert process.returncode == code, err.decode()
        outputs.append((out.decode(), err.decode()))
    return outputs


def run(setup: KillSetup, name: str, out: str, *more: str, code: int = 0) -> tuple[str, str]:
    return wait_for_exit(start_command(setup, name, out, *more), code=code)[0]


def shares(count: int) -> list[str]:
    return [f"{count}/{index}" for index in range(count)]


@pytest.mark.parametrize("name", slow_except(COMMANDS, ["pad-vocab"]))
def test_processes_write_the_same_bytes_without_extra_reads(setup: KillSetup, name: str):
    expected_nbytes = setup.undisturbed(name).report["bytes"]
    processes = [
        start_command(setup, name, "out", "--json", "--processes", share) for share in shares(3)
    ]
    reports = [json.loads(out) for out, _ in wait_for_exit(*processes)]
    assert read_files(setup.folder / "out") == setup.expected_files(name)
    for key in ("read", "written", "moved"):
        assert sum(report["bytes"][key] for report in reports) == expected_nbytes[key]
    assert [report["processes"] for report in reports] == [
        {"count": 3, "index": i, "workers": 1} for i in range(3)
    ]
    shutil.rmtree(setup.folder / "out")


@pytest.mark.parametrize("name", slow_except(COMMANDS, ["cast"]))
def test_workers_write_the_same_bytes(setup: KillSetup, name: str):
    report, stderr = run(
        setup, name, "out", "--json", "--workers", "2", "--memory", "200MiB", "--progress", "lines"
    )
    assert read_files(setup.folder / "out") == setup.expected_files(name)
    fields, total = json.loads(report), sum(map(len, setup.expected_files(name).values()))
    assert total * 0.9 < fields["bytes"]["written"] <= total or name == "compress"
    assert 0 < fields["memory"]["peak"] <= fields["memory"]["budget"] == 200 << 20
    assert fields["time"].keys() == {"read", "move", "write"}
    ends = [line for line in stderr.splitlines() if " done in " in line and "%" in line]
    assert len(ends) == 1
    assert "100%" in ends[0]
    shutil.rmtree(setup.folder / "out")


def test_workers_import_no_code_from_the_current_folder(setup: KillSetup):
    folder = setup.folder / "stranger"
    folder.mkdir()
    shutil.copytree(setup.folder / "model", folder / "model")
    for name in ("json", "numpy", "xxhash"):
        (folder / f"{name}.py").write_text("open('ran', 'w').close()\n")
    words = ["save-init", "./model", "--workers", "2", "--memory", "200MiB", "-q"]
    subprocess.run([sys.executable, "-P", "-m", "prepcli", *words], cwd=folder, check=True)
    assert not (folder / "ran").exists()
    shutil.rmtree(folder)


def test_share_comes_from_the_launchers_variables(setup: KillSetup):
    processes = [
        start_python(
            PREP,
            *command_words("export", "out"),
            cwd=setup.folder,
            env={**os.environ, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(index)},
        )
        for index in range(2)
    ]
    outputs = wait_for_exit(*processes)
    assert "process 1 of 2, according to SLURM" in outputs[1][1]
    assert read_files(setup.folder / "out") == setup.expected_files("export")
    shutil.rmtree(setup.folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(COMMANDS, ["reshard"]))
def test_processes_survive_kills_at_random_moments(setup: KillSetup, name: str):
    check_killed(setup, name, kills=2, seed=2, launches=SEVERAL_PROCESSES)


def start_stopped_process(setup: KillSetup, out: str, *more: str) -> ForkedProcess:
    """Start a process, and stop it by SIGSTOP once it has durable bytes."""

    def stop(process: ForkedProcess) -> None:
        process.send_signal(signal.SIGSTOP)

    return act_when_durable(setup, "save-init", out, stop, *more)


@pytest.mark.parametrize("is_killed", slow_except([False, True], [True]))
def test_process_joins_a_running_one_or_takes_its_work_over(setup: KillSetup, is_killed: bool):
    first = start_stopped_process(setup, "out")
    second = start_command(setup, "save-init", "out", *([] if is_killed else ["--restart"]))
    for line in second.stderr:
        if b"waiting for" in line:
            break
    if is_killed:
        first.kill()
        first.communicate(timeout=MAX_S)
        wait_for_exit(second)
    else:
        first.send_signal(signal.SIGCONT)
        wait_for_exit(first, second)
    assert read_files(setup.folder / "out") == setup.expected_files("save-init")
    shutil.rmtree(setup.folder / "out")


def test_running_process_excludes_other_runs(setup: KillSetup):
    first = start_stopped_process(setup, "out")
    for more in ((), ("--restart",)):
        _, err = run(setup, "save-init", "out", "--no-scan", *more, code=1)
        assert "out.partial is locked" in err
        assert f"process {first.pid} on " in err
    first.send_signal(signal.SIGCONT)
    wait_for_exit(first)
    assert read_files(setup.folder / "out") == setup.expected_files("save-init")
    shutil.rmtree(setup.folder / "out")


# Workers and signals


def children(process: ForkedProcess) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in listed.read_text().split()]


def is_process_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def check_gone(workers: list[int]) -> None:
    """Check that the processes end soon: a new worker checks for its parent before it ends."""
    wait_until(lambda: not any(map(is_process_alive, workers)))


def start_with_stopped_workers(setup: KillSetup, out: str) -> tuple[ForkedProcess, list[int]]:
    """Start a command with two workers, and stop the workers by SIGSTOP."""
    process = start_command(setup, "save-init", out, "--workers", "3", "--memory", "300MiB")
    wait_until(lambda: len(children(process)) == 2, process)
    workers = children(process)
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    return process, workers


def test_workers_die_with_their_parent(setup: KillSetup):
    process, workers = start_with_stopped_workers(setup, "orphans")
    time.sleep(0.5)
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    process.kill()
    process.communicate(timeout=MAX_S)
    check_gone(workers)
    shutil.rmtree(setup.folder / "orphans.partial", ignore_errors=True)


@pytest.mark.parametrize(
    ("number", "code"),
    slow_except([(signal.SIGTERM, 75), (signal.SIGINT, 130)], [(signal.SIGTERM, 75)]),
)
def test_signals_reach_the_workers(setup: KillSetup, number: signal.Signals, code: int):
    process, workers = start_with_stopped_workers(setup, "signalled")
    process.send_signal(number)
    time.sleep(0.1)
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    ((_, err),) = wait_for_exit(process, code=code)
    assert f"error: {'interrupted' if code == 130 else 'stopped by SIGTERM'}" in err
    check_gone(workers)
    assert not (setup.folder / "signalled").exists()
    shutil.rmtree(setup.folder / "signalled.partial")


def test_killed_worker_ends_the_command(setup: KillSetup):
    process, workers = start_with_stopped_workers(setup, "bereft")
    os.kill(workers[0], signal.SIGKILL)
    os.kill(workers[1], signal.SIGCONT)
    ((_, err),) = wait_for_exit(process, code=1)
    assert "a worker was killed by SIGKILL" in err
    check_gone(workers)
    run(setup, "save-init", "bereft", "--workers", "2", "--memory", "200MiB")
    assert read_files(setup.folder / "bereft") == setup.expected_files("save-init")
    shutil.rmtree(setup.folder / "bereft")


def test_too_many_workers_for_the_memory_is_an_error(setup: KillSetup):
    _, err = run(setup, "save-init", "crowd", "--workers", "8", "--memory", "128MiB", code=2)
    assert "`--workers 8` with `--memory 128MiB` is too many" in err
    assert "hint: `--memory " in err
    assert not (setup.folder / "crowd.partial").exists()


@pytest.mark.slow
def test_source_change_while_waiting_is_an_error(
    setup: KillSetup, monkeypatch: MonkeyPatch, capsys: Capture
):
    shutil.copytree(setup.folder / "model", setup.folder / "changing")
    monkeypatch.chdir(setup.folder)
    publish = FolderConverter.publish

    def change_and_publish(run: FolderConverter) -> None:
        for path in Path("changing").glob("*.safetensors"):
            os.utime(path, ns=(0, 0))
        publish(run)

    monkeypatch.setattr(FolderConverter, "publish", change_and_publish)
    assert "changed while it was read" in run_failing(
        capsys, 1, "save-init", "./changing", "--out", "changed"
    )
    assert not Path("changed").exists()
    shutil.rmtree("changed.partial")
    shutil.rmtree("changing")


@pytest.mark.slow
def test_every_process_reports_a_damaged_source(setup: KillSetup):
    shutil.copytree(setup.folder / "init", setup.folder / "rotten")
    largest = max((setup.folder / "rotten/d").iterdir(), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        file.write(b"\x55" * 64)
    words = ["export", "rotten", "--out", "out", "--progress", "none"]
    processes = [start_prep(*words, "--processes", share, cwd=setup.folder) for share in shares(2)]
    for _, err in wait_for_exit(*processes, code=1):
        assert "rotten is damaged" in err
    assert not (setup.folder / "out").exists()
    workers = run_prep(*words, "--restart", "--workers", "2", cwd=setup.folder)
    assert (workers.returncode, workers.stderr.count("rotten is damaged")) == (1, 1)
    shutil.rmtree(setup.folder / "out.partial")
