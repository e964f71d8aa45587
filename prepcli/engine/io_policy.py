"""How large writes reach the disk: direct I/O, or the page cache with paced writeback, whichever the disk does faster.

The choice changes when bytes are written, never which bytes.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from enum import Enum

from prepcli.engine.linux import HAS_WRITEBACK, finish_writeback, start_writeback
from prepcli.planning.slabs import PAGE

MIB = 1 << 20
WINDOW_NBYTES = 64 * MIB  # most bytes of an output in the page cache
MIN_MEASURED_NBYTES = 1 << 30  # smaller outputs are written direct: to measure costs more than it gains
TRIAL_NBYTES = 8 * MIB  # shorter writes are not measured
TRIALS = 3  # writes measured in each mode
CLEAR_GAIN = 0.9  # direct I/O takes less CPU time, so writeback must take less than this share of its wall time
CLEAR_LOSS = 2.0  # writeback that takes longer than so many times direct I/O is not tried again


class WriteMode(Enum):
    """A way to write whole pages."""

    DIRECT = "direct"
    WRITEBACK = "writeback"


class Writeback:
    """Byte ranges whose writeback was started, at most `window_nbytes` of them."""

    def __init__(self, window_nbytes: int = WINDOW_NBYTES) -> None:
        self._window_nbytes = window_nbytes
        self._started: deque[tuple[int, int, int]] = deque()  # descriptor, offset, bytes
        self._nbytes = 0

    def start(self, fd: int, offset: int, nbytes: int) -> None:
        """Start writeback of the whole pages of a range; wait for older ranges beyond the window. Raises OSError."""
        low, high = -(-offset // PAGE) * PAGE, (offset + nbytes) // PAGE * PAGE
        if low >= high:
            return
        start_writeback(fd, low, high - low)
        self._started.append((fd, low, high - low))
        self._nbytes += high - low
        self._finish(self._window_nbytes)

    def drain(self) -> None:
        """Wait for all ranges. Raises OSError."""
        self._finish(0)

    def _finish(self, max_nbytes: int) -> None:
        while self._nbytes > max_nbytes:
            fd, offset, nbytes = self._started.popleft()
            self._nbytes -= nbytes
            finish_writeback(fd, offset, nbytes)


class WritePolicy:
    """The mode of each write of an output: measured over its first large writes, then fixed."""

    def __init__(self, total_nbytes: int, has_direct: bool = True) -> None:
        self.writeback = Writeback()
        self._paces: dict[WriteMode, list[float]] = {mode: [] for mode in WriteMode}  # seconds a byte
        is_measured = HAS_WRITEBACK and has_direct and total_nbytes >= MIN_MEASURED_NBYTES
        self._fixed = (
            None if is_measured else WriteMode.DIRECT if has_direct or not HAS_WRITEBACK else WriteMode.WRITEBACK
        )

    @property
    def needs_alignment(self) -> bool:
        """Whether a write may be direct, and then needs bytes with the page offset that they have in the file."""
        return self._fixed is not WriteMode.WRITEBACK

    @contextlib.contextmanager
    def writing(self, nbytes: int) -> Iterator[WriteMode]:
        """Give the mode of a write, which the block does. Raises OSError."""
        if self._fixed or nbytes < TRIAL_NBYTES:
            yield self._fixed or WriteMode.DIRECT
            return
        mode = min(WriteMode, key=lambda mode: len(self._paces[mode]))
        began = time.perf_counter()
        yield mode
        self.writeback.drain()
        self.add_measurement(mode, (time.perf_counter() - began) / nbytes)

    def add_measurement(self, mode: WriteMode, seconds_per_byte: float) -> None:
        """Add a measurement, in seconds a byte; after the last one the mode is fixed."""
        self._paces[mode].append(seconds_per_byte)
        directs, writebacks = (self._paces[mode] for mode in (WriteMode.DIRECT, WriteMode.WRITEBACK))
        if len(directs) == len(writebacks):
            share = min(writebacks) / min(directs)
            if len(directs) == TRIALS or share > CLEAR_LOSS:
                self._fixed = WriteMode.WRITEBACK if share < CLEAR_GAIN else WriteMode.DIRECT
