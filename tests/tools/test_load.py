"""`python -m tools.load`: the load ends with the command, also by a signal, and leaves no files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools import load

# Waits until a second file of a writer is seen, prints the sessions of its siblings, and then waits for its end.
COMMAND = """
import os, sys, time
from pathlib import Path

def children():
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == os.getppid():
                yield int(entry.name), int(fields[3])

while len(list(Path(sys.argv[1]).glob("*/*"))) < 2 or not all(pid == session for pid, session in children()):
    time.sleep(0.01)
print(*(pid for pid, _ in children()), flush=True)
sys.stdin.read()
"""


def start_load(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a command beside one loop and two writers; return it and the ids of the three processes."""
    words = [
        sys.executable,
        "-m",
        "tools.load",
        "--loops",
        "1",
        "--writers",
        "2",
        "--folder",
        str(folder),
        "--",
    ]
    process = subprocess.Popen(
        [*words, sys.executable, "-c", COMMAND, str(folder)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    ids = [int(word) for word in process.stdout.readline().split()]
    assert len(ids) == 3
    return process, ids


def check_nothing_is_left(folder: Path, ids: list[int]) -> None:
    assert list(folder.iterdir()) == []
    for pid in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_load_ends_with_the_command(tmp_path: Path) -> None:
    process, ids = start_load(tmp_path)
    _, stderr = process.communicate("")
    assert process.returncode == 0
    assert stderr.splitlines()[-1] == "1 of 1 passed"
    check_nothing_is_left(tmp_path, ids)


def test_load_ends_by_a_signal(tmp_path: Path) -> None:
    process, ids = start_load(tmp_path)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    check_nothing_is_left(tmp_path, ids)


def test_run_times_counts_runs_that_passed(tmp_path: Path) -> None:
    lines: list[str] = []
    folder = str(tmp_path / "f")
    second_fails = f"import os, sys; sys.exit(os.path.exists({folder!r}) or os.mkdir({folder!r}))"
    assert load.run_times([sys.executable, "-c", second_fails], 2, lines.append) == 1
    assert lines[0].startswith("run 1 of 2 passed after ")
    assert lines[1].startswith("run 2 of 2 failed with status 1 after ")
    assert lines[2] == "1 of 2 passed"
