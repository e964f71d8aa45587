"""The commands of `prep launch`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prepcli.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.cli.options import complete_recipe
from prepcli.launch.job import DEFAULT_GRACE_S, MAX_RESTARTS

if TYPE_CHECKING:
    from prepcli.operations.launch import LaunchRequest

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
EnvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="KEY=VALUE",
        help="Set an environment variable; repeatable.",
        show_default=False,
    ),
]
NodesOption = Annotated[
    int, typer.Option("--nodes", metavar="N", min=1, help="Use N nodes, with a process each.")
]
DevicesPerNodeOption = Annotated[
    int | None,
    typer.Option(
        "--devices-per-node",
        metavar="N",
        min=1,
        help="Use N devices of each node.",
        show_default=False,
    ),
]
CpusOption = Annotated[
    int | None,
    typer.Option(
        "--cpus", metavar="N", min=1, help="Use N CPU cores of each node.", show_default=False
    ),
]
MemOption = Annotated[
    str | None,
    typer.Option("--mem", metavar="SIZE", help="Use SIZE memory of each node.", show_default=False),
]
GraceOption = Annotated[
    int,
    typer.Option(
        "--grace", metavar="SECONDS", min=1, help="Stop and save SECONDS before the job is killed."
    ),
]


TimeOption = Annotated[
    str | None,
    typer.Option(
        "--time",
        metavar="LIMIT",
        help="Set the time limit, such as 24:00:00.",
        show_default=False,
    ),
]
PartitionOption = Annotated[
    str | None,
    typer.Option("--partition", metavar="NAME", help="Use this partition.", show_default=False),
]
AccountOption = Annotated[
    str | None,
    typer.Option("--account", metavar="NAME", help="Charge this account.", show_default=False),
]
ModuleOption = Annotated[
    list[str] | None,
    typer.Option("--module", metavar="NAME", help="Load a module; repeatable.", show_default=False),
]
SbatchOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sbatch", metavar="OPTION", help="Add an sbatch option; repeatable.", show_default=False
    ),
]


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """Options of the targets that are scripts."""

    job_name: Annotated[
        str | None,
        typer.Option(
            "--job-name",
            metavar="NAME",
            help="Name the job; default: the recipe's name.",
            show_default=False,
        ),
    ] = None
    env: EnvOption = None
    setup: Annotated[
        list[str] | None,
        typer.Option(
            "--setup",
            metavar="LINE",
            help="Run LINE before training; repeatable.",
            show_default=False,
        ),
    ] = None
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts", metavar="N", min=0, help="Restart a stopped job at most N times."
        ),
    ] = MAX_RESTARTS
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Write to FILE; default: stdout.", show_default=False
        ),
    ] = None
    submit: Annotated[bool, typer.Option("--submit", help="Submit the job.")] = False

    def request(self, recipe: Path, words: list[str] | None) -> LaunchRequest:
        """Return the request of a command with these options."""
        from prepcli.operations.launch import LaunchRequest

        return LaunchRequest(
            recipe=recipe,
            train_words=tuple(words or ()),
            env=tuple(self.env or ()),
            setup=tuple(self.setup or ()),
            job_name=self.job_name,
            max_restarts=self.max_restarts,
            out=self.out,
            submit=self.submit,
        )


@expand_option_groups
def slurm(
    recipe: RecipeArgument,
    words: WordsArgument = None,
    *,
    nodes: NodesOption = 1,
    devices_per_node: DevicesPerNodeOption = None,
    cpus: CpusOption = None,
    mem: MemOption = None,
    time: TimeOption = None,
    partition: PartitionOption = None,
    account: AccountOption = None,
    module: ModuleOption = None,
    sbatch: SbatchOption = None,
    log: Annotated[
        str | None,
        typer.Option(
            "--log", metavar="FILE", help="Log to FILE; default: NAME-%j.log.", show_default=False
        ),
    ] = None,
    grace: GraceOption = DEFAULT_GRACE_S,
    script_options: ScriptOptions,
    output_options: OutputOptions,
) -> int:
    """Write a SLURM batch script, or submit it.

    The job saves and stops before its time limit. SLURM then requeues it, and it resumes.

    Examples:
      prep launch slurm llama-13b --nodes 2 --devices-per-node 8
      prep launch slurm run.toml --nodes 4 --time 24:00:00 --module cuda --submit
      prep launch slurm run.toml --setup 'source env/bin/activate' -- --set seed=1
    """
    from prepcli.launch.slurm import SlurmOptions
    from prepcli.operations.launch import launch_slurm
    from prepcli.rendering.launch import script_report

    ui = output_options.open_console("launch")
    options = SlurmOptions(
        nodes=nodes,
        devices_per_node=devices_per_node,
        cpus=cpus,
        mem=mem,
        time=time,
        partition=partition,
        account=account,
        modules=tuple(module or ()),
        directives=tuple(sbatch or ()),
        log=log,
        grace_s=grace,
    )
    launched = launch_slurm(script_options.request(recipe, words), options)
    return ui.finish(script_report(launched))


@expand_option_groups
def tpu(
    recipe: RecipeArgument,
    words: WordsArgument = None,
    *,
    accelerator: Annotated[
        str,
        typer.Option(
            "--accelerator",
            metavar="TYPE",
            help="Create a TPU, such as v5p-256.",
            show_default=False,
        ),
    ],
    zone: Annotated[
        str, typer.Option("--zone", metavar="ZONE", help="Create it in ZONE.", show_default=False)
    ],
    project: Annotated[
        str | None,
        typer.Option("--project", metavar="NAME", help="Use this project.", show_default=False),
    ] = None,
    runtime_version: Annotated[
        str | None,
        typer.Option(
            "--runtime-version",
            metavar="NAME",
            help="Use this TPU software; default: by TYPE.",
            show_default=False,
        ),
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Use a TPU that may be preempted.")] = False,
    script_options: ScriptOptions,
    output_options: OutputOptions,
) -> int:
    """Write a script that creates a Cloud TPU and trains on it, or run it.

    Examples:
      prep launch tpu run.toml --accelerator v5p-512 --zone us-east5-a
      prep launch tpu run.toml --accelerator v4-64 --zone us-central2-b --spot
    """
    from prepcli.launch.tpu import TpuOptions
    from prepcli.operations.launch import launch_tpu
    from prepcli.rendering.launch import script_report

    ui = output_options.open_console("launch")
    options = TpuOptions(
        accelerator=accelerator,
        zone=zone,
        project=project,
        runtime_version=runtime_version,
        spot=spot,
    )
    launched = launch_tpu(script_options.request(recipe, words), options)
    return ui.finish(script_report(launched))


@expand_option_groups
def gke(
    recipe: RecipeArgument,
    words: WordsArgument = None,
    *,
    image: Annotated[
        str,
        typer.Option(
            "--image", metavar="IMAGE", help="Run this container with prep.", show_default=False
        ),
    ],
    nodes: NodesOption = 1,
    devices_per_node: DevicesPerNodeOption = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            "--accelerator",
            metavar="LABEL",
            help="Use nodes with this GPU or TPU label.",
            show_default=False,
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology", metavar="4x4x8", help="Use this TPU topology.", show_default=False
        ),
    ] = None,
    cpus: CpusOption = None,
    mem: MemOption = None,
    claim: Annotated[
        str | None,
        typer.Option(
            "--claim",
            metavar="NAME",
            help="Work in this persistent volume claim.",
            show_default=False,
        ),
    ] = None,
    grace: GraceOption = DEFAULT_GRACE_S,
    script_options: ScriptOptions,
    output_options: OutputOptions,
) -> int:
    """Write a JobSet for Kubernetes, or create it.

    Examples:
      prep launch gke run.toml --image I --devices-per-node 8 --claim runs
      prep launch gke run.toml --image I --devices-per-node 8 -- --out gs://B/RUN
    """
    from prepcli.launch.gke import GkeOptions
    from prepcli.operations.launch import launch_gke
    from prepcli.rendering.launch import script_report

    ui = output_options.open_console("launch")
    options = GkeOptions(
        image=image,
        nodes=nodes,
        devices_per_node=devices_per_node,
        accelerator=accelerator,
        topology=topology,
        cpus=cpus,
        mem=mem,
        claim=claim,
        grace_s=grace,
    )
    launched = launch_gke(script_options.request(recipe, words), options)
    return ui.finish(script_report(launched))


@expand_option_groups
def local(
    recipe: RecipeArgument,
    words: WordsArgument = None,
    *,
    processes: Annotated[
        int, typer.Option("--processes", metavar="N", min=1, max=64, help="Start N processes.")
    ] = 2,
    devices: Annotated[
        int, typer.Option("--devices", metavar="M", min=1, help="Use M CPU devices in each.")
    ] = 1,
    env: EnvOption = None,
    output_options: OutputOptions,
) -> int:
    """Train in several processes with CPU devices on this machine.

    A line that begins with [1] is from process 1. A signal stops all processes.

    Examples:
      prep launch local recipe.toml --processes 2 --devices 4
      prep launch local recipe.toml -- --set train.steps=10
    """
    from prepcli.operations.launch import LaunchRequest, launch_local
    from prepcli.rendering.launch import local_report

    ui = output_options.open_console("launch")
    request = LaunchRequest(recipe=recipe, train_words=tuple(words or ()), env=tuple(env or ()))
    training = launch_local(
        request, ui, processes=processes, devices=devices, quiet=output_options.quiet
    )
    return ui.finish(local_report(training))
