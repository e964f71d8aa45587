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
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, get_type_hints, is_typeddict

from prepcli.commands.cli.operation_parameters import Omit, from_command_line, typer_parameters
from prepcli.commands.cli.options import (
    JsonOption,
    QuietOption,
    VerboseOption,
)
from prepcli.commands.console.progress_displays import Mode
from prepcli.commands.console.ui import Ui, open_ui

# Names of the options that all commands have, after their own.
OUTPUT_OPTION_NAMES = ("json", "quiet", "verbose", "progress")


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Options for the messages and the result of a command."""

    json: JsonOption = False
    quiet: QuietOption = False
    verbose: VerboseOption = 0

    def open_console(self, command: str, progress: Mode = "auto") -> Ui:
        """Return the Ui for the output of `command`."""
        return open_ui(command, self.json, self.quiet, self.verbose, progress)


def expand_option_groups(command: Callable[..., int]) -> Callable[..., int]:
    """Return `command` with a signature for Typer, in which the options of each group replace the group.

    Args:
        command: Function of a command. Parameters with a dataclass or a TypedDict as type are groups.

    Returns:
        Function with keyword parameters only. It builds the groups from its options and calls `command`.
    """
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
