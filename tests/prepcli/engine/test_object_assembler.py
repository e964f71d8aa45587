"""Objects that are assembled in memory from runs in any order."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.strided_copies import StridedCopy
from prepcli.engine.budget import MIB
from prepcli.engine.object_assembler import ObjectAssembler, Piece, PieceLimits, make_object_budget
from prepcli.planning.plan import OutputFile


class Sent:
    """The bytes of objects, as they are sent."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.objects: dict[int, bytes] = {}
        self._pause_s = pause_s
        self._lock = threading.Lock()

    def send(self, piece: Piece) -> None:
        """Append a piece to its object. It must be the next one."""
        time.sleep(self._pause_s)
        with self._lock:
            before = self.objects.get(piece.file, b"")
            assert len(before) == piece.start
            self.objects[piece.file] = before + piece.data.tobytes()


def assemble(
    files: dict[int, OutputFile],
    runs: list[tuple[int, int, bytes]],
    limits: PieceLimits,
    send: Callable[[Piece], None],
) -> int:
    """Write runs (file, offset, bytes) in as many passes as needed. Return the number of passes."""
    spans: dict[int, list[tuple[int, int]]] = {file: [] for file in files}
    for file, offset, data in sorted(runs):
        spans[file].append((offset, offset + len(data)))
    assembler = ObjectAssembler(files, spans, limits, send=send)
    passes = 0
    try:
        while passes == 0 or assembler.missing_spans():
            if passes:
                assembler.begin_pass()
            for file, offset, data in runs:
                copy = StridedCopy(0, file, offset, len(data))
                assembler.write((copy,), np.frombuffer(data, np.uint8))
            assembler.wait()
            passes += 1
            assert passes < 100
    finally:
        assembler.close()
    return passes


@given(data=st.data())
def test_runs_in_any_order_make_the_same_objects(data: st.DataObject):
    contents: dict[int, bytes] = {}
    for file in range(data.draw(st.integers(1, 3))):
        contents[file] = data.draw(st.binary(min_size=1, max_size=60))
    runs: list[tuple[int, int, bytes]] = []
    for file, content in contents.items():
        cuts = sorted({0, len(content), *data.draw(st.lists(st.integers(0, len(content))))})
        for start, stop in itertools.pairwise(cuts):
            runs.append((file, start, content[start:stop]))
    runs = data.draw(st.permutations(runs))
    piece_nbytes = data.draw(st.integers(1, 70))
    total_nbytes = piece_nbytes * data.draw(st.integers(1, 4))
    sent = Sent()
    files = {file: OutputFile(str(file), len(content)) for file, content in contents.items()}
    assemble(files, runs, PieceLimits(total_nbytes, piece_nbytes), sent.send)
    assert sent.objects == contents


def test_headers_constants_and_gaps_are_part_of_objects():
    files = {
        0: OutputFile("a", 12, b"head", ((10, b"xy"),)),
        # Only a header, in several pieces
        1: OutputFile("b", 9, b"123456789"),
        2: OutputFile("c", 0),
    }
    for piece_nbytes in (1, 4, 100):
        sent = Sent()
        assemble(files, [(0, 5, b"abc")], PieceLimits(200, piece_nbytes), sent.send)
        assert sent.objects == {0: b"head\0abc\0\0xy", 1: b"123456789", 2: b""}


def test_strided_runs_are_written_to_one_piece():
    sent = Sent()
    copy = StridedCopy(0, 0, 2, 1, ((2, 3, 6), (3, 1, 2)))
    spans = {0: [(offset, offset + 1) for offset in copy.run_offsets()]}
    assembler = ObjectAssembler(
        {0: OutputFile("a", 16)}, spans, PieceLimits(16, 16), send=sent.send
    )
    assembler.write((copy,), np.arange(1, 7, dtype=np.uint8))
    assembler.wait()
    assembler.close()
    expected = bytearray(16)
    for value, offset in enumerate(copy.run_offsets(), 1):
        expected[offset] = value
    assert sent.objects == {0: bytes(expected)}


def test_memory_of_pieces_is_bounded():
    """The writer waits for pieces in flight, and skips pieces if only incomplete ones use the memory."""
    lock = threading.Lock()
    in_memory: list[int] = []
    largest: list[int] = []
    sent = Sent(pause_s=0.001)
    files = {number: OutputFile(str(number), 10) for number in range(20)}

    def send(piece: Piece) -> None:
        with lock:
            in_memory.append(piece.data.size)
            largest.append(sum(in_memory))
        sent.send(piece)
        with lock:
            in_memory.pop()

    halves = [(file, 0, b"01234") for file in files] + [(file, 5, b"56789") for file in files]
    passes = assemble(files, halves, PieceLimits(40, 10), send)
    assert passes == 5
    assert max(largest) <= 40
    assert set(sent.objects.values()) == {b"0123456789"}


def test_an_error_of_a_send_is_raised_by_the_writer():
    def fail(piece: Piece) -> None:
        raise OSError("no answer")

    with pytest.raises(OSError, match="no answer"):
        assemble({0: OutputFile("a", 3)}, [(0, 0, b"abc")], PieceLimits(10, 10), fail)


@pytest.mark.parametrize("memory_mib", [32, 64, 512, 4096])
@pytest.mark.parametrize("largest_mib", [1, 16, 100, 5000])
@pytest.mark.parametrize("num_compressing", [0, 2])
def test_object_budget_is_within_the_limit(memory_mib: int, largest_mib: int, num_compressing: int):
    part_nbytes = 8 * MIB
    budget, limits = make_object_budget(
        memory_mib * MIB,
        min_buffer_nbytes=0,
        kept_nbytes=0,
        object_nbytes=16 * MIB,
        largest_nbytes=largest_mib * MIB,
        part_nbytes=part_nbytes,
        num_compressing=num_compressing,
    )
    needed_nbytes = budget.buffer_count * budget.slab_nbytes + limits.total_nbytes
    if largest_mib * MIB > limits.piece_nbytes:
        needed_nbytes += limits.split_files * (1 + limits.parts_in_flight) * part_nbytes
    if num_compressing:
        # A compressed copy of each piece, and a compressor for each split object
        needed_nbytes += limits.total_nbytes
        assert limits.split_files <= num_compressing
    # At 32 MiB, two parts and one piece leave a part of the reserve for bookkeeping.
    assert needed_nbytes <= memory_mib * MIB
    assert limits.piece_nbytes <= limits.total_nbytes
    assert budget.buffer_count >= 2
