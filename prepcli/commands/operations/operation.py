"""The decorator of the public operations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

from prepcli.commands.operations.arguments import annotations_of, check_arguments
from prepcli.commands.operations.results import Conversion
from prepcli.core.errors import PYTHON, PrepError, render_text
from prepcli.core.observer import CommandObserver
from prepcli.core.option_spec import with_defaults

P = ParamSpec("P")
R = TypeVar("R")


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that checks its arguments and adds the defaults of its options.

    With the defaults, an operation reads each option as `options["NAME"]`. A command passes a CommandObserver. Its
    arguments are checked already, and its errors keep the names of command-line options.

    Args:
        function: Function with annotations that describe its arguments.
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
        arguments: Mapping[str, object] = kwargs
        schema = _options_of(function)
        if schema is not None:
            arguments = with_defaults(schema, kwargs)
        if isinstance(kwargs.get("progress"), CommandObserver):
            return operation(*args, **arguments)
        given = {**dict(zip(positional_names, args)), **kwargs}
        check_arguments(given, annotations_of(function))
        try:
            return _render_warnings(operation(*args, **arguments))
        except PrepError as error:
            raise error.rendered(PYTHON) from error.__cause__

    return call


def _render_warnings(result: Any) -> Any:
    """Return a result with warnings that name Python arguments, e.g. `pad_vocab=8` in place of `--pad-vocab 8`."""
    if not isinstance(result, Conversion) or not result.warnings:
        return result
    warnings = tuple(render_text(warning, PYTHON) for warning in result.warnings)
    return replace(result, warnings=warnings)


@contextmanager
def rendered_for_python() -> Iterator[None]:
    """Render errors in the `with` block for Python: with argument names in place of command options.

    `public` does it for the call of a function. A context manager raises when it is entered, after its call.
    """
    try:
        yield
    except PrepError as error:
        raise error.rendered(PYTHON) from error.__cause__


@functools.cache
def _options_of(function: Callable[..., object]) -> type[Mapping[str, object]] | None:
    """Return the TypedDict of `**options: Unpack[X]`, or None if a function takes no such options."""
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            (schema,) = get_args(get_type_hints(function, include_extras=True)[name])
            return schema
    return None
