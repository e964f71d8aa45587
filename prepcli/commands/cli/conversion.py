"""Commands that write a checkpoint: pad-vocab, add-tokens, remove-tokens, save-init, reshard, export, merge."""

# pyright: reportTypedDictNotRequiredAccess=false
# `command` sets every option.

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import prepcli
from prepcli.commands.cli.option_groups import (
    CheckpointArgument,
    CliCommand,
    Omit,
    OptionalCheckpointArgument,
    ProgressUi,
    SharingOptions,
    command,
)
from prepcli.commands.console.ui import Report
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


def conversion(guide: str) -> Callable[[Callable[..., None]], CliCommand]:
    """Return a decorator that makes the command of a converting function of `prepcli`.

    The decorated function declares the name, the help, the arguments and the options of the function. All conversions
    have the options of `convert` as well.
    """

    def decorate(declaration: Callable[..., None]) -> CliCommand:
        def convert(
            context: typer.Context,
            *,
            conversion: ConversionArguments,
            sharing: SharingOptions,
            ui: ProgressUi,
            options: Any,
            **arguments: Any,
        ) -> Report:
            from prepcli.commands.rendering.checkpoints import conversion_report
            from prepcli.execution.workers import ProcessOptions

            # Workers run the command line again.
            words = tuple(context.obj or ())
            process_options = ProcessOptions(sharing["processes"], sharing["workers"], words)
            function = getattr(prepcli, declaration.__name__)
            result = function(
                **arguments, **conversion, **options, progress=ui, process_options=process_options
            )
            return conversion_report(result, ui.level)

        def read_signature() -> inspect.Signature:
            # The declared parameters come first, without `options` and `arguments` of `convert`.
            declared = inspect.signature(declaration, eval_str=True).parameters
            common = inspect.signature(convert, eval_str=True).parameters
            names = ("conversion", "sharing", "ui")
            parameters = [common["context"], *declared.values(), *(common[name] for name in names)]
            return inspect.Signature([each.replace(kind=each.KEYWORD_ONLY) for each in parameters])

        convert.__name__ = declaration.__name__
        convert.__doc__ = declaration.__doc__
        return command(guide=guide, read_signature=read_signature)(convert)

    return decorate


@conversion("vocabulary")
def pad_vocab(
    checkpoint: CheckpointArgument,
    *,
    options: Annotated[PadVocabOptions, Omit("step")],
) -> None:
    """Pad the vocabulary so that a mesh divides it.

    Examples:
      prep pad-vocab gpt-neo-1.3B --multiple 8
      prep pad-vocab ./my-model --mesh 1,64,4 --init mean --dry-run
    """


@conversion("vocabulary")
def add_tokens(
    checkpoint: CheckpointArgument,
    *,
    options: Annotated[AddTokensOptions, Omit("step")],
) -> None:
    """Add tokens to the tokenizer and the vocabulary.

    The checkpoint is a Hugging Face folder with a tokenizer.json or a SentencePiece model, or an
    Orbax checkpoint of prep.

    Examples:
      prep add-tokens ./my-model --tokens tokens.txt
      prep add-tokens ./my-model --tokens tokens.json --init zeros --dry-run
    """


@conversion("vocabulary")
def remove_tokens(
    checkpoint: CheckpointArgument,
    *,
    options: Annotated[RemoveTokensOptions, Omit("step")],
) -> None:
    """Remove the tokens of the last add-tokens.

    Examples:
      prep remove-tokens ./my-model-added
      prep remove-tokens ./my-model-added --out my-model-again --dry-run
    """


@conversion("convert")
def save_init(
    checkpoint: CheckpointArgument,
    *,
    options: Annotated[SaveInitOptions, Omit("step")],
) -> None:
    """Convert a Hugging Face checkpoint to sharded Orbax.

    Examples:
      prep save-init gpt-neo-1.3B-padded --mesh 1,1,8
      prep save-init llama-13b --memory 128MiB
      prep save-init llama-13b --lock llama-13b.lock.json
      prep save-init llama-13b --dtype bfloat16 --out llama-13b-bf16
      prep save-init gpt-neo-1.3B --mesh 1,64,4 --pad-vocab auto --dry-run
    """


@conversion("convert")
def reshard(
    checkpoint: OptionalCheckpointArgument = None,
    *,
    options: Annotated[ReshardOptions, Omit("revision", "offline", "stream", "true_vocab")],
) -> None:
    """Lay out an Orbax checkpoint for another mesh.

    Examples:
      prep reshard --mesh 1,64,4
      prep reshard llama-13b-init --mesh fsdp:64,mp:4,sp:2 --out wide
      prep reshard llama-13b-init --mesh 1,1,8 --no-scan
      prep reshard runs/llama-13b --step 2000 --params-only
    """


@conversion("convert")
def export(
    checkpoint: OptionalCheckpointArgument = None,
    *,
    options: Annotated[ExportOptions, Omit("revision", "offline", "stream")],
) -> None:
    """Export a checkpoint to Hugging Face or another trainer.

    Examples:
      prep export llama-13b-init
      prep export --keep-padding --shard-size 2GB --out padded-hf
      prep export runs/llama-13b --step 2000 --dtype bfloat16
      prep export llama-13b-init --layout easylm
      prep export llama-13b-init --push me/llama-13b --private
    """


@conversion("lora")
def merge(
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
) -> None:
    """Add a LoRA adapter to its base model.

    The output is a Hugging Face folder. The product of the adapter's matrices is added in float32, and each value is
    rounded once.

    Examples:
      prep merge my-adapter llama-7b --out merged
      prep merge my-adapter llama-7b-init --memory 128MiB
    """
