"""The commands that write a checkpoint, as Typer takes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prepcli.cli.option_groups import HubOptions, OutputOptions, TensorOptions, WriteOptions, expand_option_groups
from prepcli.cli.options import (
    AllowOverflowOption,
    CheckpointArgument,
    CompressOption,
    ConfigOption,
    DtypeOption,
    InitOption,
    MeshOption,
    OptionalCheckpointArgument,
    ProgressOption,
    RuleOption,
    ScanAxisOption,
    ScanOption,
    SeedOption,
    StepOption,
    TrueVocabOption,
)
from prepcli.execution.signals import raise_on_signal

if TYPE_CHECKING:
    from prepcli.commands.conversion import CommonOptions


@expand_option_groups
def pad_vocab(
    context: typer.Context,
    checkpoint: CheckpointArgument,
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
    init: InitOption = "zeros",
    seed: SeedOption = None,
    true_vocab: TrueVocabOption = None,
    config: ConfigOption = None,
    *,
    tensor_options: TensorOptions,
    write_options: WriteOptions,
    hub_options: HubOptions,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Pad the vocabulary, so that it can be sharded.

    \b
    Examples:
      prep pad-vocab gpt-neo-1.3B --multiple 8
      prep pad-vocab ./my-model --mesh 1,64,4 --init mean --dry-run
    """
    from prepcli.commands.pad_vocab import PadVocabRequest
    from prepcli.commands.pad_vocab import pad_vocab as run

    ui = output_options.open_console("pad-vocab", progress)
    common = _common_options(context, checkpoint, write_options, hub_options, config=config)
    with raise_on_signal():
        return ui.finish(
            run(PadVocabRequest(common, multiple, size, mesh, init, seed, true_vocab, tensor_options.match_options()), ui)
        )


@expand_option_groups
def save_init(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    mesh: MeshOption = None,
    rule: RuleOption = None,
    scan: ScanOption = None,
    scan_axis: ScanAxisOption = None,
    pad_vocab: Annotated[
        str, typer.Option("--pad-vocab", metavar="no|auto|N", help="Pad to a multiple of N; auto: as the mesh needs.")
    ] = "no",
    init: InitOption = "zeros",
    seed: SeedOption = None,
    true_vocab: TrueVocabOption = None,
    dtype: DtypeOption = None,
    allow_overflow: AllowOverflowOption = False,
    config: ConfigOption = None,
    *,
    tensor_options: TensorOptions,
    compress: CompressOption = None,
    write_options: WriteOptions,
    hub_options: HubOptions,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Convert a Hugging Face checkpoint into a sharded Orbax one.

    \b
    Examples:
      prep save-init gpt-neo-1.3B-padded --mesh 1,1,8
      prep save-init llama-13b --memory 128MiB
      prep save-init llama-13b --dtype bfloat16 --out llama-13b-bf16
      prep save-init gpt-neo-1.3B --mesh 1,64,4 --pad-vocab auto --dry-run
    """
    from prepcli.commands.save_init import SaveInitRequest
    from prepcli.commands.save_init import save_init as run

    ui = output_options.open_console("save-init", progress)
    common = _common_options(context, checkpoint, write_options, hub_options, config=config, allow_overflow=allow_overflow)
    rules = tuple(rule or ())
    with raise_on_signal():
        request = SaveInitRequest(
            *(common, mesh, rules, scan, scan_axis, pad_vocab, init, seed, true_vocab, tensor_options.match_options()),
            dtype=dtype,
            compress=compress,
        )
        return ui.finish(run(request, ui))


@expand_option_groups
def reshard(
    context: typer.Context,
    checkpoint: OptionalCheckpointArgument = None,
    mesh: MeshOption = None,
    rule: RuleOption = None,
    scan: ScanOption = None,
    scan_axis: ScanAxisOption = None,
    params_only: Annotated[bool, typer.Option("--params-only", help="Leave a run's optimizer state out.")] = False,
    step: StepOption = None,
    config: ConfigOption = None,
    compress: CompressOption = None,
    *,
    write_options: WriteOptions,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Lay an Orbax checkpoint out for another mesh.

    \b
    Examples:
      prep reshard --mesh 1,64,4
      prep reshard llama-13b-init --mesh fsdp:64,mp:4,sp:2 --out wide
      prep reshard llama-13b-init --mesh 1,1,8 --no-scan
      prep reshard runs/llama-13b --step 2000 --params-only
    """
    from prepcli.commands.save_init import SaveInitRequest
    from prepcli.commands.save_init import reshard as run

    ui = output_options.open_console("reshard", progress)
    common = _common_options(context, checkpoint, write_options, step=step, config=config)
    with raise_on_signal():
        rules = tuple(rule or ())
        request = SaveInitRequest(common, mesh, rules, scan, scan_axis, params_only=params_only, compress=compress)
        return ui.finish(run(request, ui))


@expand_option_groups
def export(
    context: typer.Context,
    checkpoint: OptionalCheckpointArgument = None,
    keep_padding: Annotated[bool, typer.Option("--keep-padding", help="Leave the padded rows on.")] = False,
    shard_size: Annotated[str, typer.Option("--shard-size", metavar="SIZE", help="The most a file holds.")] = "5GB",
    layout: Annotated[str, typer.Option("--layout", metavar="TREE", help="hf, hf-flax or easylm.")] = "hf",
    file_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="KIND",
            help="safetensors, msgpack or stream; default: the layout's.",
            show_default=False,
        ),
    ] = None,
    dtype: DtypeOption = None,
    allow_overflow: AllowOverflowOption = False,
    true_vocab: TrueVocabOption = None,
    config: ConfigOption = None,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="OWNER/NAME", help="Then upload it to the hub.", show_default=False),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: a new repository is private.")] = False,
    step: StepOption = None,
    *,
    write_options: WriteOptions,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
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
    from prepcli.commands.export import ExportRequest, parse_shard_size
    from prepcli.commands.push import export_and_push

    ui = output_options.open_console("export", progress)
    common = _common_options(context, checkpoint, write_options, step=step, config=config, allow_overflow=allow_overflow)
    with raise_on_signal():
        request = ExportRequest(
            common, keep_padding, parse_shard_size(shard_size), true_vocab, layout, file_format, dtype
        )
        return ui.finish(export_and_push(request, push, private, ui))


def _common_options(
    context: typer.Context,
    checkpoint: str | None,
    write_options: WriteOptions,
    hub_options: HubOptions | None = None,
    *,
    config: Path | None,
    step: int | None = None,
    allow_overflow: bool = False,
) -> CommonOptions:
    """What each of these commands is asked for."""
    from prepcli.commands.conversion import CommonOptions, ProcessOptions
    from prepcli.engine.budget import parse_memory

    hub = hub_options or HubOptions()
    return CommonOptions(
        checkpoint=checkpoint,
        out=write_options.out,
        memory_nbytes=parse_memory(write_options.memory),
        dry_run=write_options.dry_run,
        overwrite=write_options.overwrite,
        restart=write_options.restart,
        offline=hub.offline,
        revision=hub.revision,
        stream=hub.stream,
        step=step,
        process_options=ProcessOptions(write_options.processes, write_options.workers, tuple(context.obj or ())),
        config=config,
        allow_overflow=allow_overflow,
    )
