"""SIGKILL at random moments of every converting command: the next run ends as if nothing had happened."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.helpers.killing import (
    COMMANDS,
    ONE_PROCESS,
    SEVERAL_PROCESSES,
    KillSetup,
    act_when_durable,
    check_killed,
    command_line,
    make_setup,
    read_files,
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> KillSetup:
    return make_setup(tmp_path_factory.mktemp("kill"))


@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_random_moments(bench: KillSetup, name: str):
    check_killed(bench, name, kills=4, seed=1, launches=ONE_PROCESS)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [ONE_PROCESS, SEVERAL_PROCESSES], ids=["alone", "together"])
@pytest.mark.parametrize("seed", range(34))
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_many_random_moments(bench: KillSetup, name: str, seed: int, ways: Sequence[Sequence[Sequence[str]]]):
    check_killed(bench, name, kills=3, seed=100 + seed, launches=ways)


def test_what_was_durable_is_not_written_again(bench: KillSetup):
    process = act_when_durable(bench, "save-init", "again", lambda p: p.kill())
    process.wait(timeout=60)
    if process.returncode != -signal.SIGKILL:
        pytest.fail("the run ended before its journal was seen: make the model larger")
    done = subprocess.run(
        command_line("save-init", "again", "--json"), cwd=bench.folder, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "resuming again.partial" in done.stderr
    said = json.loads(done.stdout)["bytes"]
    assert said["resumed"] > 0
    tensors = sum(p.stat().st_size for p in (bench.folder / "model").glob("*.safetensors"))
    assert 0 < said["written"] < tensors - said["resumed"] + (32 << 20)  # at most one tensor is done over
    assert read_files(bench.folder / "again") == read_files(bench.expected["save-init"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signals_end_with_their_code_and_the_way_to_go_on(bench: KillSetup, number: signal.Signals, code: int):
    out = f"stopped-{code}"
    process = act_when_durable(bench, "export", out, lambda p: p.send_signal(number))
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert b"to resume: `prep export init" in err
    assert not (bench.folder / out).exists()
    subprocess.run(command_line("export", out), cwd=bench.folder, check=True, capture_output=True)
    assert read_files(bench.folder / out) == read_files(bench.expected["export"])


def test_a_second_process_on_one_output_is_told_so(bench: KillSetup):
    second: list[subprocess.CompletedProcess[str]] = []

    def start(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGSTOP)
        second.append(
            subprocess.run(command_line("save-init", "two"), cwd=bench.folder, capture_output=True, text=True)
        )
        process.send_signal(signal.SIGCONT)

    process = act_when_durable(bench, "save-init", "two", start)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert second[0].returncode == 1
    assert "two.partial is locked" in second[0].stderr
    assert read_files(bench.folder / "two") == read_files(bench.expected["save-init"])


def test_a_source_that_changed_between_two_runs_is_noticed(bench: KillSetup):
    shutil.copytree(bench.folder / "init", bench.folder / "changing")
    export = [sys.executable, "-m", "prepcli", "export", "changing", "--out", "changed", "--memory", "32MiB"]
    process = subprocess.Popen(export, cwd=bench.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.poll() is None and not (bench.folder / "changed.partial/.prep/run.json").exists():
        time.sleep(0.001)
    process.kill()
    process.wait(timeout=60)
    largest = max((bench.folder / "changing/d").iterdir(), key=lambda p: p.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(5000)
        file.write(b"x")
    again = subprocess.run(export, cwd=bench.folder, capture_output=True, text=True)
    assert again.returncode == 1
    assert "changed.partial belongs to another run" in again.stderr
    assert "the source has changed since" in again.stderr


def killed_when_durable(bench: KillSetup, out: str) -> Path:
    """The staging folder of a save-init that was killed with something durable in it."""
    process = act_when_durable(bench, "save-init", out, lambda p: p.kill())
    process.wait(timeout=60)
    assert process.returncode == -signal.SIGKILL
    return bench.folder / f"{out}.partial"


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(b"short")])
def test_resume_writes_a_spoiled_data_file_anew(bench: KillSetup, spoil: Callable[[Path], object]):
    partial = killed_when_durable(bench, "spoiled")
    spoil(next((partial / "d").iterdir()))
    again = subprocess.run(command_line("save-init", "spoiled"), cwd=bench.folder, capture_output=True, text=True)
    assert again.returncode == 0
    assert "spoiled.partial are damaged: written anew" in again.stderr
    assert read_files(bench.folder / "spoiled") == read_files(bench.expected["save-init"])
    shutil.rmtree(bench.folder / "spoiled")


def test_a_restart_that_is_killed_while_it_clears_leaves_no_false_promise(bench: KillSetup):
    partial = killed_when_durable(bench, "cleared")
    (partial / ".prep/journal.0").unlink()  # the first thing that clearing does
    next((partial / "d").iterdir()).unlink()
    subprocess.run(command_line("save-init", "cleared"), cwd=bench.folder, check=True, capture_output=True)
    assert read_files(bench.folder / "cleared") == read_files(bench.expected["save-init"])


def test_what_took_the_name_meanwhile_is_kept(bench: KillSetup):
    def take(_: subprocess.Popen[bytes]) -> None:
        (bench.folder / "taken").mkdir()
        (bench.folder / "taken/thesis.txt").write_text("years of work")

    process = act_when_durable(bench, "save-init", "taken", take)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"taken exists" in err
    assert (bench.folder / "taken/thesis.txt").read_text() == "years of work"
    shutil.rmtree(bench.folder / "taken")
    subprocess.run(command_line("save-init", "taken"), cwd=bench.folder, check=True, capture_output=True)
    assert read_files(bench.folder / "taken") == read_files(bench.expected["save-init"])
