"""Memory budget: divide `--memory` into buffers, and measure the memory of the process."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from pathlib import Path

from prepcli.core.errors import Option, text, usage_error
from prepcli.core.formatting import format_bytes, parse_bytes
from prepcli.engine.files import PAGE
from prepcli.stores.buffers import ByteArray, allocate_buffer

MIB = 1 << 20
MIN_MEMORY_NBYTES = 32 * MIB
# Larger slabs are not faster, because their pages must first be faulted in.
MAX_SLAB_NBYTES = 32 * MIB
MAX_BUFFERS = 8
# Memory for buffers, in addition to the reserve and matrices.
MIN_BUFFERS_NBYTES = 12 * MIB


@dataclass(frozen=True, slots=True)
class Budget:
    """The division of a memory limit.

    Attributes:
        nbytes: The limit.
        slab_nbytes: Maximum size of a slab. A buffer is two pages larger.
        buffer_count: Number of buffers. The rest of the memory is for decoding and bookkeeping.
    """

    nbytes: int
    slab_nbytes: int
    buffer_count: int

    @property
    def cache_nbytes(self) -> int:
        """Memory for decoded chunks: the limit without buffers and half of the bookkeeping reserve."""
        free_nbytes = self.nbytes - self.buffer_count * (self.slab_nbytes + 2 * PAGE)
        return free_nbytes - min(free_nbytes, bookkeeping_nbytes(self.nbytes)) // 2


def make_budget(nbytes: int, min_buffer_nbytes: int = 0, *, kept_nbytes: int = 0) -> Budget:
    """Divide a memory limit into buffers.

    A quarter, at most 64 MiB, is reserved for the plan and the index. The rest becomes 4 to 8 buffers, or
    2 to 8 larger ones for `min_buffer_nbytes`.

    Args:
        nbytes: The limit.
        min_buffer_nbytes: Preferred minimum size of a slab. If two buffers of this size exceed the limit, it is ignored
            and there are four buffers. The engine acquires at most two at once.
        kept_nbytes: Memory for the matrices of low-rank updates, the pieces of new tokens and compressors. A quarter
            of the reserve is for them. The buffers are smaller if they need more.

    Returns:
        The budget.

    Raises:
        UsageError: The limit is too small.
    """
    check_memory(nbytes, f"{nbytes // MIB}MiB")
    reserved_nbytes = bookkeeping_nbytes(nbytes)
    usable_nbytes = nbytes - reserved_nbytes - max(0, kept_nbytes - reserved_nbytes // 4)
    if usable_nbytes < MIN_BUFFERS_NBYTES:
        needed_nbytes = MIN_MEMORY_NBYTES + 2 * kept_nbytes
        what = text(
            "{} is too small for the adapter, the new tokens or the compression",
            Option("memory", f"{nbytes // MIB}MiB"),
        )
        why = f"matrices, rows and compressors need {format_bytes(kept_nbytes)}"
        hint = text("{}", Option("memory", f"{-(-needed_nbytes // MIB)}MiB"))
        raise usage_error(what, why, hint)
    # 512 MiB: 64 MiB are reserved, a quarter of the other 448 MiB is more than MAX_SLAB_NBYTES, so that
    # slabs have 32 MiB and there are 8 buffers. 32 MiB: 8 MiB are reserved, a quarter of 24 MiB gives
    # slabs of 6 MiB minus two pages, and 4 buffers.
    # A buffer is two pages longer than its slab.
    half_nbytes = (usable_nbytes // 2 - 2 * PAGE) // PAGE * PAGE
    quarter_nbytes = (usable_nbytes // 4 - 2 * PAGE) // PAGE * PAGE
    slab_nbytes = min(MAX_SLAB_NBYTES, quarter_nbytes)
    if slab_nbytes < min_buffer_nbytes <= half_nbytes:
        slab_nbytes = -(-min_buffer_nbytes // PAGE) * PAGE
    elif min_buffer_nbytes > slab_nbytes:
        slab_nbytes = quarter_nbytes
    buffer_count = min(MAX_BUFFERS, usable_nbytes // (slab_nbytes + 2 * PAGE))
    return Budget(nbytes, slab_nbytes, buffer_count)


def check_memory(nbytes: int, limit: str) -> None:
    """Raise UsageError if a memory limit, given as the text `limit`, is too small for the engine."""
    if nbytes >= MIN_MEMORY_NBYTES:
        return
    needs = f"the engine needs at least four buffers of {MIN_MEMORY_NBYTES * 3 // 16 // MIB} MiB"
    why = needs
    # A number without a unit counts bytes.
    if limit.strip().isdecimal():
        why = f"it is {format_bytes(nbytes)}; {needs}"
    raise usage_error(
        text("{} is below the minimum", Option("memory", limit)),
        why,
        text("{} or more", Option("memory", f"{MIN_MEMORY_NBYTES // MIB}MiB")),
    )


def parse_memory(limit: int | str) -> int:
    """Return a memory limit in bytes, given as a number or as a text such as `2GiB`.

    Raises:
        UsageError: It is invalid, or too small for the engine.
    """
    nbytes = parse_bytes(limit, "memory") if isinstance(limit, str) else limit
    check_memory(nbytes, str(limit))
    return nbytes


def bookkeeping_nbytes(nbytes: int) -> int:
    """Return the part of a memory limit reserved for the plan and the index."""
    return min(nbytes // 4, 64 * MIB)


class BufferPool:
    """A pool of equal buffers.

    Buffers are allocated when they are first needed, and the latest released is reused first, so that unneeded memory
    is never touched. Threads wait in a `SimpleQueue`: see `prepcli.core.worker_thread`.
    """

    def __init__(self, budget: Budget) -> None:
        self._nbytes = budget.slab_nbytes + 2 * PAGE
        self._free: list[ByteArray] = []
        # One permit for each buffer not in use, whether it is allocated already or not.
        self._permits = queue.SimpleQueue[None]()
        for _ in range(budget.buffer_count):
            self._permits.put(None)

    def acquire(self, count: int) -> list[ByteArray]:
        """Wait until `count` buffers are free, and take them.

        Only one thread may acquire more than one buffer: each of two threads could wait for a buffer of the other.
        """
        for _ in range(count):
            self._permits.get()
        buffers: list[ByteArray] = []
        for _ in range(count):
            try:
                buffers.append(self._free.pop())
            except IndexError:
                buffers.append(allocate_buffer(self._nbytes))
        return buffers

    def release(self, buffers: list[ByteArray]) -> None:
        """Return buffers to the pool."""
        self._free.extend(buffers)
        for _ in buffers:
            self._permits.put(None)


def anonymous_nbytes() -> int:
    """Return the resident anonymous and shared memory of this process, or 0 if the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(fields.get(key, "0 kB").split()[0]) * 1024 for key in ("RssAnon", "RssShmem"))
