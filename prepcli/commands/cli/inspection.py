"""Commands that write no checkpoint of their own, e.g. verify, lock, inspect, models, docs, env."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from prepcli.commands.cli.option_groups import (
    CheckpointArgument,
    FamilyArgument,
    Omit,
    OptionalCheckpointArgument,
    OutputOptions,
    ProgressOptions,
    complete_page,
    expand_option_groups,
)
from prepcli.commands.operations.inspection_options import (
    ChainCommandOptions,
    CheckFamilyOptions,
    DemoOptions,
    DocsOptions,
    EnvOptions,
    InspectOptions,
    LockArguments,
    LockOptions,
    LogitsCommandOptions,
    RoundtripArguments,
    RoundtripOptions,
    SuggestMapArguments,
    SuggestMapOptions,
    VerifyOptions,
    ViewOptions,
)
from prepcli.commands.operations.operation import check_mutually_exclusive, reject_without
from prepcli.commands.operations.options import DEFAULT_MEMORY, SourceOptions
from prepcli.core.errors import Option, text, usage_error


@expand_option_groups
def verify(
    checkpoint: OptionalCheckpointArgument = None,
    against: Annotated[
        str | None,
        typer.Argument(metavar="AGAINST", help="Compare with this checkpoint.", show_default=False),
    ] = None,
    *,
    options: Annotated[VerifyOptions, Omit("step")],
    chain_options: ChainCommandOptions,
    logits_options: LogitsCommandOptions,
    output_options: ProgressOptions,
) -> int:
    """Compare every bit with the manifest or another checkpoint.

    With --chain, show by recorded digests from which checkpoints an output was made. --lock is
    then the lock of the first one. With --logits, compare what both models compute.

    Examples:
      prep verify gpt-neo-1.3B-padded-init
      prep verify gpt-neo-1.3B-padded gpt-neo-1.3B
      prep verify gpt-neo-1.3B-bf16 gpt-neo-1.3B --tolerance 1e-2
      prep verify gpt-neo-1.3B-padded --accept generation_config.json
      prep verify my-run-hf --chain --lock gpt-neo-1.3B.lock.json
      prep verify gpt-neo-1.3B-bf16 gpt-neo-1.3B --logits --tolerance 0.1
      prep verify ./my-model --logits --library transformers
    """
    ui = output_options.open_console("verify")
    _check_verify_options(against, {**options, **chain_options, **logits_options})
    source = {name: options[name] for name in SourceOptions.__annotations__ if name in options}
    if chain_options["chain"]:
        from prepcli.commands.operations.chain import verify_chain
        from prepcli.commands.rendering.checkpoints import chain_report

        search = {name: chain_options[name] for name in ("search", "allow_unproven")}
        chain = verify_chain(checkpoint, progress=ui, **search, **source)
        return ui.finish(chain_report(chain, ui.columns))
    if logits_options["logits"]:
        from prepcli.commands.operations.verify_logits import verify_logits
        from prepcli.commands.rendering.checkpoints import logits_report

        computed = {name: logits_options[name] for name in ("prompt_ids", "library", "mesh")}
        tolerance = options.get("tolerance")
        comparison = verify_logits(
            checkpoint, against, progress=ui, tolerance=tolerance, **computed, **source
        )
        return ui.finish(logits_report(comparison, ui.columns))
    from prepcli.commands.operations.verify import verify as run
    from prepcli.commands.rendering.checkpoints import verification_report

    return ui.finish(verification_report(run(checkpoint, against, progress=ui, **options), ui))


def _check_verify_options(against: str | None, options: Mapping[str, Any]) -> None:
    """Raise UsageError for options of `prep verify` that `--chain` or `--logits` excludes, or that need one of them."""
    chain = Option("chain", True)
    logits = Option("logits", True)
    if not options["chain"]:
        why = "only a chain has sources to find"
        reject_without(Option("search"), options["search"] or None, chain, why)
        reject_without(Option("allow_unproven"), options["allow_unproven"], chain, why)
    if not options["logits"]:
        why = "only the comparison of logits computes a model"
        reject_without(Option("prompt_ids"), options["prompt_ids"], logits, why)
        library = options["library"] if options["library"] != "prep" else None
        reject_without(Option("library", library), library, logits, why)
        reject_without(Option("mesh"), options["mesh"], logits, why)
    if options["chain"] and against is not None:
        what = text("{} takes one checkpoint", chain)
        why = "the other checkpoints of a chain are recorded"
        raise usage_error(what, why, text("remove {} or {}", against, chain))
    excluded = {
        "chain": ("logits", "quick", "tolerance", "accept", "config", "strict"),
        "logits": ("quick", "accept", "verbatim", "strict"),
    }
    for name, others in excluded.items():
        for other in others if options[name] else ():
            check_mutually_exclusive({name: True, other: options[other] or None})


@expand_option_groups
def lock(
    checkpoint: CheckpointArgument,
    *,
    arguments: LockArguments,
    options: Annotated[LockOptions, Omit("step", "lock")],
    output_options: ProgressOptions,
) -> int:
    """Write the digests of a checkpoint to a lock file.

    The file has the SHA-256 of each file and the XXH3-128 of each tensor. A command with --lock
    refuses a checkpoint that differs from it in any byte.

    Examples:
      prep lock gpt-neo-1.3B
      prep lock ./my-model --out approved.json
      prep lock ./my-model --html lock.html
    """
    from prepcli.commands.operations.lock import lock as run
    from prepcli.commands.rendering.checkpoints import lock_report

    ui = output_options.open_console("lock")
    locked = run(checkpoint, arguments["out"], progress=ui, **options)
    return ui.finish(lock_report(locked, ui))


@expand_option_groups
def roundtrip(
    checkpoint: CheckpointArgument,
    *,
    arguments: RoundtripArguments,
    options: RoundtripOptions,
    output_options: ProgressOptions,
) -> int:
    """Convert to every layout and back, and certify equal bits.

    The certificate lists each way with its tensors, bytes and digest. The conversions are
    temporary, in a folder next to it.

    Examples:
      prep roundtrip gpt-neo-1.3B
      prep roundtrip gpt-neo-1.3B --layout init --layout easylm --out proof.json
    """
    from prepcli.commands.operations.roundtrip import roundtrip as run
    from prepcli.commands.rendering.checkpoints import roundtrip_report

    ui = output_options.open_console("roundtrip")
    result = run(checkpoint, arguments["out"], progress=ui, **options)
    return ui.finish(roundtrip_report(result, ui.columns))


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
    *,
    view: ViewOptions,
    options: Annotated[InspectOptions, Omit("step", "memory", "lock")],
    output_options: ProgressOptions,
) -> int:
    """Show the tensors of a checkpoint.

    Examples:
      prep inspect gpt-neo-1.3B-init --tree
      prep inspect ./llama-13b '*.q_proj.*' --stats
      prep inspect gpt-neo-1.3B-init --shards embed.tokens --mesh 1,2,4
      prep inspect gpt-neo-1.3B-init --html page.html
    """
    from prepcli.commands.operations.inspect import (
        check_view,
        compare_shapes,
        select_tensors,
        shard_leaf,
    )
    from prepcli.commands.rendering.inspection import (
        page_report,
        shape_comparison_report,
        shards_report,
        tensors_report,
    )

    ui = output_options.open_console("inspect")
    check_view(pattern, view)
    if view["html"] is not None:
        page = Path(view["html"])
        return ui.finish(page_report(checkpoint, page, ui, options, pattern=pattern, view=view))
    if view["shards"] is not None:
        leaf = shard_leaf(
            checkpoint,
            ui,
            options,
            leaf_name=view["shards"],
            mesh_text=view["mesh"],
            dequantize=view["quantized"] == "dequantize",
        )
        return ui.finish(shards_report(leaf))
    if view["diff"] is not None:
        comparison = compare_shapes(checkpoint, view["diff"], ui, options, pattern=pattern)
        return ui.finish(shape_comparison_report(comparison, ui))
    selected = select_tensors(
        checkpoint,
        ui,
        options,
        pattern=pattern,
        sort=view["sort"],
        stats=view["stats"],
        dequantize=view["quantized"] == "dequantize",
    )
    return ui.finish(tensors_report(selected, ui, tree=view["tree"]))


@expand_option_groups
def check_family(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="A config.json, or a folder with one.", show_default=False
        ),
    ],
    *,
    options: CheckFamilyOptions,
    output_options: OutputOptions,
) -> int:
    """Check a model family on a tiny model of a config.

    The checks convert, compute and train a model with the choices of the config and small
    sizes. They compare with transformers if it and torch are installed. Otherwise these
    checks are skipped.

    Examples:
      prep check-family persimmon.json
      prep check-family ./llama-13b --check logits --check gradients
    """
    from prepcli.commands.testing.checks import family_report

    ui = output_options.open_console("check-family")
    return ui.finish(family_report(config, options["check"], ui))


@expand_option_groups
def demo(*, options: DemoOptions, output_options: OutputOptions) -> int:
    """Convert, train and export a tiny model, and check it.

    The demo works offline. It shows and runs the commands that you would type, kills one of
    them, resumes it, and keeps all outputs.

    Examples:
      prep demo
      prep demo --out /tmp/demo --json
    """
    from prepcli.commands.demo.run import run_demo

    ui = output_options.open_console("demo")
    return ui.finish(run_demo(Path(options["out"]), ui, columns=ui.columns))


@expand_option_groups
def models(family: FamilyArgument = None, *, output_options: OutputOptions) -> int:
    """List the aliases of checkpoints.

    Examples:
      prep models
      prep models llama --json
    """
    from prepcli.commands.operations.about import list_aliases
    from prepcli.commands.rendering.checkpoints import aliases_report

    ui = output_options.open_console("models")
    return ui.finish(aliases_report(list_aliases(family), ui.columns))


@expand_option_groups
def env(*, options: EnvOptions, output_options: OutputOptions) -> int:
    """Show versions, devices, processes, memory and settings.

    Examples:
      prep env
      prep env --devices --json
    """
    from prepcli.commands.operations.about import read_environment
    from prepcli.commands.rendering.environment import environment_report

    ui = output_options.open_console("env")
    environment = read_environment(DEFAULT_MEMORY, list_devices=options["devices"])
    return ui.finish(environment_report(environment, ui.columns))


@expand_option_groups
def suggest(
    checkpoint: CheckpointArgument,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A checkpoint of the same model, with the names and shapes to map to.",
            show_default=False,
        ),
    ],
    *,
    arguments: SuggestMapArguments,
    options: Annotated[SuggestMapOptions, Omit("step", "lock")],
    output_options: ProgressOptions,
) -> int:
    """Propose a map between two checkpoints with the same values.

    Both are read whole. Tensors that are equal, transposed or stacked have rows. The others are listed. The file is
    for --map.

    Examples:
      prep map suggest ./my-model ./my-model-hf
      prep map suggest ./my-model ./my-model-hf --out my.map
    """
    from prepcli.commands.operations.suggest_map import suggest_map
    from prepcli.commands.rendering.checkpoints import suggestion_report

    ui = output_options.open_console("map")
    suggestion = suggest_map(checkpoint, target, arguments["out"], progress=ui, **options)
    return ui.finish(suggestion_report(suggestion))


@expand_option_groups
def docs(
    page: Annotated[
        str | None,
        typer.Argument(
            metavar="PAGE",
            help="Page to print. Default: list all.",
            autocompletion=complete_page,
            show_default=False,
        ),
    ] = None,
    *,
    options: DocsOptions,
    output_options: OutputOptions,
) -> int:
    """List the pages of the documentation, or print one. The path of a page goes to stderr.

    Examples:
      prep docs
      prep docs train | less
      prep docs recipes --path
    """
    from prepcli.commands.operations.about import docs_folder, find_page, list_pages
    from prepcli.commands.rendering.environment import page_report, pages_report

    ui = output_options.open_console("docs")
    path_only = options["path"]
    if page is not None:
        return ui.finish(page_report(find_page(page), ui, path_only=path_only))
    pages = pages_report(list_pages(), docs_folder(), ui.columns, path_only=path_only)
    return ui.finish(pages)
