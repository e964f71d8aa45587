"""Convert, train and export a tiny model offline, with the commands that a user types."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from prepcli.commands.demo import conversion, training
from prepcli.commands.demo.page import REPORT, write_page
from prepcli.commands.demo.steps import (
    CommandError,
    DemoStep,
    FullDiskError,
    StepReport,
    remove_output,
    run_step,
)
from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.core.formatting import format_duration
from prepcli.core.observer import Observer
from prepcli.core.pacing import PacedNotes, ticking
from prepcli.execution.output_urls import check_local_path

MARKER = ".made-by-prep-demo"
OUTPUTS = (*conversion.OUTPUTS, *training.OUTPUTS, REPORT)


@dataclass(frozen=True, slots=True)
class DemoRun:
    """The steps of a demo that ran, up to the first one that failed.

    Attributes:
        out: Folder of the demo.
        steps: Report of each step.
        num_planned: Number of steps of the whole demo.
    """

    out: Path
    steps: tuple[StepReport, ...]
    num_planned: int

    @property
    def failed_step(self) -> StepReport | None:
        """The step that ended the demo, or None if all passed."""
        last = self.steps[-1]
        return None if last.ok else last


def run_demo(out: Path, observer: Observer) -> DemoRun:
    """Make a tiny model in the folder `out`, convert it in both directions, train it, and check each step.

    Args:
        out: New or empty folder, or the folder of an earlier demo. Its outputs are replaced.
        observer: Receives a note before and after each step.

    Returns:
        The reports of the steps, up to the first one that failed. If all passed, a page with pictures was written.

    Raises:
        PrepError: `out` exists and was not made by a demo, or cannot be created.
    """
    check_local_path(out)
    _prepare_folder(out)
    steps_to_run = _demo_steps()
    count = len(steps_to_run)
    observer.note(f"offline, {count} steps; to repeat a step: cd {shlex.quote(str(out))}")
    step_reports: list[StepReport] = []
    for number, step in enumerate(steps_to_run, 1):
        command = _command_line(step)
        observer.note(f"[{number}/{count}] {step.title}")
        if command:
            observer.note(f"      $ {command}")
        with _signs_of_life(step, out, observer):
            report = _run_step(step, command, out)
        step_reports.append(report)
        observer.note(f"      {result_text(report)} ({format_duration(report.seconds)})")
        if not report.ok:
            break
    run = DemoRun(out, tuple(step_reports), count)
    if run.failed_step is None:
        write_page(out, run.steps)
    return run


@contextmanager
def _signs_of_life(step: DemoStep, out: Path, observer: Observer) -> Iterator[None]:
    """Note the progress of a step that takes long."""
    start_s = time.monotonic()
    notes = PacedNotes(observer)

    def describe() -> str:
        text = f"      {format_duration(time.monotonic() - start_s)}"
        if step.count_parts is None:
            return text
        done, total = step.count_parts(out)
        return f"{text}, {done} of {total} steps"

    with ticking(lambda: notes.note_if_due(describe)):
        yield


def _demo_steps() -> tuple[DemoStep, ...]:
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
    # Only a folder with the marker loses files, so a folder of the user with the same name stays as it is.
    is_empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty and not (out / MARKER).is_file():
        why = f"it has no {MARKER}"
        what = f"{out} already exists and is not a demo's folder"
        raise usage_error(what, why, _demo_command("NAME"))
    for name in OUTPUTS:
        remove_output(out / name)
    try:
        # A kill between the two lines leaves an empty folder, which the next demo accepts.
        out.mkdir(parents=True, exist_ok=True)
        (out / MARKER).touch()
    except OSError as error:
        why = error.strerror or str(error)
        raise PrepError(f"cannot create {out}", why, _demo_command("NAME")) from error


def _demo_command(folder: str) -> str:
    return text("{}", Command("demo", Option("out", folder)))


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
        report = replace(report, result=str(error), hint=_demo_command(str(folder)))
    return replace(report, seconds=round(time.monotonic() - start_s, 3))


def result_text(report: StepReport) -> str:
    """Return the result of a step, marked if it failed."""
    return report.result if report.ok else f"FAILED: {report.result}"
