"""Typer commands that reject empty values, and launchers of several processes."""

from __future__ import annotations

import os
from typing import Any

from typer.core import TyperCommand

from prepcli.errors import usage_error
from prepcli.planning.shares import launcher_share

FREE_TEXT_OPTIONS = ("prompt",)  # options whose value is free text, which may be empty


class StrictCommand(TyperCommand):
    """Command whose options and arguments must not be empty strings.

    With an unset variable, `--mesh "$MESH"` would otherwise mean no mesh, and `--out "$OUT"` the current folder.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`; raise a UsageError that names the first empty value."""
        values, _, _ = self.make_parser(ctx).parse_args(args=list(args))  # unconverted, because Path("") is `.`
        for parameter in self.params:
            if parameter.name not in FREE_TEXT_OPTIONS and _has_empty(values.get(parameter.name)):
                raise _empty_value_error(parameter)
        return super().parse_args(ctx, args)


class OneProcessCommand(StrictCommand):
    """Command with effects that several processes must not repeat."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; raise UsageError if a launcher started several processes of it."""
        share, launcher = launcher_share(os.environ)
        if share.count > 1:
            why = f"this is process {share.index} of {share.count}, as {launcher} says"
            hint = f"run `{ctx.command_path}` without the launcher"
            raise usage_error(f"`{ctx.command_path}` runs in one process", why, hint)
        return super().invoke(ctx)


def _has_empty(value: object) -> bool:
    return "" in value if isinstance(value, list | tuple) else value == ""


def _empty_value_error(parameter: Any) -> Exception:
    is_option = parameter.param_type_name == "option"
    name = f"`{max(parameter.opts, key=len)}`" if is_option else parameter.metavar
    hint = f"give {name} a value" if parameter.required else f"remove {name}, or give it a value"
    return usage_error(f"{name} is empty", "a shell variable in the command may be unset", hint)
