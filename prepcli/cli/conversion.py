"""Commands that write a checkpoint: pad-vocab, save-init, reshard, export, merge."""

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
    EmaOption,
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
        typer.Option("--mesh", metavar="DP,FSDP,MP", help="Pad to rows that this mesh divides.", show_default=False),
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
    """Pad the vocabulary so that a mesh divides it.

    Examples:
      prep pad-vocab gpt-neo-1.3B --multiple 8
      prep pad-vocab ./my-model --mesh 1,64,4 --init mean --dry-run
    """
    from prepcli.commands.pad_vocab import PadVocabRequest
    from prepcli.commands.pad_vocab import pad_vocab as run

    ui = output_options.open_console("pad-vocab", progress)
    common = _common_options(context, checkpoint, write_options, hub_options, config=config)
    request = PadVocabRequest(
        common,
        multiple=multiple,
        size=size,
        mesh=mesh,
        init=init,
        seed=seed,
        true_vocab=true_vocab,
        match_options=tensor_options.match_options(),
    )
    return ui.finish(run(request, ui))


@expand_option_groups
def save_init(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    mesh: MeshOption = None,
    rule: RuleOption = None,
    scan: ScanOption = None,
    scan_axis: ScanAxisOption = None,
    pad_vocab: Annotated[
        str, typer.Option("--pad-vocab", metavar="no|auto|N", help="Pad to a multiple of N; auto: to fit --mesh.")
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
    """Convert a Hugging Face checkpoint to sharded Orbax.

    Examples:
      prep save-init gpt-neo-1.3B-padded --mesh 1,1,8
      prep save-init llama-13b --memory 128MiB
      prep save-init llama-13b --dtype bfloat16 --out llama-13b-bf16
      prep save-init gpt-neo-1.3B --mesh 1,64,4 --pad-vocab auto --dry-run
    """
    from prepcli.commands.save_init import SaveInitRequest
    from prepcli.commands.save_init import save_init as run

    ui = output_options.open_console("save-init", progress)
    common = _common_options(
        context, checkpoint, write_options, hub_options, config=config, allow_overflow=allow_overflow
    )
    rules = tuple(rule or ())
    request = SaveInitRequest(
        common,
        mesh=mesh,
        rules=rules,
        scan=scan,
        scan_axis=scan_axis,
        pad_vocab=pad_vocab,
        init=init,
        seed=seed,
        true_vocab=true_vocab,
        match_options=tensor_options.match_options(),
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
    params_only: Annotated[bool, typer.Option("--params-only", help="Drop the optimizer state.")] = False,
    step: StepOption = None,
    config: ConfigOption = None,
    compress: CompressOption = None,
    *,
    write_options: WriteOptions,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Lay out an Orbax checkpoint for another mesh.

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
    rules = tuple(rule or ())
    request = SaveInitRequest(
        common,
        mesh=mesh,
        rules=rules,
        scan=scan,
        scan_axis=scan_axis,
        params_only=params_only,
        compress=compress,
    )
    return ui.finish(run(request, ui))


@expand_option_groups
def export(
    context: typer.Context,
    checkpoint: OptionalCheckpointArgument = None,
    keep_padding: Annotated[bool, typer.Option("--keep-padding", help="Keep the padding of the vocabulary.")] = False,
    shard_size: Annotated[str, typer.Option("--shard-size", metavar="SIZE", help="Limit files to SIZE.")] = "5GB",
    layout: Annotated[
        str, typer.Option("--layout", metavar="TREE", help="Write the tree of hf, hf-flax or easylm.")
    ] = "hf",
    file_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="KIND",
            help="Write safetensors, msgpack or stream; default: by layout.",
            show_default=False,
        ),
    ] = None,
    dtype: DtypeOption = None,
    allow_overflow: AllowOverflowOption = False,
    true_vocab: TrueVocabOption = None,
    config: ConfigOption = None,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="OWNER/NAME", help="Upload the export to the hub.", show_default=False),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository of --push private.")] = False,
    step: StepOption = None,
    ema: EmaOption = False,
    *,
    write_options: WriteOptions,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Export an Orbax checkpoint to Hugging Face or Flax.

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
    common = _common_options(
        context, checkpoint, write_options, step=step, ema=ema, config=config, allow_overflow=allow_overflow
    )
    request = ExportRequest(
        common,
        keep_padding=keep_padding,
        shard_nbytes=parse_shard_size(shard_size),
        true_vocab=true_vocab,
        layout=layout,
        file_format=file_format,
        dtype=dtype,
    )
    return ui.finish(export_and_push(request, push, private, ui))


@expand_option_groups
def merge(
    context: typer.Context,
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Folder of a PEFT adapter.", show_default=False)],
    base: Annotated[
        str,
        typer.Argument(
            metavar="BASE", help="Its base model: a folder, alias (see: prep models) or hub id.", show_default=False
        ),
    ],
    allow_overflow: AllowOverflowOption = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Skip comparing BASE with the base that the adapter was trained with.")
    ] = False,
    config: ConfigOption = None,
    *,
    write_options: WriteOptions,
    hub_options: HubOptions,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Add a LoRA adapter to its base model.

    The output is a Hugging Face folder. The product of the adapter's matrices is added in float32, and each value is
    rounded once.

    Examples:
      prep merge my-adapter llama-7b --out merged
      prep merge my-adapter llama-7b-init --memory 128MiB
    """
    from prepcli.commands.merge import MergeRequest
    from prepcli.commands.merge import merge as run

    ui = output_options.open_console("merge", progress)
    common = _common_options(context, base, write_options, hub_options, config=config, allow_overflow=allow_overflow)
    return ui.finish(run(MergeRequest(adapter, common, verify=not no_verify), ui))


def _common_options(
    context: typer.Context,
    checkpoint: str | None,
    write_options: WriteOptions,
    hub_options: HubOptions | None = None,
    *,
    config: Path | None,
    step: str | None = None,
    allow_overflow: bool = False,
    ema: bool = False,
) -> CommonOptions:
    """Return the options that all commands of this module share."""
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
        ema=ema,
    )
