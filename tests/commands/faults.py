"""The commands that faults are tried on, from a model and an init checkpoint made in the folder of a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.cli import main
from tests.commands.killing import content
from tests.models import make

COMMANDS = {
    "pad-vocab": ["pad-vocab", "./model", "--multiple", "8", "--init", "mean"],
    "save-init": ["save-init", "./model", "--mesh", "1,2,4", "--pad-vocab", "auto"],
    "reshard": ["reshard", "init", "--mesh", "1,4,1"],
    "export": ["export", "init"],
}


def sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`model` and `init` in a folder, which becomes the one that one is in."""
    monkeypatch.chdir(folder)
    make(Path("model"))
    assert main(["save-init", "./model", "--out", "init", "--pad-vocab", "8", "-q"]) == 0


def whole(name: str) -> dict[str, bytes]:
    """What the command makes when nothing goes wrong."""
    assert main([*COMMANDS[name], "--out", "whole", "-q"]) == 0
    return content(Path("whole"))
