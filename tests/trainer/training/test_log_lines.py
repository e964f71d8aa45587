"""Lines of a run's log: means over the tokens of a step, and null where there is none."""

from __future__ import annotations

from trainer.training.metrics import step_line

VALUES = {"loss": 6.0, "correct": 1.0, "weight": 4.0, "grad_norm": 2.0, "lr": 0.1, "skipped": 0.0}


def test_step_line_has_means_over_tokens_with_loss():
    line = step_line(3, {**VALUES, "z_loss": 2.0}, tokens=8)
    assert (line["loss"], line["accuracy"], line.get("z_loss")) == (1.5, 0.25, 0.5)


def test_step_line_without_tokens_with_loss_is_null():
    empty = {"loss": 0.0, "correct": 0.0, "weight": 0.0, "z_loss": 0.0, "skipped": 1.0}
    line = step_line(3, {**VALUES, **empty}, tokens=8)
    assert (line["loss"], line["accuracy"], line.get("z_loss")) == (None, None, None)
    assert line["skipped"] == 1
