"""The Typer application: its commands and global options.

To add a command:

1. Write the operation in `operations/NAME.py`: typed arguments in, a typed result out. Define its options in
   `operations/options.py`.
2. Write a function with the command's name in `cli/conversion.py`, `cli/inspection.py` or `cli/training.py`. Its
   docstring is the help text and ends with a section of examples. It imports the operation in its body, and returns a
   report.
3. Write the text and the JSON object of the result in `rendering/`.
4. Add the function to a section of `SECTIONS` below.

    @command(guide="lock")                            # option_groups.py: a group of options is one parameter
    def lock(checkpoint: CheckpointArgument, *, options: LockOptions, ui: ProgressUi) -> Report:
        from prepcli.commands.operations.lock import lock as run
        from prepcli.commands.rendering.checkpoints import lock_report
        return lock_report(run(checkpoint, progress=ui, **options))

A command that writes a checkpoint has the decorator `conversion` (cli/conversion.py) instead, and no body: it calls the
function of its name in `prepcli`.

These functions catch no exceptions: `cli.main` turns each exception and signal into a message and an exit code. Slow
imports (numpy, jax, huggingface_hub, rich …) are not allowed at the top of these files or of the modules they import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from prepcli.commands.cli.conversion import (
    add_tokens,
    export,
    merge,
    pad_vocab,
    remove_tokens,
    reshard,
    save_init,
)
from prepcli.commands.cli.inspection import (
    check_family,
    demo,
    docs,
    env,
    inspect,
    lock,
    models,
    roundtrip,
    suggest,
    verify,
)
from prepcli.commands.cli.option_groups import CliCommand, PlainValues
from prepcli.commands.cli.training import evaluate, generate, plan, recipes, report, tokenize, train
from prepcli.core import version
from prepcli.core.errors import USAGE
from prepcli.core.signals import Interrupted, notes_of
from prepcli.core.unexpected import label_errors, process_of


def _launch_commands() -> tuple[CliCommand, ...]:
    # Other commands start without the options of the engines.
    from prepcli.commands.cli.launch import ENGINE_COMMANDS, local

    return (*ENGINE_COMMANDS, local)


def _map_commands() -> tuple[CliCommand, ...]:
    return (suggest,)


# The sections of `--help` with their commands and groups of commands.
SECTIONS = {
    "Convert": (save_init, reshard, export, merge, pad_vocab, add_tokens, remove_tokens, "map"),
    "Check": (inspect, verify, lock, roundtrip, check_family),
    "Train and use": (plan, tokenize, train, report, evaluate, generate),
    "Launch": ("launch",),
    "Look up": (demo, docs, models, recipes, env),
}
GROUP_HELP = {
    "map": "Propose maps between the tensors of checkpoints.",
    "launch": "Start a command on a cluster, or in several processes.",
}
GROUP_COMMANDS = {"map": _map_commands, "launch": _launch_commands}


def all_commands() -> Iterator[CliCommand]:
    """Yield the commands of all sections and groups, in the order of `--help`."""
    for entries in SECTIONS.values():
        for entry in entries:
            if isinstance(entry, str):
                yield from GROUP_COMMANDS[entry]()
            else:
                yield entry


def _top_commands() -> Iterator[CliCommand]:
    for entries in SECTIONS.values():
        for entry in entries:
            if not isinstance(entry, str):
                yield entry


class LazyCommands(Mapping[str, Any]):
    """The Click commands of a group by name. Each is made at its first use: Typer reads its options in about 5 ms."""

    def __init__(
        self, load: Callable[[], Iterable[CliCommand]], click_commands: Mapping[str, Any]
    ) -> None:
        """Keep the function that returns the declared commands, and the commands of Click that are already made."""
        self._load = load
        self._click_commands = dict(click_commands)

    @cached_property
    def _declared(self) -> Mapping[str, CliCommand]:
        return {command.name: command for command in self._load()}

    def __getitem__(self, name: str) -> Any:
        """Return a command of Click."""
        if name not in self._click_commands:
            self._click_commands[name] = _click_command(self._declared[name])
        return self._click_commands[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        yield from dict.fromkeys([*self._declared, *self._click_commands])

    def __len__(self) -> int:
        """Return the number of commands."""
        return len({*self._declared, *self._click_commands})


def _click_command(command: CliCommand) -> Any:
    """Return a command as Typer makes it for an application with this command alone."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(command.name, cls=command.typer_class, help=command.help)(command.function)
    return get_command(single)


class HelpfulGroup(PlainValues, TyperGroup):
    """Group of commands in which `help COMMAND` is `COMMAND --help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`."""
        if args[:1] == ["help"]:
            args = [*(word for word in args if word != "help"), "--help"]
        return super().parse_args(ctx, args)


class CommandGroup(HelpfulGroup):
    """Group of all commands. If Ctrl-C ends a command, its notes about saved work stay with the exception."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands in the order of `--help`."""
        return [_help_name(entry) for entries in SECTIONS.values() for entry in entries]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by section, each with the first sentence of its help."""
        width = max(map(len, self.list_commands(ctx)))
        for title, entries in SECTIONS.items():
            rows: list[tuple[str, str]] = []
            for entry in entries:
                name = _help_name(entry)
                text = GROUP_HELP[name] if isinstance(entry, str) else entry.help
                summary = TyperCommand(name, help=text).get_short_help_str(formatter.width)
                rows.append((name.ljust(width), summary))
            with formatter.section(title):
                formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Ctrl-C raises Interrupted, with notes about the work that is already saved."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            # Typer turns a KeyboardInterrupt into Exit(130), which has no notes. It does not catch Interrupted.
            interrupted = Interrupted()
            for note in notes_of(error):
                interrupted.add_note(note)
            with label_errors(process_of(error)):
                raise interrupted from None


app = typer.Typer(
    cls=CommandGroup,
    name="prep",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    # `cli.main` prints errors. Typer would print its own traceback first.
    pretty_exceptions_enable=False,
    # Otherwise Typer imports rich for every `--help`, and treats brackets in a help text as markup.
    rich_markup_mode=None,
)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"prep {version()}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def prep(
    context: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Prepare language-model checkpoints for JAX, bit for bit and within a memory budget.

    CHECKPOINT is a folder, an alias (see: prep models) or a hub id.

    Help: prep help COMMAND. Documentation: prep docs. First run: prep docs tutorial.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(USAGE)


def _help_name(entry: CliCommand | str) -> str:
    """Return the name in the help of a command or of a group of commands."""
    return entry if isinstance(entry, str) else entry.name


for name, text in GROUP_HELP.items():
    app.add_typer(typer.Typer(cls=HelpfulGroup, help=text, rich_markup_mode=None), name=name)


@cache
def command_group() -> Any:
    """Return the Click group of all commands."""
    root: Any = get_command(app)
    for name, load in GROUP_COMMANDS.items():
        root.commands[name].commands = LazyCommands(load, {})
    root.commands = LazyCommands(_top_commands, root.commands)
    return root
