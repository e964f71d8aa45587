"""A SLURM cluster of two nodes on this machine, for tests of jobs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prepcli.launch.local import free_port
from tests.helpers.waiting import MAX_S, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
# These names resolve without a change of /etc/hosts.
NODES = ("127.0.0.1", "127.0.0.2")
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
NodeName={nodes[0]} NodeHostname={host} Port={ports[1]} CPUs=2 RealMemory=1000
NodeName={nodes[1]} NodeHostname={host} Port={ports[2]} CPUs=2 RealMemory=1000
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def missing_requirement() -> str:
    """Return what this machine lacks for a cluster; empty if nothing."""
    if os.geteuid():
        return "needs root"
    return ", ".join(f"needs {name}" for name in PROGRAMS if shutil.which(name) is None)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run a cluster with its files in a folder with a short path, and yield its variables."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key, munge = folder / "munge.key", folder / "munge"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    ports = [free_port() for _ in range(3)]
    config = CONFIG.format(host=socket.gethostname(), folder=folder, ports=ports, nodes=NODES)
    (folder / "slurm.conf").write_text(config)
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    files = [
        f"--{name}={munge}.{name.removesuffix('-file')}"
        for name in ("socket", "pid-file", "log-file", "seed-file")
    ]
    try:
        _run(["munged", "--force", f"--key-file={key}", *files], {})
        _run(["slurmctld", "-c"], variables)
        for node in NODES:
            _run(["slurmd", "-N", node], variables)
        _wait_until(lambda: len([*folder.glob("*.pid")]) == 2 + len(NODES))
        _wait_until(lambda: _num_idle_nodes(variables) == len(NODES))
        yield variables
    finally:
        pids = [int(pid_file.read_text()) for pid_file in folder.glob("*.pid")]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        _wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def _num_idle_nodes(variables: dict[str, str]) -> int:
    """Return the number of registered nodes without a job."""
    words = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
    return sum(map(int, _run(words, variables).split()))


def job_fields(job: str, variables: dict[str, str]) -> dict[str, str]:
    """Return the fields that `scontrol show job` prints."""
    text = _run(["scontrol", "--oneliner", "show", "job", job], variables)
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def wait_for_job(
    job: str, variables: dict[str, str], *, state: str, timeout_s: float = MAX_S
) -> dict[str, str]:
    """Wait until a job is in a state, and return its fields. A requeued job starts at once instead of after minutes."""
    deadline_s = time.monotonic() + timeout_s
    while (fields := job_fields(job, variables))["JobState"] != state:
        assert time.monotonic() < deadline_s, fields
        if fields["JobState"] == "PENDING" and fields["Reason"] == "BeginTime":
            subprocess.run(
                ["scontrol", "update", f"JobId={job}", "StartTime=now"],
                env={**os.environ, **variables},
            )
        time.sleep(0.5)
    return fields


def _run(words: list[str], variables: dict[str, str]) -> str:
    """Return the output of a command of Slurm. It must succeed."""
    done = subprocess.run(
        words, env={**os.environ, **variables}, capture_output=True, text=True, timeout=MAX_S
    )
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def _wait_until(is_done: Callable[[], bool]) -> None:
    wait_until(is_done)
