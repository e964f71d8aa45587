"""Exports of a run's steps, in a thread during the training steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterable

from prepcli.core.unexpected import as_prep_error


class StepExports:
    """Exporter of the steps that are multiples of an interval. It exports one step at a time."""

    def __init__(
        self,
        every: int,
        *,
        export: Callable[[int], None],
        warn: Callable[[str], None],
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Set the interval. The thread starts with the first export.

        Args:
            every: Steps between two exports.
            export: Exports a step. Has no effect if its export is complete.
            warn: Called with a message for a step whose export failed, which does not end the run.
            note: Called with a message about the exports that `wait` waits for.
        """
        self._every = every
        self._export = export
        self._warn = warn
        self._note = note
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._waiting: set[int] = set()
        self._thread: threading.Thread | None = None
        self._is_abandoned = False

    def start(self, step: int) -> None:
        """Export a step in the background if it is due."""
        if step % self._every or self._is_abandoned:
            return
        # Before the queue: the thread may end a short export at once, and its `discard` must come after this `add`.
        # Otherwise the step would count as in use forever.
        self._waiting.add(step)
        self._queue.put(step)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._export_steps, name="prep-export", daemon=True
            )
            self._thread.start()

    def start_missing(self, steps: Iterable[int]) -> None:
        """Export the due steps of an earlier process. A kill may have interrupted their exports."""
        for step in steps:
            self.start(step)

    def in_use(self) -> Collection[int]:
        """Return the steps of waiting and running exports."""
        # A copy, because the thread discards steps while the caller iterates.
        return frozenset(self._waiting)

    def abandon(self) -> None:
        """Start no further export, and do not wait for the present one.

        The next start of the run makes the missing exports.
        """
        self._is_abandoned = True
        # None wakes the thread from `get`. The thread is a daemon, so the process may end in the middle of an export.
        self._queue.put(None)
        self._thread = None

    def wait(self) -> None:
        """Wait until all exports have ended, unless they are abandoned."""
        if self._thread is not None:
            if steps := sorted(self.in_use()):
                self._note(
                    f"exporting step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
                )
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _export_steps(self) -> None:
        while (step := self._queue.get()) is not None and not self._is_abandoned:
            try:
                self._export(step)
            except Exception as raised:
                # Otherwise the error would end the thread, and no later step would be exported.
                error = as_prep_error(raised)
                self._warn(
                    f"step {step} was not exported: {error.what}{f' - {error.why}' if error.why else ''}"
                )
            finally:
                # Also after a failed export: otherwise a step that cannot be exported would never be removed.
                self._waiting.discard(step)
