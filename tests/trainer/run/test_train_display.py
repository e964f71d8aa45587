"""The display of a training run: lines for logs, and a view that is redrawn in place."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.console.ui import Ui
from prepcli.core.errors import OK
from prepcli.core.observer import Line
from tests.helpers.screen import Screen
from tests.helpers.terminals import run_on_terminal
from tests.helpers.train_runs import set_keys
from trainer.run.display import LineDisplay, LiveDisplay, RunStatus, sparkline, status_lines
from trainer.training.metrics import EvaluationResult, Sample, StepLine

# The display of a training run: lines for logs, and a view that is redrawn in place.

LOG_LINE: StepLine = {
    "step": 20,
    "loss": 2.5,
    "accuracy": 0.5,
    "lr": 1e-4,
    "grad_norm": 0.25,
    "tokens": 20_480,
    "skipped": 0,
    "seconds": 0.5,
    "tokens_per_s": 2048.0,
    "mfu": 0.42,
    "memory_bytes": 3 << 30,
}

EVALUATION = EvaluationResult(mean_loss=2.0, accuracy=0.5, weight=1000)


@dataclass
class FakeBlock:
    """A block of 80 columns that keeps its drawings."""

    width: int = 80
    drawings: list[str] = field(default_factory=list)

    def draw(self, lines: Sequence[Line]) -> None:
        self.drawings.append("\n".join("".join(text for text, _ in line) for line in lines))

    def close(self) -> None:
        self.drawings.append("closed")


def make_display() -> tuple[Any, FakeBlock, list[float]]:
    block, now = FakeBlock(), [100.0]
    fake: Any = block
    return (
        LiveDisplay(fake, RunStatus("run", 100, memory_limit_nbytes=4 << 30), lambda: now[0]),
        block,
        now,
    )


def test_live_display_shows_the_events_of_a_run():
    display, block, now = make_display()
    display.on_phase("compile")
    assert "compiling" in block.drawings[-1]
    display.on_phase("step 1")
    now[0] += 65
    display.on_log(LOG_LINE, 40.0)
    assert block.drawings[-1].splitlines() == [
        "run  training  1:05  40 s left",
        "━" * 8 + "─" * 32 + "  20/100  20%",
        "loss    2.5000",
        "lr      1.00e-04  grad norm 0.25",
        "speed   2.0k tok/s  0.50 s/step  MFU 42.0%",
        "memory  peak 3.00 of 4.00 GiB per device",
    ]
    display.on_evaluate(20, EVALUATION)
    display.on_save(20, 1.25)
    assert block.drawings[-1].splitlines()[-2:] == [
        "eval    loss 2.0000  perplexity 7.39  at step 20",
        "saved   step 20 in 1.2 s",
    ]


def test_live_display_names_the_step_of_older_values():
    display, block, now = make_display()
    display.on_log(LOG_LINE, 40.0)
    now[0] += 1
    display.on_step(23, 38.5)
    assert block.drawings[-1].splitlines()[1:4] == [
        "━" * 9 + "─" * 31 + "  23/100  23%",
        "loss    2.5000  at step 20",
        "lr      1.00e-04  grad norm 0.25  at step 20",
    ]
    display.on_log({**LOG_LINE, "step": 40}, 40.0)
    assert "at step" not in block.drawings[-1]


def test_displays_show_the_z_loss_beside_the_loss(capsys: pytest.CaptureFixture[str]):
    display, block, _ = make_display()
    line: StepLine = {**LOG_LINE, "z_loss": 0.0125}
    display.on_log(line, 40.0)
    assert "loss    2.5000  z-loss 0.0125" in block.drawings[-1].splitlines()
    LineDisplay(Ui(command="train"), 100).on_log(line, None)
    assert "step  20/100  loss 2.5000  z-loss 0.0125  lr 1.00e-04" in capsys.readouterr().err
    display.on_log({**line, "z_loss": None}, 40.0)


@pytest.mark.parametrize(
    ("stop_reason", "has_failed", "phase"),
    [("", False, "finished"), ("SIGTERM", False, "stopped"), ("", True, "failed")],
)
def test_live_display_leaves_the_final_state(stop_reason: str, has_failed: bool, phase: str):
    display, block, _ = make_display()
    display.on_log({**LOG_LINE, "step": 60}, 0.0)
    display.on_phase("save 60")
    display.on_end(stop_reason)
    display.close(has_failed=has_failed)
    *_, last, closed = block.drawings
    assert (last.splitlines()[0].split()[1], closed) == (phase, "closed")


def test_live_display_redraws_at_most_ten_times_per_second():
    display, block, now = make_display()
    display.on_log(LOG_LINE, 40.0)
    for step in range(21, 41):
        now[0] += 0.0625
        display.on_phase(f"step {step + 1}")
        display.on_step(step, 0.5 * (100 - step))
    drawn = [drawing.splitlines() for drawing in block.drawings]
    shown = [lines[1].split()[1] for lines in drawn]
    assert shown == ["20/100", "20/100", *(f"{step}/100" for step in range(23, 41, 2))]
    assert drawn[-1][0].endswith("30 s left")


def test_lines_have_no_escape_sequences():
    stream = io.StringIO()
    display = LineDisplay(Ui("train", err=stream), 100)
    display.on_phase("compile")
    display.on_compile(1.5)
    display.on_step(20, None)
    display.on_log(LOG_LINE, 40.0)
    display.on_evaluate(20, EVALUATION)
    display.on_save(20, 1.25)
    assert stream.getvalue().splitlines() == [
        "compiled in 1.5 s",
        "step  20/100  loss 2.5000  lr 1.00e-04  2.0k tok/s  0.50 s/step  40 s left",
        "evaluated at step 20: loss 2.0000  perplexity 7.39  tokens 1,000",
        "saved step 20 in 1.2 s",
    ]


def test_live_clock_and_remaining_time_advance_without_events():
    """While the main thread compiles or evaluates, a thread draws."""
    display, block, now = make_display()
    display.on_phase("compile")
    now[0] += 3
    display.draw()
    assert block.drawings[-1].splitlines()[0] == "run  compiling  0:03"
    display.on_log(LOG_LINE, 40.0)
    now[0] += 10
    display.draw()
    assert block.drawings[-1].splitlines()[0] == "run  compiling  0:13  30 s left"


def test_live_display_shows_the_progress_of_an_evaluation():
    display, block, now = make_display()
    display.on_phase("evaluate 20")
    now[0] += 1
    display.on_progress(12, 4000)
    assert block.drawings[-1].splitlines()[0] == "run  evaluating 12/4,000  0:01"
    display.on_phase("step 21")
    assert "training  0:01" in block.drawings[-1]


def test_lines_are_at_most_ten_seconds_apart():
    stream, now = io.StringIO(), [0.0]
    display = LineDisplay(Ui("train", err=stream), 100, lambda: now[0])

    def wait(seconds: int, done: int | None = None) -> None:
        for second in range(seconds):
            now[0] += 1
            display.tick()
            if done is not None:
                display.on_progress(done + second, 40)

    wait(10)
    display.on_phase("compile")
    wait(20)
    display.on_phase("step 20")
    wait(4)
    display.on_step(20, 125.0)
    now[0] += 6
    display.on_step(21, 125.0)
    display.on_phase("evaluate 21")
    wait(11, done=10)
    display.on_phase("save 21")
    wait(10)
    assert stream.getvalue().splitlines() == [
        "loading, 9.0 s",
        "compiling, 8.0 s",
        "compiling, 17.0 s",
        "step  21/100  2 min left",
        "evaluating at step 21/100: 17/40, 12 s left",
        "saving at step 21/100, 7.0 s",
    ]


def shown_samples(samples: list[Sample]) -> tuple[list[str], str]:
    """Return the lines of samples without a live view, and the last line of a live view."""
    stream, (display, block, _) = io.StringIO(), make_display()
    for shown in (LineDisplay(Ui("train", err=stream), 100), display):
        shown.on_samples(20, samples, len(samples))
    lines = [line.partition("sample of step 20: ")[2] for line in stream.getvalue().splitlines()]
    return lines, block.drawings[-1].splitlines()[-1]


def test_displays_show_samples_on_one_line():
    lines, live = shown_samples(
        [Sample("Once upon\n a time", "there was\n\na  queen"), Sample("x", "y")]
    )
    assert lines == ["Once upon a time -> there was a queen", "x -> y"]
    assert live == "sample  Once upon a time -> there was a queen"


@pytest.mark.parametrize(
    "text", ["x" * 500, "中" * 500, "word " * 100], ids=["word", "no spaces", "words"]
)
def test_long_samples_are_shortened_without_hiding_the_text(text: str):
    (first, second), live = shown_samples([Sample(text, "the end"), Sample("a", text)])
    assert first.startswith(text[:4])
    assert first.endswith(" -> the end")
    assert live == f"sample  {first}"
    assert len(live) < 80
    assert second.startswith(f"a -> {text[:4]}")
    assert len(second) <= 130


def test_samples_do_not_control_the_terminal():
    (line,), live = shown_samples([Sample("a", "red \x1b[31m text")])
    assert line == r"a -> red \x1b[31m text"
    assert live.endswith(line)


# The lines that show the state of a training run.

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


# `prep train` on a pseudo-terminal: the view that is redrawn in place, and the text around it.


SETTINGS = ("mesh=1,1,1", "train.steps=3", "data.holdout=0", "checkpoint.every=2")

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def test_train_draws_its_view_on_a_terminal(work_dir: Path):
    overrides = set_keys(*SETTINGS)
    code, output = run_on_terminal("train", "recipe.toml", "--out", "run", *overrides, columns=100)
    screen = Screen()
    screen.feed(output)
    lines = screen.text().splitlines()
    assert code == OK, screen.text()
    assert sum("finished" in line for line in lines) == 1, "the view is redrawn in place"
    assert not any("training" in line.split()[1:2] for line in lines)
    assert any(line.endswith("3/3  100%") for line in lines)
    assert sum(line.startswith("loss ") for line in lines) == 1
    assert output.rindex(SHOW_CURSOR) > output.rindex(HIDE_CURSOR)


def test_view_of_a_run_that_ends_early_is_finished(work_dir: Path):
    diverging = ("train.eval_every=2", "optimizer.lr=0.3", "optimizer.clip_norm=0")
    overrides = set_keys("mesh=1,1,1", "eval.patience=1", *diverging)
    code, output = run_on_terminal("train", "recipe.toml", "--out", "run", *overrides, columns=100)
    screen = Screen()
    screen.feed(output)
    assert code == OK, screen.text()
    assert "ended early at step" in screen.text()
    assert "finished" in screen.text()
    assert "stopped" not in screen.text()
