"""Saves that run beside the training steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FinishedSave:
    """A PendingSave that ended before it was returned, after `seconds`."""

    seconds: float
    is_done = True

    def wait(self) -> float:
        """Return the seconds that the save took."""
        return self.seconds


class BackgroundSave:
    """A PendingSave in a thread of its own. A process that ends by an error does not wait for it."""

    def __init__(self, save: Callable[[], None]) -> None:
        """Start the thread."""
        self._save = save
        self._error: BaseException | None = None
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="prep-save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        start_s = time.monotonic()
        try:
            self._save()
        except BaseException as error:
            self._error = error
        self._seconds = time.monotonic() - start_s

    @property
    def is_done(self) -> bool:
        """Whether the save has ended, also by an error."""
        return not self._thread.is_alive()

    def wait(self) -> float:
        """Wait until the checkpoint is durable; return the seconds that the save took, or raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._seconds
