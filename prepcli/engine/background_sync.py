"""What was written becomes durable, and is then recorded in the journal, beside the thread that writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from prepcli.engine.files import Files
from prepcli.engine.journal import Journal, StreamPrefix

SYNC_INTERVAL_S = 1.0  # what a kill can cost, besides the time that one sync takes


@dataclass(frozen=True, slots=True)
class SyncPoint:
    """How far the writer is: bytes of all streams, digests of streams that ended since the last point, and the stream
    that it is in."""

    done_nbytes: int
    digests: dict[int, str] = field(default_factory=dict)
    prefix: StreamPrefix | None = None


class BackgroundSync:
    """Points that become durable one after another. The writer waits only where too much is not durable yet."""

    def __init__(
        self,
        sink: Files,
        journal: Journal,
        max_unsynced_nbytes: int,
        *,
        before_record: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing before the first point.

        Args:
            sink: The files that are written.
            journal: Records each point once it is durable.
            most_nbytes: Bytes written since the last point from which on the writer waits.
            before_mark: Called before the journal records a point: another process that reads there that everything is
                durable may finish the output.
            clock: Seconds.
        """
        self._sink, self._journal, self._most_nbytes, self._clock = sink, journal, max_unsynced_nbytes, clock
        self._before_mark = before_record
        self._thread = ThreadPoolExecutor(1, "prep-marks")
        self._running: Future[None] | None = None
        self._ended_s = clock()

    def is_due(self, unsynced_nbytes: int) -> bool:
        """Whether to mark a point now, with so many bytes written since the last one."""
        if unsynced_nbytes >= self._most_nbytes:
            return True
        is_idle = self._running is None or self._running.done()
        return bool(unsynced_nbytes) and is_idle and self._clock() - self._ended_s >= SYNC_INTERVAL_S

    def submit(self, point: SyncPoint) -> None:
        """Make everything up to a point durable, once the point before it is. Raises what stopped that one."""
        self._wait()
        self._running = self._thread.submit(self._sync_and_record, point)

    def finish(self, point: SyncPoint) -> None:
        """Make the last point durable, and wait for it."""
        try:
            self.submit(point)
            self._wait()
        finally:
            self._thread.shutdown()

    def _wait(self) -> None:
        running, self._running = self._running, None
        if running:
            running.result()

    def _sync_and_record(self, point: SyncPoint) -> None:
        self._sink.sync()
        self._sink.check_unchanged()
        self._before_mark()
        self._journal.record(point.done_nbytes, point.digests, point.prefix)
        self._ended_s = self._clock()
