"""The commands that write a checkpoint, as Typer takes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prepcli.cli.option_groups import Hub, Losses, Output, Shown, grouped
from prepcli.cli.options import (
    AllowOverflow,
    Checkpoint,
    CheckpointHere,
    Compress,
    ConfigOption,
    Dtype,
    MeshOption,
    NewRows,
    NewRowsSeed,
    ProgressMode,
    RuleOption,
    Scan,
    ScanAxis,
    Step,
    TrueVocab,
)
from prepcli.execution.signals import stoppable

if TYPE_CHECKING:
    from prepcli.commands.conversion import Common


@grouped
def pad_vocab(
    context: typer.Context,
    checkpoint: Checkpoint,
    multiple: Annotated[
        int | None,
        typer.Option("--multiple", metavar="N", min=1, help="Pad to a multiple of N; default: 8.", show_default=False),
    ] = None,
    size: Annotated[
        int | None, typer.Option("--size", metavar="N", min=1, help="Pad to N rows.", show_default=False)
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", metavar="DP,FSDP,MP", help="Pad to what this mesh divides.", show_default=False),
    ] = None,
    init: NewRows = "zeros",
    seed: NewRowsSeed = None,
    true_vocab: TrueVocab = None,
    config: ConfigOption = None,
    *,
    losses: Losses,
    output: Output,
    hub: Hub,
    shown: Shown,
    progress: ProgressMode = "auto",
) -> int:
    """Pad the vocabulary, so that it can be sharded.

    \b
    Examples:
      prep pad-vocab gpt-neo-1.3B --multiple 8
      prep pad-vocab ./my-model --mesh 1,64,4 --init mean --dry-run
    """
    from prepcli.commands.pad_vocab import Request
    from prepcli.commands.pad_vocab import pad_vocab as run

    ui = shown.open("pad-vocab", progress)
    common = _common(context, checkpoint, output, hub, config=config)
    with stoppable():
        return ui.finish(run(Request(common, multiple, size, mesh, init, seed, true_vocab, losses.wishes()), ui))


@grouped
def save_init(
    context: typer.Context,
    checkpoint: Checkpoint,
    mesh: MeshOption = None,
    rule: RuleOption = None,
    scan: Scan = None,
    scan_axis: ScanAxis = None,
    pad_vocab: Annotated[
        str, typer.Option("--pad-vocab", metavar="no|auto|N", help="Pad to a multiple of N; auto: as the mesh needs.")
    ] = "no",
    init: NewRows = "zeros",
    seed: NewRowsSeed = None,
    true_vocab: TrueVocab = None,
    dtype: Dtype = None,
    allow_overflow: AllowOverflow = False,
    config: ConfigOption = None,
    *,
    losses: Losses,
    compress: Compress = None,
    output: Output,
    hub: Hub,
    shown: Shown,
    progress: ProgressMode = "auto",
) -> int:
    """Convert a Hugging Face checkpoint into a sharded Orbax one.

    \b
    Examples:
      prep save-init gpt-neo-1.3B-padded --mesh 1,1,8
      prep save-init llama-13b --memory 128MiB
      prep save-init llama-13b --dtype bfloat16 --out llama-13b-bf16
      prep save-init gpt-neo-1.3B --mesh 1,64,4 --pad-vocab auto --dry-run
    """
    from prepcli.commands.save_init import Request
    from prepcli.commands.save_init import save_init as run

    ui = shown.open("save-init", progress)
    common = _common(context, checkpoint, output, hub, config=config, allow_overflow=allow_overflow)
    rules = tuple(rule or ())
    with stoppable():
        request = Request(
            *(common, mesh, rules, scan, scan_axis, pad_vocab, init, seed, true_vocab, losses.wishes()),
            dtype=dtype,
            compress=compress,
        )
        return ui.finish(run(request, ui))


@grouped
def reshard(
    context: typer.Context,
    checkpoint: CheckpointHere = None,
    mesh: MeshOption = None,
    rule: RuleOption = None,
    scan: Scan = None,
    scan_axis: ScanAxis = None,
    params_only: Annotated[bool, typer.Option("--params-only", help="Leave a run's optimizer state out.")] = False,
    step: Step = None,
    config: ConfigOption = None,
    compress: Compress = None,
    *,
    output: Output,
    shown: Shown,
    progress: ProgressMode = "auto",
) -> int:
    """Lay an Orbax checkpoint out for another mesh.

    \b
    Examples:
      prep reshard --mesh 1,64,4
      prep reshard llama-13b-init --mesh fsdp:64,mp:4,sp:2 --out wide
      prep reshard llama-13b-init --mesh 1,1,8 --no-scan
      prep reshard runs/llama-13b --step 2000 --params-only
    """
    from prepcli.commands.save_init import Request
    from prepcli.commands.save_init import reshard as run

    ui = shown.open("reshard", progress)
    common = _common(context, checkpoint, output, step=step, config=config)
    with stoppable():
        rules = tuple(rule or ())
        request = Request(common, mesh, rules, scan, scan_axis, params_only=params_only, compress=compress)
        return ui.finish(run(request, ui))


@grouped
def export(
    context: typer.Context,
    checkpoint: CheckpointHere = None,
    keep_padding: Annotated[bool, typer.Option("--keep-padding", help="Leave the padded rows on.")] = False,
    shard_size: Annotated[str, typer.Option("--shard-size", metavar="SIZE", help="The most a file holds.")] = "5GB",
    layout: Annotated[str, typer.Option("--layout", metavar="TREE", help="hf, hf-flax or easylm.")] = "hf",
    container: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="KIND",
            help="safetensors, msgpack or stream; default: the layout's.",
            show_default=False,
        ),
    ] = None,
    dtype: Dtype = None,
    allow_overflow: AllowOverflow = False,
    true_vocab: TrueVocab = None,
    config: ConfigOption = None,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="OWNER/NAME", help="Then upload it to the hub.", show_default=False),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: a new repository is private.")] = False,
    step: Step = None,
    *,
    output: Output,
    shown: Shown,
    progress: ProgressMode = "auto",
) -> int:
    """Convert an Orbax checkpoint into a Hugging Face folder, or one for Flax.

    \b
    Examples:
      prep export llama-13b-init
      prep export --keep-padding --shard-size 2GB --out padded-hf
      prep export runs/llama-13b --step 2000 --dtype bfloat16
      prep export llama-13b-init --layout easylm
      prep export llama-13b-init --push me/llama-13b --private
    """
    from prepcli.commands.export import Request, parse_shard_size
    from prepcli.commands.push import export_and_push

    ui = shown.open("export", progress)
    common = _common(context, checkpoint, output, step=step, config=config, allow_overflow=allow_overflow)
    with stoppable():
        request = Request(common, keep_padding, parse_shard_size(shard_size), true_vocab, layout, container, dtype)
        return ui.finish(export_and_push(request, push, private, ui))


def _common(
    context: typer.Context,
    checkpoint: str | None,
    output: Output,
    hub: Hub | None = None,
    *,
    config: Path | None,
    step: int | None = None,
    allow_overflow: bool = False,
) -> Common:
    """What each of these commands is asked for."""
    from prepcli.commands.conversion import Asked, Common
    from prepcli.engine.budget import parse_memory

    hub = hub or Hub()
    return Common(
        checkpoint=checkpoint,
        out=output.out,
        memory_nbytes=parse_memory(output.memory),
        dry_run=output.dry_run,
        overwrite=output.overwrite,
        restart=output.restart,
        offline=hub.offline,
        revision=hub.revision,
        stream=hub.stream,
        step=step,
        asked=Asked(output.processes, output.workers, tuple(context.obj or ())),
        config=config,
        allow_overflow=allow_overflow,
    )
