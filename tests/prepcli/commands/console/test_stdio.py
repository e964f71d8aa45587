"""Closed, full and unread standard streams, and deleted folders, as a shell passes them to prep."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prepcli.commands.console.stdio import is_reader_gone, library_output_hidden
from tests.helpers.slow_cases import slow_except

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
    """Run a shell command in which `prep` is this prep, and return its exit code and stderr."""
    line = command.replace("prep ", f"{sys.executable} -m prepcli ")
    process = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process.returncode, process.stderr


# Each stream once. Typer prints the help.
FAST_CASES = [CASES[index] for index in (2, 8)]


@pytest.mark.parametrize(
    ("command", "redirection", "code", "expected"), slow_except(CASES, FAST_CASES)
)
def test_lost_output_is_reported_once(
    command: str, redirection: str, code: int, expected: str, tmp_path: Path
) -> None:
    exit_code, err = _shell(f"prep {command} {redirection}", tmp_path)
    assert (exit_code, err.splitlines()[0] if expected else err) == (code, expected)
    assert "Traceback" not in err


@pytest.mark.slow
def test_pipe_into_head_exits_with_0(tmp_path: Path) -> None:
    assert _shell("set -o pipefail; prep models | head -1", tmp_path) == (0, "")


def test_open_closed_streams_reserves_the_descriptors(tmp_path: Path) -> None:
    opening = "open_closed_streams(); print(os.open('x', os.O_CREAT), file=open('y', 'w'))"
    script = f"import os; from prepcli.commands.console.stdio import open_closed_streams; {opening}"
    subprocess.run(
        ["bash", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, script],
        cwd=tmp_path,
        check=True,
    )
    assert int((tmp_path / "y").read_text()) > 2


def test_deleted_folder_is_reported(tmp_path: Path) -> None:
    code, err = _shell("mkdir gone; cd gone; rmdir ../gone; prep save-init ./m", tmp_path)
    assert (code, err.splitlines()[0]) == (1, "error: the current folder cannot be used")


def test_bug_is_reported_without_a_writable_folder(tmp_path: Path) -> None:
    script = "from prepcli.core.unexpected import as_prep_error; print(as_prep_error(KeyError('x')).hint)"
    command = [
        sys.executable,
        "-c",
        f"import tempfile; tempfile.tempdir = '/nonexistent'; {script}",
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert process.stdout == "please report what `PREP_TRACEBACK=1` shows\n"


def test_escape_unencodable_escapes_characters(tmp_path: Path) -> None:
    script = "import sys; from prepcli.commands.console.stdio import escape_unencodable as s; s(); print('\\u2502')"
    process = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert process.stdout == b"\\u2502\n"


def test_stream_without_a_descriptor_has_a_reader(capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_reader_gone(sys.stdout)


def test_library_output_hidden_keeps_stdout_for_results(capfd: pytest.CaptureFixture[str]):
    with library_output_hidden(to_stderr=False):
        os.write(1, b"dropped")
    with library_output_hidden(to_stderr=True):
        os.write(1, b"shown")
        ctypes.CDLL(None).puts(b"buffered")
    with library_output_hidden(to_stderr=False) as stdout:
        stdout.write("early ")
    os.write(1, b"result")
    assert capfd.readouterr() == ("early result", "shownbuffered\n")
