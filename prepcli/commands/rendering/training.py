"""Training runs, and the schema of recipes, as text and JSON."""

from __future__ import annotations

import json
import shlex

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.results import TrainingRun
from trainer.recipe import schema


def training_report(run: TrainingRun) -> Report:
    """Return the text, the JSON object and the next command of a run.

    A run that was stopped has an error, with the exit code of its cause.
    """
    fields = dict(run.details)
    if "dry_run" in fields:
        text = f"would train to step {fields['steps']} in {fields['run']}"
        return Report(text, fields, process=run.process)
    if run.error is not None:
        return Report(fields=fields, error=run.error, process=run.process)
    next_command = f"prep export {shlex.quote(str(fields['run']))}"
    return Report(fields["output"] or "", fields, next_command, process=run.process)


def schema_report() -> Report:
    """Return the JSON schema of recipes."""
    return Report(json.dumps(schema(), indent=2))
