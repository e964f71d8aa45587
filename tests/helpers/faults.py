"""Commands for fault tests, from a model and an init checkpoint in the folder of a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from prepcli.cli.main import main
from prepcli.engine import pipeline
from prepcli.engine.files import Files
from tests.helpers.killing import read_files
from tests.helpers.tiny_checkpoints import make_checkpoint

COMMANDS = {
    "pad-vocab": ["pad-vocab", "./model", "--multiple", "8", "--init", "mean"],
    "save-init": ["save-init", "./model", "--mesh", "1,2,4", "--pad-vocab", "auto"],
    "reshard": ["reshard", "init", "--mesh", "1,4,1"],
    "export": ["export", "init"],
}


def make_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `model` and `init` in a folder, and change to that folder."""
    monkeypatch.chdir(folder)
    make_checkpoint(Path("model"))
    assert main(["save-init", "./model", "--out", "init", "--pad-vocab", "8", "-q"]) == 0


def expected_output(name: str) -> dict[str, bytes]:
    """Return the output of the command without faults."""
    assert main([*COMMANDS[name], "--out", "whole", "-q"]) == 0
    return read_files(Path("whole"))


class Killed(BaseException):
    """Simulated SIGKILL."""


def kill(*args: object, **more: object) -> None:
    """End a run like SIGKILL, in place of any function."""
    raise Killed


def run_until_killed(monkeypatch: pytest.MonkeyPatch, command: Sequence[str], *, syncs: int) -> Path:
    """Kill a run after a number of syncs, and return its staging folder."""
    real_sync, remaining = Files.sync, iter(range(syncs))

    def sync(files: Files) -> None:
        if next(remaining, None) is None:
            raise Killed
        real_sync(files)

    with monkeypatch.context() as patched:
        patched.setattr(Files, "sync", sync)
        patched.setattr(pipeline, "MOST_UNSYNCED_NBYTES", 10_000)
        with pytest.raises(Killed):
            main([*command, "--out", "out", "-q"])
    assert Path("out.partial/.prep/journal.0").read_bytes().count(b"\n") > syncs
    return Path("out.partial")
