"""`prep train` and signals in its long phases: evaluations, compilations, and the first and the second Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from prepcli.core.errors import INTERRUPTED, OK, STOPPED
from prepcli.formats.manifest import saved_steps
from tests.helpers.fork_server import PREP, read_until, run_python, start_python
from tests.helpers.processes import finish, start_processes
from tests.helpers.run_cli import run_ok
from tests.helpers.train_runs import read_step_files, set_keys
from tests.helpers.waiting import MAX_S, wait_until
from trainer.training.metrics import METRICS_FILE, read_metrics

pytestmark = pytest.mark.waits

TRAIN = ("train", "recipe.toml", "--out", "run", "--set", "train.eval_every=5")
MEASURED = ("seconds", "tokens_per_s")
# The process sends the signal to itself before batch 1 of the evaluation after the step in `argv`.
SIGNAL_IN_EVALUATION = f"""
import os, signal, sys
from trainer.training.loop import Loop

step = int(sys.argv.pop(1))
process = sys.argv.pop(1)
report = Loop._report_progress

def report_and_signal(self, done, total):
    if (self.step, done) == (step, 1) and os.environ.get("JAX_PROCESS_ID", "0") == process:
        os.kill(os.getpid(), signal.SIGTERM)
    report(self, done, total)

Loop._report_progress = report_and_signal
{PREP}
"""
# A phase of the run touches a file, and does not end.
ENDLESS_PHASE = f"""
import sys, threading
from pathlib import Path
from trainer.training.loop import Loop

def wait(*arguments):
    Path("waiting").touch()
    threading.Event().wait()

setattr(Loop, sys.argv.pop(1), wait)
{PREP}
"""


def log_lines(run: str) -> list[dict[str, Any]]:
    """Return the metrics of a run without the values that are measured."""
    lines = read_metrics(Path(run, METRICS_FILE))
    return [{key: line[key] for key in line if key not in MEASURED} for line in lines]


@pytest.mark.parametrize("step", [10, 12])
def test_stop_in_an_evaluation_loses_no_step(work_dir: Path, step: int):
    """The same command evaluates the step again, and ends with the bits of a run without a stop."""
    run_ok(*TRAIN[:3], "whole", *TRAIN[4:])
    stopped = run_python(SIGNAL_IN_EVALUATION, str(step), "0", *TRAIN, "--json", has_jax=True)
    assert stopped.returncode == STOPPED, stopped.stderr
    assert json.loads(stopped.stdout)["error"]["why"] == f"step {step} is saved"
    assert saved_steps(Path("run"))[-1] == step
    assert [line["step"] for line in log_lines("run") if "eval_loss" in line][-1] < step
    assert run_python(PREP, *TRAIN, has_jax=True).returncode == OK
    assert log_lines("run") == log_lines("whole")
    assert read_step_files("run") == read_step_files("whole")
    # A finished run takes no further turn.
    run_ok(*TRAIN)
    assert log_lines("run") == log_lines("whole")


def test_events_of_a_step_without_its_log_are_not_repeated(work_dir: Path):
    """A run that was moved without its log, and a last step that cannot be trained from, stay as they are."""
    run_ok(*TRAIN)
    metrics = Path("run", METRICS_FILE)
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if '"step": 12' in line]
    metrics.unlink()
    run_ok(*TRAIN)
    assert not metrics.exists()
    metrics.write_text(lines[0])
    run_ok(*TRAIN)
    assert metrics.read_text() == "".join(lines)
    parameters = ("--set", "checkpoint.optimizer_state=false")
    run_ok(*TRAIN, *parameters, "--restart")
    metrics.write_text(lines[0])
    run_ok(*TRAIN, *parameters)
    assert metrics.read_text() == lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("process", ["0", "1"])
def test_stop_in_an_evaluation_of_two_processes(work_dir: Path, process: str):
    """All processes stop between the same batches, whichever of them has the signal."""
    Path("signalling_prep.py").write_text(SIGNAL_IN_EVALUATION)
    words = (*TRAIN, "--json", "--set", "mesh=2,4,1")
    started = start_processes("5", process, *words, count=2, devices=4, module="signalling_prep")
    (code, out, err), (other_code, _, _) = finish(started)
    assert (code, other_code) == (STOPPED, STOPPED), err
    assert json.loads(out)["error"]["what"] == "stopped by SIGTERM"
    assert saved_steps(Path("run"))[-1] == 5
    assert [code for code, *_ in finish(start_processes(*words, count=2, devices=4))] == [OK, OK]
    evaluated = [line["step"] for line in log_lines("run") if "eval_loss" in line]
    assert evaluated == [0, 5, 10, 12]


def test_ctrl_c_ends_a_compilation(work_dir: Path):
    process = start_python(ENDLESS_PHASE, "_compile_step", *TRAIN, has_jax=True)
    wait_until(Path("waiting").exists, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=MAX_S)
    assert process.returncode == INTERRUPTED
    assert "error: interrupted\n" in err.decode()
    assert "to resume: `prep train recipe.toml" in err.decode()
    assert "Traceback" not in err.decode()


def test_first_ctrl_c_is_answered_and_the_second_one_quits(work_dir: Path):
    """The answer does not wait for the main thread. The saved steps are kept."""
    run_python(PREP, *TRAIN, "--stop-after", "3", has_jax=True)
    process = start_python(ENDLESS_PHASE, "_run_due_events", *TRAIN, has_jax=True)
    wait_until(Path("waiting").exists, process)
    process.send_signal(signal.SIGINT)
    read_until(process, "stopping after this step; again to quit\n")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=MAX_S)
    assert process.returncode == INTERRUPTED
    assert "error: interrupted\n  why: kept in run: step 3" in err.decode()
    assert saved_steps(Path("run")) == [3]


def test_repeated_sigterm_does_not_end_the_save(work_dir: Path):
    """Job managers repeat SIGTERM. Only Ctrl-C ends a run that is saving."""
    script = SIGNAL_IN_EVALUATION.replace(
        "os.kill(os.getpid(), signal.SIGTERM)",
        "[os.kill(os.getpid(), signal.SIGTERM) for _ in 'ab']",
    )
    assert run_python(script, "5", "0", *TRAIN, has_jax=True).returncode == STOPPED
    assert saved_steps(Path("run"))[-1] == 5


# An evaluation of 60 batches, which takes a minute
SLOW_EVALUATION = f"""
import time
from trainer.training import loop

evaluate = loop.evaluate

def evaluate_slowly(*arguments, eval_step, **options):
    def slow_step(*batch):
        time.sleep(1)
        return eval_step(*batch)
    return evaluate(*arguments, eval_step=slow_step, **options)

loop.evaluate = evaluate_slowly
{PREP}
"""
NUM_MOMENTS = 20
GRACE_S = 30
# From the end of the compilation: evaluations, the steps between them, and saves
MAX_MOMENT_S = 80


@pytest.mark.slow
def test_stops_at_random_moments_lose_no_step(work_dir: Path):
    """A run whose evaluation takes a minute gets SIGTERM, and SIGKILL 30 seconds later, at 20 random moments."""
    random = Random(39)
    command = [sys.executable, "-c", SLOW_EVALUATION, *TRAIN]
    settings = (
        "mesh=1,1,1",
        "train.steps=400",
        "batch.size=2",
        "data.holdout=0.7",
        "eval.limit=120",
    )
    command += set_keys(*settings)
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    for number in range(NUM_MOMENTS):
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
        read_until(process, "compiled in")
        moment_s = random.uniform(0, MAX_MOMENT_S)
        time.sleep(moment_s)
        process.send_signal(signal.SIGTERM)
        sent_s = time.monotonic()
        try:
            _, err = process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            _, err = process.communicate()
        took_s = time.monotonic() - sent_s
        steps = [line["step"] for line in log_lines("run") if "loss" in line]
        saved = saved_steps(Path("run")) if Path("run").exists() else []
        last = err.decode().strip().splitlines()[-3:]
        print(number, f"{moment_s:.1f} s", process.returncode, f"{took_s:.1f} s", saved, last)
        assert process.returncode == STOPPED
        # No logged step is lost: the log is written after each step.
        assert max(steps, default=0) == max(saved, default=0)
