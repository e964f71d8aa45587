"""A job that `prep launch` describes: a recipe, and the environment of its processes. The functions do no I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from prepcli.errors import Option, Text, text, usage_error

# Restarts of a job that exits with 75 each time.
MAX_RESTARTS = 100
DEFAULT_GRACE_S = 120

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# RFC 1035, short enough for the suffixes of pods.
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """A training that several processes run.

    Attributes:
        recipe: Path of the recipe, as the processes see it.
        name: Name of the job.
        train_words: Further words of `prep train`.
        setup: Shell lines that run before the training.
        env: Environment variables.
        max_restarts: Maximal number of restarts of a job that exits with 75 or is killed.
    """

    recipe: str
    name: str
    train_words: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    max_restarts: int = MAX_RESTARTS

    def __post_init__(self) -> None:
        """Check that a shell script can contain the texts. Raise UsageError otherwise."""
        check_text(text("{}", Option("job_name")), self.name)
        check_text("RECIPE", self.recipe)
        for line in self.setup:
            check_text(text("{}", Option("setup")), line)
        for name, value in self.env:
            check_variable(name)
            _check_no_null(text("{}", Option("env", name)), value)
        for word in self.train_words:
            _check_no_null("a word after `--`", word)

    @property
    def command(self) -> tuple[str, ...]:
        """Words of the command of each process."""
        return ("prep", "train", self.recipe, *self.train_words)


def parse_env(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the names and values of `KEY=VALUE` texts. Raise UsageError for a text without `=`."""
    variables: list[tuple[str, str]] = []
    for variable in texts:
        name, separator, value = variable.partition("=")
        if not separator:
            what = text("{} has no value", Option("env", variable))
            hint = text("{}", Option("env", f"{variable}=VALUE"))
            raise usage_error(what, "a variable is KEY=VALUE", hint)
        variables.append((name, value))
    return tuple(variables)


def check_text(name: Text | str, value: str) -> None:
    """Raise UsageError for a text with a line break or a null character.

    Args:
        name: Option or argument of the text, for the error.
        value: The text.
    """
    _check_no_null(name, value)
    # `splitlines` drops a last line break: "a\n" is one line for it.
    if len(value.splitlines()) > 1 or value.endswith(("\n", "\r")):
        what = text("{} has more than one line", name)
        raise usage_error(what, repr(value), text("pass one line per {}", name))


def check_variable(name: str) -> None:
    """Raise UsageError for an invalid name of an environment variable."""
    if not _VARIABLE.fullmatch(name):
        why = "a name has letters, digits and underscores"
        hint = text("{}", Option("env", "KEY=VALUE"))
        raise usage_error(f"`{name}` is an invalid name of a variable", why, hint)


def check_label(name: str) -> None:
    """Raise UsageError for a name that Google Cloud or Kubernetes refuses."""
    if not _LABEL.fullmatch(name):
        why = "at most 40 lower-case letters, digits and hyphens, the first of them a letter"
        hint = text("{}", Option("job_name", as_label(name)))
        raise usage_error(f"`{name}` is an invalid name of a job", why, hint)


def as_label(name: str) -> str:
    """Return a name in the form that Google Cloud and Kubernetes accept."""
    hyphenated = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = hyphenated if hyphenated[:1].isalpha() else f"prep-{hyphenated}"
    # The cut may fall on a hyphen, with which no label ends.
    return label[:40].rstrip("-")


def values_of(option: str, words: Sequence[str]) -> tuple[str, ...]:
    """Return the values of an option, e.g. `--set`, among words of `prep train`."""
    values = list[str]()
    for word, next_word in zip(words, [*words[1:], ""]):
        if word == option:
            values.append(next_word)
        elif word.startswith(f"{option}="):
            values.append(word.removeprefix(f"{option}="))
    return tuple(values)


def _check_no_null(name: Text | str, value: str) -> None:
    if "\0" in value:
        raise usage_error(text("{} has a null character", name), repr(value), "remove it")
