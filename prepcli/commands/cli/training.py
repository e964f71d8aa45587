"""Commands about training: train, generate, eval, tokenize, plan, report, recipes."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from prepcli.commands.cli.option_groups import (
    Omit,
    OptionalCheckpointArgument,
    OutputUi,
    ProgressUi,
    SharingOptions,
    command,
    complete_recipe,
    complete_recipe_or_checkpoint,
    complete_shipped_recipe,
)
from prepcli.commands.console.stdio import library_output_hidden
from prepcli.commands.console.ui import Report
from prepcli.commands.operations.compute_options import (
    DataOptions,
    EvaluateOptions,
    GenerateArguments,
    GenerateOptions,
    TokenizeArguments,
    TrainOptions,
)
from prepcli.commands.operations.inspection_options import PlanOptions
from prepcli.commands.operations.options import DRY_RUN
from prepcli.core.errors import usage_error
from prepcli.core.observer import LEAVES, LIBRARIES
from prepcli.core.option_spec import PathLike, flag, option


@command(guide="train")
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
    out: Annotated[
        PathLike | None,
        option("RUN", "Save to RUN, a folder or bucket URL. Default: runs/NAME.", position=2),
    ],
    dry_run: Annotated[bool, DRY_RUN],
    options: TrainOptions,
    schema: Annotated[bool, flag("Print the JSON schema of recipes.", position=12)],
    ui: ProgressUi,
) -> Report:
    """Train from a checkpoint with a recipe. Resume an earlier run.

    Examples:
      prep train gpt-neo-1.3b
      prep train recipe.toml --set optimizer.lr=1e-5 --set mesh=1,2,4
      prep train recipe.toml --dry-run
    """
    from prepcli.commands.operations.train import train as run
    from prepcli.commands.rendering.runs import schema_report, training_report

    if schema:
        if recipe is not None or options.get("overrides"):
            raise usage_error(
                "`--schema` takes no recipe", "all recipes have one schema", "`prep train --schema`"
            )
        return schema_report()
    if recipe is None:
        raise usage_error(
            "no recipe was given", "a TOML file describes the training", "`prep train RECIPE`"
        )
    # Libraries may print to descriptor 1 during training. Scripts read the result from there.
    with library_output_hidden(to_stderr=ui.level >= LIBRARIES) as stdout:
        result = run(recipe, out, dry_run=dry_run, progress=replace(ui, out=stdout), **options)
    return training_report(result)


@command(guide="generate")
def generate(
    checkpoint: OptionalCheckpointArgument = None,
    *,
    arguments: GenerateArguments,
    options: Annotated[GenerateOptions, Omit("stream", "memory")],
    chat: Annotated[bool, flag("Answer turns from the terminal or a pipe.", position=3)],
    system: Annotated[
        str | None,
        option("TEXT", "Begin the chat with this message of the system.", position=4),
    ],
    ui: ProgressUi,
) -> Report:
    """Generate text from prompts and print it to stdout.

    Examples:
      prep generate gpt-neo-1.3B-init --prompt 'Once upon a time'
      prep generate runs/llama-13b --step 2000 --prompts prompts.jsonl --json
      prep generate llama-13b-init --mesh 1,1,8 --prompt Hi --temperature 0.8
      prep generate qwen3-8b --chat --system 'Answer in one sentence.'
    """
    from prepcli.commands.operations.chat import chat as converse
    from prepcli.commands.operations.chat import check_chat_options
    from prepcli.commands.operations.generate import generate as run
    from prepcli.commands.rendering.runs import chat_report, generation_report

    check_chat_options(chat=chat, system=system, has_prompts=any(arguments.values()))
    if chat:
        conversation = converse(
            checkpoint,
            system=system,
            observer=ui,
            shows_answers=not ui.as_json,
            options=options,
        )
        return chat_report(conversation)
    result = run(checkpoint, **arguments, progress=ui, **options)
    return generation_report(result)


# --- prep eval


@command("eval", guide="evaluate")
def evaluate(
    checkpoint: OptionalCheckpointArgument = None,
    *,
    data: Annotated[
        PathLike | Sequence[PathLike],
        option(
            "[NAME=]PATH",
            "Evaluate on this file, folder, glob or URL. Repeatable: a result for each name.",
            default=(),
            position=0,
        ),
    ],
    options: Annotated[EvaluateOptions, Omit("stream", "memory")],
    ui: ProgressUi,
) -> Report:
    """Compute loss, perplexity and accuracy on data.

    Examples:
      prep eval gpt-neo-1.3B --data validation.txt
      prep eval runs/llama-13b --step 2000 --data wiki=wiki.txt --data books/
      prep eval llama-13b-init --mesh 1,1,8 --data test.jsonl --json
    """
    from prepcli.commands.operations.evaluate import evaluate as run
    from prepcli.commands.rendering.runs import evaluation_report

    with library_output_hidden(to_stderr=ui.level >= LIBRARIES) as stdout:
        result = run(checkpoint, data, progress=replace(ui, out=stdout), **options)
    return evaluation_report(result)


# --- prep tokenize


@command(guide="data")
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
    ui: ProgressUi,
) -> Report:
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

    share, _ = requested_share(sharing["processes"], os.environ)
    result = tokenize_shard(
        recipe, share.index, of=share.count, **arguments, progress=ui, **options
    )
    return tokenization_report(result, ui.columns, shows_ids=ui.level >= LEAVES)


# --- prep plan


@command(guide="plan")
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
    search: Annotated[bool, flag("List the meshes on which the step fits.", position=2)],
    ui: OutputUi,
) -> Report:
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

    if search:
        meshes = fitting_meshes(target, progress=ui, **options)
        return meshes_report(meshes, ui)
    return step_plan_report(run(target, progress=ui, **options))


# --- prep report


@command(guide="train")
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folders or URLs of training runs.", show_default=False
        ),
    ],
    *,
    out: Annotated[
        PathLike | None,
        option(
            "FILE", "Write the page to FILE. Default: report.html in RUN, or here if RUN is a URL."
        ),
    ],
    ui: OutputUi,
) -> Report:
    """Draw the metrics of training runs as one HTML page.

    The page needs no network: curves, recipe, data, environment and checkpoints. Several runs are
    drawn into the same charts, with the differences of their recipes.

    Examples:
      prep report runs/gpt-neo
      prep report runs/a gs://models/b --out compare.html
    """
    from prepcli.commands.operations.report import report as run
    from prepcli.commands.rendering.runs import runs_report

    return runs_report(run(runs, out, progress=ui))


# --- prep recipes


COPY = "copy"


@command(guide="train")
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
    out: Annotated[PathLike | None, option("FILE", "Copy to FILE. Default: NAME.toml.")],
    ui: OutputUi,
) -> Report:
    """List the recipes that prep ships, print or copy one.

    Examples:
      prep recipes
      prep recipes llama-7b
      prep recipes copy llama-7b --out my-run.toml
    """
    from prepcli.commands.operations.recipes import copy_recipe, shipped_recipe, shipped_recipes
    from prepcli.commands.rendering.runs import recipe_report, recipes_report

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
        return recipes_report(shipped_recipes())
    path = shipped_recipe(names[0])
    if is_copy:
        copy = str(copy_recipe(names[0], None if out is None else Path(out)))
        return Report(copy, {"name": path.stem, "path": copy})
    return recipe_report(path)
