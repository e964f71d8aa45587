"""Drivers of Ray jobs: their words, and the processes of their workers."""

from __future__ import annotations

import ast
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import FAILED, UsageError
from prepcli.core.option_spec import with_defaults
from prepcli.launch.job import LaunchedCommand, LaunchJob
from prepcli.launch.ray import RayOptions, ray_driver
from prepcli.launch.ray_worker import ExitCode, RayCommand, RestartError, check_ray_version
from tests.helpers.launched_jobs import train_command

TRAINING = LaunchJob(
    command=train_command("r/run.toml", ["--set", "a='b'"]),
    name="run",
    env=(("A", "b\nc"),),
    max_restarts=7,
)
CONVERSION = LaunchJob(
    command=LaunchedCommand(name="save-init", arguments=("my model",), has_shares=True),
    name="convert",
    max_restarts=7,
)
TPUS = {
    "workers": 4,
    "tpus": 4,
    "accelerator": "TPU-V6E",
    "topology": "4x4",
    "cpus": 8,
    "folder": "/shared",
}


def call_arguments(driver: str, function: str) -> dict[str, Any]:
    """Return the literal arguments of the call of a function in a driver."""
    for node in ast.walk(ast.parse(driver)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
            literals = (keyword for keyword in node.keywords if is_literal(keyword.value))
            return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in literals}
    raise AssertionError(f"no call of {function}")


def is_literal(node: ast.expr) -> bool:
    """Return whether an expression calls nothing."""
    return not any(isinstance(part, ast.Call | ast.Name) for part in ast.walk(node))


def test_driver_of_a_training_has_every_value():
    driver = ray_driver(replace(TRAINING, recipe_text="x = 'y'\n"), with_defaults(RayOptions, TPUS))
    assert call_arguments(driver, "RayCommand") == {
        "name": "train",
        "arguments": ("--set", "a='b'"),
        "recipe_name": "run.toml",
        "recipe_text": "x = 'y'\n",
        "folder": "/shared",
        "env": {"A": "b\nc"},
    }
    assert call_arguments(driver, "ScalingConfig") == {
        "num_workers": 4,
        "resources_per_worker": {"CPU": 8, "TPU": 4},
        "placement_strategy": "SPREAD",
        "use_tpu": True,
        "accelerator_type": "TPU-V6E",
        "topology": "4x4",
    }
    assert call_arguments(driver, "RunConfig") == {"name": "run", "storage_path": "/shared/.ray"}
    assert call_arguments(driver, "FailureConfig") == {"max_failures": 7}


def test_driver_without_accelerators_trains_on_cpus():
    driver = ray_driver(TRAINING, with_defaults(RayOptions, {}))
    assert call_arguments(driver, "RayCommand")["env"] == {"A": "b\nc", "JAX_PLATFORMS": "cpu"}


def test_driver_of_a_conversion_restarts_a_share():
    values = {"workers": 3, "cpus": 2, "gpus": 1, "accelerator": "L4"}
    options = with_defaults(RayOptions, values)
    driver = ray_driver(CONVERSION, options)
    assert call_arguments(driver, "ray.remote") == {
        "num_cpus": 2,
        "num_gpus": 1,
        "accelerator_type": "L4",
        "max_retries": 7,
        "scheduling_strategy": "SPREAD",
    }
    assert "SHARES = 3\n" in driver


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"gpus": 1, "tpus": 4}, "excludes"),
        ({"tpus": 4, "topology": "4x4"}, "is missing"),
        ({"tpus": 4, "accelerator": "TPU-V6E"}, "is missing"),
        ({"gpus": 4, "topology": "4x4"}, "for TPUs only"),
    ],
)
def test_devices_that_ray_refuses_are_usage_errors(values: dict[str, object], what: str):
    with pytest.raises(UsageError, match=what):
        ray_driver(TRAINING, with_defaults(RayOptions, values))


def test_conversion_on_tpus_is_a_usage_error():
    with pytest.raises(UsageError, match="`prep save-init` computes on CPUs"):
        ray_driver(CONVERSION, with_defaults(RayOptions, TPUS))


@pytest.mark.parametrize("values", [TPUS, {"workers": 2, "gpus": 8, "accelerator": "H100"}])
def test_ray_accepts_the_scaling(values: dict[str, object]):
    pytest.importorskip("ray.train")
    from ray.train.v2.api.config import (  # pyright: ignore[reportMissingImports]
        ScalingConfig,
    )

    driver = ray_driver(TRAINING, with_defaults(RayOptions, values))
    scaling = ScalingConfig(**call_arguments(driver, "ScalingConfig"))
    assert scaling.num_workers == values["workers"]


@pytest.mark.parametrize("version", ["2.49.2", "1.13.0"])
def test_old_ray_ends_with_one_message(version: str):
    with pytest.raises(SystemExit, match=f"error: Ray {version} is not supported"):
        check_ray_version(version)


@pytest.mark.parametrize("version", ["2.50.0", "2.60.0", "3.0.0.dev0"])
def test_new_ray_is_accepted(version: str):
    check_ray_version(version)


class Recorded:
    """Recorder in place of `subprocess.run`, with a fixed exit code."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.recipe = ""
        self.words: list[str] = []
        self.env: dict[str, str] = {}

    def run(self, words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Record a call, with the text of a recipe as the third word of prep."""
        self.words = words[3:]
        self.env = options["env"]
        for word in self.words:
            if word.endswith(".toml"):
                self.recipe = Path(word).read_text()
        return subprocess.CompletedProcess(words, self.code)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    record = Recorded(0)
    monkeypatch.setattr(subprocess, "run", record.run)
    return record


def test_worker_trains_with_a_copy_of_the_recipe(recorded: Recorded):
    command = RayCommand(
        name="train", arguments=("--force",), recipe_name="run.toml", recipe_text="x = 1\n"
    )
    assert command.run_together(1, 2, "10.0.0.1:5") == 0
    assert recorded.recipe == "x = 1\n"
    assert recorded.words[2:] == ["--force"]
    place = {
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:5",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }
    assert recorded.env.items() >= place.items()


def test_worker_writes_its_share(recorded: Recorded):
    command = RayCommand(name="save-init", arguments=("m",))
    command.run_share(1, 4)
    assert recorded.words == ["save-init", "--processes", "4/1", "m"]
    command.run_share(0, 1)
    assert recorded.words == ["save-init", "m"]


def test_worker_shares_the_data_of_a_recipe(recorded: Recorded):
    command = RayCommand(name="tokenize", recipe_name="run.toml", recipe_text="x = 1\n")
    command.run_share(1, 4)
    assert recorded.words[:3] == ["tokenize", "--processes", "4/1"]
    assert recorded.recipe == "x = 1\n"


@pytest.mark.parametrize("code", [75, -signal.SIGKILL, -signal.SIGTERM])
def test_stopped_process_is_started_again(recorded: Recorded, code: int):
    recorded.code = code
    with pytest.raises(RestartError, match="resumes"):
        RayCommand(name="save-init", arguments=("m",)).run_share(0, 1)


@pytest.mark.parametrize(
    ("code", "reported"), [(0, 0), (1, 1), (2, 2), (130, 130), (-signal.SIGINT, 130)]
)
def test_other_exit_codes_end_the_job(recorded: Recorded, code: int, reported: int):
    recorded.code = code
    assert RayCommand(name="save-init", arguments=("m",)).run_share(0, 1) == reported


def test_missing_folder_ends_the_job(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command = RayCommand(name="save-init", arguments=("m",), folder=str(tmp_path / "none"))
    assert command.run_share(0, 1) == FAILED
    assert recorded.words == []
    assert "none` is no folder on" in capsys.readouterr().err


def test_exit_code_of_a_job_is_the_first_failure():
    exit_code = ExitCode()
    for code in (0, 1, 2, 0):
        exit_code.record(code)
    assert exit_code.get() == 1
