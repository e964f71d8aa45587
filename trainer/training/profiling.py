"""A profile of some steps of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

# Name of the folder in the folder of a run.
PROFILE_FOLDER = "profile"


@dataclass(slots=True)
class StepProfiler:
    """Records a trace of consecutive steps with JAX's profiler.

    An error of the profiler gives a warning and does not end the run.

    Attributes:
        first_step: The first recorded step, counted from 1.
        num_steps: Number of recorded steps.
        folder: Receives the trace.
        warn: Called with a message if the profiler fails.
        is_recording: Whether a trace has begun.
    """

    first_step: int
    num_steps: int
    folder: Path
    warn: Callable[[str], None]
    is_recording: bool = False

    def before_step(self, step: int, wait_for_steps: Callable[[], None]) -> None:
        """Begin or end the trace before a step.

        Args:
            step: The step to be taken.
            wait_for_steps: Waits until all earlier steps are done.
        """
        if self.is_recording and step == self.first_step + self.num_steps:
            wait_for_steps()
            self.stop()
        elif step == self.first_step:
            wait_for_steps()
            self.is_recording = self._try_profiler(self._start)

    def stop(self) -> None:
        """Write the trace if one has begun."""
        if self.is_recording:
            self.is_recording = False
            self._try_profiler(jax.profiler.stop_trace)

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(self.folder)

    def _try_profiler(self, function: Callable[[], None]) -> bool:
        """Return whether a function of the profiler succeeded."""
        try:
            function()
        except (OSError, RuntimeError) as error:
            self.warn(f"no profile was recorded: {error}")
            return False
        return True
