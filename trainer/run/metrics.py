"""Logs of a run: metrics to a file per logging process, TensorBoard and W&B, and the file of generated texts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Set
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.core.errors import Key, text, usage_error
from prepcli.execution.checkpoint_manager import CheckpointManager
from prepcli.execution.training_storage import RunStorage
from prepcli.formats.run_steps import score_group
from prepcli.planning.manifest_fields import Manifest
from prepcli.stores.files import io_error
from trainer.run.run import Run
from trainer.run.run_record import SAMPLES_FILE
from trainer.run.storage import store_at_end, write_run_file

if TYPE_CHECKING:
    from trainer.recipe.run_tables import Log
    from trainer.training.eval_metrics import Patience
    from trainer.training.events import MissingEvents
    from trainer.training.loop_config import LoopConfig
    from trainer.training.metrics import LogKey, MetricsLog

TENSORBOARD_FOLDER = "tensorboard"


def check_logs(log: Log, storage: RunStorage) -> None:
    """Check that the logs of the recipe can be written.

    Raises:
        UsageError: The event files would be in an object store.
        PrepError: An extra is not installed.
    """
    from trainer.training.tensorboard_log import import_tensorboard
    from trainer.training.wandb_log import import_wandb

    hint = text("{}", Key("log.tensorboard", "FOLDER"))
    # Objects of a store are written whole. Nothing can be appended to one.
    if log.tensorboard is True and not storage.is_on_disk:
        what = text("{} needs a run in a folder", Key("log.tensorboard", True))
        why = f"event files are appended to, and {storage.name} is in an object store"
        raise usage_error(what, why, hint)
    if "://" in str(log.tensorboard):
        what = text("{} is not a folder", Key("log.tensorboard", log.tensorboard))
        raise usage_error(
            what, "event files are appended to, and an object store cannot append", hint
        )
    if log.tensorboard:
        import_tensorboard()
    if log.wandb is not None:
        import_wandb()


def find_missing_events(
    run: Run, loop: LoopConfig, step: int, *, ends_early: bool = False
) -> MissingEvents:
    """Return the events of a saved step that were stopped or killed before their end, as process 0 sees the logs.

    Args:
        run: The run.
        loop: Configuration of the training loop.
        step: Step to continue after. 0 means a new run, in which no event is missing.
        ends_early: Whether the run has ended early with this step.

    Raises:
        PrepError: A log cannot be read.
    """
    from trainer.training.events import NO_MISSING_EVENTS, MissingEvents
    from trainer.training.metrics import METRICS_FILE, num_logged_events

    missing = NO_MISSING_EVENTS
    if run.is_first and step:
        _make_folder(run)
        metrics = run.storage.fetch_file(METRICS_FILE, run.folder)
        samples = run.storage.fetch_file(SAMPLES_FILE, run.folder)
        # The parameters of a finished run may be saved in a form that cannot be loaded for training. A run without its
        # log was moved without it. In both cases no event is repeated.
        is_loadable = run.recipe.checkpoint.optimizer_state and loop.saved_dtype is None
        is_finished = ends_early or step == loop.steps
        if metrics.exists() and (is_loadable or not is_finished):
            missing = MissingEvents(
                loop.is_evaluation_due(step) and not num_logged_events(metrics, step),
                max(
                    0,
                    loop.num_samples_due(step, ends_early=ends_early)
                    - num_logged_events(samples, step),
                ),
            )
    # All processes evaluate and sample together, or none.
    words = run.group.broadcast(
        "missing events", f"{int(missing.evaluation)} {missing.num_samples}"
    ).split()
    return MissingEvents(bool(int(words[0])), int(words[1]))


def find_patience(run: Run, loop: LoopConfig, manifest: Manifest, step: int) -> Patience:
    """Return the evaluations up to a saved step that count for `eval.patience`, as process 0 sees them.

    Args:
        run: The run.
        loop: Configuration of the training loop.
        manifest: Manifest of the step.
        step: Step to continue after. 0 means a new run.

    Raises:
        PrepError: A log cannot be read.
    """
    from trainer.training.eval_metrics import NO_EVALUATIONS, Patience
    from trainer.training.metrics import METRICS_FILE, logged_evaluation

    if not step or not run.recipe.eval.patience:
        return NO_EVALUATIONS
    metric = loop.best_metric
    recorded = Patience.of_manifest(manifest, loop.manifest_fields, metric.name)
    patience = recorded or NO_EVALUATIONS
    if run.is_first and recorded is not None and recorded.last_step != step:
        # A signal had stopped the evaluation of this step, and a later start has repeated it without a save.
        _make_folder(run)
        line = logged_evaluation(run.storage.fetch_file(METRICS_FILE, run.folder), step)
        if line is not None:
            patience = patience.after(step, metric.cost(line))
    words = run.group.broadcast("patience", json.dumps(patience.to_json()))
    return Patience.from_json(json.loads(words))


def find_lowest_cost(run: Run, loop: LoopConfig, checkpoints: CheckpointManager) -> float:
    """Return the lowest comparable cost of a saved step, as process 0 sees the run. See `BestMetric`.

    The result is infinite without a saved step.
    """
    if not loop.saves_best:
        return math.inf
    lowest = math.inf
    if run.is_first:
        metric = loop.best_metric
        lowest = checkpoints.lowest_cost(score_group(metric.name, loop.manifest_fields))
    # `repr` of a float is exact: all processes compare later values with the same one, and so
    # save the same steps.
    return float(run.group.broadcast("lowest cost", repr(lowest)))


@contextmanager
def open_metrics(run: Run, step: int) -> Iterator[MetricsLog]:
    """Open the receivers of the metrics of this process.

    It has none if only process 0 logs. A run in an object store stores the metrics file at the
    start, with each step and at the end, after an error too.

    Args:
        run: The run.
        step: Step to continue after. 0 means a new run.

    Yields:
        A MetricsLog that passes each line to all of them.

    Raises:
        PrepError: A file cannot be written, or an extra is not installed.
    """
    from trainer.training.metrics import (
        NO_LOG,
        MetricsLogs,
        MetricsWriter,
        metrics_file_name,
        remove_other_metrics,
        repeated_lines,
    )

    index = run.group.index
    num_logging = run.group.count if run.recipe.log.all_workers else 1
    if index >= num_logging:
        yield NO_LOG
        return
    if index == 0 and not step:
        remove_other_metrics(run.folder, num_logging)
    # Every logging process creates the folder: another host may have its own file system.
    _make_folder(run)
    name = metrics_file_name(index)
    run.storage.fetch_file(name, run.folder)
    repeated = frozenset["LogKey"]()
    if run.recipe.log.wandb is not None:
        # Read before MetricsWriter removes these lines from the file.
        repeated = repeated_lines(run.folder / name, step)
    with ExitStack() as stack:
        writer = stack.enter_context(closing(MetricsWriter(run.folder / name, step)))
        logs: list[MetricsLog] = [writer]
        run.storage.store_file(name)
        stack.enter_context(store_at_end(run.storage, name))
        if index == 0:
            logs += _open_extra_logs(run, step, stack, logged=repeated)
        yield MetricsLogs(tuple(logs))


def _make_folder(run: Run) -> None:
    """Create the local folder of a run, to which a bucket downloads the logs."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise io_error(run.folder, error) from error


def _open_extra_logs(
    run: Run, step: int, stack: ExitStack, *, logged: Set[LogKey]
) -> Iterator[MetricsLog]:
    """Yield the logs of the recipe in addition to the metrics file.

    Args:
        run: The run.
        step: Step to continue after.
        stack: Closes the logs.
        logged: Keys of the lines of repeated steps, which were removed from the metrics file.
    """
    log = run.recipe.log
    if log.tensorboard:
        from trainer.training.tensorboard_log import TensorBoardLog

        folder = run.folder / TENSORBOARD_FOLDER
        if log.tensorboard is not True:
            folder = Path(log.tensorboard) / run.recipe.name
        yield stack.enter_context(closing(TensorBoardLog(folder, step)))
    if log.wandb is not None:
        from trainer.training.wandb_log import ID_FILE, WandbLog

        run.storage.fetch_file(ID_FILE, run.folder)
        config = run.recipe.model_dump(mode="json", exclude={"cluster", "log"})
        wandb_log = WandbLog(
            run.folder,
            log.wandb,
            name=run.recipe.name,
            config=config,
            step=step,
            logged=logged,
            warn=run.observer.warn,
        )
        # `push` passes the exception of the block, so W&B shows a failed run as failed.
        stack.push(lambda kind, *_: wandb_log.close(has_failed=kind is not None))
        write_run_file(run, ID_FILE, f"{wandb_log.run_id}\n")
        yield wandb_log


@contextmanager
def open_sample_log(run: Run, step: int, *, has_sampler: bool) -> Iterator[MetricsLog]:
    """Open the file of the generated texts in process 0, to continue after a step.

    The log of every other process is empty. The folder of the run must exist.

    Args:
        run: The run.
        step: Step to continue after. 0 means a new run.
        has_sampler: Whether the recipe has prompts.

    Raises:
        PrepError: The file cannot be written.
    """
    from trainer.training.metrics import NO_LOG, MetricsWriter

    if not run.is_first:
        yield NO_LOG
        return
    path = run.folder / SAMPLES_FILE
    run.storage.fetch_file(SAMPLES_FILE, run.folder)
    if not has_sampler and not path.exists():
        yield NO_LOG
        return
    # Also without prompts: the file may have texts of later steps, which an earlier start took with prompts.
    with closing(MetricsWriter(path, step)) as log:
        run.storage.store_file(SAMPLES_FILE)
        with store_at_end(run.storage, SAMPLES_FILE):
            yield log
