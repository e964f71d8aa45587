"""A Typer command that rejects empty values."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from prepcli.errors import usage_error

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


def _has_empty(value: object) -> bool:
    return "" in value if isinstance(value, list | tuple) else value == ""


def _empty_value_error(parameter: Any) -> Exception:
    is_option = parameter.param_type_name == "option"
    name = f"`{max(parameter.opts, key=len)}`" if is_option else parameter.metavar
    hint = f"give {name} a value" if parameter.required else f"remove {name}, or give it a value"
    return usage_error(f"{name} is empty", "a shell variable in the command may be unset", hint)
