"""The race of loaders from a throttled bucket, and the throttled disk."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import prepcli as prep
from bench import load_race
from bench import slow_disk as slow_disk_module
from bench.load_race import Race, RaceRow, matrices_of, race_text, run_race, serve_bucket
from bench.race_loaders import COLUMNS, ROWS, SPLITS, Job, leaf_index, shard_index, word_sum
from bench.slow_disk import LIMITS, TOOLS, measure_rates, slow_disk
from bench.throttled_store import ThrottledStore, Traffic, serve_throttled
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.waiting import wait_until

FAST = float(1 << 30)
NUM_PROCESSES = 2


def fetch(url: str, key: str, span: str = "") -> bytes:
    """Return the body of an object or of a range of it."""
    request = urllib.request.Request(f"{url}/bucket/{key}")
    if span:
        request.add_header("Range", f"bytes={span}")
    with urllib.request.urlopen(request) as answer:
        return answer.read()


def sent(store: ThrottledStore) -> tuple[int, int, int]:
    """Return the requests, the bytes and the repeated bytes of a store."""
    traffic = store.traffic()
    return traffic.requests, traffic.nbytes, traffic.repeated_nbytes


def test_store_counts_requests_and_repeated_bytes(tmp_path: Path):
    (tmp_path / "file").write_bytes(bytes(range(100)))
    with serve_throttled(tmp_path, FAST, 0.0) as store:
        assert fetch(store.url, "file", "10-19") == bytes(range(10, 20))
        assert fetch(store.url, "file", "15-24") == bytes(range(15, 25))
        # The store counts the last bytes after the client has them.
        wait_until(lambda: sent(store) == (2, 20, 5))
        store.reset()
        assert fetch(store.url, "file") == bytes(range(100))
        wait_until(lambda: sent(store) == (1, 100, 0))


def test_store_lists_objects_below_a_prefix(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a").write_bytes(b"12")
    (tmp_path / "other").write_bytes(b"1")
    with serve_throttled(tmp_path, FAST, 0.0) as store:
        listing = fetch(store.url, "?list-type=2&prefix=model/").decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(store.url, "absent")
    assert "<Key>model/a</Key><Size>2</Size>" in listing
    assert "other" not in listing


def test_store_keeps_the_rate_and_the_delay(tmp_path: Path):
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    with serve_throttled(tmp_path, float(4 << 20), 0.1) as store:
        start_s = time.monotonic()
        fetch(store.url, "file")
    assert time.monotonic() - start_s >= 0.1 + 0.25


@pytest.mark.parametrize("split", SPLITS)
def test_shards_of_all_processes_are_the_matrix(split: str):
    jobs = [Job("", index, NUM_PROCESSES, split, 0, "") for index in range(NUM_PROCESSES)]
    matrix = np.arange(48, dtype=np.uint16).reshape(8, 6)
    stack = np.arange(192, dtype=np.uint16).reshape(2, 4, 4, 6)
    for name in ("q_proj", "o_proj"):
        shards = [matrix[shard_index(name, matrix.shape, job)] for job in jobs]
        assert sum(shard.size for shard in shards) == matrix.size
        assert word_sum(shards) == matrix.sum()
    for path in ("params.layers.attn.q.weight", "params.layers.attn.o.weight"):
        shards = [stack[leaf_index(path, stack.shape, job)] for job in jobs]
        assert word_sum(shards) == stack.sum()


def test_splits_take_the_dims_of_llama():
    rows = Job("", 1, NUM_PROCESSES, ROWS, 0, "")
    columns = Job("", 1, NUM_PROCESSES, COLUMNS, 0, "")
    whole = slice(None)
    assert shard_index("q_proj", (8, 6), rows) == (slice(4, 8), whole)
    assert shard_index("q_proj", (8, 6), columns) == (whole, slice(3, 6))
    assert shard_index("down_proj", (8, 6), rows) == (whole, slice(3, 6))
    assert leaf_index("params.layers.norm.scale", (2, 6), rows) == (whole, whole)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny LLaMA and its Orbax item."""
    folder = tmp_path_factory.mktemp("bucket")
    # Much larger than the first 64 KiB of each file, which prep reads for the header.
    make_checkpoint(folder / "model", LLAMA, "float16", vocab_size=1 << 14)
    prep.save_init(folder / "model", out=folder / "item")
    return folder


@pytest.fixture
def race(bucket: Path, tmp_path: Path) -> Iterator[Race]:
    """Serve the bucket slowly enough for a kill in the middle."""
    nbytes, total = matrices_of(bucket / "model")
    with serve_bucket(bucket, mib_s=2, delay_ms=1) as url:
        yield Race(url, tmp_path / "race", sys.executable, nbytes, total)


@pytest.mark.parametrize(
    "loader", slow_except(["prep, folder", "TensorStore, item"], ["TensorStore, item"])
)
def test_race_loads_every_byte_once(race: Race, loader: str):
    row = run_race(race, loader, 1, ROWS, kill=False)
    assert row.error == ""
    assert row.traffic.nbytes >= race.weights_nbytes
    assert row.traffic.repeated_nbytes < race.weights_nbytes // 4
    assert row.shard_nbytes == race.weights_nbytes
    assert row.peak_nbytes > row.start_nbytes > 0


@pytest.mark.slow
def test_load_after_a_kill_sends_bytes_twice(race: Race):
    row = run_race(race, "TensorStore, item", 1, ROWS, kill=True)
    assert row.error == ""
    assert row.again_nbytes is not None
    assert row.again_nbytes >= race.weights_nbytes // 4
    assert row.traffic.repeated_nbytes < race.weights_nbytes // 4


@pytest.mark.slow
def test_loader_that_fails_is_a_row_with_its_error(race: Race):
    row = run_race(race, "Orbax, item", 1, ROWS, kill=False)
    assert row.error != ""
    assert "error" in race_text([row])


def test_load_ends_before_memory_is_exhausted(race: Race, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load_race, "MIN_AVAILABLE_NBYTES", 1 << 60)
    row = run_race(race, "TensorStore, item", 1, ROWS, kill=False)
    assert "the machine has no more" in row.error


def test_load_ends_beyond_its_memory_limit(race: Race):
    row = run_race(
        dataclasses.replace(race, max_nbytes=1 << 20), "TensorStore, item", 1, ROWS, kill=False
    )
    assert row.error == "killed: it took more than 1.0 MiB"


def test_peak_of_a_short_load_is_at_least_the_start(monkeypatch: pytest.MonkeyPatch):
    """A load of less than SAMPLE_S has no sample."""
    sampler = load_race.MemorySampler([], max_nbytes=10)
    monkeypatch.setattr(sampler, "sample", lambda: 5)
    with sampler:
        sampler.mark_start()
    assert sampler.start_nbytes == sampler.peak_nbytes == 5


def test_other_values_are_an_error(race: Race):
    other = dataclasses.replace(race, matrix_sum=race.matrix_sum + 1)
    row = run_race(other, "TensorStore, item", 1, ROWS, kill=False)
    assert row.error == "the shards have other values than the bucket"


def test_table_is_at_most_80_columns_wide():
    traffic = Traffic(requests=99999, nbytes=8000, repeated_nbytes=7000)
    row = RaceRow(
        "TensorStore, item",
        8,
        COLUMNS,
        seconds=1000.0,
        cpu_s=1000.0,
        traffic=traffic,
        weights_nbytes=1000,
        peak_nbytes=9 << 34,
        again_nbytes=900,
    )
    assert max(map(len, race_text([row]).splitlines())) <= 80


MIB = 1 << 20


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that replaces the cgroup controller."""
    folder = tmp_path / "blkio"
    folder.mkdir()
    for limit in LIMITS:
        (folder / limit).touch()
    monkeypatch.setattr(slow_disk_module, "CONTROLLER", folder)
    monkeypatch.setattr(slow_disk_module, "_cgroup_lines", lambda: ["7:blkio:/"])
    monkeypatch.setattr(shutil, "which", lambda _: "/tool")
    return folder


def fail(work: Path, nbytes: int = MIB) -> str:
    """Return the message of the SystemExit that creating a disk raises."""
    with pytest.raises(SystemExit) as caught, slow_disk(work, 250, nbytes):
        pass
    return str(caught.value)


def test_slow_disk_names_a_missing_tool(
    controller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "losetup" else tool)
    assert fail(tmp_path) == "--slow-disk needs losetup"


def test_slow_disk_names_a_missing_controller(controller: Path, tmp_path: Path):
    (controller / LIMITS[0]).unlink()
    assert "root and the blkio controller" in fail(tmp_path)


def test_slow_disk_rejects_a_size_above_free_space(controller: Path, tmp_path: Path):
    assert "the slow disk takes 1024.00 TiB" in fail(tmp_path, 1 << 50)


def test_failed_step_removes_the_image(
    controller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(
        slow_disk_module, "_run", lambda *words: (_ for _ in ()).throw(SystemExit(f"no {words[0]}"))
    )
    assert fail(tmp_path / "work") == "no losetup"
    assert not list((tmp_path / "work").iterdir())


def test_measure_rates_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slow_disk_module, "PROBE_NBYTES", 2 * 10**6)
    measured = measure_rates(tmp_path)
    assert min(measured.copied, measured.written, measured.read) > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0
    or not all(map(shutil.which, TOOLS))
    or not (slow_disk_module.CONTROLLER / LIMITS[0]).exists(),
    reason="needs root, loop devices and the blkio controller of cgroup v1",
)
def test_slow_disk_limits_reads_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slow_disk_module, "PROBE_NBYTES", 100 * 10**6)
    with slow_disk(tmp_path, 50, 400 * MIB) as folder:
        measured = measure_rates(folder)
    assert max(measured.copied, measured.written, measured.read) < 75
    assert not list(tmp_path.iterdir())
