"""The logs of a run: its metrics file, TensorBoard, Weights & Biases, and curves in bounded memory."""

from __future__ import annotations

import csv
import errno
import math
import os
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prepcli.core.errors import PrepError, UsageError
from trainer.recipe.tables import Log
from trainer.run.logs import CSV_FILE, ID_FILE, TensorBoardLog, WandbLog, check_logs, open_logs
from trainer.run.run_record import (
    MAX_CURVES,
    MAX_MEDIAN_VALUES,
    EvenSample,
    RunMetrics,
    RunningCurve,
)
from trainer.training.metrics import METRICS_FILE, MetricsLog, read_metrics

# The receivers of a run's metrics: their checks, and the end of a run that fails.

OFFLINE_TABLE = {"project": "p", "offline": True}


class FakeStorage:
    """A storage that records the metrics of each stored file, and may refuse files."""

    is_on_disk = False
    name = "gs://bucket/run"

    def __init__(self, folder: Path) -> None:
        self.local_folder, self.stored = folder, list[tuple[str, list[int]]]()
        self.is_broken = False

    def fetch_file(self, name: str, folder: Path) -> Path:
        """Return the local path: the store is empty."""
        return folder / name

    def store_file(self, name: str) -> None:
        if self.is_broken:
            raise PrepError("cannot reach the store")
        self.stored.append(
            (name, [line["step"] for line in read_metrics(self.local_folder / METRICS_FILE)])
        )


def make_run(folder: Path, **log: Any) -> Any:
    recipe = SimpleNamespace(name="run", log=Log(**log), model_dump=lambda **options: {})
    group = SimpleNamespace(index=0, count=1)
    observer = SimpleNamespace(warn=print)
    return SimpleNamespace(
        group=group, recipe=recipe, observer=observer, folder=folder, storage=FakeStorage(folder)
    )


def fail_at_step_3(run: Any, *, breaks_storage: bool = False) -> None:
    with open_logs(run, 0, has_sampler=False) as logs:
        for log in logs:
            assert isinstance(log, MetricsLog)
            log.write({"step": 1, "loss": 1.0})
            log.write({"step": 2, "loss": 1.0})
        run.storage.is_broken = breaks_storage
        raise RuntimeError("step 3")


def test_metrics_of_a_failed_run_are_stored(tmp_path: Path):
    run = make_run(tmp_path)
    with pytest.raises(RuntimeError, match="step 3"):
        fail_at_step_3(run)
    assert run.storage.stored == [(METRICS_FILE, []), (METRICS_FILE, [1, 2])]


def test_first_error_is_kept_if_metrics_cannot_be_stored(tmp_path: Path):
    run = make_run(tmp_path)
    with pytest.raises(RuntimeError, match="step 3"):
        fail_at_step_3(run, breaks_storage=True)
    run.storage.is_broken = False
    with pytest.raises(PrepError, match="cannot reach"), open_logs(run, 0, has_sampler=False):
        run.storage.is_broken = True


def test_failed_run_is_failed_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(RuntimeError, match="step 3"):
        fail_at_step_3(make_run(tmp_path, wandb=OFFLINE_TABLE))
    assert wandb.exit_codes == [1]
    with open_logs(make_run(tmp_path, wandb=OFFLINE_TABLE), 0, has_sampler=False):
        pass
    assert wandb.exit_codes == [1, 0]
    assert (tmp_path / ID_FILE).read_text() == "new2\n"


@pytest.mark.parametrize(
    ("module", "extra", "log"),
    [
        ("tensorboard.summary.writer.event_file_writer", "tensorboard", {"tensorboard": "events"}),
        ("wandb", "wandb", {"wandb": OFFLINE_TABLE}),
    ],
)
def test_missing_extras_are_found_by_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, extra: str, log: dict[str, Any]
):
    run = make_run(tmp_path, **log)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PrepError, match=rf"log\.{extra}.*is not installed") as caught:
        check_logs(run.recipe.log, run.storage)
    assert f"prepcli[{extra}]" in caught.value.hint


@pytest.mark.parametrize("value", [True, "gs://bucket/tb"])
def test_event_files_in_an_object_store_are_refused(tmp_path: Path, value: Any):
    run = make_run(tmp_path, tensorboard=value)
    with pytest.raises(UsageError, match=r"log\.tensorboard"):
        check_logs(run.recipe.log, run.storage)


# Metrics in Weights & Biases, without its service.

GROUP_TABLE = {"project": "p", "group": "g", "offline": True}


class FakeWandb:
    """The parts of the module `wandb` that the log uses; it records the calls."""

    Error = RuntimeError

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.exit_codes: list[int] = []
        # The error that each call of a run raises, or None.
        self.error: Exception | None = None
        self.init_error: Exception | None = None

    def Settings(self, **values: Any) -> dict[str, Any]:  # noqa: N802
        return values

    def init(self, **arguments: Any) -> Any:
        self.inits.append(arguments)
        if self.init_error is not None:
            raise self.init_error
        run_id = arguments["id"] or f"new{len(self.inits)}"
        return SimpleNamespace(id=run_id, log=self._log, finish=self._finish)

    def _log(self, values: dict[str, float], step: int) -> None:
        if self.error is not None:
            raise self.error
        self.logged.append((step, values))

    def _finish(self, exit_code: int) -> None:
        if self.error is not None:
            raise self.error
        self.exit_codes.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    """Replace the module."""
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def open_log(
    folder: Path, step: int, logged: int = 0, warnings: list[str] | None = None
) -> WandbLog:
    """Open the log of a run that has logged the lines of training up to a step."""
    keys = {(number, False) for number in range(1, logged + 1)}
    warn = [].append if warnings is None else warnings.append
    log = WandbLog(
        folder, GROUP_TABLE, name="run", config={"seed": 3}, step=step, logged=keys, warn=warn
    )
    (folder / ID_FILE).write_text(f"{log.run_id}\n")
    return log


def test_new_run_passes_the_table_and_keeps_its_id(wandb: FakeWandb, tmp_path: Path):
    log = open_log(tmp_path, 0)
    log.write({"step": 0, "eval_loss": 2.0})
    log.write({"step": 1, "loss": 1.0, "grad_norm": None})
    log.close()
    (arguments,) = wandb.inits
    assert (arguments["project"], arguments["group"], arguments["name"]) == ("p", "g", "run")
    assert (arguments["mode"], arguments["id"], arguments["config"]) == (
        "offline",
        None,
        {"seed": 3},
    )
    assert "offline" not in arguments
    assert wandb.logged == [(0, {"eval/loss": 2.0}), (1, {"train/loss": 1.0})]
    assert (wandb.exit_codes, (tmp_path / ID_FILE).read_text()) == ([0], "new1\n")


def test_resumed_run_keeps_its_id_and_logs_no_step_twice(wandb: FakeWandb, tmp_path: Path):
    open_log(tmp_path, 0)
    log = open_log(tmp_path, 6, logged=8)
    for step in range(7, 11):
        log.write({"step": step, "loss": 1.0})
    assert wandb.inits[-1]["id"] == "new1"
    assert [step for step, _ in wandb.logged] == [9, 10]


def test_evaluation_is_logged_after_a_kill_at_its_step(wandb: FakeWandb, tmp_path: Path):
    open_log(tmp_path, 0)
    log = open_log(tmp_path, 6, logged=8)
    for step in (7, 8):
        log.write({"step": step, "loss": 1.0})
    log.write({"step": 8, "eval_loss": 2.0})
    assert wandb.logged == [(8, {"eval/loss": 2.0})]


class MailboxClosedError(Exception):
    """The error of W&B after its service has ended, which is no `wandb.Error`."""


@pytest.mark.parametrize(
    "error",
    [ConnectionResetError("reset"), RuntimeError("refused"), MailboxClosedError("service ended")],
)
def test_failure_of_wandb_is_one_warning(wandb: FakeWandb, tmp_path: Path, error: Exception):
    warnings: list[str] = []
    log, wandb.error = open_log(tmp_path, 0, warnings=warnings), error
    log.write({"step": 1, "loss": 1.0})
    log.write({"step": 2, "loss": 1.0})
    log.close()
    assert warnings == [f"W&B failed and gets no more metrics of this run: {error}"]
    log = open_log(tmp_path, 0, warnings=warnings)
    log.close()
    assert len(warnings) == 2


def test_start_that_wandb_refuses_is_an_error(wandb: FakeWandb, tmp_path: Path):
    wandb.init_error = MailboxClosedError()
    with pytest.raises(PrepError, match="W&B did not start a run - MailboxClosedError"):
        open_log(tmp_path, 0)


def test_failed_run_has_an_exit_code(wandb: FakeWandb, tmp_path: Path):
    open_log(tmp_path, 0).close(has_failed=True)
    assert wandb.exit_codes == [1]


def test_wandb_enabled_on_resume_logs_from_resumed_step(wandb: FakeWandb, tmp_path: Path):
    open_log(tmp_path, 6, logged=8).write({"step": 7, "loss": 1.0})
    assert (wandb.inits[-1]["id"], [step for step, _ in wandb.logged]) == (None, [7])


def test_restarted_run_has_a_new_id(wandb: FakeWandb, tmp_path: Path):
    open_log(tmp_path, 0)
    open_log(tmp_path, 0, logged=8).write({"step": 1, "loss": 1.0})
    assert wandb.inits[-1]["id"] is None
    assert ((tmp_path / ID_FILE).read_text(), len(wandb.logged)) == ("new2\n", 1)


@pytest.mark.slow
def test_offline_runs_of_wandb_continue_one_id(tmp_path: Path):
    pytest.importorskip("wandb")
    for step in (0, 1):
        log = open_log(tmp_path, step, logged=step)
        log.write({"step": step + 1, "loss": 1.0})
        log.close()
    run_id = (tmp_path / ID_FILE).read_text().strip()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.stem for path in files] == [f"run-{run_id}"] * len(files)
    assert files


# Metrics as a table, in the format of spreadsheets.


def read_table(folder: Path) -> list[dict[str, str]]:
    with open(folder / CSV_FILE, newline="") as file:
        return list(csv.DictReader(file))


def write_steps(run: Any, start: int, stop: int) -> None:
    """Write the steps after `start` as one run does."""
    with open_logs(run, start, has_sampler=False) as logs:
        for step in range(start + 1, stop + 1):
            for log in logs:
                assert isinstance(log, MetricsLog)
                log.write({"step": step, "loss": start})


def test_table_has_a_row_per_line_and_a_column_per_name(tmp_path: Path):
    lines = (
        {"step": 1, "loss": 2.5, "lr": 1e-5},
        {"step": 1, "eval_loss": 3.0, 'eval_a,"b': 1},
        {"step": 2, "loss": None, "lr": 2e-5},
    )
    expected = 'step,loss,lr,eval_loss,"eval_a,""b"\n1,2.5,1e-05,,\n1,,,3.0,1\n2,,2e-05,,\n'
    with open_logs(make_run(tmp_path, csv=True), 0, has_sampler=False) as logs:
        for line in lines:
            for log in logs:
                assert isinstance(log, MetricsLog)
                log.write(line)
        # Before the run ends
        assert (tmp_path / CSV_FILE).read_text() == expected


@pytest.mark.parametrize("has_table_before", [True, False])
def test_table_of_a_resumed_run_has_each_step_once(tmp_path: Path, has_table_before: bool):
    write_steps(make_run(tmp_path, csv=has_table_before), 0, 5)
    run = make_run(tmp_path, csv=True)
    write_steps(run, 3, 6)
    rows = [(row["step"], row["loss"]) for row in read_table(tmp_path)]
    assert rows == [("1", "0"), ("2", "0"), ("3", "0"), ("4", "3"), ("5", "3"), ("6", "3")]
    assert (CSV_FILE, [1, 2, 3, 4, 5, 6]) in run.storage.stored
    # A table of an earlier start never differs from the metrics.
    for has_table in (True, False):
        write_steps(make_run(tmp_path, csv=has_table), 0, 1)
        assert read_table(tmp_path) == [{"step": "1", "loss": "0"}]


def test_run_without_the_key_has_no_table(tmp_path: Path):
    write_steps(make_run(tmp_path), 0, 1)
    assert not (tmp_path / CSV_FILE).exists()


# Metrics in TensorBoard event files, read by TensorBoard itself.


def write_lines(folder: Path, start: int, stop: int) -> None:
    """Write the steps after `start` as one run does, with an evaluation at the end."""
    log = TensorBoardLog(folder, start)
    for step in range(start + 1, stop + 1):
        log.write({"step": step, "loss": step + start / 100, "grad_norm": None})
    log.write({"step": stop, "eval_loss": 9.0})
    log.close()


def read_scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return the steps and values of a tag as TensorBoard reads them."""
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, round(event.value, 4)) for event in events.Scalars(tag)]


def test_resumed_steps_replace_steps_of_earlier_files(tmp_path: Path):
    pytest.importorskip("tensorboard")
    write_lines(tmp_path, 0, 5)
    write_lines(tmp_path, 3, 6)
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.03), (5, 5.03), (6, 6.03)]
    assert read_scalars(tmp_path, "train/loss") == expected
    assert read_scalars(tmp_path, "eval/loss") == [(6, 9.0)]


def test_restarted_run_replaces_all_steps(tmp_path: Path):
    pytest.importorskip("tensorboard")
    write_lines(tmp_path, 0, 5)
    write_lines(tmp_path, 0, 2)
    assert read_scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0)]


def test_event_file_that_cannot_be_closed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The error that ended the run is kept."""
    pytest.importorskip("tensorboard")
    log = TensorBoardLog(tmp_path, 0)

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(log._writer, "close", fail)
        with pytest.raises(PrepError, match=f"cannot write {tmp_path} - No space left"):
            log.close()
        log.close(has_failed=True)
    log.close()


# Curves and values of long runs in bounded memory.


def test_short_curve_is_exact():
    curve = RunningCurve(8)
    points = [(step, math.sin(step)) for step in range(8)]
    for step, value in points:
        curve.add(step, value)
    assert curve.points() == points
    assert curve.last == math.sin(7)


@pytest.mark.parametrize("num_points", [9, 16, 17, 100, 1000])
def test_long_curve_has_the_extremes_of_equal_buckets(num_points: int):
    curve, values = RunningCurve(8), np.random.default_rng(num_points).random(num_points).tolist()
    for step, value in enumerate(values):
        curve.add(step, value)
    size = next(size for size in (2, 4, 8, 16, 32, 64, 128) if num_points <= 8 * size)
    buckets = [values[low : low + size] for low in range(0, num_points, size)]
    expected = []
    for number, bucket in enumerate(buckets):
        steps = sorted({bucket.index(extreme(bucket)) for extreme in (min, max)})
        expected += [(number * size + step, bucket[step]) for step in steps]
    assert curve.points() == expected
    assert curve.last == values[-1]


def test_spike_stays_visible():
    curve = RunningCurve(8)
    for step in range(10_000):
        curve.add(step, 1000.0 if step == 4321 else 1.0)
    assert (4321, 1000.0) in curve.points()
    assert len(curve.points()) <= 16


@pytest.mark.parametrize("num_items", [0, 1, 7, 8, 9, 100, 1000])
def test_even_sample_has_equal_distances(num_items: int):
    sample = EvenSample[int](8)
    for item in range(num_items):
        sample.add(item)
    assert sample.count == num_items
    assert sample.items[:1] == list(range(num_items))[:1]
    assert len({high - low for low, high in pairwise(sample.items)}) <= 1
    assert min(num_items, 4) <= len(sample.items) <= 8


def test_median_of_a_long_run_is_close():
    speeds = np.random.default_rng(0).normal(1000, 10, 3 * MAX_MEDIAN_VALUES)
    metrics = RunMetrics.of(
        {"step": step, "mfu": speed} for step, speed in enumerate(speeds.tolist())
    )
    assert np.median(metrics.median_values("mfu")) == pytest.approx(np.median(speeds), rel=1e-3)


def test_best_loss_is_of_the_last_number_of_tokens():
    lines = [(3.0, 90), (4.0, 180), (2.0, None), (5.0, 180)]
    metrics = RunMetrics.of({"step": 1, "eval_loss": loss, "eval_tokens": n} for loss, n in lines)
    assert metrics.best_eval_loss() == 4.0
    assert RunMetrics().best_eval_loss() is None


def test_hostile_metrics_are_bounded():
    metrics = RunMetrics.of(
        {"step": step, f"name{step}": 1, "x" * 1000: 1} for step in range(2 * MAX_CURVES)
    )
    assert len(metrics.curves) == MAX_CURVES
    for number in range(1000):
        metrics.add({"step": 1, "eval_loss": 1.0, "eval_tokens": number})
    assert len(metrics._best_losses) < 1000


def test_values_that_are_not_finite_are_missing():
    values = [None, math.nan, math.inf, -math.inf, "1", [1], True, 10**400, -1e301]
    metrics = RunMetrics.of({"step": 1, "loss": value} for value in values)
    assert metrics.points("loss") == []
    assert metrics.last("loss") is None
    metrics.add({"step": 10**400, "loss": 1.0})
    assert (metrics.last_step, metrics.last("loss")) == (1, None)
