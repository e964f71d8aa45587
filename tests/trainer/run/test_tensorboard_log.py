"""Metrics in TensorBoard event files, read by TensorBoard itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from trainer.run.logs import TensorBoardLog


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


def test_missing_tensorboard_is_an_error_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(PrepError, match=r"log\.tensorboard") as raised:
        TensorBoardLog(tmp_path, 0)
    assert "prepcli[tensorboard]" in raised.value.hint
