"""Compressed outputs in an object store: written from memory, resumed from the store, within the budget."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.fork_server import ForkedProcess
from tests.helpers.slow_cases import slow_except
from tests.helpers.store_sites import (
    MESH,
    WIDE,
    StoreSite,
    finish,
    read_files,
    stop_or_finish,
    wait_for_writes,
)
from tests.helpers.tiny_checkpoints import make_checkpoint
from tests.helpers.waiting import wait_until

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("small_objects")]

COMPRESS = ("reshard", "--mesh", "1,4,1", "--compress", "zstd")


@pytest.mark.parametrize("storage", slow_except(["ocdbt", "files", "zarr3-files"], ["ocdbt"]))
def test_compressed_output_is_written_from_memory(site: StoreSite, home: Path, storage: str):
    """Two processes, without a local file. TensorStore reads the objects."""
    words = ("save-init", str(home / "m"), *MESH, "--storage", storage)
    assert site.run_prep(*words, "--out", "raw", "--processes", "1/0")["ok"]
    site.store.write_faults.rate = 0.1
    running: list[ForkedProcess] = []
    for index in range(2):
        share = ("--processes", f"2/{index}", "--out", "gs://bucket/out")
        running.append(site.start_prep(*words, "--compress", "zstd:3", *share, small_files=True))
    reports = [finish(process) for process in running]
    assert [report["ok"] for report in reports] == [True, True], reports
    site.store.write_faults.rate = 0
    written = site.store.objects_below("bucket/out/")
    assert sum(map(len, written.values())) < sum(map(len, read_files(Path("raw")).values()))
    assert [path.name for path in site.cwd.iterdir()] == ["raw"]
    for path, data in written.items():
        target = Path("downloaded", path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    assert restored_bytes(Path("downloaded")) == restored_bytes(Path("raw"))
    assert site.run_prep("verify", "downloaded", str(home / "m"))["ok"]


def restored_bytes(item: Path) -> dict[str, bytes]:
    """Restore an item with Orbax, and return the bytes of its leaves."""
    ocp = pytest.importorskip("orbax.checkpoint")
    jax = pytest.importorskip("jax")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(item.absolute())
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


@pytest.mark.parametrize("count", slow_except([1, 2], [2]))
def test_killed_compression_resumes_from_the_store(site: StoreSite, home: Path, count: int):
    """An output with another memory limit, and so with other pieces, has the same bytes."""
    arguments = (*COMPRESS, str(home / "init"))
    report = site.run_prep(*arguments, "--out", "gs://bucket/whole", "--memory", "64MiB")
    assert report["ok"], report
    for num_writes in (2, 5, 0):
        site.store.received.clear()
        running: list[ForkedProcess] = []
        for index in range(count):
            share = ("--processes", f"{count}/{index}", "--out", "gs://bucket/out")
            running.append(site.start_prep(*arguments, *share, small_files=True))
        if num_writes:
            wait_for_writes(site.store, num_writes, running)
        reports = [stop_or_finish(process, kill=num_writes > 0) for process in running]
        wait_until(lambda: not site.store.num_running)
    assert all(report is not None and report["ok"] for report in reports), reports
    assert site.store.objects_below("bucket/out/") == site.store.objects_below("bucket/whole/")


@pytest.mark.parametrize("level", [pytest.param("zstd:9", marks=pytest.mark.slow), "zstd:1"])
def test_memory_of_compression_is_within_the_budget(site: StoreSite, level: str):
    """Chunks of 32 MiB, which are compressed in several pieces."""
    make_checkpoint(site.cwd / "wide", **WIDE)
    words = ("save-init", "./wide", "--mesh", "1,1,1", "--out", "gs://bucket/out")
    report = site.run_process(*words, "--compress", level, "--memory", "128MiB", small_files=True)
    assert report["ok"], report
    assert report["memory"]["peak"] <= 128 << 20


def test_compression_with_too_little_memory_is_refused(site: StoreSite, home: Path):
    words = ("save-init", str(home / "m"), "--compress", "zstd:19", "--memory", "64MiB")
    error = site.run_prep(*words, "--out", "gs://bucket/out")["error"]
    assert error["what"].endswith("is too small for the adapter, the new tokens or the compression")
    assert site.writes() == []
