"""Lanes: several pipelines of one process write the bytes of one."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.observer import NullProgress
from prepcli.engine import budget
from prepcli.engine.pipeline import Pipeline
from prepcli.execution import folder_converter
from prepcli.restore import digest_checks
from tests.helpers.damage import tensor_byte_ranges
from tests.helpers.faults import COMMANDS, FaultSources, run_until_killed
from tests.helpers.killing import read_files
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.prepcli.commands.operations.test_faults import fail_calls, run_failing_command
from tests.prepcli.restore.test_checked_reads import flip_bit

CAST = ("save-init", "./model", "--mesh", "1,2,4", "--pad-vocab", "8", "--dtype", "bfloat16")
NUM_LANES = 3


@pytest.fixture(autouse=True)
def lane_counts(sources: FaultSources, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give each run three lanes, and return the number of lanes of each run."""
    for command in (*COMMANDS.values(), CAST):
        sources.expected(command)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(NUM_LANES)))
    monkeypatch.setattr(budget, "MIN_LANE_NBYTES", 1)
    counts: list[int] = []
    real = folder_converter.run_pipelines

    def run_pipelines(pipelines: Sequence[Pipeline]) -> None:
        counts.append(len(pipelines))
        real(pipelines)

    for module in (folder_converter, digest_checks):
        monkeypatch.setattr(module, "run_pipelines", run_pipelines)
    return counts


@pytest.mark.parametrize(
    "command",
    [*slow_except(COMMANDS.values(), [COMMANDS["export"]]), CAST],
    ids=[*COMMANDS, "cast"],
)
def test_lanes_write_the_bytes_of_one_pipeline(
    sources: FaultSources, lane_counts: list[int], command: Sequence[str]
):
    run_ok(*command, "--out", "out")
    assert lane_counts == [NUM_LANES]
    assert read_files(Path("out")) == sources.expected(command)


@pytest.mark.parametrize(
    "command",
    [COMMANDS["export"], pytest.param(CAST, marks=pytest.mark.slow)],
    ids=["export", "cast"],
)
def test_killed_lanes_are_resumed(
    sources: FaultSources,
    lane_counts: list[int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: Sequence[str],
):
    partial = run_until_killed(monkeypatch, command, syncs=6)
    flip_written_bytes(partial)
    assert main([*command, "--out", "out", "--progress", "none"]) == 0
    assert "resuming out.partial" in capsys.readouterr().err
    assert read_files(Path("out")) == sources.expected(command)
    assert lane_counts == [NUM_LANES, NUM_LANES]


def flip_written_bytes(partial: Path) -> None:
    """Flip a bit in the middle of each data file of a staging folder."""
    folder = next(each for each in (partial / "d", partial) if each.is_dir())
    for path in folder.iterdir():
        if path.is_file() and path.stat().st_size > 1:
            flip_bit(path, path.stat().st_size // 2)


@pytest.mark.parametrize("call", slow_except(["preadv", "pwritev"], ["pwritev"]))
def test_error_of_one_lane_ends_the_others(
    sources: FaultSources,
    lane_counts: list[int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
):
    with monkeypatch.context() as patched:
        fail_calls(patched, call, 9, errno.EIO)
        assert "Input/output error" in run_failing_command(capsys, "export")
    run_ok(*COMMANDS["export"], "--out", "out")
    assert read_files(Path("out")) == sources.expected(COMMANDS["export"])
    assert lane_counts == [NUM_LANES, NUM_LANES]


class SlowCounter(NullProgress):
    """A Progress that loses counts if two threads advance it at the same time."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.task = ""
        self.threads: set[int] = set()

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        self.task = task
        self.counts[task] = done_bytes - total_bytes

    def advance(self, written_bytes: int) -> None:
        count = self.counts[self.task]
        time.sleep(0.001)
        self.counts[self.task] = count + written_bytes
        self.threads.add(threading.get_ident())


def test_progress_counts_the_bytes_of_all_lanes():
    progress = SlowCounter()
    prep.export("init", "out", progress=progress)
    assert progress.counts["export"] == 0
    assert len(progress.threads) > 1


def test_lanes_verify_each_tensor(lane_counts: list[int], capsys: pytest.CaptureFixture[str]):
    run_ok("pad-vocab", "model", "--multiple", "8", "--out", "padded")
    run_ok("verify", "padded")
    assert lane_counts == [NUM_LANES, NUM_LANES]
    path = next(Path("padded").glob("*.safetensors"))
    for name, start, stop in [*tensor_byte_ranges(path)][::9]:
        flip_bit(path, (start + stop) // 2)
        capsys.readouterr()
        assert main(["verify", "padded"]) == 1
        assert f"({name}) rows" in capsys.readouterr().err
        flip_bit(path, (start + stop) // 2)


def test_compressed_source_has_one_lane(lane_counts: list[int]):
    """The cache of its decoded chunks needs all memory. The read stage is the calling thread, which signals end."""
    run_ok("save-init", "./model", "--pad-vocab", "8", "--compress", "zstd", "--out", "packed")
    run_ok("verify", "packed")
    run_ok("reshard", "packed", "--mesh", "1,1,2", "--out", "out")
    assert lane_counts == [1, 1, 1]
