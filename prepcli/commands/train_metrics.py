"""The receivers of a run's metrics: a file per logging process, and TensorBoard and W&B of process 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.commands.train_files import store_at_end, write_run_file
from prepcli.commands.train_run import Run
from prepcli.engine.files import io_error
from prepcli.errors import usage_error
from prepcli.execution.run_place import RunPlace

if TYPE_CHECKING:
    from trainer.recipe.run_tables import Log
    from trainer.training.metrics import LogKey, MetricsLog

TENSORBOARD_FOLDER = "tensorboard"


def check_logs(log: Log, place: RunPlace) -> None:
    """Check that the logs of the recipe can be written.

    Raises:
        UsageError: The event files would be in an object store.
        PrepError: An extra is not installed.
    """
    from trainer.training.tensorboard_log import import_tensorboard
    from trainer.training.wandb_log import import_wandb

    if log.tensorboard is True and not place.is_on_disk:
        why = f"event files are appended to, and {place.name} is in an object store"
        raise usage_error("`log.tensorboard = true` needs a run in a folder", why, '`log.tensorboard = "FOLDER"`')
    if "://" in str(log.tensorboard):
        what = f'`log.tensorboard = "{log.tensorboard}"` is not a folder'
        raise usage_error(what, "event files are appended to", '`log.tensorboard = "FOLDER"`')
    if log.tensorboard:
        import_tensorboard()
    if log.wandb is not None:
        import_wandb()


@contextmanager
def open_metrics(run: Run, warn: Callable[[str], None]) -> Iterator[MetricsLog]:
    """Open the receivers of the metrics of this process; it has none if only process 0 logs.

    A run in an object store stores the metrics file at the start, with each step and at the end, after an error too.

    Args:
        run: The run.
        warn: Prints a warning.

    Yields:
        A MetricsLog that passes each line to all of them.

    Raises:
        PrepError: A file cannot be written, or an extra is not installed.
    """
    from trainer.training.metrics import (
        NO_LOG,
        MetricsLogs,
        MetricsWriter,
        metrics_file,
        remove_other_metrics,
        repeated_lines,
    )

    index, num_logging = run.group.index, run.group.count if run.recipe.log.all_workers else 1
    if index >= num_logging:
        yield NO_LOG
        return
    if index == 0 and not run.step:
        remove_other_metrics(run.folder, num_logging)
    try:
        run.folder.mkdir(parents=True, exist_ok=True)  # another host may have its own file system
    except OSError as error:
        raise io_error(run.folder, error) from error
    name = metrics_file(index)
    run.place.restore_file(name)
    repeated = frozenset["LogKey"]()
    if run.recipe.log.wandb is not None:
        repeated = repeated_lines(run.folder / name, run.step)
    with ExitStack() as stack:
        logs: list[MetricsLog] = [MetricsWriter(run.folder / name, run.step)]
        run.place.store_file(name)
        stack.enter_context(store_at_end(run.place, name))
        if index == 0:
            logs += _open_extra_logs(run, stack, logged=repeated, warn=warn)
        yield MetricsLogs(tuple(logs))


def _open_extra_logs(
    run: Run, stack: ExitStack, *, logged: Set[LogKey], warn: Callable[[str], None]
) -> Iterator[MetricsLog]:
    """Yield the logs of the recipe besides the metrics file.

    Args:
        run: The run.
        stack: Closes the logs.
        logged: Keys of the lines of repeated steps, which were removed from the metrics file.
        warn: Prints a warning.
    """
    log = run.recipe.log
    if log.tensorboard:
        from trainer.training.tensorboard_log import TensorBoardLog

        is_default = log.tensorboard is True
        folder = run.folder / TENSORBOARD_FOLDER if is_default else Path(str(log.tensorboard)) / run.recipe.name
        yield stack.enter_context(closing(TensorBoardLog(folder, run.step)))
    if log.wandb is not None:
        from trainer.training.wandb_log import ID_FILE, WandbLog

        run.place.restore_file(ID_FILE)
        config = run.recipe.model_dump(mode="json", exclude={"cluster", "log"})
        wandb_log = WandbLog(
            run.folder, log.wandb, name=run.recipe.name, config=config, step=run.step, logged=logged, warn=warn
        )
        stack.push(lambda kind, *_: wandb_log.close(has_failed=kind is not None))
        write_run_file(run, ID_FILE, f"{wandb_log.run_id}\n")
        yield wandb_log
