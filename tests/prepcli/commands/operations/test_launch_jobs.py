"""Shipped recipes for several hosts, jobs on a real Ray and a real SLURM, and a script of PBS without PBS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.operations.recipes import recipes_folder
from prepcli.core.errors import OK, STOPPED, USAGE
from prepcli.formats.manifest import saved_steps
from tests.helpers import slurm
from tests.helpers.killing import read_files
from tests.helpers.launched_jobs import (
    REQUIRED_OPTIONS,
    STDIN_ENGINES,
    kill_share,
    kill_training_process,
)
from tests.helpers.object_server import serve_objects
from tests.helpers.run_cli import Capture, MonkeyPatch
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.training_folder import make_training_folder
from tests.helpers.waiting import MAX_S, wait_until

# Recipe, accelerator, devices, largest peak of one device in GB, and the words of `prep launch` in its comment
FULL_SIZE = [
    ("llama-13b", "H100", 16, 37, "slurm --nodes 2 --devices-per-node 8 --time 24:00:00"),
    ("gpt2", "A100-40", 16, 12, "slurm --nodes 2 --devices-per-node 8 --time 4:00:00"),
    ("gpt-j-6b", "v4", 32, 8, "tpu --accelerator v4-64 --zone us-central2-b"),
]


@pytest.fixture(autouse=True)
def _in_empty_folder(monkeypatch: MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(("name", "devices", "count", "peak_gb", "launch"), FULL_SIZE)
def test_launch_recipes_fit_and_are_launched(
    name: str, devices: str, count: int, peak_gb: float, launch: str, capsys: Capture
):
    recipe = recipes_folder() / f"{name}.toml"
    capsys.readouterr()
    assert main(["plan", str(recipe), "--devices", devices, "--json"]) == OK
    report = json.loads(capsys.readouterr().out)
    assert (report["devices"], report["kinds"][0]["fits"], report["warnings"]) == (count, True, [])
    assert report["memory"]["peak"] < peak_gb * 10**9
    target, *options = launch.split()
    assert f"prep launch {target} {name} {' '.join(options)}" in recipe.read_text()
    assert main(["launch", target, name, *options]) == OK
    assert "prep train" in capsys.readouterr().out


# The path of a recipe on the machines of an engine, if they have a copy of it.
RECIPE_COPIES = {"tpu": '"$HOME"/gpt2.toml', "gke": "/etc/prep/gpt2.toml"}


@pytest.mark.parametrize("engine", STDIN_ENGINES)
def test_launch_takes_the_name_of_a_shipped_recipe(engine: str, capsys: Capture) -> None:
    options = REQUIRED_OPTIONS.get(engine, ())
    assert main(["launch", engine, "gpt2", *options, "--", "--set", "mesh=8,1,1"]) == OK
    recipe = RECIPE_COPIES.get(engine, "gpt2")
    assert f"prep train {recipe} --set mesh=8,1,1" in capsys.readouterr().out


def test_launch_local_checks_a_shipped_recipe(capsys: Capture) -> None:
    assert main(["launch", "local", "gpt2", "--processes", "2"]) == USAGE
    assert "mesh 16,1,1 needs 16 devices, there are 2" in capsys.readouterr().err


def test_launch_suggests_a_shipped_recipe(capsys: Capture) -> None:
    assert main(["launch", "slurm", "gpt-neo"]) == USAGE
    assert "did you mean `gpt-neo-1.3b`" in capsys.readouterr().err


def test_comments_of_recipes_name_no_folder() -> None:
    """A wheel has the recipes in its package, and no folder `recipes` here."""
    for recipe in recipes_folder().glob("*.toml"):
        assert "recipes/" not in recipe.read_text(), recipe.name


# `prep launch ray` on a real Ray with two workers of this machine


LOG = Path("driver.log")


def start_driver(*words: str) -> subprocess.Popen[str]:
    """Write the driver of a job with two workers, and start it. It starts Ray on this machine."""
    launch = ["launch", "ray", "--workers", "2", "--folder", str(Path.cwd()), "--out", "job.py"]
    # The tests themselves have eight CPU devices.
    launch += ["--env", "JAX_NUM_CPU_DEVICES=1"]
    assert main([*launch, "--", *words]) == OK
    # Ray starts its workers in another folder.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with LOG.open("w") as log:
        return subprocess.Popen(
            [sys.executable, "job.py"], stdout=log, stderr=subprocess.STDOUT, env=env, text=True
        )


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray[train]")
def test_killed_share_of_a_conversion_is_written_again():
    make_checkpoint(Path("model"), LLAMA)
    words = ["save-init", "model", "--mesh", "1,2,1"]
    assert main([*words, "--out", "one", "--processes", "1/0"]) == OK
    driver = start_driver(*words, "--out", "two")
    killed = kill_share(2, 1)
    assert driver.wait(MAX_S) == OK, LOG.read_text()
    assert not Path(f"/proc/{killed}").exists()
    assert read_files(Path("two")) == read_files(Path("one"))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray[train]")
def test_two_workers_train_and_resume():
    make_training_folder()
    sets = ["--set", "mesh=1,2,1", "--set", "train.steps=60", "--set", "checkpoint.every=5"]
    driver = start_driver("train", "recipe.toml", "--out", "run", *sets)
    wait_until(lambda: "saved step" in LOG.read_text(), driver)
    kill_training_process(1)
    assert driver.wait(MAX_S) == OK, LOG.read_text()
    assert "resuming at step" in LOG.read_text()
    assert saved_steps(Path("run"))[-1] == 60


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray[train]")
def test_error_of_a_training_ends_the_job_with_its_code():
    make_training_folder()
    Path("text.txt").unlink()
    driver = start_driver("train", "recipe.toml", "--set", "mesh=1,2,1", "--set", "model.path=none")
    assert driver.wait(MAX_S) in (1, USAGE), LOG.read_text()
    assert LOG.read_text().count("error: ") <= 2


# `prep launch slurm --submit` on a real SLURM: stopped and killed jobs are requeued and resume


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


@pytest.mark.slow
@pytest.mark.skipif(bool(slurm.missing_requirement()), reason=slurm.missing_requirement())
def test_stopped_job_is_requeued_and_resumes(
    cluster: dict[str, str], monkeypatch: MonkeyPatch, capsys: Capture
):
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    make_training_folder()
    write_program(Path("bin/prep"), PREP)
    capsys.readouterr()
    words = ["--nodes", "2", "--setup", "export PATH=$PWD/bin:$PATH", "--submit", "--"]
    sets = ["--set", "train.steps=60", "--set", "checkpoint.every=60"]
    assert main(["launch", "slurm", "recipe.toml", *words, "--out", "run", *sets]) == OK
    job = capsys.readouterr().out.strip()
    log = Path(f"recipe-{job}.log")
    wait_for_text(log, "step  5/60")
    subprocess.run(["scancel", "--signal=USR1", job], check=True)
    wait_for_text(log, "Exited with exit code 75")
    fields = slurm.wait_for_job(job, cluster, state="COMPLETED")
    assert (fields["Restarts"], fields["ExitCode"]) == ("1", "0:0")
    assert "0: resuming at step" in log.read_text()
    assert saved_steps(Path("run"))[-1] == 60


# Each task takes all cores of a node. No local file may have more than 1 MiB.
BUCKET_PREP = f"""#!/bin/bash
ulimit -f 1024
exec {sys.executable} -m prepcli "$@"
"""
BIG = LLAMA | {"vocab_size": 16384, "hidden_size": 512, "num_hidden_layers": 2}


@pytest.mark.slow
@pytest.mark.skipif(bool(slurm.missing_requirement()), reason=slurm.missing_requirement())
def test_requeued_host_completes_an_output_in_a_bucket(
    cluster: dict[str, str], monkeypatch: MonkeyPatch, capsys: Capture
):
    """Two hosts without a shared folder for the output. The store is on the loopback interface."""
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


@pytest.mark.slow
@pytest.mark.skipif(bool(slurm.missing_requirement()), reason=slurm.missing_requirement())
@pytest.mark.parametrize("words", [["recipe.toml", "--nodes", "2"], ["--array", "3"]])
def test_sbatch_accepts_every_directive(words: list[str], cluster: dict[str, str]):
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


# `prep launch pbs` with two processes of this machine. Two programs take the place of those of PBS


PBS_PROGRAMS = {
    # `pbsdsh -n INDEX -- COMMAND` starts a task of a node.
    "pbsdsh": '#!/bin/bash\nshift 3\nexec "$@"\n',
    "qsub": "#!/bin/bash\ncat > next.sh\n",
    "prep": f"""#!/bin/bash
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=1
exec {sys.executable} -m prepcli "$@"
""",
}


def start_pbs_job(script: str) -> subprocess.Popen[str]:
    """Start a batch script as PBS does, with two nodes on this machine."""
    Path("nodes").write_text("localhost\n" * 2)
    env = {**os.environ, "PATH": f"{Path('bin').resolve()}:{os.environ['PATH']}"}
    env |= {"PBS_JOBID": f"{os.getpid()}.server", "PBS_O_WORKDIR": str(Path.cwd())}
    env |= {"PBS_NODEFILE": str(Path("nodes").resolve())}
    with LOG.open("a") as log:
        return subprocess.Popen(
            ["bash", script], stdout=log, stderr=subprocess.STDOUT, env=env, text=True
        )


@pytest.mark.slow
def test_killed_job_of_pbs_submits_the_next_one_and_resumes():
    make_training_folder()
    Path("bin").mkdir()
    for name, program in PBS_PROGRAMS.items():
        (Path("bin") / name).write_text(program)
        (Path("bin") / name).chmod(0o755)
    words = ["launch", "pbs", "recipe.toml", "--nodes", "2", "--time", "1:00:00"]
    words += ["--setup", "export PATH=$PWD/bin:$PATH", "--out", "job.sh", "--", "--out", "run"]
    values = ["mesh=1,2,1", "train.steps=60", "checkpoint.every=5", "cluster.heartbeat_timeout=10"]
    sets = [word for value in values for word in ("--set", value)]
    assert main([*words, *sets]) == OK
    job = start_pbs_job("job.sh")
    wait_until(lambda: "saved step" in LOG.read_text(), job)
    # Its shell is killed as well, and writes no exit code.
    kill_training_process(1)
    assert job.wait(MAX_S) == STOPPED, LOG.read_text()
    next_job = start_pbs_job("next.sh")
    assert next_job.wait(MAX_S) == OK, LOG.read_text()
    assert "resuming at step" in LOG.read_text()
    assert saved_steps(Path("run"))[-1] == 60
    assert not list(Path().glob(".prep-launch-*"))
