"""The VALUE of `--set KEY=VALUE`: TOML, or text without quotes."""

from __future__ import annotations

import re
import shlex
from typing import Any

from trainer.recipe.key_schema import KeySchema, alternatives
from trainer.recipe.toml_values import parse_toml_value

# A shell expands these signs within double quotes too.
SHELL_EXPANDS = re.compile(r"[$`\\!]")
BARE_TEXT = re.compile(r"[\w./,:+-]+")


def parse_override_value(text: str, key_schema: KeySchema | None) -> Any:
    """Parse VALUE as TOML, or keep it as text.

    VALUE is text if it is not valid TOML, or if the key takes text and VALUE is TOML of another
    type: `mesh=8`.

    Args:
        text: VALUE.
        key_schema: JSON schema of the key, or None for an unknown key.
    """
    try:
        value = parse_toml_value(text)
    except (ValueError, RecursionError):
        return text
    schemas = alternatives(key_schema) if key_schema else []
    types = {schema.get("items", schema)["type"] for schema in schemas}
    takes_text = bool(types) and types <= {"string"}
    if takes_text and not isinstance(value, str | list):
        return text
    return value


def override_argument(key: str, toml_value: str, key_schema: KeySchema) -> str:
    """Return KEY=VALUE for a shell command, with as few quotes as the value needs.

    Args:
        key: The key.
        toml_value: Its value as TOML.
        key_schema: JSON schema of the key.
    """
    value = parse_toml_value(toml_value)
    if isinstance(value, str) and BARE_TEXT.fullmatch(value):
        texts = [value, toml_value]
    else:
        texts = [toml_value]
    arguments = (f"{key}={text}" for text in texts)
    shortest = (argument for argument in arguments if _reads_back(argument, value, key_schema))
    return next(shortest, f"{key}={shlex.quote(toml_value)}")


def _reads_back(argument: str, value: Any, key_schema: KeySchema) -> bool:
    """Return whether `--set` reads the value from the argument that a shell passes on."""
    words = shlex.split(argument)
    if len(words) != 1 or SHELL_EXPANDS.search(argument):
        return False
    read = parse_override_value(words[0].partition("=")[2].strip(" \t"), key_schema)
    # `1 == 1.0 == True` in Python, so equal values of other types do not count.
    return type(read) is type(value) and read == value
