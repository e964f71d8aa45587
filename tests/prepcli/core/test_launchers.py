"""Launchers: their environment variables, and the address of process 0 that they give."""

from __future__ import annotations

import pytest
from jax._src.clusters import ClusterEnv, OmpiCluster, SlurmCluster

from prepcli.core.errors import UsageError
from prepcli.core.launchers import LaunchedProcess, detect_launcher, job_name
from prepcli.core.process_address import (
    ProcessAddress,
    ProcessSettings,
    first_slurm_host,
    is_loopback,
    process_address,
    single_process_reason,
    split_host_port,
)

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


NO_SETTINGS = ProcessSettings()
EXPLICIT = ProcessSettings("10.0.0.9", num_processes=4, process_id=1)


def address_of(settings: ProcessSettings, environ: dict[str, str]) -> ProcessAddress:
    """Return the address of a job of several processes."""
    address = process_address(settings, environ)
    assert address is not None
    return address


@pytest.mark.parametrize(
    ("environ", "index", "coordinator"),
    [
        (JAX, 0, "10.0.0.1:1234"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "host0"}, 0, "host0:11111"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "[fd00::1]:99"}, 0, "[fd00::1]:99"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "fd00::1"}, 0, "[fd00::1]:11111"),
        (SLURM, 3, "n003:61511"),
        (SLURM | {"JAX_COORDINATOR_PORT": "99"}, 3, "n003:99"),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234"}, 3, "10.0.0.1:1234"),
        (OPEN_MPI, 2, "10.96.0.1:62624"),
        (
            OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fd00::1,fd00::2]:43370"},
            2,
            "[fd00::1]:61441",
        ),
        (TPU, 2, "w-0:8482"),
        (TPU | TWO_SLICES, 6, "w-0:8482"),
        (POD | {"JOBSET_NAME": "run", "JAX_NUM_PROCESSES": "2"}, 1, "run-worker-0-0.run:1234"),
    ],
)
def test_process_address_reads_launchers(environ: dict[str, str], index: int, coordinator: str):
    address = address_of(NO_SETTINGS, environ)
    assert (address.index, address.coordinator) == (index, coordinator)


@pytest.mark.parametrize(("cluster", "environ"), [(SlurmCluster, SLURM), (OmpiCluster, OPEN_MPI)])
def test_process_address_equals_the_one_that_jax_detects(
    cluster: type[ClusterEnv], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    expected = cluster.get_coordinator_address(timeout_secs=1, override_coordinator_port=None)
    assert address_of(NO_SETTINGS, environ).coordinator == expected


@pytest.mark.parametrize(
    ("settings", "environ", "expected"),
    [
        (EXPLICIT, JAX | SLURM, ("10.0.0.9:11111", 1, 4)),
        (ProcessSettings("10.0.0.9"), SLURM, ("10.0.0.9:11111", 3, 4)),
        (ProcessSettings("10.0.0.9", host0_port=99, num_processes=4), SLURM, ("10.0.0.9:99", 3, 4)),
        (ProcessSettings("fd00::1", process_id=0), SLURM, ("[fd00::1]:11111", 0, 4)),
        (ProcessSettings(num_processes=4, process_id=1), SLURM | JAX, ("10.0.0.1:1234", 1, 4)),
        (ProcessSettings("10.0.0.9", num_processes=3), POD, ("10.0.0.9:11111", 1, 3)),
    ],
)
def test_process_address_prefers_settings_to_environment(
    settings: ProcessSettings, environ: dict[str, str], expected: tuple[str, int, int]
):
    address = address_of(settings, environ)
    assert (address.coordinator, address.index, address.count) == expected


def test_process_address_names_launcher_and_reason():
    address = address_of(NO_SETTINGS, SLURM)
    assert (address.launcher, address.host_count, address.host_index) == ("SLURM", 2, 1)
    assert (
        address.reason == "SLURM_STEP_NUM_TASKS=4, SLURM_PROCID=3, SLURM_STEP_NODELIST=n[003-004]"
    )
    assert address_of(EXPLICIT, {}).reason == (
        "cluster.host0_address=10.0.0.9, cluster.n_processes=4, cluster.process_id=1"
    )


def test_process_address_of_a_job_of_one_process():
    assert process_address(NO_SETTINGS, {"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert process_address(ProcessSettings(num_local_devices=4), {}) is None
    assert address_of(ProcessSettings(num_processes=1), SLURM).count == 1


def test_single_process_reason_names_variables():
    assert single_process_reason({}) == "no variable of a launcher is set"
    assert "SLURM_STEP_NUM_TASKS=1" in single_process_reason({"SLURM_STEP_NUM_TASKS": "1"})


ONE_TASK = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_LOCALID": "0"}
FOUR_DEVICES = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"}


@pytest.mark.parametrize(
    ("num_local_devices", "environ", "expected"),
    [
        # The process has all devices of its host.
        (None, ONE_TASK | FOUR_DEVICES, None),
        (2, ONE_TASK | FOUR_DEVICES, (0, 1)),
        (None, SLURM | FOUR_DEVICES, (2, 3)),
        (1, SLURM | FOUR_DEVICES, (1,)),
        (None, SLURM | {"SLURM_GPUS_ON_NODE": "8"}, (4, 5, 6, 7)),
        # SLURM has divided the devices already.
        (None, SLURM | {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "2"}, None),
        (1, SLURM | {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "2"}, (0,)),
        # Each process has one device, as in jax.
        (None, SLURM, (1,)),
        (None, OPEN_MPI | FOUR_DEVICES, (0, 1)),
        (8, JAX, tuple(range(8))),
        (None, JAX, None),
    ],
)
def test_process_address_divides_devices_of_a_host(
    num_local_devices: int | None, environ: dict[str, str], expected: tuple[int, ...] | None
):
    assert (
        address_of(ProcessSettings(num_local_devices=num_local_devices), environ).local_device_ids
        == expected
    )


@pytest.mark.parametrize(
    ("settings", "environ", "message"),
    [
        (ProcessSettings("h"), {}, "`cluster.host0_address` is set, `cluster.n_processes` is not"),
        (
            ProcessSettings("h", process_id=0),
            {},
            "`cluster.process_id` is set, `cluster.n_processes` is not",
        ),
        (
            ProcessSettings("h", num_processes=2),
            {},
            "`cluster.n_processes` is set, `cluster.process_id` is not",
        ),
        (
            ProcessSettings("h", num_processes=2),
            SLURM,
            "`cluster.n_processes` is 2, and SLURM_STEP_NUM_TASKS is 4",
        ),
        (
            ProcessSettings("h", num_processes=2, process_id=2),
            {},
            "the indices of 2 processes are 0 to 1",
        ),
        (ProcessSettings("h:12", num_processes=2, process_id=1), {}, "`cluster.host0_port=12`"),
        (ProcessSettings(num_processes=2, process_id=1), {}, "the address of process 0 is unknown"),
        (NO_SETTINGS, JAX | {"JAX_COORDINATOR_ADDRESS": ""}, "JAX_COORDINATOR_ADDRESS is not set"),
        (NO_SETTINGS, SLURM | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
        (NO_SETTINGS, OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": ""}, "OMPI_MCA_orte_hnp_uri is not set"),
    ],
)
def test_process_address_refuses_incomplete_values(
    settings: ProcessSettings, environ: dict[str, str], message: str
):
    with pytest.raises(UsageError) as raised:
        process_address(settings, environ)
    assert message in raised.value.message


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("n001", "n001"),
        ("n001,m[2-3]", "n001"),
        ("n[003-005,9]", "n003"),
        ("n[7,9]-gpu,x", "n7-gpu"),
        ("rack[1-2]n[01-04],x", "rack1n01"),
        ("", ""),
    ],
)
def test_first_slurm_host_reads_the_compact_form(node_list: str, host: str):
    assert first_slurm_host(node_list) == host


def test_is_loopback_accepts_only_loopback_hosts():
    assert [
        is_loopback(host) for host in ("localhost", "127.0.1.1", "::1", "10.0.0.1", "n001")
    ] == [True] * 3 + [False] * 2
    assert split_host_port("[::1]:12") == ("::1", 12)
