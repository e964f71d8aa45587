"""The lines that show the state of a training run."""

from __future__ import annotations

from collections import deque

import pytest

from prepcli.core.observer import Line
from trainer.run.display import RunStatus, sparkline, status_lines

GIB = 1 << 30


def make_status() -> RunStatus:
    return RunStatus(
        "llama",
        480,
        288,
        "training",
        elapsed_s=95,
        remaining_s=120,
        losses=deque([4.0, 3.5, None, 2.6914]),
        lr=1.6e-6,
        grad_norm=0.512,
        tokens_per_s=41_200,
        step_s=0.58,
        mfu=0.451,
        memory_nbytes=61 * GIB,
        memory_limit_nbytes=80 * GIB,
        evaluation="loss 2.7012  perplexity 14.90  at step 200",
        save="step 250 in 1.2 s",
        skipped=1,
    )


def plain(lines: list[Line]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


def test_status_lines_show_every_value():
    assert plain(status_lines(make_status(), 100)) == [
        "llama  training  1:35  2 min left",
        "━" * 24 + "─" * 16 + "  288/480  60%",
        "loss    2.6914  █▅ ▁  1 skipped",
        "lr      1.60e-06  grad norm 0.512",
        "speed   41.2k tok/s  0.58 s/step  MFU 45.1%",
        "memory  peak 61.00 of 80.00 GiB per device",
        "eval    loss 2.7012  perplexity 14.90  at step 200",
        "saved   step 250 in 1.2 s",
    ]


@pytest.mark.parametrize("width", [20, 32, 40, 79])
def test_items_that_do_not_fit_are_left_out(width: int):
    status = make_status()
    status.evaluation = status.save = ""
    status.memory_nbytes = None
    lines = plain(status_lines(status, width))
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines[2:]] == ["loss", "lr", "speed"]


def test_unknown_values_have_no_line():
    assert plain(status_lines(RunStatus("x", 10, phase="compiling"), 60)) == [
        "x  compiling  0:00",
        "─" * 40 + "  0/10  0%",
    ]


def test_sparkline_scales_between_the_extremes():
    assert sparkline([1.0, 2.0, 3.0]) == "▁▅█"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([1.0]) == sparkline([None, None]) == ""
