"""Entry point of `prep`: run a command and turn its result or error into a message and an exit code."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

from prepcli.commands.cli.option_groups import is_from_variable, option_name
from prepcli.commands.cli.root import command_group
from prepcli.commands.console.stdio import (
    escape_unencodable,
    is_reader_gone,
    open_closed_streams,
    redirect_to_null,
    write_and_flush,
)
from prepcli.commands.console.ui import Report, Ui, open_ui, stdout_error
from prepcli.core.errors import FAILED, INTERRUPTED, OK, STOPPED, PrepError, usage_error
from prepcli.core.formatting import SHORT_WORD_CHARS, shorten, suggest
from prepcli.core.signals import (
    ANSWER_S,
    STOP_SIGNALS,
    Interrupted,
    Stopped,
    answer_signals,
    die_with_parent,
    exit_with_report,
    notes_of,
    raise_on_signal,
)
from prepcli.core.unexpected import process_of
from prepcli.core.worker_thread import exit_past_abandoned_calls

# Names that other tools give to the work of prep's commands.
OTHER_COMMAND_NAMES = {
    "chat": "`prep generate MODEL --chat`",
    "compare": "`prep verify A B`",
    "convert": "`prep save-init MODEL` converts to Orbax, and `prep export CHECKPOINT` to Hugging Face",
    "diff": "`prep verify A B`, or `prep inspect A --diff B` for a list",
    "download": "`prep save-init OWNER/NAME` downloads and converts a model",
    "evaluate": "did you mean `eval`?",
    "finetune": "did you mean `train`?",
    "fine-tune": "did you mean `train`?",
    "lora": "`prep train RECIPE` with a table `[lora]`",
    "ls": "`prep inspect CHECKPOINT`",
    "pad": "did you mean `pad-vocab`?",
    "pretrain": '`prep train RECIPE` with `model.init = "random"`',
    "push": "`prep export CHECKPOINT --push OWNER/NAME`",
    "quantize": "`prep export CHECKPOINT --dtype bfloat16` is the smallest output",
    "run": "did you mean `train`?",
    "serve": "`prep export CHECKPOINT` writes a folder that servers load: `prep docs generate`",
    "sft": "did you mean `train`?",
    "shard": "did you mean `reshard`?",
    "show": "did you mean `inspect`?",
    "split": "did you mean `reshard`?",
    "upload": "`prep export CHECKPOINT --push OWNER/NAME`",
}


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        args: Words of the command line without the program's name. Defaults to `sys.argv[1:]`.

    Returns:
        0 on success, 1 on failure, 2 for a usage error, 75 when stopped by a signal (the written data is kept for
        the next run), 130 when interrupted.
    """
    # Nothing may open a file before this call: the file could get the descriptor of a closed stderr, and receive its
    # messages.
    open_closed_streams()
    escape_unencodable()
    args = sys.argv[1:] if args is None else list(args)
    ui = _failure_ui(args)
    is_reporting = threading.Event()
    try:
        with answer_signals(
            lambda _: ui.note("stopping; again to quit"), lambda: _quit(ui, is_reporting)
        ):
            try:
                with raise_on_signal((*STOP_SIGNALS, signal.SIGINT)):
                    # A signal that was blocked until now arrives here.
                    die_with_parent()
                    code = command_group()(
                        args, prog_name="prep", standalone_mode=False, obj=tuple(args)
                    )
            except (Exception, KeyboardInterrupt, Interrupted, Stopped) as error:
                is_reporting.set()
                code = _report_error(error, args, ui)
        return code or _flush_stdout(ui)
    except SystemExit as error:
        # Raised by Typer to exit, also after a broken pipe.
        return OK if error.code in (None, OK) else _broken_pipe_code(error.__context__, ui)


def _report_error(error: BaseException, args: Sequence[str], ui: Ui) -> int:
    """Report why a command ended, and return the exit code."""
    if isinstance(error, Stopped):
        return _report_stop(error, f"stopped by {error.signal_name}", args, ui, code=STOPPED)
    if isinstance(error, KeyboardInterrupt | Interrupted):
        return _report_stop(error, "interrupted", args, ui, code=INTERRUPTED)
    # If the help text was not delivered, this error is reported already.
    if _flush_stdout(ui) != OK:
        return FAILED
    if isinstance(error, Exception):
        error = _usage_error(error, ui.command, args) or _missing_folder_error() or error
    return ui.fail(error)


def _report_stop(stop: BaseException, what: str, args: Sequence[str], ui: Ui, *, code: int) -> int:
    atexit.register(exit_past_abandoned_calls, code)
    error = _stopped_error(what, args, code, notes_of(stop))
    return ui.finish(Report(error=error, process=process_of(stop)))


def _quit(ui: Ui, is_reporting: threading.Event) -> None:
    """Report a second Ctrl-C, and end the process."""
    if is_reporting.is_set():
        # The main thread prints the error of the process. It may wait for a full pipe.
        time.sleep(ANSWER_S)
        os._exit(INTERRUPTED)
    exit_with_report(lambda: ui.show_final_error(PrepError("interrupted", code=INTERRUPTED)))


def _failure_ui(args: Sequence[str]) -> Ui:
    """Return the Ui for errors, from unparsed words: an error may occur before options are parsed."""
    # Words after `--` belong to another command, e.g. `prep launch slurm r.toml -- --json`.
    options = args[: args.index("--")] if "--" in args else args
    commands = [name for name in command_group().commands if name in options]
    first = min(commands, key=options.index, default="")
    return open_ui(first, "--json" in options, "-q" in options or "--quiet" in options, 0)


def _stopped_error(
    what: str, args: Sequence[str], code: int, durable_notes: Sequence[str]
) -> PrepError:
    """Return the error of a stopped command. `durable_notes` name the saved work."""
    if not durable_notes:
        return PrepError(what, code=code)
    # The command to resume has no --restart, because this option would delete the saved work.
    resume_command = shlex.join(["prep", *(word for word in args if word != "--restart")])
    return PrepError(what, "; ".join(durable_notes), f"to resume: `{resume_command}`", code)


def _broken_pipe_code(error: BaseException | None, ui: Ui) -> int:
    """Return the exit code of a broken pipe: OK if the reader of stdout has gone, else the code of the error."""
    if not isinstance(error, BrokenPipeError):
        return FAILED
    if not is_reader_gone(sys.__stdout__ or sys.stdout):
        return ui.fail(error)
    redirect_to_null(sys.__stdout__ or sys.stdout)
    return OK


def _flush_stdout(ui: Ui) -> int:
    """Flush Typer's output to stdout, such as help, and return the exit code."""
    error = write_and_flush(sys.stdout)
    return OK if error is None else ui.fail(stdout_error(error))


def _missing_folder_error() -> PrepError | None:
    """Return an error if the current folder was deleted, because it can make every other error misleading."""
    try:
        os.getcwd()
    except OSError as error:
        why = error.strerror or str(error)
        return PrepError("the current folder cannot be used", why, "`cd` to an existing folder")
    return None


def _usage_error(error: Exception, command: str, args: Sequence[str]) -> PrepError | None:
    """Convert a usage error of Typer to a PrepError, and return None for any other error.

    Usage errors are recognised by `format_message`, because their class has moved between packages.
    """
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    message: str = format_message()
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else f"prep {command}".strip()
    if context is not None and context.info_name == "train" and "--" in args:
        # `prep launch ENGINE RECIPE -- WORDS`: only the words are those of `prep train`.
        command = "train"
        args = args[args.index("--") + 1 :]
    if match := re.match(r"No such command ['\"](.+?)['\"]", message):
        commands = getattr(getattr(context, "command", None), "commands", ())
        return usage_error(
            f"unknown command `{match[1]}`", hint=_command_hint(match[1], path, commands)
        )
    if match := re.match(r"No such option:? ['\"]?(-[^\s'\"]+)", message):
        option = match[1].rstrip(".")
        suggestion = suggest(option, getattr(error, "possibilities", None) or ())
        if command == "train" and len(unknown := _unknown_options(context, args)) > 1:
            return _unknown_options_error(path, unknown)
        recipe_hint = _recipe_hint(option) if command == "train" else ""
        launch_hint = _launch_hint(option, context) if command == "launch" else ""
        hint = (
            recipe_hint
            or launch_hint
            or (f"did you mean `{suggestion}`?" if suggestion else f"`{path} --help`")
        )
        return usage_error(f"`{path}` has no option `{option}`", hint=hint)
    if match := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.+)\)\.?$", message):
        noun = "arguments" if " " in match[1] else "argument"
        words = shorten(match[1], SHORT_WORD_CHARS)
        return usage_error(f"unexpected {noun} `{words}`", hint=f"`{path} --help`")
    # Typer appends `(env var: 'PREP_MEMORY')` even if the command line gave the value.
    first_line = re.sub(r" \(env var: '\w+'\)", "", message.partition("\n")[0]).rstrip(".")
    what, _, why = first_line.partition(": ")
    why = why.removeprefix("Value error, ")
    parameter = getattr(error, "param", None)
    if parameter is not None and context is not None and is_from_variable(parameter, context):
        value = shorten(os.environ.get(parameter.envvar, ""), SHORT_WORD_CHARS)
        hint = (
            _choice_hint(why)
            or f"`unset {parameter.envvar}`, or give it a value of `{option_name(parameter)}`"
        )
        return usage_error(f"`{parameter.envvar}={value}` is invalid", why, hint)
    return usage_error(what[:1].lower() + what[1:], why, _choice_hint(why) or f"`{path} --help`")


def _command_hint(name: str, path: str, commands: Collection[str]) -> str:
    """Return a hint for an unknown command: its name in prep, one of a similar name, or the list of commands."""
    if name in OTHER_COMMAND_NAMES:
        return OTHER_COMMAND_NAMES[name]
    if suggestion := suggest(name, [*commands, "help"]):
        return f"did you mean `{suggestion}`?"
    return f"`{path} --help`"


def _unknown_options(context: Any, args: Sequence[str]) -> list[str]:
    """Return the unknown long options in `args` for the command of a Typer context, in their order."""
    if context is None:
        return []
    known = {
        name
        for parameter in context.command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    options = (word.partition("=")[0] for word in args if word.startswith("--"))
    return [
        option
        for option in dict.fromkeys(options)
        if option not in {*known, *context.help_option_names, "--"}
    ]


def _unknown_options_error(path: str, options: Sequence[str]) -> PrepError:
    """Return an error with a line for each unknown option. Options of other trainers show the recipe key to use."""
    hints = [_recipe_hint(option) for option in options]
    lines = [
        f"`{option}` - {hint}" if hint else f"`{option}`"
        for option, hint in zip(options, hints, strict=True)
    ]
    others = f"{len(options) - 1} other{'s' if options[2:] else ''}"
    hint = "`prep recipes` lists examples, and `--set KEY=VALUE` changes a key"
    return usage_error(
        f"`{path}` has no option `{options[0]}` and {others}", "\n".join(lines), hint
    )


def _recipe_hint(option: str) -> str:
    """Return a hint with the recipe key for an option of other trainers. Empty if there is none."""
    from trainer.recipe import option_hint

    return option_hint(option)


def _launch_hint(option: str, context: Any) -> str:
    """Return a hint for an option of `prep train` before the `--` of `prep launch`. Empty for other options."""
    train = vars(context.find_root().command)["commands"]["train"]
    options = {name for parameter in train.params for name in parameter.opts}
    return f"`-- {option}`: options of prep train follow `--`" if option in options else ""


def _choice_hint(why: str) -> str:
    """Return a suggestion for an invalid choice, or an empty text.

    >>> _choice_hint("'bf16' is not one of 'float32', 'bfloat16'")
    'did you mean `bfloat16`?'
    """
    match = re.match(r"'(.*)' is not one of (.*)", why)
    if not match:
        return ""
    choices = re.findall(r"'([^']*)'", match[2])
    name = match[1].lower()
    suggestion = name if name in choices else suggest(name, choices)
    return f"did you mean `{suggestion}`?" if suggestion else ""
