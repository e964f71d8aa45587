"""The options of operations as parameters of Typer."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from prepcli.commands.cli.options import complete_devices
from prepcli.commands.operations.arguments import choices_of, minimum_of
from prepcli.core.option_spec import REQUIRED, OptionSpec, PathLike, option_specs

NEGATION = "--no-"
# Functions that complete the values of options, by their metavar.
COMPLETIONS = {"KIND[:N]": complete_devices}


class Omit:
    """Options of a TypedDict to leave out of a command, e.g. `Annotated[SaveInitOptions, Omit("step")]`."""

    def __init__(self, *names: str) -> None:
        """Keep the names of the options."""
        self.names = names


def typer_parameters(groups: Sequence[tuple[Any, Omit]]) -> list[Parameter]:
    """Return the options of TypedDicts as parameters, in the order of their positions.

    Args:
        groups: TypedDicts, each with the options to omit.
    """
    options: list[tuple[OptionSpec, Parameter]] = []
    for group, omit in groups:
        for name, spec in option_specs(group).items():
            if name not in omit.names:
                options.append((spec, _parameter(group, name, spec)))
    options.sort(key=lambda option: option[0].position)
    return [parameter for _, parameter in options]


def from_command_line(group: Any, omit: Omit, values: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of one TypedDict from a command's values, and return them as an operation takes them.

    Args:
        group: The TypedDict.
        omit: Options of the group without a counterpart in the command.
        values: Values of all parameters of the command. The options of the group are removed.

    Returns:
        Value of each option by field name, e.g. {"verify": False} for `--no-verify`.
    """
    options: dict[str, Any] = {}
    for name, spec in option_specs(group).items():
        if name in omit.names:
            continue
        value: Any = values.pop(name)
        if _is_negated(name, spec):
            options[name] = not value
        elif spec.default == ():
            texts: Sequence[str] = value or ()
            options[name] = texts if spec.parse is None else [spec.parse(text) for text in texts]
        else:
            options[name] = value
    return options


def _parameter(group: Any, name: str, spec: OptionSpec) -> Parameter:
    """Return an option as a parameter of a Typer command."""
    cli_type, minimum, maximum = _cli_type(get_type_hints(group, include_extras=True)[name])
    if spec.cli_type is not None:
        cli_type = spec.cli_type
    default = spec.default
    if default is None or default == ():
        cli_type = cli_type | None
        default = None
    if _is_negated(name, spec):
        default = False
    elif default is REQUIRED:
        default = Parameter.empty
    option = typer.Option(
        spec.flag_of(name),
        metavar=spec.metavar,
        help=spec.help,
        autocompletion=COMPLETIONS.get(spec.metavar or ""),
        envvar=spec.environment,
        min=minimum,
        max=maximum if spec.maximum is None else spec.maximum,
        show_default=default not in (None, Parameter.empty),
    )
    annotated = Annotated[cli_type, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotated)


def _is_negated(name: str, spec: OptionSpec) -> bool:
    """Return whether an option of the command line sets its field to False, e.g. `--no-verify` the field `verify`."""
    return spec.flag == f"{NEGATION}{name}"


def _cli_type(annotation: Any) -> tuple[Any, float | None, int | None]:
    """Return the type, the minimum and the maximum of an option on the command line.

    Listed numbers become a range, listed texts stay choices, and a text or a sequence of texts becomes a list, e.g.
    `Literal[0, 1] | None` -> int from 0 to 1, `str | Sequence[str]` -> list[str].
    """
    choices = [choice for choice in choices_of(annotation) if choice is not NoneType]
    if choices in ([str], [int], [float], [bool]):
        return choices[0], minimum_of(annotation), None
    if choices == [*get_args(PathLike)]:
        return Path, None, None
    if len(choices) == 1 and get_origin(choices[0]) is Literal:
        values = get_args(choices[0])
        if isinstance(values[0], int):
            return int, min(values), max(values)
        return choices[0], None, None
    # Other unions, such as `int | str` of sizes, have `OptionSpec.cli_type`.
    is_list = any(get_origin(choice) is Sequence for choice in choices)
    return (list[str] if is_list else str), None, None
