"""Managed jobs of SkyPilot: read back by PyYAML, run by bash, and accepted by SkyPilot's own parser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.core.errors import UsageError
from prepcli.core.option_spec import with_defaults
from prepcli.launch.job import LaunchedCommand, LaunchJob
from prepcli.launch.sky import SkyOptions, sky_task
from tests.helpers.launched_jobs import train_command
from tests.helpers.scripts import install_recorders, run_script, texts, words
from tests.helpers.waiting import MAX_S

JOB = LaunchJob(
    command=train_command("recipes/llama 13b.toml", ["--out", "gs://runs/a"]),
    name="llama-13b",
    setup=("pip install 'prepcli[cuda]'", "true"),
    env=(("A", "b c"),),
)
EVERY_OPTION: dict[str, object] = {
    "nodes": 2,
    "accelerator": "H100",
    "devices_per_node": 8,
    "infra": "gcp/us-central1",
    "image": "example/prep:1",
    "bucket": "gs://some-data",
    "cpus": 96,
    "mem": "900G",
    "spot": True,
}
# SkyPilot has an environment of its own: it pins other versions than prep needs. Its program names the interpreter.
SKY = shutil.which("sky")
PARSER = """
import json, sys, sky
from sky.clouds.utils import gcp_utils
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(json.dumps({
    "nodes": task.num_nodes,
    "spot": resources.use_spot,
    "accelerators": resources.accelerators,
    "arguments": resources.accelerator_args,
    "is_slice": gcp_utils.is_tpu_vm_pod(resources),
    "recovery": resources.job_recovery,
    "mounts": {path: storage.source for path, storage in task.storage_mounts.items()},
    "run": task.run,
}))
"""


@pytest.fixture(scope="module")
def recorders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorders")
    install_recorders(folder)
    return folder


def task_of(job: LaunchJob, values: dict[str, object], recipe_text: str = "") -> Any:
    """Return the task as PyYAML reads it."""
    options = with_defaults(SkyOptions, values)
    return yaml.safe_load(sky_task(replace(job, recipe_text=recipe_text), options))


def test_sky_task_has_every_option():
    task = task_of(JOB, EVERY_OPTION)
    assert task["num_nodes"] == 2
    assert task["resources"] == {
        "infra": "gcp/us-central1",
        "accelerators": "H100:8",
        "cpus": "96+",
        "memory": "900+",
        "image_id": "docker:example/prep:1",
        "use_spot": True,
        "job_recovery": {"recover_on_exit_codes": [75]},
    }
    assert task["envs"] == {"A": "b c"}
    assert task["file_mounts"] == {"/bucket": {"source": "gs://some-data", "mode": "MOUNT"}}


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(recipe_text=texts, arguments=st.lists(words, max_size=3))
def test_sky_nodes_train_with_the_recipe(recorders: Path, recipe_text: str, arguments: list[str]):
    job = LaunchJob(command=train_command("r/my run.toml", arguments), name="run")
    task = task_of(job, {"nodes": 2}, recipe_text)
    done = run_script(
        task["run"],
        recorders,
        SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
        SKYPILOT_NUM_NODES="2",
        SKYPILOT_NODE_RANK="1",
    )
    recipe = recorders / ".prep-launch" / "my run.toml"
    assert done.words_of("prep") == [["train", str(recipe), *arguments]]
    assert recipe.read_bytes() == recipe_text.encode()
    place = {
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:11111",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }
    assert done.variables_of("prep").items() >= place.items()


EXPORT = LaunchedCommand(name="export", arguments=("a b",), has_shares=True)


@pytest.mark.parametrize(
    ("code", "reported"), [(0, 0), (1, 1), (2, 2), (75, 75), (130, 130), (137, 75), (143, 75)]
)
def test_sky_node_exits_with_75_after_a_kill(recorders: Path, code: int, reported: int):
    """137 would be ambiguous: SkyPilot reports it for all other nodes after an error of one."""
    script = task_of(LaunchJob(command=EXPORT, name="job"), {})["run"]
    done = run_script(script, recorders, codes={"prep": [code]})
    assert (done.code, done.words_of("prep")) == (reported, [["export", "a b"]])


def test_sky_node_runs_the_command_in_the_shell_of_the_setup(recorders: Path):
    job = LaunchJob(command=EXPORT, name="job", setup=("A='b  c'", "export A"))
    done = run_script(task_of(job, {})["run"], recorders)
    assert done.variables_of("prep")["A"] == "b  c"


def test_sky_node_ends_after_a_failed_setup_line(recorders: Path):
    job = LaunchJob(command=EXPORT, name="job", setup=("false", "true"))
    done = run_script(task_of(job, {})["run"], recorders)
    assert (done.code, done.words_of("prep")) == (1, [])


def test_hosts_of_a_tpu_slice_divide_a_conversion(recorders: Path):
    """SkyPilot starts the command on each host of one node, and counts the hosts as nodes."""
    script = task_of(LaunchJob(command=EXPORT, name="job"), {"accelerator": "tpu-v5p-32"})["run"]
    hosts = [f"10.0.0.{i}" for i in range(4)]
    done = run_script(
        script,
        recorders,
        SKYPILOT_NODE_IPS="\n".join(hosts),
        SKYPILOT_NUM_NODES="4",
        SKYPILOT_NODE_RANK="3",
    )
    place = {"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
    assert done.variables_of("prep").items() >= place.items()


def test_hosts_of_a_tpu_slice_train_with_the_numbers_of_the_tpu():
    assert "JAX_" not in task_of(JOB, {"accelerator": "tpu-v5p-32"})["run"]


@pytest.mark.parametrize(
    ("accelerator", "runtime_version"),
    [
        ("tpu-v5p-32", "v2-alpha-tpuv5"),
        ("tpu-v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("tpu-v4-8", "tpu-ubuntu2204-base"),
    ],
)
def test_sky_task_has_the_software_of_a_tpu(accelerator: str, runtime_version: str):
    resources = task_of(JOB, {"accelerator": accelerator})["resources"]
    assert resources["accelerators"] == accelerator
    assert resources["accelerator_args"] == {"runtime_version": runtime_version}


@pytest.mark.parametrize(
    ("values", "accelerators"),
    [
        ({"accelerator": "H100"}, "H100:1"),
        ({"accelerator": "H100:8"}, "H100:8"),
        ({"accelerator": "H100", "devices_per_node": 8}, "H100:8"),
        ({"accelerator": "TPU-v5p-32:1"}, "tpu-v5p-32"),
        ({"accelerator": "tpu-v5p-slice:4"}, "tpu-v5p-slice:4"),
    ],
)
def test_sky_task_counts_accelerators(values: dict[str, object], accelerators: str):
    assert task_of(JOB, values)["resources"]["accelerators"] == accelerators


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"devices_per_node": 8}, "is missing"),
        ({"accelerator": "H100:8", "devices_per_node": 8}, "excludes"),
        ({"accelerator": "H100:many"}, "is invalid"),
        ({"accelerator": "H100:0"}, "is invalid"),
        ({"accelerator": "tpu-v5p-32", "devices_per_node": 4}, "has no effect"),
        ({"accelerator": "tpu-v5p-32:2"}, "is invalid"),
        ({"bucket": "data"}, "is not a URL"),
    ],
)
def test_sky_task_rejects_options_that_skypilot_misreads(values: dict[str, object], message: str):
    with pytest.raises(UsageError, match=message):
        task_of(JOB, values)


@pytest.mark.parametrize("memory", ["900M", "1T", "many", "-1G"])
def test_sky_task_rejects_other_units_of_memory(memory: str):
    with pytest.raises(UsageError, match="is invalid"):
        task_of(JOB, {"mem": memory})


@pytest.mark.skipif(SKY is None, reason="needs sky")
@pytest.mark.parametrize("values", [EVERY_OPTION, {}, {"accelerator": "tpu-v5p-32"}])
def test_skypilot_accepts_the_task(values: dict[str, object], tmp_path: Path):
    assert SKY is not None
    python = Path(SKY).read_text().partition("\n")[0].removeprefix("#!")
    file = tmp_path / "job.yaml"
    file.write_text(
        sky_task(replace(JOB, recipe_text="a = 'b'\n"), with_defaults(SkyOptions, values))
    )
    done = subprocess.run(
        [python, "-c", PARSER, file],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=MAX_S,
    )
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout.splitlines()[-1])
    assert parsed["recovery"]["recover_on_exit_codes"] == [75]
    assert (parsed["nodes"], parsed["spot"]) == (values.get("nodes", 1), values.get("spot", False))
    task = task_of(JOB, values, "a = 'b'\n")
    assert parsed["run"] == task["run"]
    assert parsed["arguments"] == task["resources"].get("accelerator_args")
    assert parsed["is_slice"] == ("accelerator_args" in task["resources"])
