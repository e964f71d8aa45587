"""Sync written data in a background thread, and then record it as durable in the journal."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from prepcli.engine.files import Files
from prepcli.engine.journal import Journal, StreamPrefix

# A kill loses at most this much work, plus the duration of one sync.
SYNC_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class SyncPoint:
    """A position of the writer.

    Attributes:
        done_nbytes: Number of bytes written, over all streams.
        digests: Digests of the streams completed since the last point, by stream position.
        prefix: The partly written stream.
    """

    done_nbytes: int
    digests: dict[int, str] = field(default_factory=dict)
    prefix: StreamPrefix | None = None


class BackgroundSync:
    """A background thread. It makes sync points durable one after another.

    The writer waits only if too many written bytes are not durable yet.
    """

    def __init__(
        self,
        sink: Files,
        journal: Journal,
        *,
        max_unsynced_nbytes: int,
        before_record: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the sync. Its thread starts with the first point.

        Args:
            sink: The files to sync.
            journal: Records each point once it is durable.
            max_unsynced_nbytes: The writer waits for a sync once it has written this many bytes since the last point.
            before_record: Called before the journal records a point. After the last record another process may finish
                the output.
            clock: Returns the current time in seconds.
        """
        self._sink = sink
        self._journal = journal
        self._max_unsynced_nbytes = max_unsynced_nbytes
        self._clock = clock
        self._before_record = before_record
        self._thread = ThreadPoolExecutor(1, "prep-sync")
        self._running: Future[None] | None = None
        self._ended_s = clock()

    def is_due(self, unsynced_nbytes: int) -> bool:
        """Return whether the writer should call `submit` now.

        Args:
            unsynced_nbytes: Number of bytes written since the last sync point.
        """
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
        # In this order: data, checksums, journal. A line of the journal is a promise about the two
        # others. A kill before the line leaves bytes that no journal lists, and they are written again.
        self._sink.sync()
        self._sink.check_unchanged()
        self._before_record()
        self._journal.record(point.done_nbytes, point.digests, prefix=point.prefix)
        self._ended_s = self._clock()
