"""Metrics as TensorBoard event files (extra `tensorboard`). TensorFlow is not needed."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

from prepcli.core.errors import PrepError
from prepcli.stores.files import ACCESS_HINT
from trainer.training.metrics import MetricsLine, line_step, metric_values


class TensorBoardLog:
    """MetricsLog that appends an event file to a folder.

    The file begins with the step after which the run continues: TensorBoard then ignores later steps of earlier files,
    because the run takes them again.
    """

    def __init__(self, folder: Path, step: int) -> None:
        """Open a new event file.

        Args:
            folder: Folder of the event files.
            step: Start step of the run.

        Raises:
            PrepError: tensorboard is not installed, or the folder cannot be written.
        """
        event_pb2, summary_pb2, writer = import_tensorboard()
        self.folder = folder
        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        try:
            self._writer = writer.EventFileWriter(str(folder))
        except OSError as error:
            raise self._write_error(error) from error
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add_event(
            self._event(wall_time=time.time(), step=step + 1 if step else 0, session_log=start)
        )

    def write(self, line: MetricsLine) -> None:
        """Append the numbers of a line, visible to readers at once.

        Raise PrepError if the disk refuses them.
        """
        values = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in metric_values(line).items()
        ]
        self._add_event(
            self._event(
                wall_time=time.time(), step=line_step(line), summary=self._summary(value=values)
            )
        )

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _add_event(self, event: Any) -> None:
        try:
            self._writer.add_event(event)
            self._writer.flush()
        except OSError as error:
            raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> PrepError:
        return PrepError(f"cannot write {self.folder}", error.strerror or str(error), ACCESS_HINT)


def import_tensorboard() -> list[Any]:
    """Return TensorBoard's modules of events, summaries and event files.

    Raise PrepError if it is not installed.
    """
    names = (
        "compat.proto.event_pb2",
        "compat.proto.summary_pb2",
        "summary.writer.event_file_writer",
    )
    try:
        return [import_module(f"tensorboard.{name}") for name in names]
    except ImportError:
        what = "`log.tensorboard` needs TensorBoard"
        hint = "`pip install 'prepcli[tensorboard]'`"
        raise PrepError(what, "tensorboard is not installed", hint) from None
