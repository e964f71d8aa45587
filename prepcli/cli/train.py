"""`prep train` and `prep generate` as Typer takes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from prepcli.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.cli.options import (
    ConfigOption,
    DryRunOption,
    NoVerifyOption,
    OfflineOption,
    OptionalCheckpointArgument,
    ProgressOption,
    RevisionOption,
    StepOption,
)
from prepcli.errors import usage_error


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What a model is to go on from."""

    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="A prompt; may be repeated.", show_default=False),
    ] = None
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="A prompt a line; in .jsonl, `prompt` or `text` of each object; - is stdin.",
            show_default=False,
        ),
    ] = None
    tokens: Annotated[
        list[str] | None,
        typer.Option("--tokens", metavar="1,2,3", help="A prompt as ids; may be repeated.", show_default=False),
    ] = None
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="PATH", help="tokenizer.json; default: the model's.", show_default=False),
    ] = None


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the next token is chosen."""

    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", help="0 takes the likeliest token each time.")
    ] = 0.0
    top_k: Annotated[int, typer.Option("--top-k", metavar="K", help="Draw from the K likeliest; 0: all.")] = 0
    top_p: Annotated[float, typer.Option("--top-p", metavar="P", help="Draw from the likeliest of a share P.")] = 1.0
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Other draws; the same seed draws the same.")] = 0


@expand_option_groups
def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="A TOML file; docs/recipes.md has its keys.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Another value for a key, as train.steps=10.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="RUN", help="The run's folder; default: runs/NAME.", show_default=False),
    ] = None,
    stop_after: Annotated[
        int, typer.Option("--stop-after", metavar="STEPS", min=0, help="Stop and save after so many steps; 0: never.")
    ] = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Drop the run's steps and begin anew.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of recipes.")] = False,
    dry_run: DryRunOption = False,
    no_verify: NoVerifyOption = False,
    offline: OfflineOption = False,
    *,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Train from a checkpoint as a recipe says; resumes by itself.

    \b
    Examples:
      prep train recipes/gpt-neo-1.3b.toml
      prep train recipe.toml --set optimizer.lr=1e-5 --set mesh=1,2,4
      prep train recipe.toml --dry-run
    """
    from prepcli.commands.train import TrainRequest, recipe_schema
    from prepcli.commands.train import train as run

    ui = output_options.open_console("train", progress)
    if schema:
        if recipe is not None or overrides:
            raise usage_error("`--schema` takes no recipe", "one schema holds for all recipes", "`prep train --schema`")
        return ui.finish(recipe_schema())
    if recipe is None:
        raise usage_error("no recipe was named", "training is described by a TOML file", "`prep train RECIPE`")
    request = TrainRequest(recipe, tuple(overrides or ()), out, restart, stop_after, dry_run, offline, verify=not no_verify)
    return ui.finish(run(request, ui))


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
            help="The most to add to a prompt; default: 64, or to the last position.",
            show_default=False,
        ),
    ] = None,
    sampling_options: SamplingOptions,
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", metavar="DP,FSDP,MP", help="Devices; default: the first one.", show_default=False),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(
            "--dtype", metavar="NAME", help="To compute in; default: bfloat16 if stored so.", show_default=False
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", min=1, help="Prompts at a time; changes no result.")
    ] = 16,
    step: StepOption = None,
    config: ConfigOption = None,
    no_verify: NoVerifyOption = False,
    revision: RevisionOption = None,
    offline: OfflineOption = False,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Let a model go on from prompts; what it adds goes to stdout.

    \b
    Examples:
      prep generate gpt-neo-1.3B-init --prompt 'Once upon a time'
      prep generate runs/llama-13b --step 2000 --prompts prompts.jsonl --json
      prep generate llama-13b-init --mesh 1,1,8 --prompt Hi --temperature 0.8
    """
    from prepcli.commands.conversion import CommonOptions
    from prepcli.commands.generate import GenerateRequest
    from prepcli.commands.generate import generate as run

    ui = output_options.open_console("generate", progress)
    common = CommonOptions(checkpoint, None, 0, offline=offline, revision=revision, step=step, config=config)
    draws = (sampling_options.temperature, sampling_options.top_k, sampling_options.top_p, sampling_options.seed)
    texts, ids = tuple(prompt_options.prompt or ()), tuple(prompt_options.tokens or ())
    request = GenerateRequest(
        common,
        texts,
        prompt_options.prompts,
        ids,
        prompt_options.tokenizer,
        max_new_tokens,
        draws,
        mesh,
        dtype,
        batch_size,
        verify=not no_verify,
    )
    return ui.finish(run(request, ui))
