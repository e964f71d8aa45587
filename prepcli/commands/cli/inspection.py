"""Commands that write no checkpoint of their own, e.g. verify, lock, inspect, models, docs, env."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from prepcli.commands.cli.option_groups import (
    CheckpointArgument,
    FamilyArgument,
    Omit,
    OneProcessCommand,
    OptionalCheckpointArgument,
    OutputUi,
    ProgressUi,
    command,
    complete_page,
)
from prepcli.commands.console.ui import Report
from prepcli.commands.operations.inspection_options import (
    ChainOptions,
    InspectOptions,
    LockOptions,
    LogitsOptions,
    RoundtripOptions,
    SuggestMapOptions,
    VerifyOptions,
    ViewOptions,
)
from prepcli.commands.operations.operation import check_mutually_exclusive, reject_without
from prepcli.commands.operations.options import DEFAULT_MEMORY, SourceOptions
from prepcli.core.errors import Option, text, usage_error
from prepcli.core.option_spec import PathLike, flag, option

_SOURCE = tuple(SourceOptions.__annotations__)


@command(guide="prove")
def verify(
    checkpoint: OptionalCheckpointArgument = None,
    against: Annotated[
        str | None,
        typer.Argument(metavar="AGAINST", help="Compare with this checkpoint.", show_default=False),
    ] = None,
    *,
    options: Annotated[VerifyOptions, Omit("step")],
    chain: Annotated[
        bool,
        flag("Show by recorded digests from which checkpoints an output was made.", position=21),
    ],
    chain_options: Annotated[ChainOptions, Omit(*_SOURCE)],
    logits: Annotated[
        bool, flag("Compare the logits and hidden states that both models compute.", position=23)
    ],
    logits_options: Annotated[LogitsOptions, Omit(*_SOURCE, "tolerance")],
    ui: ProgressUi,
) -> Report:
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
    modes = {"chain": chain, "logits": logits}
    _check_verify_options(against, {**options, **modes, **chain_options, **logits_options})
    values: dict[str, Any] = {name: options[name] for name in _SOURCE if name in options}
    if chain:
        from prepcli.commands.operations.chain import verify_chain
        from prepcli.commands.rendering.checkpoints import chain_report

        values |= chain_options
        return chain_report(verify_chain(checkpoint, progress=ui, **values))
    if logits:
        from prepcli.commands.operations.verify_logits import verify_logits
        from prepcli.commands.rendering.checkpoints import logits_report

        values |= {**logits_options, "tolerance": options.get("tolerance")}
        comparison = verify_logits(checkpoint, against, progress=ui, **values)
        return logits_report(comparison)
    from prepcli.commands.operations.verify import verify as run
    from prepcli.commands.rendering.checkpoints import verification_report

    return verification_report(run(checkpoint, against, progress=ui, **options), ui)


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


@command(guide="lock")
def lock(
    checkpoint: CheckpointArgument,
    *,
    out: Annotated[
        PathLike | None, option("FILE", "Write to FILE. Default: NAME.lock.json.", position=40)
    ],
    options: Annotated[LockOptions, Omit("step", "lock")],
    ui: ProgressUi,
) -> Report:
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

    locked = run(checkpoint, out, progress=ui, **options)
    return lock_report(locked, ui)


@command(guide="prove")
def roundtrip(
    checkpoint: CheckpointArgument,
    *,
    out: Annotated[
        PathLike | None, option("FILE", "Write to FILE. Default: NAME.roundtrip.json.", position=40)
    ],
    options: RoundtripOptions,
    ui: ProgressUi,
) -> Report:
    """Convert to every layout and back, and certify equal bits.

    The certificate lists each way with its tensors, bytes and digest. The conversions are
    temporary, in a folder next to it.

    Examples:
      prep roundtrip gpt-neo-1.3B
      prep roundtrip gpt-neo-1.3B --layout init --layout easylm --out proof.json
    """
    from prepcli.commands.operations.roundtrip import roundtrip as run
    from prepcli.commands.rendering.checkpoints import roundtrip_report

    result = run(checkpoint, out, progress=ui, **options)
    return roundtrip_report(result)


@command(guide="convert")
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
    ui: ProgressUi,
) -> Report:
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

    check_view(pattern, view)
    if view["html"] is not None:
        page = Path(view["html"])
        return page_report(checkpoint, page, ui, options, pattern=pattern, view=view)
    if view["shards"] is not None:
        leaf = shard_leaf(
            checkpoint,
            ui,
            options,
            leaf_name=view["shards"],
            mesh_text=view["mesh"],
            dequantize=view["quantized"] == "dequantize",
        )
        return shards_report(leaf)
    if view["diff"] is not None:
        comparison = compare_shapes(checkpoint, view["diff"], ui, options, pattern=pattern)
        return shape_comparison_report(comparison, ui)
    selected = select_tensors(
        checkpoint,
        ui,
        options,
        pattern=pattern,
        sort=view["sort"],
        stats=view["stats"],
        dequantize=view["quantized"] == "dequantize",
    )
    return tensors_report(selected, ui, tree=view["tree"])


@command(guide="add-a-family")
def check_family(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="A config.json, or a folder with one.", show_default=False
        ),
    ],
    *,
    check: Annotated[Sequence[str], option("NAME", "Run only this check. Repeatable.", default=())],
    ui: OutputUi,
) -> Report:
    """Check a model family on a tiny model of a config.

    The checks convert, compute and train a model with the choices of the config and small
    sizes. They compare with transformers if it and torch are installed. Otherwise these
    checks are skipped.

    Examples:
      prep check-family persimmon.json
      prep check-family ./llama-13b --check logits --check gradients
    """
    from prepcli.commands.testing.checks import family_report

    return family_report(config, check, ui)


@command(guide="tutorial", typer_class=OneProcessCommand)
def demo(
    *,
    out: Annotated[PathLike, option("FOLDER", "Work in FOLDER.", default=Path("prep-demo"))],
    ui: OutputUi,
) -> Report:
    """Convert, train and export a tiny model, and check it.

    The demo works offline. It shows and runs the commands that you would type, kills one of
    them, resumes it, and keeps all outputs.

    Examples:
      prep demo
      prep demo --out /tmp/demo --json
    """
    from prepcli.commands.demo.run import run_demo

    return run_demo(Path(out), ui)


@command(guide="convert")
def models(family: FamilyArgument = None, *, ui: OutputUi) -> Report:
    """List the aliases of checkpoints.

    Examples:
      prep models
      prep models llama --json
    """
    from prepcli.commands.operations.about import list_aliases
    from prepcli.commands.rendering.checkpoints import aliases_report

    return aliases_report(list_aliases(family))


@command(guide="engines")
def env(
    *, devices: Annotated[bool, flag("Import jax and list its devices.")], ui: OutputUi
) -> Report:
    """Show versions, devices, processes, memory and settings.

    Examples:
      prep env
      prep env --devices --json
    """
    from prepcli.commands.operations.about import read_environment
    from prepcli.commands.rendering.runs import environment_report

    environment = read_environment(DEFAULT_MEMORY, list_devices=devices)
    return environment_report(environment)


@command(group="map", guide="map")
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
    out: Annotated[
        PathLike | None, option("FILE", "Write to FILE. Default: NAME.map.", position=40)
    ],
    options: Annotated[SuggestMapOptions, Omit("step", "lock")],
    ui: ProgressUi,
) -> Report:
    """Propose a map between two checkpoints with the same values.

    Both are read whole. Tensors that are equal, transposed or stacked have rows. The others are listed. The file is
    for --map.

    Examples:
      prep map suggest ./my-model ./my-model-hf
      prep map suggest ./my-model ./my-model-hf --out my.map
    """
    from prepcli.commands.operations.suggest_map import suggest_map
    from prepcli.commands.rendering.checkpoints import suggestion_report

    suggestion = suggest_map(checkpoint, target, out, progress=ui, **options)
    return suggestion_report(suggestion)


@command()
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
    path: Annotated[bool, flag("Print the path of the page instead of its text.")],
    ui: OutputUi,
) -> Report:
    """List the pages of the documentation, or print one. The path of a page goes to stderr.

    Examples:
      prep docs
      prep docs train | less
      prep docs recipes --path
    """
    from prepcli.commands.operations.about import docs_folder, find_page, list_pages
    from prepcli.commands.rendering.runs import page_report, pages_report

    if page is not None:
        return page_report(find_page(page), ui, path_only=path)
    return pages_report(list_pages(), docs_folder(), path_only=path)
