"""`prep demo`: the whole way of a checkpoint, on a tiny model and offline, by the commands that a user types."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from prepcli.console.formatting import format_bytes, format_duration
from prepcli.console.ui import Report, Ui, format_table
from prepcli.demo import conversion, training
from prepcli.demo.page import REPORT, write_page
from prepcli.demo.steps import DemoStep, StepReport, remove_output
from prepcli.errors import PrepError, usage_error

MARKER = ".made-by-prep-demo"
OUTPUTS = (*conversion.OUTPUTS, *training.OUTPUTS, REPORT)


def demo(out: Path, ui: Ui) -> Report:
    """Make a tiny model in the folder `out`, take it all the way and back, train it, and check each step.

    A folder that an earlier demo made is taken again. The report carries an error if a check failed.
    """
    _prepare_folder(out)
    tasks = _tasks()
    ui.note(f"offline, {len(tasks)} steps; to repeat one yourself: cd {shlex.quote(str(out))}")
    steps: list[StepReport] = []
    for number, task in enumerate(tasks, 1):
        command = _command_line(task)
        ui.note(f"[{number}/{len(tasks)}] {task.title}")
        if command:
            ui.note(f"      $ {command}")
        steps.append(_run_task(task, command, out))
        ui.note(f"      {_result_text(steps[-1])} ({format_duration(steps[-1].seconds)})")
        if not steps[-1].ok:
            break
    return _build_report(out, steps, len(tasks))


def _tasks() -> tuple[DemoStep, ...]:
    return (*conversion.conversion_steps(), *training.training_steps())


def _command_line(task: DemoStep) -> str:
    """As a user types it; empty for a step that is none."""
    variables = "".join(f"{name}={value} " for name, value in task.env.items())
    return variables + shlex.join(["prep", *task.args]) if task.args else ""


def _prepare_folder(out: Path) -> None:
    """A folder for the demo, without what an earlier one made there; usage PrepError if it is somebody else's."""
    is_empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty and not (out / MARKER).is_file():
        why = f"it has no {MARKER}, so no demo made it"
        raise usage_error(f"{out} exists and is something else", why, "`prep demo --out NAME`")
    for name in OUTPUTS:
        remove_output(out / name)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PrepError(f"cannot make {out}", error.strerror or str(error), "`prep demo --out NAME`") from error
    (out / MARKER).touch()


def _run_task(task: DemoStep, command: str, folder: Path) -> StepReport:
    began = time.monotonic()
    step = StepReport(task.title, command, 0.0, 0, 0, "", False)
    try:
        outcome = task.run(folder, task.args)
        step = replace(step, bytes=outcome.nbytes, peak=outcome.peak_nbytes, result=outcome.result, ok=True)
    except PrepError as error:
        step = replace(step, result=str(error))
    return replace(step, seconds=round(time.monotonic() - began, 3))


def _build_report(out: Path, steps: Sequence[StepReport], num_tasks: int) -> Report:
    head = ("step", "seconds", "bytes", "memory", "result")
    text = format_table([_table_row(step) for step in steps], head, right_aligned=("seconds", "bytes", "memory"))
    fields = {"output": str(out), "steps": [asdict(step) for step in steps]}
    failed = next((step for step in steps if not step.ok), None)
    if failed is None:
        write_page(out, steps)
        fields["report"] = str(out / REPORT)
        closing = f"all {num_tasks} steps are as they should be; with pictures: {out / REPORT}"
        return Report(f"{text}\n{closing}", fields, "the same with a model of your own")
    what = f"the demo failed at step {len(steps)}: {failed.step}"
    hint = f"`cd {shlex.quote(str(out))} && {failed.command}`" if failed.command else ""
    return Report(text, fields, error=PrepError(what, failed.result, hint))


def _table_row(step: StepReport) -> tuple[str, ...]:
    memory = format_bytes(step.peak) if step.peak else "-"
    return step.step, f"{step.seconds:.1f}", format_bytes(step.bytes), memory, _result_text(step)


def _result_text(step: StepReport) -> str:
    return step.result if step.ok else f"FAILED: {step.result}"
