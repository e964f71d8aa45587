"""Memory: what `--memory` becomes, and that buffers are never more than it says."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.engine.budget import BUFFERS, FLOOR_NBYTES, MIB, SLAB_NBYTES, Budget, Buffers, anonymous_nbytes, budget
from prepcli.engine.files import PAGE
from prepcli.errors import USAGE, PrepError

MOST_AT_ONCE = 2  # what a slab takes whose bytes need another order


@given(st.integers(FLOOR_NBYTES, 1 << 40))
def test_buffers_and_what_is_kept_back_fit(nbytes: int):
    spend = budget(nbytes)
    assert spend.nbytes == nbytes
    assert spend.count * (spend.slab_nbytes + 2 * PAGE) <= nbytes - min(nbytes // 4, 64 * MIB)
    assert MOST_AT_ONCE < spend.count <= BUFFERS
    assert 5 * MIB < spend.slab_nbytes <= SLAB_NBYTES
    assert spend.slab_nbytes % PAGE == 0


@given(st.integers(FLOOR_NBYTES, 1 << 32), st.integers(0, 1 << 32))
def test_more_memory_never_makes_less_of_it(nbytes: int, more: int):
    small, large = budget(nbytes), budget(nbytes + more)
    assert small.slab_nbytes <= large.slab_nbytes
    assert small.count * small.slab_nbytes <= large.count * large.slab_nbytes + PAGE * BUFFERS


@given(st.integers(FLOOR_NBYTES, 1 << 36), st.integers(0, 1 << 34))
def test_a_wide_slab_is_given_room_where_two_of_it_fit(nbytes: int, wide: int):
    plain, spend = budget(nbytes), budget(nbytes, wide)
    assert spend.count * (spend.slab_nbytes + 2 * PAGE) <= nbytes - min(nbytes // 4, 64 * MIB)
    assert MOST_AT_ONCE <= spend.count <= BUFFERS
    assert spend.slab_nbytes % PAGE == 0
    assert spend.slab_nbytes >= plain.slab_nbytes
    if wide <= plain.slab_nbytes:
        assert spend == plain
    elif 2 * (wide + 4 * PAGE) <= nbytes - min(nbytes // 4, 64 * MIB):
        assert wide <= spend.slab_nbytes < wide + PAGE
    else:
        assert spend.count >= 4 or wide <= spend.slab_nbytes


@pytest.mark.parametrize("nbytes", [0, MIB, FLOOR_NBYTES - 1])
def test_a_budget_below_the_floor_is_refused(nbytes: int):
    with pytest.raises(PrepError, match=f"--memory {nbytes // MIB}MiB") as caught:
        budget(nbytes)
    assert caught.value.code == USAGE
    assert "four buffers of 6 MiB" in caught.value.why


def test_buffers_hold_a_slab_at_any_depth_of_a_page():
    (buffer,) = Buffers(Budget(0, 3 * PAGE, 2)).take(1)
    assert buffer.size == 5 * PAGE
    assert buffer.ctypes.data % PAGE == 0


def test_buffers_are_reused_the_latest_first():
    buffers = Buffers(Budget(0, PAGE, 3))
    a, b = buffers.take(2)
    buffers.give([a])
    buffers.give([b])
    assert buffers.take(1)[0] is b
    assert {id(each) for each in buffers.take(2)} - {id(a), id(b)}  # the third is made only now


def test_who_wants_more_than_there_is_waits_and_gets_all_at_once():
    buffers = Buffers(Budget(0, PAGE, 4))
    held = buffers.take(3)
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(len(buffers.take(2))))
    thread.start()
    time.sleep(0.05)
    assert not got  # one is there, two are wanted
    assert buffers.take(1)
    buffers.give(held[:1])
    time.sleep(0.05)
    assert not got
    buffers.give(held[1:])
    thread.join(timeout=10)
    assert got == [2]


def test_what_the_process_holds_grows_with_what_is_touched():
    before = anonymous_nbytes()
    held = bytearray(b"\1") * (64 * MIB)
    assert anonymous_nbytes() - before > 48 * MIB
    assert len(held) == 64 * MIB
