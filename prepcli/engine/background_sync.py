"""Sync written data in a background thread, and then report it as durable."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from prepcli.engine.digest import StreamDigest
from prepcli.engine.files import Files

# Time between syncs. A kill loses the units in progress, except for the synced bytes of large ones. Compression of a
# unit begins again.
SYNC_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class StreamPrefix:
    """The durable first bytes of a partly written stream.

    Attributes:
        stream_number: Number of the stream in the plan, e.g. 17.
        nbytes: Number of bytes, as they are read.
        digest: Digest of the bytes as they are written, in the tensor's order.
    """

    stream_number: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class UnitPart:
    """The durable part of an incomplete unit.

    Attributes:
        unit: Number of the unit.
        digests: Digests of its complete streams, by number.
        prefix: The partly written stream.
    """

    unit: int
    digests: Mapping[int, StreamDigest]
    prefix: StreamPrefix | None = None


@dataclass(frozen=True, slots=True)
class SyncPoint:
    """A position of the writer.

    Attributes:
        complete: Numbers of the units completed since the last point.
        part: Progress of the unit in the writer.
    """

    complete: tuple[int, ...] = ()
    part: UnitPart | None = None


class BackgroundSync:
    """A thread that makes sync points durable in order. The writer waits if too many written bytes are not durable."""

    def __init__(
        self,
        sink: Files,
        record: Callable[[SyncPoint], None],
        *,
        max_unsynced_nbytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the sync of `sink`. Its thread starts with the first point.

        The writer waits for a sync once it has written `max_unsynced_nbytes` bytes since the last point.
        """
        self._sink = sink
        self._record = record
        self._max_unsynced_nbytes = max_unsynced_nbytes
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "prep-sync")
        self._running: Future[None] | None = None
        self._ended_s = clock()

    def is_due(self, unsynced_nbytes: int) -> bool:
        """Return whether the writer should call `submit` now, given the bytes written since the last sync point."""
        if unsynced_nbytes >= self._max_unsynced_nbytes:
            return True
        if not unsynced_nbytes:
            return False
        # A new point waits for the running sync, so an early one would stop the writer.
        is_idle = self._running is None or self._running.done()
        return is_idle and self._clock() - self._ended_s >= SYNC_INTERVAL_S

    def submit(self, point: SyncPoint) -> None:
        """Wait for the previous sync and raise its error. Then start to sync `point` in the background."""
        self._wait_for_sync()
        self._running = self._thread.submit(self._sync_and_record, point)

    def finish(self, point: SyncPoint) -> None:
        """Sync the last point, wait for it, and stop the thread."""
        try:
            self.submit(point)
            self._wait_for_sync()
        finally:
            self._thread.shutdown()

    def _wait_for_sync(self) -> None:
        """Wait for the running sync, and raise its error."""
        running = self._running
        self._running = None
        if running:
            running.result()

    def _sync_and_record(self, point: SyncPoint) -> None:
        """Make a point durable and record it."""
        # The record is a promise about the data. A kill before it leaves bytes that no record lists, and
        # they are written again.
        self._sink.sync()
        self._sink.check_unchanged()
        self._record(point)
        self._ended_s = self._clock()
