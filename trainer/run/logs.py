"""The logs and other files of a run: metrics and generated texts, TensorBoard and W&B."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prepcli.core.errors import Key, PrepError, text, usage_error
from prepcli.execution.training_storage import RunStorage
from prepcli.stores.files import (
    ACCESS_HINT,
    io_error,
    open_regular_file,
    read_regular_file,
    write_file,
)
from trainer.run.run import Run
from trainer.run.run_record import SAMPLES_FILE
from trainer.training.metrics import (
    METRICS_FILE,
    FileLog,
    LogKey,
    MetricsFile,
    MetricsFileLog,
    MetricsLine,
    MetricsLog,
    RunLog,
    SamplesFileLog,
    line_step,
    log_key,
    metric_values,
    metrics_file_name,
    remove_other_metrics,
    repeated_lines,
)

if TYPE_CHECKING:
    from trainer.recipe.tables import Log

CSV_FILE = "metrics.csv"
TENSORBOARD_FOLDER = "tensorboard"
ID_FILE = "wandb-id"


class CsvLog(FileLog, MetricsLog):
    """Table with a row for each line of the metrics file, and a column for each name in its lines.

    Each start makes it again from the metrics file, so that a resumed run neither lacks a row nor repeats one.
    """

    @staticmethod
    def check(setting: bool, storage: RunStorage) -> None:
        """Do nothing: every run can have the file. See `check_logs`."""

    @classmethod
    def open(cls, run: Run, setting: bool, step: int) -> CsvLog:
        """Open the log of a run. See `open_logs`."""
        log = cls(run.folder / CSV_FILE)
        # At step 0 the metrics file loses all lines, those of an evaluation at step 0 too.
        for line in MetricsFile(run.folder / METRICS_FILE) if step else ():
            if line_step(line) <= step:
                log.write(line)
        return log

    def __init__(self, path: Path) -> None:
        """Replace the file by an empty one. See `FileLog`."""
        super().__init__(path)
        self._columns: list[str] = []

    def write(self, line: MetricsLine) -> None:
        """Append a row. A value that is not finite is None in a line, and an empty cell in a row."""
        new_columns = [name for name in line if name not in self._columns]
        if new_columns:
            # E.g. the first evaluation: earlier rows have empty cells for its values.
            self._columns += new_columns
            self.replace(self._widened_rows())
        self.append(_csv_row(line.get(name) for name in self._columns))

    def _widened_rows(self) -> Iterator[bytes]:
        """Yield the header, and the rows of the file with a cell for each column."""
        yield _csv_row(self._columns)
        with io.TextIOWrapper(open_regular_file(self.path), encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            next(rows, None)
            for row in rows:
                yield _csv_row(row + [""] * (len(self._columns) - len(row)))


def _csv_row(cells: Iterable[object]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue().encode()


class TensorBoardLog(MetricsLog):
    """Log that appends an event file to a folder.

    The file begins with the step after which the run continues: TensorBoard then ignores later steps of earlier files,
    because the run takes them again.
    """

    @staticmethod
    def check(setting: str | bool, storage: RunStorage) -> None:
        """Check that event files can be written. See `check_logs`."""
        hint = text("{}", Key("log.tensorboard", "FOLDER"))
        # Objects of a store are written whole. Nothing can be appended to one.
        if setting is True and not storage.is_on_disk:
            what = text("{} needs a run in a folder", Key("log.tensorboard", True))
            why = f"event files are appended to, and {storage.name} is in an object store"
            raise usage_error(what, why, hint)
        if "://" in str(setting):
            what = text("{} is not a folder", Key("log.tensorboard", setting))
            raise usage_error(
                what, "event files are appended to, and an object store cannot append", hint
            )
        import_tensorboard()

    @classmethod
    def open(cls, run: Run, setting: str | bool, step: int) -> TensorBoardLog:
        """Open the log of a run. See `open_logs`."""
        folder = run.folder / TENSORBOARD_FOLDER
        if setting is not True:
            folder = Path(str(setting)) / run.recipe.name
        return cls(folder, step)

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
        """Append the numbers of a line, visible to readers at once. Raise PrepError if the disk refuses them."""
        values = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in metric_values(line).items()
        ]
        self._add_event(
            self._event(
                wall_time=time.time(), step=line_step(line), summary=self._summary(value=values)
            )
        )

    def close(self, *, has_failed: bool = False) -> None:
        """Close the file. Raise PrepError if the disk refuses the rest, unless the run has failed already."""
        try:
            self._writer.close()
        except OSError as error:
            if not has_failed:
                raise self._write_error(error) from error

    def _add_event(self, event: Any) -> None:
        try:
            self._writer.add_event(event)
            self._writer.flush()
        except OSError as error:
            raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> PrepError:
        return PrepError(f"cannot write {self.folder}", error.strerror or str(error), ACCESS_HINT)


def import_tensorboard() -> list[Any]:
    """Return TensorBoard's modules of events, summaries and event files. Raise PrepError if it is not installed."""
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


class WandbLog(MetricsLog):
    """Log that continues the W&B run with the id in the run's folder, or starts a new one.

    A failure of W&B after the start is a warning, and ends the log but not the training run.

    Attributes:
        run_id: Id of the W&B run, for the caller to write to the run's folder.
    """

    @staticmethod
    def check(setting: Mapping[str, object], storage: RunStorage) -> None:
        """Check that W&B is installed. See `check_logs`."""
        import_wandb()

    @classmethod
    def open(cls, run: Run, setting: Mapping[str, object], step: int) -> WandbLog:
        """Open the log of a run. See `open_logs`."""
        run.storage.fetch_file(ID_FILE, run.folder)
        log = cls(
            run.folder,
            setting,
            name=run.recipe.name,
            config=run.recipe.model_dump(mode="json", exclude={"cluster", "log"}),
            step=step,
            logged=repeated_lines(run.folder / METRICS_FILE, step),
            warn=run.observer.warn,
        )
        write_run_file(run, ID_FILE, f"{log.run_id}\n")
        return log

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
            config: The recipe, to show with the metrics.
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
        except Exception as error:
            raise PrepError(
                "W&B did not start a run",
                _error_text(error),
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
        # Not only `wandb.Error`: a service that has ended raises an error of its own.
        except Exception as error:
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
        except Exception as error:
            self._stop_logging(error)

    def _stop_logging(self, error: Exception) -> None:
        self._run = None
        self._warn(f"W&B failed and gets no more metrics of this run: {_error_text(error)}")


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__


def import_wandb() -> Any:
    """Return the module `wandb`. Raise PrepError if it is not installed."""
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


class OptionalLog(Protocol):
    """The class of an optional log."""

    def check(self, setting: Any, storage: RunStorage) -> None:
        """Check that a run can have the log. See `check_logs`."""

    def open(self, run: Run, setting: Any, step: int) -> MetricsLog:
        """Open the log of a run. See `open_logs`."""
        ...


# The optional logs by their keys of the recipe's `[log]`. Each gets the value of its key.
LOGS: Mapping[str, OptionalLog] = {"csv": CsvLog, "tensorboard": TensorBoardLog, "wandb": WandbLog}


def check_logs(log: Log, storage: RunStorage) -> None:
    """Check that the logs of the recipe can be written.

    Raises:
        UsageError: The event files would be in an object store.
        PrepError: An extra is not installed.
    """
    for kind, setting in _enabled_logs(log):
        kind.check(setting, storage)


def _enabled_logs(log: Log) -> Iterator[tuple[OptionalLog, Any]]:
    """Yield the classes of the optional logs of a recipe, and the value of the key of each."""
    for key, kind in LOGS.items():
        setting = getattr(log, key)
        # An empty table has no settings, and turns a log on.
        if setting or setting == {}:
            yield kind, setting


@contextmanager
def open_logs(run: Run, step: int, *, has_sampler: bool) -> Iterator[list[RunLog]]:
    """Open the files and services that this process logs to. Close them after the block.

    A run in an object store stores its files at the start, with each step and at the end, after an error too.

    Args:
        run: The run.
        step: Step to continue after. 0 means a new run.
        has_sampler: Whether the recipe has prompts.

    Raises:
        PrepError: A file cannot be written, or an extra is not installed.
    """
    index = run.group.index
    num_logging = 1
    if run.recipe.log.all_workers:
        num_logging = run.group.count
    if index >= num_logging:
        yield []
        return
    if index == 0 and not step:
        remove_other_metrics(run.folder, num_logging)
    # Every logging process creates the folder: another host may have its own file system.
    make_folder(run)
    name = metrics_file_name(index)
    run.storage.fetch_file(name, run.folder)
    with ExitStack() as stack:
        optional_logs: list[RunLog] = []
        if index == 0:
            # Before the file of metrics is opened, which removes the lines of repeated steps.
            for kind, setting in _enabled_logs(run.recipe.log):
                optional_logs.append(_keep(run, kind.open(run, setting, step), stack))
            # A table that an earlier start made has the rows of this one as well.
            if not run.recipe.log.csv and run.storage.fetch_file(CSV_FILE, run.folder).exists():
                optional_logs.append(_keep(run, CsvLog.open(run, True, step), stack))
        logs = [_keep(run, MetricsFileLog(run.folder / name, step), stack), *optional_logs]
        if index == 0:
            run.storage.fetch_file(SAMPLES_FILE, run.folder)
            # Also without prompts: the file may have texts of later steps, which an earlier start took with prompts.
            path = run.folder / SAMPLES_FILE
            if has_sampler or path.exists():
                logs.append(_keep(run, SamplesFileLog(path, step), stack))
        yield logs


def _keep(run: Run, log: RunLog, stack: ExitStack) -> RunLog:
    """Close a log at the end of a stack. Store its file in the run now, and at the end before it is closed."""
    # `push` passes the exception of the block, so W&B shows a failed run as failed.
    stack.push(lambda kind, *_: log.close(has_failed=kind is not None))
    if isinstance(log, FileLog):
        run.storage.store_file(log.path.name)
        stack.enter_context(_store_at_end(run.storage, log.path.name))
    return log


@contextmanager
def _store_at_end(storage: RunStorage, name: str) -> Iterator[None]:
    """Store a file of the run at the end. After another error, ignore errors of the store."""
    try:
        yield
    except BaseException:
        # The error of the block is the one to report, and not a failed upload after it.
        with suppress(PrepError):
            storage.store_file(name)
        raise
    storage.store_file(name)


class WatchdogLog(RunLog):
    """Log that passes the phase of a run to its watchdog."""

    def __init__(self, run: Run) -> None:
        """Set the run."""
        self._run = run

    def on_phase(self, phase: str) -> None:
        """Set the phase of this process."""
        self._run.enter_phase(phase)


def write_run_file(run: Run, name: str, text: str) -> None:
    """Replace a file of a run and store it. Raise PrepError if it cannot be written."""
    path = run.folder / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode())
    except OSError as error:
        raise io_error(path, error) from error
    run.storage.store_file(name)


def make_folder(run: Run) -> None:
    """Create the local folder of a run, to which a bucket downloads the logs."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise io_error(run.folder, error) from error
