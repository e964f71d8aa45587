"""Recognise recipes in YAML and JSON, which other trainers use, and show a line of them as TOML."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.recipe.formatting import BARE_KEY, format_value, to_toml
from trainer.recipe.toml_values import parse_toml_value

_YAML_LINE = re.compile(r"(\s*)([\w.-]+):(?:[ \t]+(.*))?")
_COMMENT = re.compile(r"\s+#.*")
_YAML_WORDS = {"true": "true", "false": "false", "yes": "true", "no": "false", "on": "true", "off": "false"}


@dataclass(frozen=True, slots=True)
class OtherFormat:
    """The format of a file other than TOML.

    Attributes:
        name: Name of the format.
        line: The first line with content, from 1.
        hint: The first lines as TOML, or where recipes are shown.
    """

    name: str
    line: int
    hint: str


def find_other_format(text: str) -> OtherFormat | None:
    r"""Return the format of a text, or None if it looks like TOML.

    Example:
        >>> find_other_format("model:\n  path: gpt2").hint
        'in TOML: `[model]`, then `path = "gpt2"`'
    """
    lines = _content_lines(text)
    if not lines:
        return None
    number, first = lines[0]
    if first.lstrip().startswith("{"):
        return OtherFormat("JSON", number, "`prep recipes` lists recipes in TOML")
    if first.strip() == "---":
        lines = lines[1:]
    matches = [_YAML_LINE.fullmatch(line) for _, line in lines[:2]]
    if not matches or matches[0] is None:
        return None
    shown = [_as_toml(match) for match in matches if match is not None]
    is_table = not matches[0][3]
    toml = ", then ".join(f"`{line}`" for line in (shown if is_table else shown[:1]))
    return OtherFormat("YAML", lines[0][0], f"in TOML: {toml}")


def _content_lines(text: str) -> list[tuple[int, str]]:
    """Return the first lines with their numbers, without empty lines and comments."""
    numbered = enumerate(text.split("\n")[:1000], 1)
    content = [(number, line) for number, line in numbered if line.strip() and not line.lstrip().startswith("#")]
    return content[:3]


def _as_toml(match: re.Match[str]) -> str:
    """Return a line of YAML, a key with or without a value, as TOML."""
    key = match[2] if BARE_KEY.fullmatch(match[2]) else to_toml(match[2])
    value = _COMMENT.sub("", match[3] or "").strip()
    if not value:
        return f"[{key}]"
    if word := _YAML_WORDS.get(value.lower()):
        return f"{key} = {word}"
    try:
        parsed = parse_toml_value(value)
    except (ValueError, RecursionError, KeyError):
        parsed = value
    return f"{key} = {format_value(parsed)}"
