"""Memory: how `--memory` becomes buffers, and what the process holds."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from prepcli.console.formatting import format_bytes, parse_bytes
from prepcli.engine.files import PAGE, ByteArray, allocate_buffer
from prepcli.errors import usage_error

MIB = 1 << 20
MIN_MEMORY_NBYTES = 32 * MIB
MAX_SLAB_NBYTES = 32 * MIB  # enough for runs of whole chunks; more only costs the first touch of its pages
MAX_BUFFERS = 8


@dataclass(frozen=True, slots=True)
class Budget:
    """How a number of bytes is spent: `count` buffers that hold slabs of `slab_nbytes`; the rest is for bookkeeping."""

    nbytes: int
    slab_nbytes: int
    buffer_count: int

    @property
    def cache_nbytes(self) -> int:
        """What decoding may hold: half of what buffers leave, and all that is beyond the bookkeeping."""
        left = self.nbytes - self.buffer_count * (self.slab_nbytes + 2 * PAGE)
        return left - min(left, _bookkeeping_nbytes(self.nbytes)) // 2


def make_budget(nbytes: int, min_buffer_nbytes: int = 0) -> Budget:
    """Spend `nbytes`: a quarter, at most 64 MiB, is kept for plan and index; the rest makes 4 to 8 buffers.

    `wide_nbytes`: a slab that should fit one of them, for which there may be as few as two: the engine takes no more at
    once.
    """
    check_memory(nbytes, f"{nbytes // MIB}MiB")
    usable = nbytes - _bookkeeping_nbytes(nbytes)
    half, quarter = ((usable // parts - 2 * PAGE) // PAGE * PAGE for parts in (2, 4))
    slab = min(MAX_SLAB_NBYTES, quarter)
    if min_buffer_nbytes > slab:
        slab = -(-min_buffer_nbytes // PAGE) * PAGE if min_buffer_nbytes <= half else quarter
    return Budget(nbytes, slab, min(MAX_BUFFERS, usable // (slab + 2 * PAGE)))


def check_memory(nbytes: int, text: str) -> None:
    """Raise a usage PrepError where a budget, written as `text`, is too small for the engine."""
    if nbytes >= MIN_MEMORY_NBYTES:
        return
    needs = f"the engine needs at least four buffers of {MIN_MEMORY_NBYTES * 3 // 16 // MIB} MiB"
    why = f"it is {format_bytes(nbytes)}; {needs}" if text.strip().isdecimal() else needs
    raise usage_error(f"`--memory {text}` is below the floor", why, f"`--memory {MIN_MEMORY_NBYTES // MIB}MiB` or more")


def parse_memory(text: str) -> int:
    """Read a budget as `--memory` takes it. Raises a usage PrepError for one below the floor."""
    nbytes = parse_bytes(text)
    check_memory(nbytes, text)
    return nbytes


def _bookkeeping_nbytes(nbytes: int) -> int:
    """Of so many bytes, those for plan and index."""
    return min(nbytes // 4, 64 * MIB)


class BufferPool:
    """Buffers, made when first needed and reused, the latest first: memory that is not needed is never touched."""

    def __init__(self, budget: Budget) -> None:
        self._nbytes = budget.slab_nbytes + 2 * PAGE
        self._free: list[ByteArray] = []
        self._left = budget.buffer_count
        self._change = threading.Condition()

    def acquire(self, count: int) -> list[ByteArray]:
        """Wait for `count` buffers and take them at once, so that no slab ever waits for its second one."""
        with self._change:
            self._change.wait_for(lambda: self._left >= count)
            self._left -= count
            reused = [self._free.pop() for _ in range(min(count, len(self._free)))]
        return reused + [allocate_buffer(self._nbytes) for _ in range(count - len(reused))]

    def release(self, buffers: list[ByteArray]) -> None:
        """Give buffers back."""
        with self._change:
            self._free.extend(buffers)
            self._left += len(buffers)
            self._change.notify_all()


def anonymous_nbytes() -> int:
    """Anonymous and shared memory that this process holds now; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(fields.get(key, "0 kB").split()[0]) * 1024 for key in ("RssAnon", "RssShmem"))
