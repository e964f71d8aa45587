"""The command that evaluates a model on data: eval."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from prepcli.commands.cli.operation_parameters import Omit
from prepcli.commands.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.commands.cli.options import OptionalCheckpointArgument, ProgressOption
from prepcli.commands.console.stdio import library_output_hidden
from prepcli.commands.operations.compute_options import EvaluateArguments, EvaluateOptions
from prepcli.core.observer import SLABS


@expand_option_groups
def evaluate(
    checkpoint: OptionalCheckpointArgument = None,
    *,
    arguments: EvaluateArguments,
    options: Annotated[EvaluateOptions, Omit("stream", "memory")],
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Compute loss, perplexity and accuracy on data.

    Examples:
      prep eval gpt-neo-1.3B --data validation.txt
      prep eval runs/llama-13b --step 2000 --data wiki=wiki.txt --data books/
      prep eval llama-13b-init --mesh 1,1,8 --data test.jsonl --json
    """
    from prepcli.commands.operations.evaluate import evaluate as run
    from prepcli.commands.rendering.evaluation import evaluation_report

    ui = output_options.open_console("eval", progress)
    with library_output_hidden(to_stderr=ui.level >= SLABS) as stdout:
        result = run(checkpoint, **arguments, progress=replace(ui, out=stdout), **options)
    return ui.finish(evaluation_report(result, ui.columns))
