"""Typer commands with stricter checks: no option may be empty, and some commands run in one process only."""

from __future__ import annotations

import os
import re
from typing import Any

from typer.core import TyperCommand

from prepcli.core.errors import UsageError, usage_error
from prepcli.core.formatting import shorten
from prepcli.planning.shares import launcher_share

# Limit of numbers in options: sizes in bytes computed from them must fit the integers of every library.
MAX_INTEGER = (1 << 63) - 1
MAX_SHOWN_DIGITS = 41
# Parameters with free text, which may be empty. The command of `prep launch` checks its own words.
FREE_TEXT_OPTIONS = ("prompts", "words")


class StrictCommand(TyperCommand):
    """Command whose options and arguments must not be empty strings.

    With an unset variable, `--mesh "$MESH"` would otherwise mean no mesh, and `--out "$OUT"` the current folder.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`. Raise UsageError with the name of the first empty value."""
        # The parser removes words from its list, so it gets a copy.
        # Its values are not converted yet: as a Path, an empty text would be `.`.
        values, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        for parameter in self.params:
            if parameter.name not in FREE_TEXT_OPTIONS and _has_empty_text(
                values.get(parameter.name)
            ):
                raise _empty_value_error(parameter)
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            _check_integer(parameter, ctx.params.get(parameter.name))
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command. A UsageError about an option set by an environment variable names the variable."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise name_variables(error, ctx) from error.__cause__


class OneProcessCommand(StrictCommand):
    """Command that only one process of a job may run."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raise UsageError if a launcher started several processes of it."""
        # With `srun -n 8 prep demo`, eight processes would delete and write the same folder.
        share, launcher = launcher_share(os.environ)
        if share.count > 1:
            why = f"this is process {share.index} of {share.count}, according to {launcher}"
            hint = f"run `{ctx.command_path}` without the launcher"
            raise usage_error(f"`{ctx.command_path}` runs in one process", why, hint)
        return super().invoke(ctx)


def name_variables(error: UsageError, ctx: Any) -> UsageError:
    """Return an error with the names of environment variables in place of their options.

    Args:
        error: The error. `--memory abc` in it becomes `PREP_MEMORY=abc`.
        ctx: Typer's context of the command.
    """
    for parameter in ctx.command.params:
        if is_from_variable(parameter, ctx):
            what = _replace_option_by_variable(error.what, parameter)
            hint = _replace_option_by_variable(error.hint, parameter)
            error = error.with_texts(what=what, hint=hint)
    return error


def is_from_variable(parameter: Any, ctx: Any) -> bool:
    """Return whether an environment variable gave the value of an option."""
    source = ctx.get_parameter_source(parameter.name)
    return bool(parameter.envvar) and source is not None and source.name == "ENVIRONMENT"


def option_name(parameter: Any) -> str:
    """Return the long name of an option."""
    return max(parameter.opts, key=len)


def _replace_option_by_variable(text: str, parameter: Any) -> str:
    option = re.escape(option_name(parameter))
    # An option with a value first: `--memory abc` -> `PREP_MEMORY=abc`. The second pattern replaces the bare name, but
    # not `--mem` in `--memory`.
    with_overrides = re.sub(rf"{option} (?=[^ `])", f"{parameter.envvar}=", text)
    return re.sub(rf"{option}(?![\w-])", parameter.envvar, with_overrides)


def _check_integer(parameter: Any, value: object) -> None:
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        name = option_name(parameter)
        digits = shorten(str(value), MAX_SHOWN_DIGITS)
        what = f"`{name} {digits}` is too large"
        raise usage_error(what, f"the limit is {MAX_INTEGER:,}", "use a smaller number")


def _has_empty_text(value: object) -> bool:
    return "" in value if isinstance(value, list | tuple) else value == ""


def _empty_value_error(parameter: Any) -> Exception:
    is_option = parameter.param_type_name == "option"
    name = f"`{option_name(parameter)}`" if is_option else parameter.metavar
    hint = f"give {name} a value" if parameter.required else f"remove {name}, or give it a value"
    return usage_error(f"{name} is empty", "a shell variable in the command may be unset", hint)
