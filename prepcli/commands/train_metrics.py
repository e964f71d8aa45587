"""The receivers of a run's metrics: a file per logging process, and TensorBoard and W&B of process 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.commands.train_run import Run
from prepcli.engine.files import io_error
from prepcli.errors import usage_error
from prepcli.execution.run_place import RunPlace

if TYPE_CHECKING:
    from trainer.recipe.run_tables import Log
    from trainer.training.metrics import MetricsLog

TENSORBOARD_FOLDER = "tensorboard"


def check_logs(log: Log, place: RunPlace) -> None:
    """Raise UsageError if a log of the recipe cannot be written to the place of the run."""
    if log.tensorboard is True and not place.is_on_disk:
        why = f"event files are appended to, and {place.name} is in an object store"
        raise usage_error("`log.tensorboard = true` needs a run in a folder", why, '`log.tensorboard = "FOLDER"`')


@contextmanager
def open_metrics(run: Run) -> Iterator[MetricsLog]:
    """Open the receivers of the metrics of this process; it has none if only process 0 logs.

    A run in an object store stores the metrics file at the start, with each step and after the last line.

    Yields:
        A MetricsLog that passes each line to all of them.

    Raises:
        PrepError: A file cannot be written, or an extra is not installed.
    """
    from trainer.training.metrics import MetricsLogs, MetricsWriter, metrics_file, read_metrics, remove_other_metrics

    index, num_logging = run.group.index, run.group.count if run.recipe.log.all_workers else 1
    if index >= num_logging:
        yield MetricsLogs(())
        return
    if index == 0 and not run.step:
        remove_other_metrics(run.folder, num_logging)
    try:
        run.folder.mkdir(parents=True, exist_ok=True)  # another host may have its own file system
    except OSError as error:
        raise io_error(run.folder, error) from error
    name = metrics_file(index)
    run.place.restore_file(name)
    logged = max((line["step"] for line in read_metrics(run.folder / name)), default=-1)
    with ExitStack() as stack:
        logs: list[MetricsLog] = [MetricsWriter(run.folder / name, run.step)]
        run.place.store_file(name)
        if index == 0:
            for log in _open_extra_logs(run, logged):
                stack.callback(log.close)
                logs.append(log)
        yield MetricsLogs(tuple(logs))
    run.place.store_file(name)


def _open_extra_logs(run: Run, logged: int) -> Iterator[MetricsLog]:
    """Yield the logs of the recipe besides the metrics file.

    Args:
        run: The run.
        logged: Last step of the metrics file, before the steps that are taken again were removed.
    """
    log = run.recipe.log
    if log.tensorboard:
        from trainer.training.tensorboard_log import TensorBoardLog

        is_default = log.tensorboard is True
        folder = run.folder / TENSORBOARD_FOLDER if is_default else Path(str(log.tensorboard)) / run.recipe.name
        yield TensorBoardLog(folder, run.step)
    if log.wandb is not None:
        from trainer.training.wandb_log import ID_FILE, WandbLog

        run.place.restore_file(ID_FILE)
        config = run.recipe.model_dump(mode="json", exclude={"cluster", "log"})
        yield WandbLog(run.folder, log.wandb, name=run.recipe.name, config=config, step=run.step, logged=logged)
        run.place.store_file(ID_FILE)
