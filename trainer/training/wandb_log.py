"""Log metrics to Weights & Biases (extra `wandb`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

from prepcli.core.errors import PrepError
from prepcli.stores.files import ACCESS_HINT, read_regular_file
from trainer.training.metrics import LogKey, MetricsLine, line_step, log_key, metric_values

ID_FILE = "wandb-id"


class WandbLog:
    """MetricsLog that continues the W&B run with the id in the run's folder, or starts a new one.

    A failure of W&B after the start is a warning, and ends the log but not the training run.

    Attributes:
        run_id: Id of the W&B run, for the caller to write to the run's folder.
    """

    def __init__(
        self,
        folder: Path,
        table: Mapping[str, object],
        *,
        name: str,
        config: Mapping[str, object],
        step: int,
        logged: Set[LogKey],
        warn: Callable[[str], None],
    ) -> None:
        """Start or continue the W&B run.

        Args:
            folder: Folder of the run.
            table: The recipe's `log.wandb`.
            name: Name of the run, unless the table has one.
            config: The recipe, to show beside the metrics.
            step: Start step of the run. At 0 a new W&B run is started.
            logged: Keys of the lines that W&B already has and that this start writes again, because
                it repeats their steps. They are skipped: W&B does not overwrite a step.
            warn: Prints a warning.

        Raises:
            PrepError: wandb is not installed, refuses the run, or the id cannot be read.
        """
        wandb = import_wandb()
        options: dict[str, Any] = {"name": name} | {
            key: value for key, value in table.items() if key != "offline"
        }
        # Without an id a new run begins, which has no line yet.
        run_id = ""
        self._logged = frozenset[LogKey]()
        if step:
            run_id = _read_id(folder)
        if run_id:
            self._logged = logged
        self._warn = warn
        self._errors = (wandb.Error, OSError)
        try:
            run = wandb.init(
                **options,
                id=run_id or None,
                resume="allow",
                mode="offline" if table.get("offline") else "online",
                dir=folder,
                config=dict(config),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except self._errors as error:
            raise PrepError(
                "W&B did not start a run",
                str(error),
                "`log.wandb.offline = true`, or `wandb login`",
            ) from error
        self.run_id: str = run.id
        self._run: Any = run  # None after a failure

    def write(self, line: MetricsLine) -> None:
        """Log the numbers of a line, unless an earlier start of the run has logged them."""
        if self._run is None or log_key(line) in self._logged:
            return
        try:
            self._run.log(metric_values(line), step=line_step(line))
        except self._errors as error:
            self._stop_logging(error)

    def close(self, *, has_failed: bool = False) -> None:
        """Wait until W&B has stored everything.

        Args:
            has_failed: Whether the training run failed. W&B then shows its run as failed.
        """
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=int(has_failed))
        except self._errors as error:
            self._stop_logging(error)

    def _stop_logging(self, error: Exception) -> None:
        self._run = None
        self._warn(f"W&B failed and gets no more metrics of this run: {error}")


def import_wandb() -> Any:
    """Return the module `wandb`.

    Raise PrepError if it is not installed.
    """
    try:
        import wandb
    except ImportError:
        what = "`log.wandb` needs Weights & Biases"
        hint = "`pip install 'prepcli[wandb]'`"
        raise PrepError(what, "wandb is not installed", hint) from None
    return wandb


def _read_id(folder: Path) -> str:
    """Return the id of the run in a folder, or an empty text if it has none."""
    try:
        return read_regular_file(folder / ID_FILE).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        what = f"cannot read {folder / ID_FILE}"
        raise PrepError(what, error.strerror or str(error), ACCESS_HINT) from error
