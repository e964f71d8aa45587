"""Detection of launchers from environment variables."""

from __future__ import annotations

import pytest

from prepcli.core.errors import UsageError
from prepcli.core.launchers import LaunchedProcess, detect_launcher, job_name

JAX = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234"}
# Variables of the second task on the second node of `srun --nodes 2 --ntasks 4`.
SLURM = {
    "SLURM_JOB_ID": "71",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[003-004]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
SLURM_PROCESS = LaunchedProcess(
    "SLURM",
    4,
    3,
    variables=("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    local_count=2,
    local_index=1,
    host_count=2,
    host_index=1,
)
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
TPU = {
    "TPU_WORKER_HOSTNAMES": "w-0,w-1,w-2,w-3",
    "TPU_WORKER_ID": "2",
    "TPU_SKIP_MDS_QUERY": "true",
}
TWO_SLICES = {
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "w-0:8080",
}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.8.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "run-worker-0-1",
}


def numbers(environ: dict[str, str]) -> tuple[str, int, int] | None:
    """Return the launcher, the number of processes and the index."""
    process = detect_launcher(environ)
    return process and (process.launcher, process.count, process.index)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (JAX, ("JAX_NUM_PROCESSES", 2, 0)),
        (SLURM, ("SLURM", 4, 3)),
        (OPEN_MPI, ("Open MPI", 4, 2)),
        (TPU, ("TPU pod", 4, 2)),
        (TPU | TWO_SLICES, ("TPU pod", 8, 6)),
        (POD | {"JAX_NUM_PROCESSES": "2"}, ("Kubernetes", 2, 1)),
        (POD | JAX, ("JAX_NUM_PROCESSES", 2, 0)),
    ],
)
def test_detect_launcher_reads_environment(environ: dict[str, str], expected: tuple[str, int, int]):
    assert numbers(environ) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        # A batch script runs once.
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "71"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"JAX_NUM_PROCESSES": "1"},
        {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234"},
        {"TPU_PROCESS_ADDRESSES": "local", "TPU_WORKER_ID": "0"},
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        # The pods of an indexed job may be independent.
        POD,
    ],
)
def test_detect_launcher_returns_none_for_one_process(environ: dict[str, str]):
    assert detect_launcher(environ) is None


def test_detect_launcher_reads_places_of_slurm_tasks():
    assert detect_launcher(SLURM) == SLURM_PROCESS


@pytest.mark.parametrize(
    ("tasks_per_node", "node", "local_count"),
    [("2(x3),1", "3", 1), ("2(x3),1", "1", 2), ("", "0", None)],
)
def test_detect_launcher_counts_tasks_of_the_node(
    tasks_per_node: str, node: str, local_count: int | None
):
    process = detect_launcher(
        SLURM | {"SLURM_STEP_TASKS_PER_NODE": tasks_per_node, "SLURM_NODEID": node}
    )
    assert process is not None
    assert process.local_count == local_count


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [(JAX | SLURM, "JAX_NUM_PROCESSES"), (OPEN_MPI | SLURM, "Open MPI"), (SLURM | TPU, "SLURM")],
)
def test_detect_launcher_prefers_the_innermost(environ: dict[str, str], launcher: str):
    assert (numbers(environ) or ("", 0, 0))[0] == launcher


def test_detect_launcher_ignores_others_than_requested():
    assert detect_launcher(OPEN_MPI | TPU, ("SLURM",)) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES is set, and JAX_PROCESS_ID is not"),
        ({"JAX_PROCESS_ID": "1"}, "JAX_PROCESS_ID is set, and JAX_NUM_PROCESSES is not"),
        ({"JAX_NUM_PROCESSES": "many", "JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES=many is invalid"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS is set, and SLURM_PROCID is not"),
        (
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "4"},
            "the indices of 4 processes are 0 to 3",
        ),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is not"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_HOSTNAMES is set, and TPU_WORKER_ID is not"),
        (TPU | {"MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_SLICE_ID is not"),
        (TPU | {"TPU_WORKER_ID": "4"}, "process index 4 is out of range"),
        (POD | {"JOBSET_NAME": "run"}, "JOBSET_NAME is set, and JAX_NUM_PROCESSES is not"),
        ({"JAX_NUM_PROCESSES": "70000", "JAX_PROCESS_ID": "0"}, "the limit is 65,536 processes"),
    ],
)
def test_detect_launcher_refuses_incomplete_variables(environ: dict[str, str], message: str):
    with pytest.raises(UsageError) as raised:
        detect_launcher(environ)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("launcher", "environ", "expected"),
    [
        ("SLURM", SLURM | {"SLURM_STEP_ID": "2"}, "SLURM job 71.2"),
        ("Open MPI", OPEN_MPI, "Open MPI job 1531576320"),
        (
            "Open MPI",
            OPEN_MPI | {"PMIX_NAMESPACE": "prterun-n1-8@1"},
            "Open MPI job prterun-n1-8@1",
        ),
        ("Kubernetes", POD | {"JOBSET_NAME": "run"}, "JobSet run"),
        ("Kubernetes", POD, ""),
        # JAX's variables describe this process, so the job of SLURM is another one.
        ("JAX_NUM_PROCESSES", JAX | SLURM, ""),
    ],
)
def test_job_name_comes_from_the_launcher(launcher: str, environ: dict[str, str], expected: str):
    assert job_name(launcher, environ) == expected
