"""Memory: what `--memory` becomes, and that buffers are never more than it says."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.engine.budget import (
    MAX_BUFFERS,
    MAX_SLAB_NBYTES,
    MIB,
    MIN_MEMORY_NBYTES,
    Budget,
    BufferPool,
    anonymous_nbytes,
    make_budget,
)
from prepcli.engine.files import PAGE
from prepcli.errors import USAGE, PrepError

MOST_AT_ONCE = 2  # what a slab takes whose bytes need another order


@given(st.integers(MIN_MEMORY_NBYTES, 1 << 40))
def test_buffers_and_what_is_kept_back_fit(nbytes: int):
    spend = make_budget(nbytes)
    assert spend.nbytes == nbytes
    assert spend.buffer_count * (spend.slab_nbytes + 2 * PAGE) <= nbytes - min(nbytes // 4, 64 * MIB)
    assert MOST_AT_ONCE < spend.buffer_count <= MAX_BUFFERS
    assert 5 * MIB < spend.slab_nbytes <= MAX_SLAB_NBYTES
    assert spend.slab_nbytes % PAGE == 0


@given(st.integers(MIN_MEMORY_NBYTES, 1 << 32), st.integers(0, 1 << 32))
def test_more_memory_never_makes_less_of_it(nbytes: int, more: int):
    small, large = make_budget(nbytes), make_budget(nbytes + more)
    assert small.slab_nbytes <= large.slab_nbytes
    assert small.buffer_count * small.slab_nbytes <= large.buffer_count * large.slab_nbytes + PAGE * MAX_BUFFERS


@given(st.integers(MIN_MEMORY_NBYTES, 1 << 36), st.integers(0, 1 << 34))
def test_a_wide_slab_is_given_room_where_two_of_it_fit(nbytes: int, wide: int):
    plain, spend = make_budget(nbytes), make_budget(nbytes, wide)
    assert spend.buffer_count * (spend.slab_nbytes + 2 * PAGE) <= nbytes - min(nbytes // 4, 64 * MIB)
    assert MOST_AT_ONCE <= spend.buffer_count <= MAX_BUFFERS
    assert spend.slab_nbytes % PAGE == 0
    assert spend.slab_nbytes >= plain.slab_nbytes
    if wide <= plain.slab_nbytes:
        assert spend == plain
    elif 2 * (wide + 4 * PAGE) <= nbytes - min(nbytes // 4, 64 * MIB):
        assert wide <= spend.slab_nbytes < wide + PAGE
    else:
        assert spend.buffer_count >= 4 or wide <= spend.slab_nbytes


@pytest.mark.parametrize("nbytes", [0, MIB, MIN_MEMORY_NBYTES - 1])
def test_a_budget_below_the_floor_is_refused(nbytes: int):
    with pytest.raises(PrepError, match=f"--memory {nbytes // MIB}MiB") as caught:
        make_budget(nbytes)
    assert caught.value.code == USAGE
    assert "four buffers of 6 MiB" in caught.value.why


def test_buffers_hold_a_slab_at_any_depth_of_a_page():
    (buffer,) = BufferPool(Budget(0, 3 * PAGE, 2)).acquire(1)
    assert buffer.size == 5 * PAGE
    assert buffer.ctypes.data % PAGE == 0


def test_buffers_are_reused_the_latest_first():
    buffers = BufferPool(Budget(0, PAGE, 3))
    a, b = buffers.acquire(2)
    buffers.release([a])
    buffers.release([b])
    assert buffers.acquire(1)[0] is b
    assert {id(each) for each in buffers.acquire(2)} - {id(a), id(b)}  # the third is made only now


def test_who_wants_more_than_there_is_waits_and_gets_all_at_once():
    buffers = BufferPool(Budget(0, PAGE, 4))
    held = buffers.acquire(3)
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(len(buffers.acquire(2))))
    thread.start()
    time.sleep(0.05)
    assert not got  # one is there, two are wanted
    assert buffers.acquire(1)
    buffers.release(held[:1])
    time.sleep(0.05)
    assert not got
    buffers.release(held[1:])
    thread.join(timeout=10)
    assert got == [2]


def test_what_the_process_holds_grows_with_what_is_touched():
    before = anonymous_nbytes()
    held = bytearray(b"\1") * (64 * MIB)
    assert anonymous_nbytes() - before > 48 * MIB
    assert len(held) == 64 * MIB
