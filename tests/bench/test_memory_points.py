"""Tests of the recorded memory plans of training steps; the estimate's own tests compare it with them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench import memory_points
from bench.memory_points import MIB, POINTS, MemoryPoint, has_changed
from bench.model_configs import MODEL_CONFIGS
from tests.helpers.slow_cases import slow_except
from tools.import_graph import ROOT

TINY = "--dtype float32 --kernel reference --ffn-chunk -1 --tokens 16 --head-chunk 16"


def test_points_are_distinct():
    assert len({(point.flags, point.is_whole) for point in POINTS}) == len(POINTS)


@pytest.mark.parametrize(("mib", "expected"), [(100, False), (102, False), (103, True), (97, True)])
def test_has_changed_allows_2_percent(mib: int, expected: bool):
    assert has_changed(MemoryPoint(TINY, 100), mib * MIB) == expected


def test_main_compares_a_compiled_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(MODEL_CONFIGS, "small", MODEL_CONFIGS["small"] | {"hidden_size": 64})
    points = [MemoryPoint(TINY, 1, is_whole=False), MemoryPoint("--tokens 17", 1)]
    monkeypatch.setattr(memory_points, "POINTS", points)
    assert memory_points.main(["--only", "--tokens 16 "]) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"{TINY} (gradients)")
    recorded, compiled, estimated, _ = map(
        float, line.split("(gradients)")[1].replace(",", "").split()
    )
    assert recorded == 1
    assert compiled > 1
    assert estimated > 1


@pytest.mark.parametrize("count", slow_except([2, len(POINTS)], [2]))
def test_main_returns_0_if_plans_are_as_recorded(count: int, monkeypatch: pytest.MonkeyPatch):
    def recorded_nbytes(point: MemoryPoint) -> int:
        return point.recorded_mib * MIB

    monkeypatch.setattr(memory_points, "POINTS", POINTS[:count])
    monkeypatch.setattr(memory_points, "compiled_nbytes", recorded_nbytes)
    assert memory_points.main([]) == 0


@pytest.mark.slow
def test_plans_are_as_recorded():
    """XLA_FLAGS of the test suite change the plans."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "bench.memory_points"]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr[-2000:]
