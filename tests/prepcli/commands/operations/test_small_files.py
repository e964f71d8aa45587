"""Small files that cannot be copied stop a conversion before any weights are read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK
from prepcli.engine.pipeline import Pipeline
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint

COMMANDS = {
    "save-init": ["save-init", "model", "--mesh", "1,1,1"],
    "pad-vocab": ["pad-vocab", "model", "--multiple", "8"],
    "export": ["export", "init"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_unreadable_tokenizer_fails_before_weights_are_moved(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("model"), LLAMA)
    Path("model/tokenizer.json").write_text("{}")
    assert main(["save-init", "model", "--mesh", "1,1,1", "--out", "init", "-q"]) == OK
    capsys.readouterr()
    real_open = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        # The tests may run as root, whom no permission stops.
        if os.fspath(path).endswith("tokenizer.json"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return real_open(path, *args, **options)

    def move(*args: object, **options: object) -> None:
        pytest.fail("weights were moved")

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Pipeline, "run", move)
    assert main([*command, "--out", "output", "-q"]) == FAILED
    error = capsys.readouterr().err
    assert "tokenizer.json" in error
    assert "Permission denied" in error
