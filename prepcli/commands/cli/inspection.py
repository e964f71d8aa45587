"""Commands that write no checkpoint of their own: verify, lock, roundtrip, inspect, check-family, demo, models, env."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prepcli.commands.cli.operation_parameters import Omit
from prepcli.commands.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.commands.cli.options import (
    CheckpointArgument,
    FamilyArgument,
    OptionalCheckpointArgument,
    ProgressOption,
)
from prepcli.commands.operations.command_options import CheckFamilyOptions, DemoOptions, EnvOptions
from prepcli.commands.operations.inspection_options import (
    ChainCommandOptions,
    InspectOptions,
    LockArguments,
    LockOptions,
    LogitsCommandOptions,
    RoundtripArguments,
    RoundtripOptions,
    VerifyOptions,
    ViewOptions,
)
from prepcli.commands.operations.options import DEFAULT_MEMORY


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
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
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
    from prepcli.commands.operations.chain import (
        chain_options_of,
        check_chain_command,
        verify_chain,
    )
    from prepcli.commands.operations.verify import verify as run
    from prepcli.commands.operations.verify_logits import (
        check_logits_command,
        logits_options_of,
        verify_logits,
    )
    from prepcli.commands.rendering.chain import chain_report
    from prepcli.commands.rendering.logits import logits_report
    from prepcli.commands.rendering.verification import verification_report

    ui = output_options.open_console("verify", progress)
    check_chain_command(against, options, chain_options)
    check_logits_command(options, logits_options, chain_options)
    if chain_options["chain"]:
        chain = verify_chain(checkpoint, progress=ui, **chain_options_of(options, chain_options))
        return ui.finish(chain_report(chain, ui.columns))
    if logits_options["logits"]:
        selected = logits_options_of(options, logits_options)
        comparison = verify_logits(checkpoint, against, progress=ui, **selected)
        return ui.finish(logits_report(comparison, ui.columns))
    result = run(checkpoint, against, progress=ui, **options)
    return ui.finish(verification_report(result, ui))


@expand_option_groups
def lock(
    checkpoint: CheckpointArgument,
    *,
    arguments: LockArguments,
    options: Annotated[LockOptions, Omit("step", "lock")],
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
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
    from prepcli.commands.rendering.lock import lock_line, lock_report

    ui = output_options.open_console("lock", progress)
    locked = run(checkpoint, arguments["out"], progress=ui, **options)
    ui.note(lock_line(locked))
    return ui.finish(lock_report(locked))


@expand_option_groups
def roundtrip(
    checkpoint: CheckpointArgument,
    *,
    arguments: RoundtripArguments,
    options: RoundtripOptions,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Convert to every layout and back, and certify equal bits.

    The certificate lists each way with its tensors, bytes and digest. The conversions are
    temporary, in a folder next to it.

    Examples:
      prep roundtrip gpt-neo-1.3B
      prep roundtrip gpt-neo-1.3B --layout init --layout easylm --out proof.json
    """
    from prepcli.commands.operations.roundtrip import roundtrip as run
    from prepcli.commands.rendering.roundtrip import roundtrip_report

    ui = output_options.open_console("roundtrip", progress)
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
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
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

    ui = output_options.open_console("inspect", progress)
    check_view(pattern, view)
    if view["html"] is not None:
        from prepcli.commands.operations.inspect_page import write_page

        page = Path(view["html"])
        written = write_page(checkpoint, page, ui, options, pattern=pattern, view=view)
        return ui.finish(page_report(written, ui))
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
    from prepcli.commands.operations.models import list_aliases
    from prepcli.commands.rendering.models import aliases_report

    ui = output_options.open_console("models")
    return ui.finish(aliases_report(list_aliases(family), ui.columns))


@expand_option_groups
def env(*, options: EnvOptions, output_options: OutputOptions) -> int:
    """Show versions, devices, processes, memory and settings.

    Examples:
      prep env
      prep env --devices --json
    """
    from prepcli.commands.operations.env import read_environment
    from prepcli.commands.rendering.env import environment_report

    ui = output_options.open_console("env")
    environment = read_environment(DEFAULT_MEMORY, list_devices=options["devices"])
    return ui.finish(environment_report(environment, ui.columns))
