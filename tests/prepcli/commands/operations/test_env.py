"""`prep env`, in separate processes, because huggingface_hub reads the variables on import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.about import read_environment
from prepcli.commands.rendering.runs import environment_report
from tests.helpers.fork_server import PREP, run_python


def env(*, list_devices: bool) -> Report:
    return environment_report(read_environment("512MiB", list_devices=list_devices))


PREFIXES = ("HF_", "PREP_", "HUGGING", "XDG_", "TRANSFORMERS_", "NO_COLOR")


def settings_with(**variables: str) -> tuple[dict[str, tuple[str, str]], str]:
    """Return each setting's value and source, and all output."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}
    process = run_python(PREP, "env", "--json", env={**inherited, **variables})
    assert process.returncode == 0
    settings = json.loads(process.stdout)["settings"]
    return {
        setting["name"]: (setting["value"], setting["source"]) for setting in settings
    }, process.stdout + process.stderr


def test_env_settings_name_their_source(tmp_path: Path) -> None:
    home = str(tmp_path)
    settings, _ = settings_with(HF_HOME=home, PREP_MEMORY="1GiB", HF_HUB_OFFLINE="1")
    assert settings["HF_HOME"] == (home, "HF_HOME")
    assert settings["HF_HUB_CACHE"] == (f"{home}/hub", "HF_HOME")
    assert settings["PREP_MEMORY"] == ("1GiB", "PREP_MEMORY")
    assert settings["PREP_PROGRESS"] == ("auto", "default")
    assert settings["HF_HUB_OFFLINE"] == ("1", "HF_HUB_OFFLINE")
    assert settings["HF_TOKEN"] == ("-", "default")


def test_env_hides_the_token(tmp_path: Path) -> None:
    settings, printed = settings_with(HF_HOME=str(tmp_path), HF_TOKEN="hf_secret")
    assert settings["HF_TOKEN"] == ("(set, not shown)", "HF_TOKEN")
    assert "hf_secret" not in printed
    (tmp_path / "token").write_text("hf_secret")
    settings, printed = settings_with(HF_HOME=str(tmp_path))
    assert settings["HF_TOKEN"] == ("(set, not shown)", str(tmp_path / "token"))
    assert "hf_secret" not in printed


SLURM_TASK = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "n[3-6]",
    "SLURM_JOB_ID": "7",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {},
            {
                "launcher": None,
                "count": 1,
                "index": 0,
                "reason": "no variable of a launcher is set",
            },
        ),
        (
            SLURM_TASK,
            {"launcher": "SLURM", "count": 4, "index": 3, "address": "n3:61447", "devices": "all"},
        ),
        ({"JAX_NUM_PROCESSES": "2"}, {"launcher": None, "count": None, "index": None}),
    ],
)
def test_env_shows_processes(
    variables: dict[str, str], expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in os.environ:
        if name.startswith(("JAX_", "SLURM_", "OMPI_", "TPU_")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    report = env(list_devices=False)
    processes = report.fields["processes"]
    assert isinstance(processes, dict)
    assert expected.items() <= processes.items()
    assert str(processes["reason"]) in report.text


def test_env_does_not_import_jax_by_default() -> None:
    script = (
        "import sys; from prepcli.commands.operations.about import read_environment;"
        " environment = read_environment('512MiB', list_devices=False);"
        "print(environment.devices, 'jax' in sys.modules, 'torch' in sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert process.stdout == "None False False\n"


def test_env_lists_devices_on_request() -> None:
    jax = pytest.importorskip("jax")
    report = env(list_devices=True)
    devices: Any = report.fields["devices"]
    assert len(devices) == len(jax.local_devices())
    assert next(iter(devices)) in report.text


def test_env_shows_why_there_are_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")

    def fail() -> None:
        raise AssertionError

    monkeypatch.setattr(jax, "local_devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    report = env(list_devices=True)
    assert report.fields["devices"] == {
        "none": "jax: JAX_PLATFORMS=cuda names a platform that is not installed"
    }


def test_env_text_lists_missing_packages_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prepcli.core.PACKAGES", ("typer", "no-such-package"))
    lines = env(list_devices=False).text.splitlines()
    assert "no-such-package  not installed" in lines
    assert any(line.startswith("total ") for line in lines)
    assert "not listed  `prep env --devices` imports jax" in lines
