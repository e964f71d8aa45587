"""Groups of options: a command declares a group as one parameter, and Typer sees each option of the group.

A group is a dataclass, or a TypedDict of `prepcli.commands.operations.options`. In the help, the options of TypedDicts
are in the order of their positions.

    @expand_option_groups
    def save_init(checkpoint: CheckpointArgument, *, options: SaveInitOptions, output_options: OutputOptions) -> int: …
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

import typer

from prepcli.commands.cli.options import (
    JsonOption,
    ProgressOption,
    QuietOption,
    VerboseOption,
    complete_devices,
)
from prepcli.commands.console.ui import Ui, open_ui
from prepcli.commands.operations.operation import choices_of, minimum_of
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
    """Return the options of TypedDicts as parameters, in the order of their positions."""
    options: list[tuple[OptionSpec, Parameter]] = []
    for group, omit in groups:
        for name, spec in option_specs(group).items():
            if name not in omit.names:
                options.append((spec, _parameter(group, name, spec)))
    options.sort(key=lambda option: option[0].position)
    return [parameter for _, parameter in options]


def from_command_line(group: Any, omit: Omit, values: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of one TypedDict from a command's values, and return them as an operation takes them."""
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


# Names of the options that all commands have, after their own.
OUTPUT_OPTION_NAMES = ("json", "quiet", "verbose", "progress")


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Options for the messages and the result of a command."""

    json: JsonOption = False
    quiet: QuietOption = False
    verbose: VerboseOption = 0

    def open_console(self, command: str) -> Ui:
        """Return the Ui for the output of `command`."""
        return open_ui(command, self.json, self.quiet, self.verbose)


@dataclass(frozen=True, slots=True)
class ProgressOptions(OutputOptions):
    """Options for the messages, the progress and the result of a long command."""

    progress: ProgressOption = "auto"

    def open_console(self, command: str) -> Ui:
        """Return the Ui for the output of `command`."""
        return open_ui(command, self.json, self.quiet, self.verbose, self.progress)


def expand_option_groups(command: Callable[..., int]) -> Callable[..., int]:
    """Return `command` with a signature for Typer, in which the options of each group replace the group."""
    hints = get_type_hints(command, include_extras=True)
    dataclass_groups: dict[str, Any] = {}
    typed_dicts: dict[str, tuple[Any, Omit]] = {}
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        options, omit = _typed_dict_of(hint)
        if options is not None:
            typed_dicts[name] = (options, omit)
        elif dataclasses.is_dataclass(hint):
            dataclass_groups[name] = hint
            parameters += _dataclass_parameters(hint)
        else:
            parameters.append(parameter.replace(annotation=hint, kind=Parameter.KEYWORD_ONLY))
    # The options of an operation stand between the arguments and the options of all commands.
    arguments: list[Parameter] = []
    output_parameters: list[Parameter] = []
    for parameter in parameters:
        is_output = parameter.name in OUTPUT_OPTION_NAMES
        (output_parameters if is_output else arguments).append(parameter)
    options_of_operation = typer_parameters(list(typed_dicts.values()))
    parameters = [*arguments, *options_of_operation, *output_parameters]

    @functools.wraps(command)
    def flat_command(**values: Any) -> int:
        groups: dict[str, Any] = {}
        for name, group in dataclass_groups.items():
            fields = {field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            groups[name] = group(**fields)
        for name, (options, omit) in typed_dicts.items():
            groups[name] = from_command_line(options, omit, values)
        return command(**values, **groups)

    # `inspect.signature` reads this attribute.
    vars(flat_command)["__signature__"] = inspect.Signature(parameters)
    flat_command.__annotations__ = {
        parameter.name: parameter.annotation for parameter in parameters
    }
    return flat_command


def _typed_dict_of(hint: Any) -> tuple[Any, Omit]:
    """Return the TypedDict of a parameter and the options to omit, e.g. `Annotated[X, Omit("step")]`."""
    for item in getattr(hint, "__metadata__", ()):
        if isinstance(item, Omit):
            return hint.__origin__, item
    return (hint, Omit()) if is_typeddict(hint) else (None, Omit())


def _dataclass_parameters(group: Any) -> list[Parameter]:
    """Return the options of a dataclass as parameters."""
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    ]
