"""Signals, and several starts of one run: in evaluations, compilations, exports and pushes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from prepcli.core.errors import FAILED, INTERRUPTED, OK, STOPPED
from prepcli.formats.manifest import read_manifest, saved_steps
from prepcli.formats.step_scores import best_step
from tests.helpers.fork_server import (
    PREP,
    ForkedProcess,
    read_until,
    run_prep,
    run_python,
    start_python,
)
from tests.helpers.hub_server import hub_environment
from tests.helpers.processes import finish, start_processes
from tests.helpers.push_server import TOKEN, serve_push_hub
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.train_runs import set_keys
from tests.helpers.waiting import MAX_S, wait_until
from trainer.run.run_record import SAMPLES_FILE
from trainer.training.metrics import METRICS_FILE, read_metrics

# `prep train` and signals in its long phases: evaluations, compilations, and the first and the second Ctrl-C.

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


@pytest.mark.slow
def test_stop_in_the_evaluation_of_the_best_step_keeps_it(work_dir: Path):
    """The step is saved without its loss, and later ones are worse."""
    keys = ("checkpoint.best=eval_loss", "checkpoint.keep=1", "checkpoint.every=3")
    diverging = ("train.eval_every=2", "optimizer.lr=1", "optimizer.clip_norm=0")
    words = ("train", "recipe.toml", *set_keys(*keys, *diverging))
    run_ok(*words, "--out", "whole")
    best = 2
    assert best_step(Path("whole")) == best
    words = (*words, "--out", "run")
    stopped = run_python(SIGNAL_IN_EVALUATION, str(best), "0", *words, has_jax=True)
    assert stopped.returncode == STOPPED, stopped.stderr
    manifest = read_manifest(Path("run", str(best)))
    assert manifest is not None
    assert manifest.eval_loss is None
    # The first start evaluates the step, and the second one reads the loss in the log.
    for options, code in ((("--stop-after", "2"), STOPPED), ((), OK)):
        process = run_prep(*words, *options, cwd=work_dir, has_jax=True)
        assert process.returncode == code, process.stderr
    assert saved_steps(Path("run")) == saved_steps(Path("whole"))
    assert best_step(Path("run")) == best


@pytest.mark.slow
def test_samples_follow_a_repeated_evaluation_that_ends_a_run(work_dir: Path):
    keys = ("train.eval_every=2", "optimizer.lr=0.3", "optimizer.clip_norm=0", "eval.patience=2")
    keys = (*keys, 'log.samples="w1 w2"', "log.sample_tokens=2")
    words = ("train", "recipe.toml", *set_keys(*keys))
    run_ok(*words, "--out", "whole")
    end = saved_steps(Path("whole"))[-1]
    words = (*words, "--out", "run")
    stopped = run_python(SIGNAL_IN_EVALUATION, str(end), "0", *words, has_jax=True)
    assert stopped.returncode == STOPPED, stopped.stderr
    assert run_prep(*words, cwd=work_dir, has_jax=True).returncode == OK
    (sample,) = Path("run", SAMPLES_FILE).read_text().splitlines()
    assert json.loads(sample)["step"] == end


@pytest.mark.slow
def test_repeated_sigterm_does_not_end_the_save(work_dir: Path):
    """Job managers repeat SIGTERM. Only Ctrl-C ends a run that is saving."""
    script = SIGNAL_IN_EVALUATION.replace(
        "os.kill(os.getpid(), signal.SIGTERM)",
        "[os.kill(os.getpid(), signal.SIGTERM) for _ in 'ab']",
    )
    assert script != SIGNAL_IN_EVALUATION
    assert run_python(script, "5", "0", *TRAIN, has_jax=True).returncode == STOPPED
    assert saved_steps(Path("run"))[-1] == 5


def test_step_without_optimizer_state_is_evaluated_again(work_dir: Path):
    """Gradient descent without momentum keeps no state, so that the run can be trained from its last step."""
    parameters = ("checkpoint.optimizer_state=false", "train.steps=2")
    words = (*TRAIN, *set_keys("optimizer.type=sgd", "optimizer.momentum=0", *parameters))
    run_ok(*words)
    metrics = Path("run", METRICS_FILE)
    whole = metrics.read_text()
    *lines, evaluation = whole.splitlines(keepends=True)
    assert "eval_loss" in evaluation
    metrics.write_text("".join(lines))
    run_ok(*words)
    assert metrics.read_text() == whole


# Prints the programs that XLA compiles after `Loop.compile`.
LATE_COMPILATIONS = f"""
import jax, sys
from trainer.training.loop import Loop

run = Loop.run

def run_and_listen(self, *arguments):
    def listen(event, seconds, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            print("late:", details.get("fun_name"), file=sys.stderr)
    jax.monitoring.register_event_duration_secs_listener(listen)
    run(self, *arguments)

Loop.run = run_and_listen
{PREP}
"""
SAMPLES = ('log.samples="w1 w2"', "log.sample_tokens=4")

AT_THE_END = (*SAMPLES, "checkpoint.dtype=bfloat16", "checkpoint.optimizer_state=false")
AT_THE_START = (*SAMPLES, "eval.at_start=true")
AT_AN_EARLY_END = (*SAMPLES, "train.eval_every=1", "eval.patience=1", "optimizer.lr=1e-30")


@pytest.mark.parametrize(
    "settings", slow_except([(AT_THE_END,), (AT_THE_START,), (AT_AN_EARLY_END,)], [(AT_THE_END,)])
)
def test_all_programs_are_compiled_before_the_first_step(work_dir: Path, settings: tuple[str, ...]):
    """A compilation could outlast the time between a stop signal and a kill."""
    words = ("train", "recipe.toml", *set_keys("train.steps=3", *settings))
    process = run_python(LATE_COMPILATIONS, *words, has_jax=True)
    assert process.returncode == OK, process.stderr
    assert "evaluated at step" in process.stderr
    assert [line for line in process.stderr.splitlines() if line.startswith("late:")] == []


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


# `prep train` after its last step: a signal while it waits for exports or for the push to the hub.

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


# The loss is that of the start after each step, so that the run ends early with step 3.
ENDS_EARLY = ("optimizer.lr=1e-30", "train.eval_every=1", "eval.patience=3")

EARLY_WORDS = (
    *(*WORDS[:-1], "train.steps=9", "--set", "checkpoint.export_every=3"),
    *set_keys(*ENDS_EARLY),
)


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


def push_environment(url: str, home: Path) -> dict[str, str]:
    """Return the variables of a process that may push to the hub at a URL."""
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PREP_"))
    }
    return inherited | hub_environment(url, home) | {"HF_TOKEN": TOKEN}


@pytest.mark.parametrize(("number", "code"), slow_except([TERMINATED, INTERRUPT], [INTERRUPT]))
def test_signal_during_the_push_is_reported(work_dir: Path, number: signal.Signals, code: int):
    words = (*WORDS, "--set", "checkpoint.push=o/m")
    with serve_push_hub() as hub:
        environment = push_environment(hub.url, work_dir / "home")
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
def test_restart_during_the_push_is_refused(work_dir: Path):
    """The run is locked until its last step, which a restart would delete, is uploaded."""
    with serve_push_hub() as hub:
        hub.failing_requests, hub.stall = "PUT /lfs/", "silent"
        words = (*WORDS, "--set", "checkpoint.push=o/m")
        environment = push_environment(hub.url, work_dir / "home")
        process = start_python(PREP, *words, env=environment, has_jax=True)
        wait_until(lambda: any(line.startswith("PUT /lfs/") for line in hub.requests), process)
        second = run_prep(*WORDS, "--restart", cwd=work_dir, has_jax=True)
        assert second.returncode == FAILED, second.stderr
        assert json.loads(second.stdout)["error"]["what"] == "run is locked"
        stop(process, signal.SIGTERM)
    assert saved_steps(Path("run")) == [3]


# Several starts of `prep train` for one run: the lock is taken before the saved steps are listed.

WAIT_S = 240.0

RUN = Path("runs/recipe")

SIX_STEPS = ("train", "recipe.toml", *set_keys("train.steps=6", "data.holdout=0"))

# The start has read the saved steps. It goes on once the file `continue` exists.
WAITING_PREP = f"""
import time
from pathlib import Path

from trainer.run import train

check_start = train.check_start

def check_start_later(*arguments, **options):
    Path("waiting").touch()
    while not Path("continue").exists():
        time.sleep(0.01)
    return check_start(*arguments, **options)

train.check_start = check_start_later
{PREP}
"""


@contextmanager
def waiting_start(*words: str) -> Iterator[ForkedProcess]:
    """Start `prep train`, and let it wait after it has read the steps of the run."""
    process = start_python(WAITING_PREP, *SIX_STEPS, *words, cwd=".", has_jax=True)
    deadline_s = time.monotonic() + WAIT_S
    try:
        while not Path("waiting").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        yield process
    finally:
        process.kill()


def continue_start(process: ForkedProcess) -> str:
    """Let a start continue, and return its output."""
    Path("continue").touch()
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == OK, err
    return err.decode()


def logged_steps() -> list[int]:
    return [line["step"] for line in read_metrics(RUN / METRICS_FILE)]


@pytest.mark.parametrize("stop_after", slow_except([0, 2], [2]), ids=["new", "resumed"])
def test_second_start_of_a_run_is_refused_until_the_first_ends(work_dir: Path, stop_after: int):
    if stop_after:
        stopped = run_prep(*SIX_STEPS, "--stop-after", str(stop_after), cwd=work_dir, has_jax=True)
        assert stopped.returncode == STOPPED, stopped.stderr
    with waiting_start() as first:
        second = run_prep(*SIX_STEPS, cwd=work_dir, has_jax=True)
        assert second.returncode == FAILED
        assert "runs/recipe is locked" in second.stderr
        continue_start(first)
    assert saved_steps(RUN)[-1] == 6
    assert logged_steps() == [1, 2, 3, 4, 5, 6]


def is_export_awaited() -> bool:
    return Path("waits").exists() and Path("run/exports/3.partial").is_dir()


@pytest.mark.slow
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


@pytest.mark.slow
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


# By default test_signal_during_the_push_is_reported stops the wait of one process, and test_processes
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
