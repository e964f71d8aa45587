"""`prep train` after its last step: a signal while it waits for exports or for the push to the hub."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import INTERRUPTED, OK, STOPPED
from prepcli.formats.manifest import saved_steps
from tests.helpers.fork_server import PREP, ForkedProcess, run_python, start_python
from tests.helpers.hub_server import hub_environment
from tests.helpers.processes import finish, start_processes
from tests.helpers.push_server import TOKEN, serve_push_hub
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.train_runs import set_keys
from tests.helpers.waiting import MAX_S, wait_until

pytestmark = pytest.mark.waits

TERMINATED, INTERRUPT = (signal.SIGTERM, STOPPED), (signal.SIGINT, INTERRUPTED)
WORDS = ("train", "recipe.toml", "--out", "run", "--json", "--set", "train.steps=3")
# The first file of an export never reaches the disk, so that a signal arrives before the export is complete. The file
# `waits` tells that the steps of the run have ended.
PREP_ON_HANGING_DISK = f"""
import os, signal, threading
fsync = os.fsync

def hanging_fsync(fd):
    if threading.current_thread().name == "prep-export":
        threading.Event().wait()
    fsync(fd)

os.fsync = hanging_fsync

from prepcli.execution.checkpoint_manager import StepExports
wait = StepExports.wait

def wait_with_sign(self):
    open("waits", "w").close()
    wait(self)

StepExports.wait = wait_with_sign
{PREP}
"""


def is_export_awaited() -> bool:
    return Path("waits").exists() and Path("run/exports/3.partial").is_dir()


def stop(process: ForkedProcess, number: signal.Signals) -> dict[str, Any]:
    """Send a signal, and return what the command prints."""
    process.send_signal(number)
    out, err = process.communicate(timeout=MAX_S)
    assert not err or b"Traceback" not in err, err
    return json.loads(out)


def check_message(report: dict[str, Any], number: signal.Signals, missing: str) -> None:
    error = report["error"]
    assert error["what"] == (
        "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    )
    assert "kept in run: step 3" in error["why"]
    assert missing in error["why"]
    assert error["hint"].startswith("to resume: `prep train recipe.toml --out run")


@pytest.mark.parametrize(("number", "code"), slow_except([TERMINATED, INTERRUPT], [TERMINATED]))
def test_signal_while_exports_are_awaited_is_reported(
    work_dir: Path, number: signal.Signals, code: int
):
    words = (*WORDS, "--set", "checkpoint.export_every=3")
    process = start_python(PREP_ON_HANGING_DISK, *words, has_jax=True)
    wait_until(is_export_awaited, process)
    report = stop(process, number)
    assert process.returncode == code
    check_message(report, number, "not exported: step 3")
    assert not Path("run/exports/3").exists()
    run_ok(*words)
    run_ok("verify", "run/exports/3")
    assert [path.name for path in Path("run/exports").iterdir()] == ["3"]


# The loss is that of the start after each step, so that the run ends early with step 3.
ENDS_EARLY = ("optimizer.lr=1e-30", "train.eval_every=1", "eval.patience=3")
EARLY_WORDS = (
    *(*WORDS[:-1], "train.steps=9", "--set", "checkpoint.export_every=3"),
    *set_keys(*ENDS_EARLY),
)


def test_signal_after_an_early_end_names_the_missing_exports(work_dir: Path):
    process = start_python(PREP_ON_HANGING_DISK, *EARLY_WORDS, has_jax=True)
    wait_until(is_export_awaited, process)
    check_message(stop(process, signal.SIGTERM), signal.SIGTERM, "not exported: step 3")
    assert process.returncode == STOPPED
    run_ok(*EARLY_WORDS)
    assert Path("run/exports/3").is_dir()
    assert saved_steps(Path("run")) == [3]


def test_signal_in_the_last_events_names_the_missing_exports(work_dir: Path):
    """A signal before the samples of the step with which a run ends early."""
    script = PREP_ON_HANGING_DISK.replace(
        PREP,
        "from trainer.training.loop import Loop\n"
        "log_samples = Loop._log_samples\n"
        "def log_samples_with_signal(self, num_samples):\n"
        "    if self.step == 3:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    log_samples(self, num_samples)\n"
        "Loop._log_samples = log_samples_with_signal\n" + PREP,
    )
    samples = set_keys("log.samples=['w1 w2']", "log.sample_tokens=2")
    process = start_python(script, *EARLY_WORDS, *samples, has_jax=True)
    out, _ = process.communicate(timeout=MAX_S)
    assert process.returncode == STOPPED
    error = json.loads(out)["error"]
    assert (error["what"], error["why"]) == (
        "stopped by SIGTERM",
        "step 3 is saved; not exported: step 3",
    )


@pytest.mark.parametrize(("number", "code"), slow_except([TERMINATED, INTERRUPT], [INTERRUPT]))
def test_signal_during_the_push_is_reported(work_dir: Path, number: signal.Signals, code: int):
    words = (*WORDS, "--set", "checkpoint.push=o/m")
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PREP_"))
    }
    with serve_push_hub() as hub:
        environment = inherited | hub_environment(hub.url, work_dir / "home") | {"HF_TOKEN": TOKEN}
        hub.failing_requests, hub.stall = "PUT /lfs/", "silent"
        process = start_python(PREP, *words, env=environment, has_jax=True)
        wait_until(lambda: any(line.startswith("PUT /lfs/") for line in hub.requests), process)
        report = stop(process, number)
        assert process.returncode == code
        check_message(report, number, "not pushed to o/m")
        assert not hub.repos["o/m"].branches["main"]
        hub.failing_requests = "\0"
        assert run_python(PREP, *words, env=environment, has_jax=True).returncode == OK
        assert hub.repos["o/m"].branches["main"]


@pytest.mark.slow
def test_signal_to_all_processes_during_the_wait_is_reported(work_dir: Path):
    """Process 0 waits for the exports, and the other one for process 0."""
    Path("hanging_prep.py").write_text(PREP_ON_HANGING_DISK)
    settings = set_keys("mesh=2,4,1", "checkpoint.export_every=3")
    processes = start_processes(*WORDS, *settings, count=2, devices=4, module="hanging_prep")
    wait_until(is_export_awaited, *processes)
    for process in processes[::-1]:
        process.send_signal(signal.SIGTERM)
    (code, out, _), (other_code, _, _) = finish(processes)
    assert (code, other_code) == (STOPPED, STOPPED)
    # The process reports its own signal, or the signal of the other process.
    assert json.loads(out)["error"]["what"].startswith("stopped by SIGTERM")


def test_signal_during_the_last_save_stops_the_wait(work_dir: Path):
    """A signal that comes too late to stop the steps of a run stops the wait for its exports."""
    script = PREP_ON_HANGING_DISK.replace(
        PREP,
        "from trainer.training.loop import Loop\n"
        "wait = Loop._wait_for_save\n"
        "def wait_with_signal(self):\n"
        "    if self.step == 3 and self.pending_save:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    wait(self)\n"
        "Loop._wait_for_save = wait_with_signal\n" + PREP,
    )
    process = start_python(script, *WORDS, "--set", "checkpoint.export_every=3", has_jax=True)
    out, _ = process.communicate(timeout=MAX_S)
    assert process.returncode == STOPPED
    check_message(json.loads(out), signal.SIGTERM, "not exported: step 3")
    assert saved_steps(Path("run")) == [3]


# By default test_signal_during_the_push_is_reported stops the wait of one process, and test_watchdog
# ends all processes of a job together.
@pytest.mark.slow
def test_signal_while_process_0_pushes_stops_the_wait(work_dir: Path):
    """After the last step the other processes of a job wait for process 0."""
    with serve_push_hub() as hub:
        hub.failing_requests, hub.stall = "PUT /lfs/", "silent"
        environment = hub_environment(hub.url, work_dir / "home") | {
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
        }
        words = (*WORDS, *set_keys("checkpoint.push=o/m", "mesh=1,2,1"))
        processes = start_processes(*words, count=2, devices=1, env=environment)
        wait_until(lambda: any(line.startswith("PUT /lfs/") for line in hub.requests), processes[0])
        processes[1].send_signal(signal.SIGTERM)
        (code_0, out_0, err_0), (code_1, _, err_1) = finish(processes)
    assert (code_0, code_1) == (STOPPED, STOPPED), err_1
    assert "error: stopped by SIGTERM of process 1\n hint: start all processes again" in err_0
    assert json.loads(out_0)["error"]["what"] == "stopped by SIGTERM of process 1"
    assert saved_steps(Path("run")) == [3]
