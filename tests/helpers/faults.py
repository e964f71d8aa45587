"""The commands that faults are tried on, from a model and an init checkpoint made in the folder of a test."""

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
    """`model` and `init` in a folder, which becomes the one that one is in."""
    monkeypatch.chdir(folder)
    make_checkpoint(Path("model"))
    assert main(["save-init", "./model", "--out", "init", "--pad-vocab", "8", "-q"]) == 0


def expected_output(name: str) -> dict[str, bytes]:
    """What the command makes when nothing goes wrong."""
    assert main([*COMMANDS[name], "--out", "whole", "-q"]) == 0
    return read_files(Path("whole"))


class Killed(BaseException):
    """Stands for a kill."""


def kill(*args: object, **more: object) -> None:
    """End a run as SIGKILL would, in place of any function."""
    raise Killed


def run_until_killed(monkeypatch: pytest.MonkeyPatch, command: Sequence[str], *, syncs: int) -> Path:
    """Return the staging folder of a run that was killed after so many syncs."""
    real, counted = Files.sync, iter(range(syncs))

    def sync(files: Files) -> None:
        if next(counted, None) is None:
            raise Killed
        real(files)

    with monkeypatch.context() as patched:
        patched.setattr(Files, "sync", sync)
        patched.setattr(pipeline, "MOST_UNSYNCED_NBYTES", 10_000)
        with pytest.raises(Killed):
            main([*command, "--out", "out", "-q"])
    assert Path("out.partial/.prep/journal.0").read_bytes().count(b"\n") > syncs
    return Path("out.partial")
