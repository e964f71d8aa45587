"""`prep launch slurm --submit` on a real SLURM: stopped and killed jobs are requeued and resume."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK
from prepcli.formats.manifest import saved_steps
from tests.helpers import slurm
from tests.helpers.killing import read_files
from tests.helpers.launched_jobs import kill_share
from tests.helpers.object_server import serve_objects
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.training_folder import make_training_folder
from tests.helpers.waiting import MAX_S, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm.missing_requirement()), reason=slurm.missing_requirement()),
]

# The nodes are one machine with loopback addresses, so the job has the variables of JAX instead of those of SLURM
PREP = f"""#!/bin/bash
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 JAX_NUM_PROCESSES=$SLURM_NTASKS JAX_PROCESS_ID=$SLURM_PROCID
export JAX_COORDINATOR_ADDRESS=127.0.0.1:$((20000 + SLURM_JOB_ID))
unset ${{!SLURM_@}}
exec {sys.executable} -m prepcli "$@"
"""


@pytest.fixture
def cluster() -> Iterator[dict[str, str]]:
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder,
        slurm.slurm_cluster(Path(folder)) as variables,
    ):
        yield variables


def wait_for_text(path: Path, text: str, timeout_s: float = MAX_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline_s, path.read_text() if path.exists() else path
        time.sleep(0.2)


def write_program(path: Path, text: str) -> None:
    """Write a program into a new folder."""
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o755)


def test_stopped_job_is_requeued_and_resumes(
    cluster: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    make_training_folder()
    write_program(Path("bin/prep"), PREP)
    capsys.readouterr()
    command = [
        "launch",
        "slurm",
        "recipe.toml",
        "--nodes",
        "2",
        "--setup",
        "export PATH=$PWD/bin:$PATH",
        "--submit",
    ]
    assert (
        main(
            [
                *command,
                "--",
                "--out",
                "run",
                "--set",
                "train.steps=60",
                "--set",
                "checkpoint.every=60",
            ]
        )
        == OK
    )
    job = capsys.readouterr().out.strip()
    log = Path(f"recipe-{job}.log")
    wait_for_text(log, "step  5/60")
    subprocess.run(["scancel", "--signal=USR1", job], check=True)
    wait_for_text(log, "Exited with exit code 75")
    fields = slurm.wait_for_job(job, cluster, state="COMPLETED")
    assert (fields["Restarts"], fields["ExitCode"]) == ("1", "0:0")
    assert "0: resuming at step" in log.read_text()
    assert saved_steps(Path("run"))[-1] == 60


ARRAY_PREP = f"""#!/bin/bash
export JAX_PLATFORMS=cpu
exec {sys.executable} -m prepcli "$@"
"""


def test_killed_task_of_an_array_is_requeued_alone(
    cluster: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    make_checkpoint(Path("model"), LLAMA)
    write_program(Path("bin/prep"), ARRAY_PREP)
    words = ["save-init", "model", "--mesh", "1,2,1"]
    assert main([*words, "--out", "one", "--processes", "1/0"]) == OK
    launch = ["launch", "slurm", "--array", "3", "--setup", "export PATH=$PWD/bin:$PATH"]
    capsys.readouterr()
    assert main([*launch, "--submit", "--", *words, "--out", "three"]) == OK
    job = capsys.readouterr().out.strip()
    kill_share(3, 1)
    # The requeued task first: SLURM would start it only after two minutes, and the other ones wait for it.
    for task in (1, 0, 2):
        fields = slurm.wait_for_job(f"{job}_{task}", cluster, state="COMPLETED")
        log = Path(f"save-init-{job}_{task}.log").read_text()
        assert (fields["Restarts"], fields["ExitCode"]) == (str(int(task == 1)), "0:0"), log
    assert read_files(Path("three")) == read_files(Path("one"))


# Each task takes all cores of a node. No local file may have more than 1 MiB.
BUCKET_PREP = f"""#!/bin/bash
ulimit -f 1024
exec {sys.executable} -m prepcli "$@"
"""
BIG = LLAMA | {"vocab_size": 16384, "hidden_size": 512, "num_hidden_layers": 2}


def test_killed_host_is_requeued_and_completes_an_output_in_a_bucket(
    cluster: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Two hosts without a shared folder for the output. The store is on the loopback interface."""
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("model"), BIG)
    write_program(Path("bin/prep"), BUCKET_PREP)
    words = ["save-init", "model", "--mesh", "1,2,1"]
    launch = ["launch", "slurm", "--array", "2", "--cpus", "2"]
    launch += ["--setup", "export PATH=$PWD/bin:$PATH", "--submit", "--"]
    with serve_objects() as store:
        for name, value in (cluster | store.environment()).items():
            monkeypatch.setenv(name, value)
        assert main([*words, "--out", "gs://bucket/one", "--processes", "1/0"]) == OK
        store.stored.clear()
        # The requests are slow, so that the kill comes between two objects.
        store.delay_s = 0.5
        capsys.readouterr()
        assert main([*launch, *words, "--out", "gs://bucket/two"]) == OK
        job = capsys.readouterr().out.strip()
        wait_until(lambda: any("two/d/" in key for key in store.stored))
        kill_share(2, 1)
        for task in (1, 0):
            fields = slurm.wait_for_job(f"{job}_{task}", cluster, state="COMPLETED")
            log = Path(f"save-init-{job}_{task}.log").read_text()
            assert (fields["Restarts"], fields["ExitCode"]) == (str(int(task == 1)), "0:0"), log
        assert store.objects_below("bucket/two/") == store.objects_below("bucket/one/")
        sent = Counter(key for key in store.stored if ".prep" not in key)
        assert set(sent.values()) == {1}


@pytest.mark.parametrize("words", [["recipe.toml", "--nodes", "2"], ["--array", "3"]])
def test_sbatch_accepts_every_directive(
    words: list[str],
    cluster: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    make_training_folder()
    options = ["--cpus", "1", "--mem", "100M", "--time", "0:10:00", "--partition", "main"]
    command = [] if "recipe.toml" in words else ["--", "save-init", "model"]
    assert main(["launch", "slurm", *words, *options, "--out", "job.sh", *command]) == OK
    done = subprocess.run(
        ["sbatch", "--test-only", "job.sh"],
        env={**os.environ, **cluster},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
