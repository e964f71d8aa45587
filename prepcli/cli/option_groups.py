"""Groups of options: a command declares a group as one parameter, and Typer sees each option of the group.

@expand_option_groups
def verify(checkpoint: OptionalCheckpointArgument = None, *, hub_options: HubOptions) -> int: …
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, get_type_hints

from prepcli.cli.options import (
    DEFAULT_MEMORY,
    DropOption,
    DryRunOption,
    JsonOption,
    MemoryOption,
    OfflineOption,
    OutOption,
    OverwriteOption,
    ProcessesOption,
    QuietOption,
    RestartOption,
    RevisionOption,
    StreamOption,
    UntieOption,
    VerboseOption,
    WorkersOption,
)
from prepcli.console.progress import Mode
from prepcli.console.ui import Ui, open_ui
from prepcli.planning.accounting import MatchOptions


@dataclass(frozen=True, slots=True)
class TensorOptions:
    """Options for source tensors without a counterpart in the output."""

    drop: DropOption = None
    untie: UntieOption = False

    def match_options(self) -> MatchOptions:
        """Return the options in the form that planning uses."""
        return MatchOptions(tuple(self.drop or ()), self.untie)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of commands that write a checkpoint: destination, memory, processes."""

    out: OutOption = None
    memory: MemoryOption = DEFAULT_MEMORY
    dry_run: DryRunOption = False
    overwrite: OverwriteOption = False
    restart: RestartOption = False
    processes: ProcessesOption = None
    workers: WorkersOption = 1


@dataclass(frozen=True, slots=True)
class HubOptions:
    """Options for reading a checkpoint from the Hugging Face hub."""

    revision: RevisionOption = None
    offline: OfflineOption = False
    stream: StreamOption = False


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Options for the messages and the result that a command prints."""

    json: JsonOption = False
    quiet: QuietOption = False
    verbose: VerboseOption = 0

    def open_console(self, command: str, progress: Mode = "auto") -> Ui:
        """Return the Ui through which `command` prints."""
        return open_ui(command, self.json, self.quiet, self.verbose, progress)


def expand_option_groups(command: Callable[..., int]) -> Callable[..., int]:
    """Return `command` with a signature for Typer, in which the options of each group replace the group.

    Args:
        command: Function of a command. Parameters whose type is a dataclass are groups.

    Returns:
        Function with keyword parameters only. It builds the groups from its options and calls `command`.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}

    @functools.wraps(command)
    def flat_command(**values: Any) -> int:
        group_values = {
            name: group(**{key: values.pop(key) for key in _group_options(group)}) for name, group in groups.items()
        }
        return command(**values, **group_values)

    parameters = [
        option for parameter in _resolved_parameters(command, hints) for option in _expand_parameter(parameter)
    ]
    vars(flat_command)["__signature__"] = inspect.Signature(parameters)  # read by `inspect.signature`
    flat_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat_command


def _resolved_parameters(command: Callable[..., int], hints: dict[str, Any]) -> Iterator[Parameter]:
    """Yield the parameters of `command` as keyword-only parameters with evaluated annotations."""
    for name, parameter in inspect.signature(command).parameters.items():
        yield parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)


def _expand_parameter(parameter: Parameter) -> Iterator[Parameter]:
    """Yield the options of a group as parameters, or the parameter itself if it is not a group."""
    if not dataclasses.is_dataclass(parameter.annotation):
        yield parameter
        return
    for name, (hint, default) in _group_options(parameter.annotation).items():
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _group_options(group: Any) -> dict[str, tuple[Any, Any]]:
    """Return the name, type and default of each option of a group."""
    hints = get_type_hints(group, include_extras=True)
    return {field.name: (hints[field.name], field.default) for field in dataclasses.fields(group)}
