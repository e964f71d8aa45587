"""Standard streams that are closed, full or unread, and folders that are gone, as a shell hands them to prep."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prepcli.console.stdio import is_reader_gone

LOST = "error: cannot write the result to stdout"
CASES = [
    ("models", ">/dev/full", 1, LOST),
    ("models --json", ">/dev/full", 1, LOST),
    ("--help", ">/dev/full", 1, LOST),
    ("models", ">&-", 1, LOST),
    ("--version", ">&-", 1, LOST),
    ("models zzz", ">&-", 2, "error: no aliases of family `zzz`"),
    ("models zzz", "2>&-", 2, ""),
    ("models zzz", "2>/dev/full", 2, ""),
    ("models", "2>/dev/full", 0, ""),
    ("models", ">&- 2>&-", 1, ""),
    ("models", "<&- >/dev/full 2>/dev/full", 1, ""),
]


def _shell(command: str, folder: Path) -> tuple[int, str]:
    """Run a command line in which `prep` stands for this one; return its exit code and stderr."""
    line = command.replace("prep ", f"{sys.executable} -m prepcli ")
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(("command", "redirection", "code", "told"), CASES)
def test_lost_output_is_one_error(command: str, redirection: str, code: int, told: str, tmp_path: Path) -> None:
    found, err = _shell(f"prep {command} {redirection}", tmp_path)
    assert (found, err.splitlines()[0] if told else err) == (code, told)
    assert "Traceback" not in err


def test_a_pipe_into_head_ends_with_0(tmp_path: Path) -> None:
    assert _shell("set -o pipefail; prep models | head -1", tmp_path) == (0, "")


def test_no_file_gets_the_descriptor_of_a_closed_stream(tmp_path: Path) -> None:
    opening = "open_closed(); print(os.open('x', os.O_CREAT), file=open('y', 'w'))"
    script = f"import os; from prepcli.console.stdio import open_closed; {opening}"
    subprocess.run(["bash", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, script], cwd=tmp_path, check=True)
    assert int((tmp_path / "y").read_text()) > 2


def test_a_deleted_folder_is_named(tmp_path: Path) -> None:
    code, err = _shell("mkdir gone; cd gone; rmdir ../gone; prep save-init ./m", tmp_path)
    assert (code, err.splitlines()[0]) == (1, "error: the current folder cannot be used")


def test_a_bug_is_told_where_no_traceback_can_be_saved(tmp_path: Path) -> None:
    script = "from prepcli.console.ui import as_prep_error; print(as_prep_error(KeyError('x')).hint)"
    command = [sys.executable, "-c", f"import tempfile; tempfile.tempdir = '/nonexistent'; {script}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "please report what `PREP_TRACEBACK=1` shows\n"


def test_characters_beyond_the_encoding_are_escaped(tmp_path: Path) -> None:
    script = "import sys; from prepcli.console.stdio import spell_out_unencodable as s; s(); print('\\u2502')"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env={"PYTHONIOENCODING": "ascii"}, check=True
    )
    assert done.stdout == b"\\u2502\n"


def test_streams_without_a_descriptor_are_not_unread(capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_reader_gone(sys.stdout)
