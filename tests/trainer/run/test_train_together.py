"""`prep train` in two processes: all end together, whatever happens to one of them, and a restart continues exactly."""

from __future__ import annotations

import re
import shutil
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest

from prepcli.commands.console.ui import open_ui
from prepcli.commands.operations.computing import AGAIN_HINT
from prepcli.core.errors import FAILED, INTERRUPTED, OK, STOPPED, USAGE
from prepcli.core.process_group import SingleProcess
from prepcli.formats.manifest import saved_steps
from tests.helpers.job_faults import NO_SETTINGS, Fault, Outcome, run_job, state_digest
from tests.helpers.training_folder import make_training_folder
from trainer.distributed.watchdog import JobEnd
from trainer.recipe.tables import Cluster
from trainer.run.run import _job_error, run_together

KILLED = -signal.SIGKILL
# Steps are saved in the background, so later steps may be logged before this line.
AFTER_SAVE = "saved step 10 "
AFTER_EVALUATION = "evaluated at step 30"  # the save of step 20 has waited for that of step 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jobs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        make_training_folder()
    return path


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> tuple[int, str]:
    assert run_job(folder, "undisturbed").codes == (OK, OK)
    return state_digest(folder / "undisturbed")


def run_fault(folder: Path, fault: Fault, settings: Mapping[str, str] = NO_SETTINGS) -> Outcome:
    shutil.rmtree(folder / fault.name, ignore_errors=True)
    return run_job(folder, fault.name, fault, settings=settings)


def check_restart(folder: Path, name: str, undisturbed: tuple[int, str]) -> None:
    assert run_job(folder, name).codes == (OK, OK)
    assert state_digest(folder / name) == undisturbed


def test_survivor_names_a_killed_process(folder: Path) -> None:
    outcome = run_fault(
        folder, Fault("kill-1", AFTER_SAVE, 1, signal.SIGKILL), {"train.eval_every": "0"}
    )
    assert outcome.codes == (STOPPED, KILLED)
    assert "process 1 (" in outcome.message(0)
    assert "is lost" in outcome.message(0)
    assert "Traceback" not in outcome.errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("trigger", "has_saved_step"),
    [("tokens per step", False), ("compiled", False), (AFTER_SAVE, True), (AFTER_EVALUATION, True)],
)
def test_restart_after_a_kill_is_exact(
    folder: Path, undisturbed: tuple[int, str], trigger: str, victim: int, has_saved_step: bool
) -> None:
    fault = Fault("killed", trigger, victim, signal.SIGKILL)
    outcome = run_fault(folder, fault)
    assert outcome.codes[victim] == KILLED
    assert outcome.codes[1 - victim] == (STOPPED if has_saved_step else FAILED)
    assert f"process {victim} (" in outcome.message(1 - victim)
    check_restart(folder, fault.name, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, STOPPED), (signal.SIGUSR1, STOPPED), (signal.SIGINT, INTERRUPTED)],
)
def test_signal_to_one_process_stops_all_after_one_step(
    folder: Path, undisturbed: tuple[int, str], number: signal.Signals, code: int, victim: int
) -> None:
    fault = Fault(f"stopped-{number.name}", AFTER_SAVE, victim, number)
    outcome = run_fault(folder, fault, {"log.all_workers": "true"})
    assert outcome.codes == (code, code)
    last_steps = {re.findall(r"saved step (\d+)", text)[-1] for text in outcome.errors}
    assert last_steps == {str(saved_steps(folder / fault.name)[-1])}
    check_restart(folder, fault.name, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_signal_while_loading_ends_all_processes(folder: Path, victim: int) -> None:
    outcome = run_fault(folder, Fault("stopped-early", "tokens per step", victim, signal.SIGTERM))
    assert outcome.codes == (STOPPED, STOPPED)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_suspended_process_is_lost(folder: Path, victim: int) -> None:
    outcome = run_fault(folder, Fault("suspended", AFTER_SAVE, victim, signal.SIGSTOP))
    assert outcome.codes[1 - victim] == STOPPED
    assert f"process {victim} (" in outcome.message(1 - victim)
    assert "no heartbeat for" in outcome.message(1 - victim)


@pytest.mark.slow
def test_error_of_one_process_ends_the_other(folder: Path) -> None:
    (folder / "failed").mkdir()
    (folder / "failed/recipe.toml").touch()
    (folder / "failed/metrics.1.jsonl").mkdir()  # process 1 cannot write its metrics
    outcome = run_job(folder, "failed", settings={"log.all_workers": "true"})
    assert outcome.codes == (FAILED, FAILED)
    assert "process 1 (" in outcome.message(0)
    assert "metrics.1.jsonl" in outcome.message(0)


def test_exit_code_depends_on_saved_steps_and_interrupts() -> None:
    lost = JobEnd("lost", 1, "process 1 is lost", "no heartbeat for 60 s")
    stopped = {name: JobEnd("stopped", 1, "stopped", name) for name in ("SIGTERM", "SIGINT")}
    assert _job_error(lost, lambda: True).code == STOPPED
    assert _job_error(lost, lambda: False).code == FAILED
    assert _job_error(stopped["SIGTERM"], lambda: False).code == STOPPED
    assert _job_error(stopped["SIGINT"], lambda: True).code == INTERRUPTED


@pytest.mark.parametrize("code", [FAILED, USAGE, STOPPED])
def test_all_processes_end_with_the_code_of_an_error(code: int) -> None:
    """A launcher restarts the job after 75, and takes the largest code of the processes."""
    failed = JobEnd("failed", 1, "process 1 failed", "no room", code)
    assert _job_error(JobEnd.from_json(failed.to_json()), lambda: True).code == code


@pytest.mark.parametrize("kind", ["lost", "stopped"])
def test_hint_names_no_steps_for_commands_without_a_run(kind: Literal["lost", "stopped"]) -> None:
    end = JobEnd(kind, 1, "process 1 ended", "SIGTERM")
    assert _job_error(end, lambda: False, hint=AGAIN_HINT).hint == "start all processes again"
    assert "resumes" in _job_error(end, lambda: True).hint


def test_single_process_starts_no_watchdog() -> None:
    ui = open_ui("train", as_json=False, quiet=True, verbose=0)
    threads = threading.enumerate()
    with run_together(SingleProcess(), Cluster(), ui, has_saved_step=lambda: False) as enter_phase:
        enter_phase("load")
        assert {*threading.enumerate()} <= {*threads}
