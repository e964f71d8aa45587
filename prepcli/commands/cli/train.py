"""Commands that compute with a model: train, generate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypedDict

import typer

from prepcli.commands.cli.operation_parameters import Omit
from prepcli.commands.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.commands.cli.options import OptionalCheckpointArgument, ProgressOption, complete_recipe
from prepcli.commands.console.stdio import library_output_hidden
from prepcli.commands.operations.compute_options import (
    GenerateArguments,
    GenerateOptions,
    TrainArguments,
    TrainOptions,
)
from prepcli.core.errors import usage_error
from prepcli.core.observer import SLABS
from prepcli.core.option_spec import OptionSpec


class SchemaOptions(TypedDict):
    """The option `--schema`: the command prints the schema and does not train."""

    schema: Annotated[
        bool, OptionSpec(None, "Print the JSON schema of recipes.", "", default=False, position=12)
    ]


class ChatOptions(TypedDict):
    """The options of a conversation in the terminal, in place of prompts."""

    chat: Annotated[
        bool,
        OptionSpec(
            None, "Answer turns from the terminal or a pipe.", "", default=False, position=3
        ),
    ]
    system: Annotated[
        str | None,
        OptionSpec("TEXT", "Begin the chat with this message of the system.", "", position=4),
    ]


@expand_option_groups
def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE",
            autocompletion=complete_recipe,
            help="Recipe: a TOML file, or the name of one of `prep recipes`. Its keys: prep docs recipes.",
            show_default=False,
        ),
    ] = None,
    *,
    arguments: TrainArguments,
    options: TrainOptions,
    schema_options: SchemaOptions,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Train from a checkpoint with a recipe. Resume an earlier run.

    Examples:
      prep train gpt-neo-1.3b
      prep train recipe.toml --set optimizer.lr=1e-5 --set mesh=1,2,4
      prep train recipe.toml --dry-run
    """
    from prepcli.commands.operations.train import train as run
    from prepcli.commands.rendering.training import schema_report, training_report

    ui = output_options.open_console("train", progress)
    if schema_options["schema"]:
        if recipe is not None or options.get("overrides"):
            raise usage_error(
                "`--schema` takes no recipe", "all recipes have one schema", "`prep train --schema`"
            )
        return ui.finish(schema_report())
    if recipe is None:
        raise usage_error(
            "no recipe was given", "a TOML file describes the training", "`prep train RECIPE`"
        )
    # Libraries may print to descriptor 1 during training. Scripts read the result from there.
    with library_output_hidden(to_stderr=ui.level >= SLABS) as stdout:
        result = run(recipe, **arguments, progress=replace(ui, out=stdout), **options)
    return ui.finish(training_report(result))


@expand_option_groups
def generate(
    checkpoint: OptionalCheckpointArgument = None,
    *,
    arguments: GenerateArguments,
    options: Annotated[GenerateOptions, Omit("stream", "memory")],
    chat_options: ChatOptions,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Generate text from prompts and print it to stdout.

    Examples:
      prep generate gpt-neo-1.3B-init --prompt 'Once upon a time'
      prep generate runs/llama-13b --step 2000 --prompts prompts.jsonl --json
      prep generate llama-13b-init --mesh 1,1,8 --prompt Hi --temperature 0.8
      prep generate qwen3-8b --chat --system 'Answer in one sentence.'
    """
    from prepcli.commands.operations.chat import chat, check_chat_options
    from prepcli.commands.operations.generate import generate as run
    from prepcli.commands.rendering.generation import chat_report, generation_report

    ui = output_options.open_console("generate", progress)
    check_chat_options(**chat_options, has_prompts=any(arguments.values()))
    if chat_options["chat"]:
        conversation = chat(
            checkpoint,
            system=chat_options["system"],
            observer=ui,
            shows_answers=not output_options.json,
            options=options,
        )
        return ui.finish(chat_report(conversation))
    result = run(checkpoint, **arguments, progress=ui, **options)
    return ui.finish(generation_report(result))
