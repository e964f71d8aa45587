"""Processes of one `prep train`: their start, the facts that they compare, their folder, and their end."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jax
import pytest

from prepcli.commands.console.ui import open_ui
from prepcli.commands.operations.computing import AGAIN_HINT
from prepcli.commands.operations.recipes import recipes_folder, shipped_recipe
from prepcli.core.errors import FAILED, INTERRUPTED, OK, STOPPED, USAGE, PrepError
from prepcli.core.process_group import ProcessGroup, SingleProcess
from prepcli.execution import training_folder
from prepcli.execution.training_folder import FolderStorage
from prepcli.formats.manifest import saved_steps
from prepcli.launch.local import free_port
from tests.helpers.fork_server import ForkedProcess, run_prep
from tests.helpers.job_faults import NO_SETTINGS, Fault, Outcome, run_job, state_digest
from tests.helpers.processes import finish, start_processes
from tests.helpers.run_cli import run_failing
from tests.helpers.thread_groups import run_together as run_threads
from tests.helpers.train_runs import set_keys
from tests.helpers.training_folder import make_training_folder
from trainer.distributed import agreement
from trainer.distributed.agreement import PROBE_PREFIX
from trainer.distributed.watchdog import JobEnd
from trainer.recipe import load_recipe
from trainer.recipe.tables import Cluster
from trainer.run.logs import write_run_file
from trainer.run.resume import changed_keys
from trainer.run.run import (
    TrainSettings,
    _job_error,
    compare_settings,
    compare_start,
    connect_processes,
    run_together,
)
from trainer.run.storage import check_last_step, check_shared_folder, hold_run, open_run_storage
from trainer.run.train import list_steps
from trainer.training.eval_metrics import TokenFunctions

# `prep train` in two processes: all end together, whatever happens to one of them, and a restart continues exactly.

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
def test_suspended_process_is_lost(folder: Path, victim: int) -> None:
    outcome = run_fault(folder, Fault("suspended", AFTER_SAVE, victim, signal.SIGSTOP))
    assert outcome.codes[1 - victim] == STOPPED
    assert f"process {victim} (" in outcome.message(1 - victim)
    assert "no heartbeat for" in outcome.message(1 - victim)


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


# `prep train` under launchers: the start of several processes, and the errors of those that do not fit together.

ONE_TASK = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}


def start_process(*words: str, index: int, count: int, port: int) -> ForkedProcess:
    """Start `prep train` as one process of `count`, in the current folder."""
    job = {
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
    }
    words = ("train", "recipe.toml", "--json", "--out", "run", *words)
    return start_processes(*words, count=1, devices=4, cwd=Path.cwd(), env=job)[0]


def test_train_runs_as_the_only_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for variable, value in ONE_TASK.items():
        monkeypatch.setenv(variable, value)
    assert "missing.toml" in run_failing(capsys, 2, "train", "missing.toml")


def test_train_refuses_incomplete_variables(
    work_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
    err = run_failing(capsys, 2, "train", "recipe.toml", "--out", "run")
    assert "JAX_NUM_PROCESSES is set, and JAX_PROCESS_ID is not" in err
    assert not Path("run").exists()


def test_train_names_the_missing_process(work_dir: Path):
    port, timeout = free_port(), ("--set", "cluster.start_timeout=3")
    processes = [start_process(*timeout, index=0, count=3, port=port)]
    [(code, out, err)] = finish(processes)
    assert code == 1
    assert json.loads(out)["error"]["what"] == "processes 1-2 of 3 did not start within 3 s"
    assert f"127.0.0.1:{port}" in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 3  # what, why, hint
    assert not Path("run").exists()


def test_local_devices_are_simulated_on_cpus(work_dir: Path):
    words = (
        "train",
        "recipe.toml",
        "--dry-run",
        *set_keys("mesh=1,2,1", "cluster.n_local_devices=2"),
    )
    done = run_prep(*words, cwd=work_dir)
    assert done.returncode == 0, done.stderr
    assert "mesh dp 1 x fsdp 2 x mp 1 = 2 devices" in done.stderr


def test_number_of_devices_in_use_cannot_change(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    jax.devices()
    words = ("train", "recipe.toml", "--dry-run", "--set", "cluster.n_local_devices=2")
    err = run_failing(capsys, 2, *words)
    assert "`cluster.n_local_devices` is 2, and this process has 8 x cpu" in err
    assert "`JAX_NUM_CPU_DEVICES=2` before Python starts" in err


# The facts that the processes of `prep train` compare.

MANIFEST = {
    "config": {"hidden_size": 8},
    "tensors": {"a": {"digests": [[0, 1, "d"]]}},
    "source": {"mtime_ns": 1},
}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return a dict that receives the facts of each comparison."""
    all_facts: dict[str, str] = {}

    def check_agreement(group: object, facts: Mapping[str, str], **_: object) -> None:
        all_facts.update(facts)

    def start_processes(address: object, **_: object) -> SingleProcess:
        return SingleProcess()

    monkeypatch.setattr(agreement, "check_agreement", check_agreement)
    monkeypatch.setattr("trainer.distributed.processes.start_processes", start_processes)
    return all_facts


def test_compare_settings_compares_versions_and_recipe(compared: dict[str, str]):
    path = recipes_folder() / "gpt-neo-1.3b.toml"
    settings = (
        "cluster.n_processes=2",
        "cluster.process_id=1",
        "cluster.host0_address=10.0.0.1",
        "optimizer.lr=0.5",
    )
    recipe = load_recipe(path, settings).recipe
    group, ui = connect_processes(recipe), open_ui("train", as_json=False, quiet=True, verbose=0)
    compare_settings(group, recipe, TrainSettings(path, restart=True), ui)
    assert {"python", "prepcli", "jax", "jaxlib", "seed", "train.steps"} <= compared.keys()
    assert compared["optimizer.lr"] == "0.5"
    assert compared["restart"] == "True"
    assert (
        not {"cluster.process_id", "cluster.host0_address", "data.train", "data.cache"}
        & compared.keys()
    )


def test_compare_settings_compares_the_functions_of_tokens(compared: dict[str, str]):
    """Without the same metrics, one process would sum values that no other one has computed."""

    def entropy(logits: Any, targets: Any) -> dict[str, Any]:
        return {"entropy": logits}

    path = recipes_folder() / "gpt-neo-1.3b.toml"
    ui = open_ui("train", as_json=False, quiet=True, verbose=0)
    settings = TrainSettings(path, token_functions=TokenFunctions(metric_fn=entropy))
    compare_settings(SingleProcess(), load_recipe(path).recipe, settings, ui)
    assert compared["metric_fn"].endswith("entropy")
    assert "loss_fn" not in compared


def checkpoint_facts(compared: dict[str, str], manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts of a start checkpoint."""
    compare_start(SingleProcess(), manifest, step=3, data_identity="tokens", kernel="blockwise")
    return dict(compared)


def test_checkpoint_facts_change_with_digests_not_mtime(compared: dict[str, str]):
    facts = checkpoint_facts(compared, MANIFEST)
    assert (facts["last step"], facts["data"], facts["attention kernel"]) == (
        "3",
        "tokens",
        "blockwise",
    )
    assert checkpoint_facts(compared, MANIFEST | {"source": {"mtime_ns": 2}}) == facts
    changed = checkpoint_facts(compared, MANIFEST | {"tensors": {"a": {"digests": [[0, 1, "e"]]}}})
    assert changed["start checkpoint"] != facts["start checkpoint"]


# Files of a training run besides its checkpoints.


def make_run(folder: Path) -> Any:
    return SimpleNamespace(folder=folder, storage=SimpleNamespace(store_file=lambda name: None))


def test_write_run_file_replaces_a_file(tmp_path: Path):
    run = make_run(tmp_path / "run")
    for text in ("old", "é"):
        write_run_file(run, "environment.json", text)
        assert (run.folder / "environment.json").read_text("utf-8") == text
    assert os.listdir(run.folder) == ["environment.json"]


@pytest.mark.parametrize("name", ["environment.json", "environment.json.new"])
def test_write_run_file_changes_no_file_outside(tmp_path: Path, name: str):
    (tmp_path / "private").write_text("private")
    run = make_run(tmp_path / "run")
    run.folder.mkdir()
    (run.folder / name).symlink_to(tmp_path / "private")
    with suppress(PrepError):
        write_run_file(run, "environment.json", "new")
    assert (tmp_path / "private").read_text() == "private"


def test_recipe_of_a_run_must_be_a_regular_file(tmp_path: Path):
    os.mkfifo(tmp_path / "recipe.toml")
    with pytest.raises(PrepError, match=r"recipe\.toml is not a file"):
        changed_keys(tmp_path / "recipe.toml", load_recipe(recipes_folder() / "gpt2.toml").recipe)


# The folder of a run and its files: all processes see that of process 0, and it holds no other files.


def test_check_shared_folder_creates_the_folder(tmp_path: Path):
    folder = tmp_path / "runs/tuned"
    assert run_threads(3, lambda group: check_shared_folder(folder, group)) == [None] * 3
    assert list(folder.iterdir()) == []


def test_check_shared_folder_fails_in_all_processes(tmp_path: Path):
    """Process 1 has a folder of its own."""
    errors = run_threads(
        2, lambda group: check_shared_folder(tmp_path / f"host{group.index}", group)
    )
    assert all(isinstance(error, PrepError) for error in errors)
    assert "does not see the run's folder of process 0" in errors[1].what
    assert errors[0].what == f"process 1: {errors[1].what}"
    assert errors[0].hint == "set `--out` to a folder on a file system that all hosts share"
    assert list((tmp_path / "host0").iterdir()) == []


def test_check_shared_folder_names_an_unwritable_folder(tmp_path: Path):
    (tmp_path / "file").touch()
    errors = run_threads(2, lambda group: check_shared_folder(tmp_path / "file/run", group))
    assert [error.what for error in errors] == [
        f"process 0 cannot write to {tmp_path}/file/run"
    ] * 2


@pytest.mark.parametrize("name", ["metrics.jsonl", "1"])
def test_check_shared_folder_keeps_other_files(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    check_shared_folder(tmp_path, SingleProcess())
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_check_accepts_a_probe_of_a_killed_start(tmp_path: Path):
    recipe = load_recipe(shipped_recipe("gpt2")).recipe
    place = open_run_storage(
        tmp_path, recipe, open_ui("train", as_json=False, quiet=True, verbose=0)
    )
    (tmp_path / f"{PROBE_PREFIX}old").touch()
    place.check()
    (tmp_path / f"{PROBE_PREFIX}old").rename(tmp_path / "old")
    with pytest.raises(PrepError, match="is not a run"):
        place.check()


def test_hold_run_accepts_a_read_only_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, locked_path: Path) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(training_folder, "acquire_lock", refuse)
    with hold_run(FolderStorage(tmp_path), SingleProcess(), pytest.fail) as lock_error:
        assert lock_error is not None
        assert "Read-only file system" in lock_error.why


@pytest.mark.parametrize(
    ("steps", "step", "code"), [([3, 6], 3, STOPPED), ([], 3, FAILED), ([3], 0, STOPPED)]
)
def test_check_last_step_refuses_a_run_at_another_step(
    steps: list[int], step: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place = FolderStorage(tmp_path)
    monkeypatch.setattr(place, "steps", lambda: steps)
    with pytest.raises(
        PrepError, match=f"is at step {max(steps, default=0)}, and this process has read"
    ) as caught:
        check_last_step(place, step)
    assert caught.value.code == code
    assert "start again" in caught.value.hint


def test_process_0_alone_lists_the_saved_steps():
    """A listing of a bucket takes requests for all files of all steps."""
    listing: list[int] = []

    def start(group: ProcessGroup) -> list[int]:
        def steps() -> list[int]:
            listing.append(group.index)
            return [3, 6]

        run: Any = SimpleNamespace(
            group=group,
            is_process_0=group.index == 0,
            options=SimpleNamespace(restart=False),
            storage=SimpleNamespace(steps=steps),
        )
        return list_steps(run)

    assert run_threads(3, start) == [[3, 6]] * 3
    assert listing == [0]


def test_check_last_step_accepts_the_step_that_was_read(tmp_path: Path):
    check_last_step(FolderStorage(tmp_path), 0)


@pytest.mark.slow
def test_error_of_one_process_ends_the_other(folder: Path) -> None:
    (folder / "failed").mkdir()
    (folder / "failed/recipe.toml").touch()
    (folder / "failed/metrics.1.jsonl").mkdir()  # process 1 cannot write its metrics
    outcome = run_job(folder, "failed", settings={"log.all_workers": "true"})
    assert outcome.codes == (FAILED, FAILED)
    assert "process 1 (" in outcome.message(0)
    assert "metrics.1.jsonl" in outcome.message(0)


@pytest.mark.slow
def test_train_names_the_keys_that_differ(work_dir: Path):
    port, rates = free_port(), ("0.01", "0.02")
    processes = [
        start_process("--set", f"optimizer.lr={rate}", index=index, count=2, port=port)
        for index, rate in enumerate(rates)
    ]
    (_, out, _), (_, other_out, _) = results = finish(processes)
    assert json.loads(out)["error"]["what"] == "the processes differ in `optimizer.lr`"
    assert other_out == "", "process 0 alone prints the JSON object"
    for code, _, err in results:
        assert code == 1
        assert "the processes differ in `optimizer.lr`" in err
        assert "0.01 in process 0" in err
        assert "0.02 in process 1" in err
        assert len(err.splitlines()) == 3
    assert not Path("run").exists()


@pytest.mark.slow
def test_train_goes_on_after_a_process_of_another_job(work_dir: Path):
    port, short = free_port(), set_keys("train.steps=2", "optimizer.warmup_steps=1")
    first = start_process(*short, index=0, count=2, port=port)
    [(code, _, err)] = finish(
        [start_process(*short, "--set", "name=other", index=1, count=2, port=port)]
    )
    assert code == 1
    assert f"process 0 at 127.0.0.1:{port} belongs to another job" in err
    assert "`recipe recipe`" in err
    assert "`recipe other`" in err
    results = finish([first, start_process(*short, index=1, count=2, port=port)])
    assert [code for code, _, _ in results] == [0, 0], results


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_signal_while_loading_ends_all_processes(folder: Path, victim: int) -> None:
    outcome = run_fault(folder, Fault("stopped-early", "tokens per step", victim, signal.SIGTERM))
    assert outcome.codes == (STOPPED, STOPPED)
