"""Metrics in a run of Weights & Biases (extra `wandb`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.models.errors import PrepError
from trainer.training.metrics import metric_values

ID_FILE = "wandb-id"


class WandbLog:
    """MetricsLog that continues the W&B run whose id is kept in the run's folder, or starts a new one."""

    def __init__(
        self, folder: Path, table: Mapping[str, Any], *, name: str, config: Mapping[str, Any], step: int, logged: int
    ) -> None:
        """Start or continue the W&B run.

        Args:
            folder: Folder of the run.
            table: The recipe's `log.wandb`.
            name: Name of the run, unless the table has one.
            config: The recipe, to show beside the metrics.
            step: Start step of the run; at 0 a new W&B run is started.
            logged: Last step of earlier starts. W&B cannot take back its metrics, which are the same again.

        Raises:
            PrepError: wandb is not installed, refuses the run, or the id cannot be read or written.
        """
        try:
            import wandb
        except ImportError:
            what, hint = "`log.wandb` needs Weights & Biases", "`pip install 'prepcli[wandb]'`"
            raise PrepError(what, "wandb is not installed", hint) from None
        options: dict[str, Any] = {"name": name} | {key: value for key, value in table.items() if key != "offline"}
        run_id = _read_id(folder) if step else ""
        self._last_logged = logged if run_id else -1
        try:
            self._run = wandb.init(
                **options,
                id=run_id or None,
                resume="allow",
                mode="offline" if table.get("offline") else "online",
                dir=folder,
                config=dict(config),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise PrepError(
                "W&B did not start a run", str(error), "`log.wandb.offline = true`, or `wandb login`"
            ) from error
        _write_id(folder, self._run.id)

    def write(self, line: Mapping[str, Any]) -> None:
        """Log the numbers of a line, unless an earlier start of the run has logged its step."""
        if line["step"] > self._last_logged:
            self._run.log(metric_values(line), step=line["step"])

    def close(self) -> None:
        """Wait until W&B has stored everything."""
        self._run.finish()


def _read_id(folder: Path) -> str:
    try:
        return (folder / ID_FILE).read_text().strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise PrepError(f"cannot read {folder / ID_FILE}", error.strerror or str(error)) from error


def _write_id(folder: Path, run_id: str) -> None:
    try:
        (folder / ID_FILE).write_text(f"{run_id}\n")
    except OSError as error:
        raise PrepError(f"cannot write {folder / ID_FILE}", error.strerror or str(error)) from error
