"""The entry point: runs the command that was asked for, and turns whatever comes of it into a message and a code."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence

from prepcli.cli.root import app
from prepcli.console.standard_streams import deliver, is_unread, mute, open_closed, spell_out_unencodable
from prepcli.console.ui import Ui, open_ui, unwritten_error
from prepcli.errors import FAILED, INTERRUPTED, OK, STOPPED, PrepError, usage
from prepcli.execution.signals import Interrupted, Stopped, follow_parent, notes_of
from trainer.models.suggest import guess


def main(args: Sequence[str] | None = None) -> int:
    """Run the command that `args` ask for (default: those of the process) and return the exit code.

    0 ok, 1 failed, 2 usage, 75 stopped by a signal with all that is written kept, 130 interrupted.
    """
    open_closed()
    spell_out_unencodable()
    args = sys.argv[1:] if args is None else list(args)
    ui = _ui_of(args)
    try:
        return _run(args, ui) or _delivered(ui)
    except SystemExit as error:  # Typer's way to end, also for a pipe that nobody reads
        return OK if error.code in (None, OK) else _broken_pipe(error.__context__, ui)


def _run(args: Sequence[str], ui: Ui) -> int:
    try:
        follow_parent()
        code = app(args, prog_name="prep", standalone_mode=False, obj=tuple(args))
    except Stopped as stopped:
        return ui.fail(_unfinished(f"stopped by {stopped.signal_name}", args, STOPPED, notes_of(stopped)))
    except (KeyboardInterrupt, Interrupted) as error:
        return ui.fail(_unfinished("interrupted", args, INTERRUPTED, notes_of(error)))
    except Exception as error:
        if _delivered(ui) != OK:  # the help: that is the error
            return FAILED
        return ui.fail(_usage_error(error, ui.command, args) or _lost_folder() or error)
    return code or OK


def _ui_of(args: Sequence[str]) -> Ui:
    """The Ui for failures: options may not have been parsed when they happen."""
    options = args[: args.index("--")] if "--" in args else args
    commands = [name for name in _commands() if name in options]
    first = min(commands, key=options.index, default="")
    return open_ui(first, "--json" in options, "-q" in options or "--quiet" in options, 0)


def _commands() -> list[str]:
    named = [(command.name, command.callback) for command in app.registered_commands]
    return [name or callback.__name__.replace("_", "-") for name, callback in named if callback is not None]


def _unfinished(what: str, args: Sequence[str], code: int, kept: Sequence[str]) -> PrepError:
    """The error of a command that was stopped; `kept`: what the same command goes on from."""
    if not kept:
        return PrepError(what, code=code)
    again = shlex.join(["prep", *(word for word in args if word != "--restart")])  # which would drop what is kept
    return PrepError(what, "; ".join(kept), f"to go on: `{again}`", code)


def _broken_pipe(error: BaseException | None, ui: Ui) -> int:
    """The exit code of a broken pipe: OK for a reader of stdout who wants no more, else the error of another pipe."""
    if not isinstance(error, BrokenPipeError):
        return FAILED
    if not is_unread(sys.__stdout__ or sys.stdout):
        return ui.fail(error)
    mute(sys.__stdout__ or sys.stdout)
    return OK


def _delivered(ui: Ui) -> int:
    """Flush what Typer wrote to stdout, such as help. Returns the exit code."""
    error = deliver(sys.stdout)
    return OK if error is None else ui.fail(unwritten_error(error))


def _lost_folder() -> PrepError | None:
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
        meant = guess(match[1], _commands())
        return usage(f"no command called `{match[1]}`", hint=f"did you mean `{meant}`?" if meant else "`prep --help`")
    if match := re.match(r"No such option:? ['\"]?(-[^\s'\"]+)", message):
        option = match[1].rstrip(".")
        meant = guess(option, getattr(error, "possibilities", None) or ())
        known = _recipe_hint(option, args) if command == "train" else ""
        hint = known or (f"did you mean `{meant}`?" if meant else f"`{path} --help`")
        return usage(f"`{path}` has no option `{option}`", hint=hint)
    first_line = re.sub(r" \(env var: '\w+'\)", "", message.partition("\n")[0]).rstrip(".")
    what, _, why = first_line.partition(": ")
    why = why.removeprefix("Value error, ")
    return usage(what[:1].lower() + what[1:], why, _choice_hint(why) or f"`{path} --help`")


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
    from trainer.recipe.corrections import VALUE_OF

    choices = re.findall(r"'([^']*)'", match[2])
    name = VALUE_OF.get(match[1].lower(), match[1].lower())
    meant = name if name in choices else guess(name, choices)
    return f"did you mean `{meant}`?" if meant else ""
