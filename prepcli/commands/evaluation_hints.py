"""State the hints of recipe keys as options of `prep eval`, which has no recipe file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from prepcli.commands.evaluation_keys import KEYS_BY_TABLE
from prepcli.errors import PrepError

OPTIONS = {
    "data.fields": "--fields",
    "data.seq_length": "--seq-length",
    "data.tokenizer": "--tokenizer",
    "data.type": "--type",
}
ASSIGNMENT = re.compile(
    r"`(?:(?P<prefix>\w+)\.)?(?P<key>\w+) = (?P<value>[^`]+)`(?: in \[(?P<table>\w+)\])?"
)
OVERRIDE = re.compile(r"`--set (?P<key>[\w.]+)=(?P<value>[^`]+)`")
MENTION = re.compile(r"`(?P<key>data\.\w+)`")


@contextmanager
def option_hints() -> Iterator[None]:
    """Replace lines of a recipe by options of `prep eval` in the PrepErrors of the block."""
    try:
        yield
    except PrepError as error:
        why = ASSIGNMENT.sub(_replace_assignment, error.why)  # it has the hints of several errors
        raise error.with_texts(why=why, hint=to_options(error.hint)) from error.__cause__


def to_options(hint: str) -> str:
    """Return a hint with options in place of lines of a recipe: `type = "json"` becomes `--type json`."""
    hint = ASSIGNMENT.sub(_replace_assignment, hint)
    hint = OVERRIDE.sub(lambda match: _format_option(match["key"], match["value"]), hint)
    return MENTION.sub(lambda match: f"`{OPTIONS.get(match['key'], match['key'])}`", hint)


def _replace_assignment(match: re.Match[str]) -> str:
    """Return the option of a line of a recipe, or the line itself if an evaluation does not use its key."""
    stated = match["prefix"] or match["table"]
    tables = [
        table
        for table, keys in KEYS_BY_TABLE.items()
        if match["key"] in keys and stated in (None, table)
    ]
    return _format_option(f"{tables[0]}.{match['key']}", match["value"]) if tables else match[0]


def _format_option(key: str, value: str) -> str:
    text = value.strip('"')
    if key in OPTIONS:
        return f"`{OPTIONS[key]} {shlex.quote(text)}`"
    return f"`--set {key}={shlex.quote(text)}`"
