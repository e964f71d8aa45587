"""Training runs as text and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prepcli.commands.operations.results import TrainingRun
from prepcli.commands.rendering.runs import training_report
from prepcli.core.errors import STOPPED, PrepError


def run(error: PrepError | None = None, **details: Any) -> TrainingRun:
    fields = {"output": "runs/a/5", "run": "runs/a", "step": 5, "steps": 10, **details}
    return TrainingRun(Path("runs/a"), 5, error is None, 1.0, fields, error)


def test_finished_run_names_its_last_step_and_the_next_command():
    report = training_report(run())
    assert (report.text, report.next_command) == ("runs/a/5", "prep export runs/a")


def test_stopped_run_has_fields_and_an_error():
    report = training_report(run(PrepError("stopped", code=STOPPED)))
    assert report.error is not None
    assert (report.text, report.next_command, report.error.code) == ("", "", STOPPED)
    assert report.fields["step"] == 5


def test_dry_run_report_names_last_step_and_folder():
    report = training_report(run(dry_run=True, memory={}))
    assert (report.text, report.next_command) == ("would train to step 10 in runs/a", "")


def test_dry_run_report_of_a_finished_run_promises_no_steps():
    report = training_report(run(dry_run=True, memory={}, step=10))
    assert report.text == "would train no step: runs/a is finished"
