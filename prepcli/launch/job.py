"""A job of `prep launch`: a command, and the environment of its processes. The functions do no I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from prepcli.core.errors import Option, text, usage_error
from prepcli.launch.command import LaunchedCommand, check_no_null, check_text

# Restarts of a job that exits with 75 each time.
MAX_RESTARTS = 100
DEFAULT_GRACE_S = 120

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# RFC 1035, short enough for the suffixes of pods.
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """A command for one or several processes.

    Attributes:
        command: The command.
        name: Name of the job.
        setup: Shell lines before the command.
        env: Environment variables.
        max_restarts: Maximal number of restarts after exit code 75 or a kill.
    """

    command: LaunchedCommand
    name: str
    setup: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    max_restarts: int = MAX_RESTARTS

    def __post_init__(self) -> None:
        """Raise UsageError if a shell script cannot contain the texts."""
        check_text(text("{}", Option("job_name")), self.name)
        for line in self.setup:
            check_text(text("{}", Option("setup")), line)
        for name, value in self.env:
            check_variable(name)
            check_no_null(text("{}", Option("env", name)), value)


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


def check_variable(name: str) -> None:
    """Raise UsageError for an invalid name of an environment variable."""
    if not _VARIABLE.fullmatch(name):
        why = "a name has letters, digits and underscores"
        hint = text("{}", Option("env", "KEY=VALUE"))
        raise usage_error(f"`{name}` is an invalid name of a variable", why, hint)


def check_label(name: str) -> None:
    """Raise UsageError for an invalid name of a job in Google Cloud or Kubernetes."""
    if not _LABEL.fullmatch(name):
        why = "at most 40 lower-case letters, digits and hyphens, the first of them a letter"
        hint = text("{}", Option("job_name", as_label(name)))
        raise usage_error(f"`{name}` is an invalid name of a job", why, hint)


def as_label(name: str) -> str:
    """Return a name as a valid label of Google Cloud and Kubernetes, e.g. `My run` -> `my-run`."""
    hyphenated = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = hyphenated if hyphenated[:1].isalpha() else f"prep-{hyphenated}"
    # The cut may fall on a hyphen, with which no label ends.
    return label[:40].rstrip("-")
