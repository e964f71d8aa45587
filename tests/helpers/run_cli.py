"""Functions that run commands in this process and check their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from tests.helpers.tiny_checkpoints import read_tensors

# Types of the fixtures `capsys` and `monkeypatch`.
Capture = pytest.CaptureFixture[str]
MonkeyPatch = pytest.MonkeyPatch


def run_ok(*words: str) -> None:
    """Run a command that succeeds."""
    assert main([*words, "-q"]) == 0


def run_code(*words: str) -> int:
    """Run a command and return its exit code."""
    return main([*words, "-q"])


def exported_tensors(source: str) -> dict[str, np.ndarray]:
    """Export a source to a new folder `exported`, and read it with the safetensors library."""
    run_ok("export", source, "--out", "exported", "--overwrite")
    return read_tensors(Path("exported"))


def run_failing(capsys: Capture, code: int, *words: str) -> str:
    """Run a command that exits with `code`; return stderr."""
    capsys.readouterr()
    assert main([*words, "-q"]) == code
    return capsys.readouterr().err


def error_lines(capsys: Capture, *words: str) -> list[str]:
    """Run a command that fails; return the lines of its error."""
    assert main([*words, "-q"]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err.splitlines()


def run_json(capsys: Capture, *words: str) -> dict[str, Any]:
    """Run a command and return its JSON."""
    capsys.readouterr()
    assert main([*words, "--json"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


def _file_stats(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of change of each file in a folder."""
    return {
        str(p): (p.stat().st_size, p.stat().st_mtime_ns)
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def run_failing_unchanged(capsys: Capture, *args: str) -> tuple[int, list[str]]:
    """Run a command that fails without changing any file; return its exit code and the lines of its error."""
    before = _file_stats(Path())
    code = main([*args, "-q"])
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert {
        k: v for k, v in _file_stats(Path()).items() if ".partial" not in k or k in before
    } == before
    lines = err.splitlines()
    assert lines[0].startswith("error: ")
    return code, lines
