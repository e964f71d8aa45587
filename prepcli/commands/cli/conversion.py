"""Commands that write a checkpoint: pad-vocab, add-tokens, remove-tokens, save-init, reshard, export, merge."""

# pyright: reportTypedDictNotRequiredAccess=false
# `expand_option_groups` sets every option.

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prepcli.commands.cli.option_groups import (
    CheckpointArgument,
    Omit,
    OptionalCheckpointArgument,
    OutputOptions,
    ProgressOptions,
    SharingOptions,
    expand_option_groups,
)
from prepcli.commands.operations.options import (
    AddTokensOptions,
    ConversionArguments,
    ExportOptions,
    MergeOptions,
    PadVocabOptions,
    RemoveTokensOptions,
    ReshardOptions,
    SaveInitOptions,
)

if TYPE_CHECKING:
    from prepcli.commands.operations.results import Conversion


@expand_option_groups
def pad_vocab(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    *,
    options: Annotated[PadVocabOptions, Omit("step")],
    conversion: ConversionArguments,
    sharing: SharingOptions,
    output_options: ProgressOptions,
) -> int:
    """Pad the vocabulary so that a mesh divides it.

    Examples:
      prep pad-vocab gpt-neo-1.3B --multiple 8
      prep pad-vocab ./my-model --mesh 1,64,4 --init mean --dry-run
    """
    from prepcli.commands.operations.pad_vocab import pad_vocab as run

    request = partial(run, checkpoint, **conversion, **options)
    return _convert(request, context, sharing, output_options)


@expand_option_groups
def add_tokens(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    *,
    options: Annotated[AddTokensOptions, Omit("step")],
    conversion: ConversionArguments,
    sharing: SharingOptions,
    output_options: ProgressOptions,
) -> int:
    """Add tokens to the tokenizer and the vocabulary.

    The checkpoint is a Hugging Face folder with a tokenizer.json or a SentencePiece model, or an
    Orbax checkpoint of prep.

    Examples:
      prep add-tokens ./my-model --tokens tokens.txt
      prep add-tokens ./my-model --tokens tokens.json --init zeros --dry-run
    """
    from prepcli.commands.operations.tokens import add_tokens as run

    request = partial(run, checkpoint, **conversion, **options)
    return _convert(request, context, sharing, output_options)


@expand_option_groups
def remove_tokens(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    *,
    options: Annotated[RemoveTokensOptions, Omit("step")],
    conversion: ConversionArguments,
    sharing: SharingOptions,
    output_options: ProgressOptions,
) -> int:
    """Remove the tokens of the last add-tokens.

    Examples:
      prep remove-tokens ./my-model-added
      prep remove-tokens ./my-model-added --out my-model-again --dry-run
    """
    from prepcli.commands.operations.tokens import remove_tokens as run

    request = partial(run, checkpoint, **conversion, **options)
    return _convert(request, context, sharing, output_options)


@expand_option_groups
def save_init(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    *,
    options: Annotated[SaveInitOptions, Omit("step")],
    conversion: ConversionArguments,
    sharing: SharingOptions,
    output_options: ProgressOptions,
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

    request = partial(run, checkpoint, **conversion, **options)
    return _convert(request, context, sharing, output_options)


@expand_option_groups
def reshard(
    context: typer.Context,
    checkpoint: OptionalCheckpointArgument = None,
    *,
    options: Annotated[ReshardOptions, Omit("revision", "offline", "stream", "true_vocab")],
    conversion: ConversionArguments,
    sharing: SharingOptions,
    output_options: ProgressOptions,
) -> int:
    """Lay out an Orbax checkpoint for another mesh.

    Examples:
      prep reshard --mesh 1,64,4
      prep reshard llama-13b-init --mesh fsdp:64,mp:4,sp:2 --out wide
      prep reshard llama-13b-init --mesh 1,1,8 --no-scan
      prep reshard runs/llama-13b --step 2000 --params-only
    """
    from prepcli.commands.operations.save_init import reshard as run

    request = partial(run, checkpoint, **conversion, **options)
    return _convert(request, context, sharing, output_options)


@expand_option_groups
def export(
    context: typer.Context,
    checkpoint: OptionalCheckpointArgument = None,
    *,
    options: Annotated[ExportOptions, Omit("revision", "offline", "stream")],
    conversion: ConversionArguments,
    sharing: SharingOptions,
    output_options: ProgressOptions,
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

    request = partial(run, checkpoint, **conversion, **options)
    return _convert(request, context, sharing, output_options)


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
    output_options: ProgressOptions,
) -> int:
    """Add a LoRA adapter to its base model.

    The output is a Hugging Face folder. The product of the adapter's matrices is added in float32, and each value is
    rounded once.

    Examples:
      prep merge my-adapter llama-7b --out merged
      prep merge my-adapter llama-7b-init --memory 128MiB
    """
    from prepcli.commands.operations.export import merge as run

    request = partial(run, adapter, base, **conversion, **options)
    return _convert(request, context, sharing, output_options)


def _convert(
    request: partial[Conversion],
    context: typer.Context,
    sharing: SharingOptions,
    output_options: OutputOptions,
) -> int:
    """Run a conversion as the share of this process in the work, and print its result."""
    from prepcli.commands.rendering.checkpoints import conversion_report
    from prepcli.execution.workers import ProcessOptions

    ui = output_options.open_console(request.func.__name__.replace("_", "-"))
    # Workers run the command line again.
    words = tuple(context.obj or ())
    process_options = ProcessOptions(sharing["processes"], sharing["workers"], words)
    result = request(progress=ui, process_options=process_options)
    return ui.finish(conversion_report(result, ui.level))
