"""Tests of the meter: time and memory of real commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench import meter
from bench.meter import anonymous_nbytes, drop_page_cache, measure, process_tree

MIB = 1 << 20
MAP = "import mmap, sys, time; m = mmap.mmap(open(sys.argv[1]).fileno(), 0, prot=1); sum(m[::4096]); time.sleep(0.2)"
HOLD = "import sys, time; data = b'x' * (int(sys.argv[1]) << 20); time.sleep(1)"


def hold(mib: int) -> list[str]:
    """Return a command that holds `mib` MiB of memory for a second."""
    return [sys.executable, "-c", HOLD, str(mib)]


def test_measure_returns_peak_memory() -> None:
    base, cost = measure(hold(0)), measure(hold(64))
    assert 63 * MIB < cost.peak_nbytes - base.peak_nbytes < 72 * MIB
    assert cost.max_rss_nbytes > 64 * MIB


@pytest.mark.parametrize("script", ['"$@"; true', '("$@" &); sleep 1'], ids=["child", "orphan"])
def test_measure_includes_memory_of_child_processes(script: str) -> None:
    assert measure(["bash", "-c", script, "bash", *hold(64)]).peak_nbytes > 64 * MIB


def test_measure_ignores_mapped_files(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(b"x" * (64 * MIB))
    cost = measure([sys.executable, "-c", MAP, str(big)])
    assert cost.peak_nbytes < 32 * MIB
    assert cost.max_rss_nbytes > 64 * MIB


def test_measure_returns_exit_code_output_and_time() -> None:
    cost = measure(
        ["bash", "-c", "echo out; echo err >&2; for ((i = 0; i < 100000; i++)); do :; done; exit 3"]
    )
    assert (cost.exit_code, cost.stdout, cost.stderr) == (3, "out\n", "err\n")
    assert cost.cpu_s > 0
    assert cost.wall_s > 0
    assert measure(["bash", "-c", "kill -9 $$"]).exit_code == -9


def test_interrupted_measure_kills_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def interrupted(process: int, _: int) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "wait4", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(["sleep", "600"])
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_process_tree_contains_this_process() -> None:
    assert os.getpid() in process_tree(os.getpid())
    assert anonymous_nbytes(os.getpid()) > MIB
    assert anonymous_nbytes(2**22 + 1) == 0  # more than any process has


def test_drop_page_cache_evicts_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model" / "hf").mkdir(parents=True)
    files = [tmp_path / "model" / "a", tmp_path / "model" / "hf" / "b", tmp_path / "c"]
    for path in files:
        path.write_bytes(b"content")
    evicted: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *_: evicted.append(os.fstat(file).st_ino))
    monkeypatch.setattr(meter, "DROP_CACHES", tmp_path / "drop_caches")
    assert drop_page_cache([tmp_path / "model", tmp_path / "c"]) == "drop_caches"
    assert sorted(evicted) == sorted(path.stat().st_ino for path in files)
    assert (tmp_path / "drop_caches").read_text() == "1"
    monkeypatch.setattr(meter, "DROP_CACHES", tmp_path / "absent" / "drop_caches")
    assert drop_page_cache([tmp_path / "c"]) == "fadvise"
