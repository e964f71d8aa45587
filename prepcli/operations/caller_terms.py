"""State the errors and warnings of commands in the terms of Python callers: `--memory 1GiB` as `memory="1GiB"`."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from prepcli.errors import PrepError
from prepcli.operations.arguments import choices_of
from prepcli.operations.option_spec import PathLike
from prepcli.operations.options import OPTIONS_BY_COMMAND

# Command-line options with another name as arguments of the Python functions.
ARGUMENT_NAMES = {"prompt": "prompts", "rule": "rules", "set": "overrides"}
FUNCTIONS_WITHOUT_OPTIONS = (
    "inspect",
    "verify",
)  # commands with translated arguments, but without translated options

_SPAN = re.compile(r"`([^`]+)`")
_BARE_OPTION = re.compile(r"(?<![\w`-])--([a-z][a-z-]*)(?: (\w+))?")


def restated(error: PrepError, annotations: Mapping[str, Any]) -> PrepError:
    """Return an error with arguments of Python functions in place of command-line options.

    Options that neither the called function nor a conversion has stay as they are, as do commands without a function.

    Args:
        error: The error. The returned one has its class and its traceback.
        annotations: Annotations of the arguments of the function that was called, by name.
    """
    return error.with_texts(
        what=to_callers_terms(error.what, annotations),
        why=to_callers_terms(error.why, annotations),
        hint=to_callers_terms(error.hint, annotations),
    )


def to_callers_terms(text: str, annotations: Mapping[str, Any]) -> str:
    """Return a text of a command with arguments of Python functions in place of command-line options."""
    parts = _SPAN.split(text)  # every second part is between backticks
    return "".join(
        _translate_span(part, annotations) if number % 2 else _translate_bare(part, annotations)
        for number, part in enumerate(parts)
    )


def _translate_span(span: str, annotations: Mapping[str, Any]) -> str:
    """Translate options or a command in backticks to Python.

    Keep it unchanged if a part is unknown.
    """
    # shlex raises ValueError for an unbalanced quote. KeyError means an option that no function has.
    with contextlib.suppress(ValueError, KeyError):
        words = shlex.split(span)
        if words and words[0].startswith("--"):
            return _translate_options(words, annotations)
        if len(words) > 1 and words[0] == "prep":
            return f"`{_translate_command(words[1], words[2:])}`"
    return f"`{span}`"


def _translate_options(words: list[str], annotations: Mapping[str, Any]) -> str:
    """Return the arguments for options of the called function, or else of a conversion, which is named too."""
    with contextlib.suppress(KeyError):
        return f"`{', '.join(_translate_words(words, annotations))}`"
    for command, schema in OPTIONS_BY_COMMAND.items():
        with contextlib.suppress(KeyError):
            return f"`{', '.join(_translate_words(words, _hints(schema)))}` of `{_function_name(command)}`"
    raise KeyError(words[0])


def conversion_annotations(command: str) -> Mapping[str, Any]:
    """Return the annotations of the arguments of a conversion's function.

    Raise KeyError if the command is no conversion.
    """
    return {"out": PathLike, **_hints(OPTIONS_BY_COMMAND[command])}


def _hints(schema: type) -> dict[str, Any]:
    return get_type_hints(schema, include_extras=True)


def _function_name(command: str) -> str:
    return f"prep.{command.replace('-', '_')}"


def _translate_command(command: str, words: list[str]) -> str:
    """Return the call of the function of a command.

    Raise KeyError if there is none, or an option is unknown.
    """
    annotations: Mapping[str, Any] = (
        {} if command in FUNCTIONS_WITHOUT_OPTIONS else conversion_annotations(command)
    )
    arguments = ", ".join(_translate_words(words, annotations))
    return _function_name(command) + (f"({arguments})" if arguments else "")


def _translate_words(words: list[str], annotations: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments of a call. Raise KeyError if an option is unknown."""
    remaining = words[::-1]
    while remaining:
        word = remaining.pop()
        if not word.startswith("--"):
            yield f'"{word}"'
            continue
        name, flag_value = _argument_of(word[2:], annotations)
        has_value = bool(remaining) and flag_value is None and not remaining[-1].startswith("--")
        yield _format_argument(
            name, flag_value, remaining.pop() if has_value else None, annotations[name]
        )


def _argument_of(option: str, annotations: Mapping[str, Any]) -> tuple[str, bool | None]:
    """Return the argument of an option, and the value that the option alone sets.

    Raise KeyError if the option is unknown.
    """
    name = ARGUMENT_NAMES.get(option, option.replace("-", "_"))
    # `--no-verify` sets `verify=False`. An argument with a name that begins with `no_` keeps its name.
    is_negated = name not in annotations and name.startswith("no_")
    name = name.removeprefix("no_") if is_negated else name
    is_flag = bool in choices_of(annotations[name])
    return name, (not is_negated if is_flag else None)


def _format_argument(name: str, flag_value: bool | None, value: str | None, annotation: Any) -> str:
    if flag_value is not None:
        return f"{name}={flag_value}"
    if value is None:
        return name
    if name == "tokens":
        return f"{name}=[[{', '.join(value.split(','))}]]"
    choices = {type(option) for option in _literals(annotation)} | {*choices_of(annotation)}
    is_number = str not in choices and bool({int, float} & choices)
    return f"{name}={value}" if is_number else f'{name}="{value}"'


def _literals(annotation: Any) -> list[Any]:
    """Return the values that the literals of an annotation list."""
    return [
        value
        for choice in choices_of(annotation)
        if get_origin(choice) is Literal
        for value in get_args(choice)
    ]


def _translate_bare(text: str, annotations: Mapping[str, Any]) -> str:
    """Return text outside backticks.

    A word after an option is its value if the annotation lists it.
    """

    def replace(match: re.Match[str]) -> str:
        try:
            name, flag_value = _argument_of(match[1], annotations)
        except KeyError:
            return match[0]
        is_value = match[2] in _literals(annotations[name])
        rest = f" {match[2]}" if match[2] and not is_value else ""
        return (
            _format_argument(name, flag_value, match[2] if is_value else None, annotations[name])
            + rest
        )

    return _BARE_OPTION.sub(replace, text)
