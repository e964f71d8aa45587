"""The interface for progress reports of the training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trainer.training.samples import Sample


class Callbacks(Protocol):
    """Receiver of the progress reports of the loop."""

    def on_compile(self, seconds: float) -> None:
        """Report the seconds of compiling the step."""
        ...

    def on_step(self, step: int) -> None:
        """Report a finished step."""
        ...

    def on_log(self, line: Mapping[str, Any], remaining_s: float | None) -> None:
        """Report a log line, and an estimate of the remaining seconds."""
        ...

    def on_evaluate(self, line: Mapping[str, Any]) -> None:
        """Report the log line of an evaluation."""
        ...

    def on_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Report the texts generated after a step."""
        ...

    def on_save(self, step: int, seconds: float) -> None:
        """Report a durable checkpoint, its step, and the seconds of saving it."""
        ...
