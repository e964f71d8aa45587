"""Commands and their options: how Typer sees them, arguments of several commands, and stricter checks.

A command is a function with the decorator `command`. A parameter of it is an argument for Typer, a single option, or a
TypedDict of options, which Typer sees one by one. In the help, options are in the order of their positions. The
function receives the Ui for its output, and returns the report that is printed.

    @command(guide="lock")
    def lock(checkpoint: CheckpointArgument, *, options: LockOptions, ui: ProgressUi) -> Report: …
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin, is_typeddict

import typer
from typer.core import TyperCommand

from prepcli.commands.console.progress_displays import Mode
from prepcli.commands.console.ui import Report, Ui, open_ui
from prepcli.commands.operations.operation import choices_of, expand_path, minimum_of
from prepcli.core.errors import UsageError, usage_error
from prepcli.core.formatting import shorten
from prepcli.core.option_spec import (
    REQUIRED,
    OptionSpec,
    PathLike,
    PositiveInt,
    flag,
    option,
    option_rows,
)

# Limit of numbers in options: sizes in bytes computed from them must fit the integers of every library.
MAX_INTEGER = (1 << 63) - 1
MAX_SHOWN_DIGITS = 41
# Parameters with free text, which may be empty. The command of `prep launch` checks its own words.
FREE_TEXT_OPTIONS = ("prompts", "words")


class PlainValues:
    """Command or group that takes texts, new paths and defaults as they are.

    Typer converts each value, also a default, with pydantic. Its import takes 0.1 s, a fifth of `prep inspect`.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        # The base class after this one is a class of Typer.
        parameters: list[Any] = super().get_params(ctx)  # pyright: ignore[reportAttributeAccessIssue]
        for parameter in parameters:
            vars(parameter)["process_value"] = functools.partial(_convert_value, parameter)
        return parameters


class StrictCommand(PlainValues, TyperCommand):
    """Command whose options and arguments must not be empty strings.

    With an unset variable, `--mesh "$MESH"` would otherwise mean no mesh, and `--out "$OUT"` the current folder.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args`. Raise UsageError with the name of the first empty value."""
        # The parser removes words from its list, so it gets a copy.
        # Its values are not converted yet: as a Path, an empty text would be `.`.
        values, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        for parameter in self.params:
            value = values.get(parameter.name)
            texts = value if isinstance(value, list | tuple) else [value]
            if parameter.name not in FREE_TEXT_OPTIONS and "" in texts:
                raise _empty_value_error(parameter)
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            if isinstance(value, int) and abs(value) > MAX_INTEGER:
                digits = shorten(str(value), MAX_SHOWN_DIGITS)
                what = f"`{option_name(parameter)} {digits}` is too large"
                raise usage_error(what, f"the limit is {MAX_INTEGER:,}", "use a smaller number")
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
        from prepcli.planning.work_units import launcher_share

        # With `srun -n 8 prep demo`, eight processes would delete and write the same folder.
        share, launcher = launcher_share(os.environ)
        if share.count > 1:
            why = f"this is process {share.index} of {share.count}, according to {launcher}"
            hint = f"run `{ctx.command_path}` without the launcher"
            raise usage_error(f"`{ctx.command_path}` runs in one process", why, hint)
        return super().invoke(ctx)


def _convert_value(parameter: Any, context: Any, value: Any) -> Any:
    """Return the value of a parameter in its type."""
    source = context.get_parameter_source(parameter.name)
    if source is not None and source.name == "DEFAULT" and not parameter.required:
        # The callbacks of Typer's own options, e.g. `--help`, ignore a missing value.
        return value
    # A group of commands has no function.
    annotations = getattr(context.command.callback, "__annotations__", {})
    annotation = annotations.get(parameter.name)
    types = [each for each in choices_of(annotation) if each is not NoneType]
    # pydantic refuses a text that is not Unicode.
    if isinstance(value, str) and value.isprintable():
        if types == [str]:
            return value
        # Typer checks an existing path.
        if types == [Path] and not os.path.lexists(value):
            return Path(value)
    return type(parameter).process_value(parameter, context, value)


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
    from trainer.planning.step_time import ACCELERATORS

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

# Functions that complete the values of options, by their metavar.
COMPLETIONS = {"KIND[:N]": complete_devices}


class Omit:
    """Options of a TypedDict to leave out of a command, e.g. `Annotated[SaveInitOptions, Omit("step")]`."""

    def __init__(self, *names: str) -> None:
        """Keep the names of the options."""
        self.names = names


# Place of the options of all commands in the help: after their own.
_LAST = 1000


class OutputOptions(TypedDict):
    """Options for the messages and the result of a command."""

    as_json: Annotated[
        bool, flag("Print one JSON object to stdout.", flag="--json", position=_LAST)
    ]
    quiet: Annotated[bool, flag("Print errors only.", short="-q", position=_LAST)]
    verbose: Annotated[
        int,
        option(
            None,
            "Print one line per leaf. -vv: and the messages of libraries.",
            default=0,
            short="-v",
            is_count=True,
            position=_LAST,
        ),
    ]


class ProgressOptions(OutputOptions):
    """Options for the messages, the progress and the result of a long command."""

    progress: Annotated[
        Mode,
        option(
            "MODE",
            "Show progress as auto, bar, lines, json or none.",
            default="auto",
            environment="PREP_PROGRESS",
            position=_LAST,
        ),
    ]


# The output of a command, and of a long one.
OutputUi = Annotated[Ui, OutputOptions]
ProgressUi = Annotated[Ui, ProgressOptions]


@dataclass(frozen=True)
class CliCommand:
    """A command of `prep`. Its options are read when it is used, because each start of `prep` declares all commands.

    Attributes:
        name: Its name, without that of its group.
        guide: The page of `prep docs` about it.
        group: The group of commands that it belongs to, e.g. `launch`.
        typer_class: Class of the command for Typer.
        declaration: The function with groups of options as parameters. It returns the report to print.
        read_signature: Returns the signature of the declaration, with evaluated types.
    """

    name: str
    guide: str
    group: str
    typer_class: type[TyperCommand]
    declaration: Callable[..., Report]
    read_signature: Callable[[], inspect.Signature]

    @functools.cached_property
    def function(self) -> Callable[..., int]:
        """The function with the signature that Typer reads. It returns the exit code."""
        return _typer_function(
            self.declaration, self.read_signature(), command_name=self.group or self.name
        )

    @property
    def help(self) -> str:
        r"""The help text: the docstring of the function, and the page about it.

        Click's marker `\b` before the examples keeps their line breaks.
        """
        text = inspect.cleandoc(self.declaration.__doc__ or "").replace(
            "Examples:\n", "\b\nExamples:\n"
        )
        return f"{text}\n\nGuide: prep docs {self.guide}" if self.guide else text


def command(
    name: str = "",
    *,
    guide: str = "",
    group: str = "",
    typer_class: type[TyperCommand] = StrictCommand,
    read_signature: Callable[[], inspect.Signature] | None = None,
) -> Callable[[Callable[..., Report]], CliCommand]:
    """Return a decorator that makes a command of a function. See `CliCommand` for the arguments.

    Without `name`, the command has the name of the function. Without `read_signature`, it has its signature.
    """

    def decorate(function: Callable[..., Report]) -> CliCommand:
        return CliCommand(
            name=name or function.__name__.replace("_", "-"),
            guide=guide,
            group=group,
            typer_class=typer_class,
            declaration=function,
            read_signature=read_signature
            or functools.partial(inspect.signature, function, eval_str=True),
        )

    return decorate


def _typer_function(
    function: Callable[..., Report], signature: inspect.Signature, *, command_name: str
) -> Callable[..., int]:
    """Return a function with one parameter for each option, which prints the report of `function`."""
    rows_of: dict[str, Mapping[str, tuple[Any, OptionSpec]]] = {}
    arguments: list[Parameter] = []
    options: list[tuple[int, Parameter]] = []
    negated: set[str] = set()
    for parameter in signature.parameters.values():
        rows = _rows_of_parameter(parameter)
        if rows is None:
            arguments.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        rows_of[parameter.name] = rows
        for name, (annotation, spec) in rows.items():
            options.append((spec.position, _typer_option(name, annotation, spec)))
            if spec.is_negated(name):
                negated.add(name)
    # The sort is stable: options with equal positions keep their order.
    options.sort(key=lambda option: option[0])
    parameters = [*arguments, *(parameter for _, parameter in options)]

    @functools.wraps(function)
    def call(**values: Any) -> int:
        values = {name: expand_path(name, value) for name, value in values.items()}
        for parameter_name, rows in rows_of.items():
            group: dict[str, Any] = {}
            for name, (_, spec) in rows.items():
                value = values.pop(name)
                if name in negated:
                    value = not value
                elif spec.default == ():
                    value = list(value or ())
                    if spec.parse is not None:
                        value = [*map(spec.parse, value)]
                group[name] = value
            is_single = parameter_name in rows
            values[parameter_name] = group[parameter_name] if is_single else group
        ui = open_ui(command_name, **values.pop("ui"))
        return ui.finish(function(**values, ui=ui))

    # `inspect.signature` reads these attributes.
    vars(call)["__signature__"] = inspect.Signature(parameters)
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _rows_of_parameter(parameter: Parameter) -> Mapping[str, tuple[Any, OptionSpec]] | None:
    """Return the options of a parameter, by name: its type and its specification. None for an argument of Typer."""
    annotation = parameter.annotation
    if is_typeddict(annotation):
        return option_rows(annotation)
    for item in getattr(annotation, "__metadata__", ()):
        if isinstance(item, OptionSpec):
            return {parameter.name: (annotation, item)}
        if isinstance(item, Omit):
            rows = option_rows(annotation.__origin__)
            return {name: row for name, row in rows.items() if name not in item.names}
        if is_typeddict(item):
            return option_rows(item)
    return None


def _typer_option(name: str, annotation: Any, spec: OptionSpec) -> Parameter:
    """Return an option as a parameter of a Typer command."""
    cli_type, minimum, maximum = _cli_type(annotation)
    if spec.cli_type is not None:
        cli_type = spec.cli_type
    default = spec.default
    if default is None or default == ():
        cli_type = cli_type | None
        default = None
    if spec.is_negated(name):
        default = False
    elif default is REQUIRED:
        default = Parameter.empty
    words = [spec.short, spec.flag_of(name)] if spec.short else [spec.flag_of(name)]
    typer_option = typer.Option(
        *words,
        metavar=spec.metavar,
        help=spec.help,
        autocompletion=COMPLETIONS.get(spec.metavar or ""),
        envvar=spec.environment,
        min=minimum,
        max=maximum if spec.maximum is None else spec.maximum,
        count=spec.is_count,
        show_default=default not in (None, Parameter.empty) and not spec.is_count,
    )
    annotated = Annotated[cli_type, typer_option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotated)


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
