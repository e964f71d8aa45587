"""Options that go together. A command takes a group as one parameter; Typer is shown each option of it.

@grouped
def verify(checkpoint: CheckpointHere = None, *, hub: Hub, shown: Shown) -> int: …
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
    """What a conversion may lose, and what it has to keep."""

    drop: DropOption = None
    untie: UntieOption = False

    def match_options(self) -> MatchOptions:
        """As plans take them."""
        return MatchOptions(tuple(self.drop or ()), self.untie)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Where an output goes, and how it is made."""

    out: OutOption = None
    memory: MemoryOption = DEFAULT_MEMORY
    dry_run: DryRunOption = False
    overwrite: OverwriteOption = False
    restart: RestartOption = False
    processes: ProcessesOption = None
    workers: WorkersOption = 1


@dataclass(frozen=True, slots=True)
class HubOptions:
    """How a checkpoint of the hub is read."""

    revision: RevisionOption = None
    offline: OfflineOption = False
    stream: StreamOption = False


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How a command tells what it does and finds."""

    json: JsonOption = False
    quiet: QuietOption = False
    verbose: VerboseOption = 0

    def open_console(self, command: str, progress: Mode = "auto") -> Ui:
        """What `command` prints with."""
        return open_ui(command, self.json, self.quiet, self.verbose, progress)


def expand_option_groups(command: Callable[..., int]) -> Callable[..., int]:
    """The command as Typer is to see it: in place of each parameter that is a group stand its options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}

    @functools.wraps(command)
    def flat(**given: Any) -> int:
        made = {name: group(**{key: given.pop(key) for key in _group_options(group)}) for name, group in groups.items()}
        return command(**given, **made)

    parameters = [option for each in _resolved_parameters(command, hints) for option in _expand_parameter(each)]
    vars(flat)["__signature__"] = inspect.Signature(parameters)  # which `inspect.signature` asks for
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    return flat


def _resolved_parameters(command: Callable[..., int], hints: dict[str, Any]) -> Iterator[Parameter]:
    for name, parameter in inspect.signature(command).parameters.items():
        yield parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY)


def _expand_parameter(parameter: Parameter) -> Iterator[Parameter]:
    if not dataclasses.is_dataclass(parameter.annotation):
        yield parameter
        return
    for name, (hint, default) in _group_options(parameter.annotation).items():
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _group_options(group: Any) -> dict[str, tuple[Any, Any]]:
    """Name -> type and default of each option."""
    hints = get_type_hints(group, include_extras=True)
    return {field.name: (hints[field.name], field.default) for field in dataclasses.fields(group)}
