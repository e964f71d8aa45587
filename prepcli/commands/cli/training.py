"""Commands about training: train, generate, eval, tokenize, plan, report, recipes."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypedDict

import typer

from prepcli.commands.cli.option_groups import (
    Omit,
    OptionalCheckpointArgument,
    OutputOptions,
    ProgressOptions,
    SharingOptions,
    complete_recipe,
    complete_recipe_or_checkpoint,
    complete_shipped_recipe,
    expand_option_groups,
)
from prepcli.commands.console.stdio import library_output_hidden
from prepcli.commands.operations.compute_options import (
    DataOptions,
    EvaluateArguments,
    EvaluateOptions,
    GenerateArguments,
    GenerateOptions,
    TokenizeArguments,
    TrainArguments,
    TrainOptions,
)
from prepcli.commands.operations.inspection_options import (
    MeshSearchOptions,
    PlanOptions,
    RecipesOptions,
    ReportOptions,
)
from prepcli.commands.operations.options import flag, option
from prepcli.core.errors import usage_error
from prepcli.core.observer import LEAVES, SLABS


class SchemaOptions(TypedDict):
    """The option `--schema`: the command prints the schema and does not train."""

    schema: Annotated[bool, flag("Print the JSON schema of recipes.", position=12)]


class ChatOptions(TypedDict):
    """The options of a conversation in the terminal, in place of prompts."""

    chat: Annotated[
        bool,
        flag("Answer turns from the terminal or a pipe.", position=3),
    ]
    system: Annotated[
        str | None,
        option("TEXT", "Begin the chat with this message of the system.", position=4),
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
    output_options: ProgressOptions,
) -> int:
    """Train from a checkpoint with a recipe. Resume an earlier run.

    Examples:
      prep train gpt-neo-1.3b
      prep train recipe.toml --set optimizer.lr=1e-5 --set mesh=1,2,4
      prep train recipe.toml --dry-run
    """
    from prepcli.commands.operations.train import train as run
    from prepcli.commands.rendering.runs import schema_report, training_report

    ui = output_options.open_console("train")
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
    output_options: ProgressOptions,
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
    from prepcli.commands.rendering.runs import chat_report, generation_report

    ui = output_options.open_console("generate")
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


# --- prep eval


@expand_option_groups
def evaluate(
    checkpoint: OptionalCheckpointArgument = None,
    *,
    arguments: EvaluateArguments,
    options: Annotated[EvaluateOptions, Omit("stream", "memory")],
    output_options: ProgressOptions,
) -> int:
    """Compute loss, perplexity and accuracy on data.

    Examples:
      prep eval gpt-neo-1.3B --data validation.txt
      prep eval runs/llama-13b --step 2000 --data wiki=wiki.txt --data books/
      prep eval llama-13b-init --mesh 1,1,8 --data test.jsonl --json
    """
    from prepcli.commands.operations.evaluate import evaluate as run
    from prepcli.commands.rendering.runs import evaluation_report

    ui = output_options.open_console("eval")
    with library_output_hidden(to_stderr=ui.level >= SLABS) as stdout:
        result = run(checkpoint, **arguments, progress=replace(ui, out=stdout), **options)
    return ui.finish(evaluation_report(result, ui.columns))


# --- prep tokenize


@expand_option_groups
def tokenize(
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE",
            autocompletion=complete_recipe,
            help="Recipe: a TOML file, or the name of one of `prep recipes`.",
            show_default=False,
        ),
    ],
    *,
    arguments: TokenizeArguments,
    options: DataOptions,
    sharing: Annotated[SharingOptions, Omit("workers")],
    output_options: ProgressOptions,
) -> int:
    """Tokenize the data of a recipe, in one or several processes.

    `prep train` does the same before its first step. The last of several processes completes the tokens. Under `srun`
    each process takes its share.

    Examples:
      prep tokenize recipe.toml
      prep tokenize recipe.toml --show 3
      prep tokenize recipe.toml --show 3 --dry-run
      prep tokenize recipe.toml --processes 4/0
      prep tokenize recipe.toml --format megatron --out tokens
    """
    from prepcli.commands.operations.data import tokenize_shard
    from prepcli.commands.rendering.runs import tokenization_report
    from prepcli.planning.work_units import requested_share

    ui = output_options.open_console("tokenize")
    share, _ = requested_share(sharing["processes"], os.environ)
    result = tokenize_shard(
        recipe, share.index, of=share.count, **arguments, progress=ui, **options
    )
    return ui.finish(tokenization_report(result, ui.columns, shows_ids=ui.level >= LEAVES))


# --- prep plan


@expand_option_groups
def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE_OR_CHECKPOINT",
            help="Recipe (.toml, or the name of one of `prep recipes`), or a folder, alias or hub id.",
            autocompletion=complete_recipe_or_checkpoint,
            show_default=False,
        ),
    ],
    *,
    options: PlanOptions,
    search_options: MeshSearchOptions,
    output_options: OutputOptions,
) -> int:
    """Estimate memory and time of a training step.

    A plan needs no accelerator, weights or data. If the recipe's checkpoint does not exist,
    its name selects a published config.

    Examples:
      prep plan llama-7b-32k --devices v5p
      prep plan recipe.toml --devices H100:16 --search
      prep plan llama-7b-32k --devices v5p --compile
      prep plan llama-13b-init --mesh 1,64,4 --html plan.html
    """
    from prepcli.commands.operations.plan import fitting_meshes
    from prepcli.commands.operations.plan import plan as run
    from prepcli.commands.rendering.training_plans import meshes_report, step_plan_report

    ui = output_options.open_console("plan")
    if search_options["search"]:
        meshes = fitting_meshes(target, progress=ui, **options)
        return ui.finish(meshes_report(meshes, ui))
    return ui.finish(step_plan_report(run(target, progress=ui, **options), ui.columns))


# --- prep report


@expand_option_groups
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folders or URLs of training runs.", show_default=False
        ),
    ],
    *,
    options: ReportOptions,
    output_options: OutputOptions,
) -> int:
    """Draw the metrics of training runs as one HTML page.

    The page needs no network: curves, recipe, data, environment and checkpoints. Several runs are
    drawn into the same charts, with the differences of their recipes.

    Examples:
      prep report runs/gpt-neo
      prep report runs/a gs://models/b --out compare.html
    """
    from prepcli.commands.operations.report import report as run
    from prepcli.commands.rendering.runs import runs_report

    ui = output_options.open_console("report")
    return ui.finish(runs_report(run(runs, **options, progress=ui), ui.columns))


# --- prep recipes


COPY = "copy"


@expand_option_groups
def recipes(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[copy] NAME",
            help="A recipe to print or copy. Default: list all.",
            autocompletion=complete_shipped_recipe,
            show_default=False,
        ),
    ] = None,
    *,
    options: RecipesOptions,
    output_options: OutputOptions,
) -> int:
    """List the recipes that prep ships, print or copy one.

    Examples:
      prep recipes
      prep recipes llama-7b
      prep recipes copy llama-7b --out my-run.toml
    """
    from prepcli.commands.console.ui import Report
    from prepcli.commands.operations.recipes import copy_recipe, shipped_recipe, shipped_recipes
    from prepcli.commands.rendering.runs import recipe_report, recipes_report

    ui = output_options.open_console("recipes")
    out = options["out"]
    is_copy = words is not None and words[0] == COPY
    names = list(words or [])
    if is_copy:
        names.remove(COPY)
    if names[1:]:
        raise usage_error(
            f"unexpected word `{names[1]}`",
            "the command takes the name of one recipe",
            f"`prep recipes copy {names[1]}`",
        )
    if is_copy and not names:
        raise usage_error(
            "no recipe was given", "`prep recipes` lists them", "`prep recipes copy NAME`"
        )
    if out is not None and not is_copy:
        raise usage_error(
            "`--out` requires `copy`",
            "it names the file of the copy",
            "`prep recipes copy NAME --out FILE`",
        )
    if not names:
        return ui.finish(recipes_report(shipped_recipes(), ui.columns))
    path = shipped_recipe(names[0])
    if is_copy:
        copy = str(copy_recipe(names[0], None if out is None else Path(out)))
        return ui.finish(Report(copy, {"name": path.stem, "path": copy}))
    return ui.finish(recipe_report(path))
