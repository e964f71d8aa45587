"""The commands of `prep launch`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from prepcli.commands.cli.option_groups import (
    CliCommand,
    OutputUi,
    StrictCommand,
    command,
    complete_recipe,
)
from prepcli.commands.console.ui import Report
from prepcli.core.errors import Command, text, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.core.observer import QUIET
from prepcli.launch.engines import ENGINES, Engine
from prepcli.launch.job import TRAIN, LaunchedCommand
from prepcli.launch.local import LocalOptions

SEPARATOR = "--"


class LaunchCommand(StrictCommand):
    """Command with a recipe before `--`, or with a command of `prep` after it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`, with the first `--` as one of the words.

        Click drops the first `--`, and `r.toml -- --set a=1` would be the same words as `-- r.toml --set a=1`.
        """
        if SEPARATOR in args:
            index = args.index(SEPARATOR)
            args = [*args[:index], SEPARATOR, *args[index:]]
        return super().parse_args(ctx, args)


def launched_command(
    context: typer.Context, recipe: Path | None, words: Sequence[str]
) -> LaunchedCommand:
    """Return the command of a job.

    Raises:
        UsageError: The command is unknown. Its own parser raises the errors of its options.
    """
    path = context.command_path
    arguments = [*words]
    if recipe is None or (str(recipe) == SEPARATOR and not arguments):
        hint = f"`{path} RECIPE` or `{path} -- COMMAND ARGS`"
        raise usage_error("no command was given", "a job runs one command of prep", hint)
    if str(recipe) == SEPARATOR:
        return _parse_command(context, arguments)
    if str(recipe) in _launched_names(context) and not recipe.exists():
        hint = f"`{path} -- {shlex.join([str(recipe), *arguments])}`"
        raise usage_error(f"`{recipe}` is a command", "a command of prep follows `--`", hint)
    if arguments[:1] == [SEPARATOR]:
        del arguments[0]
    return _parse_command(context, [TRAIN, str(recipe), *arguments])


def _parse_command(context: typer.Context, words: list[str]) -> LaunchedCommand:
    """Return the command with the relevant values of its options."""
    name = words[0]
    known = _launched_names(context)
    if name not in known:
        hint = did_you_mean(name, known) or "`prep --help`"
        if name == "prep":
            hint = "leave out `prep`"
        raise usage_error(f"unknown command `{name}`", "a job runs one command of prep", hint)
    root = context.find_root()
    # The parser removes words from its list.
    parsed = _commands(context)[name].make_context(name, words[1:], parent=root)
    values: dict[str, Any] = parsed.params
    recipe = _recipe_word(words, values) if "recipe" in values else ""
    has_shares = "processes" in values
    if has_shares and parsed.get_parameter_source("processes").name == "COMMANDLINE":
        why = "each process of the job gets its own share"
        raise usage_error("`--processes` cannot be given", why, "remove `--processes`")
    return LaunchedCommand(
        name=name,
        recipe=recipe,
        arguments=tuple(words[2:] if recipe else words[1:]),
        has_shares=has_shares,
        writes_output="out" in values and (has_shares or name == TRAIN),
        overrides=tuple(values.get("overrides") or ()),
        mesh=values.get("mesh"),
        out=values.get("out"),
    )


def _commands(context: typer.Context) -> dict[str, Any]:
    """Return the commands of `prep` by their names."""
    return vars(context.find_root().command)["commands"]


def _launched_names(context: typer.Context) -> list[str]:
    """Return the names of the commands without subcommands. A job can run each of them."""
    names: list[str] = []
    for name, click_command in _commands(context).items():
        if not isinstance(click_command, TyperGroup):
            names.append(name)
    return names


def _recipe_word(words: Sequence[str], values: Mapping[str, Any]) -> str:
    """Return the recipe of a command. It must be the first word, because hosts get a copy of its file."""
    name = words[0]
    recipe: Path | None = values["recipe"]
    if recipe is None:
        hint = text("{}", Command(name, "RECIPE"))
        raise usage_error("no recipe was given", "a TOML file describes the training", hint)
    if Path(words[1]) != recipe:
        hint = f"`-- {name} {recipe} OPTIONS`"
        raise usage_error(f"the recipe must follow `{name}`", f"`{words[1]}` precedes it", hint)
    return words[1]


RecipeArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RECIPE",
        help="Recipe of a training: a TOML file, or the name of one of `prep recipes`.",
        autocompletion=complete_recipe,
        show_default=False,
    ),
]
WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- WORDS",
        help="With RECIPE: words of prep train. Without: a command of prep and its words.",
        show_default=False,
    ),
]


def _engine_command(name: str, engine: Engine) -> CliCommand:
    """Return the command that writes or submits the script of an engine."""

    def launch(
        context: typer.Context,
        recipe: RecipeArgument = None,
        words: WordsArgument = None,
        *,
        options: Any,
        ui: OutputUi,
    ) -> Report:
        from prepcli.commands.operations.launch import launch_script
        from prepcli.commands.rendering.runs import script_report

        launched = launched_command(context, recipe, words or ())
        return script_report(launch_script(name, launched, options))

    launch.__annotations__["options"] = engine.options
    launch.__doc__ = engine.help
    return command(name, group="launch", guide="launch", typer_class=LaunchCommand)(launch)


ENGINE_COMMANDS = tuple(_engine_command(name, engine) for name, engine in ENGINES.items())


@command(group="launch", guide="launch", typer_class=LaunchCommand)
def local(
    context: typer.Context,
    recipe: RecipeArgument = None,
    words: WordsArgument = None,
    *,
    options: LocalOptions,
    ui: OutputUi,
) -> Report:
    """Run a command in several processes on this machine.

    The devices are CPU devices. Lines of process 1 begin with [1]. A signal stops all processes.

    Examples:
      prep launch local recipe.toml --processes 2 --devices 4
      prep launch local recipe.toml -- --set train.steps=10
      prep launch local --processes 4 -- save-init ./my-model --mesh 1,1,8
    """
    from prepcli.commands.operations.launch import launch_local
    from prepcli.commands.rendering.runs import local_report

    launched = launched_command(context, recipe, words or ())
    return local_report(launch_local(launched, ui, quiet=ui.level <= QUIET, **options))
