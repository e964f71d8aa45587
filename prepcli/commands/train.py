"""`prep train`: train with a recipe, from the recipe's checkpoint or from the last step of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prepcli.console.jax_logs import silence_jax
from prepcli.console.ui import Report, Ui, open_ui
from prepcli.operations.export import export
from prepcli.operations.recipe_files import find_training_recipe
from prepcli.training_runs.run import TrainRequest, TrainResult
from prepcli.training_runs.train import train_run
from trainer.recipe import load_recipe, schema


def train(request: TrainRequest, ui: Ui) -> Report:
    """Train with a recipe; see `train_run`.

    Args:
        request: Recipe, overrides and folder of the run.
        ui: Receives notes, warnings and progress.

    Returns:
        Report with the last step's folder and metrics. It has an error if the run was stopped before its last step.

    Raises:
        PrepError: The recipe, the checkpoint, the data or the devices are invalid, or training failed.
    """
    loaded = load_recipe(find_training_recipe(request.recipe), request.overrides)
    request.token_functions.check(loaded.recipe)
    silence_jax(ui)
    return _report(train_run(loaded, request, ui, CommandExporter()))


def recipe_schema() -> Report:
    """Report the JSON schema of recipes."""
    return Report(json.dumps(schema(), indent=2))


class CommandExporter:
    """StepExporter that runs `prep export` without output."""

    def export(self, step: str, out: Path) -> None:
        """Export a step to a folder."""
        export(step, out, progress=_silent_ui())

    def push(self, step: str, out: Path, repository: str) -> Mapping[str, str]:
        """Export a step to a folder and upload it."""
        conversion = export(step, out, progress=_silent_ui(), push=repository)
        return conversion.details["pushed"]


def _silent_ui() -> Ui:
    return open_ui("export", as_json=False, quiet=True, verbose=0, progress="none")


def _report(result: TrainResult) -> Report:
    """Return the report of a run: text, JSON fields, and the next command of a finished run."""
    fields: dict[str, Any] = {
        "output": result.output,
        "run": result.run,
        "step": result.step,
        "steps": result.steps,
        "resumed_at": result.resumed_at,
        "mesh": result.mesh,
        "attention_kernel": result.attention_kernel,
        **result.metrics,
    }
    if result.memory is not None:
        text = f"would train to step {result.steps} in {result.run}"
        fields |= {"memory": result.memory, "dry_run": True}
        return Report(text, fields, process=result.process)
    if result.error is not None:
        return Report(fields=fields, error=result.error, process=result.process)
    if result.pushed is not None:
        fields["pushed"] = result.pushed
    next_command = f"prep export {result.run}"
    return Report(result.output or "", fields, next_command, process=result.process)
