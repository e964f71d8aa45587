"""Memory: the limits of a machine, the budget of a command, and the pause of the garbage collector."""

from __future__ import annotations

import gc
import mmap
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError
from prepcli.engine.budget import (
    MAX_BUFFERS,
    MAX_SLAB_NBYTES,
    MIB,
    MIN_MEMORY_NBYTES,
    Budget,
    BufferPool,
    anonymous_nbytes,
    cgroup_memory_limit,
    collector_paused,
    make_budget,
    system_memory,
)
from prepcli.engine.files import PAGE
from tests.helpers.waiting import MAX_S

MOST_AT_ONCE = 2  # buffers of a slab that is permuted


@given(st.integers(MIN_MEMORY_NBYTES, 1 << 40))
def test_make_budget_fits_the_limit(nbytes: int):
    budget = make_budget(nbytes)
    assert budget.nbytes == nbytes
    assert budget.buffer_count * (budget.slab_nbytes + 2 * PAGE) <= nbytes - min(
        nbytes // 4, 64 * MIB
    )
    assert MOST_AT_ONCE < budget.buffer_count <= MAX_BUFFERS
    assert 5 * MIB < budget.slab_nbytes <= MAX_SLAB_NBYTES
    assert budget.slab_nbytes % PAGE == 0


@given(st.integers(MIN_MEMORY_NBYTES, 1 << 32), st.integers(0, 1 << 32))
def test_make_budget_grows_with_memory(nbytes: int, more: int):
    small, large = make_budget(nbytes), make_budget(nbytes + more)
    assert small.slab_nbytes <= large.slab_nbytes
    assert (
        small.buffer_count * small.slab_nbytes
        <= large.buffer_count * large.slab_nbytes + PAGE * MAX_BUFFERS
    )


@given(st.integers(MIN_MEMORY_NBYTES, 1 << 36), st.integers(0, 1 << 34))
def test_make_budget_fits_min_buffer_if_two_fit(nbytes: int, min_buffer: int):
    default_budget, budget = make_budget(nbytes), make_budget(nbytes, min_buffer)
    assert budget.buffer_count * (budget.slab_nbytes + 2 * PAGE) <= nbytes - min(
        nbytes // 4, 64 * MIB
    )
    assert MOST_AT_ONCE <= budget.buffer_count <= MAX_BUFFERS
    assert budget.slab_nbytes % PAGE == 0
    assert budget.slab_nbytes >= default_budget.slab_nbytes
    if min_buffer <= default_budget.slab_nbytes:
        assert budget == default_budget
    elif 2 * (min_buffer + 4 * PAGE) <= nbytes - min(nbytes // 4, 64 * MIB):
        assert min_buffer <= budget.slab_nbytes < min_buffer + PAGE
    else:
        assert budget.buffer_count >= 4 or min_buffer <= budget.slab_nbytes


@pytest.mark.parametrize("nbytes", [0, MIB, MIN_MEMORY_NBYTES - 1])
def test_make_budget_rejects_too_little_memory(nbytes: int):
    with pytest.raises(PrepError) as raised:
        make_budget(nbytes)
    assert raised.value.what == f"`--memory {nbytes // MIB}MiB` is below the minimum"
    assert raised.value.code == USAGE
    assert "four buffers of 6 MiB" in raised.value.why


def test_buffers_hold_a_slab_at_any_page_offset():
    (buffer,) = BufferPool(Budget(0, 3 * PAGE, 2)).acquire(1)
    assert buffer.size == 5 * PAGE
    assert buffer.ctypes.data % PAGE == 0


def test_pool_reuses_latest_buffer_first():
    buffers = BufferPool(Budget(0, PAGE, 3))
    a, b = buffers.acquire(2)
    buffers.release([a])
    buffers.release([b])
    assert buffers.acquire(1)[0] is b
    # The third buffer is allocated only now.
    assert {id(buffer) for buffer in buffers.acquire(2)} - {
        id(a),
        id(b),
    }


def test_acquire_waits_for_all_requested_buffers():
    buffers = BufferPool(Budget(0, PAGE, 4))
    acquired = buffers.acquire(3)
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(len(buffers.acquire(3))))
    thread.start()
    time.sleep(0.05)
    assert not counts  # one buffer is free, three are requested
    buffers.release(acquired[:1])
    time.sleep(0.05)
    assert not counts
    buffers.release(acquired[1:])
    thread.join(timeout=MAX_S)
    assert counts == [3]


def test_anonymous_nbytes_grows_with_touched_memory():
    before = anonymous_nbytes()
    # A new mapping: an allocator could return memory that was touched before.
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"\1" * len(memory))
        assert anonymous_nbytes() - before > 48 * MIB


GIB = 1 << 30


def write(root: Path, **texts: str) -> Path:
    """Write files under `root`. In names `__` means a slash and `_DOT_` a dot."""
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_system_memory_is_in_bytes(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__meminfo="MemTotal:       24686380 kB\nMemFree: 1 kB\nMemAvailable:   23000000 kB\n",
    )
    assert system_memory(tmp_path) == {"total": 24686380 * 1024, "available": 23000000 * 1024}


def test_memory_is_unknown_without_files(tmp_path: Path) -> None:
    assert system_memory(tmp_path) == {}
    assert cgroup_memory_limit(tmp_path) is None


def test_cgroup_limit_is_the_smallest_of_all_groups(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__self__cgroup="0::/job/step\n",
        sys__fs__cgroup__job__step__memory_DOT_max="max\n",
        sys__fs__cgroup__job__memory_DOT_max=f"{8 * GIB}\n",
        sys__fs__cgroup__memory_DOT_max=f"{16 * GIB}\n",
    )
    assert cgroup_memory_limit(tmp_path) == 8 * GIB


def test_cgroup_limit_is_read_from_a_container_root(tmp_path: Path) -> None:
    write(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__memory_DOT_max=f"{4 * GIB}\n")
    assert cgroup_memory_limit(tmp_path) == 4 * GIB


def test_cgroup_limit_is_read_from_version_1_groups(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__self__cgroup="3:cpu,cpuacct:/job\n5:memory:/job\n1:name=systemd:/job\n",
        sys__fs__cgroup__memory__job__memory_DOT_limit_in_bytes=f"{2 * GIB}\n",
        sys__fs__cgroup__memory__memory_DOT_limit_in_bytes="9223372036854771712\n",
    )
    assert cgroup_memory_limit(tmp_path) == 2 * GIB
    write(tmp_path, sys__fs__cgroup__memory__job__memory_DOT_limit_in_bytes="9223372036854771712\n")
    assert cgroup_memory_limit(tmp_path) is None


def fail_while_paused() -> None:
    with collector_paused():
        assert not gc.isenabled()
        raise ValueError("header")


def test_collector_runs_again_after_an_error():
    with pytest.raises(ValueError, match="header"):
        fail_while_paused()
    assert gc.isenabled()


def test_disabled_collector_stays_disabled():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
