"""The entry point: runs the command that was asked for, and turns whatever comes of it into a message and a code."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence

from prepcli.cli.root import app
from prepcli.console.stdio import (
    escape_unencodable,
    is_reader_gone,
    open_closed_streams,
    redirect_to_null,
    write_and_flush,
)
from prepcli.console.ui import Ui, open_ui, stdout_error
from prepcli.errors import FAILED, INTERRUPTED, OK, STOPPED, PrepError, usage_error
from prepcli.execution.signals import Interrupted, Stopped, die_with_parent, notes_of
from trainer.models.suggest import suggest


def main(args: Sequence[str] | None = None) -> int:
    """Run the command that `args` ask for (default: those of the process) and return the exit code.

    0 ok, 1 failed, 2 usage, 75 stopped by a signal with all that is written kept, 130 interrupted.
    """
    open_closed_streams()
    escape_unencodable()
    args = sys.argv[1:] if args is None else list(args)
    ui = _failure_ui(args)
    try:
        return _run(args, ui) or _flush_stdout(ui)
    except SystemExit as error:  # Typer's way to end, also for a pipe that nobody reads
        return OK if error.code in (None, OK) else _broken_pipe_code(error.__context__, ui)


def _run(args: Sequence[str], ui: Ui) -> int:
    try:
        die_with_parent()
        code = app(args, prog_name="prep", standalone_mode=False, obj=tuple(args))
    except Stopped as stopped:
        return ui.fail(_stopped_error(f"stopped by {stopped.signal_name}", args, STOPPED, notes_of(stopped)))
    except (KeyboardInterrupt, Interrupted) as error:
        return ui.fail(_stopped_error("interrupted", args, INTERRUPTED, notes_of(error)))
    except Exception as error:
        if _flush_stdout(ui) != OK:  # the help: that is the error
            return FAILED
        return ui.fail(_usage_error(error, ui.command, args) or _missing_folder_error() or error)
    return code or OK


def _failure_ui(args: Sequence[str]) -> Ui:
    """The Ui for failures: options may not have been parsed when they happen."""
    options = args[: args.index("--")] if "--" in args else args
    commands = [name for name in _command_names() if name in options]
    first = min(commands, key=options.index, default="")
    return open_ui(first, "--json" in options, "-q" in options or "--quiet" in options, 0)


def _command_names() -> list[str]:
    named = [(command.name, command.callback) for command in app.registered_commands]
    return [name or callback.__name__.replace("_", "-") for name, callback in named if callback is not None]


def _stopped_error(what: str, args: Sequence[str], code: int, durable_notes: Sequence[str]) -> PrepError:
    """The error of a command that was stopped; `kept`: what the same command goes on from."""
    if not durable_notes:
        return PrepError(what, code=code)
    again = shlex.join(["prep", *(word for word in args if word != "--restart")])  # which would drop what is kept
    return PrepError(what, "; ".join(durable_notes), f"to go on: `{again}`", code)


def _broken_pipe_code(error: BaseException | None, ui: Ui) -> int:
    """The exit code of a broken pipe: OK for a reader of stdout who wants no more, else the error of another pipe."""
    if not isinstance(error, BrokenPipeError):
        return FAILED
    if not is_reader_gone(sys.__stdout__ or sys.stdout):
        return ui.fail(error)
    redirect_to_null(sys.__stdout__ or sys.stdout)
    return OK


def _flush_stdout(ui: Ui) -> int:
    """Flush what Typer wrote to stdout, such as help. Returns the exit code."""
    error = write_and_flush(sys.stdout)
    return OK if error is None else ui.fail(stdout_error(error))


def _missing_folder_error() -> PrepError | None:
    """The error of a current folder that was deleted, which can make any other one misleading."""
    try:
        os.getcwd()
    except OSError as error:
        return PrepError("the current folder cannot be used", error.strerror or str(error), "`cd` to one that exists")
    return None


def _usage_error(error: Exception, command: str, args: Sequence[str]) -> PrepError | None:
    """Typer's usage errors in our form. They are known by what they can do: their class has had several homes."""
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    message: str = format_message()
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else f"prep {command}".strip()
    if match := re.match(r"No such command ['\"](.+?)['\"]", message):
        meant = suggest(match[1], _command_names())
        return usage_error(
            f"no command called `{match[1]}`", hint=f"did you mean `{meant}`?" if meant else "`prep --help`"
        )
    if match := re.match(r"No such option:? ['\"]?(-[^\s'\"]+)", message):
        option = match[1].rstrip(".")
        meant = suggest(option, getattr(error, "possibilities", None) or ())
        known = _recipe_hint(option, args) if command == "train" else ""
        hint = known or (f"did you mean `{meant}`?" if meant else f"`{path} --help`")
        return usage_error(f"`{path}` has no option `{option}`", hint=hint)
    first_line = re.sub(r" \(env var: '\w+'\)", "", message.partition("\n")[0]).rstrip(".")
    what, _, why = first_line.partition(": ")
    why = why.removeprefix("Value error, ")
    return usage_error(what[:1].lower() + what[1:], why, _choice_hint(why) or f"`{path} --help`")


def _recipe_hint(option: str, args: Sequence[str]) -> str:
    """The key of a recipe that replaces an option which `prep train` does not have, with the value that was given."""
    from trainer.recipe import option_hint

    place = next((i for i, word in enumerate(args) if word.partition("=")[0] == option), len(args))
    _, equals, value = "".join(args[place : place + 1]).partition("=")
    after = "".join(args[place + 1 : place + 2])
    return option_hint(option, value if equals or after.startswith("--") else after)


def _choice_hint(why: str) -> str:
    """The choice that was meant by another one: `'bf16' is not one of 'float32', 'bfloat16'`."""
    match = re.match(r"'(.*)' is not one of (.*)", why)
    if not match:
        return ""
    from trainer.recipe.corrections import VALUE_BY_SYNONYM

    choices = re.findall(r"'([^']*)'", match[2])
    name = VALUE_BY_SYNONYM.get(match[1].lower(), match[1].lower())
    meant = name if name in choices else suggest(name, choices)
    return f"did you mean `{meant}`?" if meant else ""
