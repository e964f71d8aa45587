"""Several processes on one output: the same bytes as of one, whatever happens to some of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prepcli.engine.pipeline import PipelineResult
from prepcli.execution import execute
from prepcli.execution.coordination import ConversionTask, WaitOptions
from tests.helpers.killing import (
    COMMANDS,
    SEVERAL_PROCESSES,
    KillSetup,
    check_killed,
    command_line,
    make_setup,
    read_files,
    start_command,
)
from tests.helpers.run_cli import run_failing


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> KillSetup:
    return make_setup(tmp_path_factory.mktemp("processes"))


def ended(*processes: subprocess.Popen[bytes], code: int = 0) -> list[tuple[str, str]]:
    """What processes said on stdout and stderr, once they have ended with a code."""
    said = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, err.decode()
        said.append((out.decode(), err.decode()))
    return said


def run(bench: KillSetup, name: str, out: str, *more: str, code: int = 0) -> tuple[str, str]:
    return ended(start_command(bench, name, out, *more), code=code)[0]


def until(happened, process: subprocess.Popen[bytes]) -> None:
    """Wait until something is so; fail if the process ends before."""
    while not happened():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def shares(count: int) -> list[str]:
    return [f"{count}/{index}" for index in range(count)]


@pytest.mark.parametrize("name", COMMANDS)
def test_several_processes_write_what_one_does_and_read_nothing_twice(bench: KillSetup, name: str):
    one = json.loads(run(bench, name, "alone", "--json")[0])["bytes"]
    shutil.rmtree(bench.folder / "alone")
    each = [start_command(bench, name, "out", "--json", "--processes", share) for share in shares(3)]
    reports = [json.loads(out) for out, _ in ended(*each)]
    assert read_files(bench.folder / "out") == read_files(bench.expected[name])
    for key in ("read", "written", "moved"):
        assert sum(report["bytes"][key] for report in reports) == one[key]
        assert max(report["bytes"][key] for report in reports) < one[key] * 0.6
    assert [report["processes"] for report in reports] == [{"count": 3, "index": i, "workers": 1} for i in range(3)]
    shutil.rmtree(bench.folder / "out")


@pytest.mark.parametrize("name", COMMANDS)
def test_workers_write_what_one_process_does(bench: KillSetup, name: str):
    report, told = run(bench, name, "out", "--json", "--workers", "2", "--memory", "200MiB", "--progress", "lines")
    assert read_files(bench.folder / "out") == read_files(bench.expected[name])
    found, total = json.loads(report), sum(len(data) for data in read_files(bench.expected[name]).values())
    assert total * 0.9 < found["bytes"]["written"] <= total or name == "compress"
    assert 0 < found["memory"]["peak"] <= found["memory"]["budget"] == 200 << 20
    ends = [line for line in told.splitlines() if " done in " in line and "%" in line]
    assert len(ends) == 1
    assert "100%" in ends[0]
    shutil.rmtree(bench.folder / "out")


def test_more_processes_than_tensors(bench: KillSetup):
    words = ["--memory", "1GiB", "--workers", "6"]
    run(bench, "save-init", "out", *words)
    assert read_files(bench.folder / "out") == read_files(bench.expected["save-init"])
    shutil.rmtree(bench.folder / "out")


def test_workers_run_no_code_that_lies_where_the_command_is_given(bench: KillSetup):
    folder = bench.folder / "stranger"
    folder.mkdir()
    shutil.copytree(bench.folder / "model", folder / "model")
    for name in ("json", "numpy", "xxhash"):
        (folder / f"{name}.py").write_text("open('ran', 'w').close()\n")
    words = ["save-init", "./model", "--workers", "2", "--memory", "200MiB", "-q"]
    subprocess.run([sys.executable, "-P", "-m", "prepcli", *words], cwd=folder, check=True)
    assert not (folder / "ran").exists()
    shutil.rmtree(folder)


def test_a_launcher_tells_each_process_its_share(bench: KillSetup):
    each = [
        subprocess.Popen(
            command_line("export", "out"),
            cwd=bench.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(index)},
        )
        for index in range(2)
    ]
    said = ended(*each)
    assert "process 1 of 2, as SLURM says" in said[1][1]
    assert read_files(bench.folder / "out") == read_files(bench.expected["export"])
    shutil.rmtree(bench.folder / "out")


@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_random_moments_whoever_takes_part(bench: KillSetup, name: str):
    check_killed(bench, name, kills=2, seed=2, launches=SEVERAL_PROCESSES)


def test_what_some_have_done_is_used_by_another_number_of_processes(bench: KillSetup):
    partial = bench.folder / "out.partial"
    for index in range(2):
        process = start_command(bench, "save-init", "out", "--processes", f"3/{index}")
        journal = partial / f".prep/journal.{index}"
        until(lambda found=journal: found.exists() and found.read_bytes().count(b"\n") > 2, process)
        process.stderr = None
        time.sleep(1.0)
        process.kill()
        process.wait(timeout=60)
    report = json.loads(run(bench, "save-init", "out", "--json", "--workers", "2", "--memory", "200MiB")[0])
    whole = sum(len(data) for data in read_files(bench.expected["save-init"]).values())
    assert report["bytes"]["written"] < whole * 0.6
    assert read_files(bench.folder / "out") == read_files(bench.expected["save-init"])
    shutil.rmtree(bench.folder / "out")


def test_one_that_comes_when_the_others_are_done_does_not_begin_anew(bench: KillSetup):
    ended(*[start_command(bench, "export", "out", "--overwrite", "--processes", share) for share in shares(2)])
    _, late = run(bench, "export", "out", "--overwrite", "--processes", "2/1")
    assert "already done" in late
    assert not (bench.folder / "out.partial").exists()
    _, alone = run(bench, "export", "out", "--overwrite")
    assert "already done" not in alone
    shutil.rmtree(bench.folder / "out")


def waiting(bench: KillSetup, out: str, share: str) -> subprocess.Popen[bytes]:
    """A process that has done its share and waits for others."""
    process = start_command(bench, "save-init", out, "--processes", share)
    assert process.stderr is not None
    for line in process.stderr:
        if b"waiting for" in line:
            return process
    raise AssertionError(process.communicate())


def test_others_are_not_let_in_while_processes_are_at_work(bench: KillSetup):
    first = waiting(bench, "out", "2/0")
    _, same = run(bench, "save-init", "out", "--processes", "2/0", code=1)
    assert "share 0 of 2 of out.partial is locked" in same
    _, alone = run(bench, "save-init", "out", code=1)
    assert "out.partial is locked" in alone
    assert f"process {first.pid} on " in alone
    _, other = run(bench, "save-init", "out", "--processes", "3/1", code=1)
    assert "2 processes work on it, this is one of 3" in other
    assert "join them: `--processes 2/I`" in other
    _, different = run(bench, "save-init", "out", "--processes", "2/1", "--no-scan", code=1)
    assert "belongs to another run" in different
    ended(start_command(bench, "save-init", "out", "--processes", "2/1", "--restart"), first)
    assert read_files(bench.folder / "out") == read_files(bench.expected["save-init"])
    shutil.rmtree(bench.folder / "out")


def test_one_that_fails_tells_the_others_why(bench: KillSetup):
    shutil.copytree(bench.folder / "init", bench.folder / "rotten")
    largest = max((bench.folder / "rotten/d").iterdir(), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        file.write(b"\x55" * 64)
    words = ["export", "rotten", "--out", "out", "--progress", "none"]
    each = [
        subprocess.Popen([*command_line("export", "out")[:3], *words, "--processes", share], cwd=bench.folder,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE) for share in shares(2)
    ]  # fmt: skip
    told = sorted((err for _, err in ended(*each, code=1)), key=len)
    assert "rotten is damaged" in told[0]
    assert "process 0 failed:" in told[1] or "process 1 failed:" in told[1]
    assert "rotten is damaged" in told[1]
    assert not (bench.folder / "out").exists()
    _, err = ended(subprocess.Popen([*command_line("export", "x")[:3], *words, "--restart", "--workers", "2"],
                   cwd=bench.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE), code=1)[0]  # fmt: skip
    assert err.count("rotten is damaged") == 1
    shutil.rmtree(bench.folder / "out.partial")


def test_source_that_changes_while_others_are_awaited(
    bench: KillSetup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(bench.folder / "model", bench.folder / "changing")
    monkeypatch.chdir(bench.folder)

    def together(
        task: ConversionTask,
        move: Callable[[], PipelineResult],
        finish: Callable[[PipelineResult], None],
        waiting: WaitOptions,
    ) -> PipelineResult:
        outcome = move()
        for path in Path("changing").glob("*.safetensors"):
            os.utime(path, ns=(0, 0))
        finish(outcome)
        return outcome

    monkeypatch.setattr(execute, "work_together", together)
    assert "changed while it was read" in run_failing(capsys, 1, "save-init", "./changing", "--out", "changed")
    assert not Path("changed").exists()
    shutil.rmtree("changed.partial")
    shutil.rmtree("changing")


# Workers and signals


def children(process: subprocess.Popen[bytes]) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in listed.read_text().split()]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def check_gone(workers: list[int]) -> None:
    """They end, with whom they belong to or right after: one that had just been made looks for it first."""
    deadline = time.monotonic() + 20
    while any(map(is_there, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def with_workers(bench: KillSetup, out: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A command and its two workers, stopped where they are."""
    process = start_command(bench, "save-init", out, "--workers", "3", "--memory", "300MiB")
    until(lambda: len(children(process)) == 2, process)
    found = children(process)
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    return process, found


def check_goes_on(bench: KillSetup, out: str) -> None:
    run(bench, "save-init", out, "--workers", "2", "--memory", "200MiB")
    assert read_files(bench.folder / out) == read_files(bench.expected["save-init"])
    shutil.rmtree(bench.folder / out)


def test_workers_die_with_their_parent(bench: KillSetup):
    process, workers = with_workers(bench, "orphans")
    time.sleep(0.5)
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    until(lambda: (bench.folder / "orphans.partial/.prep/lock.1").exists(), process)
    process.kill()
    process.communicate(timeout=60)
    check_gone(workers)
    check_goes_on(bench, "orphans")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signals_reach_the_workers(bench: KillSetup, number: signal.Signals, code: int):
    process, workers = with_workers(bench, "signalled")
    process.send_signal(number)
    time.sleep(0.1)
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    ((_, err),) = ended(process, code=code)
    assert f"error: {'interrupted' if code == 130 else 'stopped by SIGTERM'}" in err
    check_gone(workers)
    assert not (bench.folder / "signalled").exists()
    check_goes_on(bench, "signalled")


def test_a_worker_that_is_killed_ends_the_command(bench: KillSetup):
    process, workers = with_workers(bench, "bereft")
    os.kill(workers[0], signal.SIGKILL)
    os.kill(workers[1], signal.SIGCONT)
    ((_, err),) = ended(process, code=1)
    assert "a worker was killed by SIGKILL" in err
    check_gone(workers)
    check_goes_on(bench, "bereft")


def test_too_many_workers_for_the_memory(bench: KillSetup):
    _, err = run(bench, "save-init", "crowd", "--workers", "8", "--memory", "128MiB", code=2)
    assert "`--workers 8` with `--memory 128MiB` is too many" in err
    assert "hint: `--memory " in err
    assert not (bench.folder / "crowd.partial").exists()
