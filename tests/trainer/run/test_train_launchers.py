"""`prep train` under launchers: the start of several processes, and the errors of those that do not fit together."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from prepcli.launch.local import free_port
from tests.helpers.fork_server import ForkedProcess, run_prep
from tests.helpers.processes import finish, start_processes
from tests.helpers.run_cli import run_failing
from tests.helpers.train_runs import set_keys
from tests.helpers.training_folder import make_training_folder

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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    make_training_folder()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
    err = run_failing(capsys, 2, "train", "recipe.toml", "--out", "run")
    assert "JAX_NUM_PROCESSES is set, and JAX_PROCESS_ID is not" in err
    assert not Path("run").exists()


def test_train_names_the_missing_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    make_training_folder()
    port, timeout = free_port(), ("--set", "cluster.start_timeout=3")
    processes = [start_process(*timeout, index=0, count=3, port=port)]
    [(code, out, err)] = finish(processes)
    assert code == 1
    assert json.loads(out)["error"]["what"] == "processes 1-2 of 3 did not start within 3 s"
    assert f"127.0.0.1:{port}" in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 3  # what, why, hint
    assert not Path("run").exists()


@pytest.mark.slow
def test_train_names_the_keys_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    make_training_folder()
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
def test_train_goes_on_after_a_process_of_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    make_training_folder()
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
