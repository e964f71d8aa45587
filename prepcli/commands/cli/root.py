"""The Typer application: its commands and global options.

To add a command:

1. Write the operation in `operations/NAME.py`: typed arguments in, a typed result out. Define its options in
   `operations/options.py`.
2. Write a function with the command's name in `cli/conversion.py`, `cli/inspection.py` or `cli/training.py`. Its
   docstring is the help text and ends with a section of examples. It imports the operation in its body, and returns the
   exit code.
3. Write the text and the JSON object of the result in `rendering/`.
4. Add the function to `COMMANDS` below.

    @expand_option_groups                             # option_groups.py: a group of options is one parameter
    def lock(checkpoint: CheckpointArgument, *, options: LockOptions, output_options: ProgressOptions) -> int:
        from prepcli.commands.operations.lock import lock as run
        from prepcli.commands.rendering.checkpoints import lock_report
        ui = output_options.open_console("lock")
        return ui.finish(lock_report(run(checkpoint, progress=ui, **options)))

These functions catch no exceptions: `cli.main` turns each exception and signal into a message and an exit code. Slow
imports (numpy, jax, huggingface_hub, rich …) are not allowed at the top of these files or of the modules they import.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
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
from prepcli.commands.cli.launch import LaunchCommand, gke, local, ray, sky, slurm, tpu
from prepcli.commands.cli.option_groups import OneProcessCommand, StrictCommand
from prepcli.commands.cli.training import evaluate, generate, plan, recipes, report, tokenize, train
from prepcli.core import version
from prepcli.core.errors import USAGE
from prepcli.core.unexpected import label_errors, process_of
from prepcli.execution.signals import Interrupted, notes_of

# In the order of `--help`.
COMMANDS = (
    *(pad_vocab, add_tokens, remove_tokens),
    *(save_init, reshard, export, merge, verify, lock, roundtrip, inspect),
    *(plan, tokenize, train, report, evaluate, generate),
    *(demo, docs, models, recipes, check_family, env),
)
# Names of commands, where they differ from the name of the function.
COMMAND_NAMES = {evaluate: "eval"}
LAUNCH_COMMANDS = (slurm, tpu, gke, sky, ray, local)
MAP_COMMANDS = (suggest,)
# The command before each group in `--help`.
GROUP_PREDECESSORS = {"map": "inspect", "launch": "train"}
# The page of `prep docs` about each command.
GUIDES = {
    "pad-vocab": "pad",
    "add-tokens": "vocabulary",
    "remove-tokens": "vocabulary",
    "save-init": "convert",
    "reshard": "reshard",
    "export": "convert",
    "merge": "lora",
    "verify": "exactness",
    "lock": "lock",
    "roundtrip": "prove",
    "inspect": "convert",
    "plan": "plan",
    "tokenize": "tokenize",
    "train": "train",
    "report": "train",
    "eval": "evaluate",
    "generate": "generate",
    "demo": "tutorial",
    "models": "convert",
    "recipes": "train",
    "check-family": "add-a-family",
    "env": "launchers",
    "suggest": "map",
    "slurm": "slurm",
    "tpu": "tpu-pod",
    "gke": "gke",
    "sky": "sky",
    "ray": "ray",
    "local": "several-processes",
}
# Several processes must not run these commands. Conversions and `train` divide their work, and all others only read.
ONE_PROCESS_COMMANDS = (demo,)


class CommandGroup(TyperGroup):
    """Group of all commands. If Ctrl-C ends a command, its notes about saved work stay with the exception."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands in the order of `--help`."""
        return help_order()

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

    Documentation: prep docs. First run: prep docs tutorial.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(USAGE)


def command_name(command: Callable[..., int]) -> str:
    """Return the name of a command: the name of its function, with a few exceptions."""
    return COMMAND_NAMES.get(command, command.__name__.replace("_", "-"))


def help_order() -> list[str]:
    """Return the names of all commands and groups in the order of `--help`."""
    names = [command_name(command) for command in COMMANDS]
    for group, predecessor in GROUP_PREDECESSORS.items():
        names.insert(names.index(predecessor) + 1, group)
    return names


def _help_text(command: Callable[..., int]) -> str:
    r"""Return the help text of a command: its docstring, and the page of `prep docs` about it.

    Click's marker `\b` before the examples keeps their line breaks.
    """
    text = cleandoc(command.__doc__ or "").replace("Examples:\n", "\b\nExamples:\n")
    guide = GUIDES.get(command_name(command))
    return f"{text}\n\nGuide: prep docs {guide}" if guide else text


launch_app = typer.Typer(
    help="Start a command on a cluster, or in several processes.", rich_markup_mode=None
)
for command in LAUNCH_COMMANDS:
    launch_app.command(cls=LaunchCommand, help=_help_text(command))(command)
map_app = typer.Typer(
    help="Propose maps between the tensors of checkpoints.", rich_markup_mode=None
)
for command in MAP_COMMANDS:
    map_app.command(cls=StrictCommand, help=_help_text(command))(command)
for command in COMMANDS:
    command_class = OneProcessCommand if command in ONE_PROCESS_COMMANDS else StrictCommand
    app.command(command_name(command), cls=command_class, help=_help_text(command))(command)
app.add_typer(map_app, name="map")
app.add_typer(launch_app, name="launch")


@cache
def command_group() -> Any:
    """Return the Click group of all commands.

    Typer reads the signatures of all commands for each call of an app, in about 15 ms.
    """
    return get_command(app)
