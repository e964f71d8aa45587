"""The state of a training run as lines of a terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prepcli.core.formatting import (
    format_bytes,
    format_bytes_of,
    format_clock,
    format_number,
    format_time_left,
    format_token_rate,
)
from prepcli.core.observer import Line, Segment

SPARK_LEVELS = "▁▂▃▄▅▆▇█"
SPARK_CELLS = 24
MAX_BAR_CELLS = 40
MIN_BAR_CELLS = 8
GAP = "  "


@dataclass(slots=True)
class RunStatus:
    """State of a run as it is shown. None and empty texts are unknown values.

    Attributes:
        name: Name of the run.
        steps: Number of the last step.
        step: The last finished step.
        phase: Current activity, such as `training` or `saving`.
        phase_progress: Progress of the activity, e.g. `12/40` batches of an evaluation.
        elapsed_s: Seconds since the start of this process.
        remaining_s: Estimated seconds to the last step.
        log_step: Step of the last log line, and so of the values from `losses` to `memory_nbytes`.
        losses: Losses of the last log lines, or None if one is not finite.
        z_loss: Z-loss, or None without this term.
        lr: Learning rate.
        grad_norm: Norm of the gradients.
        tokens_per_s: Tokens of all devices per second.
        step_s: Seconds of a step.
        mfu: Model FLOPs utilization.
        memory_nbytes: Highest memory in use on a device.
        memory_limit_nbytes: Memory of a device.
        evaluation: The last evaluation.
        sample: The last generated text, with its prompt.
        save: The last saved step.
        skipped: Number of skipped steps.
    """

    name: str
    steps: int
    step: int = 0
    phase: str = "loading"
    phase_progress: str = ""
    elapsed_s: float = 0.0
    remaining_s: float | None = None
    log_step: int | None = None
    losses: deque[float | None] = field(default_factory=lambda: deque(maxlen=SPARK_CELLS))
    z_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    mfu: float | None = None
    memory_nbytes: int | None = None
    memory_limit_nbytes: int | None = None
    evaluation: str = ""
    sample: str = ""
    save: str = ""
    skipped: int = 0


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
            lines.append(_format_row(label, known, width))
    return lines


def sparkline(values: Sequence[float | None]) -> str:
    """Return values as bars of eight heights between the minimum and the maximum.

    None is a space.
    """
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


def _format_row(label: str, items: Sequence[Segment], width: int) -> Line:
    head = f"{label:<8}"
    return [(head, "dim"), *_fitting_items(items, width - len(head))]


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
