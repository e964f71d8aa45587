"""The display of a run in progress: lines, or a view that is redrawn in place on a terminal."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from prepcli.core.formatting import (
    format_bytes,
    format_bytes_of,
    format_clock,
    format_duration,
    format_number,
    format_time_left,
    format_token_rate,
    printable,
    shorten,
)
from prepcli.core.observer import (
    REDRAW_INTERVAL_S,
    Block,
    Clock,
    Line,
    Observer,
    PacedNotes,
    Segment,
    ticking,
)
from trainer.run.run import Run
from trainer.training.metrics import EvaluationResult, RunLog, Sample, StepLine

SPARK_LEVELS = "▁▂▃▄▅▆▇█"
SPARK_CELLS = 24
MAX_BAR_CELLS = 40
MIN_BAR_CELLS = 8
GAP = "  "


@dataclass(slots=True)
class RunStatus:
    """State of a run as it is shown. None and empty texts are unknown values."""

    name: str  # Name of the run
    steps: int  # Number of the last step
    step: int = 0  # The last finished step
    phase: str = "loading"  # Current activity, such as `training` or `saving`
    phase_progress: str = ""  # Progress of the activity, e.g. `12/40` batches of an evaluation.
    elapsed_s: float = 0.0  # Seconds since the start of this process
    remaining_s: float | None = None  # Estimated seconds to the last step
    # Step of the last log line, and so of the values from `losses` to `memory_nbytes`
    log_step: int | None = None
    # Losses of the last log lines, or None if one is not finite
    losses: deque[float | None] = field(default_factory=lambda: deque(maxlen=SPARK_CELLS))
    z_loss: float | None = None  # Z-loss, or None without this term
    lr: float | None = None  # Learning rate
    grad_norm: float | None = None  # Norm of the gradients
    # Tokens of all devices per second, with the tokens of sources
    tokens_per_s: float | None = None
    step_s: float | None = None  # Seconds of a step
    mfu: float | None = None  # Model FLOPs utilization
    memory_nbytes: int | None = None  # Highest memory in use on a device
    memory_limit_nbytes: int | None = None  # Memory of a device
    evaluation: str = ""  # The last evaluation
    sample: str = ""  # The last generated text, with its prompt
    save: str = ""  # The last saved step
    skipped: int = 0  # Number of skipped steps


def status_lines(status: RunStatus, width: int) -> list[Line]:
    """Return the state of a run as lines of at most `width` columns, without the items that do not fit.

    Args:
        status: The state.
        width: Columns of the terminal.
    """
    # In the order of importance: a low terminal crops the last lines.
    rows = (
        ("loss", _loss_items(status)),
        ("lr", _optimizer_items(status)),
        ("speed", _speed_items(status)),
        ("memory", _memory_items(status)),
        ("eval", [(status.evaluation, "")]),
        ("sample", [(status.sample, "")]),
        ("saved", [(status.save, "")]),
    )
    lines = [*_header_lines(status, width)]
    for label, items in rows:
        known = [item for item in items if item[0]]
        if known:
            head = f"{label:<8}"
            lines.append([(head, "dim"), *_fitting_items(known, width - len(head))])
    return lines


def sparkline(values: Sequence[float | None]) -> str:
    """Return values as bars of eight heights between the minimum and the maximum. None is a space."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return ""
    # Equal values have a span of 0. 1.0 avoids the division by zero, and all bars are the lowest.
    low = min(known)
    span = (max(known) - min(known)) or 1.0
    top = len(SPARK_LEVELS) - 1
    bars = ""
    for value in values:
        if value is None:
            bars += " "
        else:
            # E.g. losses 3.0, 2.5, 2.0: round(7 * 1.0) = 7, round(7 * 0.5) = 4 and 0 give `█▅▁`.
            bars += SPARK_LEVELS[round(top * (value - low) / span)]
    return bars


def _header_lines(status: RunStatus, width: int) -> Iterator[Line]:
    """Yield the line with the name, the phase and the times, and the line with the bar and the step."""
    times = [format_clock(status.elapsed_s)]
    if status.remaining_s is not None and status.step < status.steps:
        times.append(format_time_left(status.remaining_s))
    phase = f"{status.phase} {status.phase_progress}".rstrip()
    items = [(status.name, "bold"), (phase, "cyan")]
    items += [(text, "") for text in times]
    yield _fitting_items(items, width)
    percent = 100 * status.step // max(status.steps, 1)
    count = f"{status.step:,}/{status.steps:,}{GAP}{percent}%"
    cells = min(MAX_BAR_CELLS, width - len(count) - len(GAP))
    if cells < MIN_BAR_CELLS:
        yield _fitting_items([(count, "")], width)
        return
    # Rounded down: the bar is full only after the last step.
    done = cells * status.step // max(status.steps, 1)
    yield [("━" * done, "green"), ("─" * (cells - done), "dim"), (GAP + count, "")]


def _loss_items(status: RunStatus) -> list[Segment]:
    if not status.losses:
        return []
    items = [(format_number(status.losses[-1]), "bold")]
    if status.z_loss is not None:
        items.append((f"z-loss {format_number(status.z_loss)}", ""))
    items.append((sparkline(status.losses), "cyan"))
    if status.skipped:
        items.append((f"{status.skipped} skipped", "yellow"))
    return [*items, *_log_step_items(status)]


def _optimizer_items(status: RunStatus) -> list[Segment]:
    if status.lr is None:
        return []
    items = [(f"{status.lr:.2e}", "")]
    if status.grad_norm is not None:
        items.append((f"grad norm {status.grad_norm:.3g}", ""))
    return [*items, *_log_step_items(status)]


def _log_step_items(status: RunStatus) -> list[Segment]:
    """Return the step of the logged values if it is not the step shown at the top."""
    if status.log_step in (None, status.step):
        return []
    return [(f"at step {status.log_step:,}", "dim")]


def _speed_items(status: RunStatus) -> list[Segment]:
    if status.tokens_per_s is None or status.step_s is None:
        return []
    items = [(format_token_rate(status.tokens_per_s), ""), (f"{status.step_s:.2f} s/step", "")]
    if status.mfu is not None:
        items.append((f"MFU {status.mfu:.1%}", ""))
    return items


def _memory_items(status: RunStatus) -> list[Segment]:
    if status.memory_nbytes is None:
        return []
    limit = status.memory_limit_nbytes
    text = format_bytes(status.memory_nbytes)
    if limit:
        text = format_bytes_of(status.memory_nbytes, limit)
    return [(f"peak {text} per device", "")]


def _fitting_items(items: Sequence[Segment], width: int) -> list[Segment]:
    """Return the first items that fit, separated by a gap. The first one is always among them."""
    fitting = [items[0]]
    used = len(items[0][0])
    for text, style in items[1:]:
        used += len(GAP) + len(text)
        if used > width:
            break
        fitting += [(GAP, ""), (text, style)]
    return fitting


# Characters of a sample, which is shown on one line
MAX_PROMPT_WIDTH = 40
MAX_TEXT_WIDTH = 80
PHASES = {
    "load": "loading",
    "compile": "compiling",
    "step": "training",
    "evaluate": "evaluating",
    "save": "saving",
    "sample": "sampling",
}


@contextmanager
def open_display(
    run: Run, step: int, *, steps: int, memory: Mapping[str, int | None]
) -> Iterator[RunLog]:
    """Open the display of a run, and close it after the block. Messages appear above a live display.

    Args:
        run: The run.
        step: Step to continue after.
        steps: Number of the last step.
        memory: Memory estimate of the run, with the memory `available` on a device.
    """
    block = run.observer.open_live_block()
    if block is None:
        lines = LineDisplay(run.observer, steps)
        with ticking(lines.tick):
            yield lines
        return
    status = RunStatus(run.recipe.name, steps, step, memory_limit_nbytes=memory["available"])
    display = LiveDisplay(block, status)
    display.draw()
    try:
        with ticking(display.draw):
            yield display
    except BaseException as error:
        # A signal is not a failure: the run can be resumed.
        display.close(has_failed=isinstance(error, Exception))
        raise
    display.close()


class LineDisplay(RunLog):
    """Display of one line per event, for logs. After ten seconds without one, a line shows what the run does."""

    def __init__(self, observer: Observer, steps: int, clock: Clock = time.monotonic) -> None:
        self.steps = steps
        self.notes = PacedNotes(observer, clock=clock)
        self.tick = self.notes.tick
        self.on_phase("load")

    def on_progress(self, done: int, total: int) -> None:
        """Print `evaluating at step 288: 12/40, 31 s left` if the last line is ten seconds old."""
        self.notes.on_progress(done, total)

    def on_phase(self, phase: str) -> None:
        """Print nothing. Later lines name the phase."""
        kind, _, step = phase.partition(" ")
        task = PHASES.get(kind, kind)
        if step:
            task += f" at step {step}/{self.steps}"
        self.notes.begin(task)

    def on_compile(self, seconds: float) -> None:
        """Print the compile time."""
        self.notes.note(f"compiled in {format_duration(seconds)}")

    def on_step(self, step: int, remaining_s: float | None) -> None:
        """Print the step if the last line is ten seconds old."""
        self.notes.note_if_due(
            lambda: f"step {self._step_text(step)}{_time_left_text(remaining_s)}"
        )

    def _step_text(self, step: int) -> str:
        # The step is padded to the width of the last one, e.g. ` 40/480`, so that the lines of a log align.
        return f"{step:>{len(str(self.steps))}}/{self.steps}"

    def on_log(self, line: StepLine, remaining_s: float | None) -> None:
        """Print `step   288/480  loss 2.6914  lr 1.60e-06  41.2k tok/s  0.58 s/step  2 min left`."""
        loss = format_number(line["loss"])
        # The accuracy of tokens with loss is always finite.
        if line["accuracy"] is None:
            loss = "of no token"
        text = f"step {self._step_text(line['step'])}  loss {loss}"
        if "z_loss" in line:
            text += f"  z-loss {format_number(line['z_loss'])}"
        text += f"  lr {line['lr']:.2e}"
        # Absent in the line of the first step, which has no lap before it
        if remaining_s is not None and "seconds" in line and "tokens_per_s" in line:
            rate = format_token_rate(line["tokens_per_s"])
            text += f"  {rate}  {line['seconds']:.2f} s/step{_time_left_text(remaining_s)}"
        if line["skipped"]:
            text += f"  {line['skipped']} skipped"
        self.notes.note(text)

    def on_evaluate(self, step: int, result: EvaluationResult) -> None:
        """Print `evaluated at step 288: loss 2.6914  perplexity 14.75  tokens 245,760`."""
        self.notes.note(
            f"evaluated at step {step}: {_evaluation_text(result)}  tokens {result.num_tokens:,}"
        )

    def on_samples(self, step: int, samples: Sequence[Sample], num_new: int) -> None:
        """Print `sample of step 288: Once upon a time -> there was a queen`, one line per prompt."""
        for sample in samples:
            self.notes.note(f"sample of step {step}: {_sample_text(sample)}")

    def on_save(self, step: int, seconds: float) -> None:
        """Print the saved step and the time it took."""
        self.notes.note(f"saved step {step} in {format_duration(seconds)}")


class LiveDisplay(RunLog):
    """Display redrawn in place: every second, at each event, and at most ten times per second at steps and batches.

    The thread of `ticking` draws too, so that the clock advances while the main thread compiles.
    """

    def __init__(self, block: Block, status: RunStatus, clock: Clock = time.monotonic) -> None:
        self.block = block
        self.status = status
        self.clock = clock
        self.started_s = self.drawn_at_s = clock()
        # Whether the run has ended, possibly before its last step, and was not stopped
        self.is_finished = False
        # Estimated time of the end of the run, if it is known
        self.ends_at_s: float | None = None
        # Reentrant: an exception of a signal may leave it acquired by the main thread, which draws once more.
        self.lock = threading.RLock()

    def on_phase(self, phase: str) -> None:
        """Show the phase if it differs from the last one: all steps are one phase, `training`."""
        # `step 12` and `step 13` are both `training`, so steps redraw the block only in `on_step`.
        self.status.phase_progress = ""
        name = PHASES.get(phase.partition(" ")[0], phase)
        if name != self.status.phase:
            self.status.phase = name
            self.draw()

    def on_compile(self, seconds: float) -> None:
        """Show that the step is compiled."""
        self.draw()

    def on_step(self, step: int, remaining_s: float | None) -> None:
        """Show the step, unless the display was redrawn less than a tenth of a second ago."""
        self.status.step = step
        self._set_remaining(remaining_s)
        self._redraw_if_due()

    def on_progress(self, done: int, total: int) -> None:
        """Show the progress of the phase, unless the display was redrawn less than a tenth of a second ago."""
        self.status.phase_progress = f"{done:,}/{total:,}"
        self._redraw_if_due()

    def _redraw_if_due(self) -> None:
        if self.clock() - self.drawn_at_s >= REDRAW_INTERVAL_S:
            self.draw()

    def _set_remaining(self, remaining_s: float | None) -> None:
        self.ends_at_s = None
        if remaining_s is not None:
            self.ends_at_s = self.clock() + remaining_s

    def on_log(self, line: StepLine, remaining_s: float | None) -> None:
        """Show the values of the line."""
        status = self.status
        status.losses.append(line["loss"])
        status.z_loss = line.get("z_loss")
        status.step = status.log_step = line["step"]
        self._set_remaining(remaining_s)
        status.lr = line["lr"]
        status.grad_norm = line["grad_norm"]
        status.skipped = line["skipped"]
        # Absent in the line of the first step, which has no lap before it
        status.tokens_per_s = line.get("tokens_per_s")
        status.step_s = line.get("seconds")
        status.mfu = line.get("mfu")
        status.memory_nbytes = line.get("memory_bytes")
        self.draw()

    def on_evaluate(self, step: int, result: EvaluationResult) -> None:
        """Show the evaluation and its step."""
        self.status.evaluation = f"{_evaluation_text(result)}  at step {step:,}"
        self.draw()

    def on_samples(self, step: int, samples: Sequence[Sample], num_new: int) -> None:
        """Show the first sample."""
        self.status.sample = _sample_text(samples[0])
        self.draw()

    def on_save(self, step: int, seconds: float) -> None:
        """Show the saved step."""
        self.status.save = f"step {step:,} in {format_duration(seconds)}"
        self.draw()

    def on_end(self, stop_reason: str) -> None:
        """Keep whether the run has ended, for the final state."""
        self.is_finished = not stop_reason

    def close(self, *, has_failed: bool = False) -> None:
        """Leave the final state on the screen."""
        self.status.phase_progress = ""
        if has_failed:
            self.status.phase = "failed"
        elif self.is_finished:
            self.status.phase = "finished"
        else:
            self.status.phase = "stopped"
        self.draw()
        self.block.close()

    def draw(self) -> None:
        """Update the elapsed and the remaining time, and redraw the display."""
        with self.lock:
            self.drawn_at_s = self.clock()
            self.status.elapsed_s = self.drawn_at_s - self.started_s
            self.status.remaining_s = None
            if self.ends_at_s is not None:
                self.status.remaining_s = max(0.0, self.ends_at_s - self.drawn_at_s)
            self.block.draw(status_lines(self.status, self.block.width))


def _time_left_text(remaining_s: float | None) -> str:
    if remaining_s is None:
        return ""
    return f"  {format_time_left(remaining_s)}"


def _evaluation_text(result: EvaluationResult) -> str:
    loss = format_number(result.mean_loss)
    perplexity = format_number(result.perplexity, 2)
    return f"loss {loss}  perplexity {perplexity}"


def _sample_text(sample: Sample) -> str:
    """Return a prompt and its text on one line, shortened, with control characters escaped."""
    prompt = shorten(_one_line(sample.prompt), MAX_PROMPT_WIDTH)
    text = shorten(_one_line(sample.text), MAX_TEXT_WIDTH)
    return f"{prompt} -> {text}"


def _one_line(text: str) -> str:
    # `printable` keeps newlines and tabs, so whitespace is joined first.
    # A newline would break the line of the sample in two.
    return printable(" ".join(text.split()))
