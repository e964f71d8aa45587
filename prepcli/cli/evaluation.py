"""The command that evaluates a model on data: eval."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from prepcli.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.cli.options import (
    ConfigOption,
    EmaOption,
    NoVerifyOption,
    OfflineOption,
    OptionalCheckpointArgument,
    ProgressOption,
    RevisionOption,
    StepOption,
)
from prepcli.commands.evaluation_keys import KEYS_TEXT
from prepcli.console.observer import SLABS
from prepcli.console.stdio import library_output_hidden


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Options for the data of an evaluation."""

    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="[NAME=]PATH",
            help="Evaluate on this file, folder, glob or URL; repeatable: a result for each name.",
            show_default=False,
        ),
    ] = None
    type: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="Read files as this type, as `data.type` of a recipe; default: by suffix.",
            show_default=False,
        ),
    ] = None
    fields: Annotated[
        str | None,
        typer.Option(
            "--fields",
            metavar="FIELDS",
            help="Read these columns, as `data.fields` of a recipe.",
            show_default=False,
        ),
    ] = None
    seq_length: Annotated[
        int | None,
        typer.Option(
            "--seq-length",
            metavar="N",
            min=2,
            help="Cut the data into sequences of N tokens; default: the model's positions, at most 1024.",
            show_default=False,
        ),
    ] = None
    limit: Annotated[
        int,
        typer.Option(
            "--limit", metavar="N", min=0, help="Evaluate on N sequences of each source; 0: all."
        ),
    ] = 0
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help=f"Set a recipe key; repeatable. {KEYS_TEXT}.",
            show_default=False,
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH",
            help="Use this tokenizer, a file or folder; default: the model's.",
            show_default=False,
        ),
    ] = None
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            metavar="FOLDER",
            help="Keep the tokens in FOLDER for later runs.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """Options for the computation of an evaluation."""

    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", min=1, help="Compute N sequences at a time.")
    ] = 8
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="DP,FSDP,MP",
            help="Use this device mesh; default: one device.",
            show_default=False,
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="Compute in this dtype; default: as stored.",
            show_default=False,
        ),
    ] = None
    reduction: Annotated[
        Literal["fast", "exact"],
        typer.Option(
            "--reduction", metavar="KIND", help="Compute fast, or exact: the same bits on any mesh."
        ),
    ] = "fast"
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="Generate targets from sources, and compute rouge, bleu or exact_match; repeatable.",
            show_default=False,
        ),
    ] = None


@expand_option_groups
def evaluate(
    checkpoint: OptionalCheckpointArgument = None,
    *,
    data_options: DataOptions,
    compute_options: ComputeOptions,
    step: StepOption = None,
    config: ConfigOption = None,
    ema: EmaOption = False,
    no_verify: NoVerifyOption = False,
    revision: RevisionOption = None,
    offline: OfflineOption = False,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Compute loss, perplexity and accuracy on data.

    Examples:
      prep eval gpt-neo-1.3B --data validation.txt
      prep eval runs/llama-13b --step 2000 --data wiki=wiki.txt --data books/
      prep eval llama-13b-init --mesh 1,1,8 --data test.jsonl --json
    """
    from prepcli.commands.evaluate import evaluate as run
    from prepcli.commands.evaluate_run import EvaluateRequest
    from prepcli.commands.evaluation_recipe import EvalData
    from prepcli.operations.conversion import CommonOptions

    ui = output_options.open_console("eval", progress)
    common = CommonOptions(
        checkpoint=checkpoint,
        out=None,
        memory_nbytes=0,
        offline=offline,
        revision=revision,
        step=step,
        config=config,
        ema=ema,
    )
    data = EvalData(
        tuple(data_options.data or ()),
        type=data_options.type,
        fields=data_options.fields,
        seq_length=data_options.seq_length,
        overrides=tuple(data_options.overrides or ()),
    )
    request = EvaluateRequest(
        common,
        data,
        tokenizer=data_options.tokenizer,
        cache=data_options.cache,
        batch_size=compute_options.batch_size,
        limit=data_options.limit,
        mesh=compute_options.mesh,
        dtype=compute_options.dtype,
        reduction=compute_options.reduction,
        metrics=tuple(compute_options.metric or ()),
        verify=not no_verify,
    )
    with library_output_hidden(to_stderr=ui.level >= SLABS) as stdout:
        report = run(request, replace(ui, out=stdout))
    return ui.finish(report)
