"""Commands that write no checkpoint of their own: verify, inspect, check-family, demo, models, env."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from prepcli.cli.operation_parameters import Omit
from prepcli.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.cli.options import (
    CheckpointArgument,
    FamilyArgument,
    OptionalCheckpointArgument,
    ProgressOption,
)
from prepcli.errors import usage_error
from prepcli.operations.inspection_options import VerifyOptions
from prepcli.operations.options import DEFAULT_MEMORY, SourceOptions

ShardsOption = Annotated[
    str | None,
    typer.Option(
        "--shards",
        metavar="LEAF",
        help="Draw the shards of a leaf on each device.",
        show_default=False,
    ),
]
ShardsMeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="DP,FSDP,MP",
        help="Set the mesh of --shards; default: the source's.",
        show_default=False,
    ),
]
DiffOption = Annotated[
    str | None,
    typer.Option(
        "--diff", metavar="OTHER", help="Compare names, shapes and dtypes.", show_default=False
    ),
]


@expand_option_groups
def verify(
    checkpoint: OptionalCheckpointArgument = None,
    against: Annotated[
        str | None,
        typer.Argument(metavar="AGAINST", help="Compare with this checkpoint.", show_default=False),
    ] = None,
    *,
    options: Annotated[VerifyOptions, Omit("step")],
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Compare every bit with the manifest or with another checkpoint.

    Examples:
      prep verify gpt-neo-1.3B-padded-init
      prep verify gpt-neo-1.3B-padded gpt-neo-1.3B
      prep verify gpt-neo-1.3B-padded --accept generation_config.json
    """
    from prepcli.operations.verify import verify as run
    from prepcli.rendering.verification import verification_report

    ui = output_options.open_console("verify", progress)
    result = run(checkpoint, against, progress=ui, **options)
    return ui.finish(verification_report(result, ui))


@expand_option_groups
def inspect(
    checkpoint: CheckpointArgument,
    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="PATTERN",
            help="Select tensors by name, for example `*.q.*`.",
            show_default=False,
        ),
    ] = None,
    sort: Annotated[
        Literal["name", "size", "file"],
        typer.Option("--sort", metavar="BY", help="Sort by name, size or file (stored order)."),
    ] = "file",
    tree: Annotated[
        bool, typer.Option("--tree", help="Print a tree with equal layers merged.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read the data; print min, max, mean, NaN ….")
    ] = False,
    shards: ShardsOption = None,
    mesh: ShardsMeshOption = None,
    diff: DiffOption = None,
    *,
    options: Annotated[SourceOptions, Omit("step", "memory")],
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Show the tensors of a checkpoint.

    Examples:
      prep inspect gpt-neo-1.3B-init --tree
      prep inspect ./llama-13b '*.q_proj.*' --stats
      prep inspect gpt-neo-1.3B-init --shards embed.tokens --mesh 1,2,4
    """
    from prepcli.operations.inspect import compare_shapes, select_tensors, shard_leaf
    from prepcli.rendering.inspection import (
        shape_comparison_report,
        shards_report,
        tensors_report,
    )

    ui = output_options.open_console("inspect", progress)
    _check_views({"--tree": tree, "--stats": stats, "--shards": shards, "--diff": diff})
    _check_view_options(pattern, sort, mesh, shards=shards, diff=diff)
    if shards is not None:
        leaf = shard_leaf(checkpoint, ui, options, leaf_name=shards, mesh_text=mesh)
        return ui.finish(shards_report(leaf))
    if diff is not None:
        comparison = compare_shapes(checkpoint, diff, ui, options, pattern=pattern)
        return ui.finish(shape_comparison_report(comparison, ui))
    selected = select_tensors(checkpoint, ui, options, pattern=pattern, sort=sort, stats=stats)
    return ui.finish(tensors_report(selected, ui, tree=tree))


def _check_views(views: Mapping[str, str | bool | None]) -> None:
    """Raise UsageError for more than one view, of the values of their options."""
    views_set = [flag for flag, value in views.items() if value not in (None, False)]
    if len(views_set) > 1:
        raise usage_error(
            f"{' and '.join(views_set)} are different views",
            "inspect shows one at a time",
            f"`{views_set[0]}` alone",
        )


def _check_view_options(
    pattern: str | None, sort: str, mesh: str | None, *, shards: str | None, diff: str | None
) -> None:
    """Raise UsageError for options without effect on the view."""
    if mesh is not None and shards is None:
        raise usage_error(
            "`--mesh` requires `--shards`",
            "it sets the mesh that splits the leaf",
            "`--shards LEAF`",
        )
    if sort != "file" and (shards is not None or diff is not None):
        raise usage_error(
            f"`--sort {sort}` has no effect", "it sorts tables and trees", "remove `--sort`"
        )
    if pattern is not None and shards is not None:
        raise usage_error(
            f"unexpected argument `{pattern}`",
            "`--shards` already names the leaf",
            f"remove `{pattern}`",
        )


@expand_option_groups
def check_family(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="A config.json, or a folder with one.", show_default=False
        ),
    ],
    check: Annotated[
        list[str] | None,
        typer.Option(
            "--check", metavar="NAME", help="Run only this check; repeatable.", show_default=False
        ),
    ] = None,
    *,
    output_options: OutputOptions,
) -> int:
    """Check a model family on a tiny model of a config.

    The checks convert, compute and train a model with the choices of the config and small
    sizes. They compare with transformers if it and torch are installed; otherwise these
    checks are skipped.

    Examples:
      prep check-family persimmon.json
      prep check-family ./llama-13b --check logits --check gradients
    """
    from prepcli.testing.report import family_report

    ui = output_options.open_console("check-family")
    return ui.finish(family_report(config, check or (), ui))


@expand_option_groups
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Work in FOLDER.")] = Path(
        "prep-demo"
    ),
    *,
    output_options: OutputOptions,
) -> int:
    """Convert, train and export a tiny model, and check it.

    The demo works offline. It shows and runs the commands that you would type, kills one of
    them, resumes it, and keeps all outputs.

    Examples:
      prep demo
      prep demo --out /tmp/demo --json
    """
    from prepcli.demo.run import run_demo
    from prepcli.rendering.demo import demo_report

    ui = output_options.open_console("demo")
    return ui.finish(demo_report(run_demo(out, ui), ui.columns))


@expand_option_groups
def models(family: FamilyArgument = None, *, output_options: OutputOptions) -> int:
    """List the aliases of checkpoints.

    Examples:
      prep models
      prep models llama --json
    """
    from prepcli.operations.models import list_aliases
    from prepcli.rendering.models import aliases_report

    ui = output_options.open_console("models")
    return ui.finish(aliases_report(list_aliases(family), ui.columns))


@expand_option_groups
def env(
    devices: Annotated[
        bool, typer.Option("--devices", help="Import jax and list its devices.")
    ] = False,
    *,
    output_options: OutputOptions,
) -> int:
    """Show versions, devices, processes, memory, settings and caches.

    Examples:
      prep env
      prep env --devices --json
    """
    from prepcli.operations.env import read_environment
    from prepcli.rendering.env import environment_report

    ui = output_options.open_console("env")
    environment = read_environment(DEFAULT_MEMORY, list_devices=devices)
    return ui.finish(environment_report(environment, ui.columns))
