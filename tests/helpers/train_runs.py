"""Runs of `prep train` in a folder of `training_folder`: their settings, their output and their files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from trainer.training.metrics import METRICS_FILE, read_metrics


def set_keys(*settings: str) -> list[str]:
    """Return the options that set keys of a recipe."""
    return [word for setting in settings for word in ("--set", setting)]


def train_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Run `prep train recipe.toml --json`; return its exit code and its JSON."""
    code = main(["train", "recipe.toml", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def train_error(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str, str]:
    """Run `prep train` that fails; return its exit code, and what failed, why, and the hint."""
    capsys.readouterr()
    code, report = train_json(capsys, *words)
    error = report["error"]
    assert error["code"] == code
    return code, error["what"], error["why"], error["hint"]


def read_losses(run: str) -> list[float]:
    """Return the logged loss of each step."""
    return [line["loss"] for line in read_metrics(Path(run) / METRICS_FILE) if "loss" in line]


def read_step_files(run: str, step: int = 12) -> dict[str, bytes]:
    """Return the content of each file of a step."""
    folder = Path(run) / str(step)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def start_train(*words: str, **variables: str) -> subprocess.Popen[str]:
    """Start `prep train` in a process with 8 devices."""
    command = [sys.executable, "-m", "prepcli", "train", "recipe.toml", "--json", *words]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", **variables}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_step(running: subprocess.Popen[str], run: str, step: int) -> None:
    """Wait until a running process has logged a number of steps."""
    while running.poll() is None and len(read_losses(run)) < step:
        time.sleep(0.01)
