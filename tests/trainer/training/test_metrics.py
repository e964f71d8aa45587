"""The metrics file of a run, and the timer of its steps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from trainer.training.events import StepTimer
from trainer.training.metrics import (
    MetricsWriter,
    metrics_file_name,
    read_metrics,
    remove_other_metrics,
    repeated_lines,
)


def test_metrics_writer_lines_are_visible_at_once(tmp_path: Path):
    log = MetricsWriter(tmp_path / "m", 0)
    log.write({"step": 1, "loss": 2.5})
    log.write({"step": 2, "loss": None})
    assert read_metrics(tmp_path / "m") == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]


def test_metrics_writer_drops_later_and_incomplete_lines(tmp_path: Path):
    path = tmp_path / "m"
    path.write_text(
        '{"step": 1}\n{"step": 2, "eval_loss": 1.0}\nnonsense\n{"step": 3}\n{"step": 4, "lo'
    )
    MetricsWriter(path, 2).write({"step": 3, "loss": 1.0})
    assert read_metrics(path) == [
        {"step": 1},
        {"step": 2, "eval_loss": 1.0},
        {"step": 3, "loss": 1.0},
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_older_writer_does_not_write_to_the_file_of_a_newer_one(tmp_path: Path):
    """A bucket's lock may be taken over: both starts of the run then have the same local folder for some time."""
    path = tmp_path / "m"
    old = MetricsWriter(path, 0)
    old.write({"step": 1, "loss": 1.0})
    new = MetricsWriter(path, 0)
    old.write({"step": 2, "loss": 1.0})
    new.write({"step": 1, "loss": 2.0})
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}]


def test_read_metrics_without_file_is_empty(tmp_path: Path):
    assert read_metrics(tmp_path / "none") == []


def test_metrics_writer_reports_write_errors(tmp_path: Path):
    with pytest.raises(PrepError, match="cannot write"):
        MetricsWriter(tmp_path / "no folder" / "m", 0)


def test_metrics_writer_rejects_nan(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON"):
        MetricsWriter(tmp_path / "m", 0).write({"step": 1, "loss": float("nan")})


def test_step_timer_excludes_pauses():
    times = iter([0.0, 4.0, 10.0, 12.0, 12.0])
    speed = StepTimer(clock=lambda: next(times))
    speed.resume()
    speed.count_step()
    speed.pause()  # 4 s of steps, 6 s of something else
    speed.resume()
    speed.count_step()
    assert speed.lap() == pytest.approx(3.0)


def test_step_timer_lap_without_steps_is_none():
    assert StepTimer().lap() is None


def test_metrics_writer_at_step_0_drops_all_lines(tmp_path: Path):
    """After a kill before the first checkpoint, the run evaluates again before its first step."""
    path = tmp_path / "m"
    path.write_text('{"step": 0, "eval_loss": 1.0}\n{"step": 1, "loss": 1.0}\n')
    MetricsWriter(path, 0)
    assert read_metrics(path) == []


def test_metrics_writer_keeps_the_bytes_of_lines(tmp_path: Path):
    """Lines are copied, not written anew: NaN in a line that a user added is no error."""
    path = tmp_path / "m"
    lines = ['{"step":1, "loss":  1.0}', '{"loss": NaN, "step": 2}', '{"step": 3, "loss": 1.0}']
    broken = [
        '{"step": 1, "loss"',
        "[" * 100_000,
        '{"step": "1"}',
        '{"step": 1, "text": "' + "x" * (1 << 20) + '"}',
    ]
    path.write_text("".join(f"{line}\n" for line in [*lines, *broken]))
    MetricsWriter(path, 2)
    assert path.read_text() == f"{lines[0]}\n{lines[1]}\n"


def test_metrics_writer_follows_no_link(tmp_path: Path):
    (tmp_path / "target").write_text('{"step": 1}\n')
    for name in ("m", "m.new"):
        (tmp_path / name).symlink_to("target")
    with pytest.raises(PrepError, match="it is a symbolic link"):
        MetricsWriter(tmp_path / "m", 0)
    assert (tmp_path / "target").read_text() == '{"step": 1}\n'


def test_metrics_of_a_fifo_are_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "m")
    with pytest.raises(PrepError, match="is not a"):
        MetricsWriter(tmp_path / "m", 1)
    with pytest.raises(PrepError, match="is not a file"):
        read_metrics(tmp_path / "m")


def test_repeated_lines_begin_at_the_step(tmp_path: Path):
    path = tmp_path / "m"
    path.write_text('{"step": 1}\n{"step": 2, "eval_loss": 1.0}\n{"step": 3}\n')
    assert repeated_lines(path, 2) == {(2, True), (3, False)}


def test_remove_other_metrics_keeps_processes_that_log(tmp_path: Path):
    names = [*map(metrics_file_name, range(4)), "metrics.x.jsonl", "metrics.02.jsonl"]
    for name in names:
        (tmp_path / name).touch()
    remove_other_metrics(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        {*names} - {"metrics.2.jsonl", "metrics.3.jsonl"}
    )
