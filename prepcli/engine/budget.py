"""Memory: divide `--memory` into buffers, measure process and machine, and pause the garbage collector."""

from __future__ import annotations

import gc
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from prepcli.core.errors import Option, text, usage_error
from prepcli.core.formatting import format_bytes, parse_bytes
from prepcli.engine.files import PAGE
from prepcli.stores.buffers import ByteArray, allocate_buffer

MIB = 1 << 20
UNLIMITED = 1 << 60  # cgroup v1 reports "no limit" as a number of this size
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

    def clear(self) -> None:
        """Free the memory of the buffers that are not in use."""
        self._free.clear()


def anonymous_nbytes() -> int:
    """Return the resident anonymous and shared memory of this process, or 0 if the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(fields.get(key, "0 kB").split()[0]) * 1024 for key in ("RssAnon", "RssShmem"))


# --- The memory of this machine


def system_memory(root: Path = Path("/")) -> dict[str, int]:
    """Return `total` and `available` bytes of the machine, as far as the system reports them."""
    names = {"MemTotal": "total", "MemAvailable": "available"}
    memory = {}
    for line in _read_or_empty(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name in names:
            memory[names[name]] = int(value.split()[0]) << 10
    return memory


def cgroup_memory_limit(root: Path = Path("/")) -> int | None:
    """Return the smallest memory limit in bytes of the control groups of this process, or None without a limit."""
    # A line is HIERARCHY:CONTROLLERS:PATH. `0::/user.slice` is the only hierarchy of cgroup v2, and
    # `7:memory:/docker/1f` the memory controller of v1, which has its own mount.
    limits = []
    for line in _read_or_empty(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += _memory_limits(root / "sys/fs/cgroup", path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _memory_limits(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
    return min((limit for limit in limits if limit < UNLIMITED), default=None)


def free_memory() -> int | None:
    """Return the bytes free for this process, or None if the system does not report them."""
    # MemAvailable is what is left. A limit is the size of the whole group, so that the memory of this
    # process is subtracted.
    bounds: list[int] = []
    available = system_memory().get("available")
    if available is not None:
        bounds.append(available)
    limit = cgroup_memory_limit()
    if limit is not None:
        bounds.append(max(0, limit - anonymous_nbytes()))
    return min(bounds, default=None)


def _memory_limits(mount: Path, path: str, name: str) -> list[int]:
    """Return the limits of a group and all groups above it. In a container its own group is the mount itself."""
    # The limit of a parent also applies to its children, e.g. the limit of a job to the steps of the job.
    # cgroup v2 writes the text `max` if there is no limit.
    group = PurePosixPath(path).relative_to("/")
    texts = [_read_or_empty(mount / parent / name).strip() for parent in (group, *group.parents)]
    return [int(text) for text in texts if text.isdigit()]


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# --- The garbage collector of cycles


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector in the block.

    A header with 200,000 tensors becomes a million objects without cycles. The collector would visit all of them again
    and again: 1.5 of 3.6 s of an inspection (Python 3.11).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
