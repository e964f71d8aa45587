"""The decorator of the public operations."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from prepcli.core.errors import (
    PYTHON,
    Option,
    PrepError,
    join_texts,
    render_text,
    text,
    usage_error,
)
from prepcli.core.formatting import did_you_mean
from prepcli.core.observer import CommandObserver, Observer, Progress
from prepcli.core.option_spec import Minimum, with_defaults

PROGRESS_TYPE = "Progress, an object with the methods begin, advance, note and end"
# Arguments with the path of a file or a folder. `sources.references` expands the names of checkpoints, which outputs
# record as the user spelled them.
PATH_ARGUMENTS = frozenset(
    {
        "adapter",
        "cache",
        "html",
        "lock",
        "map",
        "out",
        "prompt_ids",
        "prompts_file",
        "recipe",
        "tokenizer",
        "tokens",
        "tools",
    }
)


@cache
def annotations_of(function: Callable[..., object]) -> Mapping[str, Any]:
    """Return the annotation of each argument of a function, by name."""
    hints = get_type_hints(function, include_extras=True)
    annotations: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            (schema,) = get_args(hints[name])
            annotations |= get_type_hints(schema, include_extras=True)
        else:
            annotations[name] = hints[name]
    return annotations


def check_arguments(arguments: Mapping[str, object], annotations: Mapping[str, Any]) -> None:
    """Check the names, types and ranges of arguments.

    Raises:
        UsageError: An argument is unknown, empty, too small, or has the wrong type.
    """
    for name, value in arguments.items():
        if name not in annotations:
            supported = ", ".join(sorted(annotations))
            raise usage_error(
                f"unknown option `{name}`",
                f"supported: {supported}",
                did_you_mean(name, annotations),
            )
        annotation = annotations[name]
        if not _value_matches(value, annotation):
            raise usage_error(
                f"invalid `{name}={value!r:.60}`",
                f"the expected type is {type_text(annotation)}",
                "pass a value of this type",
            )
        if value == "":
            raise usage_error(
                f"invalid `{name}=''`", "it is empty", f"omit `{name}`, or give it a value"
            )
        minimum = minimum_of(annotation)
        # NaN is below each minimum.
        if minimum is not None and isinstance(value, int | float) and not value >= minimum:
            raise usage_error(
                f"invalid `{name}={value}`", f"it must be at least {minimum}", f"`{name}={minimum}`"
            )


def choices_of(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or else the annotation itself, without the metadata of `Annotated`."""
    if get_origin(annotation) is Annotated:
        return choices_of(get_args(annotation)[0])
    if get_origin(annotation) in (UnionType, Union):
        return tuple(choice for member in get_args(annotation) for choice in choices_of(member))
    return (annotation,)


def type_text(annotation: Any) -> str:
    """Return an annotation as text, such as `int | None`."""
    return " | ".join(map(_choice_text, choices_of(annotation)))


def _choice_text(choice: Any) -> str:
    if choice is NoneType:
        return "None"
    if choice is Progress:
        return PROGRESS_TYPE
    if choice is Observer:
        return "Observer"
    if get_origin(choice) is Literal:
        return " | ".join(map(repr, get_args(choice)))
    if get_origin(choice) is Sequence:
        return f"Sequence[{type_text(*get_args(choice))}]"
    if get_origin(choice) is Callable:
        return "a function"
    return choice.__name__


def _value_matches(value: object, annotation: Any) -> bool:
    """Return whether a value has a type. A bool is not an integer, a text is not a sequence, an integer is a float."""
    return any(_matches_choice(value, choice) for choice in choices_of(annotation))


def _matches_choice(value: object, choice: Any) -> bool:
    if get_origin(choice) is Literal:
        # The types are compared too, because 1 == True == 1.0 in Python.
        return any(type(value) is type(option) and value == option for option in get_args(choice))
    if get_origin(choice) is Sequence:
        # A str is a Sequence of str: without the first test "ab" would pass as ["a", "b"].
        if isinstance(value, str) or not isinstance(value, Sequence):
            return False
        items: Sequence[Any] = value
        return all(_value_matches(item, *get_args(choice)) for item in items)
    if get_origin(choice) in (Mapping, Callable):
        return isinstance(value, get_origin(choice))
    if choice is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    # A bool is an int for `isinstance`. A class has the methods of the runtime-checkable protocol Progress, but it is
    # not an instance.
    return isinstance(value, choice) and (choice is bool or not isinstance(value, bool | type))


def minimum_of(annotation: Any) -> float | None:
    """Return the least valid value that an annotation, or a member of a union, names."""
    for item in getattr(annotation, "__metadata__", ()):
        if isinstance(item, Minimum):
            return item.value
    if get_origin(annotation) in (UnionType, Union, Annotated):
        # The bound may be nested: in `Annotated[Annotated[int, Minimum(2)] | None, OptionSpec(...)]` it is two levels
        # down.
        for member in get_args(annotation):
            bound = minimum_of(member)
            if bound is not None:
                return bound
    return None


# --- Exclusive and dependent options


def check_mutually_exclusive(options: Mapping[str, object]) -> None:
    """Raise UsageError if more than one of these options has a value."""
    names = [name for name, value in options.items() if _is_set(value)]
    if len(names) > 1:
        values = _join_options(" and ", [Option(name, options[name]) for name in names])
        raise usage_error(
            text("{} exclude each other", values),
            "each alone determines the result",
            text("pass only one of {}", _join_options(", ", [Option(name) for name in names])),
        )


def reject_without(option: Option, value: object, needed: Option, why: str) -> None:
    """Raise UsageError if `option` is set. It requires `needed`, and the caller knows that to be unset."""
    if _is_set(value):
        raise usage_error(
            text("{} has no effect without {}", option, needed),
            why,
            text("add {}, or remove {}", needed, option),
        )


def _join_options(separator: str, options: Sequence[Option]) -> str:
    return join_texts(separator, [text("{}", option) for option in options])


def _is_set(value: object) -> bool:
    # 0 is a value that a caller set, e.g. `seed=0`. Only None and False mean an omitted option.
    return value is not None and value is not False


P = ParamSpec("P")
R = TypeVar("R")


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that checks its arguments and adds the defaults of its options.

    With the defaults, an operation reads each option as `options["NAME"]`. A command passes a CommandObserver. Its
    arguments are checked already, and its errors keep the names of command-line options.
    """
    parameters = inspect.signature(function).parameters.values()
    positional_names = [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]

    # The defaults belong to keyword options. The decorator does not know their types.
    operation: Callable[..., R] = function

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = {**dict(zip(positional_names, args)), **kwargs}
        is_command = isinstance(kwargs.get("progress"), CommandObserver)
        if not is_command:
            check_arguments(given, annotations_of(function))
        names = [*positional_names, *[""] * len(args)]
        values = [expand_path(name, value) for name, value in zip(names, args)]
        arguments = {name: expand_path(name, value) for name, value in kwargs.items()}
        schema = _options_of(function)
        if schema is not None:
            arguments = with_defaults(schema, arguments)
        if is_command:
            return operation(*values, **arguments)
        try:
            return _render_warnings(operation(*values, **arguments))
        except PrepError as error:
            raise _python_error(error) from error.__cause__

    return call


def expand_path(name: str, value: object) -> object:
    """Return the value of an argument with the home folder in place of the `~` of a path.

    Shells leave it in `--out=~/NAME`, and Python in every text. The output would be in a folder called `~`.
    """
    if name not in PATH_ARGUMENTS or not isinstance(value, str | Path):
        return value
    path = str(value)
    # `expanduser` would also look up `~name` as a user, but a file may have this name.
    if path == "~" or path.startswith("~/"):
        path = os.path.expanduser(path)
    is_url = "://" in path
    if name == "out" and ".." in Path(path).parts and not is_url:
        path = _without_missing_folders(path)
    if path == str(value):
        return value
    return type(value)(path)


def _without_missing_folders(path: str) -> str:
    """Return a path without missing folders that `..` leaves again, e.g. `new/../a` -> `a`.

    They would be made on the way to the output, and stay empty.
    """
    kept: list[str] = []
    for part in Path(path).parts:
        if part == ".." and kept and not os.path.lexists(Path(*kept)):
            kept.pop()
        else:
            kept.append(part)
    return str(Path(*kept))


def _python_error(error: PrepError) -> PrepError:
    """Return an error for Python: with argument names, and without the frames of prep in its traceback.

    The message says what to do. Errors that prep does not expect keep their whole traceback.
    """
    return error.rendered(PYTHON).with_traceback(None)


def _render_warnings(result: Any) -> Any:
    """Return a result with warnings that name Python arguments, e.g. `pad_vocab=8` in place of `--pad-vocab 8`."""
    warnings: tuple[str, ...] = getattr(result, "warnings", ())
    if not warnings:
        return result
    warnings = tuple(render_text(warning, PYTHON) for warning in warnings)
    return replace(result, warnings=warnings)


@contextmanager
def rendered_for_python() -> Iterator[None]:
    """Render errors in the `with` block for Python: with argument names in place of command options.

    `public` does it for the call of a function. A context manager raises when it is entered, after its call.
    """
    try:
        yield
    except PrepError as error:
        raise _python_error(error) from error.__cause__


@functools.cache
def _options_of(function: Callable[..., object]) -> type[Mapping[str, object]] | None:
    """Return the TypedDict of `**options: Unpack[X]`, or None if a function takes no such options."""
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            (schema,) = get_args(get_type_hints(function, include_extras=True)[name])
            return schema
    return None
