"""Options and arguments of commands: how Typer sees them, those of several commands, and stricter checks.

A command declares a group of options as one parameter, and Typer sees each option of the group. A group is a dataclass,
or a TypedDict of `prepcli.commands.operations.options`. In the help, the options of TypedDicts are in the order of
their positions.

    @expand_option_groups
    def save_init(checkpoint: CheckpointArgument, *, options: SaveInitOptions, output_options: OutputOptions) -> int: …
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from types import NoneType
from typing import (
    Annotated,
    Any,
    Literal,
    TypedDict,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import typer
from typer.core import TyperCommand

from prepcli.commands.console.progress_displays import Mode
from prepcli.commands.console.ui import Ui, open_ui
from prepcli.commands.operations.operation import choices_of, minimum_of
from prepcli.commands.operations.options import option
from prepcli.core.errors import UsageError, usage_error
from prepcli.core.formatting import shorten
from prepcli.core.option_spec import REQUIRED, OptionSpec, PathLike, PositiveInt, option_specs
from prepcli.planning.work_units import launcher_share

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
    """Return an error with the names of environment variables in place of their options."""
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


class SharingOptions(TypedDict, total=False):
    """How a command divides its work among processes."""

    processes: Annotated[
        str | None,
        option(
            "N/I",
            "Write as process I (from 0) of N. Default: from the variables of SLURM or JAX.",
            environment="PREP_PROCESSES",
            position=45,
        ),
    ]
    workers: Annotated[
        PositiveInt,
        option("N", "Use N processes on this host.", default=1, maximum=256, position=46),
    ]


# --- Options and arguments of several commands


def complete_checkpoint(incomplete: str) -> list[str]:
    """Return the aliases, and the folders here with a prep manifest, with the prefix `incomplete`."""
    from prepcli.formats.manifest import MANIFEST_FILE
    from prepcli.sources.aliases import ALIASES_BY_NAME

    folders = [path.parent.name for path in Path().glob(f"*/{MANIFEST_FILE}")]
    return [name for name in [*sorted(folders), *ALIASES_BY_NAME] if name.startswith(incomplete)]


def complete_family(incomplete: str) -> list[str]:
    """Return the families of the aliases with the prefix `incomplete`."""
    from prepcli.sources.aliases import ALIAS_FAMILIES

    return [name for name in ALIAS_FAMILIES if name.startswith(incomplete)]


def complete_shipped_recipe(incomplete: str) -> list[str]:
    """Return the names of the shipped recipes with the prefix `incomplete`."""
    from prepcli.commands.operations.recipes import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """Return the TOML files here, and the shipped recipes, with the prefix `incomplete`."""
    files = sorted(path.name for path in Path().glob("*.toml"))
    return [
        *(name for name in files if name.startswith(incomplete)),
        *complete_shipped_recipe(incomplete),
    ]


def complete_recipe_or_checkpoint(incomplete: str) -> list[str]:
    """Return the recipes and the checkpoints with the prefix `incomplete`."""
    names = [*complete_recipe(incomplete), *complete_checkpoint(incomplete)]
    # A folder may have the name of a recipe. The shell would offer it twice.
    return [*dict.fromkeys(names)]


def complete_page(incomplete: str) -> list[str]:
    """Return the pages of the documentation with the prefix `incomplete`."""
    from prepcli.commands.operations.about import page_names

    return [name for name in page_names() if name.startswith(incomplete)]


def complete_devices(incomplete: str) -> list[str]:
    """Return the kinds of accelerators with the prefix `incomplete`, in any case."""
    from trainer.planning.accelerators import ACCELERATORS

    return [name for name in ACCELERATORS if name.lower().startswith(incomplete.lower())]


CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Folder, alias (see: prep models) or hub id.",
        autocompletion=complete_checkpoint,
        show_default=False,
    ),
]
OptionalCheckpointArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Folder, alias or hub id. Default: the only prep folder here.",
        autocompletion=complete_checkpoint,
        show_default=False,
    ),
]
FamilyArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="FAMILY",
        help="List only this family.",
        autocompletion=complete_family,
        show_default=False,
    ),
]

# All commands
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Print errors only.")]
VerboseOption = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        count=True,
        help="Print one line per leaf. -vv: one per slab.",
        show_default=False,
    ),
]

# Long-running commands
ProgressOption = Annotated[
    Mode,
    typer.Option(
        "--progress",
        metavar="MODE",
        envvar="PREP_PROGRESS",
        help="Show progress as auto, bar, lines, json or none.",
    ),
]


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
