"""`python -m tools.load` and `python -m tools.trace`, which run a command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from prepcli.algebra.boxes import Box, intersection, strides, volume
from tests.helpers.hf_folders import write_hf_folder
from tools import load, trace

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


BOX: Box = ((0, 2), (0, 3))
VOLUME = "prepcli.algebra.boxes.volume"
INTERSECTION = "prepcli.algebra.boxes.intersection"


def test_tracer_counts_calls_by_path() -> None:
    with trace.Tracer() as tracer:
        volume(BOX)
        volume(BOX)
    assert [(call.function, call.count) for _, call in tracer.root.walk()] == [(VOLUME, 2)]
    assert tracer.modules == {"prepcli.algebra.boxes"}
    assert trace.summary_line(tracer) == "1 functions in 1 modules, 1 frames deep"


def test_tracer_records_threads() -> None:
    with trace.Tracer() as tracer:
        thread = threading.Thread(target=volume, args=(BOX,))
        thread.start()
        thread.join()
    assert trace.count_callers(tracer.root, "volume") == {"": 1}


def test_tracer_leaves_out_comprehensions_and_classes() -> None:
    with trace.Tracer() as tracer:
        volumes = [volume(box) for box in (BOX, BOX)]

        class _Unused:
            """A class body is a frame, too."""

    assert volumes == [6, 6]
    assert [call.function for _, call in tracer.root.walk()] == [VOLUME]


def test_tracer_pops_functions_that_raise() -> None:
    with trace.Tracer() as tracer:
        with pytest.raises(TypeError):
            strides(3)  # pyright: ignore[reportArgumentType]
        volume(BOX)
    assert trace.count_callers(tracer.root, "volume") == {"": 1}


def test_callees_stand_below_their_callers() -> None:
    with trace.Tracer() as tracer:
        intersection(BOX, BOX)
    assert list(trace.tree_lines(tracer.root)) == [
        f"1 x {INTERSECTION}",
        "  2 x prepcli.algebra.boxes.intersect",
    ]
    assert trace.count_callers(tracer.root, "intersect") == {INTERSECTION: 2}
    assert trace.deepest_stack(tracer.root) == [INTERSECTION, "prepcli.algebra.boxes.intersect"]


def test_functions_are_counted_by_package() -> None:
    with trace.Tracer() as tracer:
        volume(BOX)
        intersection(BOX, BOX)
        trace.summary_line(tracer)
    assert trace.count_by_package(tracer.root) == {"prepcli.algebra": 3}


def test_command_runs_and_its_trace_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_hf_folder(tmp_path / "empty", {}, {"model_type": "gpt2"})
    code = trace.main(["--tree", "--packages", "prep", "inspect", str(folder)])
    lines = capfd.readouterr().out.splitlines()
    assert code == 1
    assert re.fullmatch(r"\d+ functions in \d+ modules, \d+ frames deep", lines[-1])
    assert "1 x prepcli.commands.cli.main.main" in lines
    (count,) = [line.split()[0] for line in lines if line.endswith(" in prepcli.commands")]
    assert int(count) > 1


def test_other_commands_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        trace.main(["ls"])
    assert "must begin with `prep`" in capsys.readouterr().err
