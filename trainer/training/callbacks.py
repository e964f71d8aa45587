"""The receiver of the progress reports of a training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trainer.training.evaluation import EvaluationResult
    from trainer.training.log_lines import StepLine
    from trainer.training.samples import Sample


class Callbacks(Protocol):
    """Receiver of the progress reports of the loop."""

    def on_compile(self, seconds: float) -> None:
        """Report the seconds of compiling the step."""
        ...

    def on_step(self, step: int, remaining_s: float | None) -> None:
        """Report a finished step, and an estimate of the remaining seconds."""
        ...

    def on_progress(self, done: int, total: int) -> None:
        """Report the progress of an evaluation in batches, or of samples in tokens."""
        ...

    def on_log(self, line: StepLine, remaining_s: float | None) -> None:
        """Report a log line, and an estimate of the remaining seconds."""
        ...

    def on_evaluate(self, step: int, result: EvaluationResult) -> None:
        """Report an evaluation after a step."""
        ...

    def on_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Report the texts generated after a step."""
        ...

    def on_save(self, step: int, seconds: float) -> None:
        """Report a durable checkpoint, its step, and the seconds of saving it."""
        ...
