"""The log of a run, and the rate of its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.models.errors import PrepError
from trainer.training.metrics import MetricsWriter, StepTimer, read_metrics


def test_lines_are_there_as_soon_as_they_are_added(tmp_path: Path):
    log = MetricsWriter(tmp_path / "m", 0)
    log.write({"step": 1, "loss": 2.5})
    log.write({"step": 2, "loss": None})
    assert read_metrics(tmp_path / "m") == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]


def test_going_on_takes_off_later_steps_and_what_a_kill_cut_short(tmp_path: Path):
    path = tmp_path / "m"
    path.write_text('{"step": 1}\n{"step": 2, "eval_loss": 1.0}\nnonsense\n{"step": 3}\n{"step": 4, "lo')
    MetricsWriter(path, 2).write({"step": 3, "loss": 1.0})
    assert read_metrics(path) == [{"step": 1}, {"step": 2, "eval_loss": 1.0}, {"step": 3, "loss": 1.0}]
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_log_without_a_file_is_empty(tmp_path: Path):
    assert read_metrics(tmp_path / "none") == []


def test_a_disk_that_refuses_is_told(tmp_path: Path):
    with pytest.raises(PrepError, match="cannot write"):
        MetricsWriter(tmp_path / "no folder" / "m", 0)


def test_numbers_that_json_lacks_are_a_bug_not_a_line(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON"):
        MetricsWriter(tmp_path / "m", 0).write({"step": 1, "loss": float("nan")})


def test_what_lies_between_steps_is_not_counted():
    times = iter([0.0, 4.0, 10.0, 12.0, 12.0])
    speed = StepTimer(clock=lambda: next(times))
    speed.resume()
    speed.count_step()
    speed.pause()  # 4 s of steps, 6 s of something else
    speed.resume()
    speed.count_step()
    assert speed.lap() == pytest.approx(3.0)


def test_a_lap_without_steps_has_no_rate():
    assert StepTimer().lap() is None


def test_a_run_that_begins_anew_keeps_nothing(tmp_path: Path):
    """Killed before its first checkpoint, it evaluates again before its first step."""
    path = tmp_path / "m"
    path.write_text('{"step": 0, "eval_loss": 1.0}\n{"step": 1, "loss": 1.0}\n')
    MetricsWriter(path, 0)
    assert read_metrics(path) == []
