"""`prep demo`: the whole way of a checkpoint, on a tiny model and offline, by the commands that a user types."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from prepcli.console.formatting import bytes_text, seconds_text
from prepcli.console.ui import Report, Ui, table
from prepcli.demo import conversion, training
from prepcli.demo.page import REPORT, write_page
from prepcli.demo.tasks import Step, Task, remove
from prepcli.errors import PrepError, usage

MARKER = ".made-by-prep-demo"
MADE = (*conversion.MADE, *training.MADE, REPORT)


def demo(out: Path, ui: Ui) -> Report:
    """Make a tiny model in the folder `out`, take it all the way and back, train it, and check each step.

    A folder that an earlier demo made is taken again. The report carries an error if a check failed.
    """
    _prepare(out)
    tasks = _tasks()
    ui.note(f"offline, {len(tasks)} steps; to repeat one yourself: cd {shlex.quote(str(out))}")
    steps: list[Step] = []
    for number, task in enumerate(tasks, 1):
        command = _command(task)
        ui.note(f"[{number}/{len(tasks)}] {task.title}")
        if command:
            ui.note(f"      $ {command}")
        steps.append(_done(task, command, out))
        ui.note(f"      {_cell(steps[-1])} ({seconds_text(steps[-1].seconds)})")
        if not steps[-1].ok:
            break
    return _report(out, steps, len(tasks))


def _tasks() -> tuple[Task, ...]:
    return (*conversion.tasks(), *training.tasks())


def _command(task: Task) -> str:
    """As a user types it; empty for a step that is none."""
    variables = "".join(f"{name}={value} " for name, value in task.variables.items())
    return variables + shlex.join(["prep", *task.words]) if task.words else ""


def _prepare(out: Path) -> None:
    """A folder for the demo, without what an earlier one made there; usage PrepError if it is somebody else's."""
    is_empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty and not (out / MARKER).is_file():
        why = f"it has no {MARKER}, so no demo made it"
        raise usage(f"{out} exists and is something else", why, "`prep demo --out NAME`")
    for name in MADE:
        remove(out / name)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PrepError(f"cannot make {out}", error.strerror or str(error), "`prep demo --out NAME`") from error
    (out / MARKER).touch()


def _done(task: Task, command: str, folder: Path) -> Step:
    began = time.monotonic()
    step = Step(task.title, command, 0.0, 0, 0, "", False)
    try:
        outcome = task.work(folder, task.words)
        step = replace(step, bytes=outcome.nbytes, peak=outcome.peak_nbytes, result=outcome.result, ok=True)
    except PrepError as error:
        step = replace(step, result=str(error))
    return replace(step, seconds=round(time.monotonic() - began, 3))


def _report(out: Path, steps: Sequence[Step], count: int) -> Report:
    head = ("step", "seconds", "bytes", "memory", "result")
    text = table([_row(step) for step in steps], head, right=("seconds", "bytes", "memory"))
    fields = {"output": str(out), "steps": [asdict(step) for step in steps]}
    failed = next((step for step in steps if not step.ok), None)
    if failed is None:
        write_page(out, steps)
        fields["report"] = str(out / REPORT)
        closing = f"all {count} steps are as they should be; with pictures: {out / REPORT}"
        return Report(f"{text}\n{closing}", fields, "the same with a model of your own")
    what = f"the demo failed at step {len(steps)}: {failed.step}"
    hint = f"`cd {shlex.quote(str(out))} && {failed.command}`" if failed.command else ""
    return Report(text, fields, error=PrepError(what, failed.result, hint))


def _row(step: Step) -> tuple[str, ...]:
    memory = bytes_text(step.peak) if step.peak else "-"
    return step.step, f"{step.seconds:.1f}", bytes_text(step.bytes), memory, _cell(step)


def _cell(step: Step) -> str:
    return step.result if step.ok else f"FAILED: {step.result}"
