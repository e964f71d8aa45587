"""`python -m tools.trace`: functions, modules, depth and callers of a command in this process."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from prepcli.algebra.boxes import Box, intersection, strides, volume
from tests.helpers.hf_folders import write_hf_folder
from tools import trace

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
