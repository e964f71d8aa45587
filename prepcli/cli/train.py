"""Commands that compute with a model: train, generate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from prepcli.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.cli.options import (
    ConfigOption,
    DryRunOption,
    EmaOption,
    NoVerifyOption,
    OfflineOption,
    OptionalCheckpointArgument,
    ProgressOption,
    RevisionOption,
    StepOption,
    StreamOption,
    complete_recipe,
)
from prepcli.console.observer import SLABS
from prepcli.console.stdio import library_output_hidden
from prepcli.errors import usage_error


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options for the prompts and their tokenizer."""

    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", metavar="TEXT", help="Add a prompt; repeatable.", show_default=False
        ),
    ] = None
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Read one prompt per line (.jsonl: key `prompt` or `text`); - is stdin.",
            show_default=False,
        ),
    ] = None
    tokens: Annotated[
        list[str] | None,
        typer.Option(
            "--tokens",
            metavar="1,2,3",
            help="Add a prompt as token ids; repeatable.",
            show_default=False,
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH",
            help="Use this tokenizer file or folder; default: the model's.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Options for sampling the next token."""

    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", metavar="T", help="Scale randomness by T; 0: the most likely token."
        ),
    ] = 0.0
    top_k: Annotated[
        int, typer.Option("--top-k", metavar="K", help="Sample from the K most likely; 0: all.")
    ] = 0
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="P", help="Sample from the top probability mass P.")
    ] = 1.0
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Set the random seed.")] = 0


@expand_option_groups
def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE",
            autocompletion=complete_recipe,
            help="Recipe: a TOML file, or the name of one of `prep recipes`; keys: `prep docs recipes`.",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a key, for example train.steps=10. `KEY=` removes one.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="RUN",
            help="Save to RUN, a folder or bucket URL; default: runs/NAME.",
            show_default=False,
        ),
    ] = None,
    stop_after: Annotated[
        int,
        typer.Option(
            "--stop-after",
            metavar="STEPS",
            min=0,
            help="Stop and save after STEPS steps; 0: never.",
        ),
    ] = 0,
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete the run's steps and start again.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Start even if a step is estimated not to fit into memory."),
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of recipes.")
    ] = False,
    dry_run: DryRunOption = False,
    no_verify: NoVerifyOption = False,
    offline: OfflineOption = False,
    stream: StreamOption = False,
    *,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Train from a checkpoint with a recipe; resume an earlier run.

    Examples:
      prep train gpt-neo-1.3b
      prep train recipe.toml --set optimizer.lr=1e-5 --set mesh=1,2,4
      prep train recipe.toml --dry-run
    """
    from prepcli.commands.train import recipe_schema
    from prepcli.commands.train import train as run
    from prepcli.training_runs.run import TrainRequest

    ui = output_options.open_console("train", progress)
    if schema:
        if recipe is not None or overrides:
            raise usage_error(
                "`--schema` takes no recipe", "all recipes have one schema", "`prep train --schema`"
            )
        return ui.finish(recipe_schema())
    if recipe is None:
        raise usage_error(
            "no recipe was given", "a TOML file describes the training", "`prep train RECIPE`"
        )
    request = TrainRequest(
        recipe,
        overrides=tuple(overrides or ()),
        out=out,
        restart=restart,
        stop_after=stop_after,
        dry_run=dry_run,
        offline=offline,
        stream=stream,
        verify=not no_verify,
        force=force,
    )
    with library_output_hidden(to_stderr=ui.level >= SLABS) as stdout:
        report = run(request, replace(ui, out=stdout))
    return ui.finish(report)


@expand_option_groups
def generate(
    checkpoint: OptionalCheckpointArgument = None,
    *,
    prompt_options: PromptOptions,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            min=1,
            help="Generate at most N tokens; default: 64, or to the last position.",
            show_default=False,
        ),
    ] = None,
    sampling_options: SamplingOptions,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="DP,FSDP,MP",
            help="Use this device mesh; default: one device.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="Compute in this dtype; default: as stored.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", min=1, help="Run N prompts at a time.")
    ] = 16,
    step: StepOption = None,
    ema: EmaOption = False,
    config: ConfigOption = None,
    no_verify: NoVerifyOption = False,
    revision: RevisionOption = None,
    offline: OfflineOption = False,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Generate text from prompts and print it to stdout.

    Examples:
      prep generate gpt-neo-1.3B-init --prompt 'Once upon a time'
      prep generate runs/llama-13b --step 2000 --prompts prompts.jsonl --json
      prep generate llama-13b-init --mesh 1,1,8 --prompt Hi --temperature 0.8
    """
    from prepcli.commands.generate import GenerateRequest
    from prepcli.commands.generate import generate as run
    from prepcli.operations.conversion import CommonOptions

    ui = output_options.open_console("generate", progress)
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
    request = GenerateRequest(
        common,
        prompt_texts=tuple(prompt_options.prompt or ()),
        prompts_file=prompt_options.prompts,
        prompt_ids=tuple(prompt_options.tokens or ()),
        tokenizer=prompt_options.tokenizer,
        max_new_tokens=max_new_tokens,
        sampling=(
            sampling_options.temperature,
            sampling_options.top_k,
            sampling_options.top_p,
            sampling_options.seed,
        ),
        mesh=mesh,
        dtype=dtype,
        batch_size=batch_size,
        verify=not no_verify,
    )
    return ui.finish(run(request, ui))
