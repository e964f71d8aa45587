"""Specification of an option: its default, its texts and its place in the help and in recorded command lines.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_type_hints

from prepcli.core.errors import OPTION_NAMES

# Position of the fields that do not change the bytes of an output: manifests do not record them.
NOT_RECORDED = None
# Default value of a required option: Typer reports an error if it has no value.
REQUIRED = ...

PathLike = str | Path
# The TypedDict of a group of options.
Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class Minimum:
    """The least valid value of a number, as metadata of its annotation."""

    value: float


PositiveInt = Annotated[int, Minimum(1)]
NonNegativeInt = Annotated[int, Minimum(0)]


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """Properties of an option besides its name and its type.

    Attributes:
        metavar: Value in the help of the command line. None for a flag.
        help: The sentence about the option, in the words of the command line.
        more: Further facts, for the reference of the Python functions.
        default: Value of an omitted option, or REQUIRED.
        flag: Option of the command line, if it is not `--` and the name of the field, or its name in OPTION_NAMES.
        short: Its short form, e.g. `-q`.
        is_count: Whether the value is the number of times that the option is given.
        cli_type: Type on the command line, if it does not follow from the annotation.
        parse: Function from each text of a repeated option to an item of the argument.
        maximum: Greatest value of a number on the command line.
        environment: Environment variable that replaces the option.
        position: Place in the help. Equal positions keep the order of the fields.
        record: Place in the recorded command line, or NOT_RECORDED. It never changes, because the line is part of each
            manifest.
    """

    metavar: str | None
    help: str
    more: str = ""
    default: Any = None
    flag: str = ""
    short: str = ""
    is_count: bool = False
    cli_type: Any = None
    parse: Callable[[str], Any] | None = None
    maximum: int | None = None
    environment: str | None = None
    position: int = 10
    record: int | None = NOT_RECORDED

    def flag_of(self, name: str) -> str:
        """Return the option of the command line for the field `name`, e.g. `scan_axis` -> `--scan-axis`."""
        return self.flag or f"--{OPTION_NAMES.get(name, name).replace('_', '-')}"

    def is_negated(self, name: str) -> bool:
        """Return whether the option sets the field `name` to False, e.g. `--no-verify` the field `verify`."""
        return self.flag == f"--no-{name}"

    def reference(self, name: str) -> str:
        """Return the text for the reference of the Python functions, in which options are arguments."""
        sentence = self.help.replace("Repeatable", "One or several")
        sentence = re.sub(r"^With --\w+: (\w)", lambda match: match[1].upper(), sentence)
        if self.is_negated(name):
            sentence = f"If False, {sentence[0].lower()}{sentence[1:]}"
        sentence = re.sub(
            r"--([a-z][a-z-]*)", lambda match: f"`{match[1].replace('-', '_')}`", sentence
        )
        parts = [sentence, self.more]
        if self.default is REQUIRED:
            parts.append("Required.")
        elif self.default not in (None, ()):
            default = f'"{self.default}"' if isinstance(self.default, str) else self.default
            parts.append(f"Default: {default}.")
        value = f" ({self.metavar})" if self.metavar else ""
        return f"`{name}`{value}: {' '.join(filter(None, parts))}"


# An option is a field of a TypedDict, or a parameter of a command, with one of these.
option = OptionSpec


def flag(help: str, **properties: Any) -> OptionSpec:
    """Return an option without a value. It is off by default."""
    return OptionSpec(None, help, default=False, **properties)


# Each command evaluates the annotations of the same few types several times.
@cache
def option_rows(options: type) -> Mapping[str, tuple[Any, OptionSpec]]:
    """Return the type and the specification of each option of a TypedDict, by name."""
    rows: dict[str, tuple[Any, OptionSpec]] = {}
    for name, annotation in get_type_hints(options, include_extras=True).items():
        for item in getattr(annotation, "__metadata__", ()):
            if isinstance(item, OptionSpec):
                rows[name] = (annotation, item)
    return rows


@cache
def option_specs(options: type) -> Mapping[str, OptionSpec]:
    """Return the specification of each option of a TypedDict that has one.

    >>> from prepcli.commands.operations.options import DropOptions
    >>> option_specs(DropOptions)["untie"].default
    False
    """
    return {name: spec for name, (_, spec) in option_rows(options).items()}


def with_defaults(options: type[Options], values: Mapping[str, object]) -> Options:
    """Return the values of all options, with the default of each option that has no value.

    >>> from prepcli.commands.operations.options import DropOptions
    >>> with_defaults(DropOptions, {"untie": True})
    {'drop': (), 'untie': True}
    """
    defaults = {name: spec.default for name, spec in option_specs(options).items()}
    # The values come from a call or a command, which checks their types.
    return cast("Options", {**defaults, **values})


def format_command_line(
    command: str, source_name: str, options: type, values: Mapping[str, object]
) -> str:
    """Return the command line of a request as manifests record it, without options at their defaults.

    Args:
        command: Name of the command.
        source_name: The checkpoint, as errors name it.
        options: TypedDict of the options.
        values: Values of the options.

    >>> from prepcli.commands.operations.options import PadVocabOptions
    >>> format_command_line("pad-vocab", "m", PadVocabOptions, {"size": 8, "drop": ("a", "b")})
    'prep pad-vocab m --size 8 --drop a --drop b'
    """
    specs = option_specs(options)
    places = {
        name: each.record or 0 for name, each in specs.items() if each.record is not NOT_RECORDED
    }
    # The sort is stable: equal places keep the order of the TypedDict. An existing output is recognised by this line,
    # so its order may not change between versions.
    recorded = sorted(places, key=places.__getitem__)
    words = [f"prep {command} {source_name}"]
    for name in recorded:
        value = values.get(name, specs[name].default)
        if value != specs[name].default:
            words += _option_words(specs[name].flag_of(name), value)
    return " ".join(words)


def recorded_words(line: str, command: str, source_name: str) -> list[str]:
    """Return the options of a recorded command line as words. Empty if it has another command or source.

    The line is not quoted, so the name of the source is no part of the words.

    Args:
        line: Result of `format_command_line`.
        command: Name of the command.
        source_name: The checkpoint, as the line names it.

    >>> recorded_words("prep pad-vocab my model --size 8", "pad-vocab", "my model")
    ['--size', '8']
    """
    prefix = f"prep {command} {source_name}"
    if line != prefix and not line.startswith(f"{prefix} "):
        return []
    return line.removeprefix(prefix).split()


def _option_words(flag: str, value: object) -> list[str]:
    """Return the words that set an option, e.g. `--scan/--no-scan`, False -> `--no-scan`."""
    on, _, off = flag.partition("/")
    # `is`, because the number 1 equals True and would lose its value.
    if value is True:
        return [on]
    if value is False:
        return [off]
    if isinstance(value, tuple | list):
        items: Sequence[object] = value
        return [f"{on} {item}" for item in items]
    return [f"{on} {value}"]


def as_tuple(texts: str | Sequence[str]) -> tuple[str, ...]:
    """Return a sequence of texts as a tuple. One text stands for itself.

    >>> as_tuple("embed=none")
    ('embed=none',)
    """
    return (texts,) if isinstance(texts, str) else tuple(texts)
