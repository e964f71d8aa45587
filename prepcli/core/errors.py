"""The errors with a message for the user, their references to options and keys, and the exit codes.

One error is read in two places: in a terminal, where `--memory 1GiB` fixes it, and in a Python program, where
`memory="1GiB"` does. A message therefore refers to an option instead of quoting it, and each place renders the
reference in its own words.

>>> hint = text("{} or more", Option("memory", "1GiB"))
>>> hint
'`--memory 1GiB` or more'
>>> hint.render(PYTHON)
'`memory="1GiB"` or more'
"""

from __future__ import annotations

import copy
import json
import shlex
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Literal, Protocol, Self, SupportsIndex

OK = 0
FAILED = 1
USAGE = 2
# EX_TEMPFAIL of sysexits.h: the same command may succeed later.
STOPPED = 75
# 128 + 2, as shells report a process that SIGINT ended.
INTERRUPTED = 130

GET_AGAIN_HINT = "get or create the checkpoint again"
INVALID_CONFIG = "config.json is invalid"  # a value in it is
BROKEN_CONFIG_HINT = "correct it, or get it again"
RERUN_HINT = "run the same command again"
RESUME_HINT = f"{RERUN_HINT} to resume"

# Options of the command line whose argument in Python has another name: several values are given by repeating one
# option, but by one argument with a list.
OPTION_NAMES = {
    "metrics": "metric",
    "overrides": "set",
    "prompts": "prompt",
    "prompts_file": "prompts",
    "rules": "rule",
}
# Command -> Python function. Errors name the function to a Python caller, and the command on the command line. Other
# commands, such as `prep demo`, have no function: errors name the command in both.
FUNCTION_NAMES = {
    "add-tokens": "add_tokens",
    "eval": "evaluate",
    "export": "export",
    "generate": "generate",
    "inspect": "inspect",
    "merge": "merge",
    "pad-vocab": "pad_vocab",
    "plan": "plan",
    "remove-tokens": "remove_tokens",
    "report": "report",
    "reshard": "reshard",
    "save-init": "save_init",
    "train": "train",
    "verify": "verify",
}


class NoValue(Enum):
    """Value of a reference to an option or a key without a value. It stays the same object in a pickled error."""

    NO_VALUE = "no value"


NO_VALUE = NoValue.NO_VALUE


class Reference(Protocol):
    """Part of a message that depends on the style, e.g. `--mesh 1,8,1` or `mesh="1,8,1"`."""

    def render(self, style: Style, /) -> str:
        """Return the text in a style."""
        ...


@dataclass(frozen=True, slots=True)
class Style:
    """How messages name options and recipe keys.

    Attributes:
        language: `terminal` for options, `python` for arguments.
        variables: Environment variables that gave the values of options, by the option's name in Python: a reference
            to such an option names the variable, e.g. `PREP_MEMORY=abc` instead of `--memory abc`.
        rename_key: Function from a recipe key to the reference that replaces it, or None to keep the key. Commands
            without a recipe have it, e.g. `data.fields` is `--fields` for `prep eval`.
    """

    language: Literal["terminal", "python"]
    variables: Mapping[str, str] = field(default_factory=dict)
    rename_key: Callable[[Key], Reference | None] = lambda key: None


TERMINAL = Style("terminal")
PYTHON = Style("python")


@dataclass(frozen=True, slots=True)
class Option:
    """Reference to an option of a command, or to the same argument of its function.

    >>> str(text("{}", Option("keep_padding", True))), str(text("{}", Option("verify", False)))
    ('`--keep-padding`', '`--no-verify`')
    >>> tokens = text("{}", Option("tokens", [[1, 2, 3]]))
    >>> tokens.render(TERMINAL), tokens.render(PYTHON)
    ('`--tokens 1,2,3`', '`tokens=[[1, 2, 3]]`')

    Attributes:
        name: Name of the argument in Python, e.g. `keep_padding`.
        value: Its value, or a placeholder in capitals, e.g. `FOLDER`. True and False are flags. A list is given by
            repeating the option, each time with one item.
    """

    name: str
    value: object = NO_VALUE

    def render(self, style: Style, /) -> str:
        """Return the option in backticks, e.g. `--memory 1GiB` or `memory="1GiB"`."""
        return f"`{self.words(style)}`"

    def words(self, style: Style) -> str:
        """Return the option without backticks."""
        if style.language == "python":
            return (
                self.name
                if self.value is NO_VALUE
                else f"{self.name}={_python_literal(self.value)}"
            )
        if variable := style.variables.get(self.name):
            return variable if self.value is NO_VALUE else f"{variable}={self.value}"
        flag = OPTION_NAMES.get(self.name, self.name).replace("_", "-")
        if self.value is False:
            return f"--no-{flag}"
        if self.value is True or self.value is NO_VALUE:
            return f"--{flag}"
        if isinstance(self.value, list):
            return " ".join(Option(self.name, _item_text(item)).words(style) for item in self.value)
        value = str(self.value)
        if self.name == "overrides":
            # `--set data.fields='[a], b'`, with the key outside of the quotes
            key, equals, value = value.partition("=")
            return f"--{flag} {key}{equals}{shlex.quote(value) if value else ''}"
        return f"--{flag} {shlex.quote(value)}"


@dataclass(frozen=True, slots=True)
class Key:
    """Reference to a key of a recipe.

    >>> text("{} or {}", Key("train.steps", 10), Key("mesh", "1,8,1", is_override=True))
    '`train.steps = 10` or `--set mesh=1,8,1`'

    Attributes:
        name: The key with its table, e.g. `train.steps`.
        value: Its value.
        is_override: Whether the value comes from `--set` or `overrides` instead of the recipe.
    """

    name: str
    value: object = NO_VALUE
    is_override: bool = False

    def render(self, style: Style, /) -> str:
        """Return the key or its recipe line in backticks, or the option or variable that `style` names instead."""
        replacement = style.rename_key(self)
        if replacement is not None:
            return replacement.render(style)
        if self.is_override:
            return Option("overrides", f"{self.name}={override_text(self.value)}").render(style)
        if self.value is NO_VALUE:
            return f"`{self.name}`"
        return f"`{self.name} = {_toml_literal(self.value)}`"


class Command:
    """Reference to a command, or to a call of its function.

    >>> command = Command("pad-vocab", "./m", Option("multiple", 8))
    >>> command.render(TERMINAL), command.render(PYTHON)
    ('`prep pad-vocab ./m --multiple 8`', '`prep.pad_vocab("./m", multiple=8)`')
    """

    def __init__(self, name: str, *arguments: str | Option):
        """Refer to a command.

        Args:
            name: Name of the command, e.g. `pad-vocab`.
            *arguments: Its arguments and options, in their order.
        """
        self.name = name
        self.arguments = arguments

    def render(self, style: Style, /) -> str:
        """Return the command line or the call in backticks."""
        if style.language == "python" and self.name in FUNCTION_NAMES:
            return f"`prep.{FUNCTION_NAMES[self.name]}({', '.join(self._argument_texts(style))})`"
        return f"`{' '.join(['prep', self.name, *self._argument_texts(TERMINAL)])}`"

    def _argument_texts(self, style: Style) -> list[str]:
        """Return the arguments as words of a shell command or of Python."""
        words: list[str] = []
        for argument in self.arguments:
            if isinstance(argument, Option):
                words.append(argument.words(style))
            elif style.language == "python":
                words.append(_python_literal(argument))
            else:
                words.append(shlex.quote(argument))
        return words


class Text(str):
    """Text with references. As a `str` it is the text for a terminal.

    Attributes:
        parts: The pieces of the text and the references between them.
    """

    parts: tuple[str | Reference, ...]

    def __new__(cls, *parts: str | Reference) -> Self:
        """Return a text of words and references to options, recipe keys and commands."""
        instance = super().__new__(cls, _render_parts(parts, TERMINAL))
        instance.parts = parts
        return instance

    def __reduce__(self) -> tuple[type[Self], tuple[str | Reference, ...]]:
        # pickle and copy make the text again from its parts
        return type(self), self.parts

    def replace(self, old: str, new: str, /, count: SupportsIndex = -1) -> Text:
        """Return the text with other words in its pieces. The references stay as they are."""
        pieces: list[str | Reference] = []
        for part in self.parts:
            pieces.append(part.replace(old, new, count) if isinstance(part, str) else part)
        return Text(*pieces)

    def render(self, style: Style) -> str:
        """Return the text for a terminal, in Python or in a recipe."""
        return _render_parts(self.parts, style)


def text(template: str, *values: object) -> Text:
    """Return a text from a template and the values of its braces.

    A value with a name or a number from a user's file belongs into `values`, never into the template, which would
    read its braces.

    >>> text("{} has {:,} rows, {} needs another number", "w", 50257, Option("mesh", "1,8,1"))
    'w has 50,257 rows, `--mesh 1,8,1` needs another number'

    Args:
        template: Text with `{}` or `{:FORMAT}` for each value, as in `str.format`.
        *values: References, texts with references, and other values.
    """
    parts: list[str | Reference] = []
    remaining = iter(values)
    for literal, name, spec, _ in string.Formatter().parse(template):
        if literal:
            parts.append(literal)
        if name is None:
            continue
        value = next(remaining)
        if isinstance(value, Text):
            parts.extend(value.parts)
        elif isinstance(value, Option | Key | Command):
            parts.append(value)
        else:
            parts.append(format(value, spec or ""))
    return Text(*parts)


def join_texts(separator: str, texts: list[str]) -> Text:
    """Return texts with a separator between them. Keep the references of each."""
    return text(separator.join(["{}"] * len(texts)), *texts)


class PrepError(Exception):
    """An error with a message for the user.

    `str(error)` is the message for Python programs. The command line renders the same error for a terminal.

    Attributes:
        what: What failed.
        why: The cause, with the value that caused it (both values if two disagree).
        hint: The command or key that fixes it.
        code: Exit code of the process.
    """

    def __init__(self, what: str, why: str = "", hint: str = "", code: int = FAILED):
        # pickle makes the error again from `args`.
        super().__init__(what, why, hint, code)

    @property
    def what(self) -> str:
        """What failed."""
        return self.args[0]

    @property
    def why(self) -> str:
        """The cause."""
        return self.args[1]

    @property
    def hint(self) -> str:
        """The command or key that fixes it."""
        return self.args[2]

    @property
    def code(self) -> int:
        """Exit code of the process."""
        return self.args[3]

    @property
    def message(self) -> Text:
        """The whole message with its references, for another message that contains it."""
        return join_texts(" - ", [part for part in (self.what, self.why, self.hint) if part])

    def __str__(self) -> str:
        return self.message.render(PYTHON)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback."""
        lines = [f"{type(self).__name__}: {render_text(self.what, PYTHON)}"]
        for label, part in (("why", self.why), ("hint", self.hint)):
            if part:
                lines.append(f"{label:>5}: {render_text(part, PYTHON)}")
        return lines

    def with_texts(
        self, *, what: str | None = None, why: str | None = None, hint: str | None = None
    ) -> Self:
        """Return the same error with other texts, with its class, code, notes, cause and traceback."""
        error = copy.copy(self)
        error.args = (
            self.what if what is None else what,
            self.why if why is None else why,
            self.hint if hint is None else hint,
            self.code,
        )
        # `copy` makes the error again from `args` and `__dict__`, which have no cause and no traceback.
        error.__cause__ = self.__cause__
        error.__context__ = self.__context__
        error.__suppress_context__ = self.__suppress_context__
        return error.with_traceback(self.__traceback__)

    def rendered(self, style: Style) -> Self:
        """Return the same error with texts rendered in a style."""
        return self.with_texts(
            what=render_text(self.what, style),
            why=render_text(self.why, style),
            hint=render_text(self.hint, style),
        )

    def fields(self) -> dict[str, str | int]:
        """Return the texts for a terminal and the code, by name, as JSON has them."""
        return {
            "what": str(self.what),
            "why": str(self.why),
            "hint": str(self.hint),
            "code": self.code,
        }


class UsageError(PrepError):
    """An invalid request, found before anything was read or written. Its exit code is 2."""


class DamagedError(PrepError):
    """A checkpoint's files are damaged: get or create them again.

    Bytes differ from their recorded digest or checksum, a file is missing or cut short, or a header, an index, a
    manifest or other metadata is malformed.
    """


class OutputExistsError(PrepError):
    """The output exists and is not the result of this request."""


def usage_error(what: str, why: str = "", hint: str = "") -> UsageError:
    """Return the error of an invalid request, with its exit code."""
    return UsageError(what, why, hint, USAGE)


def invalid_config_error(why: str) -> PrepError:
    """Return the error of a value in a config.json."""
    return PrepError(INVALID_CONFIG, why, BROKEN_CONFIG_HINT)


def unsupported_config_error(what: str, why: str) -> PrepError:
    """Return the error of a config.json of a model that prep does not compute."""
    hint = text("{} lists checkpoints of supported models", Command("models"))
    return PrepError(what, why, hint)


def render_text(message: str, style: Style) -> str:
    """Render a message in a style. A plain `str` has no references and stays as it is."""
    return message.render(style) if isinstance(message, Text) else message


def _render_parts(parts: tuple[str | Reference, ...], style: Style) -> str:
    """Join texts and references, the references in the given style."""
    words: list[str] = []
    for part in parts:
        if isinstance(part, str):
            words.append(render_text(part, style))
        else:
            words.append(part.render(style))
    return "".join(words)


def _item_text(item: object) -> str:
    """Return one value of a repeated option. Token ids have commas between them."""
    if isinstance(item, list):
        return ",".join(map(str, item))
    return str(item)


def _python_literal(value: object) -> str:
    """Return a value as Python writes it, with texts in double quotes."""
    if isinstance(value, str | PurePath):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_python_literal, value))}]"
    return str(value)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the one that it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def override_text(value: object) -> str:
    """Return a value as `--set` takes it: like TOML, but texts without quotes, and nothing for an absent key."""
    if value is None:
        return ""
    return value if isinstance(value, str) else _toml_literal(value)


def _toml_literal(value: object) -> str:
    """Return a value as TOML writes it: like Python, but with `true` and `false`."""
    if isinstance(value, bool):
        return str(value).lower()
    return _python_literal(value)
