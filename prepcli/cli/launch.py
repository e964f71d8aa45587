"""The commands of `prep launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prepcli.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.cli.options import complete_recipe
from prepcli.launch.options import (
    GkeOptions,
    LocalOptions,
    SlurmOptions,
    TpuOptions,
)

RecipeArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="Recipe: a TOML file, or the name of one of `prep recipes`.",
        autocompletion=complete_recipe,
        show_default=False,
    ),
]
WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- WORDS", help="Pass these words to prep train.", show_default=False),
]


@expand_option_groups
def slurm(
    recipe: RecipeArgument,
    words: WordsArgument = None,
    *,
    options: SlurmOptions,
    output_options: OutputOptions,
) -> int:
    """Write a SLURM batch script, or submit it.

    The job saves and stops before its time limit. SLURM then requeues it, and it resumes.

    Examples:
      prep launch slurm llama-13b --nodes 2 --devices-per-node 8
      prep launch slurm run.toml --nodes 4 --time 24:00:00 --module cuda --submit
      prep launch slurm run.toml --setup 'source env/bin/activate' -- --set seed=1
    """
    from prepcli.operations.launch import launch_slurm
    from prepcli.rendering.launch import script_report

    ui = output_options.open_console("launch")
    return ui.finish(script_report(launch_slurm(recipe, words or (), **options)))


@expand_option_groups
def tpu(
    recipe: RecipeArgument,
    words: WordsArgument = None,
    *,
    options: TpuOptions,
    output_options: OutputOptions,
) -> int:
    """Write a script that creates a Cloud TPU and trains on it, or run it.

    Examples:
      prep launch tpu run.toml --accelerator v5p-512 --zone us-east5-a
      prep launch tpu run.toml --accelerator v4-64 --zone us-central2-b --spot
    """
    from prepcli.operations.launch import launch_tpu
    from prepcli.rendering.launch import script_report

    ui = output_options.open_console("launch")
    return ui.finish(script_report(launch_tpu(recipe, words or (), **options)))


@expand_option_groups
def gke(
    recipe: RecipeArgument,
    words: WordsArgument = None,
    *,
    options: GkeOptions,
    output_options: OutputOptions,
) -> int:
    """Write a JobSet for Kubernetes, or create it.

    Examples:
      prep launch gke run.toml --image I --devices-per-node 8 --claim runs
      prep launch gke run.toml --image I --devices-per-node 8 -- --out gs://B/RUN
    """
    from prepcli.operations.launch import launch_gke
    from prepcli.rendering.launch import script_report

    ui = output_options.open_console("launch")
    return ui.finish(script_report(launch_gke(recipe, words or (), **options)))


@expand_option_groups
def local(
    recipe: RecipeArgument,
    words: WordsArgument = None,
    *,
    options: LocalOptions,
    output_options: OutputOptions,
) -> int:
    """Train in several processes with CPU devices on this machine.

    A line that begins with [1] is from process 1. A signal stops all processes.

    Examples:
      prep launch local recipe.toml --processes 2 --devices 4
      prep launch local recipe.toml -- --set train.steps=10
    """
    from prepcli.operations.launch import launch_local
    from prepcli.rendering.launch import local_report

    ui = output_options.open_console("launch")
    training = launch_local(recipe, words or (), ui, quiet=output_options.quiet, **options)
    return ui.finish(local_report(training))
