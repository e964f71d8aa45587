"""The commands as Typer takes them: parse, call, print.

To add a command, write what it does as a function from its request to a Report in `commands/NAME.py`, and in the
module here of its group a function named like the command that takes its options (the shared ones are in options.py),
documents itself with two or three examples after a `\\b` line, imports that function in its body, and returns the exit
code; then name it in COMMANDS below:

    @grouped                                          # groups.py: options that go together are one parameter here
    def pad_vocab(context: typer.Context, checkpoint: Checkpoint, …, *, output: Output, shown: Shown,
                  progress: ProgressMode = "auto") -> int:
        from prepcli.commands.pad_vocab import Request, pad_vocab
        ui = shown.open("pad-vocab", progress)
        with stoppable():                             # conversions only: SIGTERM and SIGUSR1 end in exit code 75
            return ui.finish(pad_vocab(Request(_common(context, checkpoint, output), …), ui))

Nothing is caught there: `cli.main` turns each exception into its message and exit code. Nothing that takes time to
import (numpy, jax, huggingface_hub, rich …) is imported at the top of these files or of a module that they import.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from prepcli.cli.conversion import export, pad_vocab, reshard, save_init
from prepcli.cli.inspection import demo, env, inspect, models, verify
from prepcli.cli.strict import StrictCommand
from prepcli.cli.train import generate, train
from prepcli.console.ui import version
from prepcli.errors import USAGE
from prepcli.execution.signals import Interrupted, notes_of

COMMANDS = (  # as `--help` lists them
    *(pad_vocab, save_init, reshard, export, verify, inspect),
    *(train, generate),
    *(demo, models, env),
)


class CommandGroup(TyperGroup):
    """The group of all commands."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises Interrupted for Ctrl-C, with the notes of what is kept."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            interrupted = Interrupted()
            for note in notes_of(error):
                interrupted.add_note(note)
            raise interrupted from None


app = typer.Typer(
    cls=CommandGroup,
    name="prep",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    pretty_exceptions_enable=False,
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
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Prepare language-model checkpoints for JAX: exactly, within a stated
    memory, and so that nothing is lost.

    CHECKPOINT is a folder, an alias (see: prep models) or a hub id.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(USAGE)


for command in COMMANDS:
    app.command(cls=StrictCommand)(command)
