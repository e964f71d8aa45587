"""Commands that write a checkpoint: pad-vocab, add-tokens, remove-tokens, save-init, reshard, export, merge."""

# pyright: reportTypedDictNotRequiredAccess=false
# `expand_option_groups` sets every option.

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prepcli.commands.cli.operation_parameters import Omit
from prepcli.commands.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.commands.cli.options import (
    CheckpointArgument,
    OptionalCheckpointArgument,
    ProgressOption,
)
from prepcli.commands.operations.options import (
    ConversionArguments,
    ExportOptions,
    MergeOptions,
    PadVocabOptions,
    ReshardOptions,
    SaveInitOptions,
)
from prepcli.commands.operations.sharing_options import SharingOptions
from prepcli.commands.operations.token_options import AddTokensOptions, RemoveTokensOptions

if TYPE_CHECKING:
    from prepcli.commands.console.ui import Ui
    from prepcli.commands.operations.results import Conversion
    from prepcli.execution.workers import ProcessOptions


@expand_option_groups
def pad_vocab(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    *,
    options: Annotated[PadVocabOptions, Omit("step")],
    conversion: ConversionArguments,
    sharing: SharingOptions,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Pad the vocabulary so that a mesh divides it.

    Examples:
      prep pad-vocab gpt-neo-1.3B --multiple 8
      prep pad-vocab ./my-model --mesh 1,64,4 --init mean --dry-run
    """
    from prepcli.commands.operations.pad_vocab import pad_vocab as run

    ui = output_options.open_console("pad-vocab", progress)
    process_options = _process_options(context, sharing)
    result = run(checkpoint, **conversion, progress=ui, process_options=process_options, **options)
    return _print_result(result, ui)


@expand_option_groups
def add_tokens(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    *,
    options: Annotated[AddTokensOptions, Omit("step")],
    conversion: ConversionArguments,
    sharing: SharingOptions,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Add tokens to the tokenizer and the vocabulary.

    The checkpoint is a Hugging Face folder with a tokenizer.json or a SentencePiece model, or an
    Orbax checkpoint of prep.

    Examples:
      prep add-tokens ./my-model --tokens tokens.txt
      prep add-tokens ./my-model --tokens tokens.json --init zeros --dry-run
    """
    from prepcli.commands.operations.tokens import add_tokens as run

    ui = output_options.open_console("add-tokens", progress)
    process_options = _process_options(context, sharing)
    result = run(checkpoint, **conversion, progress=ui, process_options=process_options, **options)
    return _print_result(result, ui)


@expand_option_groups
def remove_tokens(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    *,
    options: Annotated[RemoveTokensOptions, Omit("step")],
    conversion: ConversionArguments,
    sharing: SharingOptions,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Remove the tokens of the last add-tokens.

    Examples:
      prep remove-tokens ./my-model-added
      prep remove-tokens ./my-model-added --out my-model-again --dry-run
    """
    from prepcli.commands.operations.tokens import remove_tokens as run

    ui = output_options.open_console("remove-tokens", progress)
    process_options = _process_options(context, sharing)
    result = run(checkpoint, **conversion, progress=ui, process_options=process_options, **options)
    return _print_result(result, ui)


@expand_option_groups
def save_init(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    *,
    options: Annotated[SaveInitOptions, Omit("step")],
    conversion: ConversionArguments,
    sharing: SharingOptions,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Convert a Hugging Face checkpoint to sharded Orbax.

    Examples:
      prep save-init gpt-neo-1.3B-padded --mesh 1,1,8
      prep save-init llama-13b --memory 128MiB
      prep save-init llama-13b --lock llama-13b.lock.json
      prep save-init llama-13b --dtype bfloat16 --out llama-13b-bf16
      prep save-init gpt-neo-1.3B --mesh 1,64,4 --pad-vocab auto --dry-run
    """
    from prepcli.commands.operations.save_init import save_init as run

    ui = output_options.open_console("save-init", progress)
    process_options = _process_options(context, sharing)
    result = run(checkpoint, **conversion, progress=ui, process_options=process_options, **options)
    return _print_result(result, ui)


@expand_option_groups
def reshard(
    context: typer.Context,
    checkpoint: OptionalCheckpointArgument = None,
    *,
    options: Annotated[ReshardOptions, Omit("revision", "offline", "stream", "true_vocab")],
    conversion: ConversionArguments,
    sharing: SharingOptions,
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
    from prepcli.commands.operations.save_init import reshard as run

    ui = output_options.open_console("reshard", progress)
    process_options = _process_options(context, sharing)
    result = run(checkpoint, **conversion, progress=ui, process_options=process_options, **options)
    return _print_result(result, ui)


@expand_option_groups
def export(
    context: typer.Context,
    checkpoint: OptionalCheckpointArgument = None,
    *,
    options: Annotated[ExportOptions, Omit("revision", "offline", "stream")],
    conversion: ConversionArguments,
    sharing: SharingOptions,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Export a checkpoint to Hugging Face or another trainer.

    Examples:
      prep export llama-13b-init
      prep export --keep-padding --shard-size 2GB --out padded-hf
      prep export runs/llama-13b --step 2000 --dtype bfloat16
      prep export llama-13b-init --layout easylm
      prep export llama-13b-init --push me/llama-13b --private
    """
    from prepcli.commands.operations.export import export as run

    ui = output_options.open_console("export", progress)
    process_options = _process_options(context, sharing)
    result = run(checkpoint, **conversion, progress=ui, process_options=process_options, **options)
    return _print_result(result, ui)


@expand_option_groups
def merge(
    context: typer.Context,
    adapter: Annotated[
        Path,
        typer.Argument(metavar="ADAPTER", help="Folder of a PEFT adapter.", show_default=False),
    ],
    base: Annotated[
        str,
        typer.Argument(
            metavar="BASE",
            help="Its base model: a folder, alias (see: prep models) or hub id.",
            show_default=False,
        ),
    ],
    *,
    options: Annotated[MergeOptions, Omit("step")],
    conversion: ConversionArguments,
    sharing: SharingOptions,
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
    from prepcli.commands.operations.merge import merge as run

    ui = output_options.open_console("merge", progress)
    process_options = _process_options(context, sharing)
    result = run(
        adapter, base, **conversion, progress=ui, process_options=process_options, **options
    )
    return _print_result(result, ui)


def _process_options(context: typer.Context, sharing: SharingOptions) -> ProcessOptions:
    """Return how the processes of a command share the work. Workers run the command line again."""
    from prepcli.execution.workers import ProcessOptions

    return ProcessOptions(sharing["processes"], sharing["workers"], tuple(context.obj or ()))


def _print_result(result: Conversion, ui: Ui) -> int:
    """Print a conversion and return the exit code."""
    from prepcli.commands.rendering.conversions import conversion_report

    return ui.finish(conversion_report(result, ui.level))
