"""The decorator of the public functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from prepcli.api.arguments import annotations_of, check_arguments
from prepcli.api.caller_terms import restate
from prepcli.errors import PrepError

P = ParamSpec("P")
R = TypeVar("R")


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that checks its arguments, and whose errors name them instead of command-line options.

    Args:
        function: Function whose annotations describe its arguments.
    """
    parameters = inspect.signature(function).parameters.values()
    positional_names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        annotations = annotations_of(function)
        check_arguments({**dict(zip(positional_names, args)), **kwargs}, annotations)
        try:
            return function(*args, **kwargs)
        except PrepError as error:
            restate(error, annotations)
            raise

    return call
