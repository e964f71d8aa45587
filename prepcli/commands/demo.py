"""`prep demo`: convert, train and export a tiny model offline, with the commands that a user types."""

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
from prepcli.demo.steps import (
    CommandError,
    DemoStep,
    FullDiskError,
    StepReport,
    remove_output,
    run_step,
)
from prepcli.errors import PrepError, usage_error

MARKER = ".made-by-prep-demo"
OUTPUTS = (*conversion.OUTPUTS, *training.OUTPUTS, REPORT)


def demo(out: Path, ui: Ui) -> Report:
    """Make a tiny model in the folder `out`, convert it in both directions, train it, and check each step.

    Args:
        out: New or empty folder, or the folder of an earlier demo. Its outputs are replaced.
        ui: Receives a note before and after each step.

    Returns:
        Report with one table row per step. It has an error if a check failed.

    Raises:
        PrepError: `out` exists and was not made by a demo, or cannot be created.
    """
    _prepare_folder(out)
    steps_to_run = _tasks()
    ui.note(f"offline, {len(steps_to_run)} steps; to repeat a step: cd {shlex.quote(str(out))}")
    step_reports: list[StepReport] = []
    for number, step in enumerate(steps_to_run, 1):
        command = _command_line(step)
        ui.note(f"[{number}/{len(steps_to_run)}] {step.title}")
        if command:
            ui.note(f"      $ {command}")
        step_reports.append(_run_step(step, command, out))
        ui.note(
            f"      {_result_text(step_reports[-1])} ({format_duration(step_reports[-1].seconds)})"
        )
        if not step_reports[-1].ok:
            break
    return _build_report(out, step_reports, len(steps_to_run), columns=ui.columns)


def _tasks() -> tuple[DemoStep, ...]:
    return (*conversion.conversion_steps(), *training.training_steps())


def _command_line(step: DemoStep) -> str:
    """Return the command line of a step, or an empty string for a step without one."""
    variables = "".join(f"{name}={value} " for name, value in step.env.items())
    return variables + shlex.join(["prep", *step.args]) if step.args else ""


def _prepare_folder(out: Path) -> None:
    """Create the demo's folder, or delete the outputs of an earlier demo from it.

    Raises:
        PrepError: The folder was not made by a demo, or cannot be created.
    """
    is_empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty and not (out / MARKER).is_file():
        why = f"it has no {MARKER}"
        raise usage_error(
            f"{out} already exists and is not a demo's folder", why, "`prep demo --out NAME`"
        )
    for name in OUTPUTS:
        remove_output(out / name)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / MARKER).touch()
    except OSError as error:
        raise PrepError(
            f"cannot create {out}", error.strerror or str(error), "`prep demo --out NAME`"
        ) from error


def _run_step(step: DemoStep, command: str, folder: Path) -> StepReport:
    start_s = time.monotonic()
    report = StepReport(step.title, command, 0.0, 0, 0, "", False)
    try:
        outcome = run_step(step, folder)
        report = replace(
            report, bytes=outcome.nbytes, peak=outcome.peak_nbytes, result=outcome.result, ok=True
        )
    except FullDiskError as error:
        report = replace(report, result=str(error), hint=error.hint)
    except CommandError as error:
        report = replace(
            report, result=str(error), hint=f"`cd {shlex.quote(str(folder))} && {command}`"
        )
    except PrepError as error:
        # The command succeeded, and its outputs exist now: alone it would do something else.
        report = replace(
            report, result=str(error), hint=f"`prep demo --out {shlex.quote(str(folder))}`"
        )
    return replace(report, seconds=round(time.monotonic() - start_s, 3))


def _build_report(
    out: Path, step_reports: Sequence[StepReport], num_steps: int, *, columns: int | None
) -> Report:
    header = ("step", "seconds", "bytes", "memory", "result")
    text = format_table(
        [_table_row(step) for step in step_reports],
        header,
        right_aligned=("seconds", "bytes", "memory"),
        width=columns,
        wrapped=["result"],
    )
    fields = {"output": str(out), "steps": [asdict(step) for step in step_reports]}
    failed = next((step for step in step_reports if not step.ok), None)
    if failed is None:
        write_page(out, step_reports)
        fields["report"] = str(out / REPORT)
        closing = f"all {num_steps} steps passed; report with pictures: {out / REPORT}"
        return Report(f"{text}\n{closing}", fields, "run the same commands with your own model")
    what = f"the demo failed at step {len(step_reports)}: {failed.step}"
    return Report(text, fields, error=PrepError(what, failed.result, failed.hint))


def _table_row(report: StepReport) -> tuple[str, ...]:
    memory = format_bytes(report.peak) if report.peak else "-"
    return (
        report.step,
        f"{report.seconds:.1f}",
        format_bytes(report.bytes),
        memory,
        _result_text(report),
    )


def _result_text(report: StepReport) -> str:
    return report.result if report.ok else f"FAILED: {report.result}"
