"""The commands of `prep launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prepcli.commands.cli.launched import launched_command
from prepcli.commands.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.commands.cli.options import complete_recipe
from prepcli.launch.options import (
    GkeOptions,
    LocalOptions,
    RayOptions,
    SkyOptions,
    SlurmOptions,
    TpuOptions,
)

RecipeArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RECIPE",
        help="Recipe of a training: a TOML file, or the name of one of `prep recipes`.",
        autocompletion=complete_recipe,
        show_default=False,
    ),
]
WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- WORDS",
        help="With RECIPE: words of prep train. Without: a command of prep and its words.",
        show_default=False,
    ),
]


@expand_option_groups
def slurm(
    context: typer.Context,
    recipe: RecipeArgument = None,
    words: WordsArgument = None,
    *,
    options: SlurmOptions,
    output_options: OutputOptions,
) -> int:
    """Write a SLURM batch script, or submit it.

    The job saves and stops before its time limit. SLURM then requeues it, and it resumes.
    With --array, each task of a job array writes its share of a conversion.

    Examples:
      prep launch slurm llama-13b --nodes 2 --devices-per-node 8
      prep launch slurm run.toml --nodes 4 --time 24:00:00 --module cuda --submit
      prep launch slurm run.toml --setup 'source env/bin/activate' -- --set seed=1
      prep launch slurm --array 8 -- save-init llama-13b --mesh 1,64,4
    """
    from prepcli.commands.operations.launch import launch_script
    from prepcli.commands.rendering.launch import script_report

    command = launched_command(context, recipe, words or ())
    ui = output_options.open_console("launch")
    return ui.finish(script_report(launch_script("slurm", command, options)))


@expand_option_groups
def tpu(
    context: typer.Context,
    recipe: RecipeArgument = None,
    words: WordsArgument = None,
    *,
    options: TpuOptions,
    output_options: OutputOptions,
) -> int:
    """Write a script that creates a Cloud TPU, or run it.

    The TPU runs the command. Commands without a mesh run on the first host.

    Examples:
      prep launch tpu run.toml --accelerator v5p-512 --zone us-east5-a
      prep launch tpu run.toml --accelerator v4-64 --zone us-central2-b --spot
      prep launch tpu --accelerator v4-8 --zone us-central2-b -- eval m --data d
    """
    from prepcli.commands.operations.launch import launch_script
    from prepcli.commands.rendering.launch import script_report

    command = launched_command(context, recipe, words or ())
    ui = output_options.open_console("launch")
    return ui.finish(script_report(launch_script("tpu", command, options)))


@expand_option_groups
def gke(
    context: typer.Context,
    recipe: RecipeArgument = None,
    words: WordsArgument = None,
    *,
    options: GkeOptions,
    output_options: OutputOptions,
) -> int:
    """Write a JobSet for Kubernetes, or create it.

    Examples:
      prep launch gke run.toml --image I --devices-per-node 8 --claim runs
      prep launch gke run.toml --image I --devices-per-node 8 -- --out gs://B/RUN
      prep launch gke --image I --nodes 4 --claim runs -- save-init llama-13b
    """
    from prepcli.commands.operations.launch import launch_script
    from prepcli.commands.rendering.launch import script_report

    command = launched_command(context, recipe, words or ())
    ui = output_options.open_console("launch")
    return ui.finish(script_report(launch_script("gke", command, options)))


@expand_option_groups
def sky(
    context: typer.Context,
    recipe: RecipeArgument = None,
    words: WordsArgument = None,
    *,
    options: SkyOptions,
    output_options: OutputOptions,
) -> int:
    """Write a managed job of SkyPilot, or submit it.

    SkyPilot starts the job again after a preemption, and it resumes.

    Examples:
      prep launch sky run.toml --accelerator tpu-v5p-8 -- --out gs://B/RUN
      prep launch sky --spot -- export gs://B/RUN --out gs://B/MODEL
    """
    from prepcli.commands.operations.launch import launch_script
    from prepcli.commands.rendering.launch import script_report

    command = launched_command(context, recipe, words or ())
    ui = output_options.open_console("launch")
    return ui.finish(script_report(launch_script("sky", command, options)))


@expand_option_groups
def ray(
    context: typer.Context,
    recipe: RecipeArgument = None,
    words: WordsArgument = None,
    *,
    options: RayOptions,
    output_options: OutputOptions,
) -> int:
    """Write the driver of a Ray job, or submit it.

    Training runs in JaxTrainer of Ray Train. Conversions run as tasks with a share each.

    Examples:
      prep launch ray run.toml --workers 4 --gpus 8 --folder /shared/runs
      prep launch ray --workers 4 --folder /shared -- save-init llama-13b
    """
    from prepcli.commands.operations.launch import launch_script
    from prepcli.commands.rendering.launch import script_report

    command = launched_command(context, recipe, words or ())
    ui = output_options.open_console("launch")
    return ui.finish(script_report(launch_script("ray", command, options)))


@expand_option_groups
def local(
    context: typer.Context,
    recipe: RecipeArgument = None,
    words: WordsArgument = None,
    *,
    options: LocalOptions,
    output_options: OutputOptions,
) -> int:
    """Run a command in several processes on this machine.

    The devices are CPU devices. Lines of process 1 begin with [1]. A signal stops all processes.

    Examples:
      prep launch local recipe.toml --processes 2 --devices 4
      prep launch local recipe.toml -- --set train.steps=10
      prep launch local --processes 4 -- save-init ./my-model --mesh 1,1,8
    """
    from prepcli.commands.operations.launch import launch_local
    from prepcli.commands.rendering.launch import local_report

    command = launched_command(context, recipe, words or ())
    ui = output_options.open_console("launch")
    job = launch_local(command, ui, quiet=output_options.quiet, **options)
    return ui.finish(local_report(job))
