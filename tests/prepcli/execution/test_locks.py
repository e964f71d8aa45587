"""Locks: they name their holder, and end with its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prepcli.errors import PrepError
from prepcli.execution.locks import acquire_lock

TAKE = """
import sys
from pathlib import Path

from prepcli.execution.locks import acquire_lock

acquire_lock(Path(sys.argv[1]), Path("run"))
"""


def test_lock_excludes_other_processes(tmp_path: Path):
    path = tmp_path / ".lock"
    path.write_text("something longer than what is written there, of an earlier process on another machine\n" * 2)
    fd = acquire_lock(path, Path("run"))
    with pytest.raises(PrepError, match="run is locked") as caught:
        acquire_lock(path, Path("run"))
    assert f"another process works on it: process {os.getpid()} on " in caught.value.why
    assert "earlier" not in caught.value.why
    process = subprocess.run([sys.executable, "-c", TAKE, path], capture_output=True, text=True, check=False)
    assert "run is locked" in process.stderr
    os.close(fd)
    os.close(acquire_lock(path, Path("run")))


def test_lock_ends_with_its_process(tmp_path: Path):
    subprocess.run([sys.executable, "-c", TAKE, tmp_path / ".lock"], check=True)
    os.close(acquire_lock(tmp_path / ".lock", Path("run")))
