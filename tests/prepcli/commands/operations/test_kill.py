"""SIGKILL at random moments of every converting command: the next run completes the same output."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.fork_server import ForkedProcess, run_prep, start_prep
from tests.helpers.killing import (
    COMMANDS,
    ONE_PROCESS,
    SEVERAL_PROCESSES,
    KillSetup,
    act_when_durable,
    check_killed,
    num_durable,
    read_files,
    run_command,
)
from tests.helpers.slow_cases import slow_except
from tests.helpers.waiting import MAX_S

pytestmark = pytest.mark.waits


@pytest.mark.parametrize(
    "name",
    slow_except(
        ["pad-vocab", "add-tokens", "remove-tokens", "save-init", "verbatim"],
        ["add-tokens", "save-init", "verbatim"],
    ),
)
def test_commands_survive_kills_at_random_moments(setup: KillSetup, name: str):
    check_killed(setup, name, kills=2, seed=1, launches=ONE_PROCESS)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [ONE_PROCESS, SEVERAL_PROCESSES], ids=["alone", "together"])
@pytest.mark.parametrize("seed", range(34))
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_survive_many_kills(
    setup: KillSetup, name: str, seed: int, ways: Sequence[Sequence[Sequence[str]]]
):
    check_killed(setup, name, kills=3, seed=100 + seed, launches=ways)


def test_resume_does_not_write_durable_bytes_again(setup: KillSetup):
    process = act_when_durable(setup, "save-init", "again", lambda p: p.kill())
    process.wait(timeout=MAX_S)
    if process.returncode != -signal.SIGKILL:
        pytest.fail("the run ended before its notes were seen: make the model larger")
    rerun = run_command(setup, "save-init", "again", "--json")
    assert rerun.returncode == 0
    assert "resuming again.partial" in rerun.stderr
    nbytes = json.loads(rerun.stdout)["bytes"]
    assert nbytes["resumed"] > 0
    tensors = sum(p.stat().st_size for p in (setup.folder / "model").glob("*.safetensors"))
    # At most one tensor is written again.
    assert 0 < nbytes["written"] < tensors - nbytes["resumed"] + (32 << 20)
    assert read_files(setup.folder / "again") == setup.expected_files("save-init")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signal_exits_with_its_code_and_a_hint_to_resume(
    setup: KillSetup, number: signal.Signals, code: int
):
    out = f"stopped-{code}"
    process = act_when_durable(setup, "export", out, lambda p: p.send_signal(number))
    _, err = process.communicate(timeout=MAX_S)
    assert process.returncode == code
    assert b"to resume: `prep export init" in err
    assert not (setup.folder / out).exists()
    assert run_command(setup, "export", out).returncode == 0
    assert read_files(setup.folder / out) == setup.expected_files("export")


def test_source_change_between_runs_is_an_error(setup: KillSetup):
    shutil.copytree(setup.folder / "init", setup.folder / "edited")
    export = ["export", "edited", "--out", "edited-hf", "--memory", "32MiB"]
    process = start_prep(*export, cwd=setup.folder)
    while process.poll() is None and not num_durable(setup.folder / "edited-hf.partial"):
        time.sleep(0.001)
    process.kill()
    process.wait(timeout=MAX_S)
    largest = max((setup.folder / "edited/d").iterdir(), key=lambda p: p.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(5000)
        file.write(b"x")
    again = run_prep(*export, cwd=setup.folder)
    assert again.returncode == 1
    assert "edited-hf.partial belongs to another run" in again.stderr
    assert "the source has changed since" in again.stderr


def kill_when_durable(setup: KillSetup, out: str) -> Path:
    """Kill a save-init once it has durable bytes, and return its staging folder."""
    process = act_when_durable(setup, "save-init", out, lambda p: p.kill())
    process.wait(timeout=MAX_S)
    assert process.returncode == -signal.SIGKILL
    return setup.folder / f"{out}.partial"


DAMAGES = {"removed": Path.unlink, "cut": lambda path: path.write_bytes(b"short")}


@pytest.mark.parametrize("damage", slow_except(DAMAGES, ["cut"]))
def test_resume_rewrites_a_damaged_data_file(setup: KillSetup, damage: str):
    partial = kill_when_durable(setup, "spoiled")
    DAMAGES[damage](next((partial / "d").iterdir()))
    again = run_command(setup, "save-init", "spoiled")
    assert again.returncode == 0
    assert "spoiled.partial are damaged: writing them again" in again.stderr
    assert read_files(setup.folder / "spoiled") == setup.expected_files("save-init")
    shutil.rmtree(setup.folder / "spoiled")


def test_killed_restart_leaves_no_false_notes(setup: KillSetup):
    partial = kill_when_durable(setup, "cleared")
    shutil.rmtree(partial / ".prep/done")  # the first step of a restart
    next((partial / "d").iterdir()).unlink()
    assert run_command(setup, "save-init", "cleared").returncode == 0
    assert read_files(setup.folder / "cleared") == setup.expected_files("save-init")


def test_output_name_taken_meanwhile_is_kept(setup: KillSetup):
    def take(_: ForkedProcess) -> None:
        (setup.folder / "taken").mkdir()
        (setup.folder / "taken/thesis.txt").write_text("years of work")

    process = act_when_durable(setup, "save-init", "taken", take)
    _, err = process.communicate(timeout=MAX_S)
    assert process.returncode == 1
    assert b"taken exists" in err
    assert (setup.folder / "taken/thesis.txt").read_text() == "years of work"
    shutil.rmtree(setup.folder / "taken")
    assert run_command(setup, "save-init", "taken").returncode == 0
    assert read_files(setup.folder / "taken") == setup.expected_files("save-init")
